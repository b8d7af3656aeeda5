//! What a layer's rounding loses, read from its counters. Pure.

use std::fmt;

use super::{MlaLayer, MlaLayerArgs};
use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};
use crate::ops::guard::step_row;
use crate::ops::{GuardCounts, GuardView};

/// What one layer has lost by rounding since its counters were zeroed: in the keys that it appended, in its absorbed queries and in its
/// output. Of a layer compiled with [`LayerOptions::guard`](super::LayerOptions::guard).
///
/// Shown as a line, which names the layer, what was lost, and the scale that would fit:
///
/// ```text
/// layer 12: query: 37 saturated (q_scale 0.5, 0.82 would fit), 4 flushed to 0; output: 2 NaN
/// ```
///
/// Outputs are those of tokens in absorbed form, in codes or in another dtype: what overflows f16 is counted. Those of prefills are not,
/// nor the keys and values that are expanded for prefills, nor what an indexer writes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerGuard {
    /// The number that [`LayerGuard::read`] was given.
    pub layer: u32,
    /// The new rows of the cache.
    pub keys: GuardPlace,
    /// Absorbed queries; their rotated parts where they are codes.
    pub query: GuardPlace,
    /// Values of the output.
    pub output: GuardPlace,
}

/// One of the three.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GuardPlace {
    /// What it was rounded to.
    pub dtype: Dtype,
    /// The scale of codes; `None` for other dtypes, and for a cache whose tokens have scales of their own.
    pub scale: Option<f32>,
    /// What was lost.
    pub counts: GuardCounts,
}

impl LayerGuard {
    /// Rows of counters of a layer: keys, query, output.
    pub const ROWS: u32 = 3;

    /// Reads the rows of a layer from its counters as they were downloaded, from the front of the buffer, and logs its line by
    /// [`log::warn!`] if something saturated or is NaN. `layer` is the number that is shown.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`] for arguments without a guard, and [`Error::Length`] for bytes that end before its rows.
    pub fn read<B>(layer: u32, spec: &MlaLayer, args: &MlaLayerArgs<B>, counters: &[u8]) -> Result<Self> {
        let Some(guard) = &args.guard else {
            let detail = "these arguments have no counters: compile the layer with LayerOptions::guard, and give it MlaLayerArgs::guard";
            return Err(Error::LayoutMismatch { detail });
        };
        let range = guard.bytes(Self::ROWS);
        let (got, want) = (counters.len() as u64, range.end);
        if got < want {
            let cure = "download the counters of all layers";
            return Err(Error::Length { what: "the bytes of a guard's counters", got, want, cure });
        }
        let rows = GuardCounts::decode_all(&counters[range.start as usize..range.end as usize]);
        let place = |row: usize, dtype: Dtype, scale: f32| GuardPlace {
            dtype,
            scale: dtype.is_fp8().then_some(scale),
            counts: rows[row],
        };
        let kv = spec.kv.layout;
        let keys = place(0, spec.kv.dtype(), args.k_scale);
        let mut query = place(1, spec.query, args.q_scale);
        // Queries that are no codes are kept scaled.
        query.counts.amax /= spec.query_scale();
        let read = Self {
            layer,
            keys: GuardPlace { scale: keys.scale.filter(|_| kv.is_plain()), ..keys },
            query,
            output: place(2, spec.out, args.out_scale),
        };
        if !read.is_clean() {
            log::warn!("{read}");
        }
        Ok(read)
    }

    /// Whether nothing saturated and nothing is NaN.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.places().iter().all(|(_, _, place)| place.counts.saturated == 0 && place.counts.nan == 0)
    }

    /// What is counted, by its name and that of its scale.
    #[must_use]
    pub const fn places(&self) -> [(&'static str, &'static str, &GuardPlace); 3] {
        [
            ("keys", "k_scale", &self.keys),
            ("query", "q_scale", &self.query),
            ("output", "out_scale", &self.output),
        ]
    }
}

impl GuardPlace {
    /// The smallest scale with which no finite element that was counted saturates; `None` where there is no scale, or nothing but zeros
    /// was counted.
    #[must_use]
    pub fn fitting_scale(&self) -> Option<f32> {
        self.scale.filter(|_| self.counts.amax > 0.0).map(|_| self.counts.fitting_scale())
    }
}

impl fmt::Display for LayerGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layer {}: ", self.layer)?;
        let mut separator = "";
        for (name, scale_name, place) in self.places() {
            let GuardCounts { saturated, nan, flushed, .. } = place.counts;
            let mut parts = Vec::new();
            if saturated > 0 {
                parts.push(match (place.scale, place.fitting_scale()) {
                    (Some(scale), Some(fits)) if fits > scale => {
                        format!("{saturated} saturated ({scale_name} {scale}, {fits} would fit)")
                    }
                    // What is past every scale is infinite.
                    (Some(_), _) => format!("{saturated} saturated (infinities, which fit no scale)"),
                    (None, _) => format!("{saturated} past {}", place.dtype),
                });
            }
            if nan > 0 {
                parts.push(format!("{nan} NaN"));
            }
            if flushed > 0 {
                parts.push(format!("{flushed} flushed to 0"));
            }
            if !parts.is_empty() {
                write!(f, "{separator}{name}: {}", parts.join(", "))?;
                separator = "; ";
            }
        }
        if separator.is_empty() { write!(f, "nothing was lost") } else { Ok(()) }
    }
}

/// The rows of a layer's query and output, behind that of its keys.
pub(super) fn rows_of<B: Copy>(guard: Option<GuardView<B>>) -> [Option<GuardView<B>>; 3] {
    [0, 1, 2].map(|by| guard.map(|guard| step_row(guard, by)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(dtype: Dtype, scale: f32, counts: [u32; 3], amax: f32) -> GuardPlace {
        let [saturated, nan, flushed] = counts;
        let counts = GuardCounts { saturated, nan, flushed, amax };
        GuardPlace { dtype, scale: dtype.is_fp8().then_some(scale), counts }
    }

    #[test]
    fn a_line_names_the_layer_and_the_scale_that_fits() {
        let quiet = place(Dtype::E4m3, 1.0, [0; 3], 3.0);
        let clean = LayerGuard { layer: 3, keys: quiet, query: quiet, output: quiet };
        assert_eq!((clean.to_string(), clean.is_clean()), ("layer 3: nothing was lost".into(), true));
        let lossy = LayerGuard {
            layer: 12,
            keys: place(Dtype::F16, 1.0, [2, 0, 0], 7e4),
            query: place(Dtype::E4m3, 0.5, [37, 0, 4], 448.0),
            output: place(Dtype::E4m3, 2.0, [1, 2, 0], 448.0),
        };
        let want = "layer 12: keys: 2 past f16; query: 37 saturated (q_scale 0.5, 1 would fit), 4 flushed to 0; \
                    output: 1 saturated (infinities, which fit no scale), 2 NaN";
        assert_eq!((lossy.to_string(), lossy.is_clean()), (want.into(), false));
        let flushed = LayerGuard { query: place(Dtype::E4m3, 0.5, [0, 0, 4], 1.0), ..clean };
        assert_eq!(
            (flushed.to_string(), flushed.is_clean()),
            ("layer 3: query: 4 flushed to 0".into(), true)
        );
        assert_eq!(lossy.keys.fitting_scale(), None, "f16 has no scale");
        assert_eq!(lossy.query.fitting_scale(), Some(1.0));
        assert_eq!(place(Dtype::E4m3, 0.5, [0; 3], 0.0).fitting_scale(), None, "nothing was counted");
    }
}
