//! Attention over expanded keys (`mla_prefill`) against the oracle.

use crate::reference::{Expanded, mla_prefill};
use wgpu_mla::{
    Backend, Candidate, Dtype, Error, Mask, MlaPrefill, MlaPrefillArgs, PrefillOptions, PrefillSequence, View,
};

use super::Session;
use super::memory::{Strides, scatter, upload};
use super::run::{Layout, Output};
use crate::close::{Tolerance, close};
use crate::paint::{POISON, Rng};

const SCALE: f32 = 0.114_721;

fn spec(heads: u32, [nope, rope, value]: [u32; 3], dtype: Dtype, out: Dtype) -> MlaPrefill {
    let (qk_nope_head_dim, qk_rope_head_dim, v_head_dim) = (nope, rope, value);
    MlaPrefill { num_heads: heads, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, dtype, out }
}

/// The variants that a session runs: the forced one, or all that run here.
pub(super) fn variants<B: Backend>(session: &Session<'_, B>, spec: &MlaPrefill) -> Vec<Candidate> {
    // `coop_few` has no decode variant of its name: it runs with the decode variant of the same requirements.
    let name = |found: &Candidate| if found.name == "coop_few" { "coop_small" } else { found.name };
    let wanted = |found: &Candidate| session.variant.is_none_or(|wanted| wanted == name(found));
    let all = session.backend.variants(spec).into_iter();
    let runs: Vec<_> = all.filter(|found| found.lacks.is_none() && wanted(found)).collect();
    if runs.is_empty() {
        session.leave_out();
    }
    runs
}

pub(super) fn forced(variant: &str) -> PrefillOptions {
    PrefillOptions { variant: Some(variant.to_owned()), ..PrefillOptions::default() }
}

/// Lengths around blocks and tiles, every kind of mask, rows that see nothing, gaps between sequences.
fn batch() -> Vec<PrefillSequence> {
    let causal = Mask::CausalFrom;
    let all = [
        (1, 1, causal(1)),
        (70, 70, causal(1)),
        (5, 130, causal(126)),
        (3, 9, Mask::Full),
        (9, 4, causal(-4)),
        (2, 0, Mask::Full),
        (0, 7, Mask::Full),
        (4, 70, Mask::Full),
        (17, 40, causal(-3)),
        (2, 33, causal(i64::MAX)),
        (1, 5, causal(i64::MIN)),
    ];
    let (mut q_begin, mut kv_begin) = (2, 3);
    let mut sequences = Vec::new();
    for (q_len, kv_len, mask) in all {
        let out_begin = q_begin;
        sequences.push(PrefillSequence { q_begin, q_len, kv_begin, kv_len, mask, out_begin });
        q_begin += q_len + 1;
        kv_begin += kv_len + 2;
    }
    // Queries that see the keys of another sequence.
    sequences.push(PrefillSequence { q_begin, q_len: 3, out_begin: q_begin, ..sequences[2] });
    // Queries of another sequence that see other keys, and then none: rows of their own.
    let out_begin = q_begin + 5;
    sequences.push(PrefillSequence { out_begin, ..PrefillSequence::full(5, 66, 9, 61) });
    sequences.push(PrefillSequence { out_begin: out_begin + 66, ..PrefillSequence::full(3, 4, 0, 0) });
    sequences
}

/// Arrays of a batch, values as the dtype holds them. Rows of no sequence, and keys that no query sees, are poison.
struct Problem {
    spec: MlaPrefill,
    sequences: Vec<PrefillSequence>,
    tokens: usize,
    keys: usize,
    /// Rows of the output.
    rows: usize,
    /// q_nope, q_pe, k_nope, k_pe, v: dense, encoded.
    arrays: [Vec<u8>; 5],
}

