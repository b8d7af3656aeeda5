//! Sums over many tokens, and weights of equal large logits, on each decode variant of the card.

use super::uploaded;
use mla_support::Outcome;
use mla_support::graph::cuda;
use wgpu_mla::cuda::Cuda;
use wgpu_mla::{
    Batch, Capacity, DecodeOptions, Device, Dtype, KvSpec, MlaDecode, MlaDecodeArgs, MlaPrefill,
    MlaPrefillArgs, MlaShape, PageTable, Plan, PrefillExtent, PrefillSequence, SplitPolicy, View,
};

/// One query token of a sequence whose pages hold the same.
struct OnePage<'a> {
    spec: MlaDecode,
    /// `[L + R]`, of all heads.
    query: &'a [f32],
    /// `[page_size, L + R]`.
    page: &'a [f32],
    tokens: u32,
    softmax_scale: f32,
}

impl OnePage<'_> {
    /// The output, `[H, L]`.
    fn decoded(&self, cuda: &Cuda, variant: Option<&str>, policy: SplitPolicy) -> Vec<f32> {
        let mut spec = self.spec;
        spec.kv.num_pages = self.tokens.div_ceil(spec.kv.page_size);
        let options = DecodeOptions { variant: variant.map(str::to_owned), ..DecodeOptions::default() };
        let decode = cuda.compile_with(spec, &options).expect("a decode");
        let (seq_lens, query_start_loc) = ([self.tokens as i32], [0, 1]);
        let batch = Batch::new(&seq_lens, &query_start_loc);
        let plan = Plan::new(&spec, &decode.tiling(), &batch, policy).expect("a plan");
        let max_pages = spec.kv.num_pages;
        let block_table: Vec<i32> = (0..max_pages as i32).collect();
        let pages = PageTable::Dense { block_table: &block_table, max_pages };
        let mut step = decode.step(Capacity::of(&plan)).expect("a step");
        decode.prepare(&mut step, (&plan, pages)).expect("prepared");
        let (heads, latent) = (spec.shape.num_heads as usize, spec.shape.kv_lora_rank as usize);
        let q = uploaded(cuda, &spec.query.encode_all(&self.query.repeat(heads)));
        let kv = uploaded(cuda, &spec.kv.dtype().encode_all(self.page).repeat(max_pages as usize));
        let [out, lse] = [latent, 1].map(|row| cuda.buffer((heads * row * 4) as u64).expect("memory"));
        let args = MlaDecodeArgs::dense(&spec, &q, &kv, &out, &lse, self.softmax_scale);
        let binding = decode.bind(&args, 1).expect("a binding");
        decode.record(&step, &binding).expect("recorded");
        Dtype::F32.decode_all(&cuda.download(&out, out.bytes()).expect("read"))[..heads * latent].to_vec()
    }
}

fn spec(shape: [u32; 3], cache: Dtype, query: Dtype, page_size: u32) -> MlaDecode {
    let [num_heads, kv_lora_rank, qk_rope_head_dim] = shape;
    MlaDecode {
        shape: MlaShape { num_heads, kv_lora_rank, qk_rope_head_dim },
        kv: KvSpec { layout: cache.into(), page_size, num_pages: 1 },
        query,
        out: Dtype::F32,
    }
}

/// 30 latents of 1 and 15 of -1, whatever the logit is. The weights of a merge are the numbers of tokens.
fn equal_large_logits_weigh_the_same() -> Outcome {
    let cuda = cuda()?;
    let query = [&[0.0; 512][..], &[1.0], &[0.0; 63]].concat();
    let page: Vec<f32> = (0..64)
        .flat_map(|token| [vec![if token < 30 { 1.0 } else { -1.0 }; 512], vec![1.0; 64]].concat())
        .collect();
    let mut ran = 0;
    for cache in Dtype::ALL {
        for of_query in Dtype::ALL {
            let spec = spec([16, 512, 64], cache, of_query, 64);
            let problem =
                |softmax_scale| OnePage { spec, query: &query, page: &page, tokens: 45, softmax_scale };
            for candidate in cuda.variants(&spec).iter().filter(|candidate| candidate.lacks.is_none()) {
                for logit in [1.0, 3001.7, 1e5, 1e6] {
                    for tokens in [16, 32] {
                        let policy = SplitPolicy::FixedTokens(tokens);
                        let got = problem(logit).decoded(&cuda, Some(candidate.name), policy);
                        let wrong = got.iter().find(|&&x| (x - 1.0 / 3.0).abs() > 1e-6);
                        let name = candidate.name;
                        assert_eq!(
                            wrong, None,
                            "{name}, {cache} by {of_query}, logit {logit}, splits of {tokens}"
                        );
                        ran += 1;
                    }
                }
            }
        }
    }
    println!("{ran} decodes");
    Ok(())
}

