//! The variants `coop`, `coop_small` and `coop_few`, on cooperative matrices (tensor cores): the tile of a workgroup, and the WGSL. Pure.

use super::{Kernel, Request};
use crate::gpu::caps::{Caps, DeviceKind};
use crate::gpu::kernels::compose::{Const, Source};
use crate::gpu::kernels::formats::Format;
use crate::gpu::kernels::{MATRIX_DIRECTIVES, matrix_aliases, unrolled};
use crate::ops::MlaPrefill;

/// The tile of a workgroup and its division among subgroups: see the head of `shaders/mla_prefill_coop.wgsl`.
#[derive(Debug, Clone, Copy)]
struct Cut {
    /// Side of a cooperative matrix.
    tile: u32,
    /// Lanes of a subgroup.
    subgroup: u32,
    /// Matrices of query rows of a subgroup.
    row_tiles: u32,
    row_groups: u32,
    /// Subgroups that share query rows, and divide keys and output columns.
    column_split: u32,
    /// Keys of a block.
    tokens: u32,
}

/// The variants on cooperative matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Coop {
    /// In about 48 KiB of workgroup memory.
    Large,
    /// In 32 KiB.
    Small,
    /// For sequences of up to 64 query tokens: small tiles of many subgroups, in 48 KiB of workgroup memory where the device has it, else
    /// in 32.
    Few,
}

impl Coop {
    const fn name(self) -> &'static str {
        match self {
            Self::Large => "coop",
            Self::Small => "coop_small",
            Self::Few => "coop_few",
        }
    }

    /// Bytes of workgroup memory that it takes on a device.
    fn memory(self, caps: &Caps) -> u32 {
        match self {
            Self::Large => 48 << 10,
            Self::Small => 32 << 10,
            Self::Few => caps.workgroup_memory_bytes.clamp(32 << 10, 48 << 10),
        }
    }
}

impl Cut {
    /// Best first.
    fn all(variant: Coop, tile: u32, subgroup: u32) -> Vec<Self> {
        let cut = |row_tiles, row_groups, column_split, tokens| Self {
            tile,
            subgroup,
            row_tiles,
            row_groups,
            column_split,
            tokens,
        };
        match variant {
            Coop::Large => vec![cut(2, 4, 2, 32), cut(1, 4, 2, 32), cut(1, 8, 1, 32)],
            Coop::Small => vec![cut(2, 2, 2, 32), cut(2, 2, 1, 32), cut(2, 2, 2, 16)],
            Coop::Few => vec![cut(2, 2, 4, 64), cut(1, 4, 2, 32), cut(1, 4, 1, 16), cut(2, 4, 1, 32)],
        }
    }

    const fn rows(&self) -> u32 {
        self.tile * self.row_tiles * self.row_groups
    }

    const fn subgroups(&self) -> u32 {
        self.row_groups * self.column_split
    }

    const fn threads(&self) -> u32 {
        self.subgroup * self.subgroups()
    }

    /// Lanes that share a query row in the softmax.
    const fn softmax_lanes(&self) -> u32 {
        self.threads() / self.rows()
    }

    /// Octs (8 consecutive elements) from one staged row to the next: odd, so that matrix loads have no bank conflicts.
    const fn key_pitch(columns: u32) -> u32 {
        (columns / 8) | 1
    }

    /// Octs of the staged weights, after which values are staged.
    const fn weights(&self) -> u32 {
        self.rows() * Self::key_pitch(self.tokens)
    }

    /// Octs of the staging buffer: keys, then weights and values in the same memory.
    fn staged(&self, spec: &MlaPrefill) -> u32 {
        let keys = self.tokens * Self::key_pitch(key_columns(spec));
        keys.max(self.weights() + self.tokens * Self::key_pitch(spec.v_head_dim))
    }

    /// Quads (4 consecutive elements) from one row of scores to the next: two more than a multiple of 4, so that matrix stores have no bank
    /// conflicts.
    const fn score_pitch(&self) -> u32 {
        self.tokens / 4 + 2
    }