impl Problem {
    /// `value` makes an element of a query, a key, or a value (0, 1, 2).
    fn new(spec: MlaPrefill, mut value: impl FnMut(&mut Rng, usize) -> f32) -> Self {
        let sequences = batch();
        let tokens = sequences.iter().map(|s| s.q_begin + s.q_len).max().unwrap_or(0) as usize + 1;
        let rows = sequences.iter().map(|s| s.out_begin + s.q_len).max().unwrap_or(0) as usize + 1;
        let keys = sequences.iter().map(|s| s.kv_begin + s.kv_len).max().unwrap_or(0) as usize + 1;
        let (mut queried, mut seen) = (vec![false; tokens], vec![false; keys]);
        for s in &sequences {
            for i in 0..s.q_len {
                queried[(s.q_begin + i) as usize] = true;
                let sees = match s.mask {
                    Mask::CausalFrom(first) => {
                        (i128::from(first) + i128::from(i)).clamp(0, s.kv_len.into()) as i64
                    }
                    _ => s.kv_len.into(),
                };
                seen[s.kv_begin as usize..][..sees as usize].fill(true);
            }
        }
        let heads = spec.num_heads as usize;
        let [nope, rope, dim] =
            [spec.qk_nope_head_dim, spec.qk_rope_head_dim, spec.v_head_dim].map(|dim| dim as usize);
        let mut rng = Rng(u64::from(spec.qk_nope_head_dim));
        let mut array = |used: &[bool], row: usize, kind: usize| {
            let mut bytes = Vec::new();
            for &used in used {
                for _ in 0..row {
                    if used {
                        spec.dtype.encode(value(&mut rng, kind), &mut bytes);
                    } else {
                        bytes.extend(std::iter::repeat_n(POISON, spec.dtype.bytes()));
                    }
                }
            }
            bytes
        };
        let arrays = [
            array(&queried, heads * nope, 0),
            array(&queried, heads * rope, 0),
            array(&seen, heads * nope, 1),
            array(&seen, rope, 1),
            array(&seen, heads * dim, 2),
        ];
        Self { spec, sequences, tokens, keys, rows, arrays }
    }

    /// Runs it and compares; gives the bytes of out and LSE.
    fn check<B: Backend>(
        &self,
        backend: &B,
        variant: &Candidate,
        layout: Layout,
        sequences: &[PrefillSequence],
    ) -> Result<[Vec<u8>; 2], String> {
        let Self { spec, tokens, keys, rows, ref arrays, .. } = *self;
        let heads = spec.num_heads as usize;
        let [nope, rope, dim] =
            [spec.qk_nope_head_dim, spec.qk_rope_head_dim, spec.v_head_dim].map(|dim| dim as usize);
        let elem = spec.dtype.bytes();
        let text = |error: Error| error.to_string();
        let second = if layout == Layout::HeadMajor { Layout::Gaps } else { layout };
        let place = |bytes: &[u8], dims: [usize; 3], layout: Layout| -> Result<_, String> {
            let strides = layout.strides(dims, 8);
            Ok((upload(backend, &scatter(bytes, dims, elem, strides)).map_err(text)?, strides))
        };
        let (q_nope, q_nope_at) = place(&arrays[0], [tokens, heads, nope], layout)?;
        let (q_pe, q_pe_at) = place(&arrays[1], [tokens, heads, rope], second)?;
        let (k_pe, k_pe_at) = place(&arrays[3], [keys, 1, rope], second)?;
        // Keys and values are two arrays, or one of `[S, H, P + V]` as `kv_b_proj` makes it.
        let joined: Vec<u8> = arrays[2]
            .chunks_exact(nope * elem)
            .zip(arrays[4].chunks_exact(dim * elem))
            .flat_map(|(k, v)| [k, v].concat())
            .collect();
        let (k_nope, k_nope_at);
        let (v, v_at);
        if layout == Layout::Gaps {
            (k_nope, k_nope_at) = place(&joined, [keys, heads, nope + dim], layout)?;
            (v, v_at) = (None, Strides { offset: k_nope_at.offset + nope, ..k_nope_at });
        } else {
            (k_nope, k_nope_at) = place(&arrays[2], [keys, heads, nope], second)?;
            let placed = place(&arrays[4], [keys, heads, dim], layout)?;
            (v, v_at) = (Some(placed.0), placed.1);
        }
        let out = Output::new([rows, heads, dim], spec.out, layout, 8);
        let lse = Output::new([rows, heads, 1], Dtype::F32, layout, 1);
        let out_buffer = upload(backend, &vec![POISON; out.len]).map_err(text)?;
        let lse_buffer = upload(backend, &vec![POISON; lse.len]).map_err(text)?;
        let args = MlaPrefillArgs {
            q_nope: q_nope_at.view(&q_nope),
            q_pe: q_pe_at.view(&q_pe),
            k_nope: k_nope_at.view(&k_nope),
            k_pe: View { head_stride: 0, ..k_pe_at.view(&k_pe) },
            v: v_at.view(v.as_ref().unwrap_or(&k_nope)),
            out: out.strides.view(&out_buffer),
            lse: lse.strides.view(&lse_buffer),
            softmax_scale: SCALE,
            v_scale: 1.0,
        };
        backend.once_with(spec, &forced(variant.name), sequences, &args).map_err(text)?;
        let out_bytes = out.read(backend, &out_buffer).map_err(|error| format!("out: {error}"))?;
        let lse_bytes = lse.read(backend, &lse_buffer).map_err(|error| format!("lse: {error}"))?;
        self.compare(variant, &out_bytes, &lse_bytes)?;
        Ok([out_bytes, lse_bytes])
    }

