//! Decodes whose tokens are dealt out over ranks: each rank decodes its own, and what they give is merged.

use std::time::Duration;

use wgpu_mla::communicator::{Communicator, InProcess};
use wgpu_mla::{
    Backend, CombineForm, ContextParallel, ContextParallelSpec, CorrectAttnOut, CorrectAttnOutArgs, Dtype,
    KvSpec, LseBase, MergeStates, MergeStatesArgs, MlaDecode, View,
};

use super::cache_ops::shares;
use super::decode::{Problem, Sequence, spec};
use super::draw::{Draw, bytes, values};
use super::place::{poisoned, upload};
use super::reference::{Sees, owner, sees};
use super::run::Answer;
use super::{Under, text};

/// A rank's own tokens in pages of its own, under the bounds of the whole.
fn part(whole: &Problem, mine: impl Fn(usize) -> bool, draw: &mut Draw) -> Problem {
    let page_size = whole.spec.kv.page_size as usize;
    let tokens = |sequence: &Sequence| (0..sequence.len).filter(|&t| mine(t)).collect::<Vec<_>>();
    let used: usize = whole.sequences.iter().map(|sequence| tokens(sequence).len().div_ceil(page_size)).sum();
    let order = draw.shuffled(used + 2);
    let key_bytes = whole.spec.shape.row_elems() as usize * whole.spec.kv.dtype().bytes();
    let mut pool = poisoned(draw, order.len() * page_size * key_bytes);
    let (mut free, mut sequences) = (order.iter().copied(), Vec::new());
    for sequence in &whole.sequences {
        let own = tokens(sequence);
        let pages: Vec<usize> = free.by_ref().take(own.len().div_ceil(page_size)).collect();
        for (i, &token) in own.iter().enumerate() {
            let slot = pages[i / page_size] * page_size + i % page_size;
            pool[slot * key_bytes..][..key_bytes].copy_from_slice(whole.key(sequence, token));
        }
        let bound = |i: usize| {
            let seen = sees(&sequence.sees, i, sequence.q_len, sequence.len);
            own.iter().filter(|&&t| t < seen).count()
        };
        let sees = Sees::Bounds((0..sequence.q_len).map(bound).collect());
        sequences.push(Sequence { len: own.len(), q_len: sequence.q_len, pages, sees });
    }
    let kv = KvSpec { num_pages: order.len() as u32, ..whole.spec.kv };
    whole.over(MlaDecode { kv, ..whole.spec }, sequences, pool)
}

/// The crate's arithmetic of shares is the reference's.
fn agree(shares: &wgpu_mla::Shares, rank: u32, whole: &Problem, part: &Problem) -> Result<(), String> {
    let lens = |problem: &Problem| problem.sequences.iter().map(|s| s.len as i32).collect::<Vec<_>>();
    let local = shares.local_seq_lens(rank, &lens(whole)).map_err(text)?;
    if local != lens(part) {
        return Err(format!("local_seq_lens expected {:?} got {local:?}", lens(part)));
    }
    if whole
        .sequences
        .iter()
        .any(|sequence| sequence.sees != Sees::BottomRight || sequence.q_len > sequence.len)
    {
        return Ok(());
    }
    let q_lens: Vec<u32> = whole.sequences.iter().map(|sequence| sequence.q_len as u32).collect();
    let starts = wgpu_mla::query_start_loc(&q_lens).map_err(text)?;
    let bounds = shares.local_bounds(rank, &lens(whole), &starts).map_err(text)?;
    let mut want = Vec::new();
    for sequence in &part.sequences {
        if let Sees::Bounds(bounds) = &sequence.sees {
            want.extend(bounds.iter().map(|&bound| bound as u32));
        }
    }
    if bounds != want {
        return Err(format!("local_bounds expected {want:?} got {bounds:?}"));
    }
    Ok(())
}

