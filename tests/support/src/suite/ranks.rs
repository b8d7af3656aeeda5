//! Decodes cut into ranks, whose results are combined, against the oracle of the whole.

use wgpu_mla::{Backend, Dtype, LseBase, MergeStates, MergeStatesArgs, Shares, SplitPolicy, View};

use super::Session;
use super::memory::{download, upload};
use super::run::{Answer, How};
use crate::case::{DcpCombineCase, DcpDecodeCase};
use crate::close::{Tolerance, close};
use crate::paint::{Make, POISON, Problem, Sees, sequences};
use crate::ranks::{cut, cut_blocks};

fn text(error: wgpu_mla::Error) -> String {
    error.to_string()
}

/// Worlds of 1 to 8 and uneven shares, any interleave, ragged batches of 0 to 4 query tokens, every cache dtype.
pub fn shares<B: Backend>(session: &Session<'_, B>) {
    let lens = [(37, 1), (0, 1), (1, 2), (90, 4), (3, 4), (16, 0), (64, 3), (129, 2)];
    let mut turn = 0;
    for cache in session.one_in(4, Dtype::ALL) {
        for world in 1..=8 {
            let interleave = [1, 2, 16, 5, 64, 3, 1][turn % 7];
            let weights = [&[7, 2, 1][..], &[1, 3], &[2, 0, 5]][turn % 3];
            for shares in [Shares::even(world, interleave), Shares::weighted(weights, interleave)] {
                let sees = if turn % 4 == 3 { Sees::Full } else { Sees::Causal };
                let make = Make {
                    dims: (256, 32),
                    heads: 6,
                    cache,
                    query: if cache == Dtype::F32 { Dtype::F32 } else { Dtype::Bf16 },
                    page_size: if cache == Dtype::F16 { 3 } else { 16 },
                    sequences: sequences(&lens),
                    sees,
                    ..Make::default()
                };
                let how = How {
                    lse_base: [LseBase::E, LseBase::Two][turn % 2],
                    policy: [SplitPolicy::Auto, SplitPolicy::FixedTokens(16)][turn % 2],
                    ..How::default()
                };
                let shares = shares.expect("shares");
                session.check_ranks(&make.build(), &how, &shares);
                turn += 1;
            }
        }
    }
    session.finish("decodes cut into ranks");
}

/// What does not depend on how a cache is cut, bit for bit: the world, where blocks are merged one by one; the world of 1; and whether
/// ranks combine all heads or each its own.
pub fn bits_of_ranks<B: Backend>(session: &Session<'_, B>) {
    let lens = [(70, 1), (0, 1), (200, 3), (33, 2), (64, 0), (1, 2)];
    let pairs = [(Dtype::F32, Dtype::F32), (Dtype::Bf16, Dtype::Bf16), (Dtype::E4m3, Dtype::Bf16)];
    for (cache, query) in session.one_in(3, pairs) {
        let make =
            Make { dims: (256, 32), heads: 6, cache, query, sequences: sequences(&lens), ..Make::default() };
        let whole = make.build();
        if !session.serves(&whole.spec) {
            session.leave_out();
            continue;
        }
        for split in [16, 32] {
            let how = How { policy: SplitPolicy::FixedTokens(split), ..How::default() };
            let what = format!("splits of {split}, {}", whole.name);
            session.note(&what, session.same_bits_of_worlds(&whole, &how));
            session.note(&what, session.same_bits_of_world_1(&whole, &how));
            session.note(&what, session.same_bits_by_heads(&whole, &how));
        }
    }
    session.finish("bits of ranks");
}

