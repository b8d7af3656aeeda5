//! The next token of a row of logits.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// How tokens are chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// 0: always the likeliest.
    pub temperature: f32,
    pub seed: u64,
}

/// One sequence's choice of tokens.
pub struct Sampler {
    temperature: f32,
    random: StdRng,
}

impl Sampler {
    /// Sequences with other indices choose otherwise.
    pub fn new(sampling: Sampling, sequence: usize) -> Self {
        let random = StdRng::seed_from_u64(sampling.seed.wrapping_add(sequence as u64));
        Self { temperature: sampling.temperature, random }
    }

    pub fn next(&mut self, logits: &[f32]) -> u32 {
        let best = likeliest(logits);
        if self.temperature <= 0.0 {
            return best as u32;
        }
        let weight = |x: f32| f64::from((x - logits[best]) / self.temperature).exp();
        let mut left = self.random.random::<f64>() * logits.iter().map(|&x| weight(x)).sum::<f64>();
        for (token, &logit) in logits.iter().enumerate() {
            left -= weight(logit);
            if left < 0.0 {
                return token as u32;
            }
        }
        best as u32
    }
}

/// Where the largest is, the first of equal ones.
pub fn likeliest(logits: &[f32]) -> usize {
    let mut best = 0;
    for (token, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = token;
        }
    }
    best
}
