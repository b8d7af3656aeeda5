//! Sizes of many differences: their mean, a percentile and the largest.

/// Buckets of a histogram by the upper half of an f32's bits: an exponent and 7 bits, so 0.8 % wide.
const BUCKETS: usize = 1 << 15;

/// Differences, of which only their sizes are kept.
#[derive(Debug, Clone)]
pub struct Distances {
    counts: Vec<u64>,
    total: u64,
    sum: f64,
    max: f32,
}

impl Default for Distances {
    fn default() -> Self {
        Self { counts: vec![0; BUCKETS], total: 0, sum: 0.0, max: 0.0 }
    }
}

impl Distances {
    /// A NaN is as far as can be.
    pub fn add(&mut self, difference: f32) {
        let size = if difference.is_nan() { f32::INFINITY } else { difference.abs() };
        self.counts[(size.to_bits() >> 16) as usize] += 1;
        self.total += 1;
        self.sum += f64::from(size);
        self.max = self.max.max(size);
    }

    /// The mean; 0 of none.
    pub fn mean(&self) -> f64 {
        if self.total == 0 { 0.0 } else { self.sum / self.total as f64 }
    }

    /// The largest.
    pub fn max(&self) -> f32 {
        self.max
    }

    /// A size that this share of all is within, at most 0.8 % more than the least such.
    pub fn percentile(&self, share: f64) -> f32 {
        let wanted = (share * self.total as f64).ceil() as u64;
        let mut within = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            within += count;
            if within >= wanted {
                let end = f32::from_bits(((bucket as u32) << 16) | 0xFFFF);
                // The first bucket has zeros alone, and the last may end past the largest.
                return if bucket == 0 { 0.0 } else { end.min(self.max) };
            }
        }
        self.max
    }
}

#[cfg(test)]
mod tests {
    use super::Distances;

    #[test]
    fn a_percentile_is_within_a_bucket_of_the_sorted_sizes() {
        let mut distances = Distances::default();
        assert_eq!((distances.mean(), distances.percentile(0.999), distances.max()), (0.0, 0.0, 0.0));
        (1..=10_000).for_each(|i| distances.add(if i % 2 == 0 { i as f32 } else { -(i as f32) }));
        assert_eq!((distances.mean(), distances.max()), (5000.5, 10_000.0));
        let (want, got) = (9990.0, distances.percentile(0.999));
        assert!((want..want * 1.008).contains(&got), "{got}");
        distances.add(f32::NAN);
        assert_eq!((distances.max(), distances.mean()), (f32::INFINITY, f64::INFINITY));
    }
}
