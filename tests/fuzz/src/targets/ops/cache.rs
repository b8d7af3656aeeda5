//! Ops on the paged cache.

use std::ops::Range;

use wgpu_mla::{
    Dtype, Error, GatherBatch, GatherRange, KvAppend, KvAppendArgs, KvCalibrate, KvCalibrateArgs,
    KvCopyPages, KvGather, KvGatherArgs, KvLayout, KvSpec, KvView, MlaShape, PageTable, Slabs,
};

use super::array::{Array, Holds};
use super::case::{Case, Draw};
use super::merges::reach;
use super::{sample, tokens, view};

/// Dims that a cache may have: mostly the smallest.
pub fn shape(draw: &mut Draw<'_, '_>) -> MlaShape {
    let dims = [(256, 32), (256, 32), (256, 32), (256, 64), (512, 64), (512, 0)];
    let (kv_lora_rank, qk_rope_head_dim) = draw.source.pick(&dims);
    MlaShape { num_heads: draw.number(1, 5), kv_lora_rank, qk_rope_head_dim }
}

/// Dims that a cache of this layout may have.
fn shape_for(draw: &mut Draw<'_, '_>, layout: KvLayout) -> MlaShape {
    let any = shape(draw);
    match layout {
        KvLayout::Plain(_) | KvLayout::Index(_) => any,
        KvLayout::Ds656 => MlaShape { kv_lora_rank: 512, qk_rope_head_dim: 64, ..any },
        KvLayout::Ds528 => MlaShape { kv_lora_rank: 512, qk_rope_head_dim: 0, ..any },
    }
}

/// A pool of few small pages.
pub fn pool(draw: &mut Draw<'_, '_>, sample: KvSpec) -> KvSpec {
    let page_size = match draw.source.below(4) {
        0 => 16,
        _ => draw.number(1, 4),
    };
    KvSpec { page_size, num_pages: draw.number(1, 6), ..sample }
}

/// Where a layer's pool is: which layer of how many, and in slabs of how many pages.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    pub layer: u32,
    /// 0 for one buffer.
    pub slab_pages: u32,
}

impl Place {
    pub fn draw(draw: &mut Draw<'_, '_>, kv: &KvSpec) -> Self {
        let layer = if draw.source.chance(128) { draw.number(0, 2) } else { 0 };
        let most = kv.num_pages.clamp(2, 6) - 1;
        let slab_pages = if kv.num_pages > 1 && draw.source.chance(64) { draw.number(1, most) } else { 0 };
        Self { layer, slab_pages }
    }

    /// Pages of each slab.
    fn slabs(self, kv: &KvSpec) -> Vec<u32> {
        if self.slab_pages == 0 || kv.num_pages / self.slab_pages > 8 {
            return vec![kv.num_pages];
        }
        let firsts = (0..kv.num_pages).step_by(self.slab_pages as usize);
        firsts.map(|first| self.slab_pages.min(kv.num_pages - first)).collect()
    }

    /// Adds the pool's arrays behind the others.
    pub fn arrays(self, all: &mut Vec<Array>, kv: &KvSpec, shape: &MlaShape, writes: bool) {
        let first = all.len();
        for (slab, pages) in self.slabs(kv).into_iter().enumerate() {
            let counts = [self.layer.saturating_add(1), pages, kv.page_size];
            let row = kv.token(shape).bytes / kv.dtype().bytes() as u64;
            let unit = if kv.layout.is_plain() { 8 } else { 16 };
            let array = Array::read(Holds::Elements(kv.dtype()), counts, row as u32, unit);
            let like = (slab > 0).then_some(first);
            all.push(Array { writes, packed: true, unread: false, like, ..array });
        }
    }

