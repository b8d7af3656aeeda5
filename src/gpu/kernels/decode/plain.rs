//! The variants `subgroup` and `shared`, without tensor cores: the tile of a workgroup, and the WGSL. Pure.

use super::{
    QUERY, READ, Sum, cache_decoders, compose_module, dtypes, is_all_f32, shape_consts, sinks, tokens,
};
use crate::base::dtype::Dtype;
use crate::gpu::caps::{Caps, DeviceKind};
use crate::gpu::kernels::compose::{Const, Source};
use crate::gpu::kernels::formats::{CacheFormat, Format};
use crate::gpu::kernels::where_all_f32;
use crate::ops::{DecodeRequest, Features};
use crate::plan::Tiling;

/// Lanes that share a score: a subgroup must have as many.
pub(in crate::gpu::kernels) const LANES: u32 = 8;

/// The tile of a workgroup and its division among threads: see the head of `shaders/mla_decode.wgsl`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::gpu::kernels) struct Tile {
    /// Threads of a row group, the threads that share query rows, each with 8 output columns.
    pub(in crate::gpu::kernels) group_threads: u32,
    pub(in crate::gpu::kernels) rows_per_group: u32,
    pub(in crate::gpu::kernels) row_groups: u32,
}

impl Tile {
    /// The tile that wastes the least over a sequence's query rows, of those that fit the device: all 20 rows for 20, 16 for
    /// 16 or 128, 6 for 6. `None` where even a tile of 4 rows does not fit.
    pub(in crate::gpu::kernels) fn balanced(
        sum: Sum,
        caps: &Caps,
        &DecodeRequest { ref spec, query_rows, features }: &DecodeRequest,
    ) -> Option<Self> {
        let group_threads = spec.shape.kv_lora_rank / 8;
        let (most_rows, most_threads) = Self::most_rows_and_threads(caps, is_all_f32(spec));
        let most_groups = if caps.subgroups_vary_to_32() { 8 } else { 4 };
        // Rows computed, twice: once as arithmetic, which row groups without rows are spared, and once as time, which they
        // are not. Each tile reads the cache once more, which is worth about three rows.
        let cost = |tile: &Self| {
            let tiles = query_rows.div_ceil(tile.rows());
            query_rows.next_multiple_of(tile.rows_per_group) + tiles * (tile.rows() + 2 * 3)
        };
        (1..=most_groups)
            .flat_map(|row_groups| (1..=most_rows).map(move |rows_per_group| (rows_per_group, row_groups)))
            .map(|(rows_per_group, row_groups)| Self { group_threads, rows_per_group, row_groups })
            .filter(|tile| tile.workgroup_bytes(sum, features) <= caps.workgroup_memory_bytes)
            .filter(|tile| tile.threads() <= caps.max_invocations.min(most_threads))
            .min_by_key(|tile| (cost(tile), tile.row_groups))
    }

    /// The planner's targets. `Options::tiling` replaces these, for a card whose best was measured.
    pub(in crate::gpu::kernels) fn tiling(&self, caps: &Caps) -> Tiling {
        let (target_items, min_split_tokens, item_overhead_tokens) = match caps.kind {
            // About two workgroups of 256 threads on each of an H200's 132 multiprocessors, one full wave, were measured to be best. The
            // overhead of an item is estimated: that of the CUDA backend there, in tokens that take ten times as long.
            DeviceKind::Discrete => (65_536 / self.threads(), 32, 12),
            // Not measured: by its compiler an M1 holds 24 workgroups of 128 threads, so these are five waves.
            DeviceKind::Integrated | DeviceKind::Other => (128, 256, 0),
            // Enough for the threads of a CPU; a longer split costs nothing there.
            DeviceKind::Software => (8, 512, 0),
        };
        Tiling {
            rows_per_tile: self.rows(),
            tokens_per_block: self.tokens(),
            target_items,
            min_split_tokens,
            single_sequence_items: 0,
            item_overhead_tokens,
        }
    }

    /// The most query rows of a thread and threads of a workgroup for a kind of device, by the registers that the compilers of AMD, Apple
    /// M1 and Adreno report. With 5 rows the M1 spills, and with 4 it keeps 384 to 512 threads on a core: three workgroups of 128, where
    /// one of 256 would leave it idle at every barrier. RDNA2 and Vega hold 5 rows in 128. Intel's spills with 4, and reckons as many
    /// cycles a row with 2 as with 4 (`benches/results/vendors.md`).
    const fn most_rows_and_threads(caps: &Caps, all_f32: bool) -> (u32, u32) {
        match caps.kind {
            _ if caps.subgroups_vary_to_32() => (2, 256),
            DeviceKind::Discrete | DeviceKind::Software => (5, 256),
            // The sums of a row have levels there, which take as many registers once more: with 3 rows the M1 spills.
            DeviceKind::Integrated | DeviceKind::Other if all_f32 => (2, 256),
            DeviceKind::Integrated | DeviceKind::Other => (4, 192),
        }
    }

    pub(in crate::gpu::kernels) const fn threads(&self) -> u32 {
        self.group_threads * self.row_groups
    }

    pub(in crate::gpu::kernels) const fn rows(&self) -> u32 {
        self.rows_per_group * self.row_groups
    }

    /// Quads of tokens in a block.
    const fn token_quads(&self) -> u32 {
        self.group_threads / LANES
    }