pub fn decodes<B: Backend>(
    under: &Under<'_, B>,
    spec_draw: &mut Draw,
    draw: &mut Draw,
) -> Result<(), String> {
    let spec = MlaDecode { out: Dtype::F32, ..spec(spec_draw) };
    let whole = Problem::finite(draw, spec, under.work / 2);
    let (shares, weights, interleave) = shares(draw, 4)?;
    let told = format!("weights {weights:?} by {interleave}, {}", whole.line());
    let expected = whole.expected(under.drops_key);
    let mut parts = Vec::new();
    for rank in 0..weights.len() {
        let part = part(&whole, |token| owner(&weights, interleave, token) == rank, draw);
        agree(&shares, rank as u32, &whole, &part)
            .map_err(|error| format!("rank {rank}: {told}: {error}"))?;
        parts.push(part);
    }
    if whole.total_q() == 0 {
        return Ok(());
    }
    for variant in under.variants(&whole.spec, draw) {
        let check = || -> Result<(), String> {
            let mut answers = Vec::new();
            for (rank, part) in parts.iter().enumerate() {
                // Each rank has another layout.
                let mut own = Draw::new(draw.clone().bits() ^ rank as u64);
                answers.push(
                    part.run(under, variant, &mut own).map_err(|error| format!("rank {rank}: {error}"))?,
                );
            }
            let joined = match draw.clone().below(4) {
                0 => join(under, &whole, &answers, false),
                1 => join(under, &whole, &answers, true),
                _ => exchange(under, &whole, &answers, &mut draw.clone()),
            }?;
            whole.judge(&joined, &expected)
        };
        check().map_err(|error| format!("{variant}: {told}: {error}"))?;
        under.count(&format!("ranks {variant}"));
    }
    Ok(())
}

/// Merged as an all-to-all does it, or weighted and summed.
fn join<B: Backend>(
    under: &Under<'_, B>,
    whole: &Problem,
    answers: &[Answer],
    by_weights: bool,
) -> Result<Answer, String> {
    let (backend, heads) = (under.backend, whole.spec.shape.num_heads);
    let (latent, tokens, world) =
        (whole.spec.shape.kv_lora_rank, whole.total_q() as u32, answers.len() as u32);
    let f32s = |of: &dyn Fn(&Answer) -> &Vec<f64>| {
        upload(backend, &bytes(Dtype::F32, answers.iter().flat_map(|answer| of(answer).iter().copied())))
    };
    let (outs, lses) = (f32s(&|answer| &answer.out)?, f32s(&|answer| &answer.lse)?);
    let rows = u64::from(tokens * heads);
    let room = |elements: u64| backend.buffer(elements * 4).map_err(text);
    let (output, output_lse) = (room(rows * u64::from(latent))?, room(rows)?);
    let fetched = |buffer: &B::Buffer, elements: u64| {
        backend.download(buffer, elements * 4).map(|bytes| values(Dtype::F32, &bytes)).map_err(text)
    };
    let (lse, lse_base) = (View::dense(&lses, heads, 1), LseBase::E);
    let mut out = vec![0.0; (rows * u64::from(latent)) as usize];
    if by_weights {
        let op = CorrectAttnOut { dtype: Dtype::F32, head_size: latent };
        for rank in 0..world {
            let all = View::dense(&outs, heads, latent);
            let args = CorrectAttnOutArgs {
                out: View { offset: u64::from(rank) * rows * u64::from(latent), ..all },
                lses: lse,
                lse_rank_stride: rows,
                output: View::dense(&output, heads, latent),
                output_lse: Some(View::dense(&output_lse, heads, 1)),
                lse_base,
                world,
                rank,
                num_heads: heads,
            };
            backend.once(op, 0..tokens, &args).map_err(text)?;
            let weighted = fetched(&output, rows * u64::from(latent))?;
            out.iter_mut().zip(weighted).for_each(|(sum, x)| *sum += x);
        }
    } else {
        let args = MergeStatesArgs {
            states: View::dense(&outs, heads, latent),
            set_stride: rows * u64::from(latent),
            lse,
            lse_set_stride: rows,
            output: View::dense(&output, heads, latent),
            output_lse: Some(View::dense(&output_lse, heads, 1)),
            lse_base,
            num_heads: heads,
            output_scale: 1.0,
        };
        let op = MergeStates { dtype: Dtype::F32, head_size: latent };
        backend.once(op, (0..tokens, world), &args).map_err(text)?;
        out = fetched(&output, rows * u64::from(latent))?;
    }
    let rounds_weights = answers.iter().any(|answer| answer.rounds_weights);
    Ok(Answer { out, lse: fetched(&output_lse, rows)?, rounds_weights })
}