    /// Matrices of the output that a subgroup writes at a time.
    const fn out_tiles(&self, spec: &MlaPrefill) -> u32 {
        let [_, outputs] = self.held(spec);
        if outputs.is_multiple_of(2) { 2 } else { 1 }
    }

    fn scores(&self, spec: &MlaPrefill) -> u32 {
        let outputs = self.subgroups() * self.out_tiles(spec) * self.tile * self.tile / 4;
        outputs.max(self.rows() * self.score_pitch())
    }

    fn workgroup_bytes(&self, spec: &MlaPrefill) -> u32 {
        16 * (self.staged(spec) + self.scores(spec)) + 4 * self.rows() + 16
    }

    /// Matrices that a subgroup holds of queries and of the output.
    const fn held(&self, spec: &MlaPrefill) -> [u32; 2] {
        let keys = key_columns(spec) / self.tile;
        let values = spec.v_head_dim / self.tile / self.column_split;
        [self.row_tiles * keys, self.row_tiles * values]
    }

    /// Whether the dims are whole matrices, and a subgroup's matrices fit registers: 16 accumulators of 16 x 16 take 128 of a lane's 255.
    fn serves(&self, spec: &MlaPrefill) -> bool {
        let Self { tile, column_split, tokens, .. } = *self;
        let [queries, outputs] = self.held(spec);
        let words = (queries * tile * tile / 2 + outputs * tile * tile) / self.subgroup;
        key_columns(spec).is_multiple_of(tile)
            && spec.v_head_dim.is_multiple_of(tile * column_split)
            && tokens.is_multiple_of(tile * column_split)
            && self.threads().is_multiple_of(self.rows())
            && self.softmax_lanes().is_power_of_two()
            && self.softmax_lanes() <= self.subgroup
            && tokens.is_multiple_of(8 * self.softmax_lanes())
            && (self.subgroup < 32 || words <= 168)
    }
}

const fn key_columns(spec: &MlaPrefill) -> u32 {
    spec.qk_nope_head_dim + spec.qk_rope_head_dim
}

fn consts(cut: &Cut, spec: &MlaPrefill) -> Vec<(&'static str, u32)> {
    let (threads, rows, side) = (cut.threads(), cut.rows(), cut.tile);
    let [queries, outputs] = cut.held(spec);
    let [nope, rope, value] =
        [spec.qk_nope_head_dim, spec.qk_rope_head_dim, spec.v_head_dim].map(|dim| dim / 8);
    let loads = |octs: u32| (cut.tokens * octs).div_ceil(threads);
    let token_tiles = cut.tokens / side / cut.column_split;
    let chunk = rows.min(cut.tokens);
    let chunk_loads = (chunk * (nope + rope)).div_ceil(threads);
    vec![
        ("NUM_HEADS", spec.num_heads),
        ("TILE", side),
        ("TILE_OCTS", side / 8),
        ("SUBGROUP", cut.subgroup),
        ("THREADS", threads),
        ("ROWS", rows),
        ("ROW_TILES", cut.row_tiles),
        ("COLUMN_SPLIT", cut.column_split),
        ("TOKENS", cut.tokens),
        ("TOKEN_TILES", token_tiles),
        ("BLOCK_TILES", cut.tokens / side),
        ("SCORE_TILES", token_tiles * cut.row_tiles),
        ("KEY_TILES", key_columns(spec) / side),
        ("QUERY_TILES", queries),
        ("QUERY_CHUNKS", rows / chunk),
        ("CHUNK_ROWS", chunk),
        ("CHUNK_LOADS", chunk_loads),
        ("QUERY_LOADS", rows / chunk * chunk_loads),
        ("VALUE_TILES", spec.v_head_dim / side / cut.column_split),
        ("ACC_TILES", outputs),
        ("OUT_TILES", cut.out_tiles(spec)),
        ("OUT_TURNS", outputs / cut.out_tiles(spec)),
        ("NOPE_OCTS", nope),
        ("ROPE_OCTS", rope),
        ("ROW_OCTS", nope + rope),
        ("V_OCTS", value),
        ("LANE_OCTS", value.div_ceil(cut.subgroup)),
        ("NOPE_LOADS", loads(nope)),
        ("ROPE_LOADS", loads(rope)),
        ("ROPE_LOADS_PADDED", loads(rope).max(1)),
        ("VALUE_LOADS", loads(value)),
        ("KEY_PITCH", Cut::key_pitch(key_columns(spec))),
        ("WEIGHT_PITCH", Cut::key_pitch(cut.tokens)),
        ("VALUES_AT", cut.weights()),
        ("VALUE_PITCH", Cut::key_pitch(spec.v_head_dim)),
        ("STAGED", cut.staged(spec)),
        ("SCORE_PITCH", cut.score_pitch()),
        ("SCORES", cut.scores(spec)),
        ("SOFTMAX_LANES", cut.softmax_lanes()),
        ("SOFTMAX_QUADS", cut.tokens / 4 / cut.softmax_lanes()),
        ("SOFTMAX_OCTS", cut.tokens / 8 / cut.softmax_lanes()),
    ]
}

