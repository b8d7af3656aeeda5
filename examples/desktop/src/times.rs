//! Times of frames: from one to the next, on the thread that draws.

use std::collections::VecDeque;
use std::time::Instant;

/// How many times the graph shows.
pub const SHOWN: usize = 160;

#[derive(Default)]
pub struct Times {
    last: Option<Instant>,
    /// The last frames, and whether each decoded.
    pub recent: VecDeque<f32>,
    /// All frames that decoded, and their seconds.
    pub decoding: Vec<f32>,
}

impl Times {
    /// A frame begins. One whose predecessor was drawn because something moved counts; after a rest it does not.
    pub fn frame(&mut self, is_decoding: bool) {
        let now = Instant::now();
        if let Some(last) = self.last.replace(now) {
            let ms = now.duration_since(last).as_secs_f32() * 1000.0;
            self.recent.push_back(ms);
            if self.recent.len() > SHOWN {
                self.recent.pop_front();
            }
            if is_decoding {
                self.decoding.push(ms);
            }
        }
    }

    /// Nothing moves: the time to the next frame will say nothing.
    pub fn rest(&mut self) {
        self.last = None;
    }
}

/// What this share of the times is at most: 0.95 for p95. 0 where there are none.
pub fn quantile(times: impl Iterator<Item = f32>, share: f32) -> f32 {
    let mut times: Vec<f32> = times.collect();
    times.sort_unstable_by(f32::total_cmp);
    let at = (times.len() as f32 * share).ceil() as usize;
    times.get(at.saturating_sub(1)).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::quantile;

    #[test]
    fn quantiles() {
        let times = || (1..=100).rev().map(|ms| ms as f32);
        assert_eq!((quantile(times(), 0.5), quantile(times(), 0.95)), (50.0, 95.0));
        assert_eq!(quantile(std::iter::empty(), 0.95), 0.0);
        assert_eq!(quantile(std::iter::once(3.0), 0.5), 3.0);
    }
}
