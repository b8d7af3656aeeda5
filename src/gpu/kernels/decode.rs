//! The decode: its variants in dispatch order, which of them runs where, and the WGSL of each.

use super::compose::{Const, Source};
use super::{unrolled, where_all_f32};
use crate::base::dtype::Dtype;
use crate::cache::MlaShape;
use crate::cache::decode_spec::MlaDecode;
use crate::gpu::caps::{Caps, DeviceKind, STORAGE_BUFFERS};
use crate::gpu::kernels::formats::Format;
use crate::ops::variants::Variant;
use crate::ops::{DecodeRequest, Features};
use crate::plan::Tiling;

pub(super) mod coop;
pub(super) mod plain;

use plain::{LANES, Tile};

/// The body of a variant's split kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Body {
    /// `mla_decode.wgsl` without tensor cores, and how a score's partial sums are reduced.
    Plain(Sum),
    /// `mla_decode_coop.wgsl` on cooperative matrices, in 32 KiB of workgroup memory (`small`) or in 48.
    Coop { small: bool },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sum {
    Subgroup,
    Shared,
}

/// A variant for a request on a device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kernel {
    pub(crate) body: Body,
    pub(crate) tiling: Tiling,
}

/// In dispatch order; the last runs everywhere.
pub(crate) const VARIANTS: [Variant<Caps, DecodeRequest, Kernel>; 4] = [
    Variant::new(Body::COOP.name(), |caps, asked| Body::COOP.kernel(caps, asked))
        .serves(Features::ALL)
        .rounding_weights()
        .on_tensor_cores()
        .not_by_default(slow),
    Variant::new(Body::COOP_SMALL.name(), |caps, asked| Body::COOP_SMALL.kernel(caps, asked))
        .serves(Features::ALL)
        .rounding_weights()
        .on_tensor_cores()
        .not_by_default(slow),
    Variant::new(Body::SUBGROUP.name(), |caps, asked| Body::SUBGROUP.kernel(caps, asked))
        .serves(Features::ALL),
    Variant::new(Body::SHARED.name(), |caps, asked| Body::SHARED.kernel(caps, asked)).serves(Features::ALL),
];

/// On Mesa 26.1's lavapipe they are half as fast as `subgroup`, and compile for half a minute.
fn slow(caps: &Caps, _: &DecodeRequest) -> Result<(), String> {
    if caps.kind == DeviceKind::Software {
        Err("a software device only imitates matrices".into())
    } else {
        Ok(())
    }
}

impl Body {
    const COOP: Self = Self::Coop { small: false };
    const COOP_SMALL: Self = Self::Coop { small: true };
    const SUBGROUP: Self = Self::Plain(Sum::Subgroup);
    const SHARED: Self = Self::Plain(Sum::Shared);
    #[cfg(test)]
    pub(super) const ALL: [Self; 4] = [Self::COOP, Self::COOP_SMALL, Self::SUBGROUP, Self::SHARED];

    /// In labels, logs and on command lines.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Coop { small: false } => "coop",
            Self::Coop { small: true } => "coop_small",
            Self::Plain(Sum::Subgroup) => "subgroup",
            Self::Plain(Sum::Shared) => "shared",
        }
    }

    fn kernel(self, caps: &Caps, request: &DecodeRequest) -> Result<Kernel, String> {
        self.runs_on(caps, &request.spec)?;
        let tiling = self.tiling(caps, request).ok_or("it fits no tile here")?;
        Ok(Kernel { body: self, tiling })
    }

    /// Whether its split kernel declares the cache, the tables and the page list as if it wrote them: see `shaders/lib/pinned.wgsl`.
    pub(crate) const fn pins_loads(self) -> bool {
        matches!(self, Self::Coop { .. })
    }

    /// What keeps this variant from running; `Ok` where nothing does.
    ///
    /// # Errors
    /// A sentence that names what is missing.
    pub(super) fn runs_on(self, caps: &Caps, spec: &MlaDecode) -> Result<(), String> {
        if self != Self::SHARED {
            if !caps.subgroups {
                return Err("the device was made without Features::SUBGROUP".into());
            }
            if caps.min_subgroup_size < LANES {
                return Err(format!(
                    "subgroups may have {} lanes, {LANES} are needed",
                    caps.min_subgroup_size
                ));
            }
        }
        if let Self::Coop { small } = self {
            coop::runs_on(small, caps, spec)?;
        }
        if STORAGE_BUFFERS > caps.max_storage_buffers {
            let has = caps.max_storage_buffers;
            return Err(format!(
                "{STORAGE_BUFFERS} storage buffers are needed, the device was made with {has}"
            ));
        }
        let threads = Merging::FewRows.threads(&spec.shape).max(Merging::ManyRows.threads(&spec.shape));
        if threads > caps.max_invocations {
            let has = caps.max_invocations;
            return Err(format!(
                "workgroups of {threads} invocations are needed, the device was made with {has}"
            ));
        }
        match self {
            Self::Plain(sum) if Tile::balanced(sum, caps, &DecodeRequest::one_token(spec)).is_none() => {
                Err("the device was made with less workgroup memory than WebGPU's default 16 KiB".into())
            }
            _ => Ok(()),
        }
    }

    /// This variant's tiling on a device; `None` if it does not run there.
    pub(super) fn tiling(self, caps: &Caps, request: &DecodeRequest) -> Option<Tiling> {
        match self {
            Self::Coop { small } => {
                coop::CoopTile::for_device(small, caps, request).map(|tile| tile.tiling(caps))
            }
            Self::Plain(sum) => Tile::balanced(sum, caps, request).map(|tile| tile.tiling(caps)),
        }
    }
}

