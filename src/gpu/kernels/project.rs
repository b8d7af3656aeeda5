//! `head_project`: its variants in dispatch order, which of them runs where, and the WGSL of each.

use super::compose::{Const, Source};
use super::guard::guarded;
use crate::gpu::kernels::formats::{Format, Weights};

use super::{GROUP, MATRIX_DIRECTIVES, matrix_aliases, unrolled};
use crate::base::dtype::Dtype;
use crate::gpu::caps::{Caps, DeviceKind};
use crate::ops::variants::Variant;
use crate::ops::{HeadProject, WeightFormat, WeightOrder};

/// In dispatch order; the last runs everywhere. Each has a tile for few tokens and one for many.
pub(crate) const VARIANTS: [Variant<Caps, HeadProject, [Tile; 2]>; 3] = [
    Variant::new("coop", Coop::pair).on_tensor_cores().not_by_default(|caps, _| match caps.kind {
        DeviceKind::Software => Err("a software device only imitates matrices".into()),
        _ => Ok(()),
    }),
    Variant::new("direct", |_, _| Ok([Tile::Direct { rows: 1 }, Tile::Direct { rows: 4 }])).not_by_default(
        |caps, _| match caps.kind {
            DeviceKind::Software => Ok(()),
            _ => Err("it is for the few lanes of a software device".into()),
        },
    ),
    Variant::new("plain", |_, _| Ok([Tile::Plain { rows: 1 }, Tile::Plain { rows: 4 }])),
];

/// A variant's tile for a spec and a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tile {
    /// `head_project.wgsl`, with `rows` tokens a thread.
    Plain { rows: u32 },
    /// `head_project_direct.wgsl`, with `rows` tokens a thread.
    Direct { rows: u32 },
    /// `head_project_coop.wgsl`.
    Coop(Coop),
}

/// The tile of a workgroup on cooperative matrices (tensor cores): see the head of `shaders/head_project_coop.wgsl`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Coop {
    /// Side of a cooperative matrix.
    side: u32,
    subgroup: u32,
    tokens: u32,
    columns: u32,
    chunk: u32,
    row_split: u32,
    column_split: u32,
    k_split: u32,
}

/// Tokens and columns of the tiles of `coop`. The first reads the fewest bytes, and is used where its workgroups fill a card; the second
/// where they do not; the last where neither divides the columns.
const SHAPES: [[u32; 2]; 3] = [[64, 64], [32, 32], [64, 16]];
/// The bindings of all variants.
const PARAMS: &str = include_str!("../../../shaders/lib/project.wgsl");
/// Threads of a workgroup of `direct`: lavapipe's lanes.
pub(crate) const DIRECT_GROUP: u32 = 8;
/// Workgroups that fill a device: about one for each of an H200's 132 multiprocessors.
pub(crate) const TARGET_GROUPS: u32 = 128;
/// The most registers of x and weights of a thread on a card, in words.
const MOST_WORDS: u32 = 144;

impl Tile {
    /// Tokens of a workgroup.
    pub(crate) const fn tokens(&self) -> u32 {
        match self {
            Self::Plain { rows } => 16 * *rows,
            Self::Direct { rows } => *rows,
            Self::Coop(tile) => tile.tokens,
        }
    }

    /// Workgroups for a head's columns.
    pub(crate) const fn column_groups(&self, spec: &HeadProject) -> u32 {
        match self {
            Self::Plain { .. } => spec.n.div_ceil(64),
            Self::Direct { .. } => direct_parts(spec).div_ceil(DIRECT_GROUP),
            Self::Coop(tile) => spec.n / tile.columns,
        }
    }

    /// Its WGSL.
    pub(crate) fn source(&self, caps: &Caps, spec: &HeadProject) -> Source {
        match self {
            Self::Plain { rows } => plain(*rows, spec),
            Self::Direct { rows } => direct(*rows, spec),
            Self::Coop(tile) => tile.source(caps, spec),
        }
    }
}

