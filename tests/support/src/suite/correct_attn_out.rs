//! `correct_attn_out` against the oracle, and its sum over the ranks against the merge of them.

use wgpu_mla::{Backend, CorrectAttnOut, CorrectAttnOutArgs, Dtype, Error, LseBase, View};

use super::Session;
use super::memory::{Strides, download, gather, scatter, upload};
use super::merge_states::Case;
use super::run::{Layout, Output};
use crate::close::{Tolerance, close};
use crate::paint::POISON;
use crate::reference::{correct_attn_out, merge_states_in};

fn text(error: Error) -> String {
    error.to_string()
}

/// Every rank of worlds of 1 to 9, LSEs of any kind, in both bases; written head by head, as a reduce-scatter takes it.
pub fn corrections<B: Backend>(session: &Session<'_, B>) {
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        // The last few are of rows that are no multiple of 8 elements.
        for (world, tokens, heads, head_size) in
            [(1, 3, 2, 8), (2, 7, 3, 128), (9, 5, 6, 72), (3, 5, 4, 70), (8, 4, 3, 37), (4, 6, 1, 1)]
        {
            for lse_base in [LseBase::E, LseBase::Two] {
                let case = Case::new(dtype, lse_base, world, tokens, heads, head_size);
                let what = format!("{world} ranks {dtype} {tokens}x{heads}x{head_size} base {lse_base:?}");
                session.note(&what, check(&case, session.backend));
            }
        }
    }
    session.finish("corrections of ranks");
}

fn check<B: Backend>(case: &Case, backend: &B) -> Result<(), String> {
    let [world, tokens, heads, head_size] = case.dims;
    let (dtype, rows) = (case.spec.dtype, tokens * heads);
    let values: Vec<f64> = dtype.decode_all(&case.states).into_iter().map(f64::from).collect();
    let state = |rank: usize, row: usize| &values[(rank * rows + row) * head_size..][..head_size];
    let lses =
        |row: usize| -> Vec<f64> { (0..world).map(|rank| f64::from(case.lse[rank * rows + row])).collect() };
    let mut sums = vec![0.0; rows * head_size];
    for rank in 0..world {
        let (bytes, logs) = run(case, backend, rank)?;
        let got = dtype.decode_all(&bytes);
        let (mut want, mut want_lse) = (vec![], vec![]);
        for row in 0..rows {
            let all = lses(row);
            let (row_out, row_lse) = correct_attn_out(case.lse_base, state(rank, row), &all, rank);
            let some = all.iter().filter(|lse| lse.is_finite()).count();
            let size = head_size * dtype.bytes();
            let at = |array: &[u8], row: usize| array[row * size..][..size].to_vec();
            let kept = at(&case.states, rank * rows + row);
            let exact = match (all[rank].is_finite(), some) {
                (true, 1) => at(&bytes, row) == kept,
                (false, _) => at(&bytes, row).iter().all(|&byte| byte == 0),
                _ => true,
            };
            if !exact {
                return Err(format!(
                    "rank {rank}, row {row}: a rank alone must keep its bits, one without a part give 0"
                ));
            }
            want.extend(row_out);
            want_lse.push(row_lse);
        }
        let what = format!("output of rank {rank}");
        close(&what, &got, &want, &Tolerance::merge(dtype)).into_result()?;
        close("output_lse", &logs, &want_lse, &Tolerance::merge_lse()).into_result()?;
        sums.iter_mut().zip(&got).for_each(|(sum, &x)| *sum += f64::from(x));
    }
    // The sum of what is rounded to 16 bits has the error of each summand.
    let combined: Vec<f64> = (0..rows)
        .flat_map(|row| {
            let all = lses(row);
            let partials: Vec<_> = (0..world).map(|rank| (state(rank, row), all[rank])).collect();
            merge_states_in(case.lse_base, &partials).0
        })
        .collect();
    let sums: Vec<f32> = sums.into_iter().map(|x| x as f32).collect();
    close("the sum over the ranks", &sums, &combined, &Tolerance::merge(dtype)).into_result().map(drop)
}

