//! `mla_prefill`: attention of new tokens in MLA's expanded form, over keys and values of each head.

use cudarc::driver::DeviceRepr;

use super::array::Array;
use super::table::Table;
use super::{Divisor, MAX_ITEMS, THREADS, checked_items, code};
use crate::cuda::caps::Card;
use crate::cuda::{Buffer, Cuda, Function};
use crate::ops::mla_prefill::tiles::{PrefillTile, TILE_WORDS, tiles};
use crate::ops::variants::{Variant, candidates, choose};
use crate::ops::{
    Candidate, Choice, Kernel, MlaPrefill, MlaPrefillArgs, PrefillExtent, PrefillOptions, PrefillSequence,
    PrefillTiling,
};
use crate::{Dtype, Result};

/// An entry of mla_prefill.cu, and the query rows of its tile.
type Entry = (&'static str, u32);
/// For 16-bit inputs with values of up to 128 columns, and of up to 256.
const NARROW: Entry = ("mla_prefill_128", 64);
const WIDE: Entry = ("mla_prefill_256", 32);
/// For f32 inputs.
const EXACT: Entry = ("mla_prefill_exact", 32);

/// In dispatch order.
const VARIANTS: [Variant<Card, MlaPrefill, Entry>; 1] =
    [Variant::new("simple", |_, spec| Ok(entry_of(spec)))];

/// `Args` of mla_prefill.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PrefillParams {
    q_nope: Array,
    q_pe: Array,
    k_nope: Array,
    k_pe: Array,
    v: Array,
    out: Array,
    lse: Array,
    table: u64,
    logit_scale: f32,
    max_tokens: u32,
    max_keys: u32,
    max_rows: u32,
    max_tiles: u32,
    num_heads: u32,
    nope_quads: u32,
    quads: u32,
    value_quads: u32,
    dtype: u32,
    out_dtype: u32,
    reserved: u32,
    by_num_heads: Divisor,
}

// SAFETY: plain data without padding, as the kernels have it.
unsafe impl DeviceRepr for PrefillParams {}

/// The kernel, and query rows of its tiles.
#[derive(Debug)]
pub struct Tiled {
    kernel: Function,
    rows: u32,
}

/// One layer's buffers, held.
#[derive(Debug)]
pub struct Layer {
    args: PrefillParams,
    buffers: [Buffer; 7],
}

impl Kernel<MlaPrefill> for Cuda {
    type Kernels = Tiled;
    type Step = Table;
    type Binding = Layer;

    fn kernel_variants(&self, spec: &MlaPrefill) -> Vec<Candidate> {
        candidates(&VARIANTS, self.card(), spec)
    }

    fn kernel_compile(
        &self,
        spec: &MlaPrefill,
        options: &PrefillOptions,
    ) -> Result<(Tiled, PrefillTiling, Choice)> {
        let ((entry, rows), choice) = choose(&VARIANTS, self.card(), spec, options.variant.as_deref())?;
        let kernel = self.kernel(entry)?;
        let target_groups = self.card().multiprocessors;
        let tiling = PrefillTiling { rows, target_groups, num_heads: spec.num_heads };
        Ok((Tiled { kernel, rows }, tiling, choice))
    }

    fn kernel_step(&self, spec: &MlaPrefill, _: &Tiled, max_tiles: u32) -> Result<Table> {
        blocks(spec, max_tiles.into())?;
        Table::new(self, u64::from(max_tiles) * u64::from(TILE_WORDS))
    }

    fn kernel_capacity(step: &Table) -> u32 {
        step.room(TILE_WORDS.into())
    }

    fn kernel_prepare(
        &self,
        spec: &MlaPrefill,
        tiled: &Tiled,
        step: &mut Table,
        sequences: &[PrefillSequence],
    ) -> Result<PrefillExtent> {
        let extent = PrefillExtent::of(sequences)?;
        let tiles = tiles(sequences, tiled.rows);
        blocks(spec, tiles.len() as u64)?;
        step.upload(self, tiles.len() as u32, tiles.iter().flat_map(PrefillTile::words))?;
        Ok(extent)
    }

