//! Rotary frequencies and the table of their cosines and sines.

use std::f64::consts::TAU;

use crate::base::error::{Error, Result};

/// YaRN (arXiv:2309.00071), as a checkpoint's `rope_scaling` says it: what Hugging Face transformers' `_compute_yarn_parameters` and
/// DeepSeek's own `modeling_deepseek.py` compute.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    /// `factor`: by how much the context was extended; at least 1.
    pub factor: f64,
    /// `original_max_position_embeddings`: the context that the model was trained for.
    pub original_max_position_embeddings: f64,
    /// `beta_fast`: pairs that turn this often or more in the original context keep their frequency; 32 where it is not given. At least
    /// `beta_slow`.
    pub beta_fast: f64,
    /// `beta_slow`: pairs that turn this often or less are slowed down by the whole factor; 1 where it is not given.
    pub beta_slow: f64,
    /// `mscale`; 0 where it is not given.
    pub mscale: f64,
    /// `mscale_all_dim`; 0 where it is not given. It belongs in [`crate::softmax_scale`] too.
    pub mscale_all_dim: f64,
    /// `truncate`: whether the ramp between fast and slow pairs begins and ends at whole pairs; true where it is not given.
    pub truncate: bool,
}

impl Yarn {
    /// A factor and the original context, the rest as it is where a checkpoint does not give it.
    #[must_use]
    pub fn new(factor: f64, original_max_position_embeddings: f64) -> Self {
        Self {
            factor,
            original_max_position_embeddings,
            beta_fast: 32.0,
            beta_slow: 1.0,
            mscale: 0.0,
            mscale_all_dim: 0.0,
            truncate: true,
        }
    }

    /// The factor of cosines and sines: `m(mscale) / m(mscale_all_dim)` with `m(x) = 0.1 * x * ln(factor) + 1` where a checkpoint gives
    /// both, else `m(1)`. It is 1 for DeepSeek-V3, whose two are equal.
    ///
    /// With `mscale` alone transformers leaves it at `m(1)`, and DeepSeek's code takes `m(mscale)`: every released checkpoint gives both
    /// or has an `mscale` of 1.
    #[must_use]
    pub fn attention_factor(&self) -> f64 {
        let m = |x: f64| if self.factor > 1.0 { 0.1 * x * self.factor.ln() + 1.0 } else { 1.0 };
        if self.mscale != 0.0 && self.mscale_all_dim != 0.0 {
            m(self.mscale) / m(self.mscale_all_dim)
        } else {
            m(1.0)
        }
    }

    fn check(&self) -> Result<()> {
        let fields = [
            ("rope factor", self.factor),
            ("original_max_position_embeddings", self.original_max_position_embeddings),
            ("beta_fast", self.beta_fast),
            ("beta_slow", self.beta_slow),
        ];
        for (what, got) in fields {
            if !(got.is_finite() && got > 0.0) {
                return Err(Error::Scale { what, got, cure: "must be finite and above 0" });
            }
        }
        if self.factor < 1.0 {
            let cure = "must be at least 1: by how much the context was extended";
            return Err(Error::Scale { what: "rope factor", got: self.factor, cure });
        }
        if self.beta_fast < self.beta_slow {
            let cure = "must be at least beta_slow: fast pairs turn more often than slow ones";
            return Err(Error::Scale { what: "beta_fast", got: self.beta_fast, cure });
        }
        let got = self.attention_factor();
        if !((got as f32).is_normal() && got > 0.0) {
            let what = "the attention factor of mscale and mscale_all_dim";
            return Err(Error::Scale {
                what,
                got,
                cure: "must be a finite f32 of at least 2^-126: correct the two",
            });
        }
        Ok(())
    }

