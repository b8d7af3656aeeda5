//! `mla_prefill`: its variants in dispatch order, which of them runs where, and the WGSL of each.

mod coop;
mod plain;

use super::compose::Source;
use crate::gpu::caps::{Caps, DeviceKind};
use crate::ops::MlaPrefill;
use crate::ops::variants::Variant;

/// The request for a prefill's kernel: its spec, and the most query tokens of a sequence, 0 for any number.
pub(crate) type Request = (MlaPrefill, u32);

/// A variant for a request on a device.
pub(crate) struct Kernel {
    pub(crate) source: Source,
    /// Query rows of a tile.
    pub(crate) rows: u32,
    /// Elements that queries, keys and values are read by.
    pub(crate) unit: u32,
    /// Whether it declares them read_write, to keep its prefetches: see `shaders/lib/prefill_pinned.wgsl`.
    pub(crate) pins_loads: bool,
}

/// The most query tokens of a sequence for which `coop_few` is best.
const FEW: u32 = 64;

/// In dispatch order; the last runs everywhere.
pub(crate) const VARIANTS: [Variant<Caps, Request, Kernel>; 4] = [
    Variant::new("coop", coop::kernel)
        .rounding_weights()
        .on_tensor_cores()
        .not_by_default(slow)
        .costing(|_, _| 1),
    Variant::new("coop_small", coop::small_kernel)
        .rounding_weights()
        .on_tensor_cores()
        .not_by_default(slow)
        .costing(|_, _| 1),
    Variant::new("coop_few", coop::few_kernel)
        .rounding_weights()
        .on_tensor_cores()
        .not_by_default(slow)
        .costing(|(_, query_tokens), _| if (1..=FEW).contains(query_tokens) { 0 } else { 2 }),
    Variant::new("shared", plain::kernel).costing(|_, _| 3),
];

fn slow(caps: &Caps, _: &Request) -> Result<(), String> {
    if caps.kind == DeviceKind::Software {
        Err("a software device only imitates matrices".into())
    } else {
        Ok(())
    }
}

/// The kernels of the variant that runs everywhere.
#[cfg(test)]
pub(crate) fn every_source(samples: &[MlaPrefill]) -> Vec<Source> {
    samples
        .iter()
        .filter_map(|&spec| plain::kernel(&Caps::WEBGPU, &(spec, 0)).ok())
        .map(|k| k.source)
        .collect()
}
