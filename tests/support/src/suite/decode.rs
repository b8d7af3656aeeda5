//! Decodes against the oracle.

use wgpu_mla::{Backend, Batch, Capacity, Dtype, LseBase, MlaDecodeArgs, Plan, SplitPolicy};

use super::Session;
use super::memory::upload;
use super::run::{How, Layout, Slicing, dense_table};
use crate::close::{Tolerance, close};
use crate::paint::{Data, Make, POISON, Sees, sequences};

/// Every cache dtype with every query dtype, or with some: see [`Session::takes`].
pub fn dtypes_of_512_64<B: Backend>(session: &Session<'_, B>) {
    dtypes(session, (512, 64), 0);
}

/// Every cache dtype with every query dtype, or with some: see [`Session::takes`].
pub fn dtypes_of_256_64<B: Backend>(session: &Session<'_, B>) {
    dtypes(session, (256, 64), 1);
}

/// Every cache dtype with every query dtype, or with some: see [`Session::takes`].
pub fn dtypes_of_256_32<B: Backend>(session: &Session<'_, B>) {
    dtypes(session, (256, 32), 2);
}

/// Every cache dtype with every query dtype, or with some: see [`Session::takes`].
pub fn dtypes_of_512_0<B: Backend>(session: &Session<'_, B>) {
    dtypes(session, (512, 0), 3);
}

fn dtypes<B: Backend>(session: &Session<'_, B>, dims: (u32, u32), place: usize) {
    let mut turn = 0;
    for (cache_place, cache) in Dtype::ALL.into_iter().enumerate() {
        for (query_place, query) in Dtype::ALL.into_iter().enumerate() {
            // Other pairs than those of tests/it/matrix.rs.
            if !session.takes(place + 2, cache_place, query_place) {
                turn += 1;
                continue;
            }
            let heads = [16, 6, 1, 20, 40][turn % 5];
            let out = [Dtype::F32, Dtype::F32, Dtype::F16, Dtype::Bf16][turn % 4];
            let slicing = [Slicing::Whole, Slicing::Split][turn % 2];
            let policy = [SplitPolicy::Auto, SplitPolicy::FixedTokens(32), SplitPolicy::OneSplit][turn % 3];
            let sequences = sequences(&[(37, 1), (0, 1), (70, 2)]);
            let problem = Make { dims, cache, query, out, heads, sequences, ..Make::default() }.build();
            session.check(&problem, &How { slicing, policy, ..How::default() });
            turn += 1;
        }
    }
    session.finish(&format!("dtypes of {}/{}", dims.0, dims.1));
}

/// Head counts that fill no tile.
pub fn heads<B: Backend>(session: &Session<'_, B>) {
    let all = [
        (1, Dtype::Bf16, Dtype::Bf16),
        (6, Dtype::F32, Dtype::F32),
        (12, Dtype::E4m3, Dtype::Bf16),
        (20, Dtype::F16, Dtype::F16),
        (40, Dtype::Bf16, Dtype::F32),
        (96, Dtype::E4m3, Dtype::F16),
        (127, Dtype::F32, Dtype::F32),
        (128, Dtype::Bf16, Dtype::Bf16),
    ];
    for (heads, cache, query) in session.one_in(2, all) {
        let problem = Make { heads, cache, query, ..Make::default() }.build();
        session.check(&problem, &How::default());
        session.check(&problem, &How { policy: SplitPolicy::FixedTokens(32), ..How::default() });
    }
    session.finish("heads");
}

/// Page sizes that divide nothing.
pub fn page_sizes<B: Backend>(session: &Session<'_, B>) {
    for page_size in [1, 3, 16, 64, 100, 256] {
        for cache in session.one_in(2, [Dtype::Bf16, Dtype::E4m3]) {
            let problem = Make { page_size, cache, ..Make::default() }.build();
            session.check(&problem, &How::default());
        }
    }
    session.finish("page sizes");
}