/// Queries of 0 over tokens that all hold the same row, which is the output.
fn f32_sums_of_many_tokens_keep_their_digits() -> Outcome {
    let cuda = cuda()?;
    for shape in [[1, 256, 32], [3, 512, 64]] {
        let dim = (shape[1] + shape[2]) as usize;
        let row: Vec<f32> = (0..dim).map(|i| 0.1 + 0.0137 * i as f32).collect();
        let (query, page) = (vec![0.0; dim], row.repeat(256));
        let spec = spec(shape, Dtype::F32, Dtype::F32, 256);
        for tokens in [1_000, 8_000, 32_000, 400_000] {
            let problem = OnePage { spec, query: &query, page: &page, tokens, softmax_scale: 0.1 };
            // The last is a merge of 25,000 partial results.
            for policy in [SplitPolicy::OneSplit, SplitPolicy::Auto, SplitPolicy::FixedTokens(16)] {
                let got = problem.decoded(&cuda, None, policy);
                let worst = off(&got, &row[..shape[1] as usize]);
                println!("{shape:?}, {tokens} tokens, {policy:?}: {worst:.1e}");
                assert!(worst <= 1e-5, "{shape:?}, {tokens} tokens, {policy:?}: off by {worst:.1e}");
            }
        }
    }
    Ok(())
}

/// The largest difference from a row, as a share of its largest.
fn off(got: &[f32], row: &[f32]) -> f64 {
    let largest = f64::from(row.iter().fold(0.0f32, |most, x| most.max(x.abs())));
    let differences = got.chunks(row.len()).flat_map(|got| got.iter().zip(row));
    differences.fold(0.0, |worst, (&a, &b)| {
        let error = (f64::from(a) - f64::from(b)).abs();
        if error <= worst { worst } else { error }
    }) / largest
}

fn f32_prefills_of_many_keys_keep_their_digits() -> Outcome {
    let cuda = cuda()?;
    let keys = 32_768u32;
    // Half of the columns of a block, and all of them.
    for value in [24u32, 128, 136, 256] {
        let spec = MlaPrefill {
            num_heads: 1,
            qk_nope_head_dim: 16,
            qk_rope_head_dim: 8,
            v_head_dim: value,
            dtype: Dtype::F32,
            out: Dtype::F32,
        };
        let prefill = cuda.compile(spec).expect("a prefill");
        let row: Vec<f32> = (0..value).map(|i| 0.1 + 0.0137 * i as f32).collect();
        let zeros = |rows: u32, dim: u32| cuda.buffer(u64::from(rows * dim) * 4).expect("memory");
        let (q_nope, q_pe, k_nope, k_pe) = (zeros(2, 16), zeros(2, 8), zeros(keys, 16), zeros(keys, 8));
        let v = uploaded(&cuda, &Dtype::F32.encode_all(&row.repeat(keys as usize)));
        let (out, lse) = (zeros(2, value), zeros(2, 1));
        let args = MlaPrefillArgs {
            q_nope: View::dense(&q_nope, 1, 16),
            q_pe: View::dense(&q_pe, 1, 8),
            k_nope: View::dense(&k_nope, 1, 16),
            k_pe: View::dense(&k_pe, 1, 8),
            v: View::dense(&v, 1, value),
            out: View::dense(&out, 1, value),
            lse: View::dense(&lse, 1, 1),
            softmax_scale: 0.2,
            v_scale: 1.0,
        };
        let binding = prefill.bind(&args, PrefillExtent { tokens: 2, keys, rows: 2 }).expect("binds");
        let mut step = prefill.step(1).expect("a step");
        prefill.prepare(&mut step, &[PrefillSequence::causal(0, 2, 0, keys)]).expect("prepared");
        prefill.record(&step, &binding).expect("recorded");
        let got = Dtype::F32.decode_all(&cuda.download(&out, u64::from(value) * 2 * 4).expect("read"));
        let worst = off(&got, &row);
        println!("{value} columns: {worst:.1e}");
        assert!(worst <= 1e-5, "{value} columns: off by {worst:.1e}");
    }
    Ok(())
}

crate::tests![
    equal_large_logits_weigh_the_same,
    f32_sums_of_many_tokens_keep_their_digits,
    f32_prefills_of_many_keys_keep_their_digits,
];
