//! Ops that turn, multiply or move rows.

use std::ops::Range;

use wgpu_mla::{
    Dtype, Error, HeadProject, HeadProjectArgs, ReorgBatch, ReorgChunk, ReorgKvCache, ReorgKvCacheArgs, Rope,
    RopeAppend, RopeAppendArgs, RopeAppendBatch, RopeArgs, Shares, WeightFormat, WeightOrder, WeightScales,
    WeightView,
};

use super::array::{Array, Holds};
use super::cache::{Appended, append};
use super::case::{Case, Draw};
use super::merges::reach;
use super::{sample, tokens, view};
use crate::source::Source;

/// Tokens, positions of the table and a factor.
#[derive(Debug)]
pub struct Turned {
    tokens: Range<u32>,
    max_position: u32,
    scale: f32,
}

/// Gives an array that is written the place of the one before it, as in place.
fn in_place(source: &mut Source<'_>, arrays: &mut [Array], at: usize) {
    if source.chance(64) {
        let Array { buffer, offset, strides, bytes, .. } = arrays[at - 1];
        arrays[at] = Array { buffer, offset, strides, bytes, ..arrays[at].clone() };
    }
}

impl Case for Rope {
    type Call = Turned;

    fn draw(draw: &mut Draw<'_, '_>) -> (Self, Turned) {
        let of: Self = sample(draw.source);
        let spec = Self { num_heads: draw.number(1, 4), rope_dim: 8 * draw.number(1, 8).min(1 << 28), ..of };
        (spec, Turned { tokens: tokens(draw), max_position: draw.number(1, 9), scale: draw.factor() })
    }

    fn arrays(&self, call: &Turned) -> Vec<Array> {
        let counts = [1, reach(&call.tokens), self.num_heads];
        let rows = Holds::Elements(self.dtype);
        vec![
            Array::read(rows, counts, self.rope_dim, 4),
            Array::written(rows, counts, self.rope_dim, 4),
            Array::whole(Holds::Positions(call.max_position), counts[1], 1),
            Array::whole(Holds::Elements(wgpu_mla::Dtype::F32), call.max_position, self.rope_dim),
        ]
    }

    fn args<B: Copy>(&self, call: &Turned, arrays: &[Array], at: &[B]) -> Result<RopeArgs<B>, Error> {
        let (x, y) = (view(&arrays[0], at[0]), view(&arrays[1], at[1]));
        let Turned { max_position, scale, .. } = *call;
        Ok(RopeArgs { x, y, positions: at[2], cos_sin: at[3], max_position, scale })
    }

    fn with_input<R>(&self, (): &(), call: &Turned, then: impl FnOnce(Result<Range<u32>, Error>) -> R) -> R {
        then(Ok(call.tokens.clone()))
    }

    fn touches(&self, call: &Turned, _: usize, [_, token, _]: [u64; 3]) -> bool {
        call.tokens.contains(&(token as u32))
    }

    fn arrange(&self, source: &mut Source<'_>, arrays: &mut [Array]) {
        in_place(source, arrays, 1);
    }
}

/// Queries to turn, and rows to turn and append.
#[derive(Debug)]
pub struct TurnedRows {
    appended: Appended,
    positions: Option<Vec<i32>>,
    max_position: u32,
    scale: f32,
}

impl Case for RopeAppend {
    type Call = TurnedRows;

    fn draw(draw: &mut Draw<'_, '_>) -> (Self, TurnedRows) {
        let of: Self = sample(draw.source);
        let spec = Self { append: append(draw, of.append), num_heads: draw.number(1, 4), ..of };
        draw.is_broken |= spec.append.shape.qk_rope_head_dim == 0;
        let appended = Appended::draw(draw, &spec.append.kv);
        let max_position = draw.number(1, 9);
        let count = appended.slots.len();
        let positions = draw.source.chance(128).then(|| {
            let most = max_position.clamp(1, 64) - 1;
            (0..count).map(|_| draw.number(0, most) as i32).collect()
        });
        (spec, TurnedRows { appended, positions, max_position, scale: draw.factor() })
    }