    fn compare(&self, variant: &Candidate, out_bytes: &[u8], lse_bytes: &[u8]) -> Result<(), String> {
        let spec = self.spec;
        let (heads, dim) = (spec.num_heads as usize, spec.v_head_dim as usize);
        let [q_nope, q_pe, k_nope, k_pe, v] = [0, 1, 2, 3, 4].map(|i| spec.dtype.decode_all(&self.arrays[i]));
        let args = Expanded {
            num_heads: heads,
            qk_nope_head_dim: spec.qk_nope_head_dim as usize,
            qk_rope_head_dim: spec.qk_rope_head_dim as usize,
            v_head_dim: dim,
            q_nope: &q_nope,
            q_pe: &q_pe,
            k_nope: &k_nope,
            k_pe: &k_pe,
            v: &v,
            softmax_scale: SCALE.into(),
        };
        // A row of no sequence is left as it was.
        let mut written = vec![false; self.rows * heads];
        let (out, lse) = (spec.out.decode_all(out_bytes), Dtype::F32.decode_all(lse_bytes));
        let (mut got, mut want, mut got_lse, mut want_lse) = (vec![], vec![], vec![], vec![]);
        for (row, head, row_out, row_lse) in mla_prefill(&args, &self.sequences) {
            let at = row * heads + head;
            written[at] = true;
            let row_got = &out[at * dim..][..dim];
            if row_lse == f64::NEG_INFINITY
                && (row_got.iter().any(|&x| x != 0.0) || lse[at].to_bits() != 0xFF80_0000)
            {
                return Err(format!(
                    "row {row} head {head} sees no key: out must be 0 and lse the bits of -inf"
                ));
            }
            got.extend(row_got);
            want.extend(row_out);
            got_lse.push(lse[at]);
            want_lse.push(row_lse);
        }
        let elem = spec.out.bytes();
        for at in (0..written.len()).filter(|&at| !written[at]) {
            let bytes = out_bytes[at * dim * elem..][..dim * elem].iter().chain(&lse_bytes[at * 4..][..4]);
            if bytes.into_iter().any(|&byte| byte != POISON) {
                return Err(format!("row {} is in no sequence and was written", at / heads));
            }
        }
        let largest = v.iter().filter(|x| x.is_finite()).fold(0f64, |max, x| max.max(x.abs().into()));
        let tolerance =
            Tolerance::decode(spec.dtype, spec.dtype, spec.out, variant.rounds_weights, largest, dim);
        close("lse", &got_lse, &want_lse, &Tolerance::lse()).into_result()?;
        close("out", &got, &want, &tolerance).into_result().map(drop)
    }
}

