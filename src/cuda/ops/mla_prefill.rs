//! `mla_prefill`: attention of new tokens in MLA's expanded form, over keys and values of each head.

use super::array::Array;
use super::single::kernel_args;
use super::table::Table;
use super::{Divisor, MAX_ITEMS, THREADS, checked_items, code};
use crate::base::dtype::Dtype;
use crate::base::error::Result;
use crate::cuda::caps::Card;
use crate::cuda::kernels::{LINE_ELEMENTS, TensorMap, ptx};
use crate::cuda::{Buffer, Cuda, Function};
use crate::ops::mla_prefill::tiles::{PrefillTile, TILE_WORDS, tiles};
use crate::ops::variants::{Variant, candidates, choose};
use crate::ops::{
    Candidate, Choice, Kernel, MlaPrefill, MlaPrefillArgs, PrefillExtent, PrefillOptions, PrefillSequence,
    PrefillTiling,
};

/// A kernel, and the query rows of its tile.
#[derive(Debug, Clone)]
struct Body {
    name: String,
    rows: u32,
    /// Keys of a block that is copied by TMA; `None` where threads copy.
    keys: Option<u32>,
    threads: u32,
    shared_bytes: u32,
}

/// In dispatch order.
const VARIANTS: [Variant<Card, Request, Body>; 4] = [
    Variant::new("wgmma_m128", |card, (spec, _)| wgmma(card, spec))
        .rounding_weights()
        .on_tensor_cores()
        .costing(cost),
    Variant::new("mma_m128", |card, (spec, _)| on_tensor_cores(card, spec, "mma", 128))
        .rounding_weights()
        .on_tensor_cores()
        .costing(cost),
    Variant::new("mma_m64", |card, (spec, _)| on_tensor_cores(card, spec, "mma", 64))
        .rounding_weights()
        .on_tensor_cores()
        .costing(cost),
    Variant::new("simple", |_, (spec, _)| Ok(simple(spec))).costing(|_, _| u32::MAX),
];

/// The request: the spec, and the most query tokens of a sequence, 0 for any number.
type Request = (MlaPrefill, u32);

/// Query rows that the tiles of a sequence have.
fn cost(&(_, query_tokens): &Request, body: &Body) -> u32 {
    if query_tokens == 0 { 0 } else { query_tokens.div_ceil(body.rows).saturating_mul(body.rows) }
}

/// The kernel by wgmma.
///
/// # Errors
/// What is missing.
fn wgmma(card: &Card, spec: &MlaPrefill) -> Result<Body, String> {
    card.has_wgmma()?;
    let whole_lines = |dim: u32| dim.is_multiple_of(LINE_ELEMENTS);
    if ![spec.qk_nope_head_dim, spec.qk_rope_head_dim].into_iter().all(whole_lines) {
        return Err(
            "TMA copies whole lines (needs qk_nope_head_dim and qk_rope_head_dim in multiples of 64)".into(),
        );
    }
    on_tensor_cores(card, spec, "wgmma", 128)
}

/// The kernel for tiles of `rows` query rows on tensor cores, by these instructions.
///
/// # Errors
/// What is missing.
fn on_tensor_cores(card: &Card, spec: &MlaPrefill, by: &str, rows: u32) -> Result<Body, String> {
    let (dtype, dim, value) = (spec.dtype, spec.qk_nope_head_dim + spec.qk_rope_head_dim, spec.v_head_dim);
    let name = format!("mla_prefill_{by}_m{rows}_{dim}_{value}_{dtype}");
    let entry =
        ptx::named(&name).ok_or_else(|| format!("no kernel for head sizes {dim} and {value} in {dtype}"))?;
    card.has_shared(entry.shared_bytes)?;
    Ok(Body { name, rows, keys: entry.tokens, threads: entry.threads, shared_bytes: entry.shared_bytes })
}

/// The kernel without tensor cores: for 16-bit inputs with values of up to 128 columns, of up to 256, and for f32 inputs.
fn simple(spec: &MlaPrefill) -> Body {
    let (name, rows) = match (spec.dtype, spec.v_head_dim) {
        (Dtype::F32, _) => (SIMPLE[2], 32),
        (_, ..=128) => (SIMPLE[0], 64),
        _ => (SIMPLE[1], 32),
    };
    Body { name: name.to_owned(), rows, keys: None, threads: THREADS, shared_bytes: 0 }
}

