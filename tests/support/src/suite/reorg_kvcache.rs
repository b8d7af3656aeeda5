//! `reorg_kvcache` against the oracle, byte for byte, and after gathers of every rank against a gather of the whole.

use wgpu_mla::{
    Backend, Dtype, Error, GatherBatch, GatherRange, KvGather, KvGatherArgs, KvView, ReorgBatch, ReorgChunk,
    ReorgKvCache, ReorgKvCacheArgs, Result, Shares, View,
};

use super::Session;
use super::memory::{Strides, download, gather, scatter, upload};
use super::run::dense_table;
use crate::paint::{Make, POISON, Problem, Rng, sequences};
use crate::ranks::cut;
use crate::reference::{Chunk, reorg_kvcache};

fn text(error: Error) -> String {
    error.to_string()
}

/// Any shares, chunks that begin and end anywhere, rows and ranks with gaps.
pub fn reorgs<B: Backend>(session: &Session<'_, B>) {
    let mut turn = 0;
    for dtype in Dtype::ALL {
        for row_elems in [4, 36, 576] {
            for interleave in [1, 3, 16] {
                let world = turn as u32 % 8 + 1;
                let weights = [&[7, 2, 1][..], &[1, 0, 3], &[5]][turn % 3];
                for shares in [Shares::even(world, interleave), Shares::weighted(weights, interleave)] {
                    let result = shares.map_err(text).and_then(|shares| {
                        check(session.backend, ReorgKvCache { dtype, row_elems }, &shares, turn as u64)
                    });
                    session
                        .note(&format!("{dtype} rows of {row_elems}, {world} ranks by {interleave}"), result);
                }
                turn += 1;
            }
        }
    }
    session.finish("reorgs of gathered parts");
}

/// Chunks of a batch, laid out one after the other on every rank and in the output, with a gap after the first.
fn chunks(shares: &Shares, lens: &[(u32, u32)]) -> Vec<ReorgChunk> {
    let (mut local_row, mut out_row) = (1, 2);
    let chunk = |&(begin, tokens): &(u32, u32)| {
        let chunk = ReorgChunk { begin, tokens, local_row, out_row };
        local_row += shares.padded_len(begin, tokens);
        out_row += tokens + u32::from(begin == 0);
        chunk
    };
    lens.iter().map(chunk).collect()
}

fn check<B: Backend>(backend: &B, spec: ReorgKvCache, shares: &Shares, seed: u64) -> Result<(), String> {
    let chunks = chunks(shares, &[(0, 37), (5, 0), (17, 50), (2_000_000_011, 29), (3, 1)]);
    let local_rows = chunks.iter().map(|c| c.local_row + shares.padded_len(c.begin, c.tokens)).max();
    let rows = chunks.iter().map(|c| c.out_row + c.tokens).max().unwrap_or(0) as usize + 1;
    let (world, local_rows) = (shares.world() as usize, local_rows.unwrap_or(0) as usize);
    let row_bytes = spec.row_elems as usize * spec.dtype.bytes();

    let mut rng = Rng(seed);
    let mut row = || (0..row_bytes).map(|_| rng.next() as u8).collect::<Vec<u8>>();
    let parts: Vec<Vec<Vec<u8>>> = (0..world).map(|_| (0..local_rows).map(|_| row()).collect()).collect();
    let mut want = vec![vec![POISON; row_bytes]; rows];
    let of = |chunk: &ReorgChunk| {
        let [begin, tokens, local_row, out_row] =
            [chunk.begin, chunk.tokens, chunk.local_row, chunk.out_row].map(|x| x as usize);
        Chunk { begin, tokens, local_row, out_row }
    };
    let flat: Vec<Vec<usize>> =
        (0..world).map(|rank| (0..local_rows).map(|row| rank * local_rows + row).collect()).collect();
    let mut sources = vec![usize::MAX; rows];
    let all: Vec<Chunk> = chunks.iter().map(of).collect();
    reorg_kvcache(|token| shares.owner(token as u32) as usize, &flat, &all, &mut sources);
    for (row, &source) in sources.iter().enumerate().filter(|(_, source)| **source != usize::MAX) {
        want[row] = parts[source / local_rows][source % local_rows].clone();
    }

    // Ranks as heads, rows as tokens, with gaps.
    let elems = spec.row_elems as usize;
    let from = Strides { offset: 8, token: elems + 4, head: local_rows * (elems + 4) + 12 };
    let dims = [local_rows, world, elems];
    let dense: Vec<u8> =
        (0..local_rows).flat_map(|row| parts.iter().flat_map(move |part| part[row].clone())).collect();
    let gathered = upload(backend, &scatter(&dense, dims, spec.dtype.bytes(), from)).map_err(text)?;
    let to = Strides { offset: 4, token: elems + 8, head: elems };
    let out_dims = [rows, 1, elems];
    let out_bytes = to.end(out_dims) * spec.dtype.bytes();
    let out = upload(backend, &vec![POISON; out_bytes]).map_err(text)?;
    let args = ReorgKvCacheArgs {
        gathered: from.view(&gathered),
        rank_stride: from.head as u64,
        out: to.view(&out),
    };
    backend.once(spec, ReorgBatch { shares, chunks: &chunks }, &args).map_err(text)?;
    let bytes = download(backend, &out, out_bytes).map_err(text)?;
    let (got, intact) = gather(&bytes, out_dims, spec.dtype.bytes(), to);
    intact?;
    match got.chunks(row_bytes).zip(&want).position(|(got, want)| got != want) {
        Some(row) => Err(format!("row {row} is wrong")),
        None => Ok(()),
    }
}

