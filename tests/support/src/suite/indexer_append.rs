//! Index keys against the oracle: every input and every format, in pages with gaps, in slabs, and what is refused.

use wgpu_mla::{
    Backend, Dtype, Error, IndexFormat, IndexSpec, IndexerAppend, IndexerAppendArgs, KvView, RopeAppendBatch,
    RopeLayout, View,
};

use super::Session;
use super::memory::{Strides, download, gather, scatter, upload};
use super::rope::{positions, table};
use crate::case::IndexAppendCase;
use crate::index_rows::{Codes, same_codes, same_elements, same_scale};
use crate::paint::{POISON, Rng};
use crate::reference::{IndexNorm, IndexRows, index_keys};

const DIM: usize = 128;
const TOKENS: usize = 37;
const ROPES: [Option<RopeLayout>; 3] = [Some(RopeLayout::HalfSplit), Some(RopeLayout::Interleaved), None];

/// Every format of a dtype.
pub fn formats(dtype: Dtype) -> Vec<IndexFormat> {
    let mut all = Vec::new();
    for rope in ROPES {
        for hadamard in [true, false] {
            let format = IndexFormat { dtype, rope, hadamard, ue8m0: dtype.is_fp8() };
            all.push(format);
            if dtype.is_fp8() {
                all.push(IndexFormat { ue8m0: false, ..format });
            }
        }
    }
    all
}

/// Every dtype of an input and of a cache: kernels differ by these, and take the rest of a format at run time.
pub fn dtypes() -> Vec<(Dtype, Dtype)> {
    let inputs = [Dtype::Bf16, Dtype::F32, Dtype::F16];
    let caches = [Dtype::E4m3, Dtype::Bf16, Dtype::F32, Dtype::F16];
    inputs.iter().flat_map(|&input| caches.map(|cache| (input, cache))).collect()
}

/// Rows of randn, large and small, with a mean, of zeros, and some with an element that is not finite. None of zero variance but that of
/// zeros: f32 has no digits of it.
pub fn rows(rng: &mut Rng, dtype: Dtype, count: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for row in 0..count {
        for column in 0..DIM {
            let x = rng.randn();
            let x = match row % 9 {
                1 => 300.0 * x,
                2 => 1e-3 * x,
                3 => 10.0 + x,
                5 => 0.0,
                6 if column == 77 && row % 2 == 0 => f32::NAN,
                6 if column == 3 => [f32::INFINITY, f32::NEG_INFINITY][row % 4 / 2],
                7 if column % 16 != 0 => 1e-6 * x,
                _ => x,
            };
            dtype.encode(x, &mut bytes);
        }
    }
    bytes
}

/// An append and its arrays.
struct Append {
    spec: IndexerAppend,
    k: Vec<u8>,
    weight: Vec<f32>,
    bias: Vec<f32>,
    positions: Vec<i32>,
    cos_sin: Vec<f32>,
    slots: Vec<i64>,
    /// Every page's bytes.
    before: Vec<u8>,
}

const EPS: f32 = 1e-6;

impl Append {
    fn new(format: IndexFormat, input: Dtype, page_size: u32, seed: u64) -> Self {
        let mut rng = Rng(seed);
        let index = IndexSpec { format, page_size, num_pages: 64u32.div_ceil(page_size) };
        let mut slots: Vec<i64> = (0..index.kv().num_slots() as i64).collect();
        rng.shuffle(&mut slots);
        slots.truncate(TOKENS);
        for (i, skip) in [(0, -1), (11, i64::MIN), (36, -7)] {
            slots[i] = skip;
        }
        // Now and then the least scale: an amax below 1e-4.
        let size = if seed % 5 == 4 { 1e-6 } else { 1.0 };
        let mut norm =
            |mean: f32| -> Vec<f32> { (0..DIM).map(|_| size * (mean + 0.2 * rng.randn())).collect() };
        let (weight, bias) = (norm(1.0), norm(0.0));
        Self {
            spec: IndexerAppend { index, input },
            k: rows(&mut rng, input, TOKENS),
            weight,
            bias,
            positions: positions(&mut rng, TOKENS),
            cos_sin: table(64),
            slots,
            before: (0..index.cache_bytes()).map(|_| rng.next() as u8).collect(),
        }
    }

    /// Keys before they are rounded.
    fn keys(&self) -> Vec<f64> {
        let x = self.spec.input.decode_all(&self.k);
        let rows = IndexRows {
            format: self.spec.index.format,
            x: &x,
            num_heads: 1,
            positions: &self.positions,
            cos_sin: &self.cos_sin,
        };
        index_keys(&rows, &IndexNorm { weight: &self.weight, bias: &self.bias, eps: EPS.into() })
    }