/// The split kernel of a decode, `None` where the variant does not run.
pub(crate) fn split(body: Body, caps: &Caps, request: &DecodeRequest) -> Option<Source> {
    match body {
        Body::Coop { small } => coop::decode(body.name(), small, caps, request),
        Body::Plain(sum) => {
            Some(plain::decode(body.name(), sum, &Tile::balanced(sum, caps, request)?, caps, request))
        }
    }
}

const PINNED: &str = include_str!("../../../shaders/lib/pinned.wgsl");
const READ: &str = include_str!("../../../shaders/lib/read.wgsl");
/// Lookups in the tables, for both bodies of the split.
const QUERY: &str = include_str!("../../../shaders/lib/query.wgsl");

/// Where tokens are: by pages, or by lists of slots.
fn tokens(caps: &Caps, features: Features, pins_loads: bool) -> String {
    if !features.contains(Features::INDICES) {
        let clamp_pages = features.contains(Features::DEVICE_PAGE_LIST);
        let pages = if pins_loads {
            include_str!("../../../shaders/lib/pinned_pages.wgsl")
        } else {
            include_str!("../../../shaders/lib/read_pages.wgsl")
        };
        let tokens = include_str!("../../../shaders/lib/tokens.wgsl");
        return format!("const CLAMP_PAGES = {clamp_pages};\n\n{pages}\n{tokens}");
    }
    let lengths = if has_lengths_apart(caps) {
        include_str!("../../../shaders/lib/lengths_apart.wgsl")
    } else {
        include_str!("../../../shaders/lib/lengths_within.wgsl")
    };
    format!("{}\n{lengths}", include_str!("../../../shaders/lib/listed.wgsl"))
}

/// Whether the lengths of lists have a binding of their own, one more than WebGPU's eight. Else they must be in the lists' buffer.
pub(crate) const fn has_lengths_apart(caps: &Caps) -> bool {
    caps.max_storage_buffers > STORAGE_BUFFERS
}

/// The attention sinks, if there are any.
const fn sinks(features: Features) -> &'static str {
    if features.contains(Features::ATTN_SINK) {
        include_str!("../../../shaders/lib/sinks.wgsl")
    } else {
        include_str!("../../../shaders/lib/no_sinks.wgsl")
    }
}

/// The files that decode a cache's elements to f32, beside those of the query.
fn cache_decoders(caps: &Caps, spec: &MlaDecode) -> Vec<&'static str> {
    let token = spec.kv.token(&spec.shape);
    let mut dtypes = vec![token.latent.dtype];
    if token.rope.dtype != token.latent.dtype {
        dtypes.push(token.rope.dtype);
    }
    dtypes.retain(|dtype| *dtype != spec.query);
    dtypes.into_iter().map(|dtype| Format::of(dtype).decoder(caps.f16_subnormals)).collect()
}

/// The tile of the merge: see the head of `shaders/mla_merge.wgsl`. Both give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Merging {
    /// Many workgroups a query row, whose threads share its partial results.
    FewRows,
    /// One workgroup a query row.
    ManyRows,
}

impl Merging {
    /// Both tiles.
    pub(crate) const ALL: [Self; 2] = [Self::FewRows, Self::ManyRows];
    /// Groups of partial results; each is summed by itself, then the groups are.
    const GROUPS: u32 = 16;
    /// Partial results whose LSEs and factors a workgroup holds at a time.
    const CHUNK: u32 = 512;

    /// For a number of query rows: up to 128, one workgroup each would leave multiprocessors of an H200 (132) idle.
    pub(crate) const fn of(rows: u64) -> Self {
        if rows <= 128 { Self::FewRows } else { Self::ManyRows }
    }

    /// Octs (8 consecutive elements) of a row that a workgroup takes.
    const fn octs(self, shape: &MlaShape) -> u32 {
        match self {
            Self::FewRows => 8,
            Self::ManyRows => shape.kv_lora_rank / 8,
        }
    }