/// Sequence lengths around every tile and page.
pub fn lengths<B: Backend>(session: &Session<'_, B>) {
    let lens = [0, 1, 2, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 150];
    let sequences = sequences(&lens.map(|len| (len, 1)));
    let pairs = [(Dtype::F32, Dtype::F32), (Dtype::Bf16, Dtype::Bf16), (Dtype::E4m3, Dtype::Bf16)];
    for (cache, query) in session.one_in(2, pairs) {
        let make = Make { cache, query, heads: 6, sequences: sequences.clone(), ..Make::default() };
        for policy in [SplitPolicy::Auto, SplitPolicy::FixedTokens(64)] {
            session.check(&make.build(), &How { policy, ..How::default() });
        }
    }
    session.finish("lengths");
}

/// Query lengths of 0, of many tiles, and beyond the sequence.
pub fn varlen<B: Backend>(session: &Session<'_, B>) {
    let batches: [&[(u32, u32)]; 4] = [
        &[(40, 0), (33, 5), (2, 5), (0, 2), (1, 1), (75, 3), (9, 0)],
        &[(0, 3), (0, 0)],
        &[(70, 40)],
        &[(3, 20), (150, 2)],
    ];
    for lens in batches {
        for heads in [1, 16] {
            let make = Make { heads, sequences: sequences(lens), ..Make::default() };
            for policy in [SplitPolicy::Auto, SplitPolicy::FixedTokens(7), SplitPolicy::OneSplit] {
                session.check(&make.build(), &How { policy, ..How::default() });
            }
        }
    }
    session.finish("VARLEN");
}

/// Made for several query tokens a sequence, and given as many, and other numbers of them.
pub fn query_tokens<B: Backend>(session: &Session<'_, B>) {
    let batches: [&[(u32, u32)]; 2] = [
        &[(90, 2), (37, 2), (2, 2)],
        &[(70, 2), (33, 1), (0, 2), (5, 4), (64, 0), (150, 3), (1, 2), (40, 9)],
    ];
    let made_for = [
        (16, Dtype::Bf16, Dtype::Bf16, 2),
        (16, Dtype::E4m3, Dtype::F16, 4),
        (6, Dtype::F16, Dtype::F32, 2),
        (20, Dtype::F32, Dtype::F32, 2),
    ];
    for (heads, cache, query, query_tokens) in session.one_in(2, made_for) {
        for lens in batches {
            let problem = Make { heads, cache, query, sequences: sequences(lens), ..Make::default() }.build();
            for policy in [SplitPolicy::Auto, SplitPolicy::FixedTokens(32), SplitPolicy::OneSplit] {
                session.check(&problem, &How { policy, query_tokens, ..How::default() });
            }
        }
    }
    session.finish("query tokens that the decode is made for");
}

/// Not causal, and bounds of a tree of drafts; some see nothing.
pub fn masks<B: Backend>(session: &Session<'_, B>) {
    let sequences = sequences(&[(33, 4), (2, 5), (70, 3)]);
    let bounds = Sees::Bounds(vec![30, 33, 0, 31, 1, 2, 0, 0, 1, 69, 5, 70]);
    for sees in [Sees::Full, Sees::CausalFrom(-1), Sees::CausalFrom(33), bounds] {
        let make = Make { sequences: sequences.clone(), sees, ..Make::default() };
        for policy in [SplitPolicy::Auto, SplitPolicy::FixedTokens(32), SplitPolicy::OneSplit] {
            session.check(&make.build(), &How { policy, ..How::default() });
        }
    }
    session.finish("masks");
}

