//! Steps that serve many batches, and strides.

use super::*;

fn a_step_serves_many_batches_and_layers() {
    let Small { cpu, q, kv, out, lse } = small();
    let spec = small_spec();
    let mla = cpu.compile(spec).unwrap();
    let binding = mla.bind(&MlaDecodeArgs::dense(&spec, &q, &kv, &out, &lse, 0.1), 2).unwrap();
    let mut step = mla.step(Capacity::default()).unwrap();
    for len in [1, 64, 3, 40, 0] {
        let policy = if len == 40 { SplitPolicy::FixedTokens(8) } else { SplitPolicy::Auto };
        let plan = Plan::new(&spec, &mla.tiling(), &Batch::new(&[len], &[0, 1]), policy).unwrap();
        let csr = PageTable::Csr {
            kv_indptr: &[0, spec.kv.pages_for(len as u32) as i32],
            kv_indices: &[3, 1, 0, 2],
        };
        mla.prepare(&mut step, (&plan, csr)).unwrap();
        // Two layers at once from two threads, with outputs of their own.
        std::thread::scope(|scope| {
            scope.spawn(|| mla.run(&step, &binding).unwrap());
            mla.run(&step, &binding).unwrap();
        });
        let got = Dtype::F32.decode_all(&cpu.download(&lse, 8).unwrap());
        let want = (len as f32).ln();
        assert!(got.iter().all(|&x| x == want || (x - want).abs() < 1e-6), "{len}: {got:?} for {want}");
    }
}

/// Offsets and strides move rows, and change nothing else, in the output or around it.
fn strides_move_rows_only() {
    let Small { cpu, q, kv, out, lse } = small();
    let spec = MlaDecode { out: Dtype::F16, ..small_spec() };
    let values =
        |stream, count: u64| Dtype::F16.encode_all(&(0..count).map(|i| noise(stream, i)).collect::<Vec<_>>());
    let (queries, pages) = (values(1, 2 * 2 * 288), values(2, 4 * 16 * 288));
    cpu.upload(&q, 0, &queries).unwrap();
    cpu.upload(&kv, 0, &pages).unwrap();
    let mla = cpu.compile(spec).unwrap();
    let plan =
        Plan::new(&spec, &mla.tiling(), &Batch::new(&[33], &[0, 2]), SplitPolicy::FixedTokens(20)).unwrap();
    let mut step = mla.step(Capacity::of(&plan)).unwrap();
    let table = PageTable::Dense { block_table: &[2, 0, 3], max_pages: 3 };
    mla.prepare(&mut step, (&plan, table)).unwrap();
    let dense = MlaDecodeArgs::dense(&spec, &q, &kv, &out, &lse, 0.1);
    mla.run(&step, &mla.bind(&dense, 2).unwrap()).unwrap();

    // Queries apart, pages 8 elements apart in the second layer of a buffer, rows of the output by head.
    let [q_nope, q_pe, kv2, out2, lse2] =
        [1 << 12, 1 << 12, 1 << 18, 1 << 13, 1 << 8].map(|n| cpu.buffer(n).unwrap());
    for (row, bytes) in queries.chunks(288 * 2).enumerate() {
        cpu.upload(&q_nope, 16 + row as u64 * 264 * 2, &bytes[..512]).unwrap();
        cpu.upload(&q_pe, row as u64 * 32 * 2, &bytes[512..]).unwrap();
    }
    let (page, block_stride) = (16 * 288, 16 * 288 + 8);
    for (i, bytes) in pages.chunks(page * 2).enumerate() {
        cpu.upload(&kv2, (8 + 20_000 + i as u64 * block_stride) * 2, bytes).unwrap();
    }
    cpu.upload(&out2, 0, &[0xA5; 1 << 13]).unwrap();
    let strided = MlaDecodeArgs {
        query: Query::Split {
            q_nope: View { buffer: &q_nope, offset: 8, token_stride: 528, head_stride: 264 },
            q_pe: View::dense(&q_pe, 2, 32),
        },
        kv: KvView {
            buffer: &kv2,
            offset: 8 * 2,
            layer_stride: 20_000 * 2,
            layer: 1,
            block_stride: block_stride * 2,
            slabs: wgpu_mla::Slabs::ONE,
        },
        out: View { buffer: &out2, offset: 16, token_stride: 256, head_stride: 600 },
        lse: View { buffer: &lse2, offset: 3, token_stride: 1, head_stride: 5 },
        ..dense
    };
    mla.run(&step, &mla.bind(&strided, 2).unwrap()).unwrap();
    let (a, b) = (cpu.download(&out, 2048).unwrap(), cpu.download(&out2, 1 << 13).unwrap());
    let (c, d) = (cpu.download(&lse, 16).unwrap(), cpu.download(&lse2, 1 << 8).unwrap());
    let mut want = vec![0xA5; 1 << 13];
    for (token, head) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let (from, to) = (token * 2 + head, 16 + token * 256 + head * 600);
        want[to * 2..][..512].copy_from_slice(&a[from * 512..][..512]);
        assert_eq!(c[from * 4..][..4], d[(3 + token + head * 5) * 4..][..4]);
    }
    assert!(b == want && a.iter().any(|&x| x != 0));
}

crate::tests![a_step_serves_many_batches_and_layers, strides_move_rows_only,];