    fn arrays(&self, call: &TurnedRows) -> Vec<Array> {
        let tokens = call.appended.slots.len() as u32;
        let (counts, rope) = ([1, tokens, self.num_heads], self.append.shape.qk_rope_head_dim);
        let rows = Holds::Elements(self.query);
        let mut all = vec![
            Array::read(rows, counts, rope, 4),
            Array::written(Holds::Elements(self.query_out), counts, rope, 4),
            Array::whole(Holds::Positions(call.max_position), tokens, 1),
            Array::whole(Holds::Elements(wgpu_mla::Dtype::F32), call.max_position, rope),
        ];
        call.appended.arrays(&mut all, &self.append);
        all.iter_mut().skip(6).filter(|array| array.like.is_some()).for_each(|array| array.like = Some(6));
        all
    }

    fn args<B: Copy>(
        &self,
        call: &TurnedRows,
        arrays: &[Array],
        at: &[B],
    ) -> Result<RopeAppendArgs<B>, Error> {
        Ok(RopeAppendArgs {
            q_pe: view(&arrays[0], at[0]),
            q_pe_out: view(&arrays[1], at[1]),
            layer: call.appended.args(&self.append, &arrays[4..], &at[4..])?,
            positions: at[2],
            cos_sin: at[3],
            max_position: call.max_position,
            q_pe_scale: call.scale,
            q_scale: if self.query_out.is_fp8() { call.scale } else { 1.0 },
        })
    }

    fn with_input<R>(
        &self,
        (): &(),
        call: &TurnedRows,
        then: impl FnOnce(Result<RopeAppendBatch<'_>, Error>) -> R,
    ) -> R {
        let (slot_mapping, positions) = (&call.appended.slots[..], call.positions.as_deref());
        then(Ok(RopeAppendBatch { slot_mapping, positions }))
    }

    fn touches(&self, call: &TurnedRows, array: usize, row: [u64; 3]) -> bool {
        array == 1 || call.appended.touches(&self.append, array - 6, row)
    }

    fn arrange(&self, source: &mut Source<'_>, arrays: &mut [Array]) {
        // Codes have a buffer of their own.
        if self.query_out == self.query {
            in_place(source, arrays, 1);
        }
    }
}

/// Tokens, a factor, and whether it saturates.
#[derive(Debug)]
pub struct Projected(Range<u32>, f32, bool);

impl Case for HeadProject {
    type Call = Projected;

    fn draw(draw: &mut Draw<'_, '_>) -> (Self, Projected) {
        let of: Self = sample(draw.source);
        let whole = match of.weight {
            WeightFormat::Q8_0 => 32,
            _ if of.weight.has_scales() => 16,
            _ => 8,
        };
        let mut dim = || whole * draw.number(1, 6).min(1 << 26);
        let (k, n) = (dim(), dim());
        // Cases have no counters.
        let spec = Self { num_heads: draw.number(1, 4), k, n, guard: false, ..of };
        (spec, Projected(tokens(draw), draw.factor(), draw.source.chance(128)))
    }

    fn arrays(&self, Projected(tokens, ..): &Projected) -> Vec<Array> {
        let counts = [1, reach(tokens), self.num_heads];
        let (rows, columns) = if self.order == WeightOrder::Kn { (self.k, self.n) } else { (self.n, self.k) };
        let x = Array::read(Holds::Elements(self.input), counts, self.k, 8);
        // Blocks are bytes that look like codes.
        let (dtype, columns, unit) = match self.weight {
            WeightFormat::Q8_0 => (Dtype::E4m3, columns / 32 * 34, 2),
            WeightFormat::Elements(dtype) => (dtype, columns, if self.weight.has_scales() { 16 } else { 8 }),
        };
        let weight = Array::read(Holds::Elements(dtype), [1, rows, self.num_heads], columns, unit);
        let mut all = vec![
            Array { repeats: [false, true], ..x },
            Array { unread: false, ..weight },
            Array::written(Holds::Elements(self.output), counts, self.n, 8),
        ];
        if self.weight.has_scales() {
            let scales = Array::read(Holds::Elements(Dtype::F32), [1, 1, self.num_heads], 1, 1);
            all.push(Array { repeats: [false, true], ..scales });
        }
        all
    }