    /// The view of the arrays from `first` on.
    pub fn view<B: Copy>(
        self,
        kv: &KvSpec,
        shape: &MlaShape,
        arrays: &[Array],
        at: &[B],
    ) -> Result<KvView<B>, Error> {
        let bytes = |elements: u64| elements.saturating_mul(kv.dtype().bytes() as u64);
        let [layer_stride, block_stride, _] = arrays[0].strides.map(bytes);
        let (offset, layer) = (bytes(arrays[0].offset), self.layer);
        let spec = wgpu_mla::MlaDecode { shape: *shape, kv: *kv, query: kv.dtype(), out: kv.dtype() };
        let slabs = match self.slab_pages {
            0 => Slabs::ONE,
            pages => KvView::in_slabs(at, &spec, pages, layer)?.slabs,
        };
        Ok(KvView { buffer: at[0], offset, layer_stride, layer, block_stride, slabs })
    }

    /// The slot of a row of one of the pool's arrays, where it is of the layer.
    pub fn slot(self, kv: &KvSpec, slab: usize, [layer, page, offset]: [u64; 3]) -> Option<u64> {
        let page = slab as u64 * u64::from(self.slab_pages) + page;
        (layer == u64::from(self.layer)).then_some(page * u64::from(kv.page_size) + offset)
    }
}

/// Slots for some tokens, each once but for broken ones, some skipped.
pub fn slots(draw: &mut Draw<'_, '_>, kv: &KvSpec) -> Vec<i64> {
    let most = kv.num_slots().clamp(1, 64);
    let mut free: Vec<i64> = (0..most as i64).collect();
    draw.source.rng().shuffle(&mut free);
    let count = draw.source.below(most.min(6) + 1);
    let mut slot = |draw: &mut Draw<'_, '_>| match draw.source.byte() {
        0..=31 => -1 - i64::from(draw.source.byte()),
        254.. => {
            draw.is_broken = true;
            draw.source.hostile_u64() as i64
        }
        _ => free.pop().unwrap_or(-1),
    };
    (0..count).map(|_| slot(draw)).collect()
}

/// New tokens and their slots.
#[derive(Debug)]
pub struct Appended {
    pub slots: Vec<i64>,
    pub place: Place,
    pub k_scale: f32,
}

impl Appended {
    pub fn draw(draw: &mut Draw<'_, '_>, kv: &KvSpec) -> Self {
        let place = Place::draw(draw, kv);
        Self { slots: slots(draw, kv), place, k_scale: draw.code_factor(kv.layout == Dtype::E4m3.into()) }
    }

    pub fn arrays(&self, all: &mut Vec<Array>, spec: &KvAppend) {
        let counts = [1, self.slots.len() as u32, 1];
        for dim in [spec.shape.kv_lora_rank, spec.shape.qk_rope_head_dim] {
            all.push(Array::read(Holds::Elements(spec.input), counts, dim, 4));
        }
        self.place.arrays(all, &spec.kv, &spec.shape, true);
    }

    pub fn args<B: Copy>(
        &self,
        spec: &KvAppend,
        arrays: &[Array],
        at: &[B],
    ) -> Result<KvAppendArgs<B>, Error> {
        Ok(KvAppendArgs {
            kv_c: view(&arrays[0], at[0]),
            k_pe: view(&arrays[1], at[1]),
            kv: self.place.view(&spec.kv, &spec.shape, &arrays[2..], &at[2..])?,
            k_scale: self.k_scale,
            guard: None,
        })
    }

    pub fn touches(&self, spec: &KvAppend, slab: usize, row: [u64; 3]) -> bool {
        self.place.slot(&spec.kv, slab, row).is_some_and(|slot| self.slots.contains(&(slot as i64)))
    }
}

/// A spec of few small pages.
pub fn append(draw: &mut Draw<'_, '_>, sample: KvAppend) -> KvAppend {
    // Cases have no counters.
    KvAppend { shape: shape_for(draw, sample.kv.layout), kv: pool(draw, sample.kv), guard: false, ..sample }
}

impl Case for KvAppend {
    type Call = Appended;

    fn draw(draw: &mut Draw<'_, '_>) -> (Self, Appended) {
        let of = sample(draw.source);
        let spec = append(draw, of);
        (spec, Appended::draw(draw, &spec.kv))
    }

