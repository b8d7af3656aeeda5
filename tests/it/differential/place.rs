//! Arrays and caches somewhere in buffers that are larger: with offsets, gaps, other layers and slabs. All that is no element is poison, a
//! pattern that must still be there afterwards.

use wgpu_mla::{Backend, KvSpec, KvView, MlaDecode, Slabs, View};

use super::draw::Draw;

/// Patterns that are NaN in all dtypes; infinity of f32, f16 or bf16; and large numbers that are NaN in e4m3.
const POISONS: [u32; 5] = [0xFFFF_FFFF, 0x7F80_0000, 0x7C00_FC00, 0xFF80_7F80, 0x7F7F_7F7F];

/// Bytes of poison.
pub fn poisoned(draw: &mut Draw, len: usize) -> Vec<u8> {
    let pattern = draw.pick(&POISONS).to_le_bytes();
    let mut bytes = pattern.repeat(len.div_ceil(4));
    bytes.truncate(len);
    bytes
}

/// A `[tokens, heads, dim]` array in a buffer.
#[derive(Debug, Clone)]
pub struct Array {
    dims: [usize; 3],
    elem: usize,
    offset: usize,
    strides: [usize; 2],
    /// All bytes of the buffer where nothing was written yet.
    empty: Vec<u8>,
}

impl Array {
    /// Offset and strides are multiples of `unit` elements.
    pub fn draw(draw: &mut Draw, [tokens, heads, dim]: [usize; 3], elem: usize, unit: usize) -> Self {
        let row = dim.next_multiple_of(unit);
        let (gap, dense) = (|draw: &mut Draw| unit * draw.below(4), draw.once_in(3) && dim % unit == 0);
        let (offset, row, gaps) =
            if dense { (0, dim, [0, 0]) } else { (gap(draw), row + gap(draw), [gap(draw), gap(draw)]) };
        let strides = if dense || !draw.once_in(3) {
            [heads * row + gaps[0], row]
        } else {
            [row, tokens * row + gaps[1]]
        };
        let end = offset + tokens.saturating_sub(1) * strides[0] + heads.saturating_sub(1) * strides[1] + dim;
        // At least as many bytes as an empty array's buffer needs, and some that no view covers.
        let len = (end * elem).next_multiple_of(4) + 4 * draw.within(1, 20);
        Self { dims: [tokens, heads, dim], elem, offset, strides, empty: poisoned(draw, len) }
    }

    /// With an offset and gaps, but heads inside of tokens, evenly: tokens may be those of several sets.
    pub fn dense(draw: &mut Draw, dims: [usize; 3], elem: usize, unit: usize) -> Self {
        loop {
            let array = Self::draw(draw, dims, elem, unit);
            if array.strides[0] >= array.strides[1] * dims[1] {
                return array;
            }
        }
    }

    fn rows(&self) -> impl Iterator<Item = std::ops::Range<usize>> + use<> {
        let Self { dims: [tokens, heads, dim], elem, offset, strides: [token, head], .. } = *self;
        (0..tokens * heads).map(move |row| {
            let begin = (offset + row / heads * token + row % heads * head) * elem;
            begin..begin + dim * elem
        })
    }

    /// The view; the stride of a dimension of one is unread, and so may be anything.
    pub fn view<'a, T>(&self, buffer: &'a T) -> View<&'a T> {
        let [token, head] = [0, 1].map(|i| if self.dims[i] > 1 { self.strides[i] as u64 } else { 12_345 });
        View { buffer, offset: self.offset as u64, token_stride: token, head_stride: head }
    }

    /// The view with the strides of all dimensions.
    pub fn strided<'a, T>(&self, buffer: &'a T) -> View<&'a T> {
        let [token_stride, head_stride] = self.strides.map(|stride| stride as u64);
        View { token_stride, head_stride, ..self.view(buffer) }
    }

    /// A buffer that holds the elements, dense in `[tokens, heads, dim]`.
    pub fn upload<B: Backend>(&self, backend: &B, dense: &[u8]) -> Result<B::Buffer, String> {
        let (mut bytes, row) = (self.empty.clone(), self.dims[2] * self.elem);
        assert_eq!(dense.len(), row * self.dims[0] * self.dims[1], "{:?}", self.dims);
        self.rows().enumerate().for_each(|(i, range)| bytes[range].copy_from_slice(&dense[i * row..][..row]));
        upload(backend, &bytes)
    }

    /// A buffer that holds poison alone.
    pub fn nothing<B: Backend>(&self, backend: &B) -> Result<B::Buffer, String> {
        upload(backend, &self.empty)
    }

    /// The dense elements, if nothing around them was written.
    pub fn read<B: Backend>(&self, what: &str, backend: &B, buffer: &B::Buffer) -> Result<Vec<u8>, String> {
        let mut bytes = download(backend, buffer, self.empty.len())?;
        let mut dense = Vec::with_capacity(self.dims.iter().product::<usize>() * self.elem);
        for range in self.rows() {
            dense.extend_from_slice(&bytes[range.clone()]);
            bytes[range.clone()].copy_from_slice(&self.empty[range]);
        }
        untouched(what, &bytes, &self.empty)?;
        Ok(dense)
    }
}

fn untouched(what: &str, bytes: &[u8], empty: &[u8]) -> Result<(), String> {
    if bytes == empty {
        return Ok(());
    }
    match bytes.iter().zip(empty).position(|(byte, empty)| byte != empty) {
        Some(at) => {
            Err(format!("{what}: byte {at}, which is no element, expected {} got {}", empty[at], bytes[at]))
        }
        None => Ok(()),
    }
}

