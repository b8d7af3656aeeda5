//! What elements of decodes are: usual data, and hard data.

use wgpu_mla::{Dtype, MlaDecode};

use super::draw::{Draw, bytes};

/// What the elements are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Data {
    /// randn / 10.
    Small,
    /// randn, with logits of several units.
    Wide,
    /// Some keys take all the weight.
    Needles,
    /// Logits from +-100 to beyond +-1000.
    Steep,
    /// 300 beside 1e-4.
    Uneven,
    /// 1e5, past f16.
    Huge,
    /// Small, with NaN and infinity among keys and queries.
    NotFinite,
}

impl Data {
    pub fn draw(draw: &mut Draw, spec: &MlaDecode) -> Self {
        use Data::{Huge, Needles, NotFinite, Small, Steep, Uneven, Wide};
        match draw.pick(&[Small, Small, Wide, Wide, Needles, Steep, Uneven, Huge, NotFinite]) {
            // f32 has too few digits for logits of a thousand that decide among each other.
            Steep if [spec.kv.dtype(), spec.query] == [Dtype::F32; 2] => Wide,
            Huge if spec.kv.dtype() == Dtype::F16 || spec.out == Dtype::F16 => Uneven,
            data => data,
        }
    }

    /// About the largest key and query elements, for the scales of e4m3.
    pub fn largest(self) -> [f64; 2] {
        match self {
            Self::Small | Self::NotFinite => [0.5, 0.5],
            Self::Wide => [5.0, 5.0],
            Self::Needles => [1.5, 1.5],
            Self::Steep => [720.0, 16.0],
            Self::Uneven => [300.0, 5e-3],
            Self::Huge => [1e5, 1.5e-5],
        }
    }

    /// A key, the `count`th.
    pub fn key(self, draw: &mut Draw, row: usize, big: usize, scale: f64, count: usize) -> Vec<f64> {
        let is_needle = draw.once_in(16);
        let mut key: Vec<f64> = (0..row)
            .map(|i| match self {
                Self::Small | Self::Steep | Self::NotFinite => draw.normal() / 10.0,
                Self::Wide => draw.normal(),
                Self::Needles if is_needle => draw.normal() / 10.0 + side(i),
                Self::Needles => draw.normal() / 10.0,
                Self::Uneven => draw.pick(&[300.0, -300.0, 1e-4, -1e-4]) * (1.0 + draw.unit()) / 2.0,
                Self::Huge => 1e5 * (2.0 * draw.unit() - 1.0),
            })
            .collect();
        if self == Self::Steep {
            let logit = 100.0 + 8.0 * (count * 37 % 151) as f64;
            key[big] = if count.is_multiple_of(2) { logit } else { -logit } / (16.0 * scale);
        }
        key
    }

    pub fn query(self, draw: &mut Draw, row: usize, big: usize, head: usize) -> Vec<f64> {
        let factor = match self {
            Self::Small | Self::Needles | Self::Steep | Self::NotFinite => 0.1,
            Self::Wide => 1.0,
            Self::Uneven => 1e-3,
            Self::Huge => 3e-6,
        };
        let needle = |i| if self == Self::Needles { side(i) } else { 0.0 };
        let mut query: Vec<f64> = (0..row).map(|i| factor * draw.normal() + needle(i)).collect();
        if self == Self::Steep {
            query[big] = if head.is_multiple_of(2) { 16.0 } else { -16.0 };
        }
        query
    }
}

fn side(column: usize) -> f64 {
    if (column * 2_654_435_761) >> 7 & 1 == 0 { 1.0 } else { -1.0 }
}

/// A row as bytes of `x / scale`; of data that is not finite, perhaps with such an element.
pub fn encoded(dtype: Dtype, row: Vec<f64>, scale: f32, data: Data, draw: &mut Draw) -> Vec<u8> {
    let mut row: Vec<f64> = row.into_iter().map(|x| x / f64::from(scale)).collect();
    if data == Data::NotFinite && draw.once_in(24) {
        let at = draw.below(row.len());
        row[at] = draw.pick(&[f64::NAN, f64::INFINITY, f64::NEG_INFINITY]);
    }
    bytes(dtype, row)
}
