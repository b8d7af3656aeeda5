//! `kv_copy_pages`.

use mla_support::cache::shape_of_row;

use super::*;

fn pages_are_copied_bit_for_bit() -> Outcome {
    let gpu = gpu()?;
    // wide units; pages with a gap behind them; and a base that is no multiple of 16 bytes
    for (dtype, page_size, row_elems, offset, gap) in [
        (Dtype::Bf16, 16, 576, 0, 0),
        (Dtype::E4m3, 3, 288, 8, 8),
        (Dtype::E4m3, 1, 576, 8, 0),
        (Dtype::F32, 7, 288, 8, 8),
    ] {
        let kv = KvSpec { layout: dtype.into(), page_size, num_pages: 9 };
        let spec = KvCopyPages { shape: shape_of_row(row_elems as usize), kv };
        let page = (page_size * row_elems) as usize * dtype.bytes();
        let stride = page + gap * dtype.bytes();
        let base = offset * dtype.bytes();
        let before: Vec<u8> = (0..base + 9 * stride).map(|i| (i * i % 251) as u8).collect();
        let kv = upload(gpu, &before);
        let view = KvView {
            buffer: &kv,
            offset: base as u64,
            layer_stride: 0,
            layer: 0,
            block_stride: stride as u64,
            slabs: wgpu_mla::Slabs::ONE,
        };
        let op = gpu.compile(spec).expect("compiles");
        let binding = op.bind(&view, ()).expect("binds");
        let mut step = op.step(0).expect("a step");
        let copies = [(0u32, 8u32), (3, 1), (0, 5)];
        op.prepare(&mut step, &copies).expect("prepares");
        op.run(&step, &binding).expect("runs");
        let mut want = before;
        for (from, to) in copies {
            let from = base + from as usize * stride;
            want.copy_within(from..from + page, base + to as usize * stride);
        }
        assert!(download(gpu, &kv)[..want.len()] == want, "{spec:?}");
        // an empty list is no work
        op.prepare(&mut step, &[]).expect("prepares");
        op.run(&step, &binding).expect("runs");
        assert!(download(gpu, &kv)[..want.len()] == want, "{spec:?}");
    }
    Ok(())
}

crate::tests![pages_are_copied_bit_for_bit,];