    /// The ramp's ends, in pairs: the first to slow down, and the first that is slowed down by the whole factor.
    fn ramp(&self, rope_dim: u32, theta: f64) -> (f64, f64) {
        let dim = f64::from(rope_dim);
        // Pair p turns `original / (2 pi) * theta^(-2p / dim)` times.
        let pair_that_turns = |turns: f64| {
            let most = self.original_max_position_embeddings / TAU;
            dim * (most / turns).ln() / (2.0 * theta.ln())
        };
        let (mut low, mut high) = (pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, high) = (low.max(0.0), high.min(dim - 1.0));
        // transformers adds the same 0.001 to avoid a division by 0.
        (low, if low == high { high + 0.001 } else { high })
    }
}

/// How fast each pair of a rotary embedding turns, in f64.
///
/// ```
/// use wgpu_mla::{RopeFrequencies, Yarn};
///
/// # fn main() -> wgpu_mla::Result<()> {
/// // DeepSeek-V3
/// let yarn = Yarn { mscale: 1.0, mscale_all_dim: 1.0, ..Yarn::new(40.0, 4096.0) };
/// let frequencies = RopeFrequencies::yarn(64, 10_000.0, &yarn)?;
/// let cos_sin = frequencies.cos_sin(163_840)?; // to be uploaded once, for every layer
/// assert_eq!((cos_sin.len(), cos_sin[0], cos_sin[32]), (163_840 * 64, 1.0, 0.0));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct RopeFrequencies {
    inv_freq: Vec<f64>,
    attention_factor: f64,
}

impl RopeFrequencies {
    /// Pair p of `rope_dim / 2` turns by `theta^(-2p / rope_dim)` a position.
    ///
    /// # Errors
    /// [`Error::Shape`] for a `rope_dim` that is odd, 0 or above 65,536, [`Error::Scale`] for a `theta` that is not finite and above 1.
    pub fn plain(rope_dim: u32, theta: f64) -> Result<Self> {
        if rope_dim == 0 || !rope_dim.is_multiple_of(2) || rope_dim > MOST_DIM {
            let cure = "must be even, from 2 to 65,536";
            return Err(Error::Shape { what: "qk_rope_head_dim", got: rope_dim.into(), cure });
        }
        if !(theta.is_finite() && theta > 1.0) {
            let cure = "must be finite and above 1: the checkpoint's rope_theta, such as 10000";
            return Err(Error::Scale { what: "rope_theta", got: theta, cure });
        }
        let inv_freq = |pair: u32| theta.powf(-2.0 * f64::from(pair) / f64::from(rope_dim));
        Ok(Self { inv_freq: (0..rope_dim / 2).map(inv_freq).collect(), attention_factor: 1.0 })
    }

    /// Like [`RopeFrequencies::plain`], extended by YaRN: fast pairs as they were, slow ones slowed down by the factor, and a linear ramp
    /// between them.
    ///
    /// # Errors
    /// The errors of [`RopeFrequencies::plain`], and [`Error::Scale`] for a number that is not finite and above 0, a factor below 1, a
    /// `beta_fast` below `beta_slow`, and an attention factor beyond f32.
    pub fn yarn(rope_dim: u32, theta: f64, yarn: &Yarn) -> Result<Self> {
        let mut frequencies = Self::plain(rope_dim, theta)?;
        yarn.check()?;
        let (low, high) = yarn.ramp(rope_dim, theta);
        for (pair, inv_freq) in frequencies.inv_freq.iter_mut().enumerate() {
            let slow = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
            *inv_freq = *inv_freq / yarn.factor * slow + *inv_freq * (1.0 - slow);
        }
        frequencies.attention_factor = yarn.attention_factor();
        Ok(frequencies)
    }

    /// Radians a position, for each of the `qk_rope_head_dim / 2` pairs.
    #[must_use]
    pub fn inv_freq(&self) -> &[f64] {
        &self.inv_freq
    }

    /// The factor of cosines and sines.
    #[must_use]
    pub fn attention_factor(&self) -> f64 {
        self.attention_factor
    }