    const fn teams(self) -> u32 {
        match self {
            Self::FewRows => Self::GROUPS,
            Self::ManyRows => 2,
        }
    }

    const fn threads(self, shape: &MlaShape) -> u32 {
        self.teams() * self.octs(shape)
    }

    /// Workgroups for each query row.
    pub(crate) const fn parts(self, shape: &MlaShape) -> u32 {
        shape.kv_lora_rank / 8 / self.octs(shape)
    }

    /// The kernel that merges the partial results of query rows. It does not read the cache, but is bound with it, and a step has one
    /// layout.
    pub(crate) fn source(self, spec: &MlaDecode, features: Features, pins_loads: bool) -> Source {
        let merge = where_all_f32(include_str!("../../../shaders/mla_merge.wgsl"), is_all_f32(spec));
        let files = [if pins_loads { PINNED } else { READ }, sinks(features), &merge];
        // Partial results whose loads a thread has in flight.
        let batch = match self {
            Self::FewRows if is_all_f32(spec) => 4,
            Self::FewRows => 8,
            Self::ManyRows => 4,
        };
        let mut consts = shape_consts(spec);
        consts.extend([
            ("MERGE_OCTS", self.octs(&spec.shape)),
            ("MERGE_PARTS", self.parts(&spec.shape)),
            ("MERGE_GROUPS", Self::GROUPS),
            ("MERGE_TEAMS", self.teams()),
            ("HALF_TEAMS", self.teams() / 2),
            ("MERGE_THREADS", self.threads(&spec.shape)),
            ("MERGE_SIXTEENTHS", self.threads(&spec.shape) / 16),
            ("MERGE_CHUNK", Self::CHUNK),
            ("TEAM_GROUPS", Self::GROUPS / self.teams()),
            ("BATCH", batch),
        ]);
        let types = [("KvOct", Const::Alias("u32"))]; // bound, but not read
        compose_step("mla_merge", spec.out.name(), spec, &consts, &types, &files)
    }
}

/// Whether the output has to be within 1e-5 of the exact one, as docs/numbers.md promises for f32.
fn is_all_f32(spec: &MlaDecode) -> bool {
    [spec.query, spec.kv.dtype(), spec.out] == [Dtype::F32; 3]
}

fn dtypes(spec: &MlaDecode) -> String {
    format!("q_{}.kv_{}.out_{}", spec.query, spec.kv.layout, spec.out)
}

/// Bytes of the unit that kernels load of a cache: 8 elements of the latent.
pub(crate) const fn unit_bytes(spec: &MlaDecode) -> u64 {
    8 * spec.kv.dtype().bytes() as u64
}

fn shape_consts(spec: &MlaDecode) -> Vec<(&'static str, u32)> {
    vec![
        ("LATENT_OCTS", spec.shape.kv_lora_rank / 8),
        ("ROPE_OCTS", spec.shape.qk_rope_head_dim / 8),
        ("ROW_OCTS", spec.shape.row_elems() / 8),
        ("ROW_UNITS", (spec.kv.token(&spec.shape).bytes / unit_bytes(spec)) as u32),
    ]
}

/// A kernel of a decode step whose decoder of queries includes the dtype's scale.
fn compose_step(
    entry: &'static str,
    variant: &str,
    spec: &MlaDecode,
    consts: &[(&'static str, u32)],
    types: &[(&'static str, Const)],
    op: &[&str],
) -> Source {
    let (query, scale) = (spec.query, Format::of(spec.query).scale);
    let decoder = format!(
        "fn decode_query(oct: QueryOct) -> mat2x4<f32> {{\n    return {scale} * decode_{query}(oct);\n}}\n"
    );
    let files = [&[decoder.as_str(), Format::of(query).decoder(false)], op].concat();
    compose_module(entry, variant, spec, consts, types, &files)
}

/// A kernel of a decode step: constants, how the output is written, the step's tables, the layer, the op.
fn compose_module(
    entry: &'static str,
    variant: &str,
    spec: &MlaDecode,
    consts: &[(&'static str, u32)],
    types: &[(&'static str, Const)],
    op: &[&str],
) -> Source {
    let mut all_types = vec![("QueryOct", Const::Alias(Format::of(spec.query).oct_type))];
    all_types.extend(types);
    let mut files = Format::of(spec.out).store.to_vec();
    files.extend([
        include_str!("../../../shaders/lib/tables.wgsl"),
        include_str!("../../../shaders/lib/layer.wgsl"),
        include_str!("../../../shaders/lib/row_end.wgsl"),
    ]);
    files.extend(op);
    unrolled(entry, variant, consts, &all_types, &files)
}
