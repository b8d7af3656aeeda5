//! What WGSL kernels need from a dtype, a table with a row for each, and from a layout of a token. No other file of this backend matches on
//! either. Pure.
//!
//! A file is a part of a kernel's text. Where an op's spec refuses a dtype, its row has an empty one; tests compile all others.

use crate::base::dtype::Dtype;
use crate::cache::{KvLayout, KvSpec, MlaShape, Scales, TokenLayout};
use crate::ops::WeightFormat;

/// A row of the table.
pub(crate) struct Format {
    /// The type of an oct (8 consecutive elements), as kernels bind it.
    pub(crate) oct_type: &'static str,
    /// `decode_DTYPE`: an oct as f32, without the scale.
    pub(crate) oct: &'static str,
    /// The same, for devices that keep subnormals of f16.
    pub(crate) oct_by_f16: &'static str,
    /// The name, without `decode_`, of the decoder that may lose NaN.
    pub(crate) finite: &'static str,
    /// The factor by which a decoded element must still be multiplied.
    pub(crate) scale: &'static str,
    /// How an element is read.
    pub(crate) element: &'static str,
    /// How a quad (4 consecutive elements) is read.
    pub(crate) quad: &'static str,
    /// The type of a quad that is rotated, and the file that reads and rounds it.
    pub(crate) rotated: (&'static str, &'static str),
    /// How an output is rounded and written by words.
    pub(crate) out: &'static str,
    /// How a decode's output, or that of a projection on matrices, is rounded and stored; codes are a projection's only.
    pub(crate) store: &'static [&'static str],
    /// How 16 bytes of both sides of a merge are weighted and added.
    pub(crate) merge: &'static str,
    /// What copies of a dtype move as a unit: 4 elements, and their name.
    pub(crate) copied: (&'static str, &'static str),
    /// How octs become f16 for matrices: keys of a decode, of a prefill, and `x` or weights of a projection.
    pub(crate) matrix_key: Option<&'static str>,
    pub(crate) matrix_half: Option<&'static str>,
    pub(crate) matrix_part: &'static str,
    /// Matrices of f16 that hold a query or `x` exactly.
    pub(crate) matrix_parts: u32,
    /// How elements of index keys and queries that are not finite are found.
    pub(crate) odd: &'static str,
    /// How octs of index keys and queries become f16, where f16 holds all of them.
    pub(crate) halves: Option<&'static str>,
}

/// A file of `shaders/lib`, or several behind each other.
macro_rules! lib {
    ($first:literal $(, $more:literal)*) => {
        concat!(include_str!(concat!("../../../shaders/lib/", $first, ".wgsl")) $(, "\n", include_str!(concat!("../../../shaders/lib/", $more, ".wgsl")))*)
    };
}

static F32: Format = Format {
    oct_type: "OctF32",
    oct: lib!("oct_f32"),
    oct_by_f16: lib!("oct_f32"),
    finite: "f32",
    scale: "1.0",
    element: lib!("in_f32"),
    quad: lib!("quad_f32"),
    rotated: ("QuadF32", lib!("round_quad_f32")),
    out: lib!("out_f32"),
    store: &[lib!("store_f32")],
    merge: lib!("merge_f32"),
    copied: ("vec4<u32>", "quads"),
    matrix_key: None,
    matrix_half: None,
    matrix_part: lib!("part_f32"),
    matrix_parts: 2,
    odd: lib!("index_odd_f32"),
    halves: None,
};

static F16: Format = Format {
    oct_type: "OctF16",
    oct: lib!("oct_f16"),
    oct_by_f16: lib!("oct_f16"),
    finite: "f16",
    scale: "1.0",
    element: lib!("in_f16"),
    quad: lib!("quad_f16"),
    rotated: ("QuadF16", lib!("round_quad_f16")),
    out: lib!("out_f16"),
    store: &[lib!("store_f16"), lib!("round")],
    merge: lib!("merge_f16"),
    copied: ("vec2<u32>", "pairs"),
    matrix_key: Some(lib!("key_f16")),
    matrix_half: Some(lib!("prefill_half_f16")),
    matrix_part: lib!("part_f16"),
    matrix_parts: 1,
    odd: lib!("index_odd_f16"),
    halves: Some(lib!("index_halves_f16")),
};

static BF16: Format = Format {
    oct_type: "OctBf16",
    oct: lib!("oct_bf16"),
    oct_by_f16: lib!("oct_bf16"),
    finite: "bf16",
    scale: "1.0",
    element: lib!("in_bf16"),
    quad: lib!("quad_bf16"),
    rotated: ("QuadBf16", lib!("round_quad_bf16")),
    out: lib!("out_bf16"),
    store: &[lib!("store_bf16"), lib!("round")],
    merge: lib!("merge_bf16"),
    copied: ("vec2<u32>", "pairs"),
    matrix_key: Some(lib!("key_bf16")),
    matrix_half: Some(lib!("oct_bf16", "prefill_half_bf16")),
    matrix_part: lib!("part_bf16"),
    matrix_parts: 1,
    odd: lib!("index_odd_bf16"),
    halves: None,
};

