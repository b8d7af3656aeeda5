//! Wrong arguments of a layer, and layers inside of large buffers.

use mla_support::Outcome;
use mla_support::paint::{Make, sequences};
use mla_support::rig::{Rig, small};
use wgpu_mla::{Device, Dtype, Error, KvView, MlaDecodeArgs, Query, View, wgpu};

use super::{FIXED, device};

/// Each wrong layer by the error that names it.
fn wrong_layers() -> Outcome {
    let rig = Rig::shared()?;
    let loaded = rig.load(small(&[(37, 1), (90, 2)]));
    let good = MlaDecodeArgs::dense(rig.mla.op(), &loaded.q, &loaded.kv, &loaded.out, &loaded.lse, 0.1);
    let refused = |layer: &MlaDecodeArgs<&wgpu::Buffer>| rig.mla.bind(layer, 3).expect_err("a wrong layer");
    assert!(rig.mla.bind(&good, 3).is_ok());

    for bad in [0.0, -0.0, -1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for (name, layer) in [
            ("softmax_scale", MlaDecodeArgs { softmax_scale: bad, ..good.clone() }),
            ("k_scale", MlaDecodeArgs { k_scale: bad, ..good.clone() }),
            ("q_scale", MlaDecodeArgs { q_scale: bad, ..good.clone() }),
        ] {
            let error = refused(&layer);
            assert!(matches!(error, Error::Scale { what, .. } if what == name), "{name} {bad}: {error}");
        }
    }

    // A buffer that is written must not be read, nor be written twice.
    let in_buffer = |view: View<&wgpu::Buffer>, buffer| View { buffer, ..view };
    let large = rig.gpu.buffer(1 << 20).expect("a buffer");
    let (out, lse) = (in_buffer(good.out, &large), in_buffer(good.lse, &large));
    let (nope, rope) = (View::dense(&loaded.q, 6, 256), View::dense(&loaded.q, 6, 32));
    let large_nope = Query::Split { q_nope: in_buffer(nope, &large), q_pe: rope };
    let large_rope = Query::Split { q_nope: nope, q_pe: in_buffer(rope, &large) };
    let large_kv = KvView { buffer: &large, ..good.kv.clone() };
    for (names, layer) in [
        (("q_nope", "out"), MlaDecodeArgs { out, query: large_nope, ..good.clone() }),
        (("q_pe", "out"), MlaDecodeArgs { out, query: large_rope, ..good.clone() }),
        (("kv", "out"), MlaDecodeArgs { out, kv: large_kv.clone(), ..good.clone() }),
        (("q_nope", "lse"), MlaDecodeArgs { lse, query: large_nope, ..good.clone() }),
        (("q_pe", "lse"), MlaDecodeArgs { lse, query: large_rope, ..good.clone() }),
        (("kv", "lse"), MlaDecodeArgs { lse, kv: large_kv, ..good.clone() }),
        (("out", "lse"), MlaDecodeArgs { out, lse, ..good.clone() }),
    ] {
        let (a, b) = names;
        assert_eq!(refused(&layer), Error::Aliased { a, b });
    }

    let no_storage = rig.gpu.device().create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 1 << 20,
        usage: wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::UNIFORM,
        mapped_at_creation: false,
    });
    for (name, layer) in [
        ("q_nope", MlaDecodeArgs { query: Query::Whole(View::dense(&no_storage, 6, 288)), ..good.clone() }),
        ("kv", MlaDecodeArgs { kv: KvView { buffer: &no_storage, ..good.kv.clone() }, ..good.clone() }),
        ("out", MlaDecodeArgs { out: in_buffer(good.out, &no_storage), ..good.clone() }),
        ("lse", MlaDecodeArgs { lse: in_buffer(good.lse, &no_storage), ..good.clone() }),
    ] {
        let error = refused(&layer);
        assert!(
            matches!(error, Error::BufferUsage { what, usage: "STORAGE" } if what == name),
            "{name}: {error}"
        );
    }

    let tiny = rig.gpu.buffer(4).expect("a buffer");
    for (name, layer) in [
        ("q_nope", MlaDecodeArgs { query: Query::Whole(View::dense(&tiny, 6, 288)), ..good.clone() }),
        ("kv", MlaDecodeArgs { kv: KvView { buffer: &tiny, ..good.kv.clone() }, ..good.clone() }),
        ("out", MlaDecodeArgs { out: in_buffer(good.out, &tiny), ..good.clone() }),
        ("lse", MlaDecodeArgs { lse: in_buffer(good.lse, &tiny), ..good.clone() }),
        ("out", MlaDecodeArgs { out: View { offset: 8, ..good.out }, ..good.clone() }),
        (
            "kv",
            MlaDecodeArgs {
                kv: KvView { layer: 1, layer_stride: good.kv.block_stride, ..good.kv.clone() },
                ..good.clone()
            },
        ),
    ] {
        let error = refused(&layer);
        assert!(matches!(error, Error::BufferTooSmall { what, .. } if what == name), "{name}: {error}");
    }

    let whole = View::dense(&loaded.q, 6, 288);
    for (name, layer) in [
        ("q_nope", MlaDecodeArgs { query: Query::Whole(View { offset: 4, ..whole }), ..good.clone() }),
        (
            "q_nope",
            MlaDecodeArgs {
                query: Query::Whole(View { token_stride: 6 * 288 - 1, ..whole }),
                ..good.clone()
            },
        ),
        ("kv offset", MlaDecodeArgs { kv: KvView { offset: 2, ..good.kv.clone() }, ..good.clone() }),
        (
            "kv layer_stride",
            MlaDecodeArgs { kv: KvView { layer_stride: 24, ..good.kv.clone() }, ..good.clone() },
        ),
        (
            "kv block_stride",
            MlaDecodeArgs {
                kv: KvView { block_stride: (16 * 288 + 4) * 2, ..good.kv.clone() },
                ..good.clone()
            },
        ),
        ("out", MlaDecodeArgs { out: View { head_stride: 260, ..good.out }, ..good.clone() }),
    ] {
        let error = refused(&layer);
        assert!(matches!(error, Error::Alignment { what, .. } if what == name), "{name}: {error}");
    }
    Ok(())
}

