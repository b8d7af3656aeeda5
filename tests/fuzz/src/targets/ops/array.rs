//! One array of an op: where its rows lie in a buffer, and what they hold.

use mla_support::paint::Rng;
use wgpu_mla::Dtype;

use crate::source::Source;

/// What the elements of an array are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holds {
    /// Elements of a dtype, about 1.
    Elements(Dtype),
    /// f32, some of them not finite.
    Lses,
    /// i32, about this many different ones, some outside.
    Positions(u32),
    /// Small counters.
    Counters,
}

impl Holds {
    /// Bytes of an element.
    pub fn bytes(self) -> u64 {
        match self {
            Self::Elements(dtype) => dtype.bytes() as u64,
            _ => 4,
        }
    }

    fn put(self, rng: &mut Rng, row: &mut [u8]) {
        match self {
            Self::Elements(dtype) => {
                for element in row.chunks_exact_mut(dtype.bytes()) {
                    element.copy_from_slice(&dtype.encode_all(&[rng.randn()]));
                }
            }
            Self::Lses => words(row, || match rng.below(16) {
                0 => f32::NEG_INFINITY.to_bits(),
                1 => f32::NAN.to_bits(),
                2 => f32::INFINITY.to_bits(),
                _ => (3.0 * rng.randn()).to_bits(),
            }),
            Self::Positions(most) => words(row, || match rng.below(8) {
                0 => rng.next() as u32,
                _ => rng.below(most as usize) as u32,
            }),
            Self::Counters => words(row, || rng.below(4) as u32),
        }
    }
}

fn words(row: &mut [u8], mut next: impl FnMut() -> u32) {
    row.chunks_exact_mut(4).for_each(|word| word.copy_from_slice(&next().to_le_bytes()));
}

/// Rows `[sets, tokens, heads]` of `dim` elements somewhere in a buffer.
#[derive(Debug, Clone)]
pub struct Array {
    pub holds: Holds,
    pub writes: bool,
    pub counts: [u64; 3],
    pub dim: u64,
    /// What offset and strides are multiples of, in elements.
    pub unit: u64,
    /// Whether heads lie one behind the other, with nothing between.
    pub packed: bool,
    /// Whether the argument has no offset and no strides: its rows are dense at the front.
    pub plain: bool,
    /// Whether strides of tokens, and of heads, may be 0: one row for all.
    pub repeats: [bool; 2],
    /// Whether the stride of a dimension of 1 is unread.
    pub unread: bool,
    /// The array whose offset and strides this one has: a slab's.
    pub like: Option<usize>,
    pub offset: u64,
    pub strides: [u64; 3],
    /// Which buffer it is in.
    pub buffer: usize,
    /// Bytes that its buffer has.
    pub bytes: u64,
}

impl Array {
    /// An array of strided rows that is read.
    pub fn read(holds: Holds, counts: [u32; 3], dim: u32, unit: u64) -> Self {
        Self {
            holds,
            writes: false,
            counts: counts.map(u64::from),
            dim: dim.into(),
            unit,
            packed: false,
            plain: false,
            repeats: [false; 2],
            unread: true,
            like: None,
            offset: 0,
            strides: [0; 3],
            buffer: 0,
            bytes: 0,
        }
    }

    /// An array of strided rows that is written.
    pub fn written(holds: Holds, counts: [u32; 3], dim: u32, unit: u64) -> Self {
        Self { writes: true, ..Self::read(holds, counts, dim, unit) }
    }

    /// An array that begins at the front of its buffer.
    pub fn whole(holds: Holds, rows: u32, dim: u32) -> Self {
        Self { plain: true, ..Self::read(holds, [1, rows, 1], dim, 1) }
    }

    /// Lays the rows out: which dimension lies inside which, and what is left free between, the source says.
    pub fn lay_out(&mut self, source: &mut Source<'_>) {
        let mut free = |most: u64| if self.plain { 0 } else { source.below(most) * self.unit };
        self.offset = free(4);
        let gaps = [free(4), free(4), free(4)];
        let mut order = [2, 1, 0];
        if !self.plain {
            order.swap(2, source.index(3));
            order.swap(1, source.index(2));
        }
        if self.packed {
            order.sort_by_key(|&dimension| dimension != 2);
        }
        let mut inside = self.dim;
        for (dimension, gap) in order.into_iter().zip(gaps) {
            let gap = if self.packed && dimension == 2 { 0 } else { gap };
            let unit = if self.packed && dimension == 2 { 1 } else { self.unit };
            self.strides[dimension] = (inside + gap).next_multiple_of(unit.max(1));
            let count = self.counts[dimension];
            let repeats = dimension > 0 && self.repeats[dimension - 1] && source.chance(64);
            if repeats {
                self.strides[dimension] = 0;
            } else if count > 0 {
                inside += (count - 1) * self.strides[dimension];
            }
        }
        for dimension in 0..3 {
            if self.unread && !self.plain && self.counts[dimension] == 1 && source.chance(32) {
                self.strides[dimension] = source.hostile_u64();
            }
        }
    }

    /// The same rows, dense, or with strides that are given.
    pub fn dense(&self, like: Option<[u64; 3]>) -> Self {
        let heads = self.dim.next_multiple_of(if self.packed { 1 } else { self.unit.max(1) });
        let tokens = heads * self.counts[2].max(1);
        let strides = like.unwrap_or([tokens * self.counts[1].max(1), tokens, heads]);
        let mut dense = Self { offset: 0, strides, ..self.clone() };
        dense.bytes = dense.needs().unwrap_or(0);
        dense
    }

    /// Where a row begins, in elements, saturating.
    pub fn at(&self, row: [u64; 3]) -> u128 {
        let steps =
            row.iter().zip(self.strides).map(|(&index, stride)| u128::from(index) * u128::from(stride));
        u128::from(self.offset) + steps.sum::<u128>()
    }

    /// Every row.
    pub fn rows(&self) -> impl Iterator<Item = [u64; 3]> + use<> {
        let [sets, tokens, heads] = if self.dim == 0 { [0; 3] } else { self.counts };
        (0..sets).flat_map(move |set| {
            (0..tokens).flat_map(move |token| (0..heads).map(move |head| [set, token, head]))
        })
    }

    /// Bytes from the buffer's front to the end of the last row, if they are countable.
    pub fn needs(&self) -> Option<u64> {
        if self.dim == 0 || self.counts.contains(&0) {
            return Some(0);
        }
        let last = self.at(self.counts.map(|count| count - 1)) + u128::from(self.dim);
        u64::try_from(last * u128::from(self.holds.bytes())).ok()
    }

    /// The bytes of a row in its buffer.
    pub fn row(&self, row: [u64; 3]) -> std::ops::Range<usize> {
        let begin = usize::try_from(self.at(row)).expect("inside of a buffer") * self.holds.bytes() as usize;
        begin..begin + (self.dim * self.holds.bytes()) as usize
    }

    /// Draws the contents of all rows.
    pub fn fill(&self, rng: &mut Rng, image: &mut [u8]) {
        for row in self.rows() {
            self.holds.put(rng, &mut image[self.row(row)]);
        }
    }
}
