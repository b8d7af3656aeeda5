//! `top_k`: its variants in dispatch order, and the WGSL of each.

use super::compose::Source;
use super::{GROUP, unrolled};
use crate::gpu::caps::{Caps, DeviceKind};
use crate::ops::TopK;
use crate::ops::variants::Variant;

/// Workgroups that a few long rows are cut into: a few for each multiprocessor of a large card.
pub(crate) const TARGET_GROUPS: u32 = 1024;
/// The most slices of a row: invocations of a workgroup each read what one of them counted.
const MOST_SLICES: u32 = 64;
/// Logits of a slice, at least.
const SLICE: u32 = 1024;
/// `ROW_WORK` and `SLICE_WORK` of the shader.
const ROW_WORK: u64 = 5128;
const SLICE_WORK: u64 = 1028;

/// In dispatch order; the last runs everywhere.
pub(crate) const VARIANTS: [Variant<Caps, TopK, Kernel>; 2] = [
    Variant::new("slices", |_, spec| Ok(Kernel { plain: source(spec, None), slices: stages(spec) }))
        .not_by_default(|caps, _| match caps.kind {
            DeviceKind::Software => {
                Err("a software device has few lanes, which one workgroup a row fills".into())
            }
            _ => Ok(()),
        }),
    Variant::new("plain", |_, spec| Ok(Kernel { plain: source(spec, None), slices: Vec::new() })),
];

/// A variant for a spec.
pub(crate) struct Kernel {
    /// A workgroup a row.
    pub(crate) plain: Source,
    /// The dispatches of several workgroups a row, if it has them.
    pub(crate) slices: Vec<Source>,
}

/// The most slices of a row of so many columns.
pub(crate) fn most_slices(columns: u32) -> u32 {
    columns.div_ceil(SLICE).clamp(1, MOST_SLICES)
}

/// The slices of each row of a step; below 2 its rows are not cut.
pub(crate) fn slices(rows: u32, most_slices: u32) -> u32 {
    (TARGET_GROUPS / rows.max(1)).min(most_slices)
}

/// Words of the workspace for steps of up to so many rows; 0 where none is cut.
pub(crate) fn work_words(max_rows: u32, most_slices: u32) -> u64 {
    // With more rows there are fewer slices.
    let words = |rows: u32| {
        let slices = u64::from(slices(rows, most_slices));
        if slices < 2 { 0 } else { u64::from(rows) * (ROW_WORK + slices * SLICE_WORK) }
    };
    (1..=max_rows.min(TARGET_GROUPS / 2)).map(words).max().unwrap_or(0)
}

fn stages(spec: &TopK) -> Vec<Source> {
    (0..4).map(|stage| source(spec, Some(stage))).collect()
}

fn source(spec: &TopK, stage: Option<u32>) -> Source {
    let mut consts = vec![("GROUP", GROUP), ("LOADS", 8), ("RUN", 8), ("ROW_WORDS", spec.row_words())];
    let lib = include_str!("../../../shaders/lib/top_k.wgsl");
    let of = if spec.slots.is_some() { "slots" } else { "indices" };
    let Some(stage) = stage else {
        let files = [lib, include_str!("../../../shaders/top_k.wgsl")];
        return unrolled("top_k", of, &consts, &[], &files);
    };
    consts.extend([("STAGE", stage), ("TARGET_GROUPS", TARGET_GROUPS)]);
    let files = [lib, include_str!("../../../shaders/top_k_slices.wgsl")];
    unrolled("top_k", &format!("slices{stage}.{of}"), &consts, &[], &files)
}

#[cfg(test)]
pub(crate) fn every_source(samples: &[TopK]) -> Vec<Source> {
    samples.iter().flat_map(|spec| std::iter::once(source(spec, None)).chain(stages(spec))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_long_rows_are_cut() {
        let of = |rows, columns| slices(rows, most_slices(columns));
        assert_eq!(of(1, 131_072), 64);
        assert_eq!(of(16, 131_072), 64);
        assert_eq!(of(64, 65_536), 16);
        assert_eq!(of(512, 65_536), 2);
        assert!(of(513, 1 << 20) < 2 && of(1, 1024) < 2 && of(0, 0) < 2);
        // The workspace holds every step of up to so many rows.
        for (max_rows, columns) in [(1, 131_072), (64, 65_536), (1 << 24, 1 << 20), (7, 3000), (3, 5)] {
            let most = most_slices(columns);
            let work = work_words(max_rows, most);
            for rows in (1..=max_rows.min(1000)).filter(|&rows| slices(rows, most) >= 2) {
                assert!(u64::from(rows) * (ROW_WORK + u64::from(slices(rows, most)) * SLICE_WORK) <= work);
            }
        }
    }
}