impl<B: Backend> Session<'_, B> {
    /// Blocks of 32 tokens, a multiple of the split, that are decoded by 1, 2 and 4 ranks and merged in the order of their tokens.
    fn same_bits_of_worlds(&self, whole: &Problem, how: &How) -> Result<(), String> {
        let (heads, latent) = (whole.spec.shape.num_heads as usize, whole.spec.shape.kv_lora_rank as usize);
        let (tokens, row) = (whole.total_q(), latent * 4);
        let blocks = whole.seq_lens.iter().max().map_or(0, |&len| (len as usize).div_ceil(32));
        let (out, lse) = whole.expected();
        let mut first = None;
        for world in [1, 2, 4] {
            let shares = Shares::even(world, 32).map_err(text)?;
            let mut outs = vec![POISON; blocks * tokens * heads * row];
            let mut lses = vec![f32::NEG_INFINITY; blocks * tokens * heads];
            for rank in 0..world {
                let (part, places) = cut_blocks(whole, &shares, rank).map_err(text)?;
                let answer = self.run_decode(&part, how)?;
                let got_lse = Dtype::F32.decode_all(&answer.bits[1]);
                for (index, (seq, block)) in places.into_iter().enumerate() {
                    let from = part.query_start_loc[index] as usize * heads;
                    let rows = part.query_start_loc[index + 1] as usize * heads - from;
                    let to = (block as usize * tokens + whole.query_start_loc[seq] as usize) * heads;
                    outs[to * row..][..rows * row]
                        .copy_from_slice(&answer.bits[0][from * row..][..rows * row]);
                    lses[to..][..rows].copy_from_slice(&got_lse[from..][..rows]);
                }
            }
            let states = States {
                spec: MergeStates { dtype: Dtype::F32, head_size: latent as u32 },
                dims: [blocks, tokens, heads],
                lse_base: how.lse_base,
                outs: &outs,
                lses: &lses,
            };
            let (got, got_lse) = states.combined(self.backend)?;
            close("lse", &got_lse, &lse, &Tolerance::lse()).into_result()?;
            close("out", &Dtype::F32.decode_all(&got), &out, &self.tolerance(whole, 1)).into_result()?;
            let got = (got, Dtype::F32.encode_all(&got_lse));
            if first.get_or_insert_with(|| got.clone()) != &got {
                return Err(format!("a world of {world} gives other bits than one of 1"));
            }
        }
        Ok(())
    }

    /// One rank, combined, is the decode.
    fn same_bits_of_world_1(&self, whole: &Problem, how: &How) -> Result<(), String> {
        let plain = self.run_decode(whole, how)?;
        let (outs, lses, _) = self.run_ranks(whole, how, &Shares::even(1, 5).map_err(text)?)?;
        let (out, lse) = States::of(whole, 1, how, &outs, &lses).combined(self.backend)?;
        if (&out, Dtype::F32.encode_all(&lse)) == (&plain.bits[0], plain.bits[1].clone()) {
            Ok(())
        } else {
            Err("a world of 1 gives other bits than a decode".to_owned())
        }
    }

    /// An all-to-all, after which each of 3 ranks combines 2 of the 6 heads, gives the bits of a combination of all heads.
    fn same_bits_by_heads(&self, whole: &Problem, how: &How) -> Result<(), String> {
        let (heads, latent) = (whole.spec.shape.num_heads as usize, whole.spec.shape.kv_lora_rank as usize);
        let (world, mine, row) = (3, heads / 3, latent * 4);
        let (outs, lses, _) = self.run_ranks(whole, how, &Shares::even(3, 7).map_err(text)?)?;
        let all = States::of(whole, world, how, &outs, &lses);
        let (out, lse) = all.combined(self.backend)?;
        for rank in 0..3 {
            let is_mine = |index: &usize| index % heads / mine == rank;
            let rows = || (0..lses.len()).filter(is_mine);
            let part_outs: Vec<u8> = rows().flat_map(|i| &outs[i * row..][..row]).copied().collect();
            let part_lses: Vec<f32> = rows().map(|i| lses[i]).collect();
            let dims = [world, all.dims[1], mine];
            let part = States { dims, outs: &part_outs, lses: &part_lses, ..all };
            let (got, got_lse) = part.combined(self.backend)?;
            let rows = || (0..lse.len()).filter(is_mine);
            let want: Vec<u8> = rows().flat_map(|i| &out[i * row..][..row]).copied().collect();
            let want_lse = rows().map(|i| lse[i].to_bits());
            if got != want || !got_lse.iter().map(|lse| lse.to_bits()).eq(want_lse) {
                return Err(format!("the heads of rank {rank} have other bits than among all heads"));
            }
        }
        Ok(())
    }

    /// The results of all ranks, one after the other: the bytes of their outputs, and their LSEs; and whether their variant rounds
    /// weights.
    fn run_ranks(
        &self,
        whole: &Problem,
        how: &How,
        shares: &Shares,
    ) -> Result<(Vec<u8>, Vec<f32>, bool), String> {
        let (mut outs, mut lses, mut rounds_p) = (Vec::new(), Vec::new(), false);
        for rank in 0..shares.world() {
            let part = cut(whole, shares, rank).map_err(text)?;
            let answer = match self.odd_ranks {
                Some(elsewhere) if rank % 2 == 1 => elsewhere(&part, how),
                _ => self.run_part(&part, how),
            };
            let (answer, rounds) = answer.map_err(|error| format!("rank {rank}: {error}"))?;
            outs.extend_from_slice(&answer.bits[0]);
            lses.extend(Dtype::F32.decode_all(&answer.bits[1]));
            rounds_p |= rounds;
        }
        Ok((outs, lses, rounds_p))
    }

    /// One rank's decode, and whether the variant rounds weights.
    pub fn run_part(&self, part: &Problem, how: &How) -> Result<(Answer, bool), String> {
        let answer = self.run_decode(part, how)?;
        let rounds =
            self.decode_for(&part.spec, how.query_tokens).is_ok_and(|decode| decode.rounds_weights());
        Ok((answer, rounds))
    }

    /// Cuts a decode into ranks, combines their results and compares with the oracle of the whole.
    pub fn check_ranks(&self, whole: &Problem, how: &How, shares: &Shares) {
        if !self.serves(&whole.spec) {
            return self.leave_out();
        }
        let (out, lse) = whole.expected();
        let what = format!("{} ranks by {}, {}, {how:?}", shares.world(), shares.interleave(), whole.name);
        self.note(&what, self.compare_ranks(whole, how, shares, &out, &lse));
    }

    /// Like [`Session::compare`], for a decode that is cut into ranks.
    pub fn compare_ranks(
        &self,
        whole: &Problem,
        how: &How,
        shares: &Shares,
        out: &[f64],
        lse: &[f64],
    ) -> Result<(), String> {
        let (outs, lses, rounds_p) = self.run_ranks(whole, how, shares)?;
        if lse.is_empty() {
            return Ok(());
        }
        let latent = whole.spec.shape.kv_lora_rank as usize;
        let (cache, query) = (whole.spec.kv.dtype(), whole.spec.query);
        let tolerance = Tolerance::decode(cache, query, Dtype::F32, rounds_p, whole.largest_latent(), latent);
        let states = States::of(whole, shares.world() as usize, how, &outs, &lses);
        let (got, got_lse) = states.combined(self.backend)?;
        let natural = match how.lse_base {
            LseBase::E => 1.0,
            LseBase::Two => std::f64::consts::LN_2,
        };
        let got_lse: Vec<f32> = got_lse.iter().map(|&lse| (f64::from(lse) * natural) as f32).collect();
        close("lse", &got_lse, lse, &Tolerance::lse()).into_result()?;
        close("out", &Dtype::F32.decode_all(&got), out, &tolerance).into_result()?;
        // Rows that see no key are exactly 0, whatever the tolerance.
        for (row, lse) in lse.iter().enumerate() {
            let bytes = &got[row * latent * 4..][..latent * 4];
            if *lse == f64::NEG_INFINITY && bytes.iter().any(|&byte| byte != 0) {
                return Err(format!("row {row} sees no key: its out must be exactly 0"));
            }
        }
        Ok(())
    }
}