/// [`Coop::Large`].
pub(super) fn kernel(caps: &Caps, (spec, _): &Request) -> Result<Kernel, String> {
    coop(Coop::Large, caps, spec)
}

/// [`Coop::Small`].
pub(super) fn small_kernel(caps: &Caps, (spec, _): &Request) -> Result<Kernel, String> {
    coop(Coop::Small, caps, spec)
}

/// [`Coop::Few`].
pub(super) fn few_kernel(caps: &Caps, (spec, _): &Request) -> Result<Kernel, String> {
    coop(Coop::Few, caps, spec)
}

fn coop(variant: Coop, caps: &Caps, spec: &MlaPrefill) -> Result<Kernel, String> {
    let half_file = Format::of(spec.dtype).matrix_half;
    let half_file = half_file.ok_or_else(|| format!("{} does not fit f16 matrices", spec.dtype))?;
    crate::gpu::kernels::matrices(caps)?;
    if !caps.shader_f16 {
        return Err("the device was made without Features::SHADER_F16".into());
    }
    let (least, subgroup) = (caps.min_subgroup_size, caps.max_subgroup_size);
    if least != subgroup || subgroup < 8 {
        return Err(format!("subgroups vary from {least} to {subgroup} lanes, or are too small"));
    }
    if caps.max_storage_buffers < 8 {
        return Err("8 storage buffers are needed".into());
    }
    let memory = variant.memory(caps);
    if caps.workgroup_memory_bytes < memory {
        let has = caps.workgroup_memory_bytes;
        return Err(format!("{memory} bytes of workgroup memory are needed, the device was made with {has}"));
    }
    let cut = Cut::all(variant, caps.cooperative_tile, subgroup)
        .into_iter()
        .filter(|cut| cut.serves(spec) && cut.threads() <= caps.max_invocations)
        .find(|cut| cut.workgroup_bytes(spec) <= memory)
        .ok_or_else(|| format!("no cut of these dims fits {memory} bytes of workgroup memory"))?;
    let source = source(variant, half_file, &cut, caps, spec);
    Ok(Kernel { source, rows: cut.rows(), unit: 8, pins_loads: true })
}

/// The condition of the loop over blocks.
const BLOCKS: &str = "block < tile.num_keys";