/// A prefill's keys over a sharded context: each rank gathers its part of each chunk, the parts are put in order, and equal what one
/// device gathers.
pub fn sharded_contexts<B: Backend>(session: &Session<'_, B>) {
    for (turn, cache) in Dtype::ALL.into_iter().enumerate() {
        let lens = [(100, 1), (0, 1), (33, 1), (7, 0)];
        let make = Make { dims: (256, 32), heads: 1, cache, sequences: sequences(&lens), ..Make::default() };
        let problem = make.build();
        for (world, interleave) in [(2, 1), (3, 16), (4, 5)] {
            let shares = match turn % 2 {
                0 => Shares::even(world, interleave),
                _ => Shares::weighted(&[3, 1, 2, 1][..world as usize], interleave),
            };
            // Chunk by chunk of 40 tokens.
            for begin in [0, 40, 80] {
                let what = format!("{cache} {world} ranks by {interleave} from {begin}");
                let result = shares
                    .clone()
                    .map_err(text)
                    .and_then(|shares| check_context(session.backend, &problem, &shares, begin));
                session.note(&what, result);
            }
        }
    }
    session.finish("prefill over sharded contexts");
}

fn check_context<B: Backend>(
    backend: &B,
    whole: &Problem,
    shares: &Shares,
    begin: u32,
) -> Result<(), String> {
    let lens = whole.seq_lens.iter().map(|&len| {
        let begin = begin.min(len as u32);
        (begin, (len as u32 - begin).min(40))
    });
    let chunks = chunks(shares, &lens.collect::<Vec<_>>());
    let rows = chunks.iter().map(|c| c.out_row + c.tokens).max().unwrap_or(0);
    let local_rows =
        chunks.iter().map(|c| c.local_row + shares.padded_len(c.begin, c.tokens)).max().unwrap_or(0);
    let (elems, dtype) = (whole.spec.shape.row_elems(), whole.spec.kv.dtype());
    let row_bytes = elems as usize * dtype.bytes();

    // What an all-gather gives: each rank's part, one after the other.
    let mut gathered = Vec::new();
    for rank in 0..shares.world() {
        let part = cut(whole, shares, rank).map_err(text)?;
        let ranges: Vec<_> = (0..)
            .zip(&chunks)
            .map(|(sequence, chunk)| {
                let own = shares.local_range(rank, chunk.begin, chunk.tokens)?;
                let (begin, tokens) = (own.start, own.end - own.start);
                Ok(GatherRange { sequence, begin, tokens, out_row: chunk.local_row })
            })
            .collect::<Result<_>>()
            .map_err(text)?;
        gathered.extend(gather_rows(backend, &part, &ranges, local_rows)?);
    }
    let gathered = upload(backend, &gathered).map_err(text)?;
    let out = upload(backend, &vec![POISON; rows as usize * row_bytes]).map_err(text)?;
    let args = ReorgKvCacheArgs {
        gathered: View::dense(&gathered, 1, elems),
        rank_stride: u64::from(local_rows) * u64::from(elems),
        out: View::dense(&out, 1, elems),
    };
    let spec = ReorgKvCache { dtype, row_elems: elems };
    backend.once(spec, ReorgBatch { shares, chunks: &chunks }, &args).map_err(text)?;
    let mut got = download(backend, &out, rows as usize * row_bytes).map_err(text)?;
    got.truncate(rows as usize * row_bytes);

    let ranges: Vec<_> = (0..)
        .zip(&chunks)
        .map(|(sequence, chunk)| GatherRange {
            sequence,
            begin: chunk.begin,
            tokens: chunk.tokens,
            out_row: chunk.out_row,
        })
        .collect();
    if got == gather_rows(backend, whole, &ranges, rows)? {
        Ok(())
    } else {
        Err("the rows are not those that one device gathers".to_owned())
    }
}

