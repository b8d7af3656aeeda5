//! The variants `coop` and `coop_small`, on cooperative matrices (tensor cores): the tile of a workgroup, and the WGSL. Pure.

use super::{QUERY, cache_decoders, compose_step, dtypes, shape_consts, sinks, tokens};
use crate::base::dtype::Dtype;
use crate::cache::Scales;
use crate::cache::decode_spec::MlaDecode;
use crate::gpu::caps::{Caps, DeviceKind};
use crate::gpu::kernels::compose::Source;
use crate::gpu::kernels::formats::{CacheFormat, Format};
use crate::gpu::kernels::{MATRIX_DIRECTIVES, matrix_aliases, where_marked};
use crate::ops::{DecodeRequest, Features};
use crate::plan::Tiling;

/// Whether 64 rows over records have the loads of two blocks in flight on discrete cards: 14 registers a lane and block.
const RECORDS_AHEAD: bool = false;

/// The tile of a workgroup and its division among subgroups: see the head of `shaders/mla_decode_coop.wgsl`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::gpu::kernels) struct CoopTile {
    /// Side of a cooperative matrix.
    tile: u32,
    /// Lanes of a subgroup.
    subgroup: u32,
    rows: u32,
    tokens: u32,
    /// How the scores are divided among subgroups: by columns of the dot product, tokens and query rows.
    key_split: u32,
    token_split: u32,
    row_split: u32,
    /// Floats of padding between two rows of scores, against bank conflicts.
    score_pad: u32,
    /// Groups of a record's columns, each with a scale; 0 for other caches.
    groups: u32,
}

impl CoopTile {
    /// The tile that costs least over a sequence's query rows, of those that fit the device; `None` where none does,
    /// however many rows there are.
    pub(in crate::gpu::kernels) fn for_device(
        small: bool,
        caps: &Caps,
        &DecodeRequest { ref spec, query_rows, features }: &DecodeRequest,
    ) -> Option<Self> {
        let (tile, subgroup) = (caps.cooperative_tile, caps.max_subgroup_size);
        let limit = caps.workgroup_memory_bytes;
        let least_bytes = if small { 0 } else { 48 << 10 };
        if tile == 0 || subgroup < 8 || limit < least_bytes {
            return None;
        }
        let low = Self {
            tile,
            subgroup,
            rows: 16,
            tokens: 16,
            key_split: 4,
            token_split: 1,
            row_split: 1,
            score_pad: 0,
            groups: groups(spec),
        };
        let (middle, high) = if low.groups == 0 {
            (
                Self { rows: 32, tokens: 32, key_split: 2, token_split: 2, row_split: 2, ..low },
                Self { rows: 64, key_split: 2, row_split: 4, score_pad: 4, ..low },
            )
        } else {
            // A share of a record's columns is whole groups.
            (Self { rows: 32, row_split: 2, ..low }, Self { rows: 64, key_split: 2, row_split: 4, ..low })
        };
        // Each tile stages the cache once more, which on an H200 costs as much as about 16 rows of arithmetic.
        let cost = |tile: &Self| query_rows.div_ceil(tile.rows) * (tile.rows + 16);
        let tiles = if small { vec![low] } else { vec![low, middle, high] };
        tiles
            .into_iter()
            .filter(|tile| tile.workgroup_bytes(spec, features) <= limit)
            .filter(|tile| tile.threads() <= caps.max_invocations)
            .min_by_key(cost)
    }

    /// The planner's targets.
    pub(in crate::gpu::kernels) fn tiling(&self, caps: &Caps) -> Tiling {
        let (target_items, min_split_tokens, item_overhead_tokens) = match caps.kind {
            DeviceKind::Software => (8, 512, 0),
            // One workgroup for each of an H200's 132 multiprocessors, where the driver grants all workgroups of a multiprocessor about 48
            // KiB together; two where they need little enough. The overhead of an item is that of the CUDA backend there.
            _ if self.rows == 16 => (264, 32, 64),
            _ => (132, 32, 128),
        };
        Tiling {
            rows_per_tile: self.rows,
            tokens_per_block: self.tokens,
            target_items,
            min_split_tokens,
            single_sequence_items: 0,
            item_overhead_tokens,
        }
    }

    const fn subgroups(&self) -> u32 {
        self.key_split * self.token_split * self.row_split
    }

    pub(in crate::gpu::kernels) const fn threads(&self) -> u32 {
        self.subgroup * self.subgroups()
    }

