//! One decode through a backend, in a layout of its own.

use wgpu_mla::{
    Backend, Batch, Capacity, DecodeOptions, Dtype, Indices, LseBase, Mask, MlaDecodeArgs, PageTable, Plan,
    Query, SlabTable, SparseBatch, SplitPolicy, View,
};

use super::decode::{Problem, WILD};
use super::draw::{Draw, values};
use super::place::{Array, Cache};
use super::reference::Sees;
use super::{Under, text};

/// What a decode wrote, decoded; the LSE natural.
pub struct Answer {
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
    pub rounds_weights: bool,
}

/// The arrays of a batch as a host has them.
struct Tables {
    seq_lens: Vec<i32>,
    query_start_loc: Vec<i32>,
    bounds: Vec<u32>,
    block_table: Vec<i32>,
    max_pages: usize,
    kv_indptr: Vec<i32>,
    kv_indices: Vec<i32>,
}

impl Tables {
    fn new(problem: &Problem, draw: &mut Draw) -> Self {
        let sequences = &problem.sequences;
        let most = sequences.iter().map(|sequence| sequence.pages.len()).max().unwrap_or(0);
        let max_pages = most + draw.below(4);
        let mut tables = Self {
            seq_lens: sequences.iter().map(|sequence| sequence.len as i32).collect(),
            query_start_loc: vec![0],
            bounds: Vec::new(),
            block_table: Vec::new(),
            max_pages,
            kv_indptr: vec![0],
            kv_indices: Vec::new(),
        };
        for sequence in sequences {
            let end = tables.query_start_loc[tables.query_start_loc.len() - 1];
            tables.query_start_loc.push(end + sequence.q_len as i32);
            let pages = || sequence.pages.iter().map(|&page| page as i32);
            tables.block_table.extend(pages());
            let spare = max_pages - sequence.pages.len();
            tables.block_table.extend((0..spare).map(|_| draw.pick(&WILD)));
            tables.kv_indices.extend(pages());
            tables.kv_indptr.push(tables.kv_indices.len() as i32);
            if let Sees::Bounds(bounds) = &sequence.sees {
                tables.bounds.extend(bounds.iter().map(|&bound| bound as u32));
            }
        }
        tables
    }

    fn mask(&self, problem: &Problem) -> Mask<'_> {
        match problem.sequences.first().map(|sequence| &sequence.sees) {
            None | Some(Sees::BottomRight) => Mask::Causal,
            Some(Sees::From(first)) => Mask::CausalFrom(*first),
            Some(Sees::All) => Mask::Full,
            Some(Sees::Bounds(_)) => Mask::Bounds(&self.bounds),
        }
    }

    fn pages(&self, draw: &mut Draw, page_size: u32) -> PageTable<'_> {
        let Self { block_table, kv_indptr, kv_indices, .. } = self;
        let max_pages = self.max_pages as u32;
        match draw.below(4) {
            0 => PageTable::Dense { block_table, max_pages },
            1 => PageTable::Pool { block_table, max_pages, page_size },
            2 => PageTable::Csr { kv_indptr, kv_indices },
            _ => PageTable::PoolCsr { kv_indptr, kv_indices, page_size },
        }
    }
}

impl Problem {
    /// Runs it on a variant; `draw` draws the layout, the policy and all else that must not change the result.
    pub fn run<B: Backend>(
        &self,
        under: &Under<'_, B>,
        variant: &str,
        draw: &mut Draw,
    ) -> Result<Answer, String> {
        let (backend, spec) = (under.backend, &self.spec);
        let (heads, tokens) = (spec.shape.num_heads as usize, self.total_q());
        let (latent, row) = (spec.shape.kv_lora_rank as usize, spec.shape.row_elems() as usize);
        let topk = self.lists.as_ref().map_or(0, |lists| lists.topk as u32);
        let spare = if topk > 0 && draw.once_in(4) { 3 } else { 0 };
        let options = DecodeOptions {
            topk: topk + spare,
            attn_sink: self.sinks.is_some(),
            variant: Some(variant.to_owned()),
            query_tokens: if under.every_shape { draw.pick(&[0, 0, 1, 2, 4]) } else { 0 },
            shared_sequences: if under.every_shape { draw.pick(&[0, 0, 0, 2, 8]) } else { 0 },
            ..DecodeOptions::default()
        };
        let mla = backend.compile_with(*spec, &options).map_err(text)?;
        let tables = Tables::new(self, draw);
        let stored = self.token_bytes() / spec.kv.dtype().bytes();
        let cache = Cache::draw(draw, &spec.kv, stored, draw.clone().once_in(4));
        let pages = tables.pages(draw, spec.kv.page_size);
        let batch = Batch {
            seq_lens: &tables.seq_lens,
            query_start_loc: &tables.query_start_loc,
            mask: tables.mask(self),
            shared_prefixes: if draw.once_in(4) { &[] } else { &self.shared },
            slabs: cache.slab_pages().map(|slab_pages| SlabTable { pages, slab_pages }),
        };
        let policy = match draw.below(4) {
            0 | 1 => SplitPolicy::Auto,
            2 => SplitPolicy::OneSplit,
            _ => SplitPolicy::FixedTokens(draw.within(1, 100) as u32),
        };
        let listed = SparseBatch { slab_pages: cache.slab_pages(), ..SparseBatch::new(tokens as u32, topk) };
        let planned = |batch: &Batch<'_>, policy| match topk {
            0 => Plan::new(spec, &mla.tiling(), batch, policy),
            _ => Plan::sparse(spec, &mla.tiling(), &listed, policy),
        };
        let pages = if topk > 0 { PageTable::Indices } else { pages };
        let plan = planned(&batch, policy).map_err(text)?;
        let capacity = if draw.once_in(2) { Capacity::of(&plan) } else { Capacity::default() };
        let mut step = mla.step(capacity).map_err(text)?;
        if draw.once_in(3) {
            // Another plan leaves its tables behind.
            let other = Batch { mask: Mask::Full, shared_prefixes: &[], ..batch };
            let other = planned(&other, SplitPolicy::FixedTokens(9)).map_err(text)?;
            mla.prepare(&mut step, (&other, pages)).map_err(text)?;
        }
        mla.prepare(&mut step, (&plan, pages)).map_err(text)?;