const SIMPLE: [&str; 3] = ["mla_prefill_128", "mla_prefill_256", "mla_prefill_exact"];

kernel_args! {
    /// `Args` of prefill.cuh.
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
        section_heads: u32,
        v_scale: f32,
        reserved: u32,
        by_num_heads: Divisor,
    }
}

/// The kernel, and query rows of its tiles.
#[derive(Debug)]
pub struct Tiled {
    kernel: Function,
    rows: u32,
    keys: Option<u32>,
    threads: u32,
    shared_bytes: u32,
}

/// One layer's buffers, held.
#[derive(Debug)]
pub struct Layer {
    args: PrefillParams,
    /// `PrefillMaps` of mla_prefill_wgmma.cuh, or none.
    maps: Vec<TensorMap>,
    buffers: [Buffer; 7],
}

impl Kernel<MlaPrefill> for Cuda {
    type Kernels = Tiled;
    type Step = Table;
    type Binding = Layer;

    fn kernel_variants(&self, spec: &MlaPrefill) -> Vec<Candidate> {
        candidates(&VARIANTS, self.card(), &(*spec, 0))
    }

    fn kernel_compile(
        &self,
        spec: &MlaPrefill,
        options: &PrefillOptions,
    ) -> Result<(Tiled, PrefillTiling, Choice)> {
        let request = (*spec, options.query_tokens);
        let (body, choice) = choose(&VARIANTS, self.card(), &request, options.variant.as_deref())?;
        let Body { name, rows, keys, threads, shared_bytes } = body;
        let kernel = self.kernel(&name)?;
        kernel.allow_shared(self, shared_bytes)?;
        let target_groups = self.card().multiprocessors;
        let tiling = PrefillTiling { rows, target_groups, num_heads: spec.num_heads };
        Ok((Tiled { kernel, rows, keys, threads, shared_bytes }, tiling, choice))
    }

    fn kernel_step(&self, spec: &MlaPrefill, _: &Tiled, max_tiles: u32) -> Result<Table> {
        blocks(spec, max_tiles.into())?;
        Table::new(self, u64::from(max_tiles) * u64::from(TILE_WORDS), 0)
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
        let tiles = tiles(sequences, tiled.rows)?;
        blocks(spec, tiles.len() as u64)?;
        step.upload(self, tiles.len() as u32, tiles.iter().flat_map(PrefillTile::words))?;
        Ok(extent)
    }

    fn kernel_bind(
        &self,
        spec: &MlaPrefill,
        tiled: &Tiled,
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
            logit_scale: (f64::from(args.softmax_scale) * std::f64::consts::LOG2_E) as f32,
            max_tokens: room.tokens,
            max_keys: room.keys,
            max_rows: room.rows,
            num_heads: spec.num_heads,
            nope_quads: spec.qk_nope_head_dim / 4,
            quads: (spec.qk_nope_head_dim + spec.qk_rope_head_dim) / 4,
            value_quads: spec.v_head_dim / 4,
            dtype: code(spec.dtype),
            out_dtype: code(spec.out),
            section_heads: section_heads(spec, room.keys, self.card().l2_bytes),
            v_scale: args.v_scale,
            by_num_heads: Divisor::new(spec.num_heads),
            ..PrefillParams::default()
        };
        let [a, b, c, d, e] = read.map(|view| view.buffer.clone());
        let buffers = [a, b, c, d, e, args.out.buffer.clone(), args.lse.buffer.clone()];
        let maps = match tiled.keys {
            Some(keys) => {
                self.make_current("to describe an array by a tensor map")?;
                maps(spec, &bound, room, [tiled.rows, keys])?
            }
            None => Vec::new(),
        };
        Ok(Layer { args: bound, maps, buffers })
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
        // bounds: mla_prefill
        let args = PrefillParams { table, max_tiles, ..layer.args };
        self.launch_with_maps(
            &tiled.kernel,
            max_tiles * spec.num_heads,
            tiled.threads,
            tiled.shared_bytes,
            &args,
            &layer.maps,
            layer.buffers.iter().chain(step.buffer()),
        )
    }
}

