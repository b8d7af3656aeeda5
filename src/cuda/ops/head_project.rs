//! `head_project`: a batched GEMM, each head's rows times its matrix.

use std::ops::Range;

use super::array::Array;
use super::codes::CodeScale;
use super::guard::Guard;
use super::single::kernel_args;
use super::table::Table;
use super::{Divisor, THREADS, checked_items, code, stride};
use crate::base::dtype::Dtype;
use crate::base::error::Result;
use crate::base::view::{View, check_tokens};
use crate::cuda::caps::Card;
use crate::cuda::formats::weight_code;
use crate::cuda::kernels::{LINE_ELEMENTS, TensorMap, ptx};
use crate::cuda::{Buffer, Cuda, Function};
use crate::ops::guard::GuardBounds;
use crate::ops::variants::{Variant, candidates, choose};
use crate::ops::{
    Candidate, Choice, HeadProject, HeadProjectArgs, Kernel, OpOptions, WeightFormat, WeightOrder,
};

/// A kernel, and the tile of its blocks.
#[derive(Debug, Clone)]
struct Tile {
    name: String,
    tokens: u32,
    columns: u32,
    threads: u32,
    /// All shared memory; `stage_bytes` is that of a stage, which holds 64 elements of `k`, and `wide_bytes` what is beside the stages.
    shared_bytes: u32,
    stage_bytes: u32,
    wide_bytes: u32,
    /// The tile is chosen for more than `few_tokens` tokens, if that gives at least `least_blocks` blocks.
    few_tokens: u32,
    least_blocks: u32,
    /// Rows and lines of 64 elements of its TMA boxes of `x`, and of those of weights; `None` where threads copy.
    boxes: Option<[[u32; 2]; 2]>,
    /// Whether blocks fetch their weights while the kernel before drains: it pays where latency binds, so for few.
    prefetches: bool,
}

/// In dispatch order. `mma` and `simple` have several tiles, of which each launch takes one by [`Tiles::of`]: smallest first.
const VARIANTS: [Variant<Card, HeadProject, Vec<Tile>>; 7] = [
    Variant::new("mma", |card, spec| {
        let mut tiles = on_tensor_cores(card, spec, &TILES)?;
        tiles.extend(wgmma(card, spec));
        Ok(tiles)
    })
    .on_tensor_cores(),
    Variant::new("mma_m16n32", |card, spec| on_tensor_cores(card, spec, &TILES[..1]))
        .on_tensor_cores()
        .not_by_default(forced_only),
    Variant::new("mma_m64n32", |card, spec| on_tensor_cores(card, spec, &TILES[1..2]))
        .on_tensor_cores()
        .not_by_default(forced_only),
    Variant::new("mma_m64n64", |card, spec| on_tensor_cores(card, spec, &TILES[2..3]))
        .on_tensor_cores()
        .not_by_default(forced_only),
    Variant::new("mma_m128n128", |card, spec| on_tensor_cores(card, spec, &TILES[3..]))
        .on_tensor_cores()
        .not_by_default(forced_only),
    Variant::new("wgmma", |card, spec| wgmma(card, spec).map(|tile| vec![tile]))
        .on_tensor_cores()
        .not_by_default(forced_only),
    Variant::new("simple", |_, _| Ok(simple())),
];

/// Tokens and columns of the tiles of head_project_mma.cuh, smallest first.
const TILES: [[u32; 2]; 4] = [[16, 32], [64, 32], [64, 64], [128, 128]];
/// `WIDES` of head_project_mma.cuh.
const fn wides([tokens, _]: [u32; 2]) -> u32 {
    if tokens == 128 { 1 } else { 2 }
}

/// The longest sum on tensor cores, which cut partial sums where f32 arithmetic rounds them.
const MOST_K: u32 = 2048;
/// `DEPTH` of head_project_mma.cuh.
const DEPTH: u32 = 64;
const CURE: &str = "project in several steps, and bind a part of the tokens for each";