/// Rows of a problem's cache, poisoned where no range puts any.
fn gather_rows<B: Backend>(
    backend: &B,
    problem: &Problem,
    ranges: &[GatherRange],
    rows: u32,
) -> Result<Vec<u8>, String> {
    let (spec, elems) = (&problem.spec, problem.spec.shape.row_elems());
    let bytes = rows as usize * elems as usize * spec.kv.dtype().bytes();
    let kv = upload(backend, &problem.kv).map_err(text)?;
    let out = upload(backend, &vec![POISON; bytes]).map_err(text)?;
    let args = KvGatherArgs { kv: KvView::dense(&kv, spec), k_scale: 1.0, out: View::dense(&out, 1, elems) };
    let gather = KvGather { shape: spec.shape, kv: spec.kv, output: spec.kv.dtype() };
    let batch = GatherBatch { pages: dense_table(problem), seq_lens: &problem.seq_lens, ranges };
    backend.once(gather, batch, &args).map_err(text)?;
    let mut all = download(backend, &out, bytes).map_err(text)?;
    all.truncate(bytes);
    Ok(all)
}

/// What is wrong is refused, and nothing runs.
pub fn refuses_reorgs<B: Backend>(session: &Session<'_, B>) {
    let backend = session.backend;
    let result = || -> Result<()> {
        let shares = Shares::even(2, 1)?;
        let (gathered, out) = (backend.buffer(2 * 4 * 8 * 4)?, backend.buffer(7 * 8 * 4)?);
        let good = ReorgKvCache { dtype: Dtype::F32, row_elems: 8 };
        let chunk = ReorgChunk { begin: 1, tokens: 7, local_row: 0, out_row: 0 };
        let args = ReorgKvCacheArgs {
            gathered: View::dense(&gathered, 1, 8),
            rank_stride: 4 * 8,
            out: View::dense(&out, 1, 8),
        };
        let run = |spec, chunks: &[ReorgChunk], args: ReorgKvCacheArgs<&B::Buffer>| {
            backend.once(spec, ReorgBatch { shares: &shares, chunks }, &args)
        };
        session.note("good", run(good, &[chunk], args).map_err(text));
        session.note("no chunk", run(good, &[], args).map_err(text));
        let refuses = |spec, chunks: &[ReorgChunk], args, why: &str| {
            let noted = match run(spec, chunks, args) {
                Err(error) if error.to_string().contains(why) => Ok(()),
                other => Err(format!("{other:?} says nothing of {why}")),
            };
            session.note(why, noted);
        };
        refuses(ReorgKvCache { row_elems: 6, ..good }, &[chunk], args, "row_elems");
        for (chunk, why) in [
            (ReorgChunk { begin: u32::MAX, ..chunk }, "end of a chunk"),
            (ReorgChunk { out_row: u32::MAX - 1, ..chunk }, "end of a chunk's rows"),
            (ReorgChunk { out_row: 1, ..chunk }, "out"),
            (ReorgChunk { local_row: 1, ..chunk }, "gathered"),
        ] {
            refuses(good, &[chunk], args, why);
        }
        refuses(good, &[chunk, ReorgChunk { tokens: 1, out_row: 6, ..chunk }], args, "both write row 6");
        for (args, why) in [
            (ReorgKvCacheArgs { rank_stride: 36, ..args }, "gathered"),
            (ReorgKvCacheArgs { rank_stride: 30, ..args }, "rank_stride"),
            (ReorgKvCacheArgs { rank_stride: 0, ..args }, "rank_stride 0: makes sets overlap"),
            (ReorgKvCacheArgs { rank_stride: 28, ..args }, "rank_stride 28: makes sets overlap"),
            (ReorgKvCacheArgs { gathered: View { token_stride: 0, ..args.gathered }, ..args }, "gathered 0"),
            (ReorgKvCacheArgs { gathered: View { token_stride: 4, ..args.gathered }, ..args }, "gathered 4"),
            (ReorgKvCacheArgs { rank_stride: u64::MAX - 3, ..args }, "gathered"),
            (ReorgKvCacheArgs { gathered: View { offset: 2, ..args.gathered }, ..args }, "gathered"),
            (ReorgKvCacheArgs { out: View { token_stride: 4, ..args.out }, ..args }, "out"),
            (ReorgKvCacheArgs { out: View { buffer: &gathered, ..args.out }, ..args }, "gathered"),
        ] {
            refuses(good, &[chunk], args, why);
        }
        Ok(())
    }();
    session.note("refusals", result.map_err(text));
    session.finish("refusals of reorgs");
}