/// Results of ranks, dense.
#[derive(Clone, Copy)]
struct States<'a> {
    spec: MergeStates,
    /// `[world, tokens, heads]`.
    dims: [usize; 3],
    lse_base: LseBase,
    /// `[world, tokens, heads, head_size]`.
    outs: &'a [u8],
    /// `[world, tokens, heads]`.
    lses: &'a [f32],
}

impl<'a> States<'a> {
    /// The states that the ranks of a decode leave.
    fn of(whole: &Problem, world: usize, how: &How, outs: &'a [u8], lses: &'a [f32]) -> Self {
        let shape = whole.spec.shape;
        let spec = MergeStates { dtype: Dtype::F32, head_size: shape.kv_lora_rank };
        Self {
            spec,
            dims: [world, whole.total_q(), shape.num_heads as usize],
            lse_base: how.lse_base,
            outs,
            lses,
        }
    }

    /// The bytes of their merge, and its LSE.
    fn combined<B: Backend>(&self, backend: &B) -> Result<(Vec<u8>, Vec<f32>), String> {
        let [world, tokens, heads] = self.dims;
        let (rows, size) = (tokens * heads, self.spec.head_size);
        let out_bytes = rows * size as usize * self.spec.dtype.bytes();
        let states = upload(backend, self.outs).map_err(text)?;
        let lse = upload(backend, &Dtype::F32.encode_all(self.lses)).map_err(text)?;
        let output = upload(backend, &vec![POISON; out_bytes]).map_err(text)?;
        let output_lse = upload(backend, &vec![POISON; rows * 4]).map_err(text)?;
        let args = MergeStatesArgs {
            states: View::dense(&states, heads as u32, size),
            set_stride: rows as u64 * u64::from(size),
            lse: View::dense(&lse, heads as u32, 1),
            lse_set_stride: rows as u64,
            output: View::dense(&output, heads as u32, size),
            output_lse: Some(View::dense(&output_lse, heads as u32, 1)),
            lse_base: self.lse_base,
            num_heads: heads as u32,
            output_scale: 1.0,
        };
        backend.once(self.spec, (0..tokens as u32, world as u32), &args).map_err(text)?;
        let read = |buffer, bytes: usize| {
            let mut all = download(backend, buffer, bytes).map_err(text)?;
            let guard = all.split_off(bytes);
            if guard.iter().any(|&byte| byte != POISON) {
                return Err("bytes behind the result were written".to_owned());
            }
            Ok(all)
        };
        Ok((read(&output, out_bytes)?, Dtype::F32.decode_all(&read(&output_lse, rows * 4)?)))
    }
}