fn forced_only(_: &Card, _: &HeadProject) -> Result<(), String> {
    Err("mma chooses among the tiles".into())
}

/// The kernels on tensor cores with these tiles.
///
/// # Errors
/// What is missing.
fn on_tensor_cores(card: &Card, spec: &HeadProject, tiles: &[[u32; 2]]) -> Result<Vec<Tile>, String> {
    tiles.iter().map(|&tile| on_tensor_cores_by(card, spec, "mma", tile)).collect()
}

/// The kernel by these instructions with this tile.
///
/// # Errors
/// What is missing.
fn on_tensor_cores_by(
    card: &Card,
    spec: &HeadProject,
    by: &str,
    [tokens, columns]: [u32; 2],
) -> Result<Tile, String> {
    let HeadProject { input, weight, k, .. } = *spec;
    let has_codes = weight == WeightFormat::Elements(Dtype::E4m3);
    if !(has_codes || weight == input.into()) || !matches!(input, Dtype::F16 | Dtype::Bf16) {
        return Err(format!("{input} x and {weight} weights are not of one 16-bit dtype, nor weights e4m3"));
    }
    if k > MOST_K {
        return Err(format!("k is {k}, past the {MOST_K} that tensor cores sum accurately"));
    }
    let order = if spec.order == WeightOrder::Kn { "kn" } else { "nk" };
    let matrices_bytes = weight.bytes_of(u64::from(spec.num_heads) * u64::from(k) * u64::from(spec.n));
    let of_codes = if has_codes { "_e4m3" } else { "" };
    let name = format!("head_project_{by}_m{tokens}n{columns}_{order}_{input}{of_codes}");
    let entry = ptx::named(&name).ok_or_else(|| format!("no kernel {name}"))?;
    card.has_shared(entry.shared_bytes)?;
    let weight_bytes = columns * DEPTH * 2;
    Ok(Tile {
        name,
        tokens,
        columns,
        threads: entry.threads,
        shared_bytes: entry.shared_bytes,
        stage_bytes: tokens * DEPTH * 2 + if has_codes { weight_bytes / 2 } else { weight_bytes },
        wide_bytes: if has_codes { wides([tokens, columns]) * weight_bytes } else { 0 },
        few_tokens: if columns == 32 { 0 } else { tokens / 2 },
        // Nearly two blocks for each multiprocessor. With the next smaller tile fewer blocks are enough: the next kernel begins beside
        // them.
        least_blocks: if columns == 32 { card.multiprocessors / 3 } else { card.multiprocessors * 15 / 8 },
        boxes: None,
        prefetches: matrices_bytes <= u64::from(card.l2_bytes) / 8,
    })
}

/// The kernel by wgmma.
///
/// # Errors
/// What is missing.
fn wgmma(card: &Card, spec: &HeadProject) -> Result<Tile, String> {
    card.has_wgmma()?;
    if spec.weight.has_scales() {
        return Err(
            "wgmma reads 16-bit weights from shared memory, and e4m3 codes are widened in registers".into()
        );
    }
    if ![spec.k, spec.n].into_iter().all(|dim| dim.is_multiple_of(LINE_ELEMENTS)) {
        return Err("TMA copies whole lines (needs k and n in multiples of 64)".into());
    }
    let is_kn = spec.order == WeightOrder::Kn;
    let tile = if is_kn { WGMMA[0] } else { WGMMA[1] };
    let mut tile = on_tensor_cores_by(card, spec, "wgmma", tile)?;
    let of_weights = if is_kn { [DEPTH, tile.columns / LINE_ELEMENTS] } else { [tile.columns, 1] };
    tile.boxes = Some([[tile.tokens, 1], of_weights]);
    Ok(tile)
}

/// Tokens and columns of the tiles of head_project_wgmma.cuh, by weight order.
const WGMMA: [[u32; 2]; 2] = [[128, 256], [256, 128]];