/// Splits of any length.
pub fn policies<B: Backend>(session: &Session<'_, B>) {
    let sequences = sequences(&[(150, 1), (1, 1), (64, 2), (0, 1), (33, 1)]);
    for dtype in session.one_in(2, [Dtype::F32, Dtype::Bf16]) {
        let make = Make { cache: dtype, query: dtype, sequences: sequences.clone(), ..Make::default() };
        let problem = make.build();
        for tokens in [1, 7, 16, 32, 64, 1000] {
            session.check(&problem, &How { policy: SplitPolicy::FixedTokens(tokens), ..How::default() });
        }
        session.check(&problem, &How { policy: SplitPolicy::OneSplit, grow: true, ..How::default() });
        session.check(&problem, &How { policy: SplitPolicy::Auto, csr: true, ..How::default() });
    }
    session.finish("policies");
}

/// Strides, offsets, slicing, bases of the LSE and output dtypes; one split and several, which write differently.
pub fn layouts<B: Backend>(session: &Session<'_, B>) {
    for out in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        for (cache, query) in session.one_in(2, [(Dtype::Bf16, Dtype::Bf16), (Dtype::E4m3, Dtype::E4m3)]) {
            let problem = Make { out, cache, query, heads: 6, ..Make::default() }.build();
            for layout in [Layout::Dense, Layout::Gaps, Layout::HeadMajor] {
                for slicing in [Slicing::Whole, Slicing::Split] {
                    for (policy, lse_base) in
                        [(SplitPolicy::OneSplit, LseBase::Two), (SplitPolicy::FixedTokens(32), LseBase::E)]
                    {
                        session.check(&problem, &How { policy, slicing, layout, lse_base, ..How::default() });
                    }
                }
            }
            let policy = SplitPolicy::FixedTokens(32);
            session.check(&problem, &How { policy, lse_base: LseBase::Two, ..How::default() });
        }
    }
    session.finish("layouts");
}

/// Weights on one token, large logits, large and small elements.
pub fn hard_data<B: Backend>(session: &Session<'_, B>) {
    let pairs = [
        (Dtype::F32, Dtype::F32),
        (Dtype::Bf16, Dtype::Bf16),
        (Dtype::Bf16, Dtype::F32),
        (Dtype::Bf16, Dtype::F16),
        (Dtype::F16, Dtype::F16),
        (Dtype::E4m3, Dtype::Bf16),
        (Dtype::E4m3, Dtype::E4m3),
    ];
    for (cache, query) in session.one_in(2, pairs) {
        for data in Data::ALL.into_iter().filter(|&data| data != Data::Huge || cache != Dtype::F16) {
            let problem = Make { data, cache, query, ..Make::default() }.build();
            session.check(&problem, &How::default());
            session.check(&problem, &How { policy: SplitPolicy::FixedTokens(16), ..How::default() });
        }
    }
    session.finish("hard data");
}

/// The running maximum moves in each block of a long item, while the next blocks are already being loaded.
pub fn rising_logits<B: Backend>(session: &Session<'_, B>) {
    for (cache, heads, page_size, len) in [
        (Dtype::Bf16, 16, 3, 331),
        (Dtype::Bf16, 20, 3, 331),
        (Dtype::E4m3, 16, 48, 500),
        (Dtype::Bf16, 16, 16, 2200),
    ] {
        let (data, sequences) = (Data::Rising, sequences(&[(len, 1), (40, 2)]));
        let problem = Make { data, cache, heads, page_size, sequences, ..Make::default() }.build();
        session.check(&problem, &How { policy: SplitPolicy::OneSplit, ..How::default() });
    }
    session.finish("rising logits");
}

/// Prefixes that are attended once for several sequences.
pub fn shared_prefixes<B: Backend>(session: &Session<'_, B>) {
    let batches: [&[(u32, u32)]; 3] =
        [&[(100, 1), (90, 2), (64, 1)], &[(64, 1), (64, 1)], &[(70, 0), (66, 3), (80, 1)]];
    for lens in batches {
        // 16 heads share nothing in a tile of 16 rows.
        for (heads, query_tokens) in [(1, 0), (16, 0), (16, 2)] {
            let make = Make { heads, sequences: sequences(lens), prefix: 64, ..Make::default() };
            for policy in [
                SplitPolicy::Auto,
                SplitPolicy::FixedTokens(16),
                SplitPolicy::FixedTokens(48),
                SplitPolicy::OneSplit,
            ] {
                session.check(&make.build(), &How { policy, query_tokens, ..How::default() });
            }
        }
    }
    session.finish("shared prefixes");
}

