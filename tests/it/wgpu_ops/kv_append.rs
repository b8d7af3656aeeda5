//! `kv_append`: every byte that is written, and every other byte of the buffer unchanged.

use mla_support::suite::kv_append::{nearest_code, ties};

use super::*;

/// Bytes of `count` input elements that are hard for every dtype.
fn hard_inputs(dtype: Dtype, count: usize, random: &mut Random, hard: &[u32]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..count {
        let bits = random.bits();
        match dtype {
            Dtype::F32 if bits.is_multiple_of(3) => bytes.extend(random.bits().to_le_bytes()),
            Dtype::F32 => bytes.extend(hard[random.bits() as usize % hard.len()].to_le_bytes()),
            _ => bytes.extend((bits as u16).to_le_bytes()),
        }
    }
    bytes
}

/// What the host stores for elements of `bytes`.
fn host_convert(bytes: &[u8], input: Dtype, cache: Dtype, k_scale: f32) -> Vec<u8> {
    if input == cache {
        return bytes.to_vec();
    }
    let scale = if cache == Dtype::E4m3 { k_scale } else { 1.0 };
    let divided = |x: f32| if scale == 1.0 { x } else { x / scale };
    let values: Vec<f32> = input.decode_all(bytes).into_iter().map(divided).collect();
    cache.encode_all(&values)
}

struct AppendCase {
    spec: KvAppend,
    tokens: usize,
    k_scale: f32,
}

impl AppendCase {
    /// A strided append into layer 1 of a cache that holds two, with gaps everywhere; every byte of the buffer is
    /// compared.
    fn run(&self, gpu: &Gpu, seed: u64, hard: &[u32]) {
        let AppendCase { spec, tokens, k_scale } = *self;
        let (latent, rope) = (spec.shape.kv_lora_rank as usize, spec.shape.qk_rope_head_dim as usize);
        let (input, cache, row) = (spec.input.bytes(), spec.kv.dtype().bytes(), latent + rope);
        let mut random = Random(seed);
        let page = spec.kv.page_size as usize * row;
        let (block_stride, pages) = (page + 8, spec.kv.num_pages as usize);
        let layer_stride = block_stride * pages + 8;

        // one buffer holds latent and rotary rows, as a fused projection leaves them
        let token_stride = row + 12;
        let rows = hard_inputs(spec.input, 4 + tokens * token_stride, &mut random, hard);
        let before: Vec<u8> = (0..(2 * layer_stride + 8) * cache).map(|i| (i % 251) as u8).collect();
        let num_slots = spec.kv.num_slots() as usize;
        let slots: Vec<i64> =
            (0..tokens).map(|t| if t % 5 == 3 { -1 } else { ((t * 7 + 3) % num_slots) as i64 }).collect();

        let (rows_buffer, kv_buffer) = (upload(gpu, &rows), upload(gpu, &before));
        let view = |offset: usize| View {
            buffer: &rows_buffer,
            offset: offset as u64,
            token_stride: token_stride as u64,
            head_stride: 1,
        };
        let layer = KvAppendArgs {
            kv_c: view(4),
            k_pe: view(4 + latent),
            kv: KvView {
                buffer: &kv_buffer,
                offset: 8 * cache as u64,
                layer_stride: (layer_stride * cache) as u64,
                layer: 1,
                block_stride: (block_stride * cache) as u64,
                slabs: wgpu_mla::Slabs::ONE,
            },
            k_scale,
            guard: None,
        };
        let op = gpu.compile(spec).expect("compiles");
        let mut step = op.step(0).expect("a step");
        let binding = op.bind(&layer, tokens as u32).expect("binds");
        // a first upload that is too small, so that the table grows
        op.prepare(&mut step, &slots[..1]).expect("prepares");
        op.prepare(&mut step, &slots).expect("prepares");
        op.run(&step, &binding).expect("runs");

        let mut want = before;
        for (t, &slot) in slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
            let from = (4 + t * token_stride) * input;
            let bytes = host_convert(&rows[from..from + row * input], spec.input, spec.kv.dtype(), k_scale);
            let (in_page, slot_page) =
                (slot as usize % spec.kv.page_size as usize, slot as usize / spec.kv.page_size as usize);
            let at = (8 + layer_stride + slot_page * block_stride + in_page * row) * cache;
            want[at..at + row * cache].copy_from_slice(&bytes);
        }
        let got = download(gpu, &kv_buffer);
        let wrong = (0..want.len()).find(|&i| got[i] != want[i]);
        assert_eq!(wrong, None, "first wrong byte; {spec:?}, k_scale {k_scale}");
    }
}

