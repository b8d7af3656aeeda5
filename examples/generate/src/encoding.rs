//! How a weight's elements are stored: one by one, or in blocks that share scales.

use wgpu_mla::Dtype;

pub use crate::blocks::Blocks;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    Plain(Dtype),
    /// A quantised type of GGUF.
    Blocks(Blocks),
}

impl Encoding {
    /// Elements of a block. A row is whole blocks.
    pub fn block(self) -> usize {
        match self {
            Self::Plain(_) => 1,
            Self::Blocks(blocks) => blocks.elems(),
        }
    }

    /// Bytes of so many elements, which are whole blocks.
    pub fn bytes(self, elems: usize) -> usize {
        match self {
            Self::Plain(dtype) => elems * dtype.bytes(),
            Self::Blocks(blocks) => elems / blocks.elems() * blocks.bytes(),
        }
    }

    /// The elements of whole blocks.
    pub fn decode(self, bytes: &[u8]) -> Vec<f32> {
        match self {
            Self::Plain(dtype) => dtype.decode_all(bytes),
            Self::Blocks(blocks) => {
                let mut values = vec![0.0; bytes.len() / blocks.bytes() * blocks.elems()];
                blocks.decode(bytes, &mut values);
                values
            }
        }
    }
}

impl From<Dtype> for Encoding {
    fn from(dtype: Dtype) -> Self {
        Self::Plain(dtype)
    }
}
