//! `indexer_logits`: its variants in dispatch order, which of them runs where, and the WGSL of each.

mod coop;

use super::compose::{Const, Source};
use crate::base::dtype::Dtype;
use crate::gpu::caps::{Caps, DeviceKind};
use crate::gpu::kernels::formats::Format;
use crate::gpu::kernels::{GROUP, unrolled};
use crate::ops::IndexerLogits;
use crate::ops::indexer_logits::runs::Cut;
use crate::ops::variants::Variant;

/// A variant for a spec on a device.
pub(crate) struct Kernel {
    /// Best first; each with what it reads the cache by, in bytes: the first whose unit divides the place of every page is used.
    pub(crate) sources: Vec<(Source, u64)>,
    pub(crate) cut: Cut,
}

/// In dispatch order; the last runs everywhere.
pub(crate) const VARIANTS: [Variant<Caps, IndexerLogits, Kernel>; 2] = [
    Variant::new("coop", coop::kernel).on_tensor_cores().not_by_default(|caps, _| match caps.kind {
        DeviceKind::Software => Err("a software device only imitates matrices".into()),
        _ => Ok(()),
    }),
    Variant::new("shared", |caps, spec| Ok(shared(caps, spec))),
];

/// How a kernel reads the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unit {
    /// Octs of elements that are no codes.
    Octs,
    /// Four words of codes.
    Quads,
    /// A word of codes.
    Words,
}

impl Unit {
    /// Its bytes, for keys of a dtype.
    const fn bytes(self, key: Dtype) -> u32 {
        match self {
            Self::Octs => 8 * key.bytes() as u32,
            Self::Quads => 16,
            Self::Words => 4,
        }
    }

    const fn lib(self) -> &'static str {
        match self {
            Self::Octs => include_str!("../../../shaders/lib/index_key_plain.wgsl"),
            Self::Quads => include_str!("../../../shaders/lib/index_key_quads.wgsl"),
            Self::Words => include_str!("../../../shaders/lib/index_key_words.wgsl"),
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Octs => "octs",
            Self::Quads => "quads",
            Self::Words => "words",
        }
    }
}

/// Keys of a block of `shared`, and threads that divide heads, or keys, among them.
const KEYS: u32 = 128;
const SIDE: u32 = 16;

fn shared(caps: &Caps, spec: &IndexerLogits) -> Kernel {
    let unit = if spec.key().is_fp8() { Unit::Words } else { Unit::Octs };
    let thread_heads = spec.num_heads.div_ceil(SIDE);
    let rows = SIDE * thread_heads;
    let consts = [
        ("GROUP", GROUP),
        ("KEYS", KEYS),
        ("THREAD_HEADS", thread_heads),
        ("ROWS", rows),
        ("ACC", KEYS / SIDE * thread_heads),
        // Quads of a row's slice of 16 columns, and one against bank conflicts.
        ("Q_TILE", rows * 5),
    ];
    let scales = [spec.key(), spec.query].map(|dtype| Format::of(dtype).scale.to_owned());
    let decoders = format!(
        "fn decode_key(oct: KeyOct) -> mat2x4<f32> {{\n    return decode_{}(oct);\n}}\n\
         fn decode_query(oct: QOct) -> mat2x4<f32> {{\n    return decode_{}(oct);\n}}\n",
        Format::of(spec.key()).finite,
        Format::of(spec.query).finite,
    );
    let body = include_str!("../../../shaders/indexer_logits.wgsl");
    let source = module("shared", caps, spec, unit, &consts, &[], &scales, &[&decoders, body]);
    let target = match caps.kind {
        DeviceKind::Software => 16,
        DeviceKind::Integrated => 64,
        _ => 528,
    };
    Kernel { sources: vec![(source, unit.bytes(spec.key()).into())], cut: Cut { block: KEYS, target } }
}

/// A module of a variant: the library, what a dtype takes, and the variant's own files. `units` are the factors of a decoded key and query.
#[allow(clippy::too_many_arguments)]
fn module(
    variant: &str,
    caps: &Caps,
    spec: &IndexerLogits,
    unit: Unit,
    consts: &[(&'static str, u32)],
    aliases: &[(&'static str, Const)],
    units: &[String; 2],
    files: &[&str],
) -> Source {
    let (key, query) = (spec.key(), spec.query);
    let of_unit = |bytes: u32| if unit == Unit::Octs { 1 } else { bytes / 4 };
    let mut consts = consts.to_vec();
    consts.extend([
        ("HEADS", spec.num_heads),
        ("PAGE_SIZE", spec.index.page_size),
        ("KEY_UNITS", 128 * key.bytes() as u32 / unit.bytes(key)),
        ("UNIT_WORDS", of_unit(unit.bytes(key))),
    ]);
    let octs = |dtype| Const::Alias(Format::of(dtype).oct_type);
    let mut all_aliases = aliases.to_vec();
    all_aliases.extend([("KeyOct", octs(key)), ("QOct", octs(query))]);
    let wrappers = format!(
        "const KEY_UNIT = {};\nconst QUERY_UNIT = {};\n\
         fn has_odd_key(oct: KeyOct) -> bool {{\n    return has_odd_{key}(oct);\n}}\n\
         fn has_odd_query(oct: QOct) -> bool {{\n    return has_odd_{query}(oct);\n}}\n\
         fn bits_of_key(oct: KeyOct, i: u32) -> u32 {{\n    return bits_of_{key}(oct, i);\n}}\n\
         fn bits_of_query(oct: QOct, i: u32) -> u32 {{\n    return bits_of_{query}(oct, i);\n}}\n",
        units[0], units[1],
    );
    let mut all = vec![wrappers.as_str()];
    for dtype in if key == query { vec![key] } else { vec![key, query] } {
        all.extend([Format::of(dtype).decoder(caps.f16_subnormals), Format::of(dtype).odd]);
    }
    all.extend([
        include_str!("../../../shaders/lib/indexer_logits.wgsl"),
        unit.lib(),
        include_str!("../../../shaders/lib/index_odd.wgsl"),
    ]);
    all.extend(files);
    let name = format!("{variant}{}.{}.k_{key}.q_{query}", spec.num_heads, unit.name());
    unrolled("indexer_logits", &name, &consts, &all_aliases, &all)
}

/// The kernels of the variant that runs everywhere.
#[cfg(test)]
pub(crate) fn every_source(samples: &[IndexerLogits]) -> Vec<Source> {
    samples.iter().flat_map(|spec| shared(&Caps::WEBGPU, spec).sources).map(|(source, _)| source).collect()
}