    /// The table that [`crate::RopeArgs`] and [`crate::RopeAppendArgs`] read: `[max_position, R]`, in each row `R / 2` cosines, then `R /
    /// 2` sines, both times the attention factor. vLLM's `cos_sin_cache` has this layout.
    ///
    /// Computed in f64 and rounded once. Implementations that multiply positions by frequencies in f32, as transformers does, are off by
    /// up to some 1e-3 at positions of 1e5.
    ///
    /// # Errors
    /// [`Error::Shape`] for no position, or more than 2^31; [`Error::Limit`] for a table above 4 GiB; [`Error::TableMemory`] where the host
    /// has no memory for the table.
    pub fn cos_sin(&self, max_position: u32) -> Result<Vec<f32>> {
        check_max_position(max_position)?;
        let mut table = room_for_table(max_position, 2 * self.inv_freq.len(), MOST_TABLE_BYTES)?;
        for position in 0..max_position {
            let angle = |inv_freq: &f64| f64::from(position) * inv_freq;
            let scaled = |x: f64| (x * self.attention_factor) as f32;
            table.extend(self.inv_freq.iter().map(angle).map(|x| scaled(x.cos())));
            table.extend(self.inv_freq.iter().map(angle).map(|x| scaled(x.sin())));
        }
        Ok(table)
    }
}

/// The most elements of a rotary part.
const MOST_DIM: u32 = 1 << 16;

/// The most bytes of a table: ten million positions of 64 elements are 2.6 GB.
const MOST_TABLE_BYTES: u64 = 1 << 32;

/// An empty table with room for rows of `row` numbers.
///
/// # Errors
/// [`Error::Limit`] and [`Error::TableMemory`].
fn room_for_table(max_position: u32, row: usize, limit: u64) -> Result<Vec<f32>> {
    let bytes = u64::from(max_position).saturating_mul(row as u64).saturating_mul(4);
    if bytes > limit {
        let cure = "pass the model's max_position_embeddings, or the longest sequence that is served";
        return Err(Error::Limit { what: "bytes of cos_sin", need: bytes, limit, cure });
    }
    let refused = || Error::TableMemory { max_position, bytes };
    let numbers = (max_position as usize).checked_mul(row).ok_or_else(refused)?;
    let mut table = Vec::new();
    table.try_reserve_exact(numbers).map_err(|_| refused())?;
    Ok(table)
}

