//! Cases of the kinds `indexer_append` and `indexer_query`.

use wgpu_mla::{Dtype, IndexFormat, IndexSpec, IndexerAppend, IndexerQuery, Op, RopeLayout};

use super::file::{File, narrow};
use crate::index_rows::{Codes, same_scale};
use safetensors::tensor::Dtype as FileDtype;

/// Index keys that are appended.
#[derive(Debug, Clone)]
pub struct IndexAppendCase {
    /// The cache of codes, and the dtype of the keys.
    pub spec: IndexerAppend,
    /// Added to the variance.
    pub norm_eps: f32,
    /// `[tokens, 128]` of `spec.input`.
    pub k: Vec<u8>,
    /// `[128]`.
    pub norm_weight: Vec<f32>,
    /// `[128]`.
    pub norm_bias: Vec<f32>,
    /// `[max_position, 64]`; empty without RoPE, as `positions`.
    pub cos_sin: Vec<f32>,
    /// `[tokens]`.
    pub positions: Vec<i32>,
    /// `[tokens]`, negative to skip.
    pub slot_mapping: Vec<i64>,
    /// The cache before the append.
    pub index_cache_before: Vec<u8>,
    /// Expected bytes of the cache.
    pub index_cache: Vec<u8>,
}

/// Index queries that are rotated and quantised.
#[derive(Debug, Clone)]
pub struct IndexQueryCase {
    /// Format, heads, and the dtype of the queries.
    pub spec: IndexerQuery,
    /// Factor of all weights.
    pub weight_scale: f32,
    /// `[tokens, heads, 128]` of `spec.input`.
    pub q: Vec<u8>,
    /// `[tokens, heads]`.
    pub weights: Vec<f32>,
    /// `[max_position, 64]`; empty without RoPE, as `positions`.
    pub cos_sin: Vec<f32>,
    /// `[tokens]`.
    pub positions: Vec<i32>,
    /// Expected codes `[tokens, heads, 128]`.
    pub q_codes: Vec<u8>,
    /// Expected `[tokens, heads]`.
    pub q_weights: Vec<f32>,
}

const DIM: u64 = 128;

fn flag(file: &File<'_>, key: &str) -> Result<bool, String> {
    match file.text(key)? {
        "true" => Ok(true),
        "false" => Ok(false),
        other => Err(format!("metadata {key} is {other:?}: must be true or false")),
    }
}

fn format(file: &File<'_>) -> Result<IndexFormat, String> {
    let rope = match file.text("rope_layout")? {
        "half" => Some(RopeLayout::HalfSplit),
        "interleaved" => Some(RopeLayout::Interleaved),
        "none" => None,
        other => {
            return Err(format!("metadata rope_layout is {other:?}: must be half, interleaved or none"));
        }
    };
    Ok(IndexFormat {
        dtype: Dtype::E4m3,
        rope,
        hadamard: flag(file, "hadamard")?,
        ue8m0: flag(file, "ue8m0")?,
    })
}

/// The angles and the positions of so many tokens.
fn angles(file: &File<'_>, format: &IndexFormat, tokens: u64) -> Result<(Vec<f32>, Vec<i32>), String> {
    if format.rope.is_none() {
        return Ok((Vec::new(), Vec::new()));
    }
    let [max_position, _] = file.tensor("cos_sin")?.shape(["positions", "64"])?;
    narrow("positions", max_position)?;
    if max_position == 0 {
        return Err("cos_sin has no position: must have at least one".to_owned());
    }
    let cos_sin = file.f32s("cos_sin", &[max_position, DIM / 2])?;
    let places = file.typed("positions", FileDtype::I32)?;
    places.expect(&[tokens])?;
    Ok((cos_sin, places.elements(i32::from_le_bytes)))
}

/// A number that is finite and at least 2^-126.
fn number(file: &File<'_>, key: &str) -> Result<f32, String> {
    let text = file.text(key)?;
    match text.parse::<f32>() {
        Ok(number) if number.is_normal() && number > 0.0 => Ok(number),
        _ => Err(format!("metadata {key} is {text:?}: must be a number from 2^-126 up")),
    }
}