    fn kernel_bind(
        &self,
        spec: &MlaPrefill,
        _: &Tiled,
        args: &MlaPrefillArgs<&Buffer>,
        room: PrefillExtent,
    ) -> Result<Layer> {
        let read = args.read_views(spec).map(|(_, view, _)| view);
        let (queries, keys) = ([room.tokens, spec.num_heads], [room.keys, spec.num_heads]);
        let rows = [room.rows, spec.num_heads];
        let array = |view, rows| Array::new(view, spec.dtype.bytes(), rows);
        let bound = PrefillParams {
            q_nope: array(&read[0], queries),
            q_pe: array(&read[1], queries),
            k_nope: array(&read[2], keys),
            k_pe: array(&read[3], keys),
            v: array(&read[4], keys),
            out: Array::new(&args.out, spec.out.bytes(), rows),
            lse: Array::new(&args.lse, 4, rows),
            table: 0,
            logit_scale: (f64::from(args.softmax_scale) * std::f64::consts::LOG2_E) as f32,
            max_tokens: room.tokens,
            max_keys: room.keys,
            max_rows: room.rows,
            max_tiles: 0,
            num_heads: spec.num_heads,
            nope_quads: spec.qk_nope_head_dim / 4,
            quads: (spec.qk_nope_head_dim + spec.qk_rope_head_dim) / 4,
            value_quads: spec.v_head_dim / 4,
            dtype: code(spec.dtype),
            out_dtype: code(spec.out),
            reserved: 0,
            by_num_heads: Divisor::new(spec.num_heads),
        };
        let [a, b, c, d, e] = read.map(|view| view.buffer.clone());
        let buffers = [a, b, c, d, e, args.out.buffer.clone(), args.lse.buffer.clone()];
        Ok(Layer { args: bound, buffers })
    }

    /// The grid covers the step's capacity: a captured launch attends to what the step's work list holds at the replay.
    fn kernel_record(
        &self,
        spec: &MlaPrefill,
        tiled: &Tiled,
        (): &mut (),
        step: &Table,
        layer: &Layer,
    ) -> Result<()> {
        // A table may have room for more tiles than a grid; `prepare` refuses those.
        let max_tiles = step.room(TILE_WORDS.into()).min(MAX_ITEMS / spec.num_heads);
        let is_empty = layer.args.max_tokens == 0 || layer.args.max_rows == 0;
        let Some(table) = step.ptr().filter(|_| !is_empty) else { return Ok(()) };
        // Every address is in its buffer, for every pair of step and binding and whatever the table holds:
        // - the kernels read tiles below max_tiles, for which the table has room, and take those below the table's count; heads are the
        //   rest of a division by num_heads;
        // - query tokens that are read are below max_tokens and keys below max_keys by `min`, and where that is 0 no key is read; rows
        //   that are written are below max_rows by comparison. `check_args` found where views end for so many;
        // - quads are below P, R and V by `min`, and those that are stored by comparison;
        // - offsets in shared memory are sums of thread numbers and loop counters below what the arrays have.
        // A tile's `num_keys` is below 2^30, which bounds the only loop that the table bounds.
        let args = PrefillParams { table, max_tiles, ..layer.args };
        self.launch(
            &tiled.kernel,
            max_tiles * spec.num_heads,
            THREADS,
            0,
            &args,
            layer.buffers.iter().chain(step.buffer()),
        )
    }
}

fn blocks(spec: &MlaPrefill, tiles: u64) -> Result<u32> {
    let blocks = tiles.saturating_mul(spec.num_heads.into());
    checked_items("blocks of a prefill", blocks, "attend fewer query tokens a step")
}

fn entry_of(spec: &MlaPrefill) -> Entry {
    match (spec.dtype, spec.v_head_dim) {
        (Dtype::F32, _) => EXACT,
        (_, ..=128) => NARROW,
        _ => WIDE,
    }
}

#[cfg(test)]
pub(super) const ENTRIES: [&str; 3] = [NARROW.0, WIDE.0, EXACT.0];
