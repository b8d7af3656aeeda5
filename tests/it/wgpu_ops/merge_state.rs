//! `merge_state`.

use super::*;

/// Where rows of `[tokens, heads, dim]` lie, in elements.
#[derive(Debug, Clone, Copy)]
struct Rows {
    offset: usize,
    token: usize,
    head: usize,
}

impl Rows {
    fn dense(heads: usize, dim: usize) -> Self {
        Rows { offset: 0, token: heads * dim, head: dim }
    }
    fn at(&self, t: usize, h: usize) -> usize {
        self.offset + t * self.token + h * self.head
    }
    fn end(&self, tokens: usize, heads: usize, dim: usize) -> usize {
        self.at(tokens - 1, heads - 1) + dim
    }
    fn view<'a>(&self, buffer: &'a wgpu::Buffer) -> View<&'a wgpu::Buffer> {
        View {
            buffer,
            offset: self.offset as u64,
            token_stride: self.token as u64,
            head_stride: self.head as u64,
        }
    }
}

struct MergeCase {
    dtype: Dtype,
    tokens: usize,
    heads: usize,
    dim: usize,
    inputs: Rows,
    output: Rows,
}

impl MergeCase {
    fn dense(dtype: Dtype, tokens: usize, heads: usize, dim: usize) -> Self {
        let rows = Rows::dense(heads, dim);
        MergeCase { dtype, tokens, heads, dim, inputs: rows, output: rows }
    }

    /// LSEs that are empty in every way, equal, far apart and huge.
    fn lse_bits(case: usize, random: &mut Random) -> (f32, f32) {
        let (a, b) = (random.unit() * 3.0, random.unit() * 3.0);
        match case {
            0 => (f32::NEG_INFINITY, b),
            1 => (a, f32::INFINITY),
            2 => (f32::NAN, b),
            3 => (f32::NEG_INFINITY, f32::from_bits(0xFFC0_1234)),
            4 => (-f32::MAX, f32::MAX),
            5 => (f32::INFINITY, f32::NAN),
            6 => (150.0 + a, 150.5),
            7 => (-900.0, a),
            8 => (a, a),
            9 => (f32::from_bits(1), f32::MIN_POSITIVE),
            _ => (a, b),
        }
    }

    fn run(&self, op: &Compiled<MergeState, Gpu>) {
        let gpu = op.device();
        let MergeCase { dtype, tokens, heads, dim, inputs, output } = *self;
        let mut random = Random((dim * 31 + tokens) as u64);
        let elem = dtype.bytes();
        let poison = |n: usize| dtype.encode_all(&vec![f32::NAN; n]);
        let input_end = inputs.end(tokens, heads, dim);
        let (mut prefix, mut suffix) = (poison(input_end), poison(input_end));
        // [heads, tokens], as users of vLLM have them
        let (mut prefix_lse, mut suffix_lse) = (vec![0f32; heads * tokens], vec![0f32; heads * tokens]);
        for t in 0..tokens {
            for h in 0..heads {
                let (p, s) = Self::lse_bits((t * heads + h) % 13, &mut random);
                (prefix_lse[h * tokens + t], suffix_lse[h * tokens + t]) = (p, s);
                for d in 0..dim {
                    let at = (inputs.at(t, h) + d) * elem;
                    for (side, lse) in [(&mut prefix, p), (&mut suffix, s)] {
                        let empty = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][d % 3];
                        let x = if lse.is_finite() { random.unit() } else { empty };
                        side[at..at + elem].copy_from_slice(&dtype.encode_all(&[x]));
                    }
                }
            }
        }
        let before: Vec<u8> =
            (0..(output.end(tokens, heads, dim) + 3) * elem).map(|i| (i % 241) as u8 + 7).collect();
        let [p, s, o] = [&prefix, &suffix, &before].map(|bytes| upload(gpu, bytes));
        let [pl, sl] = [&prefix_lse, &suffix_lse].map(|lse| upload(gpu, bytemuck::cast_slice(lse)));
        let ol = upload(gpu, &vec![0x55; heads * tokens * 4]);
        let by_head = Rows { offset: 0, token: 1, head: tokens };
        let args = MergeStateArgs {
            prefix_output: inputs.view(&p),
            prefix_lse: by_head.view(&pl),
            suffix_output: inputs.view(&s),
            suffix_lse: by_head.view(&sl),
            output: output.view(&o),
            output_lse: Some(by_head.view(&ol)),
            num_tokens: tokens as u32,
            num_heads: heads as u32,
            output_scale: 1.0,
        };
        let binding = op.bind(&args, ()).expect("binds");
        let without_lse = op.bind(&MergeStateArgs { output_lse: None, ..args }, ()).expect("binds");
        let step = op.step(()).expect("a step");
        op.run(&step, &binding).expect("runs");
        let (got, got_lse) = (download(gpu, &o), download(gpu, &ol));
        let got_lse: &[f32] = bytemuck::cast_slice(&got_lse);