/// Heads whose keys and values take half of the L2 together, so that the tiles that run side by side find them there.
fn section_heads(spec: &MlaPrefill, keys: u32, l2_bytes: u32) -> u32 {
    let MlaPrefill { qk_nope_head_dim, qk_rope_head_dim, v_head_dim, .. } = *spec;
    let key_bytes = u64::from(qk_nope_head_dim + qk_rope_head_dim + v_head_dim) * spec.dtype.bytes() as u64;
    let heads = u64::from(l2_bytes / 2) / (u64::from(keys) * key_bytes).max(1);
    heads.clamp(1, spec.num_heads.into()) as u32
}

/// `PrefillMaps` of mla_prefill_wgmma.cuh, for boxes of so many query rows and keys.
fn maps(
    spec: &MlaPrefill,
    args: &PrefillParams,
    room: PrefillExtent,
    [rows, keys]: [u32; 2],
) -> Result<Vec<TensorMap>> {
    let MlaPrefill { num_heads, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, .. } = *spec;
    let queries = |array: &Array, dim| array.map([room.tokens, num_heads, dim], [rows, dim / LINE_ELEMENTS]);
    let of_keys = |array: &Array, dim| array.map([room.keys, num_heads, dim], [keys, dim / LINE_ELEMENTS]);
    Ok(vec![
        queries(&args.q_nope, qk_nope_head_dim)?,
        queries(&args.q_pe, qk_rope_head_dim)?,
        of_keys(&args.k_nope, qk_nope_head_dim)?,
        of_keys(&args.k_pe, qk_rope_head_dim)?,
        of_keys(&args.v, v_head_dim)?,
    ])
}

fn blocks(spec: &MlaPrefill, tiles: u64) -> Result<u32> {
    let blocks = tiles.saturating_mul(spec.num_heads.into());
    checked_items("blocks of a prefill", blocks, "attend fewer query tokens a step")
}

/// The entries, for the check that the manifest has them.
#[cfg(test)]
pub(super) fn entries() -> Vec<String> {
    let dims = [(192, 128), (128, 128), (256, 256), (96, 64)];
    let tiles = [("wgmma_m128", &dims[..3]), ("mma_m128", &dims[..2]), ("mma_m64", &dims)];
    let on_tensor_cores = tiles.into_iter().flat_map(|(tile, dims)| {
        let name = move |dtype, (dim, value)| format!("mla_prefill_{tile}_{dim}_{value}_{dtype}");
        dims.iter().flat_map(move |&dims| [Dtype::F16, Dtype::Bf16].map(|dtype| name(dtype, dims)))
    });
    SIMPLE.map(str::to_owned).into_iter().chain(on_tensor_cores).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The head sizes of released models run on tensor cores on each card, unless inputs are f32.
    #[test]
    fn models_run_on_tensor_cores() {
        let h200 = Card::H200;
        let rtx_5090 = Card::RTX_5090;
        let a100 = Card::A100;
        // DeepSeek and Kimi; GLM; Mistral Small 4; MiniCPM3; and two that are of no model.
        let models = [
            ([128, 64, 128], "wgmma_m128", "mma_m128"),
            ([192, 64, 256], "wgmma_m128", "mma_m64"),
            ([64, 64, 128], "wgmma_m128", "mma_m128"),
            ([64, 32, 64], "mma_m64", "mma_m64"),
            // Rows that are no whole lines.
            ([160, 32, 128], "mma_m128", "mma_m128"),
            ([24, 0, 72], "simple", "simple"),
        ];
        for ([nope, rope, value], on_h200, elsewhere) in models {
            for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
                let (qk_nope_head_dim, qk_rope_head_dim, v_head_dim) = (nope, rope, value);
                let spec = MlaPrefill {
                    num_heads: 16,
                    qk_nope_head_dim,
                    qk_rope_head_dim,
                    v_head_dim,
                    dtype,
                    out: dtype,
                };
                for (card, best) in [(h200, on_h200), (rtx_5090, elsewhere), (a100, elsewhere)] {
                    let chosen = |query_tokens| {
                        choose(&VARIANTS, &card, &(spec, query_tokens), None)
                            .expect("one runs everywhere")
                            .1
                            .variant
                    };
                    assert_eq!(
                        chosen(0),
                        if dtype == Dtype::F32 { "simple" } else { best },
                        "{card:?} {spec:?}"
                    );
                    if best != "simple" && dtype != Dtype::F32 {
                        assert_eq!((chosen(64), chosen(1000)), ("mma_m64", best), "{card:?} {spec:?}");
                    }
                }
            }
        }
    }
}
