//! `mla_prefill`: its variants in dispatch order, which of them runs where, and the WGSL of each.

mod coop;
mod plain;

use super::compose::Source;
use crate::gpu::caps::{Caps, DeviceKind};
use crate::ops::MlaPrefill;
use crate::ops::variants::Variant;

/// What a prefill is asked for: its spec, and the most query tokens of a sequence; 0 for any number.
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
    Variant::new("coop", coop::kernel).rounding_weights().unless(slow).costing(|_, _| 1),
    Variant::new("coop_small", coop::small_kernel).rounding_weights().unless(slow).costing(|_, _| 1),
    Variant::new("coop_few", coop::few_kernel)
        .rounding_weights()
        .unless(slow)
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

/// The specs that tests compile.
#[cfg(test)]
fn specs() -> Vec<MlaPrefill> {
    use crate::Dtype;
    let dtypes = [Dtype::F32, Dtype::F16, Dtype::Bf16];
    let dims = [[128, 64, 128], [192, 64, 256], [64, 32, 64], [16, 32, 16], [24, 0, 72]];
    let spec = |[p, r, v]: [u32; 3], dtype, out| MlaPrefill {
        num_heads: 16,
        qk_nope_head_dim: p,
        qk_rope_head_dim: r,
        v_head_dim: v,
        dtype,
        out,
    };
    let pairs = dtypes.iter().flat_map(|&dtype| dtypes.iter().map(move |&out| (dtype, out)));
    let pairs: Vec<_> = pairs.collect();
    dims.iter().flat_map(|&dims| pairs.iter().map(move |&(dtype, out)| spec(dims, dtype, out))).collect()
}

/// The kernels of the variant that runs everywhere.
#[cfg(test)]
pub(crate) fn every_source() -> Vec<Source> {
    specs()
        .into_iter()
        .filter_map(|spec| plain::kernel(&Caps::WEBGPU, &(spec, 0)).ok())
        .map(|k| k.source)
        .collect()
}
