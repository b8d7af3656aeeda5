//! The kernels of the CPU, for each instruction set, in dispatch order.

pub(super) mod attend;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub(super) mod formats;
pub(super) mod lanes;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod neon;
pub(super) mod tile;

use std::ops::Range;

use lanes::Plain;
use tile::Tile;

use crate::base::dtype::Dtype;
use crate::ops::variants::Variant;

/// [`attend::attend`] of an instruction set.
type Attend = unsafe fn(&mut Tile<'_>, Range<usize>, usize, f32, &[&[u8]]);

/// The same kernels for one instruction set.
#[derive(Debug, Clone, Copy)]
pub struct Kernels {
    /// Safe to call where the processor has the instructions.
    pub(super) attend: Attend,
    /// [`formats::widen`], with the same condition.
    pub(super) widen: unsafe fn(Dtype, &[u8], &mut [f32]),
}

/// In dispatch order; the last runs everywhere. A variant is only built where the processor has its instructions.
pub(super) static VARIANTS: &[Variant<(), (), Kernels>] = &[
    #[cfg(target_arch = "x86_64")]
    Variant::new("avx512", |(), ()| {
        where_it_runs(avx512::runs_here(), Kernels { attend: avx512::attend, widen: avx512::widen })
    }),
    #[cfg(target_arch = "x86_64")]
    Variant::new("avx2", |(), ()| {
        where_it_runs(avx2::runs_here(), Kernels { attend: avx2::attend, widen: avx2::widen })
    }),
    #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
    Variant::new("neon", |(), ()| {
        where_it_runs(neon::runs_here(), Kernels { attend: neon::attend, widen: neon::widen })
    }),
    Variant::new("portable", |(), ()| {
        Ok(Kernels { attend: attend::attend::<Plain, 4, 4, 4, 4>, widen: formats::widen })
    }),
];

#[cfg(any(target_arch = "x86_64", all(target_arch = "aarch64", target_endian = "little")))]
fn where_it_runs(runs_here: bool, kernels: Kernels) -> Result<Kernels, String> {
    if runs_here { Ok(kernels) } else { Err("the processor lacks its instructions".into()) }
}
