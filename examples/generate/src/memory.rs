//! The memory that a run needs, and what is free.

use wgpu_mla::{Dtype, KvLayout};

use crate::{Error, Model, Result, Setup};

/// Bytes that programs may take, where the system says so: Linux.
#[must_use]
pub fn free() -> Option<u64> {
    let all = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = all.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()? << 10)
}

/// A number of bytes, for a person.
#[must_use]
pub fn bytes(bytes: u64) -> String {
    match bytes {
        0..1_000_000 => format!("{} kB", bytes.div_ceil(1000)),
        1_000_000..1_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.2} GB", bytes as f64 / 1e9),
    }
}

/// Whether a cache in the host's memory fits into what is free beside the weights. These are mapped, so those that are not in use may
/// leave memory again: a quarter of it is the cache's at least.
///
/// # Errors
/// [`Error::Input`] with what would fit.
pub fn check(model: &Model, setup: &Setup, free: Option<u64>) -> Result<()> {
    let Some(free) = free else { return Ok(()) };
    let of = |kv: KvLayout| Setup { kv, ..setup.clone() }.cache_bytes(model);
    let (need, weights) = (of(setup.kv), model.bytes());
    let left = free.saturating_sub(weights).max(free / 4);
    if need <= left {
        return Ok(());
    }
    let fit = u64::from(setup.tokens) * left / need.max(1);
    let other = [Dtype::Bf16, Dtype::E4m3]
        .map(KvLayout::from)
        .into_iter()
        .find(|&dtype| of(dtype) < need && of(dtype) <= left);
    let other =
        other.map(|dtype| format!(", or a cache of {dtype} takes {}", bytes(of(dtype)))).unwrap_or_default();
    Err(Error::Input(format!(
        "the cache of {} tokens takes {} with {}, and {} are free beside {} of weights: use fewer tokens, as at most {fit} fit{other}",
        setup.tokens,
        bytes(need),
        setup.kv,
        bytes(left),
        bytes(weights)
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_for_a_person() {
        let all = [0, 999, 1001, 999_999, 1_000_000, 844_000_000, 1_000_000_000].map(bytes);
        assert_eq!(all, ["0 kB", "1 kB", "2 kB", "1000 kB", "1.0 MB", "844.0 MB", "1.00 GB"]);
    }

    /// For a cache of 1,024 tokens in f32.
    #[test]
    fn a_cache_that_does_not_fit_is_refused_with_what_would() {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/model");
        let model = Model::open(dir.as_ref()).expect("a model");
        let setup = Setup { kv: Dtype::F32.into(), ..Setup::default() };
        let (cache, weights) = (setup.cache_bytes(&model), model.bytes());
        // 17 pages of 64 tokens, 576 elements, 4 layers.
        assert_eq!(cache, 17 * 64 * 576 * 4 * 4);
        assert!((10_300_000..10_400_000).contains(&weights), "{weights}");
        check(&model, &setup, None).expect("nobody knows what is free");
        check(&model, &setup, Some(weights + cache)).expect("it fits");
        let told = |free: u64| check(&model, &setup, Some(free)).expect_err("too large").to_string();
        let half = told(weights + cache / 2);
        for what in [
            "1024 tokens takes 10.0 MB with f32",
            "beside 10.4 MB of weights",
            "at most 512 fit, or a cache of bf16 takes 5.0 MB",
        ] {
            assert!(half.contains(what), "{half}\nlacks {what}");
        }
        let quarter = told(weights + cache / 4);
        assert!(quarter.ends_with(", or a cache of e4m3 takes 2.5 MB"), "{quarter}");
        // Weights leave memory for it, in part.
        assert!(told(weights / 2).contains("and 1.3 MB are free beside"), "{}", told(weights / 2));
    }
}
