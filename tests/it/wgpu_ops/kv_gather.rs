//! `kv_gather`: scales of every kind, and tables that change under a binding.

use super::*;

const KV: KvSpec = KvSpec { layout: wgpu_mla::KvLayout::Plain(Dtype::E4m3), page_size: 4, num_pages: 3 };

fn range(begin: u32, tokens: u32, out_row: u32) -> GatherRange {
    GatherRange { sequence: 0, begin, tokens, out_row }
}

/// Every code times scales of every kind: subnormal, ordinary, close to overflow.
fn gather_multiplies_as_the_host_does() -> Outcome {
    let gpu = gpu()?;
    let codes: Vec<u8> = (0..12 * 288).map(|i| (i * 5 + i / 288) as u8).collect();
    let cache = upload(gpu, &codes);
    let mut random = Random(9);
    let mut scales =
        vec![1.0, 0.37, f32::MAX, f32::MIN_POSITIVE, f32::from_bits(1), f32::from_bits(0x7F_FFFF), 1.5, 0.75];
    // Any mantissa with any exponent; those of few bits give ties.
    scales.extend((1..255).map(|e| f32::from_bits(e << 23 | random.bits() >> 9)));
    scales.extend((1..255).map(|e| f32::from_bits(e << 23 | (random.bits() >> 9 & 0x7F_F000 | 0x800))));
    scales.extend((0..60).map(|_| f32::from_bits(random.bits() >> 9 | 1)));
    for output in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        let spec = KvGather { shape: SHAPE, kv: KV, output };
        let op = gpu.compile(spec).expect("compiles");
        let out = upload(gpu, &vec![0; 288 * output.bytes()]);
        let mut step = op.step(0).expect("a step");
        let pages = PageTable::Dense { block_table: &[0], max_pages: 1 };
        let batch = GatherBatch { pages, seq_lens: &[1], ranges: &[range(0, 1, 0)] };
        op.prepare(&mut step, batch).expect("prepares");
        for &k_scale in &scales {
            let args = KvGatherArgs {
                kv: KvView::dense(&cache, &decode(KV)),
                k_scale,
                out: View::dense(&out, 1, 288),
            };
            let binding = op.bind(&args, 1).expect("binds");
            op.run(&step, &binding).expect("runs");
            let mut want = Vec::new();
            for &code in &codes[..288] {
                match code & 0x7F {
                    0x7F => {
                        output.encode(f32::NAN.copysign(if code == 0x7F { 1.0 } else { -1.0 }), &mut want)
                    }
                    _ => output.encode(e4m3_decode(code) * k_scale, &mut want),
                }
            }
            let got = download(gpu, &out);
            let wrong = got.chunks(output.bytes()).zip(want.chunks(output.bytes())).position(|(a, b)| a != b);
            assert_eq!(wrong.map(|at| codes[at]), None, "{output}, k_scale {k_scale:e}");
        }
    }
    Ok(())
}

fn one_binding_of_a_gather_serves_every_step() -> Outcome {
    let gpu = gpu()?;
    let kv = KvSpec { layout: Dtype::F32.into(), ..KV };
    let spec = KvGather { shape: SHAPE, kv, output: Dtype::F32 };
    // A row holds its slot.
    let values: Vec<f32> = (0..12 * 288).map(|i| (i / 288) as f32).collect();
    let (cache, out) = (upload(gpu, bytemuck::cast_slice(&values)), upload(gpu, &[0; 6 * 288 * 4]));
    let args =
        KvGatherArgs { kv: KvView::dense(&cache, &decode(kv)), k_scale: 1.0, out: View::dense(&out, 1, 288) };
    let op = gpu.compile(spec).expect("compiles");
    let binding = op.bind(&args, 4).expect("binds");
    let mut step = op.step(0).expect("a step");
    let prepare = |step: &mut Step<_, _>, table: &[i32], len: i32, ranges: &[GatherRange]| {
        let pages = PageTable::Dense { block_table: table, max_pages: table.len() as u32 };
        op.prepare(step, GatherBatch { pages, seq_lens: &[len], ranges })
    };
    let first_of_rows = || -> Vec<f32> {
        let bytes = download(gpu, &out);
        bytemuck::cast_slice::<_, f32>(&bytes).iter().step_by(288).copied().collect()
    };
    prepare(&mut step, &[2], 3, &[range(1, 2, 0)]).expect("prepares");
    op.run(&step, &binding).expect("runs");
    assert_eq!(first_of_rows(), [9.0, 10.0, 0.0, 0.0, 0.0, 0.0]);
    // A second one that does not fit the table of the first.
    let many: Vec<GatherRange> = (0..4).map(|i| range(i * 3, 1, 3 - i)).collect();
    prepare(&mut step, &[1, 0, 2], 12, &many).expect("prepares");
    assert_eq!(step.used(), 4);
    op.run(&step, &binding).expect("runs");
    assert_eq!(first_of_rows(), [9.0, 2.0, 7.0, 4.0, 0.0, 0.0]);

    // Prepared with more rows than the binding has after it was recorded: the commands keep what they were recorded with.
    prepare(&mut step, &[0], 4, &[range(0, 1, 0)]).expect("prepares");
    gpu.submit(|mut pass| {
        op.record_on(&mut pass, &step, &binding)?;
        prepare(&mut step, &[0, 1], 8, &[range(0, 1, 2), range(6, 2, 3)])
    })
    .expect("runs");
    assert_eq!(first_of_rows(), [0.0, 2.0, 7.0, 4.0, 0.0, 0.0]);
    assert!(matches!(op.run(&step, &binding), Err(Error::LayoutMismatch { .. })));
    assert_eq!(first_of_rows(), [0.0, 2.0, 7.0, 4.0, 0.0, 0.0], "nothing is recorded");

    let no_storage = without_storage(gpu);
    let refused = op.bind(&KvGatherArgs { out: View::dense(&no_storage, 1, 288), ..args.clone() }, 4);
    assert_eq!(refused.expect_err("refused"), Error::BufferUsage { what: "out", usage: "STORAGE" });
    let nothing = op.bind(&args, 0).expect("room for no row");
    prepare(&mut step, &[0], 4, &[]).expect("no range");
    op.run(&step, &nothing).expect("runs");
    Ok(())
}

crate::tests![gather_multiplies_as_the_host_does, one_binding_of_a_gather_serves_every_step,];
