//! How much work a slice may be, so that attention takes a part of a frame and no more: from what earlier slices took.

use generate::Config;

/// Half of a 60 Hz frame.
const SLICE_MS: f64 = 8.0;
/// Sizes of a piece of a prompt that is prefilled, the largest first.
const PIECES: [usize; 5] = [256, 128, 64, 32, 16];
/// A sequence with at most so many new tokens is decoded: its work grows with them, where that of a prefill begins with all earlier keys.
pub const DECODED: usize = 8;

/// What a step does, for which rates differ.
#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    Decode,
    Prefill,
}

/// Measured rates, in multiply-adds of one layer a millisecond.
pub struct Pace {
    heads: f64,
    latent: f64,
    rope: f64,
    /// P + V.
    nope_and_value: f64,
    decode: Rate,
    prefill: Rate,
}

/// Recent work and what it took; older measurements fade.
struct Rate {
    work: f64,
    ms: f64,
}

impl Rate {
    /// A guess for a slow device: too many slices at first are better than a window that stands still.
    const GUESS: Self = Self { work: 3e5, ms: 1.0 };

    fn note(&mut self, work: f64, ms: f64) {
        const FADE: f64 = 0.8;
        self.work = FADE * self.work + work;
        self.ms = FADE * self.ms + ms.max(1e-3);
    }

    fn ms(&self, work: f64) -> f64 {
        work * self.ms / self.work
    }
}

impl Pace {
    pub fn new(config: &Config) -> Self {
        Self {
            heads: f64::from(config.shape.num_heads),
            latent: f64::from(config.shape.kv_lora_rank),
            rope: f64::from(config.shape.qk_rope_head_dim),
            nope_and_value: (config.qk_nope_head_dim + config.v_head_dim) as f64,
            decode: Rate::GUESS,
            prefill: Rate::GUESS,
        }
    }

    pub fn kind(tokens: usize) -> Kind {
        if tokens <= DECODED { Kind::Decode } else { Kind::Prefill }
    }

    /// Multiply-adds of one layer, for `tokens` new tokens of a sequence that then has `len`.
    fn work(&self, tokens: usize, len: usize) -> f64 {
        let (tokens, len) = (tokens as f64, len as f64);
        self.heads
            * match Self::kind(tokens as usize) {
                // Absorbed: latents are keys and values.
                Kind::Decode => {
                    tokens * ((2.0 * self.latent + self.rope) * len + self.nope_and_value * self.latent)
                }
                // Expanded: keys and values of all tokens are computed first.
                Kind::Prefill => {
                    (self.nope_and_value * self.latent + tokens * (self.nope_and_value + self.rope)) * len
                }
            }
    }

    /// Milliseconds that it will take.
    pub fn ms(&self, tokens: usize, len: usize) -> f64 {
        let rate = if Self::kind(tokens) == Kind::Decode { &self.decode } else { &self.prefill };
        rate.ms(self.work(tokens, len))
    }

    /// New tokens and lengths of a step's sequences, and what a layer of it took.
    pub fn note(&mut self, step: &[(usize, usize)], ms: f64) {
        let work = step.iter().map(|&(tokens, len)| self.work(tokens, len)).sum();
        match step.iter().all(|&(tokens, _)| Self::kind(tokens) == Kind::Decode) {
            true => self.decode.note(work, ms),
            false => self.prefill.note(work, ms),
        }
    }

    /// How many of a prompt's next tokens fit a slice: at least one.
    pub fn piece(&self, left: usize, at: usize) -> usize {
        let fits = |&tokens: &usize| tokens <= left && self.ms(tokens, at + tokens) <= SLICE_MS;
        let most_decoded = || (1..=DECODED.min(left)).rev().find(fits).unwrap_or(1);
        PIECES
            .iter()
            .copied()
            .map(|piece| piece.min(left))
            .filter(|&it| it > DECODED)
            .find(fits)
            .unwrap_or_else(most_decoded)
    }

    /// How many of these sequences, by their lengths, decode a token in one slice: at least one.
    pub fn batch(&self, lens: impl Iterator<Item = usize>) -> usize {
        let mut ms = 0.0;
        let fits = |len: &usize| {
            ms += self.ms(1, *len);
            ms <= SLICE_MS
        };
        lens.take_while(fits).count().max(1)
    }

    /// For a person.
    pub fn describe(&self) -> String {
        format!(
            "{SLICE_MS} ms of attention a frame, at {:.1} G multiply-adds/s",
            self.decode.work / self.decode.ms / 1e6
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pace(rate: f64) -> Pace {
        let rates = || Rate { work: rate, ms: 1.0 };
        Pace {
            heads: 8.0,
            latent: 512.0,
            rope: 64.0,
            nope_and_value: 64.0,
            decode: rates(),
            prefill: rates(),
        }
    }

    #[test]
    fn a_fast_device_reads_a_prompt_at_once_and_a_slow_one_in_pieces() {
        assert_eq!(pace(1e9).piece(300, 0), 256);
        assert_eq!(pace(1e9).piece(31, 0), 31);
        assert_eq!(pace(1.0).piece(31, 0), 1);
        assert!(pace(1e6).piece(300, 300) <= DECODED);
    }

    #[test]
    fn a_batch_is_never_empty() {
        assert_eq!(pace(1.0).batch([900, 900].into_iter()), 1);
        assert_eq!(pace(1e9).batch([900, 900].into_iter()), 2);
    }

    #[test]
    fn measurements_replace_the_guess() {
        let mut pace = pace(1.0);
        let slow = pace.ms(1, 100);
        for _ in 0..30 {
            pace.note(&[(1, 100)], 0.5);
        }
        assert!(pace.ms(1, 100) < slow && (pace.ms(1, 100) - 0.5).abs() < 0.1);
    }
}
