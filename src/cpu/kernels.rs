//! The kernels of the CPU, for each instruction set, in dispatch order.

pub(super) mod attend;
#[cfg(target_arch = "x86_64")]
mod avx2;
mod lanes;
pub(super) mod widen;

use std::ops::Range;

use attend::Tile;
use lanes::Plain;

use crate::Dtype;
use crate::ops::variants::Variant;

/// The same kernels for one instruction set.
#[derive(Debug, Clone, Copy)]
pub struct Kernels {
    /// [`attend::attend`]; safe to call where the processor has the instructions.
    pub(super) attend: unsafe fn(&mut Tile<'_>, Range<usize>, usize, f32),
    /// [`widen::widen`]; likewise.
    pub(super) widen: unsafe fn(Dtype, &[u8], &mut [f32]),
}

/// In dispatch order; the last runs everywhere. A variant is only built where the processor has its instructions.
pub(super) static VARIANTS: &[Variant<(), (), Kernels>] = &[
    #[cfg(target_arch = "x86_64")]
    Variant::new("avx2", |(), ()| {
        if avx2::runs_here() {
            Ok(Kernels { attend: avx2::attend, widen: avx2::widen })
        } else {
            Err("the processor lacks its instructions".into())
        }
    }),
    Variant::new("portable", |(), ()| Ok(Kernels { attend: attend::attend::<Plain>, widen: widen::widen })),
];