    /// Compares the bytes of all pages.
    fn check(&self, after: &[u8]) -> Result<(), String> {
        let (index, element) = (self.spec.index, self.spec.index.format.dtype.bytes());
        let (page_size, page_bytes) = (index.page_size as usize, index.page_bytes() as usize);
        let (keys, mut rest, mut codes) = (self.keys(), after.to_vec(), Codes::default());
        for (token, &slot) in self.slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
            let (page, offset) = (slot as usize / page_size * page_bytes, slot as usize % page_size);
            let row = page + offset * DIM * element..page + (offset + 1) * DIM * element;
            let (got, want) = (&after[row.clone()], &keys[token * DIM..][..DIM]);
            let result = if index.format.dtype.is_fp8() {
                let footer = page + page_size * DIM + 4 * offset;
                let scale = Dtype::F32.decode_at(&after[footer..footer + 4], 0);
                rest[footer..footer + 4].copy_from_slice(&self.before[footer..footer + 4]);
                same_codes(
                    &index.format,
                    want,
                    got,
                    |want| same_scale(&index.format, scale, want),
                    &mut codes,
                )
                .map_err(|error| format!("{error}, scale {scale:e}"))
            } else {
                same_elements(index.format.dtype, want, got)
            };
            result.map_err(|error| format!("token {token}, slot {slot}: {error}"))?;
            rest[row.clone()].copy_from_slice(&self.before[row]);
        }
        codes.finish()?;
        match rest.iter().zip(&self.before).position(|(a, b)| a != b) {
            Some(at) => Err(format!("byte {at} is of no key that is appended, and was written")),
            None => Ok(()),
        }
    }
}

fn text(error: Error) -> String {
    error.to_string()
}

