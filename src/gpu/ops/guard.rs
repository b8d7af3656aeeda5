//! The binding of counters of what rounding loses.

use crate::base::error::Result;
use crate::gpu::Gpu;
use crate::gpu::buffer::Window;
use crate::ops::GuardView;

/// What is bound of so many rows of counters, and the number of the first in it.
///
/// # Errors
/// The errors of [`Window::new`].
pub(super) fn guard_window<'a>(
    gpu: &Gpu,
    guard: Option<&GuardView<&'a wgpu::Buffer>>,
    rows: u32,
) -> Result<(Option<Window<'a>>, u32)> {
    let Some(guard) = guard else { return Ok((None, 0)) };
    let window = Window::new(gpu, "guard", guard.counters, guard.bytes(rows))?;
    Ok((Some(window), window.at(u64::from(guard.row) * 4, 4, 4)))
}