/// Dims of models, with and without a rotary part, every dtype, layouts; the order of sequences changes no bit.
pub fn prefill_shapes<B: Backend>(session: &Session<'_, B>) {
    let specs = [
        spec(3, [16, 32, 16], Dtype::F32, Dtype::F32),
        spec(2, [64, 32, 64], Dtype::F16, Dtype::F16),
        spec(2, [128, 64, 128], Dtype::Bf16, Dtype::Bf16),
        spec(1, [24, 0, 72], Dtype::F16, Dtype::F32),
        spec(1, [192, 64, 256], Dtype::F16, Dtype::F32),
        spec(2, [64, 64, 128], Dtype::Bf16, Dtype::F32),
    ];
    for (i, spec) in specs.into_iter().enumerate() {
        let variants = variants(session, &spec);
        if variants.is_empty() {
            session.leave_out();
            continue;
        }
        let scale = [1.0, 1.0, 0.1];
        let mut problem = Problem::new(spec, |rng, kind| rng.randn() * scale[kind]);
        let layouts = [Layout::Dense, Layout::Gaps, Layout::HeadMajor];
        for variant in &variants {
            for layout in if i < 2 { &layouts[..] } else { &layouts[1..2] } {
                let what = format!("{} {spec:?} {layout:?}", variant.name);
                let result = problem.check(session.backend, variant, *layout, &problem.sequences);
                if let (Ok(bits), Layout::Gaps) = (&result, layout) {
                    let reversed: Vec<_> = problem.sequences.iter().rev().copied().collect();
                    let again = problem
                        .check(session.backend, variant, *layout, &reversed)
                        .and_then(|again| if again == *bits { Ok(()) } else { Err("other bits".to_owned()) });
                    session.note(&format!("{what}, in reverse"), again);
                }
                session.note(&what, result.map(drop));
            }
            // Nothing to see at all: there is room for no key.
            let unseeing = vec![PrefillSequence::full(3, 4, 0, 0)];
            let batch = std::mem::replace(&mut problem.sequences, unseeing);
            let result = problem.check(session.backend, variant, Layout::Dense, &problem.sequences);
            session.note(&format!("{} {spec:?} without keys", variant.name), result.map(drop));
            problem.sequences = batch;
        }
    }
    session.finish("prefill: shapes");
}

/// Views with strides of 0, all of whose rows are one row: the bits of arrays that hold it as often.
pub fn prefill_repeated_rows<B: Backend>(session: &Session<'_, B>) {
    const TOKENS: u32 = 5;
    const KEYS: u32 = 9;
    let spec = spec(2, [128, 64, 128], Dtype::F16, Dtype::F16);
    let variants = variants(session, &spec);
    if variants.is_empty() {
        session.leave_out();
    }
    for variant in &variants {
        let run = |times: [u32; 2], strides: bool| -> Result<Vec<u8>, Error> {
            let mut rng = Rng(9);
            let mut array = |dim: u32, times: u32| {
                let row: Vec<f32> = (0..dim).map(|_| rng.randn()).collect();
                upload(session.backend, &spec.dtype.encode_all(&row.repeat(times as usize)))
            };
            let (q_nope, q_pe) = (array(2 * 128, times[0])?, array(2 * 64, times[0])?);
            let (k_nope, k_pe, v) =
                (array(2 * 128, times[1])?, array(64, times[1])?, array(2 * 128, times[1])?);
            let out = session.backend.buffer(u64::from(TOKENS) * 2 * 128 * 2)?;
            let lse = session.backend.buffer(u64::from(TOKENS) * 2 * 4)?;
            let of = |buffer, heads, dim| {
                let dense = View::dense(buffer, heads, dim);
                if strides { View { token_stride: 0, ..dense } } else { dense }
            };
            let args = MlaPrefillArgs {
                q_nope: of(&q_nope, 2, 128),
                q_pe: of(&q_pe, 2, 64),
                k_nope: of(&k_nope, 2, 128),
                k_pe: View { head_stride: 0, ..of(&k_pe, 1, 64) },
                v: of(&v, 2, 128),
                out: View::dense(&out, 2, 128),
                lse: View::dense(&lse, 2, 1),
                softmax_scale: SCALE,
                v_scale: 1.0,
            };
            let batch = [PrefillSequence::full(0, TOKENS, 0, KEYS)];
            session.backend.once_with(spec, &forced(variant.name), &batch, &args)?;
            session.backend.download(&out, u64::from(TOKENS) * 2 * 128 * 2)
        };
        let result = run([TOKENS, KEYS], false).and_then(|whole| Ok((whole, run([1, 1], true)?)));
        let result = match result {
            Ok((whole, repeated)) if whole == repeated => Ok(()),
            Ok(_) => Err("other bits".to_owned()),
            Err(error) => Err(error.to_string()),
        };
        session.note(variant.name, result);
    }
    session.finish("prefill: repeated rows");
}

