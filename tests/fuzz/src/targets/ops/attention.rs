//! Ops that attend.

use wgpu_mla::{
    Batch, DecodeOptions, Error, Indices, LseBase, Mask, MlaDecode, MlaDecodeArgs, MlaPrefill,
    MlaPrefillArgs, Op, PageTable, Plan, PrefillSequence, Query, SlabTable, SparseBatch, SplitPolicy, Tiling,
};

use super::array::{Array, Holds};
use super::cache::{Place, pool, shape};
use super::case::{Case, Draw};
use super::{sample, view};

/// A batch, planned as it is prepared.
#[derive(Debug)]
pub struct Decoded {
    place: Place,
    lens: Vec<i32>,
    starts: Vec<i32>,
    table: Vec<i32>,
    max_pages: u32,
    policy: SplitPolicy,
    is_split: bool,
    base: LseBase,
    scales: [f32; 3],
    lists: Option<Lists>,
    attn_sink: Option<Vec<f32>>,
}

/// Lists of slots in place of sequences.
#[derive(Debug)]
struct Lists {
    /// Entries that the decode is compiled for, and that are planned.
    topk: u32,
    planned: u32,
    has_lengths: bool,
}

impl Lists {
    fn draw(draw: &mut Draw<'_, '_>) -> Self {
        let topk = draw.source.pick(&[1, 7, 16, 33, 40]);
        let planned = if draw.source.chance(64) { draw.source.between(1, topk) } else { topk };
        // An error only where it is longer than what was compiled, or of no entry.
        let planned = if draw.source.chance(4) { draw.number(1, topk) } else { planned };
        Self { topk, planned, has_lengths: draw.source.chance(128) }
    }
}

/// A sink a head: any number, and a broken one or one too many.
fn sinks(draw: &mut Draw<'_, '_>, heads: u32) -> Vec<f32> {
    let all = [0.0, -3.0, 2.5, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, -300.0];
    let mut sinks: Vec<f32> = (0..heads.min(256)).map(|_| draw.source.pick(&all)).collect();
    if draw.source.chance(4) {
        draw.is_broken = true;
        sinks.push(f32::NAN);
    }
    sinks
}

impl Case for MlaDecode {
    type Call = Decoded;

    fn draw(draw: &mut Draw<'_, '_>) -> (Self, Decoded) {
        let of: Self = sample(draw.source);
        let spec = Self { shape: shape(draw), kv: pool(draw, of.kv), ..of };
        let place = Place::draw(draw, &spec.kv);
        let (max_pages, pages) = (draw.source.between(1, 6), spec.kv.num_pages.clamp(1, 8));
        let (mut lens, mut starts, mut table) = (Vec::new(), vec![0], Vec::new());
        for _ in 0..draw.source.below(4) {
            let most = spec.kv.num_slots().min(u64::from(max_pages) * u64::from(spec.kv.page_size)).min(64);
            lens.push(draw.number(0, most as u32) as i32);
            starts.push(starts[starts.len() - 1] + draw.source.between(0, 3) as i32);
            table.extend((0..max_pages).map(|_| draw.number(0, pages - 1) as i32));
        }
        let policy =
            draw.source.pick(&[SplitPolicy::Auto, SplitPolicy::OneSplit, SplitPolicy::FixedTokens(7)]);
        let (kv, query) = (spec.kv.dtype().is_fp8(), spec.query.is_fp8());
        let lists = draw.source.chance(96).then(|| Lists::draw(draw));
        let attn_sink = draw.source.chance(64).then(|| sinks(draw, spec.shape.num_heads));
        let call = Decoded {
            place,
            lens,
            starts,
            table,
            max_pages,
            policy,
            is_split: draw.source.chance(128),
            base: draw.source.pick(&[LseBase::E, LseBase::Two]),
            scales: [draw.factor(), draw.code_factor(kv), draw.code_factor(query)],
            lists,
            attn_sink,
        };
        (spec, call)
    }