    /// Tiles of the latent's columns in a subgroup's share of the scores.
    const fn latent_key_tiles(&self, spec: &MlaDecode) -> u32 {
        spec.shape.kv_lora_rank / self.tile / self.key_split
    }

    /// Tiles of the query rows of a subgroup.
    const fn score_row_tiles(&self) -> u32 {
        self.rows / self.tile / self.row_split
    }

    /// Tiles of the rotary columns in such a share, of those that have any. Where the latent has scales, one share of a band of rows has
    /// all: their scores are apart.
    const fn rope_key_tiles(&self, spec: &MlaDecode) -> u32 {
        let all = spec.shape.qk_rope_head_dim / self.tile;
        if self.groups == 0 { all.div_ceil(self.key_split) } else { all }
    }

    /// Octs (8 consecutive elements) from one staged token to the next: odd, so that matrix loads have no bank conflicts. Behind the
    /// latent of a record are rotary columns, or the weights of a row for each group.
    const fn key_pitch(&self, spec: &MlaDecode) -> u32 {
        let (rope, weights) = (spec.shape.qk_rope_head_dim / 8, self.weight_octs());
        (spec.shape.kv_lora_rank / 8 + if rope > weights { rope } else { weights }) | 1
    }

    /// Octs of a row's weights of a block in records.
    const fn weight_octs(&self) -> u32 {
        self.groups * self.tokens / 8
    }

    /// Floats from one row of scores to the next.
    const fn score_pitch(&self) -> u32 {
        self.tile + self.score_pad
    }

    /// Tokens that are contiguous in the cache: a block's where the page size is a multiple of it, else one, as where slots are listed.
    const fn run(&self, spec: &MlaDecode, features: Features) -> u32 {
        let is_listed = features.contains(Features::INDICES);
        if spec.kv.page_size.is_multiple_of(self.tokens) && !is_listed { self.tokens } else { 1 }
    }

    /// Whether the loads of two blocks are in flight, where an iteration has two.
    const fn loads_ahead(&self, caps: &Caps) -> bool {
        match self.rows {
            16 => true,
            32 => caps.deep_loads,
            _ => self.groups > 0 && caps.deep_loads && RECORDS_AHEAD,
        }
    }

    /// Runs whose addresses in the cache are looked up at a time.
    /// Records have fewer, so that a multiprocessor has room for two workgroups of 16 rows.
    const fn places(&self) -> u32 {
        let most = if self.groups > 0 && self.rows == 16 { 64 } else { 128 };
        if self.threads() > most { most } else { self.threads() }
    }

    /// Floats of scores. A record's are a plane for each group and one of the rotary columns, which is behind the tiles of the output that
    /// are at times in their place.
    const fn scores(&self, spec: &MlaDecode) -> u32 {
        if self.groups > 0 {
            let planes = if spec.shape.qk_rope_head_dim > 0 { self.groups + 1 } else { self.groups };
            return planes * self.rows * self.tokens;
        }
        let (scores, tiles) = (
            self.key_split * (self.tokens / self.tile) * self.rows * self.score_pitch(),
            self.subgroups() * self.tile * self.tile,
        );
        if scores > tiles { scores } else { tiles }
    }

    /// From one row of weights to the next: halves, in records octs.
    const fn weight_pitch(&self) -> u32 {
        if self.groups > 0 { self.weight_octs() + 1 } else { self.tokens + 8 }
    }

    /// Elements of `weights`. Of records those of the rows past the first ones, whose weights are among the keys; at least one, as WGSL has
    /// no empty arrays.
    const fn weights(&self) -> u32 {
        match self.groups {
            0 => self.rows * self.weight_pitch(),
            _ if self.rows > self.tokens => (self.rows - self.tokens) * self.weight_pitch(),
            _ => 1,
        }
    }

    pub(in crate::gpu::kernels) const fn workgroup_bytes(&self, spec: &MlaDecode, features: Features) -> u32 {
        let keys = self.tokens * self.key_pitch(spec) * 16;
        let weights = self.weights() * if self.groups > 0 { 16 } else { 2 };
        let scales = self.tokens * self.groups * 4;
        let noted = if features.contains(Features::INDICES) { self.tokens * 4 } else { 0 };
        keys + self.scores(spec) * 4 + weights + scales + self.rows * 4 + self.places() * 4 + 16 + noted
    }
}

/// Groups of a record's columns, each with a scale; 0 for other caches.
const fn groups(spec: &MlaDecode) -> u32 {
    match spec.kv.token(&spec.shape).scales {
        Scales::Groups { of, .. } => spec.shape.kv_lora_rank / of,
        _ => 0,
    }
}