/// Logits beyond 100, values of very different sizes, bf16 beyond f16's range, subnormals and zeros.
pub fn prefill_hard_data<B: Backend>(session: &Session<'_, B>) {
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        let spec = match dtype {
            Dtype::F16 => spec(2, [64, 32, 64], dtype, Dtype::F16),
            Dtype::Bf16 => spec(2, [128, 64, 128], dtype, Dtype::Bf16),
            _ => spec(3, [16, 32, 16], dtype, Dtype::F32),
        };
        let variants = variants(session, &spec);
        if variants.is_empty() {
            session.leave_out();
        }
        for variant in &variants {
            let note = |what: &str, value: &mut dyn FnMut(&mut Rng, usize) -> f32| {
                let problem = Problem::new(spec, value);
                let result =
                    problem.check(session.backend, variant, Layout::Dense, &problem.sequences).map(drop);
                session.note(&format!("{} {dtype} {what}", variant.name), result);
            };
            note("large logits", &mut |rng, kind| rng.randn() * [12.0, 4.0, 0.1][kind]);
            note("one key takes all", &mut |rng, kind| match kind {
                1 if rng.below(40) == 0 => 60.0,
                _ => rng.randn() * [1.0, 0.1, 1.0][kind],
            });
            note("values of 300 and 1e-4", &mut |rng, kind| match (kind, rng.below(2)) {
                (2, 0) => 300.0,
                (2, _) => 1e-4,
                _ => rng.randn(),
            });
            note("zeros", &mut |_, _| 0.0);
            note("small keys", &mut |rng, kind| rng.randn() * [1e3, 1e-3, 0.1][kind]);
            if dtype != Dtype::F16 {
                note("values of 1e5", &mut |rng, kind| {
                    let x = rng.randn();
                    if kind == 2 && rng.below(50) == 0 { x.signum() * 1e5 } else { x }
                });
                note("keys of 1e5", &mut |rng, kind| match kind {
                    1 if rng.below(100) == 0 => 1e5,
                    0 => rng.randn() * 1e-4,
                    _ => rng.randn() * 0.1,
                });
                note("queries of 1e5", &mut |rng, kind| rng.randn() * [1e5, 1e-4, 0.1][kind]);
            }
        }
    }
    session.finish("prefill: hard data");
}