fn append_is_byte_exact_for_every_pair_of_dtypes() -> Outcome {
    let gpu = gpu()?;
    let hard = hard_patterns();
    for input in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        for dtype in Dtype::ALL {
            let spec = KvAppend {
                shape: SHAPE,
                kv: KvSpec { layout: dtype.into(), page_size: 48, num_pages: 3 },
                input,
                guard: false,
            };
            AppendCase { spec, tokens: 67, k_scale: 1.0 }.run(gpu, 7, &hard);
        }
        // powers of two are exact, however small or large
        for k_scale in [0.25, 64.0, (-126f32).exp2(), (-110f32).exp2(), 100f32.exp2(), 127f32.exp2()] {
            let kv = KvSpec { layout: Dtype::E4m3.into(), page_size: 1, num_pages: 101 };
            AppendCase { spec: KvAppend { shape: SHAPE, kv, input, guard: false }, tokens: 33, k_scale }
                .run(gpu, 9, &hard);
        }
    }
    let shape = MlaShape { num_heads: 1, kv_lora_rank: 512, qk_rope_head_dim: 0 };
    let kv = KvSpec { layout: Dtype::Bf16.into(), page_size: 256, num_pages: 1 };
    AppendCase { spec: KvAppend { shape, kv, input: Dtype::F32, guard: false }, tokens: 5, k_scale: 1.0 }
        .run(gpu, 3, &hard);
    Ok(())
}

fn append_divides_exactly_by_any_scale() -> Outcome {
    let gpu = gpu()?;
    let (ties, mut random) = (ties(), Random(5));
    let row = SHAPE.row_elems() as usize;
    let every_code: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let usual = (0..1 << 16).map(|_| (random.unit() * 20.0).to_bits());
    let all_f32: Vec<u8> = usual.chain(hard_patterns()).flat_map(u32::to_le_bytes).collect();
    for (input, mut bytes) in
        [(Dtype::Bf16, every_code.clone()), (Dtype::F16, every_code), (Dtype::F32, all_f32)]
    {
        bytes.resize(bytes.len().next_multiple_of(row * input.bytes()), 0);
        let tokens = bytes.len() / (row * input.bytes());
        let kv = KvSpec { layout: Dtype::E4m3.into(), page_size: 64, num_pages: tokens.div_ceil(64) as u32 };
        let spec = KvAppend { shape: SHAPE, kv, input, guard: false };
        let (rows, cache) = (upload(gpu, &bytes), upload(gpu, &vec![0; kv.num_slots() as usize * row]));
        let view = |offset| View { buffer: &rows, offset, token_stride: row as u64, head_stride: 1 };
        let op = gpu.compile(spec).expect("compiles");
        let mut step = op.step(0).expect("a step");
        let slots: Vec<i64> = (0..tokens as i64).collect();
        op.prepare(&mut step, &slots).expect("prepares");
        // 1.75 and 0.4375 put many 16-bit values exactly on ties; 448 and 0.01 reach both ends of the range; the others take both
        // the shader's fast path and its integer path, powers of two among them.
        for k_scale in [1.0, 1.75, 0.4375, 1.375, 0.037, 448.0, 0.01]
            .into_iter()
            .chain([-101f32, -100., -99.5, 99.5, 100., 100.5].map(f32::exp2))
            .chain([4e-38, 3e38])
        {
            let layer = KvAppendArgs {
                kv_c: view(0),
                k_pe: view(256),
                kv: KvView::dense(&cache, &decode(kv)),
                k_scale,
                guard: None,
            };
            let binding = op.bind(&layer, tokens as u32).expect("binds");
            op.run(&step, &binding).expect("runs");
            for (got, x) in download(gpu, &cache).into_iter().zip(input.decode_all(&bytes)) {
                let want = nearest_code(f64::from(x) / f64::from(k_scale), &ties);
                assert_eq!(got, want, "{input} {x} / {k_scale}");
            }
        }
    }
    Ok(())
}

