//! Ops of an indexer that make index keys and index queries.

use std::ops::Range;

use wgpu_mla::{
    Dtype, Error, IndexFormat, IndexSpec, IndexerAppend, IndexerAppendArgs, IndexerQuery, IndexerQueryArgs,
    IndexerQueryBatch, KvView, RopeAppendBatch, RopeLayout,
};

use super::array::{Array, Holds};
use super::cache::slots;
use super::case::{Case, Draw};
use super::merges::reach;
use super::{sample, tokens, view};

const F32: Holds = Holds::Elements(Dtype::F32);

/// Another format of the same dtype.
fn format(draw: &mut Draw<'_, '_>, dtype: Dtype) -> IndexFormat {
    let ropes = [None, Some(RopeLayout::Interleaved), Some(RopeLayout::HalfSplit)];
    let rope = draw.source.pick(&ropes);
    IndexFormat { dtype, rope, hadamard: draw.source.chance(128), ue8m0: draw.source.chance(128) }
}

/// Positions for so many tokens, for half of the calls.
fn positions(draw: &mut Draw<'_, '_>, count: usize, max_position: u32) -> Option<Vec<i32>> {
    draw.source.chance(128).then(|| {
        let most = max_position.clamp(1, 64) - 1;
        (0..count).map(|_| draw.number(0, most) as i32).collect()
    })
}

/// Positions on the device, and the table of angles.
fn angles(format: &IndexFormat, tokens: u32, max_position: u32) -> [Array; 2] {
    let (tokens, rows) = if format.rope.is_some() { (tokens, max_position) } else { (0, 0) };
    [Array::whole(Holds::Positions(max_position), tokens, 1), Array::whole(F32, rows, 64)]
}

/// Keys of new tokens, their slots, and the layer of how many.
#[derive(Debug)]
pub struct Keys {
    slots: Vec<i64>,
    positions: Option<Vec<i32>>,
    max_position: u32,
    eps: f32,
    layer: u32,
}

impl Keys {
    /// The first array of the cache: the pages, each as one row.
    const CACHE: usize = 5;
}

impl Case for IndexerAppend {
    type Call = Keys;

    fn draw(draw: &mut Draw<'_, '_>) -> (Self, Keys) {
        let of: Self = sample(draw.source);
        let page_size = if draw.source.chance(64) { 16 } else { draw.number(1, 4) };
        let format = format(draw, of.index.format.dtype);
        let index = IndexSpec { format, page_size, num_pages: draw.number(1, 6) };
        let slots = slots(draw, &index.kv());
        let max_position = draw.number(1, 9);
        let positions = positions(draw, slots.len(), max_position);
        let layer = if draw.source.chance(128) { draw.number(0, 2) } else { 0 };
        (Self { index, ..of }, Keys { slots, positions, max_position, eps: draw.factor(), layer })
    }

    fn arrays(&self, call: &Keys) -> Vec<Array> {
        let tokens = call.slots.len() as u32;
        let [positions, cos_sin] = angles(&self.index.format, tokens, call.max_position);
        let dtype = self.index.format.dtype;
        let (element, unit) = (dtype.bytes() as u64, if dtype.is_fp8() { 4 } else { 8 });
        let page = u32::try_from(self.index.page_bytes() / element).unwrap_or(u32::MAX);
        let counts = [call.layer.saturating_add(1), self.index.num_pages, 1];
        let pages = Array::written(Holds::Elements(dtype), counts, page, unit);
        vec![
            Array::read(Holds::Elements(self.input), [1, tokens, 1], 128, 4),
            Array::whole(F32, 1, 128),
            Array::whole(F32, 1, 128),
            positions,
            cos_sin,
            Array { unread: false, ..pages },
        ]
    }

    fn args<B: Copy>(&self, call: &Keys, arrays: &[Array], at: &[B]) -> Result<IndexerAppendArgs<B>, Error> {
        let pages = &arrays[Keys::CACHE];
        let bytes = |elements: u64| elements.saturating_mul(self.index.format.dtype.bytes() as u64);
        let [layer_stride, block_stride, _] = pages.strides.map(bytes);
        let offset = bytes(pages.offset);
        let dense = self.index.view(at[Keys::CACHE]);
        Ok(IndexerAppendArgs {
            k: view(&arrays[0], at[0]),
            norm_weight: at[1],
            norm_bias: at[2],
            norm_eps: call.eps,
            positions: at[3],
            cos_sin: at[4],
            max_position: call.max_position,
            cache: KvView { offset, layer_stride, layer: call.layer, block_stride, ..dense },
        })
    }

    fn with_input<R>(
        &self,
        (): &(),
        call: &Keys,
        then: impl FnOnce(Result<RopeAppendBatch<'_>, Error>) -> R,
    ) -> R {
        then(Ok(RopeAppendBatch { slot_mapping: &call.slots, positions: call.positions.as_deref() }))
    }

    fn touches(&self, call: &Keys, _: usize, [layer, page, _]: [u64; 3]) -> bool {
        let of_page = |&slot: &i64| slot >= 0 && slot as u64 / u64::from(self.index.page_size) == page;
        layer == u64::from(call.layer) && call.slots.iter().any(of_page)
    }
}

/// Queries of some tokens.
#[derive(Debug)]
pub struct Queries {
    tokens: Range<u32>,
    positions: Option<Vec<i32>>,
    max_position: u32,
    scale: f32,
}

impl Case for IndexerQuery {
    type Call = Queries;

    fn draw(draw: &mut Draw<'_, '_>) -> (Self, Queries) {
        let of: Self = sample(draw.source);
        let spec = Self { format: format(draw, of.format.dtype), num_heads: draw.number(1, 4), ..of };
        let (tokens, max_position) = (tokens(draw), draw.number(1, 9));
        let positions = positions(draw, tokens.len().min(64), max_position);
        (spec, Queries { tokens, positions, max_position, scale: draw.factor() })
    }

    fn arrays(&self, call: &Queries) -> Vec<Array> {
        let counts = [1, reach(&call.tokens), self.num_heads];
        let [positions, cos_sin] = angles(&self.format, counts[1], call.max_position);
        vec![
            Array::read(Holds::Elements(self.input), counts, 128, 4),
            Array::read(F32, counts, 1, 1),
            Array::written(Holds::Elements(self.format.dtype), counts, 128, 4),
            Array::written(F32, counts, 1, 1),
            positions,
            cos_sin,
        ]
    }

    fn args<B: Copy>(
        &self,
        call: &Queries,
        arrays: &[Array],
        at: &[B],
    ) -> Result<IndexerQueryArgs<B>, Error> {
        Ok(IndexerQueryArgs {
            q: view(&arrays[0], at[0]),
            weights: view(&arrays[1], at[1]),
            q_out: view(&arrays[2], at[2]),
            weights_out: view(&arrays[3], at[3]),
            positions: at[4],
            cos_sin: at[5],
            max_position: call.max_position,
            weight_scale: call.scale,
        })
    }

    fn with_input<R>(
        &self,
        (): &(),
        call: &Queries,
        then: impl FnOnce(Result<IndexerQueryBatch<'_>, Error>) -> R,
    ) -> R {
        then(Ok(IndexerQueryBatch { tokens: call.tokens.clone(), positions: call.positions.as_deref() }))
    }

    fn touches(&self, call: &Queries, _: usize, [_, token, _]: [u64; 3]) -> bool {
        call.tokens.contains(&(token as u32))
    }
}
