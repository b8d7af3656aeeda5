//! The reference: the formulas of `docs/numbers.md` in f64, for one row at a time. It shares no line with the suite's oracle, nor with the
//! crate. IEEE 754 gives NaN and infinity the results that `docs/numbers.md` lists.

/// One query row over its keys: its output and natural LSE.
pub fn attend(q: &[f64], keys: &[&[f64]], values: &[&[f64]], dim: usize, scale: f64) -> (Vec<f64>, f64) {
    if keys.is_empty() {
        return (vec![0.0; dim], f64::NEG_INFINITY);
    }
    let logits: Vec<f64> = keys.iter().map(|key| scale * dot(q, key)).collect();
    let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = logits.iter().map(|logit| (logit - top).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let mut out = vec![0.0; dim];
    for (weight, value) in weights.iter().zip(values) {
        out.iter_mut().zip(*value).for_each(|(out, x)| *out += weight / sum * x);
    }
    (out, top + sum.ln())
}

pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    let (mut sums, (fours, rest)) = ([0.0; 4], a.as_chunks::<4>());
    for (a, b) in fours.iter().zip(b.as_chunks::<4>().0) {
        sums = [sums[0] + a[0] * b[0], sums[1] + a[1] * b[1], sums[2] + a[2] * b[2], sums[3] + a[3] * b[3]];
    }
    sums.iter().sum::<f64>() + rest.iter().zip(&b[a.len() - rest.len()..]).map(|(a, b)| a * b).sum::<f64>()
}

/// Partial results of one row, `(out, natural LSE)`, merged. An LSE that is not finite is that of an empty part.
pub fn merge(parts: &[(&[f64], f64)], dim: usize) -> (Vec<f64>, f64) {
    let parts: Vec<_> = parts.iter().filter(|(_, lse)| lse.is_finite()).collect();
    let top = parts.iter().fold(f64::NEG_INFINITY, |top, (_, lse)| top.max(*lse));
    let sum: f64 = parts.iter().map(|(_, lse)| (lse - top).exp()).sum();
    let mut out = vec![0.0; dim];
    for (part, lse) in &parts {
        let weight = (lse - top).exp() / sum;
        // f32 has no number for such a weight.
        if weight > 1e-46 {
            out.iter_mut().zip(*part).for_each(|(out, x)| *out += weight * x);
        }
    }
    (out, if parts.is_empty() { f64::NEG_INFINITY } else { top + sum.ln() })
}

/// A row turned by its position's angles, `cos_sin` being that position's cosines, then its sines.
pub fn rotate(x: &[f64], cos_sin: &[f64], interleaved: bool) -> Vec<f64> {
    let half = x.len() / 2;
    let mut y = vec![0.0; x.len()];
    for pair in 0..half {
        let (a, b) = if interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + half) };
        let (cos, sin) = (cos_sin[pair], cos_sin[half + pair]);
        (y[a], y[b]) = (x[a] * cos - x[b] * sin, x[b] * cos + x[a] * sin);
    }
    y
}

/// Keys that query token `i` of `q_len` sees, of `len`.
pub fn sees(mask: &Sees, i: usize, q_len: usize, len: usize) -> usize {
    let first = match mask {
        Sees::All => return len,
        Sees::Bounds(bounds) => return bounds[i],
        Sees::BottomRight => len as i64 - q_len as i64 + 1,
        Sees::From(first) => *first,
    };
    (first + i as i64).clamp(0, len as i64) as usize
}

/// Which keys of its sequence a query token sees; bounds are those of one sequence.
#[derive(Debug, Clone, PartialEq)]
pub enum Sees {
    BottomRight,
    From(i64),
    All,
    Bounds(Vec<usize>),
}

/// The rank that holds a token: block `k` of a rank of weight `w` is due at `(k + 1/2) / w` of the pattern, ties go to the lower rank.
pub fn owner(weights: &[usize], interleave: usize, token: usize) -> usize {
    let mut due: Vec<(usize, usize)> = Vec::new();
    let all: usize = weights.iter().product();
    for (rank, &weight) in weights.iter().enumerate().filter(|(_, weight)| **weight > 0) {
        // In units of 1 / (2 * all), so that ties are ties.
        due.extend((0..weight).map(|k| ((2 * k + 1) * (all / weight), rank)));
    }
    due.sort_unstable();
    due[token / interleave % due.len()].1
}