fn append_binds_a_window_of_a_buffer_that_is_too_large() -> Outcome {
    let limits = wgpu::Limits { max_storage_buffer_binding_size: 1 << 18, ..wgpu::Limits::default() };
    let gpu = &open(limits)?;
    let kv = KvSpec { layout: Dtype::Bf16.into(), page_size: 16, num_pages: 13 };
    let spec = KvAppend { shape: SHAPE, kv, input: Dtype::Bf16, guard: false };
    let row = [3u16, 5, 7, 11].repeat(72);
    let (rows, cache) = (upload(gpu, bytemuck::cast_slice(&row)), upload(gpu, &vec![0; 1 << 20]));
    let view = |offset| View { buffer: &rows, offset, token_stride: 288, head_stride: 1 };
    let layer_elems = 16 * 288 * 13 + 8;
    let kv_view =
        KvView { offset: 16, layer_stride: 2 * layer_elems, layer: 3, ..KvView::dense(&cache, &decode(kv)) };
    let layer =
        KvAppendArgs { kv_c: view(0), k_pe: view(256), kv: kv_view.clone(), k_scale: 1.0, guard: None };
    let op = gpu.compile(spec).expect("compiles");
    let binding = op.bind(&layer, 1).expect("a window of 120 KB fits");
    let mut step = op.step(0).expect("a step");
    op.prepare(&mut step, &[207]).expect("prepares");
    op.run(&step, &binding).expect("runs");
    let got = download(gpu, &cache);
    let got: &[u16] = bytemuck::cast_slice(&got);
    let at = 8 + 3 * layer_elems as usize + 207 * 288;
    assert_eq!(got[at..at + 288], row);
    assert_eq!(got.iter().filter(|x| **x != 0).count(), 288, "nothing else was written");

    let kv = KvSpec { num_pages: 40, ..kv };
    let op = gpu.compile(KvAppend { kv, ..spec }).expect("compiles");
    let first = KvAppendArgs { kv: KvView { layer: 0, ..kv_view }, ..layer };
    let error = op.bind(&first, 1).expect_err("a layer of 368 KB does not fit");
    assert!(matches!(error, Error::Limit { what: "kv", limit: 0x40000, .. }), "{error}");
    Ok(())
}

fn a_table_prepared_again_after_record_stays_inside_the_binding() -> Outcome {
    let gpu = gpu()?;
    let kv = KvSpec { layout: Dtype::F16.into(), page_size: 8, num_pages: 5 };
    let spec = KvAppend { shape: SHAPE, kv, input: Dtype::F16, guard: false };
    let (rows, cache) = (upload(gpu, &[1; 40 * 288 * 2]), upload(gpu, &[0; 40 * 288 * 2]));
    let view = |offset| View { buffer: &rows, offset, token_stride: 288, head_stride: 1 };
    let layer = KvAppendArgs {
        kv_c: view(0),
        k_pe: view(256),
        kv: KvView::dense(&cache, &decode(kv)),
        k_scale: 1.0,
        guard: None,
    };
    let op = gpu.compile(spec).expect("compiles");
    let binding = op.bind(&layer, 2).expect("binds");
    let mut step = op.step(0).expect("a step");
    op.prepare(&mut step, &[30, 31]).expect("prepares");
    gpu.submit(|mut pass| {
        op.record_on(&mut pass, &step, &binding)?;
        // Wrong: the same step's table is uploaded before the submit. It fits, so the recorded commands see it.
        let slots: Vec<i64> = (0..40).collect();
        op.prepare(&mut step, &slots)
    })
    .expect("runs");
    let written = download(gpu, &cache).iter().filter(|byte| **byte == 1).count();
    assert_eq!(written, 2 * 288 * 2, "only the binding's two tokens");
    Ok(())
}

crate::tests![
    append_is_byte_exact_for_every_pair_of_dtypes,
    append_divides_exactly_by_any_scale,
    append_binds_a_window_of_a_buffer_that_is_too_large,
    a_table_prepared_again_after_record_stays_inside_the_binding,
];