impl Coop {
    /// Tiles for few tokens and for many; they may be the same.
    fn pair(caps: &Caps, spec: &HeadProject) -> Result<[Tile; 2], String> {
        super::matrices(caps)?;
        if !(caps.shader_f16 && caps.subgroups) {
            return Err("the device was made without Features::SHADER_F16 or SUBGROUP".into());
        }
        if caps.min_subgroup_size != caps.max_subgroup_size {
            let (min, max) = (caps.min_subgroup_size, caps.max_subgroup_size);
            return Err(format!("subgroups vary from {min} to {max} lanes, and subgroups own tiles here"));
        }
        match spec.weight {
            WeightFormat::Elements(Dtype::F32) => return Err("f32 weights do not fit f16 matrices".into()),
            WeightFormat::Q8_0 => {
                return Err("f16 does not hold the products of Q8_0 codes and their scales".into());
            }
            WeightFormat::Elements(_) => {}
        }
        let [wide, square, narrow] = SHAPES.map(|shape| Self::of(shape, caps, spec));
        let many = wide.or(square).or(narrow);
        let groups = |tile: &Self| spec.num_heads * (spec.n / tile.columns);
        let few = wide.filter(|tile| groups(tile) >= TARGET_GROUPS).or(square).or(many);
        match (few, many) {
            (Some(few), Some(many)) => Ok([Self::into(few), Self::into(many)]),
            _ => Err(format!("no tile of k {} and n {} fits the device", spec.k, spec.n)),
        }
    }

    fn into(self) -> Tile {
        Tile::Coop(self)
    }

    /// A tile of so many tokens and columns, where it fits: with the longest chunk.
    fn of([tokens, columns]: [u32; 2], caps: &Caps, spec: &HeadProject) -> Option<Self> {
        let (side, subgroup) = (caps.cooperative_tile, caps.max_subgroup_size);
        // The second of each has fewer threads, where the device or the chunk has no room for more.
        let splits: &[[u32; 3]] = match columns {
            16 => &[[4, 1, 2], [4, 1, 1]],
            32 => &[[2, 2, 2], [2, 2, 1]],
            _ => &[[4, 2, 1], [4, 1, 1]],
        };
        let tile = |[row_split, column_split, k_split]: [u32; 3], chunk: u32| {
            let tile = Self { side, subgroup, tokens, columns, chunk, row_split, column_split, k_split };
            tile.fits(caps, spec).then_some(tile)
        };
        splits.iter().find_map(|&splits| (1..=spec.k / side).find_map(|parts| tile(splits, spec.k / parts)))
    }

    /// Whether the tile divides the work evenly, and the device has room for it.
    fn fits(&self, caps: &Caps, spec: &HeadProject) -> bool {
        let threads = self.threads();
        threads <= caps.max_invocations
            && threads.is_multiple_of(self.tokens)
            && spec.n.is_multiple_of(self.columns)
            && spec.k.is_multiple_of(self.chunk)
            && self.chunk.is_multiple_of(self.side * self.k_split)
            && (self.chunk / 8).is_multiple_of(self.row_lanes().max(1))
            && (self.chunk * self.columns / 8).is_multiple_of(threads)
            && self.workgroup_bytes(spec) <= caps.workgroup_memory_bytes
            // A software device keeps such arrays in memory.
            && (caps.kind == DeviceKind::Software || self.words(spec) <= MOST_WORDS)
    }

    const fn threads(&self) -> u32 {
        self.row_split * self.column_split * self.k_split * self.subgroup
    }

    const fn row_lanes(&self) -> u32 {
        self.threads() / self.tokens
    }

    /// Registers of x and weights of a thread, in words.
    const fn words(&self, spec: &HeadProject) -> u32 {
        let oct_words = 2 * spec.input.bytes() as u32;
        let weight_words = spec.weight.bytes_of(8) as u32 / 4;
        spec.k / 8 / self.row_lanes() * oct_words + spec.k * self.columns / 8 / self.threads() * weight_words
    }

    /// Octs (8 consecutive elements) from one staged row to the next: odd, so that matrix loads have no bank conflicts.
    const fn x_pitch(&self) -> u32 {
        (self.chunk / 8) | 1
    }

    const fn w_pitch(&self, spec: &HeadProject) -> u32 {
        match spec.order {
            WeightOrder::Kn => (self.columns / 8) | 1,
            WeightOrder::Nk => (self.chunk / 8) | 1,
        }
    }

    const fn w_rows(&self, spec: &HeadProject) -> u32 {
        match spec.order {
            WeightOrder::Kn => self.chunk,
            WeightOrder::Nk => self.columns,
        }
    }

    /// Floats from one row of sums to the next.
    const fn sum_pitch(&self) -> u32 {
        self.columns + 4
    }