/// The kernels without tensor cores.
fn simple() -> Vec<Tile> {
    let tile = |name: &str, tokens, few_tokens| Tile {
        name: name.to_owned(),
        tokens,
        columns: 64,
        threads: THREADS,
        shared_bytes: 0,
        stage_bytes: 0,
        wide_bytes: 0,
        few_tokens,
        least_blocks: 0,
        boxes: None,
        prefetches: false,
    };
    vec![tile(SIMPLE[0], 16, 0), tile(SIMPLE[1], 64, 16)]
}

const SIMPLE: [&str; 2] = ["head_project_few", "head_project_many"];

kernel_args! {
    /// `Args` of project.cuh.
    pub struct ProjectParams {
        x: Array,
        weight: Array,
        y: Array,
        table: u64,
        scales: u64,
        scale_stride: u64,
        max_tokens: u32,
        k_quads: u32,
        n_quads: u32,
        x_dtype: u32,
        weight_format: u32,
        y_dtype: u32,
        is_kn: u32,
        column_tiles: u32,
        token_tiles: u32,
        num_tiles: u32,
        prefetches: u32,
        scale: f32,
        limit: f32,
        reserved: u32,
        by_column_tiles: Divisor,
        by_token_tiles: Divisor,
        out_scale: CodeScale,
        guard: Guard,
    }
}

/// A kernel for each tile; all give the same bits.
#[derive(Debug)]
pub struct Tiles {
    kernels: Vec<(Tile, Function)>,
}

impl Tiles {
    /// The largest tile that there are enough tokens and blocks for, or the smallest; and its number of blocks.
    fn of(&self, spec: &HeadProject, tokens: u32) -> Result<(&Tile, &Function, u32)> {
        let suits = |(tile, _): &(Tile, Function)| tile.suits(spec, tokens);
        let (tile, kernel) = &self.kernels[self.kernels.iter().rposition(suits).unwrap_or(0)];
        Ok((tile, kernel, checked_items("blocks of a projection", tile.blocks(spec, tokens), CURE)?))
    }
}

impl Tile {
    fn blocks(&self, spec: &HeadProject, tokens: u32) -> u64 {
        let tiles = u64::from(spec.n.div_ceil(self.columns)) * u64::from(tokens.div_ceil(self.tokens));
        tiles.saturating_mul(spec.num_heads.into())
    }

    fn suits(&self, spec: &HeadProject, tokens: u32) -> bool {
        tokens > self.few_tokens && self.blocks(spec, tokens) >= self.least_blocks.into()
    }
}

/// One layer's buffers, held.
#[derive(Debug)]
pub struct Layer {
    args: ProjectParams,
    /// `ProjectMaps` of head_project_wgmma.cuh, if it is one of the tiles.
    maps: Vec<TensorMap>,
    buffers: Vec<Buffer>,
}

impl Kernel<HeadProject> for Cuda {
    type Kernels = Tiles;
    type Step = Table;
    type Binding = Layer;

    fn kernel_variants(&self, spec: &HeadProject) -> Vec<Candidate> {
        candidates(&VARIANTS, self.card(), spec)
    }

    fn kernel_compile(&self, spec: &HeadProject, options: &OpOptions) -> Result<(Tiles, (), Choice)> {
        let (tiles, choice) = choose(&VARIANTS, self.card(), spec, options.variant.as_deref())?;
        let load = |tile: Tile| {
            let kernel = self.kernel(&tile.name)?;
            kernel.allow_shared(self, tile.shared_bytes)?;
            Ok((tile, kernel))
        };
        let kernels = tiles.into_iter().map(load).collect::<Result<_>>()?;
        Ok((Tiles { kernels }, (), choice))
    }

    fn kernel_step(&self, _: &HeadProject, _: &Tiles, max_tokens: u32) -> Result<Table> {
        Table::new(self, 2, max_tokens)
    }

    fn kernel_capacity(step: &Table) -> u32 {
        step.most()
    }

