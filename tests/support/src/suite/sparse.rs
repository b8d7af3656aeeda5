//! Decodes of listed slots, against the oracle and against dense decodes. What no list names is NaN, slot 0 included.

use wgpu_mla::{Backend, Capacity, Dtype, KvLayout, LseBase, MlaDecodeArgs, PageTable, SplitPolicy, Tiling};

use super::lists::ListArrays;
use super::memory::upload;
use super::records::{of_all_sizes, scale_any, scaled};
use super::run::{Answer, How, Layout, Slicing, plan_of};
use super::{Cases, Session};
use crate::close::{Tolerance, close};
use crate::paint::{Data, Lengths, Lists, Make, POISON, Problem, Rng, sequences};

const DIMS: [(u32, u32); 4] = [(512, 64), (512, 0), (256, 64), (256, 32)];
const POLICIES: [SplitPolicy; 3] = [SplitPolicy::Auto, SplitPolicy::FixedTokens(32), SplitPolicy::OneSplit];
const FIXED: SplitPolicy = SplitPolicy::FixedTokens(32);
/// Lists of one entry, of a block but for one, and past the tokens that there are: some stand in them several times.
const TOPK: [usize; 5] = [300, 64, 7, 1, 129];

/// Every dims and cache dtype, and the numbers of heads; each meets each query dtype in another dims.
pub fn lists<B: Backend>(session: &Session<'_, B>) {
    for (turn, dims) in DIMS.into_iter().enumerate() {
        for (place, cache) in Dtype::ALL.into_iter().enumerate() {
            if session.cases == Cases::Representative && place != (turn + session.place) % Dtype::ALL.len() {
                continue;
            }
            let query = Dtype::ALL[(turn + place) % Dtype::ALL.len()];
            let heads = [16, 6, 128, 12, 1, 20, 64][(turn * 4 + place) % 7];
            let sequences = sequences(&[(37, 1), (0, 1), (70, 2)]);
            let dense = Make { dims, cache, query, heads, sequences, ..Make::default() }.build();
            for (index, topk) in TOPK.into_iter().enumerate().take(if heads > 64 { 3 } else { 5 }) {
                let lengths = [Lengths::All, Lengths::Some][index % 2];
                let problem = dense.listed(Lists::drawn(&dense, topk, lengths, index as u64));
                let slicing = [Slicing::Whole, Slicing::Split][index / 2 % 2];
                session.check(&problem, &How { policy: POLICIES[index % 3], slicing, ..How::default() });
            }
        }
    }
    session.finish("lists of slots");
}

/// Records of 656 and 528 bytes, whose scales are powers of two, and others.
pub fn lists_of_records<B: Backend>(session: &Session<'_, B>) {
    let all = [
        (KvLayout::Ds656, Dtype::Bf16, 16),
        (KvLayout::Ds528, Dtype::F16, 6),
        (KvLayout::Ds656, Dtype::F32, 12),
        (KvLayout::Ds528, Dtype::Bf16, 64),
        (KvLayout::Ds656, Dtype::E4m3, 20),
    ];
    for (index, (layout, query, heads)) in session.one_in(2, all.into_iter().enumerate()) {
        let dims = (512, if layout == KvLayout::Ds656 { 64 } else { 0 });
        let (records, sequences) = (Some(layout), sequences(&[(150, 2), (64, 1), (0, 1), (37, 3)]));
        let mut dense = Make { dims, heads, query, records, sequences, ..Make::default() }.build();
        for any_scale in [false, true] {
            if any_scale {
                scale_any(&mut dense.kv, layout.token(dims.0, dims.1).bytes as usize, index);
                dense.name += ", scales that are no powers of two";
            }
            let problem = dense.listed(Lists::drawn(&dense, 129, Lengths::Some, index as u64));
            let slab_pages = dense.spec.kv.num_pages.div_ceil(3);
            session.check(&problem, &How { policy: FIXED, layout: Layout::Gaps, ..How::default() });
            session.check(&problem, &How { slab_pages, slicing: Slicing::Split, ..How::default() });
        }
        let mut problem = scaled(&dense, of_all_sizes);
        problem.name += ", then of all sizes";
        let problem = problem.listed(Lists::drawn(&problem, 129, Lengths::Some, index as u64));
        session.check(&problem, &How::default());
    }
    session.finish("lists of slots in records");
}