    pub(in crate::gpu::kernels) const fn tokens(&self) -> u32 {
        4 * self.token_quads()
    }

    const fn tile_quads(&self) -> u32 {
        self.rows() * self.token_quads()
    }

    pub(in crate::gpu::kernels) const fn workgroup_bytes(&self, sum: Sum, features: Features) -> u32 {
        let partials = match sum {
            Sum::Subgroup => 1,
            Sum::Shared => LANES,
        };
        let quads = self.tile_quads() * 16 * (partials + 1);
        quads
            + 2 * self.tokens() * 4
            + 4 * self.tile_quads().next_multiple_of(4)
            + 12 * self.rows().next_multiple_of(4)
            + 16
            + if features.contains(Features::INDICES) { 2 * self.tokens() * 4 } else { 0 }
    }
}

/// Blocks whose sums are added up before they go to totals in memory, where all is f32: about the square root of the blocks of 400,000
/// tokens, as an error grows by the additions of each level.
const TOTAL_BLOCKS: u32 = 128;

/// Parts in which a dot product takes an oct (8 consecutive elements), by registers, as [`Tile::most_rows_and_threads`].
///
/// Whole keys of f32, four at a time, just fit the registers of an Apple M1 next to its 4 rows, and spill where wgpu's run-time
/// checks are asked for. Keys of f16 and e4m3 are unpacked as they are multiplied: halves of them take more registers, not less. So do
/// halves of f32 on RDNA2 and Vega, whose 5 rows then no longer fit in 128.
const fn dot_parts(kind: DeviceKind, query: Dtype, cache: Dtype) -> u32 {
    match (kind, query, cache) {
        (DeviceKind::Discrete, ..) => 1,
        (_, _, Dtype::F32) | (_, Dtype::F32, Dtype::Bf16) => 2,
        _ => 1,
    }
}

/// The split kernel.
pub(in crate::gpu::kernels) fn decode(
    name: &str,
    sum: Sum,
    tile: &Tile,
    caps: &Caps,
    &DecodeRequest { ref spec, features, .. }: &DecodeRequest,
) -> Source {
    let sum = match sum {
        Sum::Subgroup => include_str!("../../../../shaders/lib/sum_subgroup.wgsl"),
        Sum::Shared => include_str!("../../../../shaders/lib/sum_shared.wgsl"),
    };
    let parts = dot_parts(caps.kind, spec.query, spec.kv.dtype());
    let dot = match parts {
        1 => include_str!("../../../../shaders/lib/dot_whole.wgsl"),
        _ => include_str!("../../../../shaders/lib/dot_halves.wgsl"),
    };
    let mut consts = shape_consts(spec);
    consts.extend([
        ("LANES", LANES),
        ("PARTS", parts),
        ("ROPE_STEPS", (spec.shape.qk_rope_head_dim / 8).div_ceil(LANES)),
        ("THREADS", tile.threads()),
        ("ROWS_PER_GROUP", tile.rows_per_group),
        ("ROWS", tile.rows()),
        ("ROWS_PADDED", tile.rows().next_multiple_of(4)),
        ("TOKEN_QUADS", tile.token_quads()),
        ("TOKENS", tile.tokens()),
        ("TOKEN_PLACES", 2 * tile.tokens()),
        ("TILE_QUADS", tile.tile_quads()),
        ("TILE_TOKENS", 4 * tile.tile_quads()),
        ("TILE_QUADS_PADDED", tile.tile_quads().next_multiple_of(4)),
        ("SCORE_PARTIALS", tile.tile_quads() * LANES),
    ]);
    if features.contains(Features::INDICES) {
        consts.push(("NOTED_TOKENS", 2 * tile.tokens()));
    }
    let (kv, cache) = (spec.kv.dtype(), CacheFormat::of(spec.kv.layout));
    // Records have theirs in the scales.
    let kv_scale = if cache.has_scales { "1.0" } else { Format::of(kv).scale };
    let decoders = format!(
        "fn decode_query(oct: QueryOct) -> mat2x4<f32> {{\n    return decode_{}(oct);\n}}\n\n\
         fn decode_kv(oct: KvOct) -> mat2x4<f32> {{\n    return decode_{kv}(oct);\n}}\n\n\
         fn decode_value(oct: KvOct) -> mat2x4<f32> {{\n    return decode_{}(oct);\n}}\n\n\
         const QUERY_SCALE = {};\nconst KV_SCALE = {};\n",
        spec.query,
        Format::of(kv).finite,
        Format::of(spec.query).scale,
        kv_scale
    );
    let mut files = vec![decoders.as_str(), Format::of(spec.query).decoder(caps.f16_subnormals)];
    files.extend(cache_decoders(caps, spec));
    let all_f32 = is_all_f32(spec);
    if all_f32 {
        consts.push(("TOTAL_TOKENS", TOTAL_BLOCKS * tile.tokens()));
        files.push(include_str!("../../../../shaders/lib/totals.wgsl"));
    }
    let text = where_all_f32(include_str!("../../../../shaders/mla_decode.wgsl"), all_f32);
    let tokens = tokens(caps, features, false);
    files.extend([READ, cache.elements, QUERY, &tokens, sinks(features), sum, dot, &text]);
    let types = [("KvOct", Const::Alias(Format::of(kv).oct_type))];
    compose_module("mla_decode", &format!("{name}.{}", dtypes(spec)), spec, &consts, &types, &files)
}