    fn kernel_prepare(
        &self,
        _: &HeadProject,
        _: &Tiles,
        step: &mut Table,
        tokens: Range<u32>,
    ) -> Result<u32> {
        let (count, end) = check_tokens(&tokens)?;
        step.upload(self, count, [tokens.start])?;
        Ok(end)
    }

    fn kernel_bind(
        &self,
        spec: &HeadProject,
        tiles: &Tiles,
        args: &HeadProjectArgs<&Buffer>,
        max_tokens: u32,
    ) -> Result<Layer> {
        tiles.of(spec, max_tokens)?;
        let rows = [max_tokens, spec.num_heads];
        let [_, weight_rows, weight_columns] = spec.matrices();
        let scales = args.weight.scales.as_ref();
        let weight = View {
            buffer: args.weight.buffer,
            offset: args.weight.offset,
            token_stride: args.weight.row_stride,
            head_stride: args.weight.head_stride,
        };
        let bound = ProjectParams {
            x: Array::new(&args.x, spec.input.bytes(), rows),
            weight: Array::new(&weight, spec.weight.unit_bytes(), [weight_rows, spec.num_heads]),
            y: Array::new(&args.y, spec.output.bytes(), rows),
            // Bytes; an address of 0 says that there are none.
            scales: scales.map_or(0, |scales| scales.buffer.ptr().wrapping_add(scales.offset * 4)),
            scale_stride: scales.map_or(0, |scales| stride(spec.num_heads, scales.head_stride, 4)),
            max_tokens,
            k_quads: spec.k / 4,
            n_quads: spec.n / 4,
            x_dtype: code(spec.input),
            weight_format: weight_code(spec.weight),
            y_dtype: code(spec.output),
            is_kn: (spec.order == WeightOrder::Kn).into(),
            scale: args.scale,
            limit: args.limit(spec.output),
            out_scale: CodeScale::new(args.out_scale),
            guard: Guard::new(args.guard.as_ref(), GuardBounds::of(spec.output, args.out_scale)),
            ..ProjectParams::default()
        };
        let mut buffers = [args.x.buffer, args.weight.buffer, args.y.buffer].map(Buffer::clone).to_vec();
        buffers.extend(scales.map(|scales| scales.buffer.clone()));
        buffers.extend(args.guard.map(|guard| guard.counters.clone()));
        let boxes = tiles.kernels.iter().find_map(|(tile, _)| tile.boxes);
        let maps = match boxes {
            Some([of_x, of_weights]) => {
                self.make_current("to describe an array by a tensor map")?;
                vec![
                    bound.x.map([max_tokens, spec.num_heads, spec.k], of_x)?,
                    bound.weight.map([weight_rows, spec.num_heads, weight_columns], of_weights)?,
                ]
            }
            None => Vec::new(),
        };
        Ok(Layer { args: bound, maps, buffers })
    }

    /// The grid covers the smaller capacity of step and binding: a captured launch projects what the step's range holds at the replay.
    fn kernel_record(
        &self,
        spec: &HeadProject,
        tiles: &Tiles,
        (): &mut (),
        step: &Table,
        layer: &Layer,
    ) -> Result<()> {
        let max_tokens = step.most().min(layer.args.max_tokens);
        if max_tokens == 0 {
            return Ok(());
        }
        // bounds: head_project
        let (tile, kernel, blocks) = tiles.of(spec, max_tokens)?;
        let (column_tiles, token_tiles) = (spec.n.div_ceil(tile.columns), max_tokens.div_ceil(tile.tokens));
        let args = ProjectParams {
            table: step.address(),
            column_tiles,
            token_tiles,
            num_tiles: blocks,
            prefetches: tile.prefetches.into(),
            by_column_tiles: Divisor::new(column_tiles),
            by_token_tiles: Divisor::new(token_tiles),
            ..layer.args
        };
        let held = layer.buffers.iter().chain(step.buffer());
        if tile.boxes.is_some() {
            let blocks = blocks.min(self.card().multiprocessors);
            return self.launch_with_maps(
                kernel,
                blocks,
                tile.threads,
                tile.shared_bytes,
                &args,
                &layer.maps,
                held,
            );
        }
        let filled = tile.wide_bytes + spec.k.div_ceil(DEPTH) * tile.stage_bytes;
        let shared_bytes = tile.shared_bytes.min(filled);
        self.launch(kernel, blocks, tile.threads, shared_bytes, &args, held)
    }
}