/// Batches with no work are no error and write nothing.
pub fn empty_batches<B: Backend>(session: &Session<'_, B>) {
    let batches: [&[(u32, u32)]; 3] = [&[], &[(40, 0)], &[(0, 0), (0, 0)]];
    for lens in batches {
        let problem = Make { sequences: sequences(lens), ..Make::default() }.build();
        session.check(&problem, &How::default());
    }
    session.finish("empty batches");
}

/// One step and one binding for batches that grow and shrink: an earlier batch must not change a result.
pub fn a_step_serves_batch_after_batch<B: Backend>(session: &Session<'_, B>) {
    let batches: [&[(u32, u32)]; 6] = [
        &[(20, 1)],
        &[(120, 2), (90, 1), (33, 1)],
        &[(5, 1)],
        &[],
        &[(150, 4)],
        &[(40, 1), (0, 1), (41, 1), (42, 1)],
    ];
    let problems = batches.map(|lens| Make { sequences: sequences(lens), ..Make::default() }.build());
    let spec = problems[0].spec;
    assert!(problems.iter().all(|problem| problem.spec == spec));
    if !session.serves(&spec) {
        session.leave_out();
    } else {
        for policy in [SplitPolicy::Auto, SplitPolicy::FixedTokens(32)] {
            let result = || -> Result<(), String> {
                let wrong = |error: wgpu_mla::Error| error.to_string();
                let backend = session.backend;
                let decode = session.decode(&spec).map_err(wrong)?;
                let mut step = decode.step(Capacity::default()).map_err(wrong)?;
                let (heads, latent) = (spec.shape.num_heads as usize, spec.shape.kv_lora_rank as usize);
                let poison = |bytes: usize| upload(backend, &vec![POISON; bytes]);
                let q = poison(problems.iter().map(|p| p.q.len()).max().unwrap_or(0)).map_err(wrong)?;
                let kv = poison(problems[0].kv.len()).map_err(wrong)?;
                let out = poison(4 * heads * latent * 4).map_err(wrong)?;
                let lse = poison(4 * heads * 4).map_err(wrong)?;
                let layer = MlaDecodeArgs::dense(&spec, &q, &kv, &out, &lse, problems[0].softmax_scale);
                let binding = decode.bind(&layer, 4).map_err(wrong)?;
                for problem in &problems {
                    backend.upload(&q, 0, &problem.q).map_err(wrong)?;
                    backend.upload(&kv, 0, &problem.kv).map_err(wrong)?;
                    let batch = Batch::new(&problem.seq_lens, &problem.query_start_loc);
                    let plan = Plan::new(&spec, &decode.tiling(), &batch, policy).map_err(wrong)?;
                    decode.prepare(&mut step, (&plan, dense_table(problem))).map_err(wrong)?;
                    decode.run(&step, &binding).map_err(wrong)?;
                    let rows = problem.total_q() * heads;
                    let got = |buffer, elems: usize| -> Result<Vec<f32>, String> {
                        let bytes = backend.download(buffer, elems as u64 * 4).map_err(wrong)?;
                        Ok(Dtype::F32.decode_all(&bytes))
                    };
                    let (want_out, want_lse) = problem.expected();
                    if rows > 0 {
                        let name = &problem.name;
                        close(name, &got(&out, rows * latent)?, &want_out, &session.tolerance(problem, 1))
                            .into_result()?;
                        close(name, &got(&lse, rows)?, &want_lse, &Tolerance::lse()).into_result()?;
                    }
                }
                Ok(())
            }();
            session.note(&format!("{policy:?}"), result);
        }
    }
    session.finish("batch after batch");
}