pub fn append(file: &File<'_>) -> Result<IndexAppendCase, String> {
    let (format, page_size) = (format(file)?, file.number("page_size")?);
    let k = file.floats("k")?;
    let [tokens, _] = k.shape(["tokens", "128"])?;
    narrow("tokens", tokens)?;
    k.expect(&[tokens, DIM])?;
    let (before, after) = (file.codes("index_cache_before")?, file.codes("index_cache")?);
    let [num_pages, _] = before.shape(["num_pages", "page_size * 132"])?;
    let index = IndexSpec { format, page_size, num_pages: narrow("num_pages", num_pages)? };
    let spec = IndexerAppend { index, input: k.dtype };
    spec.check().map_err(|error| error.to_string())?;
    for cache in [&before, &after] {
        cache.expect(&[num_pages, index.page_bytes()])?;
    }
    let slot_mapping = file.i64s("slot_mapping")?;
    if slot_mapping.len() as u64 != tokens {
        let got = slot_mapping.len();
        return Err(format!("slot_mapping has {got} entries: must be one a token, {tokens}"));
    }
    spec.slots(&slot_mapping).map_err(|error| error.to_string())?;
    let (cos_sin, positions) = angles(file, &format, tokens)?;
    Ok(IndexAppendCase {
        spec,
        norm_eps: number(file, "norm_eps")?,
        k: k.bytes(),
        norm_weight: file.f32s("norm_weight", &[DIM])?,
        norm_bias: file.f32s("norm_bias", &[DIM])?,
        cos_sin,
        positions,
        slot_mapping,
        index_cache_before: before.bytes(),
        index_cache: after.bytes(),
    })
}

pub fn query(file: &File<'_>) -> Result<IndexQueryCase, String> {
    let (format, q) = (format(file)?, file.floats("q")?);
    let [tokens, heads, _] = q.shape(["tokens", "heads", "128"])?;
    narrow("tokens", tokens)?;
    q.expect(&[tokens, heads, DIM])?;
    let spec = IndexerQuery { format, num_heads: narrow("heads", heads)?, input: q.dtype };
    spec.check().map_err(|error| error.to_string())?;
    let codes = file.typed("q_codes", FileDtype::F8_E4M3)?;
    codes.expect(&[tokens, heads, DIM])?;
    let (cos_sin, positions) = angles(file, &format, tokens)?;
    Ok(IndexQueryCase {
        spec,
        weight_scale: number(file, "weight_scale")?,
        q: q.bytes(),
        weights: file.f32s("weights", &[tokens, heads])?,
        cos_sin,
        positions,
        q_codes: codes.bytes(),
        q_weights: file.f32s("q_weights", &[tokens, heads])?,
    })
}

impl IndexAppendCase {
    /// Compares a cache with the expected one: codes and scales of keys that are appended within their tolerances, all else byte for byte.
    ///
    /// # Errors
    /// What is wrong.
    pub fn compare(&self, got: &[u8]) -> Result<Codes, String> {
        let index = self.spec.index;
        let (page_size, page_bytes) = (index.page_size as usize, index.page_bytes() as usize);
        let (mut rest, mut codes) = (got.to_vec(), Codes::default());
        for &slot in self.slot_mapping.iter().filter(|slot| **slot >= 0) {
            let (page, offset) = (slot as usize / page_size * page_bytes, slot as usize % page_size);
            let row = page + offset * 128..page + (offset + 1) * 128;
            let footer = page + page_size * 128 + 4 * offset;
            let wrong = |error| format!("slot {slot}: {error}");
            codes.add(&got[row.clone()], &self.index_cache[row.clone()]).map_err(wrong)?;
            let [scale, want] =
                [got, &self.index_cache].map(|cache| Dtype::F32.decode_at(&cache[footer..footer + 4], 0));
            if !same_scale(&index.format, scale, want.into()) {
                return Err(wrong(format!("the scale is {scale:e}, expected {want:e}")));
            }
            for part in [row, footer..footer + 4] {
                rest[part.clone()].copy_from_slice(&self.index_cache[part]);
            }
        }
        match rest.iter().zip(&self.index_cache).position(|(a, b)| a != b) {
            Some(at) => {
                Err(format!("byte {at} is {:#04x}, expected {:#04x}", rest[at], self.index_cache[at]))
            }
            None => codes.finish(),
        }
    }
}

impl IndexQueryCase {
    /// Compares codes and weights with the expected ones.
    ///
    /// # Errors
    /// What is wrong.
    pub fn compare(&self, got: &[u8], weights: &[f32]) -> Result<Codes, String> {
        let mut codes = Codes::default();
        let rows = got.chunks(128).zip(self.q_codes.chunks(128));
        for (row, ((got, want), (&weight, &expected))) in
            rows.zip(weights.iter().zip(&self.q_weights)).enumerate()
        {
            let wrong = |error| format!("row {row}: {error}");
            codes.add(got, want).map_err(wrong)?;
            let is_right = weight.is_nan() && expected.is_nan()
                || weight == expected
                || (weight - expected).abs() <= 1e-5 * expected.abs();
            if !is_right {
                return Err(wrong(format!("the weight is {weight:e}, expected {expected:e}")));
            }
        }
        codes.finish()
    }
}