    fn arrays(&self, call: &Appended) -> Vec<Array> {
        let mut all = Vec::new();
        call.arrays(&mut all, self);
        all
    }

    fn args<B: Copy>(&self, call: &Appended, arrays: &[Array], at: &[B]) -> Result<KvAppendArgs<B>, Error> {
        call.args(self, arrays, at)
    }

    fn with_input<R>(&self, (): &(), call: &Appended, then: impl FnOnce(Result<&[i64], Error>) -> R) -> R {
        then(Ok(&call.slots))
    }

    fn touches(&self, call: &Appended, array: usize, row: [u64; 3]) -> bool {
        call.touches(self, array - 2, row)
    }
}

/// Copies of pages.
#[derive(Debug)]
pub struct Copies(Vec<(u32, u32)>, Place);

impl Case for KvCopyPages {
    type Call = Copies;

    fn draw(draw: &mut Draw<'_, '_>) -> (Self, Copies) {
        let of: Self = sample(draw.source);
        // Index keys have one shape, which the sample has.
        let shape = match of.kv.layout {
            KvLayout::Index(_) => of.shape,
            layout => shape_for(draw, layout),
        };
        let spec = Self { shape, kv: pool(draw, of.kv) };
        let place = Place::draw(draw, &spec.kv);
        let mut pages: Vec<u32> = (0..spec.kv.num_pages.min(6)).collect();
        draw.source.rng().shuffle(&mut pages);
        // The pages that are read come first.
        let read = pages.split_off(pages.len() / 2);
        let mut copies = Vec::new();
        for to in pages {
            let from = if read.is_empty() { to } else { draw.source.pick(&read) };
            let copy = if draw.source.chance(3) { (draw.source.hostile(), to) } else { (from, to) };
            draw.is_broken |= !read.contains(&copy.0);
            copies.push(copy);
        }
        (spec, Copies(copies, place))
    }

    fn arrays(&self, Copies(_, place): &Copies) -> Vec<Array> {
        let mut all = Vec::new();
        place.arrays(&mut all, &self.kv, &self.shape, true);
        all
    }

    fn args<B: Copy>(
        &self,
        Copies(_, place): &Copies,
        arrays: &[Array],
        at: &[B],
    ) -> Result<KvView<B>, Error> {
        place.view(&self.kv, &self.shape, arrays, at)
    }

    fn with_input<R>(
        &self,
        (): &(),
        call: &Copies,
        then: impl FnOnce(Result<&[(u32, u32)], Error>) -> R,
    ) -> R {
        then(Ok(&call.0))
    }

    fn touches(&self, Copies(copies, place): &Copies, array: usize, row: [u64; 3]) -> bool {
        let slot = place.slot(&self.kv, array, row);
        slot.is_some_and(|slot| {
            copies.iter().any(|&(_, to)| u64::from(to) == slot / u64::from(self.kv.page_size))
        })
    }
}

/// Ranges of sequences that become rows.
#[derive(Debug)]
pub struct Gathered {
    place: Place,
    lens: Vec<i32>,
    table: Vec<i32>,
    max_pages: u32,
    ranges: Vec<GatherRange>,
    k_scale: f32,
}

impl Gathered {
    fn rows(&self) -> u32 {
        let ends = self.ranges.iter().filter(|range| range.tokens > 0);
        ends.map(|range| range.out_row.saturating_add(range.tokens)).max().unwrap_or(0)
    }
}

impl Case for KvGather {
    type Call = Gathered;