/// Numbers of query tokens, lengths, lists of no slot, strides, slabs, bases of the LSE, output dtypes, and a step for longer lists.
pub fn list_shapes<B: Backend>(session: &Session<'_, B>) {
    let all = [
        (Dtype::Bf16, Dtype::Bf16, 16, Dtype::F32),
        (Dtype::E4m3, Dtype::F16, 6, Dtype::Bf16),
        (Dtype::F32, Dtype::F32, 20, Dtype::F16),
        (Dtype::F16, Dtype::E4m3, 12, Dtype::F32),
    ];
    for (cache, query, heads, out) in session.one_in(2, all) {
        let make = |lens: &[(u32, u32)]| {
            Make { cache, query, heads, out, sequences: sequences(lens), ..Make::default() }.build()
        };
        let dense = make(&[(150, 5), (0, 1), (90, 3)]);
        let drawn = |topk, lengths| dense.listed(Lists::drawn(&dense, topk, lengths, topk as u64));
        let (all, some) = (drawn(129, Lengths::All), drawn(65, Lengths::Some));
        let split = How { slicing: Slicing::Split, ..How::default() };
        for (policy, layout, lse_base) in [
            (SplitPolicy::OneSplit, Layout::Gaps, LseBase::Two),
            (FIXED, Layout::HeadMajor, LseBase::Two),
            (SplitPolicy::FixedTokens(7), Layout::Gaps, LseBase::E),
        ] {
            session.check(&all, &How { policy, layout, lse_base, ..split });
            session.check(&some, &How { policy, layout, lse_base, grow: true, ..split });
        }
        session.check(&some, &How { spare_entries: 9, layout: Layout::Gaps, ..How::default() });
        session.check(&all, &How { spare_entries: 100, policy: FIXED, query_tokens: 2, ..How::default() });
        let pages = dense.spec.kv.num_pages;
        for (slab_pages, policy, layout) in [
            (pages.div_ceil(2), SplitPolicy::Auto, Layout::Dense),
            (3, FIXED, Layout::Gaps),
            (1, SplitPolicy::OneSplit, Layout::HeadMajor),
        ] {
            session.check(&some, &How { slab_pages, policy, layout, ..How::default() });
        }

        let invalid = [-1, dense.spec.kv.num_slots() as i32, i32::MIN, i32::MAX, -77];
        let slots = (0..9 * 129).map(|at| invalid[at % invalid.len()]).collect();
        let mut none = dense.listed(Lists { topk: 129, slots, topk_length: None });
        none.name += ", none of the pool";
        for policy in POLICIES {
            session.check(&none, &How { policy, slab_pages: pages.div_ceil(2), ..How::default() });
            session.check(&none, &How { policy, ..How::default() });
        }
        // The last slot of the pool, and nothing else: there is poison in every other.
        let mut last = Lists { topk: 3, slots: Vec::new(), topk_length: None };
        let slot = dense.slots(0)[149];
        (0..9).for_each(|token| last.slots.extend([[-1, slot, -1], [slot, slot, i32::MAX]][token % 2]));
        session.check(&dense.listed(last), &How { policy: SplitPolicy::FixedTokens(1), ..How::default() });
    }
    // A prefill has as many query tokens.
    let many =
        Make { dims: (256, 32), heads: 1, sequences: sequences(&[(200, 2100)]), ..Make::default() }.build();
    session.check(&many.listed(Lists::drawn(&many, 33, Lengths::Some, 5)), &How::default());
    session.finish("shapes of lists");
}

/// Lists of all tokens in their order are dense decodes: within tolerance, and bit for bit with the same splits of the same variant. A
/// kernel that drops its lists gives something else.
pub fn lists_of_all<B: Backend>(session: &Session<'_, B>) {
    let pairs = [(Dtype::F32, Dtype::F32), (Dtype::Bf16, Dtype::Bf16), (Dtype::E4m3, Dtype::Bf16)];
    for (cache, query) in session.one_in(2, pairs) {
        for heads in [6, 16] {
            let lens: &[(u32, u32)] = &[(150, 1), (37, 1), (0, 1), (64, 1)];
            let ragged = Make { cache, query, heads, sequences: sequences(lens), ..Make::default() }.build();
            let listed = ragged.listed(Lists::ascending(&ragged));
            if !session.takes_inputs(&listed, &How::default()) {
                continue;
            }
            let (out, lse) = ragged.expected();
            for policy in POLICIES {
                let result =
                    session.compare(&listed, &How { policy, spare_entries: 1, ..How::default() }, &out, &lse);
                session.note(&format!("{} as a dense decode", listed.name), result);
            }

            let some = ragged.listed(Lists::drawn(&ragged, 64, Lengths::All, 3));
            let (out, lse) = some.expected();
            let dropped = session.compare(&ragged, &How::default(), &out, &lse);
            let differs = if dropped.is_err() { Ok(()) } else { Err("made no difference".to_owned()) };
            session.note(&format!("{}: the list", some.name), differs);

            // Sequences of one length, so that both have the same splits.
            let even = Make {
                cache,
                query,
                heads,
                page_size: 64,
                sequences: sequences(&[(150, 1), (150, 1), (150, 1)]),
                ..Make::default()
            };
            let even = even.build();
            let listed = even.listed(Lists::ascending(&even));
            for policy in [SplitPolicy::FixedTokens(64), SplitPolicy::OneSplit] {
                session
                    .note(&format!("bits of {}", listed.name), bits_of_all(session, &even, &listed, policy));
            }
        }
    }
    session.finish("lists of all tokens");
}