        let elem = spec.query.bytes();
        let columns = |range: std::ops::Range<usize>| -> Vec<u8> {
            let range = range.start * elem..range.end * elem;
            self.q.chunks(row * elem).flat_map(|row| &row[range.clone()]).copied().collect()
        };
        let whole = draw.once_in(2);
        let cuts = if whole { [0..row, 0..0] } else { [0..latent, latent..row] };
        let at = cuts.clone().map(|cut| Array::draw(draw, [tokens, heads, cut.len()], elem, 8));
        let dense = cuts.map(columns);
        let q = [at[0].upload(backend, &dense[0])?, at[1].upload(backend, &dense[1])?];
        let query = if whole {
            Query::Whole(at[0].view(&q[0]))
        } else {
            Query::Split { q_nope: at[0].view(&q[0]), q_pe: at[1].view(&q[1]) }
        };
        let kv = cache.upload(backend, &self.pool)?;
        let lists_at = |draw: &mut Draw, words: &[i32], dim: usize, spare: usize| {
            let at = Array::draw(draw, [tokens, 1, dim + spare], 4, 1);
            let padded = words.chunks(dim).flat_map(|list| {
                list.iter().copied().chain(std::iter::repeat_n(0, spare)).flat_map(i32::to_le_bytes)
            });
            let padded: Vec<u8> = padded.collect();
            at.upload(backend, &padded).map(|buffer| (at, buffer, padded))
        };
        let slots = self.lists.as_ref();
        let slots = slots.map(|all| lists_at(draw, &all.slots, all.topk, spare as usize)).transpose()?;
        let lengths = self.lists.as_ref().and_then(|lists| lists.lengths.as_ref());
        let lengths = lengths.map(|lengths| lists_at(draw, lengths, 1, 0)).transpose()?;
        let out_at = Array::draw(draw, [tokens, heads, latent], spec.out.bytes(), 8);
        let lse_at = Array::draw(draw, [tokens, heads, 1], 4, 1);
        let (out, lse) = (out_at.nothing(backend)?, lse_at.nothing(backend)?);
        let lse_base = draw.pick(&[LseBase::E, LseBase::Two]);
        let args = MlaDecodeArgs {
            query,
            kv: cache.view(spec, &kv)?,
            out: out_at.view(&out),
            lse: lse_at.view(&lse),
            lse_base,
            softmax_scale: self.softmax_scale,
            k_scale: self.k_scale,
            q_scale: self.q_scale,
            indices: slots.as_ref().map(|(at, buffer, _)| Indices {
                // The entries of a list are the heads of a view.
                slots: View { head_stride: 1, ..at.view(buffer) },
                topk_length: lengths.as_ref().map(|(at, buffer, _)| at.view(buffer)),
            }),
            attn_sink: self.sinks.clone(),
        };
        let binding = mla.bind(&args, tokens as u32).map_err(text)?;
        mla.run(&step, &binding).map_err(text)?;
        let unit = if lse_base == LseBase::Two { std::f64::consts::LN_2 } else { 1.0 };
        let answer = Answer {
            out: values(spec.out, &out_at.read("out", backend, &out)?),
            lse: values(Dtype::F32, &lse_at.read("lse", backend, &lse)?).iter().map(|x| x * unit).collect(),
            rounds_weights: mla.rounds_weights(),
        };
        if draw.once_in(4) {
            let unchanged = cache.read(backend, &kv)? == self.pool
                && (0..2).all(|i| at[i].read("q", backend, &q[i]).is_ok_and(|q| q == dense[i]));
            let lists = [&slots, &lengths];
            let mut lists = lists.into_iter().flatten();
            let unchanged = unchanged
                && lists.all(|(at, buffer, words)| {
                    at.read("lists", backend, buffer).is_ok_and(|now| now == *words)
                });
            if !unchanged {
                return Err("q, kv or lists: an input was written".to_owned());
            }
        }
        Ok(answer)
    }
}
