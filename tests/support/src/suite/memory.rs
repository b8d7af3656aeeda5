//! Arrays inside buffers: strides, gaps that are poisoned, and guards that must survive.

use wgpu_mla::{Device, KvSpec, KvView, MlaShape, Result, Slabs, View};

use crate::paint::POISON;

/// Where the elements of a `[tokens, heads, dim]` array are, in elements.
#[derive(Debug, Clone, Copy)]
pub struct Strides {
    pub offset: usize,
    pub token: usize,
    pub head: usize,
}

impl Strides {
    pub fn dense(heads: usize, dim: usize) -> Self {
        Self { offset: 0, token: heads * dim, head: dim }
    }

    /// One past the last element.
    pub fn end(&self, [tokens, heads, dim]: [usize; 3]) -> usize {
        if tokens * heads * dim == 0 {
            return self.offset;
        }
        self.offset + (tokens - 1) * self.token + (heads - 1) * self.head + dim
    }

    pub fn view<'a, T>(&self, buffer: &'a T) -> View<&'a T> {
        let [offset, token_stride, head_stride] = [self.offset, self.token, self.head].map(|x| x as u64);
        View { buffer, offset, token_stride, head_stride }
    }

    /// The byte ranges of the rows in a buffer, in `[tokens, heads]` order.
    fn rows(
        &self,
        [tokens, heads, dim]: [usize; 3],
        elem: usize,
    ) -> impl Iterator<Item = std::ops::Range<usize>> {
        let Self { offset, token: t, head: h } = *self;
        let rows = if dim == 0 { 0 } else { tokens * heads };
        (0..rows).map(move |row| {
            let begin = (offset + row / heads * t + row % heads * h) * elem;
            begin..begin + dim * elem
        })
    }
}

/// Spreads a dense array over a buffer's bytes; the rest is poison.
pub fn scatter(dense: &[u8], dims: [usize; 3], elem: usize, strides: Strides) -> Vec<u8> {
    let mut bytes = vec![POISON; strides.end(dims) * elem];
    for (row, range) in strides.rows(dims, elem).enumerate() {
        let len = range.len();
        bytes[range].copy_from_slice(&dense[row * len..][..len]);
    }
    bytes
}

/// The dense array, and whether everything around it is still poison.
pub fn gather(
    bytes: &[u8],
    dims: [usize; 3],
    elem: usize,
    strides: Strides,
) -> (Vec<u8>, Result<(), String>) {
    let mut rest = bytes.to_vec();
    let mut dense = Vec::with_capacity(dims.iter().product::<usize>() * elem);
    for range in strides.rows(dims, elem) {
        dense.extend_from_slice(&bytes[range.clone()]);
        rest[range].fill(POISON);
    }
    let intact = match rest.iter().position(|&byte| byte != POISON) {
        Some(at) => Err(format!("byte {at} outside of the array was written")),
        None => Ok(()),
    };
    (dense, intact)
}

/// Where the pages of a cache are, in elements of `bytes` bytes.
#[derive(Debug, Clone, Copy)]
pub struct Pages {
    pub offset: usize,
    pub layer_stride: usize,
    pub layer: usize,
    pub block_stride: usize,
    pub bytes: usize,
}

impl Pages {
    pub fn dense(kv: &KvSpec, row_elems: usize) -> Self {
        let bytes = kv.dtype().bytes();
        Self { offset: 0, layer_stride: 0, layer: 0, block_stride: kv.page_size as usize * row_elems, bytes }
    }

    /// The second of three layers, with gaps before the first, between pages and between layers.
    pub fn gaps(kv: &KvSpec, row_elems: usize) -> Self {
        // Records are aligned to 16 bytes, other tokens to 8 elements.
        let unit = if kv.layout.is_plain() { 8 } else { 16 };
        let block_stride = (kv.page_size as usize * row_elems).next_multiple_of(unit) + unit;
        let layer_stride = kv.num_pages as usize * block_stride + unit;
        Self { offset: 16, layer_stride, layer: 1, block_stride, bytes: kv.dtype().bytes() }
    }

    /// Pages as rows of one array, so that [`scatter`] and [`gather`] work on them.
    pub fn strides(&self) -> Strides {
        let offset = self.offset + self.layer * self.layer_stride;
        Strides { offset, token: self.block_stride, head: self.block_stride }
    }

    pub fn view<'a, T>(&self, buffer: &'a T) -> KvView<&'a T> {
        let [offset, layer_stride, block_stride] =
            [self.offset, self.layer_stride, self.block_stride].map(|x| (x * self.bytes) as u64);
        KvView { buffer, offset, layer_stride, layer: self.layer as u32, block_stride, slabs: Slabs::ONE }
    }
}

/// Elements of a token, or bytes where it is a record.
pub fn stored_elems(kv: &KvSpec, shape: &MlaShape) -> usize {
    kv.token(shape).bytes as usize / kv.dtype().bytes()
}

/// `[num_pages, 1, page_elems]`.
pub fn page_dims(kv: &KvSpec, row_elems: usize) -> [usize; 3] {
    [kv.num_pages as usize, 1, kv.page_size as usize * row_elems]
}

/// Bytes of poison behind every array.
const GUARD: usize = 64;

/// A buffer that holds `bytes` and a guard of poison.
pub fn upload<B: Device>(backend: &B, bytes: &[u8]) -> Result<B::Buffer> {
    let mut padded = bytes.to_vec();
    padded.resize((bytes.len() + GUARD).next_multiple_of(4), POISON);
    let buffer = backend.buffer(padded.len() as u64)?;
    backend.upload(&buffer, 0, &padded)?;
    Ok(buffer)
}

/// What [`upload`] of `len` bytes has become, its guard included.
pub fn download<B: Device>(backend: &B, buffer: &B::Buffer, len: usize) -> Result<Vec<u8>> {
    backend.download(buffer, (len + GUARD).next_multiple_of(4) as u64)
}
