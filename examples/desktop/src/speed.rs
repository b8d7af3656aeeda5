//! Tokens and bytes a second, of the last second or two.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::shown::Speed;

const WINDOW: Duration = Duration::from_millis(1500);

/// What was written and read lately.
#[derive(Default)]
pub struct Meter {
    tokens: VecDeque<(Instant, usize)>,
    /// Bytes and milliseconds of layers, older ones faded.
    bytes: f64,
    ms: f64,
    layers: f64,
    all: u64,
}

impl Meter {
    /// A layer read so many bytes of the cache.
    pub fn attended(&mut self, bytes: usize, ms: f64) {
        const FADE: f64 = 0.95;
        self.bytes = FADE * self.bytes + bytes as f64;
        self.ms = FADE * self.ms + ms;
        self.layers = FADE * self.layers + 1.0;
    }

    /// A sequence got so many new tokens.
    pub fn tokens(&mut self, tokens: usize) {
        self.all += tokens as u64;
        self.tokens.push_back((Instant::now(), tokens));
    }

    pub fn speed(&mut self) -> Speed {
        while self.tokens.front().is_some_and(|(at, _)| at.elapsed() > WINDOW) {
            self.tokens.pop_front();
        }
        // What came with the first of them was written before it.
        let first = self.tokens.front().map(|&(at, _)| at);
        let since = self
            .tokens
            .iter()
            .filter(|&&(at, _)| Some(at) != first)
            .map(|&(_, tokens)| tokens)
            .sum::<usize>();
        let last = self.tokens.back().map(|&(at, _)| at);
        let seconds = first.zip(last).map_or(0.0, |(first, last)| last.duration_since(first).as_secs_f64());
        Speed {
            tokens_per_second: if seconds > 0.0 { since as f64 / seconds } else { 0.0 },
            gigabytes_per_second: if self.ms > 0.0 { self.bytes / self.ms / 1e6 } else { 0.0 },
            layer_ms: if self.layers > 0.0 { self.ms / self.layers } else { 0.0 },
            tokens: self.all,
        }
    }
}
