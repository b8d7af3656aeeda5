//! `--guard`: a table of what each layer's rounding lost.

use std::fmt::Write;

use crate::Result;
use crate::attention::Attention;
use wgpu_mla::LayerGuard;

use crate::print::tell;

const HEAD: &str = "layer  place   saturated  NaN        flushed    largest      scale        would fit";

/// Prints a table a layer of what was lost since the last call: nothing without `--guard`.
///
/// # Errors
/// The errors of the backend.
pub fn print(attention: &mut dyn Attention) -> Result<()> {
    let layers = attention.losses()?;
    if layers.is_empty() {
        return Ok(());
    }
    let mut table = format!("\n{HEAD}\n");
    layers.iter().for_each(|layer| add(&mut table, layer));
    tell(&table);
    Ok(())
}

fn add(table: &mut String, of: &LayerGuard) {
    for (name, _, place) in of.places() {
        let counts = place.counts;
        let shown = |scale: Option<f32>| {
            scale.map_or_else(|| place.dtype.to_string(), |scale| format!("{scale:.4e}"))
        };
        let fits = place.fitting_scale().map_or_else(|| "-".into(), |scale| format!("{scale:.4e}"));
        // Writing to a String cannot fail.
        let _ = writeln!(
            table,
            "{:<5}  {name:<6}  {:<9}  {:<9}  {:<9}  {:<11.4e}  {:<11}  {fits}",
            of.layer,
            counts.saturated,
            counts.nan,
            counts.flushed,
            counts.amax,
            shown(place.scale),
        );
    }
}