/// The entries, for the check that the manifest has them.
#[cfg(test)]
pub(super) fn entries() -> Vec<String> {
    let on_tensor_cores = TILES.iter().flat_map(|[tokens, columns]| {
        let of_order = |order: &str| {
            ["f16", "bf16", "f16_e4m3", "bf16_e4m3"]
                .map(|of| format!("head_project_mma_m{tokens}n{columns}_{order}_{of}"))
        };
        ["kn", "nk"].map(of_order).concat()
    });
    let wgmma = ["f16", "bf16"].into_iter().flat_map(|dtype| {
        ["m128n256_kn", "m256n128_nk"].map(|tile| format!("head_project_wgmma_{tile}_{dtype}"))
    });
    SIMPLE.map(str::to_owned).into_iter().chain(on_tensor_cores).chain(wgmma).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::HeadDims;

    /// Tiles of absorb and of v_up on an H200: small where few blocks would leave multiprocessors idle.
    #[test]
    fn tiles_fill_the_card() {
        let bf16 = Dtype::Bf16;
        for (num_heads, tokens, absorb, v_up) in [
            (8, 64, [64, 32], [16, 32]),
            (16, 1, [64, 32], [64, 32]),
            (16, 64, [64, 32], [64, 32]),
            (16, 512, [128, 128], [64, 64]),
            (128, 1, [64, 32], [64, 32]),
            (128, 64, [64, 64], [64, 64]),
            (128, 512, [128, 256], [256, 128]),
        ] {
            let dims = HeadDims { num_heads, kv_lora_rank: 512, qk_nope_head_dim: 128, v_head_dim: 128 };
            for (spec, want) in [
                (HeadProject::absorb(&dims, bf16, bf16, bf16), absorb),
                (HeadProject::v_up(&dims, bf16, bf16, bf16), v_up),
            ] {
                let (tiles, choice) = choose(&VARIANTS, &Card::H200, &spec, None).expect("mma runs");
                let chosen = tiles.iter().rfind(|tile| tile.suits(&spec, tokens)).unwrap_or(&tiles[0]);
                assert_eq!(
                    (choice.variant, [chosen.tokens, chosen.columns]),
                    ("mma", want),
                    "{tokens} {spec:?}"
                );
            }
        }
    }

    /// Tensor cores take two arrays of one 16-bit dtype, or codes, and sums that are not too long.
    #[test]
    fn other_dtypes_and_long_sums_stay_exact() {
        let (f32s, f16, bf16) = (Dtype::F32, Dtype::F16, Dtype::Bf16);
        for ((input, weight), k, want) in [
            ((f16, f16.into()), 8, "mma"),
            ((bf16, bf16.into()), MOST_K, "mma"),
            ((bf16, bf16.into()), MOST_K + 8, "simple"),
            ((bf16, Dtype::E4m3.into()), 64, "mma"),
            ((f16, Dtype::E4m3.into()), MOST_K + 8, "simple"),
            ((f32s, Dtype::E4m3.into()), 64, "simple"),
            ((bf16, WeightFormat::Q8_0), 64, "simple"),
            ((f16, bf16.into()), 64, "simple"),
            ((f32s, bf16.into()), 64, "simple"),
            ((f32s, f32s.into()), 64, "simple"),
        ] {
            let order = WeightOrder::Kn;
            let spec =
                HeadProject { input, weight, output: f32s, num_heads: 1, k, n: 32, order, guard: false };
            let (_, choice) = choose(&VARIANTS, &Card::H200, &spec, None).expect("one runs");
            assert_eq!(choice.variant, want, "{spec:?}");
        }
    }
}