fn bits_of_all<B: Backend>(
    session: &Session<'_, B>,
    dense: &Problem,
    listed: &Problem,
    policy: SplitPolicy,
) -> Result<(), String> {
    let sparse = session.decode_of(listed, &How::default()).map_err(|error| error.to_string())?;
    let mut forced = Session::new(session.backend);
    forced.variant = Some(sparse.variant());
    let rows = forced.decode(&dense.spec).map_err(|error| error.to_string())?.tiling().rows_per_tile;
    let tiling = sparse.tiling();
    let tiling = Tiling { rows_per_tile: rows.min(tiling.rows_per_tile), ..tiling };
    let how = How { policy, tiling: Some(tiling), ..How::default() };
    same_bits(&forced.run_decode(dense, &how)?, &forced.run_decode(listed, &how)?)
}

fn same_bits(a: &Answer, b: &Answer) -> Result<(), String> {
    for (name, array) in [("out", 0), ("lse", 1)] {
        let (a, b) = (&a.bits[array], &b.bits[array]);
        let differ = a.iter().zip(b).filter(|(a, b)| a != b).count();
        if a.len() != b.len() || differ > 0 {
            return Err(format!("{name} differs in {differ} of {} bytes", a.len()));
        }
    }
    Ok(())
}

/// The order of a list's entries and where invalid ones stand change nothing but roundings; the same list twice not even these.
pub fn list_orders<B: Backend>(session: &Session<'_, B>) {
    for data in [Data::Painted, Data::BigLogits, Data::Needle] {
        let dense = Make { data, sequences: sequences(&[(150, 2)]), ..Make::default() }.build();
        let problem = dense.listed(Lists::drawn(&dense, 129, Lengths::All, 1));
        if !session.takes_inputs(&problem, &How::default()) {
            continue;
        }
        let (out, lse) = problem.expected();
        let mut turned = problem.clone();
        turned.lists.iter_mut().flat_map(|lists| lists.slots.chunks_mut(129)).for_each(|list| {
            Rng(8).shuffle(list);
        });
        let mut sorted = problem.clone();
        sorted
            .lists
            .iter_mut()
            .flat_map(|lists| lists.slots.chunks_mut(129))
            .for_each(<[i32]>::sort_unstable);
        for policy in POLICIES {
            let how = How { policy, ..How::default() };
            for other in [&problem, &turned, &sorted] {
                session.note(&format!("{}, {how:?}", problem.name), session.compare(other, &how, &out, &lse));
            }
            let twice = session.run_decode(&problem, &how).and_then(|first| {
                let second = session.run_decode(&problem, &how)?;
                same_bits(&first, &second)
            });
            session.note(&format!("{}, {how:?}, twice", problem.name), twice);
        }
    }
    session.finish("orders of lists");
}

/// With fixed splits a query token has the same bits alone, in a batch, and in one of other lists.
pub fn lists_of_batches<B: Backend>(session: &Session<'_, B>) {
    let pairs = [(Dtype::F32, Dtype::F32), (Dtype::Bf16, Dtype::Bf16), (Dtype::E4m3, Dtype::Bf16)];
    for (cache, query) in session.one_in(2, pairs) {
        for heads in [6, 16] {
            let sequences = sequences(&[(150, 5), (64, 2)]);
            let dense = Make { cache, query, heads, sequences, ..Make::default() }.build();
            let batch = dense.listed(Lists::drawn(&dense, 129, Lengths::Some, 2));
            let how = How { policy: FIXED, ..How::default() };
            if !session.takes_inputs(&batch, &how) {
                continue;
            }
            let all = session.run_decode(&batch, &how);
            for token in 0..batch.total_q() {
                let result = all.as_ref().map_err(Clone::clone).and_then(|all| {
                    let alone = session.run_decode(&batch.token(token), &how)?;
                    let part = |array: usize| {
                        let bytes = all.bits[array].len() / batch.total_q();
                        all.bits[array][token * bytes..][..bytes].to_vec()
                    };
                    same_bits(&Answer { bits: [part(0), part(1)], ..all.clone() }, &alone)
                });
                session.note(&format!("{}, token {token} alone", batch.name), result);
            }
        }
    }
    session.finish("lists of a batch");
}

