//! The ladder of decode variants, which of them runs where, and the WGSL text of each. Pure.
//!
//! A pipeline's text is a prelude of constants followed by whole files: WGSL module scope has no order, so nothing
//! needs a preprocessor.

use crate::caps::{Caps, DeviceKind};
use crate::compose::{Const, Source, compose};
use crate::unroll::unroll;
use crate::{Dtype, Error, MlaShape, MlaSpec, Result, Tiling};

mod coop;
mod plain;
pub(crate) mod project;

use plain::{LANES, Tile};

/// One row of the ladder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Variant {
    /// Its name: in labels, logs and on command lines.
    pub name: &'static str,
    body: Body,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Body {
    /// `mla_decode.wgsl`, and how partial sums are joined.
    Plain(Sum),
    /// `mla_decode_coop.wgsl`, in 32 KiB of workgroup memory or in 48.
    Coop { small: bool },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sum {
    Subgroup,
    Shared,
}

/// The decode variants, best first. The last one runs everywhere.
pub const VARIANTS: [Variant; 4] = [
    Variant { name: "coop", body: Body::Coop { small: false } },
    Variant { name: "coop_small", body: Body::Coop { small: true } },
    Variant { name: "subgroup", body: Body::Plain(Sum::Subgroup) },
    Variant { name: "shared", body: Body::Plain(Sum::Shared) },
];

impl Variant {
    /// The variant of that name.
    pub fn named(name: &str) -> Option<Self> {
        VARIANTS.into_iter().find(|variant| variant.name == name)
    }

    /// Whether its split kernel declares the cache, the tables and the page list as if it wrote them: see `shaders/lib/pinned.wgsl`.
    pub(crate) const fn pins_loads(&self) -> bool {
        matches!(self.body, Body::Coop { .. })
    }

    /// What keeps this variant from running; `Ok` where nothing does.
    ///
    /// # Errors
    /// A sentence that names what is missing.
    pub fn runs_on(&self, caps: &Caps, spec: &MlaSpec) -> std::result::Result<(), String> {
        if self.body != Body::Plain(Sum::Shared) {
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
        if let Body::Coop { small } = self.body {
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
        match self.body {
            Body::Plain(sum) if Tile::balanced(sum, caps, spec, spec.shape.num_heads).is_none() => {
                Err("the device was made with less workgroup memory than WebGPU's default 16 KiB".into())
            }
            _ => Ok(()),
        }
    }

    /// What keeps this variant, where it runs, from being chosen unless it is forced.
    fn pays_on(&self, caps: &Caps) -> std::result::Result<(), String> {
        match (self.body, caps.kind) {
            // Mesa 26.1's lavapipe: half as fast as `subgroup`, and half a minute of compiling.
            (Body::Coop { .. }, DeviceKind::Software) => {
                Err("a software device only imitates matrices".into())
            }
            _ => Ok(()),
        }
    }

    /// Whether it rounds the softmax weights to f16, as matrices do.
    pub const fn rounds_weights(&self) -> bool {
        matches!(self.body, Body::Coop { .. })
    }

    /// How this variant cuts work on a device; `None` where it does not run. `query_tokens` as for [`decode`].
    pub fn tiling(&self, caps: &Caps, spec: &MlaSpec, query_tokens: u32) -> Option<Tiling> {
        let rows = query_rows(spec, query_tokens);
        match self.body {
            Body::Coop { small } => {
                coop::CoopTile::for_device(small, caps, spec, rows).map(|tile| tile.tiling(caps))
            }
            Body::Plain(sum) => Tile::balanced(sum, caps, spec, rows).map(|tile| tile.tiling(caps)),
        }
    }
}

/// Storage buffers that a decode binds: q_nope, q_pe, kv, out, lse, tables, page list and the step's partial results.
const STORAGE_BUFFERS: u32 = 8;

/// The forced row, or the first that runs and pays, and a sentence about the choice.
///
/// # Errors
/// [`Error::VariantUnavailable`] where the forced row is unknown or cannot run, or where none can.
pub fn choose(forced: Option<&str>, caps: &Caps, spec: &MlaSpec) -> Result<(Variant, String)> {
    if let Some(name) = forced {
        let unavailable = |why| Error::VariantUnavailable { name: name.into(), why };
        let known = || format!("there is no such row; the rows are {}", VARIANTS.map(|v| v.name).join(", "));
        let variant = Variant::named(name).ok_or_else(|| unavailable(known()))?;
        variant.runs_on(caps, spec).map_err(unavailable)?;
        return Ok((variant, format!("row {name}, forced")));
    }
    let mut lacking = String::new();
    for variant in VARIANTS {
        match variant.runs_on(caps, spec).and_then(|()| variant.pays_on(caps)) {
            Ok(()) => return Ok((variant, format!("row {}{lacking}", variant.name))),
            Err(why) => lacking += &format!("; not {}: {why}", variant.name),
        }
    }
    Err(Error::VariantUnavailable { name: "any".into(), why: lacking })
}

/// Query rows of a sequence, which a tile is sized for: what shares a tile reads the cache once. More tokens than 64 fill
/// many tiles of any size.
fn query_rows(spec: &MlaSpec, query_tokens: u32) -> u32 {
    spec.shape.num_heads * query_tokens.clamp(1, 64)
}

/// The split kernel of a decode, `None` where the variant does not run. `clamp_pages` keeps page ids written on the
/// device inside the pool; `query_tokens` are those of a sequence, 0 or 1 for one, and size the tile.
pub fn decode(
    variant: &Variant,
    caps: &Caps,
    spec: &MlaSpec,
    query_tokens: u32,
    clamp_pages: bool,
) -> Option<Source> {
    let rows = query_rows(spec, query_tokens);
    let mut source = match variant.body {
        Body::Coop { small } => coop::decode(variant.name, small, caps, spec, rows)?,
        Body::Plain(sum) => {
            plain::decode(variant.name, sum, &Tile::balanced(sum, caps, spec, rows)?, caps, spec)
        }
    };
    source.text += &format!("\nconst CLAMP_PAGES = {clamp_pages};\n");
    Some(source)
}

const PINNED: &str = include_str!("../shaders/lib/pinned.wgsl");
/// What both bodies of the split ask of the tables.
const QUERY: &str = include_str!("../shaders/lib/query.wgsl");
const READ: &str = include_str!("../shaders/lib/read.wgsl");

/// How a workgroup of the merge is shaped: see the head of `shaders/mla_merge.wgsl`. Both shapes give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Merging {
    /// Many workgroups a row, whose threads share its partial results.
    FewRows,
    /// One workgroup a row.
    ManyRows,
}

impl Merging {
    /// Both.
    pub const ALL: [Self; 2] = [Self::FewRows, Self::ManyRows];
    /// Groups of partial results, each added up on its own.
    const GROUPS: u32 = 16;
    /// Partial results whose ends a workgroup holds.
    const CHUNK: u32 = 512;

    /// For so many rows: one workgroup each would leave an H200's 132 multiprocessors idle below 128.
    pub const fn of(rows: u64) -> Self {
        if rows <= 128 { Self::FewRows } else { Self::ManyRows }
    }

    /// Octs of columns that a workgroup takes.
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
    pub const fn parts(self, shape: &MlaShape) -> u32 {
        shape.kv_lora_rank / 8 / self.octs(shape)
    }

    /// The kernel that merges a row's partial results. It does not read the cache, but is bound with it, and a step has one
    /// layout.
    pub fn source(self, spec: &MlaSpec, pins_loads: bool) -> Source {
        let files = [if pins_loads { PINNED } else { READ }, include_str!("../shaders/mla_merge.wgsl")];
        // Partial results on their way to a thread.
        let batch = match self {
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

fn dtypes(spec: &MlaSpec) -> String {
    format!("q_{}.kv_{}.out_{}", spec.query, spec.kv.dtype, spec.out)
}

fn shape_consts(spec: &MlaSpec) -> Vec<(&'static str, u32)> {
    vec![
        ("LATENT_OCTS", spec.shape.kv_lora_rank / 8),
        ("ROPE_OCTS", spec.shape.qk_rope_head_dim / 8),
        ("ROW_OCTS", spec.shape.row_elems() / 8),
    ]
}

/// A kernel of a decode step that reads queries as what they are, whatever factor their decoder leaves to others.
fn compose_step(
    entry: &'static str,
    variant: &str,
    spec: &MlaSpec,
    consts: &[(&'static str, u32)],
    types: &[(&'static str, Const)],
    op: &[&str],
) -> Source {
    let (query, scale) = (spec.query, scale(spec.query));
    let decoder = format!(
        "fn decode_query(oct: QueryOct) -> mat2x4<f32> {{\n    return {scale} * decode_{query}(oct);\n}}\n"
    );
    let files = [&[decoder.as_str(), oct_file(query, false)], op].concat();
    compose_module(entry, variant, spec, consts, types, &files)
}

/// A kernel of a decode step: constants, how the output is written, the step's tables, the layer, the op.
fn compose_module(
    entry: &'static str,
    variant: &str,
    spec: &MlaSpec,
    consts: &[(&'static str, u32)],
    types: &[(&'static str, Const)],
    op: &[&str],
) -> Source {
    let value = |name: &str| consts.iter().find(|(known, _)| *known == name).map(|&(_, value)| value);
    let mut prelude: Vec<_> = consts.iter().map(|&(name, value)| (name, Const::U32(value))).collect();
    prelude.push(("QueryOct", Const::Alias(oct_type(spec.query))));
    prelude.extend(types);
    let mut files = store_files(spec.out);
    files.extend([include_str!("../shaders/lib/tables.wgsl"), include_str!("../shaders/lib/layer.wgsl")]);
    files.extend(op);
    let mut source = compose(entry, variant, &prelude, &files);
    // A marked loop with an unknown bound would be left rolled, which is right and slow; a test walks all kernels.
    if let Ok(text) = unroll(&source.text, &value) {
        source.text = text;
    }

    source
}

/// How an output is rounded and stored. e4m3 is refused by [`MlaSpec::check`].
fn store_files(out: Dtype) -> Vec<&'static str> {
    match out {
        Dtype::F16 => {
            vec![include_str!("../shaders/lib/store_f16.wgsl"), include_str!("../shaders/lib/round.wgsl")]
        }
        Dtype::Bf16 => {
            vec![include_str!("../shaders/lib/store_bf16.wgsl"), include_str!("../shaders/lib/round.wgsl")]
        }
        Dtype::F32 | Dtype::E4m3 => vec![include_str!("../shaders/lib/store_f32.wgsl")],
    }
}

/// What a decoded element is to be multiplied by.
const fn scale(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::E4m3 => "SCALE_E4M3",
        Dtype::F32 | Dtype::F16 | Dtype::Bf16 => "1.0",
    }
}

const fn oct_type(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "OctF32",
        Dtype::F16 => "OctF16",
        Dtype::Bf16 => "OctBf16",
        Dtype::E4m3 => "OctE4m3",
    }
}

const fn oct_file(dtype: Dtype, f16_subnormals: bool) -> &'static str {
    match dtype {
        Dtype::F32 => include_str!("../shaders/lib/oct_f32.wgsl"),
        Dtype::F16 => include_str!("../shaders/lib/oct_f16.wgsl"),
        Dtype::Bf16 => include_str!("../shaders/lib/oct_bf16.wgsl"),
        Dtype::E4m3 if f16_subnormals => include_str!("../shaders/lib/oct_e4m3_f16.wgsl"),
        Dtype::E4m3 => include_str!("../shaders/lib/oct_e4m3.wgsl"),
    }
}

#[cfg(test)]
mod tests;