pub fn upload<B: Backend>(backend: &B, bytes: &[u8]) -> Result<B::Buffer, String> {
    let put = || {
        let buffer = backend.buffer(bytes.len().next_multiple_of(4).max(4) as u64)?;
        let mut whole = bytes.to_vec();
        whole.resize(bytes.len().next_multiple_of(4), 0xFF);
        backend.upload(&buffer, 0, &whole)?;
        Ok::<_, wgpu_mla::Error>(buffer)
    };
    put().map_err(|error| error.to_string())
}

fn download<B: Backend>(backend: &B, buffer: &B::Buffer, len: usize) -> Result<Vec<u8>, String> {
    backend.download(buffer, len as u64).map_err(|error| error.to_string())
}

/// One layer of a paged cache, in one buffer or in slabs. Offset and strides are in elements.
#[derive(Debug, Clone)]
pub struct Cache {
    kv: KvSpec,
    page: usize,
    slab_pages: usize,
    offset: usize,
    layer: usize,
    layer_stride: usize,
    block_stride: usize,
    /// Each slab's bytes where no page was written yet.
    empty: Vec<Vec<u8>>,
}

impl Cache {
    /// `row` elements a token; in slabs where `slabs` says that it may be.
    pub fn draw(draw: &mut Draw, kv: &KvSpec, row: usize, slabs: bool) -> Self {
        let (pages, elem, page) = (kv.num_pages as usize, kv.dtype().bytes(), row * kv.page_size as usize);
        let slab_pages = if slabs && pages > 1 { draw.within(pages.div_ceil(64), pages - 1) } else { pages };
        // Records are aligned to 16 bytes, other tokens to 8 elements.
        let unit = if kv.layout.is_plain() { 8 } else { 16 };
        let gap = |draw: &mut Draw| unit * draw.below(3);
        let (offset, layers) = (gap(draw), draw.within(1, 3));
        let layer = draw.below(layers);
        let padded = page.next_multiple_of(unit) + gap(draw);
        // A layer's pages lie together, or those of all layers do.
        let (layer_stride, block_stride) = match draw.below(3) {
            0 if page % unit == 0 => (slab_pages * page, page),
            1 => (padded, layers * padded + gap(draw)),
            _ => (slab_pages * padded + gap(draw), padded),
        };
        let slab = |draw: &mut Draw, held: usize| {
            let end = offset + (layers - 1) * layer_stride + (held - 1) * block_stride + page;
            poisoned(draw, (end * elem).next_multiple_of(4) + 4 * draw.clone().within(1, 20))
        };
        let empty = (0..pages).step_by(slab_pages).map(|first| slab(draw, slab_pages.min(pages - first)));
        let empty = empty.collect();
        Self { kv: *kv, page, slab_pages, offset, layer, layer_stride, block_stride, empty }
    }

    /// Pages of a slab, where there are several.
    pub fn slab_pages(&self) -> Option<u32> {
        (self.empty.len() > 1).then_some(self.slab_pages as u32)
    }

    fn pages(&self) -> impl Iterator<Item = (usize, std::ops::Range<usize>)> + use<> {
        let (elem, base) = (self.kv.dtype().bytes(), self.offset + self.layer * self.layer_stride);
        let (slab_pages, block_stride, page) = (self.slab_pages, self.block_stride, self.page);
        (0..self.kv.num_pages as usize).map(move |at| {
            let begin = (base + at % slab_pages * block_stride) * elem;
            (at / slab_pages, begin..begin + page * elem)
        })
    }

    /// Buffers that hold the pages, `[num_pages, page_size, row]`.
    pub fn upload<B: Backend>(&self, backend: &B, dense: &[u8]) -> Result<Vec<B::Buffer>, String> {
        let (mut slabs, page) = (self.empty.clone(), self.page * self.kv.dtype().bytes());
        assert_eq!(dense.len(), page * self.kv.num_pages as usize);
        for (i, (slab, range)) in self.pages().enumerate() {
            slabs[slab][range].copy_from_slice(&dense[i * page..][..page]);
        }
        slabs.iter().map(|bytes| upload(backend, bytes)).collect()
    }

    /// All pages, if nothing around them was written.
    pub fn read<B: Backend>(&self, backend: &B, buffers: &[B::Buffer]) -> Result<Vec<u8>, String> {
        let held =
            buffers.iter().zip(&self.empty).map(|(buffer, empty)| download(backend, buffer, empty.len()));
        let (mut slabs, mut dense) = (held.collect::<Result<Vec<_>, _>>()?, Vec::new());
        for (slab, range) in self.pages() {
            dense.extend_from_slice(&slabs[slab][range.clone()]);
            slabs[slab][range.clone()].copy_from_slice(&self.empty[slab][range]);
        }
        slabs.iter().zip(&self.empty).try_for_each(|(bytes, empty)| untouched("cache", bytes, empty))?;
        Ok(dense)
    }

    pub fn view<'a, T>(&self, spec: &MlaDecode, buffers: &'a [T]) -> Result<KvView<&'a T>, String> {
        let bytes = |elements: usize| (elements * self.kv.dtype().bytes()) as u64;
        let handles: Vec<&T> = buffers.iter().collect();
        let slabs = match self.slab_pages() {
            Some(pages) => {
                KvView::in_slabs(&handles, spec, pages, 0).map_err(|error| error.to_string())?.slabs
            }
            None => Slabs::ONE,
        };
        Ok(KvView {
            buffer: handles[0],
            offset: bytes(self.offset),
            layer_stride: bytes(self.layer_stride),
            layer: self.layer as u32,
            block_stride: bytes(self.block_stride),
            slabs,
        })
    }
}