/// A step that was prepared once runs with whatever lists and lengths its buffers hold: a plan knows nothing of them.
pub fn replayed_lists<B: Backend>(session: &Session<'_, B>) {
    let dense = Make { sequences: sequences(&[(150, 2), (90, 2)]), ..Make::default() }.build();
    let drawn = |seed| dense.listed(Lists::drawn(&dense, 129, Lengths::Some, seed));
    let problems = [drawn(1), drawn(2), drawn(3)].map(|problem| Problem { kv: dense.kv.clone(), ..problem });
    for policy in POLICIES {
        let how = How { policy, ..How::default() };
        if session.takes_inputs(&problems[0], &how) {
            session.note(&format!("{policy:?}"), replay(session, &problems, &how));
        }
    }
    session.finish("replayed lists");
}

fn replay<B: Backend>(session: &Session<'_, B>, problems: &[Problem], how: &How) -> Result<(), String> {
    let wrong = |error: wgpu_mla::Error| error.to_string();
    let (backend, first) = (session.backend, &problems[0]);
    let (spec, tokens) = (first.spec, first.total_q());
    let decode = session.decode_of(first, how).map_err(wrong)?;
    let plan = plan_of(first, how, &decode.tiling()).map_err(wrong)?;
    let mut step = decode.step(Capacity::default()).map_err(wrong)?;
    decode.prepare(&mut step, (&plan, PageTable::Indices)).map_err(wrong)?;
    let (q, kv) = (upload(backend, &first.q).map_err(wrong)?, upload(backend, &first.kv).map_err(wrong)?);
    let [out_bytes, lse_bytes] = [spec.out_bytes(tokens as u32), spec.lse_bytes(tokens as u32)];
    let poison = |bytes: u64| upload(backend, &vec![POISON; bytes as usize]).map_err(wrong);
    let (out, lse) = (poison(out_bytes)?, poison(lse_bytes)?);
    let arrays = ListArrays::new(backend, first.lists.as_ref().expect("lists"), how).map_err(wrong)?;
    let indices = Some(arrays.view());
    let args = MlaDecodeArgs {
        indices,
        k_scale: first.k_scale,
        ..MlaDecodeArgs::dense(&spec, &q, &kv, &out, &lse, first.softmax_scale)
    };
    let binding = decode.bind(&args, tokens as u32).map_err(wrong)?;
    for problem in problems {
        arrays.replace(backend, problem.lists.as_ref().expect("lists")).map_err(wrong)?;
        decode.run(&step, &binding).map_err(wrong)?;
        let (want_out, want_lse) = problem.expected();
        let got = |buffer, bytes| backend.download(buffer, bytes).map(|bytes| Dtype::F32.decode_all(&bytes));
        let (got_out, got_lse) = (got(&out, out_bytes).map_err(wrong)?, got(&lse, lse_bytes).map_err(wrong)?);
        close("lse", &got_lse, &want_lse, &Tolerance::lse()).into_result()?;
        close("out", &got_out, &want_out, &session.tolerance(problem, 1)).into_result()?;
    }
    Ok(())
}