fn words(words: &[i32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Where the pages are: dense, or the second of three layers with gaps.
fn view_of<'a, B>(append: &Append, cache: &'a B, gaps: bool) -> (KvView<&'a B>, Strides) {
    let index = &append.spec.index;
    let dense = index.view(cache);
    let element = index.format.dtype.bytes() as u64;
    let page = (index.page_bytes() / element) as usize;
    if !gaps {
        return (dense, Strides { offset: 0, token: page, head: page });
    }
    let unit = if index.format.dtype.is_fp8() { 4 } else { 8 * element };
    let block_stride = dense.block_stride + unit;
    let layer_stride = u64::from(index.num_pages) * block_stride + 3 * unit;
    let view = KvView { offset: unit, layer_stride, layer: 1, block_stride, ..dense };
    let at = |bytes: u64| (bytes / element) as usize;
    (view, Strides { offset: at(unit + layer_stride), token: at(block_stride), head: at(block_stride) })
}

/// Appends to poisoned pages, with or without gaps, with positions from the device or from the host.
fn run<B: Backend>(backend: &B, append: &Append, gaps: bool) -> Result<(), String> {
    let (spec, input) = (append.spec, append.spec.input);
    let dims = [TOKENS, 1, DIM];
    let strides = if gaps { Strides { offset: 4, token: DIM + 4, head: 0 } } else { Strides::dense(1, DIM) };
    let floats = |values: &[f32]| upload(backend, &Dtype::F32.encode_all(values)).map_err(text);
    let k = upload(backend, &scatter(&append.k, dims, input.bytes(), strides)).map_err(text)?;
    let (norm_weight, norm_bias) = (floats(&append.weight)?, floats(&append.bias)?);
    let cos_sin = floats(&append.cos_sin)?;
    // A step's own positions are inside of the table; the array that is then unread holds others.
    let last = (append.cos_sin.len() / 64) as i32 - 1;
    let known: Vec<i32> = append.positions.iter().map(|&position| position.clamp(0, last)).collect();
    let on_device = if gaps { words(&[1; TOKENS]) } else { words(&append.positions) };
    let places = upload(backend, &on_device).map_err(text)?;
    let element = spec.index.format.dtype.bytes();
    let page_dims = [spec.index.num_pages as usize, 1, spec.index.page_bytes() as usize / element];
    let (_, page_strides) = view_of(append, &(), gaps);
    let before = scatter(&append.before, page_dims, element, page_strides);
    let buffer = upload(backend, &before).map_err(text)?;
    let has_rope = spec.index.format.rope.is_some();
    let args = IndexerAppendArgs {
        k: strides.view(&k),
        norm_weight: &norm_weight,
        norm_bias: &norm_bias,
        norm_eps: EPS,
        // Without RoPE these are unread, and may be anything.
        positions: if has_rope { &places } else { &buffer },
        cos_sin: if has_rope { &cos_sin } else { &buffer },
        max_position: if has_rope { last as u32 + 1 } else { 0 },
        cache: view_of(append, &buffer, gaps).0,
    };
    let batch = RopeAppendBatch { slot_mapping: &append.slots, positions: gaps.then_some(&known[..]) };
    backend.once(spec, batch, &args).map_err(text)?;
    let bytes = download(backend, &buffer, before.len()).map_err(text)?;
    let (after, intact) = gather(&bytes, page_dims, element, page_strides);
    intact?;
    append.check(&after)
}

/// Runs an append case in the layout of its file.
pub fn check_case<B: Backend>(backend: &B, case: &IndexAppendCase) -> Result<(), String> {
    let floats = |values: &[f32]| upload(backend, &Dtype::F32.encode_all(values)).map_err(text);
    let k = upload(backend, &case.k).map_err(text)?;
    let (norm_weight, norm_bias) = (floats(&case.norm_weight)?, floats(&case.norm_bias)?);
    let (cos_sin, positions) =
        (floats(&case.cos_sin)?, upload(backend, &words(&case.positions)).map_err(text)?);
    let cache = upload(backend, &case.index_cache_before).map_err(text)?;
    let args = IndexerAppendArgs {
        k: View::dense(&k, 1, DIM as u32),
        norm_weight: &norm_weight,
        norm_bias: &norm_bias,
        norm_eps: case.norm_eps,
        positions: &positions,
        cos_sin: &cos_sin,
        max_position: (case.cos_sin.len() / 64) as u32,
        cache: case.spec.index.view(&cache),
    };
    backend.once(case.spec, RopeAppendBatch::slots(&case.slot_mapping), &args).map_err(text)?;
    let len = case.index_cache.len();
    let bytes = download(backend, &cache, len).map_err(text)?;
    case.compare(&bytes[..len]).map(drop)
}

/// Every input and every format, on pages of several sizes.
pub fn index_appends<B: Backend>(session: &Session<'_, B>) {
    for (turn, (input, dtype)) in session.one_in(5, dtypes().into_iter().enumerate()) {
        for (at, format) in formats(dtype).into_iter().enumerate() {
            let seed = (turn + at) as u64;
            let append = Append::new(format, input, [16, 7, 64, 1][(turn + at) % 4], seed);
            let gaps = (turn + at) % 2 == 1;
            let what = format!("{:?}, gaps {gaps}", append.spec);
            session.note(&what, run(session.backend, &append, gaps));
        }
    }
    session.finish("index appends");
}

/// A cache in slabs has the bytes of one in a buffer.
pub fn index_appends_in_slabs<B: Backend>(session: &Session<'_, B>) {
    let backend = session.backend;
    for dtype in [Dtype::E4m3, Dtype::Bf16] {
        let format = IndexFormat { dtype, ..IndexFormat::DEEPSEEK_V32 };
        let append = Append::new(format, Dtype::Bf16, 7, 3);
        for slab_pages in [4, 9] {
            let result = in_slabs(backend, &append, slab_pages);
            session.note(&format!("{dtype}, slabs of {slab_pages} pages"), result);
        }
    }
    session.finish("index appends in slabs");
}

fn in_slabs<B: Backend>(backend: &B, append: &Append, slab_pages: u32) -> Result<(), String> {
    let (spec, index) = (append.spec, append.spec.index);
    let slab_bytes = index.page_bytes() as usize * slab_pages as usize;
    let parts: Vec<&[u8]> = append.before.chunks(slab_bytes).collect();
    let slabs =
        parts.iter().map(|part| upload(backend, part)).collect::<Result<Vec<_>, _>>().map_err(text)?;
    let floats = |values: &[f32]| upload(backend, &Dtype::F32.encode_all(values)).map_err(text);
    let k = upload(backend, &append.k).map_err(text)?;
    let (norm_weight, norm_bias) = (floats(&append.weight)?, floats(&append.bias)?);
    let (cos_sin, places) =
        (floats(&append.cos_sin)?, upload(backend, &words(&append.positions)).map_err(text)?);
    let args = IndexerAppendArgs {
        k: View::dense(&k, 1, DIM as u32),
        norm_weight: &norm_weight,
        norm_bias: &norm_bias,
        norm_eps: EPS,
        positions: &places,
        cos_sin: &cos_sin,
        max_position: (append.cos_sin.len() / 64) as u32,
        cache: index.view_in_slabs(&slabs.iter().collect::<Vec<_>>(), slab_pages, 0).map_err(text)?,
    };
    backend.once(spec, RopeAppendBatch::slots(&append.slots), &args).map_err(text)?;
    let mut after = Vec::new();
    for (slab, part) in slabs.iter().zip(&parts) {
        let bytes = download(backend, slab, part.len()).map_err(text)?;
        if bytes[part.len()..].iter().any(|&byte| byte != POISON) {
            return Err("bytes behind a slab were written".to_owned());
        }
        after.extend_from_slice(&bytes[..part.len()]);
    }
    append.check(&after)
}

/// What must be refused before a kernel sees it.
pub fn refuses_index_appends<B: Backend>(session: &Session<'_, B>) {
    let result = refusals(session);
    session.note("index appends", result.map_err(text));
    session.finish("refuses index appends");
}

fn refusals<B: Backend>(session: &Session<'_, B>) -> Result<(), Error> {
    let backend = session.backend;
    let refuses = |what: &str, result: Result<(), Error>, why: &str| {
        let checked = match result {
            Ok(()) => Err("was accepted".to_owned()),
            Err(error) if error.to_string().contains(why) => Ok(()),
            Err(error) => Err(format!("{error} does not name {why:?}")),
        };
        session.note(what, checked);
    };
    // 3 tokens into 2 pages of 4; 5 positions.
    let index = IndexSpec { format: IndexFormat::DEEPSEEK_V32, page_size: 4, num_pages: 2 };
    let spec = IndexerAppend { index, input: Dtype::F32 };
    let [k, weight, bias, places, angles, cache] =
        [3 * 512, 512, 512, 3 * 4, 5 * 256, index.cache_bytes()].map(|bytes| backend.buffer(bytes));
    let (k, weight, bias, places, angles, cache) = (k?, weight?, bias?, places?, angles?, cache?);
    let good = || IndexerAppendArgs {
        k: View::dense(&k, 1, 128),
        norm_weight: &weight,
        norm_bias: &bias,
        norm_eps: EPS,
        positions: &places,
        cos_sin: &angles,
        max_position: 5,
        cache: index.view(&cache),
    };
    let slots = RopeAppendBatch::slots;
    session.note("a good append", backend.once(spec, slots(&[0, -1, 7]), &good()).map_err(text));
    session.note("nothing to append", backend.once(spec, slots(&[]), &good()).map_err(text));
    refuses("slot 8 of 8", backend.once(spec, slots(&[0, 8]), &good()), "8");
    refuses("a slot twice", backend.once(spec, slots(&[7, 7]), &good()), "7");
    refuses("too many tokens", backend.once(spec, slots(&[0, 1, 2, 3]), &good()), "k:");
    for (positions, why) in [(&[0][..], "positions"), (&[0, -1], "negative"), (&[0, 5], "max_position")] {
        let batch = RopeAppendBatch { slot_mapping: &[0, 1], positions: Some(positions) };
        refuses(&format!("positions {positions:?}"), backend.once(spec, batch, &good()), why);
    }
    let wrong = IndexerAppend { input: Dtype::E4m3, ..spec };
    refuses("keys of codes", backend.once(wrong, slots(&[0]), &good()), "e4m3");
    let wrong = IndexerAppend { index: IndexSpec { page_size: 0, ..index }, ..spec };
    refuses("pages of no token", backend.once(wrong, slots(&[0]), &good()), "page_size");
    let far = KvView { offset: 4, ..index.view(&cache) };
    let odd = KvView { offset: 2, ..index.view(&cache) };
    let near = KvView { block_stride: 4 * 128, ..index.view(&cache) };
    for (what, args, why) in [
        ("keys past their buffer", IndexerAppendArgs { k: View { offset: 260, ..good().k }, ..good() }, "k:"),
        (
            "misaligned keys",
            IndexerAppendArgs { k: View { token_stride: 130, ..good().k }, ..good() },
            "k 130",
        ),
        ("keys that overlap", IndexerAppendArgs { k: View { token_stride: 64, ..good().k }, ..good() }, "k "),
        ("an eps of 0", IndexerAppendArgs { norm_eps: 0.0, ..good() }, "norm_eps"),
        ("an eps that is none", IndexerAppendArgs { norm_eps: f32::NAN, ..good() }, "norm_eps"),
        ("a short weight", IndexerAppendArgs { norm_weight: &places, ..good() }, "norm_weight"),
        ("a short bias", IndexerAppendArgs { norm_bias: &places, ..good() }, "norm_bias"),
        ("no table", IndexerAppendArgs { max_position: 0, ..good() }, "max_position"),
        ("a table past its buffer", IndexerAppendArgs { max_position: 6, ..good() }, "cos_sin"),
        ("a cache past its buffer", IndexerAppendArgs { cache: far, ..good() }, "kv"),
        ("a misaligned cache", IndexerAppendArgs { cache: odd, ..good() }, "kv offset 2"),
        ("pages without their scales", IndexerAppendArgs { cache: near, ..good() }, "block_stride"),
        ("keys in the cache", IndexerAppendArgs { k: View::dense(&cache, 1, 128), ..good() }, "k and kv"),
        ("a bias in the cache", IndexerAppendArgs { norm_bias: &cache, ..good() }, "norm_bias and kv"),
    ] {
        refuses(what, backend.once(spec, slots(&[0, 1]), &args), why);
    }
    Ok(())
}