        let label =
            |t, h| format!("{dtype} {tokens}x{heads}x{dim} in {inputs:?} out {output:?}: row {t}, {h}");
        let mut written = vec![false; before.len()];
        for t in 0..tokens {
            for h in 0..heads {
                let (pl, sl) = (prefix_lse[h * tokens + t], suffix_lse[h * tokens + t]);
                let row = |side: &[u8], rows: &Rows| {
                    let at = rows.at(t, h) * elem;
                    side[at..at + dim * elem].to_vec()
                };
                let (p, s, got) = (row(&prefix, &inputs), row(&suffix, &inputs), row(&got, &output));
                written[output.at(t, h) * elem..][..dim * elem].fill(true);
                let lse = got_lse[h * tokens + t];
                match (pl.is_finite(), sl.is_finite()) {
                    (true, false) => assert_eq!((got, lse.to_bits()), (p, pl.to_bits()), "{}", label(t, h)),
                    (false, true) => assert_eq!((got, lse.to_bits()), (s, sl.to_bits()), "{}", label(t, h)),
                    (false, false) => {
                        assert!(got.iter().all(|b| *b == 0), "{}", label(t, h));
                        assert_eq!(lse.to_bits(), 0xFF80_0000, "{}", label(t, h));
                    }
                    (true, true) => {
                        let (pl, sl) = (f64::from(pl), f64::from(sl));
                        let top = pl.max(sl);
                        let want_lse = top + ((pl - top).exp() + (sl - top).exp()).ln();
                        let within = |got: f64, want: f64, tol: f64| {
                            (got - want).abs() <= tol || (got - want).abs() <= tol * want.abs()
                        };
                        assert!(
                            within(lse.into(), want_lse, 2e-6),
                            "{}: lse {lse}, not {want_lse}",
                            label(t, h)
                        );
                        let tolerance = match dtype {
                            Dtype::F32 => 2e-6,
                            Dtype::F16 => 1e-3,
                            _ => 2e-2,
                        };
                        for d in 0..dim {
                            let [p, s, got] =
                                [&p, &s, &got].map(|bytes| f64::from(dtype.decode_at(bytes, d)));
                            let want = (pl - want_lse).exp() * p + (sl - want_lse).exp() * s;
                            assert!(within(got, want, tolerance), "{}, {d}: {got}, not {want}", label(t, h));
                        }
                    }
                }
            }
        }
        for (i, _) in written.iter().enumerate().filter(|(_, written)| !**written) {
            assert_eq!(got[i], before[i], "byte {i} is in no row: {}", label(0, 0));
        }

        gpu.upload(&o, 0, &vec![0; o.size() as usize]).expect("uploads");
        gpu.upload(&ol, 0, &vec![0x55; ol.size() as usize]).expect("uploads");
        op.run(&step, &without_lse).expect("runs");
        assert!(download(gpu, &ol).iter().all(|b| *b == 0x55), "no LSE was asked for");
        let again = download(gpu, &o);
        assert!((0..before.len()).all(|i| !written[i] || again[i] == got[i]));
    }
}

fn merge_is_right_for_any_head_size() -> Outcome {
    let gpu = gpu()?;
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        for dim in [1, 3, 4, 63, 96, 128, 200] {
            let op = gpu.compile(MergeState { dtype, head_size: dim as u32 }).expect("compiles");
            for (tokens, heads) in [(13, 5), (1, 16), (27, 1), (1, 1)] {
                MergeCase::dense(dtype, tokens, heads, dim).run(&op);
            }
            // odd strides and offsets on both sides; heads outside; gaps that must stay as they are
            for (inputs, output) in [
                (
                    Rows { offset: 1, token: 5 * dim + 3, head: dim },
                    Rows { offset: 3, token: 5 * dim + 1, head: dim },
                ),
                (Rows::dense(5, dim), Rows { offset: 1, token: dim, head: 13 * dim }),
                (
                    Rows { offset: 0, token: dim, head: 13 * dim },
                    Rows { offset: 0, token: dim + 1, head: 13 * (dim + 1) + 1 },
                ),
                (Rows::dense(5, dim), Rows { offset: 4, token: 5 * (dim + 8), head: dim + 8 }),
            ] {
                MergeCase { dtype, tokens: 13, heads: 5, dim, inputs, output }.run(&op);
            }
            // even, but no multiple of 4; and one head or one token, whose unused stride holds anything
            let (inputs, unused) = (Rows::dense(5, dim), usize::MAX / 2);
            let even = Rows { offset: 2, token: 5 * dim + 6, head: dim };
            MergeCase { dtype, tokens: 13, heads: 5, dim, inputs, output: even }.run(&op);
            let one_head = Rows { offset: 1, token: dim + 5, head: unused };
            MergeCase { dtype, tokens: 13, heads: 1, dim, inputs, output: one_head }.run(&op);
            let one_token = Rows { offset: 1, token: unused, head: dim + 3 };
            MergeCase { dtype, tokens: 1, heads: 5, dim, inputs, output: one_token }.run(&op);
        }
    }
    Ok(())
}

crate::tests![merge_is_right_for_any_head_size,];
