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

/// Whether the host's memory has room for the cache of what is certain to come, beside the weights. These are mapped, so those that are not
/// in use may leave memory again: a quarter of it is the cache's at least.
///
/// # Errors
/// [`Error::Input`] with what would fit.
pub fn check(model: &Model, setup: &Setup, free: Option<u64>) -> Result<()> {
    let tokens = setup.tokens.min(setup.prompt_tokens);
    match shortage(model, setup, tokens, free) {
        Some(what) => Err(Error::Input(format!("the cache of {tokens} tokens {what}"))),
        None => Ok(()),
    }
}

/// What is to be said of a cache in the host's memory that would not fit if it grew to all tokens that it may.
#[must_use]
pub fn notice(model: &Model, setup: &Setup, free: Option<u64>) -> Option<String> {
    let what = shortage(model, setup, setup.tokens, free)?;
    Some(format!("the cache may grow to {} tokens, and then {what}", setup.tokens))
}

fn shortage(model: &Model, setup: &Setup, tokens: u32, free: Option<u64>) -> Option<String> {
    let free = free?;
    let need = setup.bytes_of(model, tokens);
    let left = free.saturating_sub(model.bytes()).max(free / 4);
    if need <= left {
        return None;
    }
    let fit = u64::from(setup.tokens) * left / setup.cache_bytes(model).max(1);
    let of = |kv: KvLayout| Setup { kv, ..setup.clone() }.bytes_of(model, tokens);
    let other = [Dtype::Bf16, Dtype::E4m3]
        .map(KvLayout::from)
        .into_iter()
        .find(|&dtype| of(dtype) < need && of(dtype) <= left);
    let other =
        other.map(|dtype| format!(", or a cache of {dtype} takes {}", bytes(of(dtype)))).unwrap_or_default();
    Some(format!(
        "takes {} with {}, and {} are free beside {} of weights: use fewer tokens, as at most {fit} fit{other}",
        bytes(need),
        setup.kv,
        bytes(left),
        bytes(model.bytes())
    ))
}

/// Whether the host's memory has room for another slab. Weights were read by then.
///
/// # Errors
/// [`Error::Input`].
pub fn check_growth(slab: u64, tokens: u64, free: Option<u64>) -> Result<()> {
    match free {
        Some(free) if free < slab => {
            let (slab, free) = (bytes(slab), bytes(free));
            let cure = "use fewer tokens, or a cache of a smaller dtype";
            Err(Error::Input(format!(
                "the cache holds {tokens} tokens and needs {slab} more, and {free} are free: {cure}"
            )))
        }
        _ => Ok(()),
    }
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

    /// A quarter of it is there, for a prompt of 200 tokens: in slabs of 5 of 17 pages, one for all that was asked for.
    #[test]
    fn only_what_is_certain_has_to_fit() {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/model");
        let model = Model::open(dir.as_ref()).expect("a model");
        let page = 64 * 576 * 4 * 4;
        let setup =
            Setup { kv: Dtype::F32.into(), prompt_tokens: 200, slab_bytes: 5 * page, ..Setup::default() };
        assert_eq!(setup.slab_pages(&model, u64::MAX), 5);
        assert_eq!(setup.slab_pages(&model, 3 * page), 3);
        assert_eq!([1, 200, 256, 257, 1024].map(|it| setup.bytes_of(&model, it) / page), [5, 5, 5, 10, 20]);
        let free = Some(model.bytes() + 6 * page);
        check(&model, &setup, free).expect("it fits");
        let said = notice(&model, &setup, free).expect("more would not");
        let want = "the cache may grow to 1024 tokens, and then takes 11.8 MB with f32, and 3.5 MB are free";
        assert!(
            said.starts_with(want) && said.contains("at most 307 fit, or a cache of e4m3 takes"),
            "{said}"
        );
        assert_eq!(notice(&model, &setup, Some(model.bytes() + 20 * page)), None);
        let long = Setup { prompt_tokens: 257, ..setup };
        let told = check(&model, &long, free).expect_err("too long").to_string();
        assert!(told.starts_with("the cache of 257 tokens takes 5.9 MB with f32"), "{told}");
        check_growth(5 * page, 320, Some(5 * page)).expect("it fits");
        let told = check_growth(5 * page, 320, Some(page)).expect_err("too large").to_string();
        assert!(
            told.starts_with("the cache holds 320 tokens and needs 2.9 MB more, and 590 kB are free: use"),
            "{told}"
        );
    }
}
