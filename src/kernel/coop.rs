//! The rows on cooperative matrices: how a workgroup cuts a tile, and the WGSL text. Pure.

use super::{compose_step, dtypes, shape_consts};
use crate::caps::{Caps, DeviceKind};
use crate::compose::{Const, Source};
use crate::{Dtype, MlaSpec, Tiling};

/// Lanes that share a row in the softmax: a subgroup must have as many.
const SOFTMAX_LANES: u32 = 8;

/// How a workgroup cuts a tile: see the head of `shaders/mla_decode_coop.wgsl`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CoopTile {
    /// Side of a matrix.
    tile: u32,
    /// Lanes of a subgroup.
    subgroup: u32,
    subgroups: u32,
    /// Rows of matrices.
    row_tiles: u32,
    /// Matrices of tokens in a block.
    token_tiles: u32,
    /// Staged blocks.
    buffers: u32,
}

impl CoopTile {
    pub(super) fn for_device(buffers: u32, caps: &Caps, spec: &MlaSpec) -> Option<Self> {
        let env = |name: &str, or: u32| std::env::var(name).ok().and_then(|x| x.parse().ok()).unwrap_or(or);
        let tile = caps.cooperative_tile;
        if tile == 0 || caps.max_subgroup_size == 0 {
            return None;
        }
        let rows = env("X_ROWS", if spec.shape.num_heads > 16 { 32 } else { 16 });
        let t = Self {
            tile,
            subgroup: caps.max_subgroup_size,
            subgroups: env("X_SUB", if rows > 16 { 8 } else { 4 }),
            row_tiles: rows / tile,
            token_tiles: env("X_TOK", 16) / tile,
            buffers: env("X_BUF", buffers),
        };
        (t.workgroup_bytes(spec) <= caps.workgroup_memory_bytes).then_some(t)
    }

    /// The planner's targets.
    pub(super) fn tiling(&self, caps: &Caps) -> Tiling {
        let (target_items, min_split_tokens) = match caps.kind {
            DeviceKind::Software => (8, 512),
            _ => (396, 32),
        };
        let (rows_per_tile, tokens_per_block) = (self.rows(), self.tokens());
        Tiling { rows_per_tile, tokens_per_block, target_items, min_split_tokens }
    }

    pub(super) const fn threads(&self) -> u32 {
        self.subgroup * self.subgroups
    }

    pub(super) const fn rows(&self) -> u32 {
        self.tile * self.row_tiles
    }

    pub(super) const fn tokens(&self) -> u32 {
        self.tile * self.token_tiles
    }

    /// Tiles of the latent's columns that a subgroup owns.
    const fn latent_tiles(&self, spec: &MlaSpec) -> u32 {
        spec.shape.kv_lora_rank / self.tile / self.subgroups
    }

    /// Tiles of the rotary columns that a subgroup multiplies; the last subgroups' may lie in the padding.
    const fn rope_tiles(&self, spec: &MlaSpec) -> u32 {
        (spec.shape.qk_rope_head_dim / self.tile).div_ceil(self.subgroups)
    }

    /// Octs of a staged row that are multiplied.
    const fn key_octs(&self, spec: &MlaSpec) -> u32 {
        (spec.shape.kv_lora_rank + self.rope_tiles(spec) * self.subgroups * self.tile) / 8
    }

    /// Octs from one staged row to the next: odd, so that the rows of a matrix lie in different banks.
    const fn key_pitch(&self, spec: &MlaSpec) -> u32 {
        self.key_octs(spec) | 1
    }

    /// Floats from one row of scores to the next.
    const fn score_pitch(&self) -> u32 {
        self.tokens() + 8
    }

    const fn weight_pitch(&self) -> u32 {
        self.tokens() + 8
    }

    pub(super) const fn workgroup_bytes(&self, spec: &MlaSpec) -> u32 {
        let keys = self.buffers * self.tokens() * self.key_pitch(spec) * 16;
        let scores = self.subgroups * self.rows() * self.score_pitch() * 4;
        let weights = self.rows() * self.weight_pitch() * 2;
        keys + scores + weights + self.rows() * 4 + self.tokens() * 4 + 16
    }
}

/// Parts that a query is split into so that f16 holds it.
const fn query_parts(query: Dtype) -> u32 {
    match query {
        Dtype::F32 => 2,
        Dtype::F16 | Dtype::Bf16 | Dtype::E4m3 => 1,
    }
}