static E4M3: Format = Format {
    oct_type: "OctE4m3",
    oct: lib!("oct_e4m3"),
    oct_by_f16: lib!("oct_e4m3_f16"),
    finite: "finite_e4m3",
    scale: "SCALE_E4M3",
    element: lib!("in_e4m3"),
    quad: "",
    rotated: ("", ""),
    out: lib!("code_e4m3", "out_e4m3"),
    store: &[lib!("store_e4m3"), lib!("code_e4m3"), lib!("round")],
    merge: "",
    copied: ("u32", "words"),
    matrix_key: Some(lib!("key_e4m3")),
    matrix_half: None,
    matrix_part: lib!("part_e4m3"),
    matrix_parts: 1,
    odd: lib!("index_odd_e4m3"),
    halves: Some(lib!("index_halves_e4m3")),
};

/// How a projection reads its weights.
pub(crate) struct Weights {
    /// The type of what is bound: an oct, or a word.
    pub(crate) bound: &'static str,
    /// Offsets and strides that shaders count as one: elements of an oct, or bytes of a half word.
    pub(crate) unit: u64,
    /// `read_w`, and what it calls besides the decoder of the dtype: an oct of a row as f32.
    pub(crate) reader: &'static str,
    /// `head_factor`: by what a head's sums are multiplied.
    pub(crate) factor: &'static str,
    /// Whether f16 holds the elements that a matrix is made of, so that they need no scale there.
    pub(crate) are_halves: bool,
}

const ELEMENTS: Weights = Weights {
    bound: "",
    unit: 8,
    reader: lib!("weight_octs"),
    factor: lib!("weight_no_scale"),
    are_halves: false,
};

const Q8_0: Weights = Weights { bound: "u32", unit: 2, reader: lib!("weight_q8_0"), ..ELEMENTS };

impl Weights {
    pub(crate) const fn of(format: WeightFormat) -> Self {
        match format {
            WeightFormat::Q8_0 => Q8_0,
            WeightFormat::Elements(dtype) => Self {
                bound: Format::of(dtype).oct_type,
                factor: if dtype.is_fp8() { lib!("weight_scale") } else { ELEMENTS.factor },
                are_halves: matches!(dtype, Dtype::F16 | Dtype::E4m3),
                ..ELEMENTS
            },
        }
    }
}

/// How a decode reads the tokens of a cache.
pub(crate) struct CacheFormat {
    /// Its elements in f32.
    pub(crate) elements: &'static str,
    /// What the matrices ask of it, behind `matrix_key` of its dtype, and what they do with it.
    pub(crate) matrix: &'static str,
    pub(crate) attend: &'static str,
    /// Whether tokens are records, with codes and scales of their own.
    pub(crate) has_scales: bool,
}

static PLAIN: CacheFormat = CacheFormat {
    elements: lib!("cache_plain"),
    matrix: lib!("key_plain"),
    attend: lib!("attend_plain"),
    has_scales: false,
};

static RECORD: CacheFormat = CacheFormat {
    elements: lib!("cache_record"),
    matrix: lib!("key_record"),
    attend: lib!("attend_record"),
    has_scales: true,
};

impl CacheFormat {
    pub(crate) const fn of(layout: KvLayout) -> &'static Self {
        match layout {
            // No attention reads index keys: `KvLayout::check` refuses them.
            KvLayout::Plain(_) | KvLayout::Index(_) => &PLAIN,
            KvLayout::Ds656 | KvLayout::Ds528 => &RECORD,
        }
    }
}

impl Format {
    pub(crate) const fn of(dtype: Dtype) -> &'static Self {
        match dtype {
            Dtype::F32 => &F32,
            Dtype::F16 => &F16,
            Dtype::Bf16 => &BF16,
            Dtype::E4m3 => &E4M3,
        }
    }

    /// How octs are decoded, on a device that keeps subnormals of f16 or not.
    pub(crate) const fn decoder(&self, f16_subnormals: bool) -> &'static str {
        if f16_subnormals { self.oct_by_f16 } else { self.oct }
    }
}

/// How a kernel finds the parts of a token that has scales of its own.
pub(crate) struct Record {
    /// The file of the layout.
    pub(crate) lib: &'static str,
    /// The constants that the file names.
    pub(crate) consts: [(&'static str, u32); 4],
    /// Codes that share a scale.
    pub(crate) group: u32,
}

impl Record {
    /// `None` for a token of elements of one dtype.
    pub(crate) fn of(layout: KvLayout, token: &TokenLayout) -> Option<Self> {
        let lib = match layout {
            KvLayout::Plain(_) | KvLayout::Index(_) => return None,
            KvLayout::Ds656 | KvLayout::Ds528 => lib!("record"),
        };
        let Scales::Groups { of, at } = token.scales else { return None };
        let words = |bytes: u64| (bytes / 4) as u32;
        let consts = [
            ("RECORD_WORDS", words(token.bytes)),
            ("RECORD_SCALES", words(at)),
            ("RECORD_ROPE", words(token.rope.at)),
            ("RECORD_GROUP", of),
        ];
        Some(Self { lib, consts, group: of })
    }
}

/// `SLOT_QUADS`: quads (4 latent elements) from a token of the cache to the next.
pub(crate) const fn slot_quads(kv: &KvSpec, shape: &MlaShape) -> u32 {
    (kv.token(shape).bytes / (4 * kv.dtype().bytes() as u64)) as u32
}