/// NaN and infinity in a token: rows that list it have the oracle's pattern, as in a dense decode, and others their bits.
pub fn non_finite_lists<B: Backend>(session: &Session<'_, B>) {
    for (cache, query) in session.one_in(2, [(Dtype::Bf16, Dtype::Bf16), (Dtype::F32, Dtype::F32)]) {
        let dense =
            Make { cache, query, heads: 3, sequences: sequences(&[(90, 4)]), ..Make::default() }.build();
        let mut lists = Lists::drawn(&dense, 64, Lengths::All, 4);
        let odd_slot = dense.slots(0)[41];
        // The second query token lists the odd token, the fourth does so twice, past a whole split without it.
        lists.slots.iter_mut().filter(|slot| **slot == odd_slot).for_each(|slot| *slot = -1);
        for at in [64 + 5, 3 * 64 + 33, 3 * 64 + 34] {
            lists.slots[at] = odd_slot;
        }
        let clean = dense.listed(lists);
        for (policy, column, odd) in [
            (FIXED, 5, f32::NAN),
            (SplitPolicy::OneSplit, 570, f32::NAN),
            (FIXED, 3, f32::INFINITY),
            (SplitPolicy::Auto, 511, f32::NEG_INFINITY),
        ] {
            let how = How { policy, ..How::default() };
            if !session.takes_inputs(&clean, &how) {
                continue;
            }
            let row = clean.spec.shape.row_elems() as usize;
            let at = (odd_slot as usize * row + column % row) * cache.bytes();
            let mut problem = clean.clone();
            problem.kv[at..][..cache.bytes()].copy_from_slice(&cache.encode_all(&[odd]));
            let result = || -> Result<(), String> {
                let (before, after) =
                    (session.run_decode(&clean, &how)?, session.run_decode(&problem, &how)?);
                let (out, lse) = problem.expected();
                close("lse", &after.lse, &lse, &Tolerance::lse()).into_result()?;
                close("out", &after.out, &out, &session.tolerance(&clean, 1)).into_result()?;
                for token in [0, 2] {
                    for array in [0, 1] {
                        let bytes = before.bits[array].len() / 4;
                        let part = |answer: &Answer| answer.bits[array][token * bytes..][..bytes].to_vec();
                        if part(&before) != part(&after) {
                            return Err(format!("token {token} lists nothing odd, and has other bits"));
                        }
                    }
                }
                Ok(())
            };
            session.note(&format!("{}, {odd} in column {column}, {how:?}", clean.name), result());
        }
    }
    session.finish("non-finite elements in lists");
}

/// Sinks on dense decodes and on sparse ones: no number of them changes the LSE, -inf changes nothing, +inf leaves no output.
pub fn sinks<B: Backend>(session: &Session<'_, B>) {
    let all = [
        (Dtype::Bf16, Dtype::Bf16, 16, Data::Painted),
        (Dtype::E4m3, Dtype::F16, 20, Data::Painted),
        (Dtype::F32, Dtype::F32, 12, Data::BigLogits),
    ];
    for (cache, query, heads, data) in session.one_in(2, all) {
        // Tokens of two sequences have the same large logits, whose roundings would then show in f32.
        let lens: &[(u32, u32)] =
            if data == Data::BigLogits { &[(150, 2), (0, 1)] } else { &[(150, 2), (0, 1), (37, 3)] };
        let dense = Make { cache, query, heads, data, sequences: sequences(lens), ..Make::default() }.build();
        // A list of one large negative logit leaves beside a sink what f32 has no normal number for.
        let lengths = if data == Data::BigLogits { Lengths::All } else { Lengths::Some };
        let listed = dense.listed(Lists::drawn(&dense, 129, lengths, 6));
        for problem in [dense, listed] {
            let with = problem.with_sinks();
            for (policy, lse_base, slab_pages) in [
                (SplitPolicy::OneSplit, LseBase::Two, 0),
                (FIXED, LseBase::E, 0),
                (SplitPolicy::Auto, LseBase::Two, 5),
            ] {
                let how = How { policy, lse_base, slab_pages, ..How::default() };
                session.check(&with, &how);
                if session.takes_inputs(&with, &how) {
                    session.note(
                        &format!("bits of {}, {how:?}", with.name),
                        bits_of_sinks(session, &problem, &how),
                    );
                }
            }
        }
    }
    session.finish("attention sinks");
}

fn bits_of_sinks<B: Backend>(session: &Session<'_, B>, problem: &Problem, how: &How) -> Result<(), String> {
    let with = problem.with_sinks();
    let sinks = with.attn_sink.as_ref().expect("sinks");
    let variant = session.decode_of(&with, how).map_err(|error| error.to_string())?.variant();
    // The variant that is best without sinks may be another.
    let mut forced = Session::new(session.backend);
    forced.variant = Some(variant);
    let (plain, sunk) = (forced.run_decode(problem, how)?, forced.run_decode(&with, how)?);
    if plain.bits[1] != sunk.bits[1] {
        return Err("the LSE has other bits".to_owned());
    }
    let (latent, bytes) = (problem.spec.shape.kv_lora_rank as usize, problem.spec.out.bytes());
    for row in 0..plain.lse.len() {
        let sink = sinks[row % sinks.len()];
        let bits = |answer: &Answer| answer.bits[0][row * latent * bytes..][..latent * bytes].to_vec();
        if sink == f32::NEG_INFINITY && bits(&plain) != bits(&sunk) {
            return Err(format!("row {row} has other bits with a sink of -inf"));
        }
        if sink == f32::INFINITY && sunk.out[row * latent..][..latent].iter().any(|&x| x != 0.0) {
            return Err(format!("row {row} is not 0 with a sink of +inf"));
        }
    }
    Ok(())
}