fn consts(tile: &CoopTile, caps: &Caps, spec: &MlaDecode, features: Features) -> Vec<(&'static str, u32)> {
    let (threads, rows, tokens, side) = (tile.threads(), tile.rows, tile.tokens, tile.tile);
    let latent_octs = spec.shape.kv_lora_rank / 8;
    // What a thread loads at a time: an oct, or 16 codes of a record.
    let latent_units = if tile.groups == 0 { latent_octs } else { latent_octs / 2 };
    let rope_octs = spec.shape.qk_rope_head_dim / 8;
    // The scales of records are one more.
    let rope_units = rope_octs + u32::from(tile.groups > 0);
    let rope_loads = (tokens * rope_units).div_ceil(threads);
    let (latent_key_tiles, rope_key_tiles) = (tile.latent_key_tiles(spec), tile.rope_key_tiles(spec));
    let key_tiles = latent_key_tiles + rope_key_tiles;
    let latent_tiles = spec.shape.kv_lora_rank / side / tile.subgroups();
    let score_row_tiles = tile.score_row_tiles();
    let query_parts = Format::of(spec.query).matrix_parts;
    let query_rows = query_parts * score_row_tiles;
    // Independent accumulators of a score, as a multiply-add waits for the one before it; one where registers are short.
    let chains = if rows > 16 || spec.kv.dtype() == Dtype::E4m3 { 1 } else { 2 };
    // Blocks by which the loop over them is unrolled.
    let turn = if caps.kind == DeviceKind::Software { 1 } else { 2 };
    let softmax_lanes = (threads / rows).min(tile.subgroup);
    let mut all = vec![
        ("TILE", side),
        ("TILE_OCTS", side / 8),
        ("SUBGROUP", tile.subgroup),
        ("THREADS", threads),
        ("ROWS", rows),
        ("ROW_TILES", rows / side),
        ("TOKENS", tokens),
        ("TOKEN_TILES", tokens / side),
        ("KEY_SPLIT", tile.key_split),
        ("TOKEN_SPLIT", tile.token_split),
        ("ROW_SPLIT", tile.row_split),
        ("SCORE_TOKEN_TILES", tokens / side / tile.token_split),
        ("WEIGHT_TILES", tokens / side * (rows / side)),
        ("SCORE_ROW_TILES", score_row_tiles),
        ("LATENT_KEY_TILES", latent_key_tiles),
        ("ROPE_KEY_TILES", rope_key_tiles),
        ("ROPE_SHARES", (spec.shape.qk_rope_head_dim / side) / rope_key_tiles.max(1)),
        ("KEY_TILES", key_tiles),
        ("QUERY_PARTS", query_parts),
        ("QUERY_CHUNKS", rows.div_ceil(tokens)),
        ("QUERY_CHUNK_ROWS", rows.min(tokens)),
        ("LANE_OCTS", latent_octs / tile.subgroup),
        ("QUERY_ROWS", query_rows),
        ("QUERY_TILES", query_rows * key_tiles),
        ("LATENT_TILES", latent_tiles),
        ("ACC_TILES", rows / side * latent_tiles),
        ("KEY_PITCH", tile.key_pitch(spec)),
        ("KEYS", tokens * tile.key_pitch(spec)),
        ("PLACES", tile.places()),
        ("RUN", tile.run(spec, features)),
        ("BLOCKS", tile.places() * tile.run(spec, features) / tokens),
        ("NOTED_TOKENS", tokens),
        ("TURN", turn),
        ("AHEAD", if tile.loads_ahead(caps) { turn } else { 1 }),
        ("SCORE_PITCH", tile.score_pitch()),
        ("SCORES", tile.scores(spec)),
        // From a row of a tile of the output to the next, in elements of the scores.
        ("SCRATCH_PITCH", if tile.groups == 0 { side } else { side / 4 }),
        ("WEIGHT_PITCH", tile.weight_pitch()),
        ("WEIGHTS", tile.weights()),
        ("SOFTMAX_LANES", softmax_lanes),
        ("LANE_QUERY_OCTS", (latent_octs + rope_octs).div_ceil(softmax_lanes)),
        ("SCORE_CHAINS", chains * score_row_tiles),
        ("CHAINS", chains),
        ("MORE_CHAINS", chains - 1),
        ("SOFTMAX_TOKENS", tokens / softmax_lanes),
        ("LATENT_UNITS", latent_units),
        ("LATENT_LOADS", tokens * latent_units / threads),
        ("ROPE_LOADS", rope_loads),
        ("ROPE_LOADS_PADDED", rope_loads.max(1)),
    ];
    if tile.groups > 0 {
        // Lanes of a row that have tokens in the softmax, as whole quads.
        let quad_lanes = softmax_lanes.min(tokens / 4);
        all.extend([
            ("GROUPS", tile.groups),
            ("GROUP_TILES", spec.shape.kv_lora_rank / tile.groups / side),
            ("TOKEN_OCTS", tokens / 8),
            ("SCORE_QUADS", tokens / 4),
            ("ALL_SCORE_QUADS", tile.scores(spec) / 4),
            ("QUAD_LANES", quad_lanes),
            ("SOFTMAX_QUADS", tokens / 4 / quad_lanes),
            ("WEIGHTS_IN_KEYS", rows.min(tokens)),
            ("SHARE_GROUPS", tile.groups / tile.key_split),
        ]);
    }
    all
}

