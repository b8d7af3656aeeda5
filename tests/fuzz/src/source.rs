//! What a structured target draws its input from: bytes, of which each choice takes a few. Bytes that are missing count as 0, which is
//! the plainest choice, so that a shorter input is a simpler one.

use mla_support::paint::Rng;

/// The rest of an input.
#[derive(Debug, Clone)]
pub struct Source<'a> {
    bytes: &'a [u8],
}

impl<'a> Source<'a> {
    /// All of an input.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    /// The next byte.
    pub fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.bytes.split_first() else { return 0 };
        self.bytes = rest;
        first
    }

    /// The next `count` bytes as a number.
    fn number(&mut self, count: usize) -> u64 {
        (0..count).fold(0, |number, at| number | u64::from(self.byte()) << (8 * at))
    }

    /// In `0..n`; 0 if `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        let bytes = match n {
            0 | 1 => return 0,
            2..=0x100 => 1,
            0x101..=0x1_0000 => 2,
            0x1_0001..=0x1_0000_0000 => 4,
            _ => 8,
        };
        self.number(bytes) % n
    }

    /// In `0..n`.
    pub fn index(&mut self, n: usize) -> usize {
        self.below(n as u64) as usize
    }

    /// In `first..=last`.
    pub fn between(&mut self, first: u32, last: u32) -> u32 {
        first + self.below(u64::from(last - first) + 1) as u32
    }

    /// One of some values, usually with the plainest first.
    pub fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.index(of.len())].clone()
    }

    /// True `share` times in 256.
    pub fn chance(&mut self, share: u8) -> bool {
        self.byte() > 255 - share
    }

    /// A number at which arithmetic goes wrong, or any.
    pub fn hostile(&mut self) -> u32 {
        const EDGES: [u32; 14] = [
            0,
            1,
            2,
            3,
            255,
            256,
            257,
            1 << 16,
            1 << 24,
            (1 << 31) - 1,
            1 << 31,
            (1 << 31) + 1,
            u32::MAX - 1,
            u32::MAX,
        ];
        match self.index(EDGES.len() + 2) {
            at if at < EDGES.len() => EDGES[at],
            _ => self.number(4) as u32,
        }
    }

    /// A number of 64 bits at which arithmetic goes wrong, or any.
    pub fn hostile_u64(&mut self) -> u64 {
        match self.index(8) {
            0 => u64::MAX,
            1 => u64::MAX - self.below(256),
            2 => (1 << 63) - 4 + self.below(8),
            3 => (1 << 32) - 4 + self.below(8),
            4 => u64::from(self.hostile()) * u64::from(self.hostile()),
            5 => self.number(8),
            _ => self.hostile().into(),
        }
    }

    /// A generator for the contents of arrays.
    pub fn rng(&mut self) -> Rng {
        Rng(self.number(8))
    }

    /// What is left.
    #[must_use]
    pub fn rest(self) -> &'a [u8] {
        self.bytes
    }
}