fn source(variant: Coop, half_file: &str, cut: &Cut, caps: &Caps, spec: &MlaPrefill) -> Source {
    let consts = consts(cut, spec);
    let mut types = matrix_aliases(cut.tile).to_vec();
    types.push(("Unit", Const::Alias("vec4<u32>")));
    // Software devices have few lanes, so long loops, and keep arrays in memory anyway: unrolled, the kernels compile for long.
    let marker = if caps.kind == DeviceKind::Software { "" } else { "// unroll" };
    let mut text =
        include_str!("../../../../shaders/mla_prefill_coop.wgsl").replace("// unroll on cards", marker);
    if variant == Coop::Few {
        // Keeps NVIDIA's compiler from unrolling this loop 8 times. A part has few blocks, and a step of several kernels fetches their code
        // anew each time: an H100 took 25 us longer.
        text = text.replace(BLOCKS, &format!("subgroupAny({BLOCKS})"));
    }
    let files = [
        include_str!("../../../../shaders/lib/round.wgsl"),
        include_str!("../../../../shaders/lib/half_oct.wgsl"),
        include_str!("../../../../shaders/lib/row_lanes.wgsl"),
        half_file,
        Format::of(spec.out).out,
        include_str!("../../../../shaders/lib/prefill.wgsl"),
        include_str!("../../../../shaders/lib/row_end.wgsl"),
        include_str!("../../../../shaders/lib/prefill_pinned.wgsl"),
        &text,
    ];
    let dims = format!("{}.{}.{}", spec.qk_nope_head_dim, spec.qk_rope_head_dim, spec.v_head_dim);
    let variant = format!("{}.{}.out_{}.{dims}", variant.name(), spec.dtype, spec.out);
    let source = unrolled("mla_prefill", &variant, &consts, &types, &files);
    Source { text: format!("{MATRIX_DIRECTIVES}{}", source.text), ..source }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every kernel of every kind of device is valid, fits it, and has no loop left rolled that was to be unrolled.
    #[test]
    fn kernels_are_valid() {
        let card = Caps {
            kind: DeviceKind::Discrete,
            subgroups: true,
            min_subgroup_size: 32,
            max_subgroup_size: 32,
            shader_f16: true,
            cooperative_tile: 16,
            workgroup_memory_bytes: 48 << 10,
            max_invocations: 1024,
            ..Caps::WEBGPU
        };
        let apple = Caps { cooperative_tile: 8, workgroup_memory_bytes: 32 << 10, ..card };
        let lavapipe =
            Caps { kind: DeviceKind::Software, min_subgroup_size: 8, max_subgroup_size: 8, ..apple };
        let less = [Coop::Small, Coop::Few];
        for (caps, variants) in
            [(card, &[Coop::Large, Coop::Small, Coop::Few][..]), (apple, &less), (lavapipe, &less)]
        {
            for spec in <MlaPrefill as crate::ops::Op>::samples() {
                for &variant in variants {
                    let Ok(kernel) = coop(variant, &caps, &spec) else { continue };
                    check(&kernel.source);
                    let ends_by_lanes = kernel.source.text.contains(&format!("subgroupAny({BLOCKS})"));
                    assert_eq!(ends_by_lanes, variant == Coop::Few, "{}", kernel.source.label);
                }
            }
            let usual = MlaPrefill {
                dtype: crate::base::dtype::Dtype::F16,
                ..<MlaPrefill as crate::ops::Op>::samples()[0]
            };
            for &variant in variants {
                assert!(coop(variant, &caps, &usual).is_ok(), "{variant:?}");
            }
        }
    }

    fn check(source: &Source) {
        assert!(!source.text.contains("// unroll"), "{}: a loop is left rolled", source.label);
        let module = naga::front::wgsl::parse_str(&source.text)
            .unwrap_or_else(|e| panic!("{}:\n{}", source.label, e.emit_to_string(&source.text)));
        let flags = naga::valid::ValidationFlags::all();
        let all = naga::valid::Capabilities::all();
        let mut validator = naga::valid::Validator::new(flags, all);
        if let Err(e) = validator.validate(&module) {
            panic!("{}:\n{}", source.label, e.emit_to_string(&source.text));
        }
        for (_, variable) in module.global_variables.iter() {
            if variable.space == naga::AddressSpace::WorkGroup {
                let size = module.types[variable.ty].inner.size(module.to_ctx());
                assert_eq!(size % 16, 0, "{}: {:?}", source.label, variable.name);
            }
        }
    }
}