/// The split kernel.
pub(in crate::gpu::kernels) fn decode(
    name: &str,
    small: bool,
    caps: &Caps,
    request: &DecodeRequest,
) -> Option<Source> {
    let tile = CoopTile::for_device(small, caps, request)?;
    let DecodeRequest { ref spec, features, .. } = *request;
    let mut all = shape_consts(spec);
    all.extend(consts(&tile, caps, spec, features));
    // Software devices have few lanes, so long loops, and keep arrays in memory anyway: unrolled, the kernels compile for a minute.
    let marker = if caps.kind == DeviceKind::Software { "" } else { "// unroll" };
    let marked = |text: &str| text.replace("// unroll on cards", marker);
    let cache = CacheFormat::of(spec.kv.layout);
    let is_listed = features.contains(Features::INDICES);
    let marks = [
        ("lists", is_listed),
        ("pages", !is_listed),
        ("records", cache.has_scales),
        ("one dtype", !cache.has_scales),
        ("lists and records", is_listed && cache.has_scales),
        ("lists and one dtype", is_listed && !cache.has_scales),
        ("pages and records", !is_listed && cache.has_scales),
        ("pages and one dtype", !is_listed && !cache.has_scales),
    ];
    let marked = |text: &str| marked(&where_marked(text, &marks));
    let tokens = tokens(caps, features, true);
    let mut files = vec![super::PINNED, include_str!("../../../../shaders/lib/half_oct.wgsl")];
    if cache.has_scales {
        files.extend(cache_decoders(caps, spec));
    }
    let key = marked(Format::of(spec.kv.dtype()).matrix_key?);
    let block = marked(include_str!("../../../../shaders/lib/cache_block.wgsl"));
    let queries = marked(include_str!("../../../../shaders/lib/decode_queries.wgsl"));
    let body = marked(include_str!("../../../../shaders/mla_decode_coop.wgsl"));
    let attend = marked(cache.attend);
    files.extend([
        &key,
        cache.matrix,
        include_str!("../../../../shaders/lib/wide_rows.wgsl"),
        QUERY,
        &tokens,
        sinks(features),
        include_str!("../../../../shaders/lib/row_lanes.wgsl"),
        &queries,
        &block,
        &body,
        &attend,
    ]);
    let source = compose_step(
        "mla_decode",
        &format!("{name}.{}", dtypes(spec)),
        spec,
        &all,
        &matrix_aliases(tile.tile),
        &files,
    );
    Some(Source { text: format!("{MATRIX_DIRECTIVES}{}", source.text), ..source })
}

/// Why these variants cannot run, if they cannot.
pub(in crate::gpu::kernels) fn runs_on(small: bool, caps: &Caps, spec: &MlaDecode) -> Result<(), String> {
    crate::gpu::kernels::matrices(caps)?;
    if !caps.shader_f16 {
        return Err("the device was made without Features::SHADER_F16".into());
    }
    if caps.min_subgroup_size != caps.max_subgroup_size {
        let (min, max) = (caps.min_subgroup_size, caps.max_subgroup_size);
        return Err(format!("subgroups vary from {min} to {max} lanes, and lanes own columns here"));
    }
    if Format::of(spec.kv.dtype()).matrix_key.is_none() {
        return Err("an f32 cache does not fit f16 matrices".into());
    }
    match CoopTile::for_device(small, caps, &DecodeRequest::one_token(spec)) {
        Some(_) => Ok(()),
        None => Err(format!("no tile fits {} bytes of workgroup memory", caps.workgroup_memory_bytes)),
    }
}