    fn arrays(&self, call: &Decoded) -> Vec<Array> {
        let counts = [1, call.starts[call.starts.len() - 1] as u32, self.shape.num_heads];
        let (latent, rope) = (self.shape.kv_lora_rank, self.shape.qk_rope_head_dim);
        let dims = if call.is_split { [latent, rope] } else { [self.shape.row_elems(), 0] };
        let query = Holds::Elements(self.query);
        let mut all: Vec<_> = dims.map(|dim| Array::read(query, counts, dim, 8)).into();
        all.push(Array::written(Holds::Elements(self.out), counts, latent, 8));
        all.push(Array::written(Holds::Lses, counts, 1, 1));
        if let Some(Lists { topk, has_lengths, .. }) = call.lists {
            let most = self.kv.num_slots().min(1 << 20) as u32;
            let list = |most, entries| Array {
                packed: true,
                unread: false,
                ..Array::read(Holds::Positions(most), [1, counts[1], entries], 1, 1)
            };
            all.push(list(most + 2, topk));
            all.extend(has_lengths.then(|| list(topk + 2, 1)));
        }
        call.place.arrays(&mut all, &self.kv, &self.shape, false);
        all
    }

    fn args<B: Copy>(&self, call: &Decoded, arrays: &[Array], at: &[B]) -> Result<MlaDecodeArgs<B>, Error> {
        let view = |i: usize| view(&arrays[i], at[i]);
        let [softmax_scale, k_scale, q_scale] = call.scales;
        let has_lengths = call.lists.as_ref().is_some_and(|lists| lists.has_lengths);
        let pool = 4 + usize::from(call.lists.is_some()) + usize::from(has_lengths);
        Ok(MlaDecodeArgs {
            query: match call.is_split {
                true => Query::Split { q_nope: view(0), q_pe: view(1) },
                false => Query::Whole(view(0)),
            },
            kv: call.place.view(&self.kv, &self.shape, &arrays[pool..], &at[pool..])?,
            out: view(2),
            lse: view(3),
            lse_base: call.base,
            softmax_scale,
            k_scale,
            q_scale,
            indices: call
                .lists
                .as_ref()
                .map(|_| Indices { slots: view(4), topk_length: has_lengths.then(|| view(5)) }),
            attn_sink: call.attn_sink.clone(),
        })
    }

    fn options(&self, call: &Decoded) -> DecodeOptions {
        let (topk, attn_sink) = (call.lists.as_ref().map_or(0, |lists| lists.topk), call.attn_sink.is_some());
        DecodeOptions { topk, attn_sink, ..DecodeOptions::default() }
    }

    fn with_input<R>(
        &self,
        tiling: &Tiling,
        call: &Decoded,
        then: impl FnOnce(Result<<Self as Op>::Input<'_>, Error>) -> R,
    ) -> R {
        let pages = PageTable::Dense { block_table: &call.table, max_pages: call.max_pages };
        let slab_pages = call.place.slab_pages;
        if let Some(lists) = &call.lists {
            let batch = SparseBatch {
                slab_pages: (slab_pages > 0).then_some(slab_pages),
                ..SparseBatch::new(call.starts[call.starts.len() - 1] as u32, lists.planned)
            };
            return match Plan::sparse(self, tiling, &batch, call.policy) {
                Ok(plan) => then(Ok((&plan, PageTable::Indices))),
                Err(error) => then(Err(error)),
            };
        }
        let slabs = (slab_pages > 0).then_some(SlabTable { pages, slab_pages });
        let batch = Batch { slabs, ..Batch::new(&call.lens, &call.starts) };
        match Plan::new(self, tiling, &batch, call.policy) {
            Ok(plan) => then(Ok((&plan, pages))),
            Err(error) => then(Err(error)),
        }
    }

    fn touches(&self, _: &Decoded, _: usize, _: [u64; 3]) -> bool {
        true
    }
}

/// Sequences of queries and keys.
#[derive(Debug)]
pub struct Prefilled {
    sequences: Vec<PrefillSequence>,
    scales: [f32; 2],
}

impl Prefilled {
    fn reach(&self, of: impl Fn(&PrefillSequence) -> (u32, u32)) -> u32 {
        let some = self.sequences.iter().filter(|sequence| sequence.q_len > 0).map(of);
        some.map(|(begin, count)| begin.saturating_add(count)).max().unwrap_or(0)
    }
}

impl Case for MlaPrefill {
    type Call = Prefilled;