/// A layer of a cache that is larger than a binding is reached through a window; a layer that is itself larger is not.
fn a_window_into_a_large_cache() -> Outcome {
    let problem = small(&[(37, 1), (90, 2)]);
    let layer_bytes = problem.kv.len();
    let limit = layer_bytes as u64 + 4096;
    let gpu = device(|_, limits| limits.max_storage_buffer_binding_size = limit)?;
    let rig = Rig::on(gpu, &problem.spec);
    let loaded = rig.load(problem.clone());
    // The second of three layers, poison in the others; an odd number of octs in front of it.
    let gap = 24 * 2;
    let mut bytes = vec![0xFF; gap + 3 * layer_bytes];
    bytes[gap + layer_bytes..][..layer_bytes].copy_from_slice(&problem.kv);
    let cache = rig.buffer(&bytes);
    assert!(cache.size() > limit);
    let layer_stride = layer_bytes as u64;
    let dense = MlaDecodeArgs::dense(
        rig.mla.op(),
        &loaded.q,
        &loaded.kv,
        &loaded.out,
        &loaded.lse,
        problem.softmax_scale,
    );
    let kv = KvView { buffer: &cache, offset: gap as u64, layer_stride, layer: 1, ..dense.kv.clone() };
    let binding = rig.mla.bind(&MlaDecodeArgs { kv: kv.clone(), ..dense.clone() }, 3).expect("a window");
    let step = rig.step(&problem, FIXED);
    let mut encoder = rig.encoder();
    rig.mla.record(&mut encoder, &step, &binding).expect("recorded");
    rig.submit(encoder);
    rig.check(&loaded, &problem);

    // Pages spread over all three layers.
    let wide = KvView { block_stride: dense.kv.block_stride * 3, layer: 0, offset: 0, ..kv };
    let error = rig.mla.bind(&MlaDecodeArgs { kv: wide, ..dense }, 3).expect_err("no window is that wide");
    assert!(matches!(error, Error::Limit { what: "kv", .. }), "{error}");
    Ok(())
}