/// What is wrong is refused, and nothing runs.
pub fn prefill_errors<B: Backend>(session: &Session<'_, B>) {
    let backend = session.backend;
    let good = spec(2, [16, 32, 16], Dtype::F32, Dtype::F32);
    if variants(session, &good).is_empty() {
        session.leave_out();
        return session.finish("prefill: errors");
    }
    let result = || -> Result<(), Error> {
        let buffer = |elems: u64| backend.buffer(elems * 4);
        let (q, k, v, out, lse) = (buffer(4096)?, buffer(4096)?, buffer(4096)?, buffer(4096)?, buffer(64)?);
        let args = MlaPrefillArgs {
            q_nope: View::dense(&q, 2, 16),
            q_pe: View::dense(&q, 2, 32),
            k_nope: View::dense(&k, 2, 16),
            k_pe: View { head_stride: 0, ..View::dense(&k, 1, 32) },
            v: View::dense(&v, 2, 16),
            out: View::dense(&out, 2, 16),
            lse: View::dense(&lse, 2, 1),
            softmax_scale: 0.1,
            v_scale: 1.0,
        };
        let one = [PrefillSequence::causal(0, 8, 0, 8)];
        let refuses = |what: &str, result: Result<(), Error>, why: &str| {
            let noted = match result {
                Err(error) if error.to_string().contains(why) => Ok(()),
                other => Err(format!("{other:?} says nothing of {why}")),
            };
            session.note(what, noted);
        };
        let run = |spec: &MlaPrefill, batch: &[PrefillSequence], args: &_| backend.once(*spec, batch, args);
        session.note("good", run(&good, &one, &args).map_err(|error| error.to_string()));
        for scale in [6e-31, 1e-30, 8e29] {
            let args = MlaPrefillArgs { softmax_scale: scale, ..args };
            session.note("a scale in its range", run(&good, &one, &args).map_err(|error| error.to_string()));
        }
        session.note("no sequence", run(&good, &[], &args).map_err(|error| error.to_string()));
        for (spec, why) in [
            (MlaPrefill { dtype: Dtype::E4m3, ..good }, "e4m3"),
            (MlaPrefill { out: Dtype::E4m3, ..good }, "e4m3"),
            (MlaPrefill { num_heads: 0, ..good }, "num_heads"),
            (MlaPrefill { qk_nope_head_dim: 12, ..good }, "qk_nope_head_dim"),
            (MlaPrefill { qk_rope_head_dim: 1024, ..good }, "qk_rope_head_dim"),
            (MlaPrefill { v_head_dim: 0, ..good }, "v_head_dim"),
        ] {
            refuses(why, run(&spec, &one, &args), why);
        }
        for scale in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-45, 5e-31, 9e29, 3e38] {
            refuses(
                "a scale",
                run(&good, &one, &MlaPrefillArgs { softmax_scale: scale, ..args }),
                "softmax_scale",
            );
        }
        for (args, why) in [
            (MlaPrefillArgs { q_nope: View { offset: 4, ..args.q_nope }, ..args }, "q_nope"),
            (MlaPrefillArgs { k_pe: View { token_stride: 33, ..args.k_pe }, ..args }, "k_pe"),
            (MlaPrefillArgs { v: View { head_stride: 2, ..args.v }, ..args }, "v"),
            (MlaPrefillArgs { v: View { head_stride: 0, ..args.v }, ..args }, "v 0"),
            (MlaPrefillArgs { v: View { token_stride: 16, ..args.v }, ..args }, "v 16"),
            (MlaPrefillArgs { k_nope: View { token_stride: 16, ..args.k_nope }, ..args }, "k_nope 16"),
            (MlaPrefillArgs { k_pe: View { token_stride: 16, ..args.k_pe }, ..args }, "k_pe 16"),
            (MlaPrefillArgs { k_pe: View { head_stride: 8, ..args.k_pe }, ..args }, "k_pe 8"),
            (MlaPrefillArgs { q_nope: View { token_stride: 8, ..args.q_nope }, ..args }, "q_nope 8"),
            (MlaPrefillArgs { q_pe: View { head_stride: 16, ..args.q_pe }, ..args }, "q_pe 16"),
            (MlaPrefillArgs { out: View { head_stride: 8, ..args.out }, ..args }, "out"),
            (MlaPrefillArgs { lse: View { offset: 60, ..args.lse }, ..args }, "lse"),
            (MlaPrefillArgs { q_pe: View { offset: 4096, ..args.q_pe }, ..args }, "q_pe"),
            (MlaPrefillArgs { k_nope: View { offset: 4096, ..args.k_nope }, ..args }, "k_nope"),
            (MlaPrefillArgs { v: View { buffer: &out, ..args.v }, ..args }, "out"),
            (MlaPrefillArgs { lse: View { buffer: &q, ..args.lse }, ..args }, "lse"),
        ] {
            refuses(why, run(&good, &one, &args), why);
        }
        let twice = [one[0], PrefillSequence { out_begin: 7, ..one[0] }];
        refuses("a row twice", run(&good, &twice, &args), "row of out 7");
        let far = [PrefillSequence { out_begin: 8000, ..one[0] }];
        let bounds = [PrefillSequence { mask: Mask::Bounds(&[1, 1, 1]), ..one[0] }];
        refuses("bounds", run(&good, &bounds, &args), "Mask::CausalFrom");
        refuses("past the rows", run(&good, &far, &args), "out");
        let long = [PrefillSequence { kv_len: u32::MAX, ..one[0] }];
        refuses("too long", run(&good, &long, &args), "keys");
        let long = [PrefillSequence { kv_len: 4096, ..one[0] }];
        refuses("past the keys", run(&good, &long, &args), "k_nope");
        refuses("a variant", backend.once_with(good, &forced("none"), &one, &args), "none");
        Ok(())
    }();
    session.note("prefill errors", result.map_err(|error| error.to_string()));
    session.finish("prefill: errors");
}