    fn draw(draw: &mut Draw<'_, '_>) -> (Self, Prefilled) {
        let of: Self = sample(draw.source);
        let mut dim = |least| 8 * draw.number(least, 4).min(1 << 28);
        let (qk_nope_head_dim, qk_rope_head_dim, v_head_dim) = (dim(1), dim(0), dim(1));
        let num_heads = draw.number(1, 3);
        let spec = Self { num_heads, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, ..of };
        let (mut sequences, mut row) = (Vec::new(), 0u32);
        for _ in 0..draw.source.below(4) {
            let (q_begin, q_len) = (draw.number(0, 3), draw.number(0, 5));
            let (kv_begin, kv_len) = (draw.number(0, 3), draw.number(0, 40));
            let first = i64::from(draw.source.byte()) - 64;
            let mask = draw.source.pick(&[
                Mask::Causal,
                Mask::Full,
                Mask::CausalFrom(first),
                Mask::CausalFrom(i64::MAX),
            ]);
            row = row.saturating_add(draw.number(0, 2));
            sequences.push(PrefillSequence { q_begin, q_len, kv_begin, kv_len, mask, out_begin: row });
            row = row.saturating_add(q_len);
        }
        (spec, Prefilled { sequences, scales: [draw.factor(), draw.factor()] })
    }

    fn arrays(&self, call: &Prefilled) -> Vec<Array> {
        let heads = self.num_heads;
        let tokens = call.reach(|sequence| (sequence.q_begin, sequence.q_len));
        let keys = call.reach(|sequence| (sequence.kv_begin, sequence.kv_len));
        let rows = call.reach(|sequence| (sequence.out_begin, sequence.q_len));
        let (nope, rope) = (self.qk_nope_head_dim, self.qk_rope_head_dim);
        let read = |count, dim, shares| {
            let array = Array::read(Holds::Elements(self.dtype), [1, count, heads], dim, 8);
            // Rows that are unread have strides of anything.
            Array { repeats: [dim > 0, shares && dim > 0], ..array }
        };
        vec![
            read(tokens, nope, false),
            read(tokens, rope, false),
            read(keys, nope, false),
            read(keys, rope, true),
            read(keys, self.v_head_dim, false),
            Array::written(Holds::Elements(self.out), [1, rows, heads], self.v_head_dim, 8),
            Array::written(Holds::Lses, [1, rows, heads], 1, 1),
        ]
    }

    fn args<B: Copy>(
        &self,
        call: &Prefilled,
        arrays: &[Array],
        at: &[B],
    ) -> Result<MlaPrefillArgs<B>, Error> {
        let view = |i: usize| view(&arrays[i], at[i]);
        let [softmax_scale, v_scale] = call.scales;
        let (q_nope, q_pe, k_nope, k_pe, v) = (view(0), view(1), view(2), view(3), view(4));
        Ok(MlaPrefillArgs {
            q_nope,
            q_pe,
            k_nope,
            k_pe,
            v,
            out: view(5),
            lse: view(6),
            softmax_scale,
            v_scale,
        })
    }

    fn with_input<R>(
        &self,
        _: &<Self as Op>::Facts,
        call: &Prefilled,
        then: impl FnOnce(Result<&[PrefillSequence], Error>) -> R,
    ) -> R {
        then(Ok(&call.sequences))
    }

    fn touches(&self, call: &Prefilled, _: usize, [_, row, _]: [u64; 3]) -> bool {
        let row = row as u32;
        let rows = |sequence: &PrefillSequence| {
            sequence.out_begin..sequence.out_begin.saturating_add(sequence.q_len)
        };
        call.sequences.iter().any(|sequence| rows(sequence).contains(&row))
    }
}