/// Positions are i32.
///
/// # Errors
/// [`Error::Shape`].
pub(crate) fn check_max_position(max_position: u32) -> Result<()> {
    if max_position == 0 || max_position > 1 << 31 {
        let cure = "must be 1 to 2^31, the rows of cos_sin";
        return Err(Error::Shape { what: "max_position", got: max_position.into(), cure });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;

    const V3: Yarn = Yarn {
        factor: 40.0,
        original_max_position_embeddings: 4096.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        mscale: 1.0,
        mscale_all_dim: 1.0,
        truncate: true,
    };

    /// Pairs and what they turn by.
    type Figures<'a> = &'a [(usize, f64)];

    /// From DeepSeek's formulas, evaluated apart from this crate.
    #[test]
    fn the_frequencies_of_checkpoints() {
        let kimi = Yarn { factor: 64.0, ..V3 };
        let exact = Yarn { truncate: false, ..V3 };
        let other = Yarn {
            factor: 16.0,
            original_max_position_embeddings: 2048.0,
            beta_fast: 8.0,
            beta_slow: 2.0,
            ..V3
        };
        let cases: [(&Yarn, u32, f64, Figures<'_>); 5] = [
            (
                &V3,
                64,
                1e4,
                &[
                    (0, 1.0),
                    (9, 7.498_942_093_324_558e-2),
                    (10, 5.623_413_251_903_49e-2),
                    (11, 3.900_692_656_714_386e-2),
                    (15, 8.334_508_951_020_777e-3),
                    (22, 1.778_279_410_038_922e-4),
                    (23, 3.333_803_580_408_31e-5),
                    (31, 3.333_803_580_408_31e-6),
                ],
            ),
            (
                &kimi,
                64,
                5e4,
                &[
                    (9, 4.377_665_595_133_869e-2),
                    (16, 1.537_296_734_531_105_7e-3),
                    (31, 4.382_206_455_794_937_5e-7),
                ],
            ),
            (
                &exact,
                64,
                1e4,
                &[
                    (10, 5.623_413_251_903_49e-2),
                    (11, 4.036_758_449_441_141e-2),
                    (22, 1.183_877_315_916_889_8e-4),
                ],
            ),
            (
                &other,
                64,
                1e4,
                &[(12, 3.162_277_660_168_379e-2), (16, 3.75e-3), (31, 8.334_508_951_020_775e-6)],
            ),
            (&V3, 32, 1e4, &[(9, 2.490_368_725_842_974_5e-3), (11, 2.921_459_030_778_231e-4)]),
        ];
        for (yarn, dim, theta, want) in cases {
            let frequencies = RopeFrequencies::yarn(dim, theta, yarn).unwrap();
            assert_eq!(
                (frequencies.inv_freq().len(), frequencies.attention_factor()),
                (dim as usize / 2, 1.0)
            );
            for &(pair, want) in want {
                assert_relative_eq!(frequencies.inv_freq()[pair], want, max_relative = 1e-13);
            }
        }
    }

    /// The paper says it by how often a pair turns in the original context, not by its place.
    #[test]
    fn the_ramp_is_the_papers() {
        let yarn = Yarn { truncate: false, ..V3 };
        let frequencies = RopeFrequencies::yarn(64, 1e4, &yarn).unwrap();
        let plain = RopeFrequencies::plain(64, 1e4).unwrap();
        for (&got, &inv_freq) in frequencies.inv_freq().iter().zip(plain.inv_freq()) {
            let turns = 4096.0 / (TAU / inv_freq);
            let keeps = (turns.ln() / 32f64.ln()).clamp(0.0, 1.0);
            assert_relative_eq!(got, inv_freq * (keeps + (1.0 - keeps) / 40.0), max_relative = 1e-12);
        }
    }

    #[test]
    fn attention_factors() {
        let of = |mscale, mscale_all_dim| Yarn { mscale, mscale_all_dim, ..V3 }.attention_factor();
        assert_eq!(of(0.707, 0.707), 1.0);
        assert_relative_eq!(of(1.0, 0.5), 1.155_721_990_196_260_8, max_relative = 1e-14);
        assert_relative_eq!(of(0.0, 0.0), 1.368_887_945_411_393_6, max_relative = 1e-14);
        assert_eq!(Yarn { factor: 1.0, ..V3 }.attention_factor(), 1.0);
    }

    #[test]
    fn a_factor_of_1_changes_nothing() {
        let yarn = Yarn { mscale: 0.0, mscale_all_dim: 0.0, ..Yarn::new(1.0, 4096.0) };
        let frequencies = RopeFrequencies::yarn(64, 1e4, &yarn).unwrap();
        let plain = RopeFrequencies::plain(64, 1e4).unwrap();
        for (got, want) in frequencies.inv_freq().iter().zip(plain.inv_freq()) {
            assert_relative_eq!(got, want, max_relative = 1e-15);
        }
        // A ramp of no length.
        let steep = Yarn { beta_fast: 7.0, beta_slow: 7.0, truncate: false, ..V3 };
        assert!(RopeFrequencies::yarn(64, 1e4, &steep).unwrap().inv_freq().iter().all(|x| x.is_finite()));
    }

    #[test]
    fn a_table_holds_cosines_then_sines_times_the_factor() {
        let yarn = Yarn { mscale_all_dim: 0.5, ..V3 };
        let frequencies = RopeFrequencies::yarn(8, 1e4, &yarn).unwrap();
        let table = frequencies.cos_sin(70_000).unwrap();
        let factor = frequencies.attention_factor();
        assert_eq!(table.len(), 70_000 * 8);
        for position in [0usize, 1, 63, 4096, 69_999] {
            for (pair, inv_freq) in frequencies.inv_freq().iter().enumerate() {
                let (sin, cos) = (position as f64 * inv_freq).sin_cos();
                let row = &table[position * 8..][..8];
                assert_eq!((row[pair], row[4 + pair]), ((cos * factor) as f32, (sin * factor) as f32));
            }
        }
    }

    #[test]
    fn what_is_refused() {
        let most = RopeFrequencies::plain(1 << 16, 1e4).unwrap();
        assert_eq!(most.inv_freq().len(), 1 << 15);
        let error = most.cos_sin(1 << 31).unwrap_err();
        assert!(matches!(error, Error::Limit { what: "bytes of cos_sin", need, .. } if need == 1 << 49));
        for dim in [(1 << 16) + 2, u32::MAX - 1, u32::MAX] {
            let error = RopeFrequencies::plain(dim, 1e4).unwrap_err();
            assert!(matches!(error, Error::Shape { what: "qk_rope_head_dim", .. }), "{error}");
        }
        for dim in [0, 63] {
            assert!(matches!(RopeFrequencies::plain(dim, 1e4), Err(Error::Shape { .. })), "{dim}");
        }
        for theta in [1.0, 0.5, 0.0, -1e4, f64::NAN, f64::INFINITY] {
            let error = RopeFrequencies::plain(64, theta).expect_err("refused").to_string();
            assert!(
                error.starts_with(&format!("rope_theta {theta:?}: must be finite and above 1")),
                "{error}"
            );
        }
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            for yarn in [
                Yarn { factor: bad, ..V3 },
                Yarn { original_max_position_embeddings: bad, ..V3 },
                Yarn { beta_fast: bad, ..V3 },
                Yarn { beta_slow: bad, ..V3 },
            ] {
                assert!(
                    matches!(RopeFrequencies::yarn(64, 1e4, &yarn), Err(Error::Scale { .. })),
                    "{yarn:?}"
                );
            }
        }
        for (yarn, why) in [
            (Yarn { factor: 0.5, ..V3 }, "rope factor 0.5: must be at least 1"),
            (Yarn { factor: 1.0f64.next_down(), ..V3 }, "rope factor 0.9999999999999999: must be at least 1"),
            (Yarn { beta_fast: 0.5, ..V3 }, "beta_fast 0.5: must be at least beta_slow"),
            (Yarn { beta_slow: 32.5, ..V3 }, "beta_fast 32.0: must be at least beta_slow"),
            (Yarn { mscale: f64::NAN, ..V3 }, "the attention factor of mscale and mscale_all_dim NaN"),
            (Yarn { mscale: 1e300, ..V3 }, "the attention factor of mscale and mscale_all_dim"),
            (Yarn { mscale_all_dim: 1e60, ..V3 }, "the attention factor of mscale and mscale_all_dim"),
            (Yarn { mscale: -10.0, ..V3 }, "the attention factor of mscale and mscale_all_dim -"),
        ] {
            let error = RopeFrequencies::yarn(64, 1e4, &yarn).expect_err("refused");
            assert!(matches!(error, Error::Scale { .. }) && error.to_string().starts_with(why), "{error}");
        }
        let plain = RopeFrequencies::plain(64, 1e4).unwrap();
        assert!(matches!(plain.cos_sin(0), Err(Error::Shape { what: "max_position", .. })));
    }

    #[test]
    fn a_table_beyond_memory_is_an_error() {
        // No address space has room for it, whatever the system promises.
        let error = room_for_table(1 << 31, 1 << 30, u64::MAX).expect_err("2^63 bytes");
        assert_eq!(
            error.to_string(),
            "cos_sin of 2147483648 positions takes 9223372036854775808 bytes, which the host has no memory for: \
             pass the model's max_position_embeddings, or the longest sequence that is served"
        );
        assert_eq!(room_for_table(4, 8, 128).map(|table| table.capacity()), Ok(32));
    }
}
