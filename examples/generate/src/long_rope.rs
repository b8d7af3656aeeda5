//! LongRoPE: a factor for each pair, of one list for short sequences and of another for long ones.

use crate::fields::Fields;

#[derive(Debug, Clone, PartialEq)]
pub struct LongRope {
    /// Divide the frequencies of `R / 2` pairs in tables of no more positions than the model was first trained for.
    short: Vec<f64>,
    /// The same for longer tables.
    long: Vec<f64>,
    original: f64,
}

impl LongRope {
    /// With the factor of cosines and sines.
    pub fn parse(
        object: &str,
        fields: &Fields<'_>,
        rope_dim: u32,
        original: f64,
        max_position: f64,
    ) -> Result<(Self, f64), String> {
        let factors = |name: &str| match fields.numbers(name)? {
            Some(factors)
                if factors.len() == rope_dim as usize / 2 && factors.iter().all(|&factor| factor > 0.0) =>
            {
                Ok(factors)
            }
            _ => Err(format!(
                "{name} of {object}: must be {} numbers above 0, half of qk_rope_head_dim",
                rope_dim / 2
            )),
        };
        let factor = fields.number("factor")?.unwrap_or(max_position / original);
        let attention_factor = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / original.ln()).sqrt() };
        let attention_factor = fields.number("attention_factor")?.unwrap_or(attention_factor);
        match attention_factor.is_finite() && attention_factor > 0.0 {
            true => Ok((
                Self { short: factors("short_factor")?, long: factors("long_factor")?, original },
                attention_factor,
            )),
            false => {
                Err(format!("{object} makes an attention factor of {attention_factor}: must be more than 0"))
            }
        }
    }

    /// Cosines and sines in place of those of plain RoPE, `[positions, R]`.
    ///
    /// One list serves a whole table: a cache whose keys turned by both, as transformers makes where a sequence outgrows the short one
    /// while it is decoded, is nothing that the model was trained with.
    pub fn turn(&self, table: &mut [f32], inv_freq: &[f64], attention_factor: f64) {
        let pairs = inv_freq.len();
        let positions = table.len() / (2 * pairs).max(1);
        let factors = if positions as f64 > self.original { &self.long } else { &self.short };
        for (position, row) in table.chunks_exact_mut(2 * pairs).enumerate() {
            let (cos, sin) = row.split_at_mut(pairs);
            for (pair, factor) in factors.iter().enumerate() {
                let angle = position as f64 * inv_freq[pair] / factor;
                (cos[pair], sin[pair]) =
                    ((angle.cos() * attention_factor) as f32, (angle.sin() * attention_factor) as f32);
            }
        }
    }
}
