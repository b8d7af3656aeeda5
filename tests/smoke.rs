use wgpu_mla::*;
#[test]
fn smoke() {
    let gpu = gpu::Gpu::new().unwrap();
    println!("{} {:?}", gpu.name(), gpu.pipelines.caps());
    for variant in ["subgroup", "shared"] {
        for (h, l, r) in [(16u32, 512u32, 64u32), (20, 512, 64), (6, 256, 32), (1, 512, 0)] {
            let spec = MlaSpec {
                shape: MlaShape { num_heads: h, kv_lora_rank: l, qk_rope_head_dim: r },
                kv: KvSpec { dtype: Dtype::F16, page_size: 16, num_pages: 40 },
                query: Dtype::F16,
                out: Dtype::F32,
            };
            let d = (l + r) as usize;
            let len = 301usize;
            let rnd = |i: usize| {
                let mut x = (i as u64 + 1).wrapping_mul(0x9E3779B97F4A7C15);
                x ^= x >> 31;
                x = x.wrapping_mul(0xBF58476D1CE4E5B9);
                x ^= x >> 29;
                ((x >> 40) as f32 / (1u64 << 24) as f32 - 0.5) * 1.0
            };
            let q: Vec<f32> = (0..h as usize * d).map(|i| half::f16::from_f32(rnd(i)).to_f32()).collect();
            let kv: Vec<f32> =
                (0..40 * 16 * d).map(|i| half::f16::from_f32(rnd(i + 999999)).to_f32()).collect();
            let qb = gpu.buffer((q.len() * 2) as u64).unwrap();
            gpu.upload(&qb, 0, &Dtype::F16.encode_all(&q)).unwrap();
            let kb = gpu.buffer((kv.len() * 2) as u64).unwrap();
            gpu.upload(&kb, 0, &Dtype::F16.encode_all(&kv)).unwrap();
            let ob = gpu.buffer((h * l * 4) as u64).unwrap();
            let lb = gpu.buffer((h * 4) as u64).unwrap();
            let t0 = std::time::Instant::now();
            let mla = gpu.decode(&spec, Some(variant)).unwrap();
            println!("compile {:?} {}", t0.elapsed(), mla.why());
            for policy in [Policy::OneSplit, Policy::FixedTokens(64), Policy::Auto] {
                let plan =
                    Plan::new(&spec, &mla.tiling(), &Batch::new(&[len as i32], &[0, 1]), policy).unwrap();
                let mut step = mla.step(Capacity::default()).unwrap();
                let table: Vec<i32> = (0..19).map(|i| (i * 7) % 40).collect();
                let t0 = std::time::Instant::now();
                mla.prepare(
                    &gpu.queue,
                    &mut step,
                    &plan,
                    PageTable::Dense { block_table: &table, max_pages: 19 },
                )
                .unwrap();
                let b = mla.bind(1, &Layer::dense(&spec, &qb, &kb, &ob, &lb, 0.3)).unwrap();
                gpu.run(&mla, &step, &b).unwrap();
                let out = gpu.download(&ob, (h * l * 4) as u64).unwrap();
                let out = Dtype::F32.decode_all(&out);
                let lse = Dtype::F32.decode_all(&gpu.download(&lb, (h * 4) as u64).unwrap());
                let el = t0.elapsed();
                let (mut e, mut el2) = (0f64, 0f64);
                for hh in 0..h as usize {
                    let s: Vec<f64> = (0..len)
                        .map(|t| {
                            let row = table[t / 16] as usize * 16 + t % 16;
                            (0..d).map(|i| q[hh * d + i] as f64 * kv[row * d + i] as f64).sum::<f64>()
                                * 0.3f32 as f64
                        })
                        .collect();
                    let m = s.iter().cloned().fold(f64::MIN, f64::max);
                    let sum: f64 = s.iter().map(|x| (x - m).exp()).sum();
                    el2 = el2.max((m + sum.ln() - lse[hh] as f64).abs());
                    for c in 0..l as usize {
                        let o: f64 = (0..len)
                            .map(|t| {
                                let row = table[t / 16] as usize * 16 + t % 16;
                                (s[t] - m).exp() * kv[row * d + c] as f64
                            })
                            .sum::<f64>()
                            / sum;
                        e = e.max((o - out[hh * l as usize + c] as f64).abs());
                    }
                }
                println!(
                    "{variant} h{h} {l}/{r} {policy:?} items {} err {e:.2e} lse {el2:.2e} {el:?}",
                    plan.items.len()
                );
            }
        }
    }
}