    fn draw(draw: &mut Draw<'_, '_>) -> (Self, Gathered) {
        let of: Self = sample(draw.source);
        let spec = Self { shape: shape_for(draw, of.kv.layout), kv: pool(draw, of.kv), ..of };
        let place = Place::draw(draw, &spec.kv);
        let max_pages = draw.source.between(1, 3);
        let sequences = draw.source.between(1, 3);
        let mut lens = Vec::new();
        let mut table = Vec::new();
        for _ in 0..sequences {
            let most = max_pages * spec.kv.page_size.min(256);
            lens.push(draw.number(0, most) as i32);
            table.extend((0..max_pages).map(|_| draw.number(0, spec.kv.num_pages.clamp(1, 8) - 1) as i32));
        }
        let (mut ranges, mut row) = (Vec::new(), 0u32);
        for _ in 0..draw.source.below(4) {
            let sequence = draw.number(0, sequences - 1);
            let len = lens.get(sequence as usize).map_or(0, |&len| len.clamp(0, 64) as u32);
            let begin = draw.number(0, len);
            let tokens = draw.number(0, len.saturating_sub(begin));
            row = row.saturating_add(draw.number(0, 2));
            ranges.push(GatherRange { sequence, begin, tokens, out_row: row });
            row = row.saturating_add(tokens);
        }
        let k_scale = draw.code_factor(spec.kv.layout == Dtype::E4m3.into());
        (spec, Gathered { place, lens, table, max_pages, ranges, k_scale })
    }

    fn arrays(&self, call: &Gathered) -> Vec<Array> {
        let counts = [1, call.rows(), 1];
        let mut all = vec![Array::written(Holds::Elements(self.output), counts, self.shape.row_elems(), 4)];
        // Its stride is checked where it is unread too.
        all[0].unread = false;
        call.place.arrays(&mut all, &self.kv, &self.shape, false);
        all
    }

    fn args<B: Copy>(&self, call: &Gathered, arrays: &[Array], at: &[B]) -> Result<KvGatherArgs<B>, Error> {
        let kv = call.place.view(&self.kv, &self.shape, &arrays[1..], &at[1..])?;
        Ok(KvGatherArgs { kv, k_scale: call.k_scale, out: view(&arrays[0], at[0]) })
    }

    fn with_input<R>(
        &self,
        (): &(),
        call: &Gathered,
        then: impl FnOnce(Result<GatherBatch<'_>, Error>) -> R,
    ) -> R {
        let pages = PageTable::Dense { block_table: &call.table, max_pages: call.max_pages };
        then(Ok(GatherBatch { pages, seq_lens: &call.lens, ranges: &call.ranges }))
    }

    fn touches(&self, call: &Gathered, _: usize, [_, row, _]: [u64; 3]) -> bool {
        let row = row as u32;
        call.ranges
            .iter()
            .any(|range| (range.out_row..range.out_row.saturating_add(range.tokens)).contains(&row))
    }
}

/// Tokens whose elements are counted.
#[derive(Debug)]
pub struct Counted(Range<u32>, f32);

impl Case for KvCalibrate {
    type Call = Counted;

    fn draw(draw: &mut Draw<'_, '_>) -> (Self, Counted) {
        let of: Self = sample(draw.source);
        let spec = Self { shape: shape(draw), ..of };
        (spec, Counted(tokens(draw), draw.factor()))
    }

    fn arrays(&self, Counted(tokens, _): &Counted) -> Vec<Array> {
        let counts = [1, reach(tokens), 1];
        let mut all: Vec<_> = [self.shape.kv_lora_rank, self.shape.qk_rope_head_dim]
            .map(|dim| Array::read(Holds::Elements(self.input), counts, dim, 4))
            .into();
        all.push(Array { writes: true, ..Array::whole(Holds::Counters, 1, 8) });
        all
    }

    fn args<B: Copy>(&self, call: &Counted, arrays: &[Array], at: &[B]) -> Result<KvCalibrateArgs<B>, Error> {
        let (kv_c, k_pe) = (view(&arrays[0], at[0]), view(&arrays[1], at[1]));
        Ok(KvCalibrateArgs { kv_c, k_pe, k_scale: call.1, stats: at[2] })
    }

    fn with_input<R>(&self, (): &(), call: &Counted, then: impl FnOnce(Result<Range<u32>, Error>) -> R) -> R {
        then(Ok(call.0.clone()))
    }

    fn touches(&self, _: &Counted, _: usize, _: [u64; 3]) -> bool {
        true
    }
}
