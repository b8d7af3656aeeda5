//! Logits of index keys.

use wgpu_mla::{
    Dtype, Error, IndexerLogits, IndexerLogitsArgs, IndexerLogitsBatch, Mask, MlaShape, PageTable,
};

use super::array::{Array, Holds};
use super::cache::{Place, pool};
use super::case::{Case, Draw};
use super::{sample, view};

/// The dims of an index key, as its cache has them.
const KEY: MlaShape = MlaShape { num_heads: 1, kv_lora_rank: 128, qk_rope_head_dim: 0 };

/// Sequences, and the query tokens that are scored.
#[derive(Debug)]
pub struct Scored {
    place: Place,
    lens: Vec<i32>,
    starts: Vec<i32>,
    table: Vec<i32>,
    max_pages: u32,
    mask: Mask<'static>,
    tokens: [u32; 2],
    fill: u32,
}

impl Scored {
    /// Rows, and the keys that each of them sees.
    fn seen(&self) -> Vec<u32> {
        let mut all = Vec::new();
        for (seq, loc) in self.starts.windows(2).enumerate() {
            let len = i64::from(self.lens[seq].max(0));
            for token in loc[0]..loc[1] {
                let i = i64::from(token - loc[0]);
                let seen = match self.mask {
                    Mask::Causal => len - i64::from(loc[1] - loc[0]) + i + 1,
                    Mask::CausalFrom(first) => first.saturating_add(i),
                    _ => len,
                };
                all.push(seen.clamp(0, len) as u32);
            }
        }
        let end = (self.tokens[1] as usize).min(all.len());
        all[(self.tokens[0] as usize).min(end)..end].to_vec()
    }

    fn columns(&self) -> u32 {
        let seen = self.seen();
        if seen.is_empty() { 0 } else { seen.iter().copied().max().unwrap_or(0).max(self.fill) }
    }
}

impl Case for IndexerLogits {
    type Call = Scored;

    fn draw(draw: &mut Draw<'_, '_>) -> (Self, Scored) {
        let of: Self = sample(draw.source);
        let kv = pool(draw, of.index.kv());
        let mut spec = Self { num_heads: draw.number(1, 5), ..of };
        (spec.index.page_size, spec.index.num_pages) = (kv.page_size, kv.num_pages);
        let place = Place::draw(draw, &kv);
        let max_pages = draw.source.between(1, 3);
        let (mut lens, mut table, mut starts) = (Vec::new(), Vec::new(), vec![0]);
        for _ in 0..draw.source.between(1, 3) {
            lens.push(draw.number(0, max_pages * kv.page_size.min(256)) as i32);
            table.extend((0..max_pages).map(|_| draw.number(0, kv.num_pages.clamp(1, 8) - 1) as i32));
            starts.push(starts[starts.len() - 1] + draw.source.between(0, 3) as i32);
        }
        let first = i64::from(draw.source.byte()) - 64;
        let mask = draw.source.pick(&[Mask::Causal, Mask::Full, Mask::CausalFrom(first)]);
        let end = draw.number(0, starts[starts.len() - 1] as u32);
        let tokens = [draw.number(0, end), end];
        let fill = if draw.source.chance(128) { draw.number(0, 60) } else { 0 };
        (spec, Scored { place, lens, starts, table, max_pages, mask, tokens, fill })
    }

    fn arrays(&self, call: &Scored) -> Vec<Array> {
        let (rows, heads) = (call.seen().len() as u32, self.num_heads);
        let tokens = if rows == 0 { 0 } else { call.tokens[1] };
        let mut all = vec![
            Array::read(Holds::Elements(self.query), [1, tokens, heads], 128, 8),
            Array::read(Holds::Elements(Dtype::F32), [1, tokens, heads], 1, 1),
            Array::written(Holds::Elements(Dtype::F32), [1, rows, 1], call.columns(), 1),
        ];
        call.place.arrays(&mut all, &self.index.kv(), &KEY, false);
        all
    }

    fn args<B: Copy>(
        &self,
        call: &Scored,
        arrays: &[Array],
        at: &[B],
    ) -> Result<IndexerLogitsArgs<B>, Error> {
        let cache = call.place.view(&self.index.kv(), &KEY, &arrays[3..], &at[3..])?;
        let [q, weights, logits] = [0, 1, 2].map(|i| view(&arrays[i], at[i]));
        Ok(IndexerLogitsArgs { q, weights, cache, logits })
    }

    fn with_input<R>(
        &self,
        (): &(),
        call: &Scored,
        then: impl FnOnce(Result<IndexerLogitsBatch<'_>, Error>) -> R,
    ) -> R {
        then(Ok(IndexerLogitsBatch {
            pages: PageTable::Dense { block_table: &call.table, max_pages: call.max_pages },
            seq_lens: &call.lens,
            query_start_loc: &call.starts,
            mask: call.mask,
            tokens: call.tokens[0]..call.tokens[1],
            fill: call.fill,
        }))
    }

    fn touches(&self, call: &Scored, _: usize, [_, row, _]: [u64; 3]) -> bool {
        call.seen().get(row as usize).is_some_and(|&seen| seen.max(call.fill) > 0)
    }
}