/// Runs a `dcp_decode` case, each rank with what its file has of the whole.
pub fn check_dcp_decode<B: Backend>(
    session: &Session<'_, B>,
    name: &str,
    case: &DcpDecodeCase,
) -> Result<(), String> {
    let mut local = Vec::new();
    for rank in 0..case.shares.world() {
        local.extend(case.shares.local_seq_lens(rank, &case.decode.seq_lens).map_err(text)?);
    }
    if local != case.local_seq_lens {
        return Err(format!("local_seq_lens are {local:?}, expected {:?}", case.local_seq_lens));
    }
    let wide = |xs: &[f32]| xs.iter().map(|&x| x.into()).collect::<Vec<f64>>();
    let (out, lse) = (wide(&case.decode.out), wide(&case.decode.lse));
    let whole = Problem::of_case(name, &case.decode);
    session.compare_ranks(&whole, &How::default(), &case.shares, &out, &lse)
}

/// Runs a `dcp_combine` case.
pub fn check_dcp_combine<B: Backend>(backend: &B, case: &DcpCombineCase) -> Result<(), String> {
    let dims = [case.world, case.num_tokens, case.num_heads];
    let states =
        States { spec: case.spec, dims, lse_base: case.lse_base, outs: &case.outs, lses: &case.lses };
    let (out, lse) = states.combined(backend)?;
    let wide = |xs: &[f32]| xs.iter().map(|&x| x.into()).collect::<Vec<f64>>();
    let dtype = case.spec.dtype;
    close("out", &dtype.decode_all(&out), &wide(&case.out), &Tolerance::merge(dtype)).into_result()?;
    close("lse", &lse, &wide(&case.lse), &Tolerance::merge_lse()).into_result().map(drop)
}