pub(super) fn consts(tile: &CoopTile, spec: &MlaSpec) -> Vec<(&'static str, u32)> {
    let (threads, rows, tokens) = (tile.threads(), tile.rows(), tile.tokens());
    let latent_octs = spec.shape.kv_lora_rank / 8;
    let rope_octs = spec.shape.qk_rope_head_dim / 8;
    let rope_loads = (tokens * rope_octs).div_ceil(threads);
    let key_tiles = tile.latent_tiles(spec) + tile.rope_tiles(spec);
    let parts = query_parts(spec.query);
    vec![
        ("TILE", tile.tile),
        ("TILE_QUADS", tile.tile / 4),
        ("SUBGROUP", tile.subgroup),
        ("SUBGROUPS", tile.subgroups),
        ("THREADS", threads),
        ("ROW_TILES", tile.row_tiles),
        ("ROWS", rows),
        ("TOKEN_TILES", tile.token_tiles),
        ("TOKENS", tokens),
        ("BUFFERS", tile.buffers),
        ("LATENT_TILES", tile.latent_tiles(spec)),
        ("ROPE_TILES", tile.rope_tiles(spec)),
        ("KEY_TILES", key_tiles),
        ("QUERY_PARTS", parts),
        ("QUERY_TILES", parts * tile.row_tiles * key_tiles),
        ("ACC_TILES", tile.row_tiles * tile.latent_tiles(spec)),
        ("KEY_PITCH", tile.key_pitch(spec)),
        ("KEY_QUADS", tile.buffers * tokens * tile.key_pitch(spec) * 2),
        ("PAD_OCTS", tile.key_octs(spec) - latent_octs - rope_octs),
        ("SCORE_PITCH", tile.score_pitch()),
        ("SCORES", tile.subgroups * rows * tile.score_pitch()),
        ("WEIGHT_PITCH", tile.weight_pitch()),
        ("WEIGHTS", rows * tile.weight_pitch()),
        ("SOFTMAX_LANES", SOFTMAX_LANES),
        ("SOFTMAX_STRIDE", threads / SOFTMAX_LANES),
        ("SOFTMAX_ROWS", rows * SOFTMAX_LANES / threads),
        ("SOFTMAX_TOKENS", tokens / SOFTMAX_LANES),
        ("LATENT_LOADS", tokens * latent_octs / threads),
        ("ROPE_LOADS", rope_loads),
        ("ROPE_LOADS_PADDED", rope_loads.max(1)),
    ]
}

/// The matrices' types.
pub(super) fn aliases(tile: &CoopTile) -> [(&'static str, Const); 3] {
    let types = if tile.tile == 8 {
        ["coop_mat8x8<f16, A>", "coop_mat8x8<f16, B>", "coop_mat8x8<f32, C>"]
    } else {
        ["coop_mat16x16<f16, A>", "coop_mat16x16<f16, B>", "coop_mat16x16<f32, C>"]
    };
    [
        ("MatrixA", Const::Alias(types[0])),
        ("MatrixB", Const::Alias(types[1])),
        ("MatrixC", Const::Alias(types[2])),
    ]
}

/// How keys become f16; `None` for a dtype that f16 cannot hold.
pub(super) fn key_file(dtype: Dtype) -> Option<&'static str> {
    match dtype {
        Dtype::F16 => Some(include_str!("../../shaders/lib/key_f16.wgsl")),
        Dtype::Bf16 => Some(include_str!("../../shaders/lib/key_bf16.wgsl")),
        Dtype::E4m3 => Some(include_str!("../../shaders/lib/key_e4m3.wgsl")),
        Dtype::F32 => None,
    }
}

/// What the module begins with. Matrices under an `if` need the diagnostic off; each such condition is the same for a
/// whole workgroup.
const DIRECTIVES: &str =
    "enable f16;\nenable wgpu_cooperative_matrix;\ndiagnostic(off, derivative_uniformity);\n";

/// The split kernel.
pub(super) fn decode(name: &str, buffers: u32, caps: &Caps, spec: &MlaSpec) -> Option<Source> {
    let tile = CoopTile::for_device(buffers, caps, spec)?;
    let mut all = shape_consts(spec);
    all.extend(consts(&tile, spec));
    let files = [key_file(spec.kv.dtype)?, include_str!("../../shaders/mla_decode_coop.wgsl")];
    let source =
        compose_step("mla_decode", &format!("{name}.{}", dtypes(spec)), spec, &all, &aliases(&tile), &files);
    Some(Source { text: format!("{DIRECTIVES}{}", source.text), ..source })
}

/// What keeps these rows from running.
pub(super) fn runs_on(buffers: u32, caps: &Caps, spec: &MlaSpec) -> std::result::Result<(), String> {
    if caps.cooperative_tile == 0 {
        return Err("no cooperative matrices f16 x f16 + f32 of 16x16 or 8x8".into());
    }
    if !caps.shader_f16 {
        return Err("the device was made without Features::SHADER_F16".into());
    }
    if caps.min_subgroup_size != caps.max_subgroup_size {
        let (min, max) = (caps.min_subgroup_size, caps.max_subgroup_size);
        return Err(format!("subgroups vary from {min} to {max} lanes, and lanes own columns here"));
    }
    if key_file(spec.kv.dtype).is_none() {
        return Err("an f32 cache does not fit f16 matrices".into());
    }
    match CoopTile::for_device(buffers, caps, spec) {
        Some(_) => Ok(()),
        None => Err(format!("no tile fits {} bytes of workgroup memory", caps.workgroup_memory_bytes)),
    }
}