    const fn workgroup_bytes(&self, spec: &HeadProject) -> u32 {
        let octs = Format::of(spec.input).matrix_parts * self.tokens * self.x_pitch()
            + self.w_rows(spec) * self.w_pitch(spec);
        octs * 16 + self.k_split * self.tokens * self.sum_pitch() * 4 + self.tokens * 4 + 64
    }

    fn source(&self, caps: &Caps, spec: &HeadProject) -> Source {
        let weights = Weights::of(spec.weight);
        let mut aliases = matrix_aliases(self.side).to_vec();
        aliases.extend(bound(spec));
        let decoders = format!(
            "fn top_x(oct: XOct) -> u32 {{\n    return top_{x}(oct);\n}}\n\
             fn half_x(oct: XOct, part: u32, factor: f32) -> HalfOct {{\n    return part_{x}(oct, part, factor);\n}}\n\
             fn top_w(oct: WOct) -> u32 {{\n    return top_{w}(oct);\n}}\n\
             fn half_w(oct: WOct, part: u32, factor: f32) -> HalfOct {{\n    return part_{w}(oct, part, factor);\n}}\n",
            x = spec.input,
            w = spec.weight,
        );
        // Software devices have few lanes, so long loops, and keep arrays in memory anyway: unrolled, the kernels compile for a minute.
        let marker = if caps.kind == DeviceKind::Software { "" } else { "// unroll" };
        let body =
            include_str!("../../../shaders/head_project_coop.wgsl").replace("// unroll on cards", marker);
        let mut files = vec![
            include_str!("../../../shaders/lib/half_oct.wgsl"),
            decoders.as_str(),
            Format::of(spec.input).decoder(false),
            Format::of(spec.input).matrix_part,
        ];
        if let Some(dtype) = other_dtype(spec) {
            // Tensor cores keep subnormals of f16.
            files.extend([Format::of(dtype).decoder(true), Format::of(dtype).matrix_part]);
        }
        files.extend(Format::of(spec.output).store);
        if spec.output == Dtype::F32 {
            files.push(include_str!("../../../shaders/lib/round.wgsl"));
        }
        files.extend([PARAMS, weights.factor, &body]);
        let source = module("coop", self.columns, spec, &self.consts(spec), &aliases, &files);
        Source { text: format!("{MATRIX_DIRECTIVES}{}", source.text), ..source }
    }

    fn consts(&self, spec: &HeadProject) -> Vec<(&'static str, u32)> {
        let (threads, row_lanes) = (self.threads(), self.row_lanes());
        let row_tiles = self.tokens / self.side / self.row_split;
        let column_tiles = self.columns / self.side / self.column_split;
        let parts = Format::of(spec.input).matrix_parts;
        // Weights that are f16, or codes, are used as they are; bf16 ones are scaled by a guess, and once more where it does not fit them.
        let is_scaled = !Weights::of(spec.weight).are_halves;
        let [attempts, guess] = if is_scaled { [2, 127 + 14] } else { [1, 127] };
        vec![
            ("TILE", self.side),
            ("TILE_OCTS", self.side / 8),
            ("SUBGROUP", self.subgroup),
            ("SUBGROUPS", threads / self.subgroup),
            ("THREADS", threads),
            ("TOKENS", self.tokens),
            ("COLUMNS", self.columns),
            ("COLUMN_OCTS", self.columns / 8),
            ("CHUNK", self.chunk),
            ("CHUNK_OCTS", self.chunk / 8),
            ("CHUNKS", spec.k / self.chunk),
            ("COLUMN_SPLIT", self.column_split),
            ("K_SPLIT", self.k_split),
            ("ROW_TILES", row_tiles),
            ("COLUMN_TILES", column_tiles),
            ("SHARE_TILES", self.chunk / self.side / self.k_split),
            ("ACC_TILES", row_tiles * column_tiles),
            ("X_PARTS", parts),
            ("X_ROWS", parts * row_tiles),
            ("X_PITCH", self.x_pitch()),
            ("X_TILE", parts * self.tokens * self.x_pitch()),
            ("X_SCALED", (spec.input != Dtype::F16).into()),
            ("X_LOADS", spec.k / 8 / row_lanes),
            ("CHUNK_X_LOADS", self.chunk / 8 / row_lanes),
            ("ROW_LANES", row_lanes),
            ("W_PITCH", self.w_pitch(spec)),
            ("W_TILE", self.w_rows(spec) * self.w_pitch(spec)),
            ("W_SCALED", is_scaled.into()),
            ("W_LOADS", spec.k * self.columns / 8 / threads),
            ("CHUNK_W_LOADS", self.chunk * self.columns / 8 / threads),
            ("K_FIRST", (spec.order == WeightOrder::Kn).into()),
            ("SUM_QUADS", self.sum_pitch() / 4),
            ("SHARE_QUADS", self.tokens * self.sum_pitch() / 4),
            ("SUMS", self.k_split * self.tokens * self.sum_pitch() / 4),
            ("ATTEMPTS", attempts),
            ("GUESS", guess),
        ]
    }
}