/// Arrays that are not used, in buffers that no binding covers: no rotary part, and no query tokens.
fn unused_arrays_in_large_buffers() -> Outcome {
    let gpu = device(|_, limits| limits.max_storage_buffer_binding_size = 2 << 20)?;
    let problem = Make {
        dims: (512, 0),
        heads: 6,
        cache: Dtype::F16,
        query: Dtype::F16,
        sequences: sequences(&[(20, 1), (40, 2)]),
        ..Make::default()
    }
    .build();
    let rig = Rig::on(gpu, &problem.spec);
    let loaded = rig.load(problem.clone());
    let offset = 1 << 20;
    let mut bytes = vec![0xFF; 4 << 20];
    bytes[offset * 2..][..problem.q.len()].copy_from_slice(&problem.q);
    let large = rig.buffer(&bytes);
    let dense = MlaDecodeArgs::dense(
        rig.mla.op(),
        &loaded.q,
        &loaded.kv,
        &loaded.out,
        &loaded.lse,
        problem.softmax_scale,
    );
    let at = View { offset: offset as u64, ..View::dense(&large, 6, 512) };
    for query in [Query::Whole(at), Query::Split { q_nope: at, q_pe: at }] {
        let binding = rig.mla.bind(&MlaDecodeArgs { query, ..dense.clone() }, 3).expect("a window");
        let step = rig.step(&problem, FIXED);
        rig.poison(&loaded);
        let mut encoder = rig.encoder();
        rig.mla.record(&mut encoder, &step, &binding).expect("recorded");
        rig.submit(encoder);
        rig.check(&loaded, &problem);
        // A batch that may be empty: no token of the large array is used.
        for offset in [at.offset, large.size() / 2, u64::MAX / 8 * 8] {
            let query = Query::Whole(View { offset, ..at });
            let bound = rig.mla.bind(&MlaDecodeArgs { query, ..dense.clone() }, 0);
            assert!(matches!(bound, Ok(_) | Err(Error::BufferTooSmall { .. })), "{offset}: {bound:?}");
        }
    }
    Ok(())
}

/// An empty batch needs no rows, but a binding has to hold an element: too small is an error, not a failed submit.
fn empty_batches_in_tiny_buffers() -> Outcome {
    let rig = Rig::shared()?;
    let loaded = rig.load(small(&[(37, 1)]));
    let tiny = [4, 16, 32].map(|bytes| rig.gpu.buffer(bytes).expect("a buffer"));
    // A grid of some work items for an empty batch.
    let mut step = rig.step(&loaded.problem, FIXED);
    rig.prepare(&mut step, &small(&[(37, 0)]), FIXED);
    for buffer in &tiny {
        let layer = MlaDecodeArgs::dense(rig.mla.op(), buffer, &loaded.kv, &loaded.out, &loaded.lse, 0.1);
        let out = View::dense(buffer, 6, 256);
        let query = Query::Whole(View::dense(&loaded.q, 6, 288));
        for layer in [layer.clone(), MlaDecodeArgs { out, query, ..layer }] {
            match rig.mla.bind(&layer, 0) {
                Err(Error::BufferTooSmall { .. }) => assert!(buffer.size() < 32),
                Err(error) => panic!("{error}"),
                Ok(binding) => {
                    let scope = rig.gpu.device().push_error_scope(wgpu::ErrorFilter::Validation);
                    let mut encoder = rig.encoder();
                    rig.mla.record(&mut encoder, &step, &binding).expect("recorded");
                    rig.submit(encoder);
                    let error = pollster::block_on(scope.pop()).map(|error| error.to_string());
                    assert_eq!(error, None, "{} bytes", buffer.size());
                }
            }
        }
    }
    Ok(())
}

crate::tests![
    wrong_layers,
    a_window_into_a_large_cache,
    unused_arrays_in_large_buffers,
    empty_batches_in_tiny_buffers,
];