/// The output of a rank, dense, and the LSE of the whole.
fn run<B: Backend>(case: &Case, backend: &B, rank: usize) -> Result<(Vec<u8>, Vec<f32>), String> {
    let [world, tokens, heads, head_size] = case.dims;
    let (dtype, rows) = (case.spec.dtype, tokens * heads);
    let unit = if head_size % 8 == 0 { 8 } else { 1 };
    let (dims, elem) = ([tokens, heads, head_size], dtype.bytes());
    let own = &case.states[rank * rows * head_size * elem..][..rows * head_size * elem];
    let from = Layout::Gaps.strides(dims, unit);
    let out = upload(backend, &scatter(own, dims, elem, from)).map_err(text)?;
    let lses = upload(backend, &Dtype::F32.encode_all(&case.lse)).map_err(text)?;
    let to = Output::new(dims, dtype, Layout::HeadMajor, unit);
    let output = upload(backend, &vec![POISON; to.len]).map_err(text)?;
    let (log_dims, log_at) = ([tokens, heads, 1], Strides { offset: 3, token: 1, head: tokens + 2 });
    let log_bytes = log_at.end(log_dims) * 4;
    let log_buffer = upload(backend, &vec![POISON; log_bytes]).map_err(text)?;
    let args = CorrectAttnOutArgs {
        out: from.view(&out),
        lses: View::dense(&lses, heads as u32, 1),
        lse_rank_stride: rows as u64,
        output: to.strides.view(&output),
        output_lse: Some(log_at.view(&log_buffer)),
        lse_base: case.lse_base,
        world: world as u32,
        rank: rank as u32,
        num_heads: heads as u32,
    };
    let spec = CorrectAttnOut { dtype, head_size: head_size as u32 };
    // In two steps, of which the second leaves the first one's tokens as they are.
    for tokens in [0..1, 1..tokens as u32] {
        backend.once(spec, tokens, &args).map_err(text)?;
    }
    let bytes = to.read(backend, &output).map_err(|error| format!("output: {error}"))?;
    let logs = download(backend, &log_buffer, log_bytes).map_err(text)?;
    let (logs, intact) = gather(&logs, log_dims, 4, log_at);
    intact.map_err(|error| format!("output_lse: {error}"))?;
    Ok((bytes, Dtype::F32.decode_all(&logs)))
}

/// What is wrong is refused, and nothing runs.
pub fn refuses_corrections<B: Backend>(session: &Session<'_, B>) {
    let backend = session.backend;
    let result = || -> Result<(), Error> {
        let (out, lses) = (backend.buffer(4 * 2 * 16 * 4)?, backend.buffer(3 * 4 * 2 * 4)?);
        let (output, output_lse) = (backend.buffer(4 * 2 * 16 * 4)?, backend.buffer(4 * 2 * 4)?);
        let good = CorrectAttnOut { dtype: Dtype::F32, head_size: 16 };
        let args = CorrectAttnOutArgs {
            out: View::dense(&out, 2, 16),
            lses: View::dense(&lses, 2, 1),
            lse_rank_stride: 4 * 2,
            output: View::dense(&output, 2, 16),
            output_lse: Some(View::dense(&output_lse, 2, 1)),
            lse_base: LseBase::E,
            world: 3,
            rank: 2,
            num_heads: 2,
        };
        session.note("good", backend.once(good, 0..4, &args).map_err(text));
        session.note("no token", backend.once(good, 3..3, &args).map_err(text));
        let refuses = |spec: CorrectAttnOut, args: CorrectAttnOutArgs<&B::Buffer>, why: &str| {
            let noted = match backend.once(spec, 0..4, &args) {
                Err(error) if error.to_string().contains(why) => Ok(()),
                other => Err(format!("{other:?} says nothing of {why}")),
            };
            session.note(why, noted);
        };
        refuses(CorrectAttnOut { dtype: Dtype::E4m3, ..good }, args, "e4m3");
        refuses(CorrectAttnOut { head_size: 0, ..good }, args, "head_size");
        for (args, why) in [
            (CorrectAttnOutArgs { world: 0, ..args }, "world"),
            (CorrectAttnOutArgs { world: 1 << 17, ..args }, "world"),
            (CorrectAttnOutArgs { rank: 3, ..args }, "rank"),
            (CorrectAttnOutArgs { world: 4, ..args }, "lses"),
            (CorrectAttnOutArgs { lse_rank_stride: u64::MAX, ..args }, "lses"),
            (CorrectAttnOutArgs { lse_rank_stride: 0, ..args }, "lse_rank_stride 0: makes sets overlap"),
            (CorrectAttnOutArgs { lse_rank_stride: 7, ..args }, "lse_rank_stride 7: makes sets overlap"),
            (CorrectAttnOutArgs { lses: View { token_stride: 1, ..args.lses }, ..args }, "lses 1"),
            (CorrectAttnOutArgs { out: View { head_stride: 0, ..args.out }, ..args }, "out 0"),
            (CorrectAttnOutArgs { out: View { offset: 4, ..args.out }, ..args }, "out"),
            (CorrectAttnOutArgs { output: View { token_stride: 16, ..args.output }, ..args }, "output"),
            (CorrectAttnOutArgs { output: View { offset: 8, ..args.output }, ..args }, "output"),
            (CorrectAttnOutArgs { output: View { buffer: &out, ..args.output }, ..args }, "out"),
            (CorrectAttnOutArgs { output_lse: Some(View::dense(&lses, 2, 1)), ..args }, "lses"),
        ] {
            refuses(good, args, why);
        }
        Ok(())
    }();
    session.note("refusals", result.map_err(text));
    session.finish("refusals of corrections");
}
