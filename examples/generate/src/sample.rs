//! The next token of a row of logits.

use std::collections::HashSet;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// How tokens are chosen. The filters come in the order of transformers: penalty, temperature, `top_k`, `top_p`, `min_p`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// 0: always the likeliest.
    pub temperature: f32,
    pub seed: u64,
    /// Only so many of the likeliest; 0: all.
    pub top_k: usize,
    /// Only the likeliest whose probabilities sum to this, and one more; 1: all.
    pub top_p: f32,
    /// Only those with this share of the likeliest one's probability; 0: all.
    pub min_p: f32,
    /// Logits of tokens that were there before are divided by it if they are above 0, and multiplied if below; 1: none.
    pub repetition_penalty: f32,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.0, seed: 1, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0 }
    }
}

/// One sequence's choice of tokens.
pub struct Sampler {
    sampling: Sampling,
    random: StdRng,
    /// Tokens of the prompt and those that were chosen, for a penalty.
    seen: HashSet<u32>,
}

impl Sampler {
    /// Sequences with other indices choose otherwise.
    pub fn new(sampling: Sampling, sequence: usize) -> Self {
        let random = StdRng::seed_from_u64(sampling.seed.wrapping_add(sequence as u64));
        Self { sampling, random, seen: HashSet::new() }
    }

    /// Tokens that are there before the first choice: what a repetition repeats.
    pub fn see(&mut self, tokens: &[u32]) {
        if self.sampling.repetition_penalty != 1.0 {
            self.seen.extend(tokens);
        }
    }

    pub fn next(&mut self, logits: &[f32]) -> u32 {
        let token = match self.penalised(logits) {
            Some(logits) => self.choose(&logits),
            None => self.choose(logits),
        };
        self.see(&[token]);
        token
    }

    fn penalised(&self, logits: &[f32]) -> Option<Vec<f32>> {
        let penalty = self.sampling.repetition_penalty;
        if penalty == 1.0 {
            return None;
        }
        let mut logits = logits.to_vec();
        for &token in &self.seen {
            if let Some(x) = logits.get_mut(token as usize) {
                *x = if *x > 0.0 { *x / penalty } else { *x * penalty };
            }
        }
        Some(logits)
    }

    fn choose(&mut self, logits: &[f32]) -> u32 {
        let best = likeliest(logits);
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.sampling;
        if temperature <= 0.0 || top_k == 1 {
            return best as u32;
        }
        let weight = |x: f32| f64::from((x - logits[best]) / temperature).exp();
        if top_k == 0 && top_p >= 1.0 && min_p <= 0.0 {
            let all = logits.iter().enumerate().map(|(token, &x)| (token as u32, weight(x)));
            return draw(&mut self.random, all).unwrap_or(best as u32);
        }
        let mut left: Vec<(u32, f64)> =
            logits.iter().enumerate().map(|(token, &x)| (token as u32, weight(x))).collect();
        // The likeliest has a weight of 1.
        left.retain(|(_, weight)| *weight >= f64::from(min_p));
        left.sort_by(|a, b| b.1.total_cmp(&a.1));
        if top_k > 0 {
            left.truncate(top_k);
        }
        let (mut sum, most) = (0.0, f64::from(top_p) * left.iter().map(|(_, weight)| weight).sum::<f64>());
        let enough = left.iter().position(|(_, weight)| {
            sum += weight;
            sum >= most
        });
        left.truncate(enough.map_or(left.len(), |at| at + 1));
        draw(&mut self.random, left.into_iter()).unwrap_or(best as u32)
    }
}

/// One of them by weight. `None` where rounding leaves none.
fn draw(random: &mut StdRng, all: impl Iterator<Item = (u32, f64)> + Clone) -> Option<u32> {
    let mut left = random.random::<f64>() * all.clone().map(|(_, weight)| weight).sum::<f64>();
    for (token, weight) in all {
        left -= weight;
        if left < 0.0 {
            return Some(token);
        }
    }
    None
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Natural logarithms of these, so that probabilities are known.
    const SHARES: [f32; 5] = [0.1, 0.4, 0.05, 0.25, 0.2];

    fn chosen(sampling: Sampling) -> Vec<u32> {
        let logits = SHARES.map(f32::ln);
        let mut sampler = Sampler::new(Sampling { temperature: 1.0, ..sampling }, 0);
        let mut all: Vec<u32> = (0..2000).map(|_| sampler.choose(&logits)).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    #[test]
    fn filters_leave_what_they_say() {
        let none = Sampling::default();
        assert_eq!(chosen(none), [0, 1, 2, 3, 4]);
        assert_eq!(chosen(Sampling { top_k: 3, ..none }), [1, 3, 4]);
        assert_eq!(chosen(Sampling { top_k: 1, ..none }), [1]);
        assert_eq!(chosen(Sampling { top_p: 0.6, ..none }), [1, 3]);
        assert_eq!(chosen(Sampling { top_p: 0.66, ..none }), [1, 3, 4]);
        assert_eq!(chosen(Sampling { top_p: 0.0, ..none }), [1]);
        assert_eq!(chosen(Sampling { min_p: 0.6, ..none }), [1, 3]);
        assert_eq!(chosen(Sampling { min_p: 0.2, top_k: 2, ..none }), [1, 3]);
        // Two are left, 0.4 and 0.25, and the first alone has 0.6 of their sum.
        assert_eq!(chosen(Sampling { top_k: 2, top_p: 0.6, ..none }), [1]);
        let cold = Sampling { temperature: 0.0, ..none };
        assert_eq!(Sampler::new(cold, 0).next(&SHARES.map(f32::ln)), 1);
    }

    #[test]
    fn a_penalty_is_for_what_was_there() {
        let sampling = Sampling { repetition_penalty: 2.0, ..Sampling::default() };
        let mut sampler = Sampler::new(sampling, 0);
        sampler.see(&[0, 9]);
        // 3 / 2, then what is chosen is penalised too; below 0 it is multiplied.
        assert_eq!([0; 3].map(|_| sampler.next(&[3.0, 2.0, 1.25])), [1, 0, 0]);
        assert_eq!(Sampler::new(sampling, 0).next(&[-1.0, -1.5]), 0);
        let mut sampler = Sampler::new(sampling, 0);
        sampler.see(&[0]);
        assert_eq!(sampler.next(&[-1.0, -1.5]), 1);
    }
}