fn plain(rows: u32, spec: &HeadProject) -> Source {
    let consts = [
        ("GROUP", GROUP),
        ("ROWS", rows),
        ("TOKENS", 16 * rows),
        ("K", spec.k),
        ("N_OCTS", spec.n / 8),
        ("K_FIRST", (spec.order == WeightOrder::Kn).into()),
    ];
    let body = include_str!("../../../shaders/head_project.wgsl");
    summed_in_f32("plain", 16 * rows, spec, &consts, body)
}

/// Threads of `direct` for a head's columns.
const fn direct_parts(spec: &HeadProject) -> u32 {
    match spec.order {
        WeightOrder::Kn => spec.n / 8,
        WeightOrder::Nk => spec.n / 4,
    }
}

fn direct(rows: u32, spec: &HeadProject) -> Source {
    let consts = [
        ("GROUP", DIRECT_GROUP),
        ("ROWS", rows),
        ("K_OCTS", spec.k / 8),
        ("PARTS", direct_parts(spec)),
        ("K_FIRST", (spec.order == WeightOrder::Kn).into()),
    ];
    let body = include_str!("../../../shaders/head_project_direct.wgsl");
    summed_in_f32("direct", rows, spec, &consts, body)
}

/// The dtype of weights, where `x` has another.
fn other_dtype(spec: &HeadProject) -> Option<Dtype> {
    spec.weight.dtype().filter(|&dtype| dtype != spec.input)
}

/// What `x` and weights are bound as.
fn bound(spec: &HeadProject) -> [(&'static str, Const); 2] {
    [("XOct", Format::of(spec.input).oct_type), ("WOct", Weights::of(spec.weight).bound)]
        .map(|(name, bound)| (name, Const::Alias(bound)))
}

/// A kernel that reads octs of x and weights as f32.
fn summed_in_f32(
    variant: &str,
    tile: u32,
    spec: &HeadProject,
    consts: &[(&'static str, u32)],
    body: &str,
) -> Source {
    let weights = Weights::of(spec.weight);
    let mut decoders =
        format!("fn read_x(oct: XOct) -> mat2x4<f32> {{\n    return decode_{}(oct);\n}}\n", spec.input);
    if let Some(dtype) = spec.weight.dtype() {
        let of_weights =
            format!("fn decode_w(oct: WOct) -> mat2x4<f32> {{\n    return decode_{dtype}(oct);\n}}\n");
        decoders.push_str(&of_weights);
    }
    let mut files = vec![decoders.as_str(), Format::of(spec.input).decoder(false)];
    files.extend(other_dtype(spec).map(|dtype| Format::of(dtype).decoder(false)));
    files.extend([
        include_str!("../../../shaders/lib/round.wgsl"),
        Format::of(spec.output).out,
        PARAMS,
        weights.reader,
        weights.factor,
        body,
    ]);
    let aliases = bound(spec);
    module(variant, tile, spec, consts, &aliases, &files)
}

fn module(
    variant: &str,
    tile: u32,
    spec: &HeadProject,
    consts: &[(&'static str, u32)],
    aliases: &[(&'static str, Const)],
    files: &[&str],
) -> Source {
    let order = match spec.order {
        WeightOrder::Kn => "kn",
        WeightOrder::Nk => "nk",
    };
    let name = format!("{variant}{tile}.{order}.x_{}.w_{}.y_{}", spec.input, spec.weight, spec.output);
    let buffers = if spec.weight.has_scales() { 4 } else { 3 };
    guarded(files, buffers, spec.guard, &[], &name, |files, name| {
        unrolled("head_project", name, consts, aliases, files)
    })
}