/// By [`ContextParallel`], a thread a rank; the heads that a rank gets are put together.
fn exchange<B: Backend>(
    under: &Under<'_, B>,
    whole: &Problem,
    answers: &[Answer],
    draw: &mut Draw,
) -> Result<Answer, String> {
    let (backend, heads) = (under.backend, whole.spec.shape.num_heads as usize);
    let (latent, tokens) = (whole.spec.shape.kv_lora_rank as usize, whole.total_q());
    let forms = [CombineForm::AllToAll, CombineForm::AllGatherReduceScatter, CombineForm::AllGather];
    let form = if heads.is_multiple_of(answers.len()) { draw.pick(&forms) } else { CombineForm::AllGather };
    let (lse_base, room) = (draw.pick(&[LseBase::E, LseBase::Two]), tokens + draw.below(3));
    let unit = if lse_base == LseBase::Two { std::f64::consts::LN_2 } else { 1.0 };
    // A rank's results as its decode leaves them, `[heads, room, dim]`; the rest is NaN.
    let by_head = |rows: &[f64], dim: usize, unit: f64| {
        let at = |i: usize| ((i / dim) % room, i / dim / room, i % dim);
        let x = |(token, head, column): (usize, usize, usize)| match token < tokens {
            true => rows[(token * heads + head) * dim + column] / unit,
            false => f64::NAN,
        };
        bytes(Dtype::F32, (0..heads * room * dim).map(|i| x(at(i))))
    };
    let rank = |rank: usize, communicator: &dyn Communicator<B>| -> Result<[Vec<f64>; 2], String> {
        let spec = ContextParallelSpec {
            num_heads: heads as u32,
            kv_lora_rank: latent as u32,
            out: Dtype::F32,
            lse_base,
            rank: rank as u32,
            world: answers.len() as u32,
            max_tokens: room as u32,
            form,
        };
        let mut joined = ContextParallel::new(backend, spec).map_err(text)?;
        let (out, lse) = joined.partial();
        backend.upload(out.buffer, 0, &by_head(&answers[rank].out, latent, 1.0)).map_err(text)?;
        backend.upload(lse.buffer, 0, &by_head(&answers[rank].lse, 1, unit)).map_err(text)?;
        joined.prepare(tokens as u32).map_err(text)?;
        joined.combine(communicator).map_err(text)?;
        // `[tokens, local heads, dim]`.
        let read = |view: View<&B::Buffer>, dim: usize| -> Result<Vec<f64>, String> {
            let held = backend.download(view.buffer, B::size(view.buffer)).map_err(text)?;
            let (held, mut rows) = (values(Dtype::F32, &held), Vec::new());
            for row in 0..tokens * spec.local_heads() as usize {
                let (token, head) = (row / spec.local_heads() as usize, row % spec.local_heads() as usize);
                let at = view.offset + token as u64 * view.token_stride + head as u64 * view.head_stride;
                rows.extend_from_slice(&held[at as usize..][..dim]);
            }
            Ok(rows)
        };
        Ok([read(joined.out(), latent)?, read(joined.lse(), 1)?])
    };
    let group = InProcess::group(answers.len() as u32, Duration::from_secs(60)).map_err(text)?;
    let parts: Result<Vec<[Vec<f64>; 2]>, String> = std::thread::scope(|scope| {
        let start = |(at, communicator)| scope.spawn(move || rank(at, &communicator));
        let threads: Vec<_> = group.into_iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().map_err(|_| "a rank panicked".to_owned())?).collect()
    });
    let parts = parts.map_err(|error| format!("{form:?}: {error}"))?;
    let local = parts[0][1].len() / tokens;
    let joined = |part: usize, dim: usize, unit: f64| -> Vec<f64> {
        let row = |row: usize| {
            let (token, head) = (row / heads, row % heads);
            &parts[head / local][part][(token * local + head % local) * dim..][..dim]
        };
        (0..tokens * heads).flat_map(row).map(|x| x * unit).collect()
    };
    let rounds_weights = answers.iter().any(|answer| answer.rounds_weights);
    Ok(Answer { out: joined(0, latent, 1.0), lse: joined(1, 1, unit), rounds_weights })
}
