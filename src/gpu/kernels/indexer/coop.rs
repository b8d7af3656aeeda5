//! The variant `coop` of `indexer_logits`, on cooperative matrices (tensor cores): the tile of a workgroup, and the WGSL. Pure.

use super::{Kernel, Unit, module};
use crate::gpu::caps::{Caps, DeviceKind};
use crate::gpu::kernels::compose::Source;
use crate::gpu::kernels::formats::Format;
use crate::gpu::kernels::{MATRIX_DIRECTIVES, matrices, matrix_aliases};
use crate::ops::IndexerLogits;
use crate::ops::indexer_logits::runs::Cut;

/// The tile of a workgroup and its division among subgroups: see the head of `shaders/indexer_logits_coop.wgsl`.
#[derive(Debug, Clone, Copy)]
struct Tile {
    /// Side of a cooperative matrix.
    side: u32,
    /// Lanes of a subgroup, and so its keys of a block.
    subgroup: u32,
    subgroups: u32,
    /// Subgroups that share keys, and divide heads.
    head_split: u32,
    /// Matrices of heads of a subgroup.
    head_tiles: u32,
}

/// Heads that a subgroup keeps the queries of. Shares of one matrix of heads give a workgroup's few keys the most threads that stage them.
const MOST_HEADS: u32 = 16;
/// Subgroups of a workgroup of few heads. More have more keys a block, and fewer workgroups then share a multiprocessor.
const LEAST_SUBGROUPS: u32 = 2;
/// Octs (16 bytes of f16) from a staged key to the next, and of a key.
const PITCH: u32 = 17;
const KEY_OCTS: u32 = 16;

impl Tile {
    fn of(caps: &Caps, spec: &IndexerLogits) -> Option<Self> {
        let (side, subgroup) = (caps.cooperative_tile, caps.max_subgroup_size);
        let head_split = spec.num_heads.div_ceil(MOST_HEADS).next_power_of_two();
        let subgroups = head_split.max(LEAST_SUBGROUPS);
        let head_tiles = spec.num_heads.div_ceil(head_split).div_ceil(side);
        let tile = Self { side, subgroup, subgroups, head_split, head_tiles };
        let fits = subgroup.is_multiple_of(side)
            && (tile.sub_heads() * KEY_OCTS).is_multiple_of(tile.threads())
            && tile.threads() <= caps.max_invocations
            && tile.workgroup_bytes() <= caps.workgroup_memory_bytes;
        fits.then_some(tile)
    }

    const fn threads(&self) -> u32 {
        self.subgroups * self.subgroup
    }

    /// Keys of a block.
    const fn keys(&self) -> u32 {
        self.subgroups / self.head_split * self.subgroup
    }

    /// Heads of a subgroup.
    const fn sub_heads(&self) -> u32 {
        self.head_tiles * self.side
    }

    /// Quads (4 floats) from the scores of a key to the next: odd, against bank conflicts.
    const fn score_pitch(&self) -> u32 {
        (self.side / 4) | 1
    }

    /// Lanes that add up a key's scores, and strips of a subgroup's keys.
    const fn parts(&self) -> u32 {
        let (lanes, quads) = (self.subgroup / self.side, self.side / 4);
        if lanes < quads { lanes } else { quads }
    }

    /// Keys of a strip: those of a subgroup whose scores are in workgroup memory at a time.
    const fn strip_keys(&self) -> u32 {
        self.subgroup / self.parts()
    }

    const fn scores(&self) -> u32 {
        self.subgroups * self.strip_keys() * self.score_pitch()
    }

    /// Octs of the array that keys, and at first queries, are staged in.
    fn staged(&self) -> u32 {
        self.keys().max(self.sub_heads()) * PITCH
    }

    const fn weights(&self) -> u32 {
        self.head_split * self.sub_heads()
    }

    fn workgroup_bytes(&self) -> u32 {
        (self.staged() + self.scores()) * 16 + (self.weights() + self.head_split * self.keys()) * 4 + 16
    }

    /// Workgroups that a multiprocessor of NVIDIA's holds, by workgroup memory.
    fn resident(&self) -> u32 {
        ((48 << 10) / self.workgroup_bytes()).max(1)
    }