    fn args<B: Copy>(
        &self,
        call: &Projected,
        arrays: &[Array],
        at: &[B],
    ) -> Result<HeadProjectArgs<B>, Error> {
        let [_, row_stride, head_stride] = arrays[1].strides;
        Ok(HeadProjectArgs {
            x: view(&arrays[0], at[0]),
            weight: WeightView {
                buffer: at[1],
                offset: arrays[1].offset,
                head_stride,
                row_stride,
                scales: arrays.get(3).map(|scales| WeightScales {
                    buffer: at[3],
                    offset: scales.offset,
                    head_stride: scales.strides[2],
                }),
            },
            y: view(&arrays[2], at[2]),
            scale: call.1,
            out_scale: if self.output.is_fp8() { call.1 } else { 1.0 },
            saturates: call.2,
            guard: None,
        })
    }

    fn with_input<R>(
        &self,
        (): &(),
        call: &Projected,
        then: impl FnOnce(Result<Range<u32>, Error>) -> R,
    ) -> R {
        then(Ok(call.0.clone()))
    }

    fn touches(&self, call: &Projected, _: usize, [_, token, _]: [u64; 3]) -> bool {
        call.0.contains(&(token as u32))
    }
}

/// Chunks, and who holds their tokens.
#[derive(Debug)]
pub struct Reordered {
    shares: Shares,
    chunks: Vec<ReorgChunk>,
}

impl Reordered {
    fn rows(&self, of: impl Fn(&ReorgChunk) -> u32) -> u32 {
        self.chunks.iter().filter(|chunk| chunk.tokens > 0).map(of).max().unwrap_or(0)
    }
}

impl Case for ReorgKvCache {
    type Call = Reordered;

    fn draw(draw: &mut Draw<'_, '_>) -> (Self, Reordered) {
        let of: Self = sample(draw.source);
        let spec = Self { row_elems: 4 * draw.number(1, 10).min(1 << 28), ..of };
        let shares = Shares::even(draw.source.between(1, 4), draw.source.between(1, 5)).expect("shares");
        let weights = draw.source.pick(&[[1, 2, 3], [0, 1, 1], [5, 1, 1]]);
        let shares =
            if draw.source.chance(64) { Shares::weighted(&weights, 2).expect("shares") } else { shares };
        let (mut chunks, mut out_row, mut local_row) = (Vec::new(), 0u32, 0u32);
        for _ in 0..draw.source.below(4) {
            let (begin, tokens) = (draw.number(0, 40), draw.number(0, 9));
            out_row = out_row.saturating_add(draw.number(0, 2));
            chunks.push(ReorgChunk { begin, tokens, local_row, out_row });
            out_row = out_row.saturating_add(tokens);
            local_row =
                local_row.saturating_add(shares.padded_len(begin, tokens)).saturating_add(draw.number(0, 2));
        }
        (spec, Reordered { shares, chunks })
    }

    fn arrays(&self, call: &Reordered) -> Vec<Array> {
        let local = |chunk: &ReorgChunk| {
            chunk.local_row.saturating_add(call.shares.padded_len(chunk.begin, chunk.tokens))
        };
        let (local, rows) = (call.rows(local), call.rows(|chunk| chunk.out_row.saturating_add(chunk.tokens)));
        let holds = Holds::Elements(self.dtype);
        vec![
            Array::read(holds, [call.shares.world(), local, 1], self.row_elems, 4),
            Array::written(holds, [1, rows, 1], self.row_elems, 4),
        ]
    }

    fn args<B: Copy>(&self, _: &Reordered, arrays: &[Array], at: &[B]) -> Result<ReorgKvCacheArgs<B>, Error> {
        let (gathered, out) = (view(&arrays[0], at[0]), view(&arrays[1], at[1]));
        Ok(ReorgKvCacheArgs { gathered, rank_stride: arrays[0].strides[0], out })
    }

    fn with_input<R>(
        &self,
        (): &(),
        call: &Reordered,
        then: impl FnOnce(Result<ReorgBatch<'_>, Error>) -> R,
    ) -> R {
        then(Ok(ReorgBatch { shares: &call.shares, chunks: &call.chunks }))
    }

    fn touches(&self, call: &Reordered, _: usize, [_, row, _]: [u64; 3]) -> bool {
        let row = row as u32;
        call.chunks
            .iter()
            .any(|chunk| (chunk.out_row..chunk.out_row.saturating_add(chunk.tokens)).contains(&row))
    }
}
