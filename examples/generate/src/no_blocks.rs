//! There are no quantised types in a page, which reads no GGUF.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blocks {}

impl Blocks {
    pub fn elems(self) -> usize {
        match self {}
    }

    pub fn bytes(self) -> usize {
        match self {}
    }

    pub fn decode(self, _: &[u8], _: &mut [f32]) {
        match self {}
    }

    pub fn multiplies(self, _: usize) -> bool {
        match self {}
    }

    pub fn product(self, _: &[u8], _: usize, _: &[f32], _: usize) -> Vec<f32> {
        match self {}
    }
}