    fn source(&self, caps: &Caps, spec: &IndexerLogits, unit: Unit) -> Source {
        let (side, sub_heads) = (self.side, self.sub_heads());
        let chunk_octs = if unit == Unit::Quads { 2 } else { 1 };
        let lanes = self.threads() / self.keys();
        let (key_tiles, depth_tiles) = (self.subgroup / side, 128 / side);
        let consts = [
            ("TILE", side),
            ("TILE_OCTS", side / 8),
            ("TILE_QUADS", side / 4),
            ("SUBGROUP", self.subgroup),
            ("THREADS", self.threads()),
            ("KEYS", self.keys()),
            ("SUB_KEYS", self.subgroup),
            ("KEY_TILES", key_tiles),
            ("HEAD_TILES", self.head_tiles),
            ("HEAD_SPLIT", self.head_split),
            ("SUB_HEADS", sub_heads),
            ("DEPTH_TILES", depth_tiles),
            ("PARTS", self.parts()),
            ("STRIP_TILES", self.strip_keys() / side),
            ("STRIP_KEYS", self.strip_keys()),
            ("PART_STEPS", self.parts().ilog2()),
            ("PART_QUADS", side / 4 / self.parts()),
            ("SCORE_PITCH", self.score_pitch()),
            ("SUB_SCORES", self.strip_keys() * self.score_pitch()),
            ("SCORES", self.scores()),
            ("STAGED", self.staged()),
            ("LANES", lanes),
            ("LANE_STEPS", lanes.ilog2()),
            ("LOADS", KEY_OCTS / chunk_octs / lanes),
            ("CHUNK_OCTS", chunk_octs),
            ("Q_LOADS", sub_heads * KEY_OCTS / self.threads()),
            ("QUERIES", depth_tiles * self.head_tiles),
            ("ACC_TILES", key_tiles * self.head_tiles),
            ("SUMS", self.head_split * self.keys()),
            ("WEIGHT_QUADS", self.weights() / 4),
        ];
        // Software devices keep arrays in memory anyway, and unrolled kernels compile for long there.
        let marker = if caps.kind == DeviceKind::Software { "" } else { "// unroll" };
        let body = include_str!("../../../../shaders/indexer_logits_coop.wgsl")
            .replace("// unroll on cards", marker);
        let (key, query) = (spec.key(), spec.query);
        // Elements of a key and of a query have one order.
        let order = if key.is_fp8() && !query.is_fp8() { "in_order_of_e4m3" } else { "" };
        let halves = format!(
            "fn halves_of_key(oct: KeyOct) -> vec4<u32> {{\n    return halves_of_{key}(oct);\n}}\n\
             fn halves_of_query(oct: QOct) -> vec4<u32> {{\n    return {order}(halves_of_{query}(oct));\n}}\n"
        );
        let chunk = match unit {
            Unit::Quads => include_str!("../../../../shaders/lib/index_chunk_quads.wgsl"),
            _ => include_str!("../../../../shaders/lib/index_chunk_octs.wgsl"),
        };
        let half_oct = include_str!("../../../../shaders/lib/half_oct.wgsl");
        let mut files = vec![half_oct, halves.as_str(), chunk, &body];
        files.extend(Format::of(key).halves);
        if query != key {
            files.extend(Format::of(query).halves);
        }
        let units = [key, query].map(|dtype| format!("half_unit_{dtype}"));
        let source = module("coop", caps, spec, unit, &consts, &matrix_aliases(side), &units, &files);
        Source { text: format!("{MATRIX_DIRECTIVES}{}", source.text), ..source }
    }
}

pub(super) fn kernel(caps: &Caps, spec: &IndexerLogits) -> Result<Kernel, String> {
    matrices(caps)?;
    if !(caps.shader_f16 && caps.subgroups) {
        return Err("the device was made without Features::SHADER_F16 or SUBGROUP".into());
    }
    if caps.min_subgroup_size != caps.max_subgroup_size {
        let (min, max) = (caps.min_subgroup_size, caps.max_subgroup_size);
        return Err(format!("subgroups vary from {min} to {max} lanes, and each lane has a key here"));
    }
    for (what, dtype) in [("keys", spec.key()), ("queries", spec.query)] {
        if Format::of(dtype).halves.is_none() {
            return Err(format!("{dtype} {what} do not fit f16 matrices"));
        }
    }
    let tile = Tile::of(caps, spec).ok_or("no tile fits the device")?;
    let units = if spec.key().is_fp8() { vec![Unit::Quads, Unit::Words] } else { vec![Unit::Octs] };
    let source = |unit: Unit| (tile.source(caps, spec, unit), unit.bytes(spec.key()).into());
    // An H200's 132 multiprocessors hold so many workgroups.
    let target = if caps.kind == DeviceKind::Software { 16 } else { 132 * tile.resident() };
    Ok(Kernel { sources: units.into_iter().map(source).collect(), cut: Cut { block: tile.keys(), target } })
}
