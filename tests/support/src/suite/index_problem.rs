//! A batch of `indexer_logits`: its arrays, and what each logit must be.

use std::ops::Range;

use wgpu_mla::{Dtype, IndexerLogits, Mask};

use super::run::Layout;
use crate::case::IndexLogitsCase;
use crate::paint::{POISON, Rng, WILD};
use crate::reference::{IndexRow, indexer_logit};

/// The allowed error, as a share of `k_scale sum_h |w_h| sum_d |q_hd k_d|`.
const SHARE: f64 = 3e-5;

/// Arrays of a batch, dense; slots that no query token sees are poison, as are their scales, and page ids behind a sequence's are wild.
#[derive(Clone)]
pub struct Problem {
    pub spec: IndexerLogits,
    pub seq_lens: Vec<i32>,
    pub starts: Vec<i32>,
    pub block_table: Vec<i32>,
    pub max_pages: usize,
    pub cache: Vec<u8>,
    /// Encoded, `[tokens, heads, 128]`.
    pub q: Vec<u8>,
    /// `[tokens, heads]`.
    pub weights: Vec<f32>,
}

/// Which rows a step scores, and how its arrays lie.
pub struct How<'a> {
    pub mask: Mask<'a>,
    pub tokens: Range<u32>,
    pub fill: u32,
    pub layout: Layout,
    pub csr: bool,
}

impl Problem {
    /// Sequences of so many tokens and query tokens.
    pub fn new(spec: IndexerLogits, sequences: &[(u32, u32)]) -> Self {
        let index = spec.index;
        let mut rng = Rng(u64::from(index.page_size) << 8 | u64::from(spec.num_heads));
        let (page_bytes, page_size) = (index.page_bytes() as usize, index.page_size as usize);
        let mut cache = vec![POISON; index.cache_bytes() as usize];
        let max_pages =
            sequences.iter().map(|s| s.0.div_ceil(index.page_size)).max().unwrap_or(0) as usize + 1;
        let mut block_table: Vec<i32> = (0..sequences.len() * max_pages).map(|i| WILD[i % 4]).collect();
        let mut free: Vec<i32> = (0..index.num_pages as i32).collect();
        rng.shuffle(&mut free);
        let key = index.format.dtype;
        let (mut starts, mut seq_lens) = (vec![0], Vec::new());
        for (seq, &(len, q_len)) in sequences.iter().enumerate() {
            seq_lens.push(len as i32);
            starts.push(starts[seq] + q_len as i32);
            for token in 0..len as usize {
                let (block, slot) = (token / page_size, token % page_size);
                if slot == 0 {
                    block_table[seq * max_pages + block] = free.pop().expect("a page");
                }
                let page = block_table[seq * max_pages + block] as usize * page_bytes;
                let elements: Vec<f32> = (0..128).map(|_| rng.randn() * size_of(key)).collect();
                let bytes = key.encode_all(&elements);
                cache[page + slot * bytes.len()..][..bytes.len()].copy_from_slice(&bytes);
                if key == Dtype::E4m3 {
                    let scale = (0.002 + rng.unit() as f32 * 0.01).to_le_bytes();
                    cache[page + page_size * 128 + slot * 4..][..4].copy_from_slice(&scale);
                }
            }
        }
        let rows = starts.last().map_or(0, |&end| end as usize) * spec.num_heads as usize;
        let q: Vec<f32> = (0..rows * 128).map(|_| rng.randn() * size_of(spec.query)).collect();
        let weights = (0..rows).map(|_| rng.randn()).collect();
        Self { spec, seq_lens, starts, block_table, max_pages, cache, q: spec.query.encode_all(&q), weights }
    }

    /// The arrays of a case file.
    pub fn of_case(case: &IndexLogitsCase) -> Self {
        Self {
            spec: case.spec,
            seq_lens: case.seq_lens.clone(),
            starts: case.query_start_loc.clone(),
            block_table: case.block_table.clone(),
            max_pages: case.max_pages,
            cache: case.index_cache.clone(),
            q: case.q.clone(),
            weights: case.weights.clone(),
        }
    }

    pub(super) fn tokens(&self) -> u32 {
        self.starts.last().map_or(0, |&end| end as u32)
    }

    /// The place of an element of a key in the cache, in bytes.
    fn element(&self, seq: usize, key: usize, d: usize) -> usize {
        let index = self.spec.index;
        let page = self.block_table[seq * self.max_pages + key / index.page_size as usize] as usize;
        let at = key % index.page_size as usize * 128 + d;
        page * index.page_bytes() as usize + at * index.format.dtype.bytes()
    }

    pub(super) fn set_key(&mut self, seq: usize, key: usize, d: usize, value: f32) {
        let (at, bytes) = (self.element(seq, key, d), self.spec.index.format.dtype.encode_all(&[value]));
        self.cache[at..][..bytes.len()].copy_from_slice(&bytes);
    }

    pub(super) fn set_query(&mut self, token: usize, head: usize, d: usize, value: f32) {
        let bytes = self.spec.query.encode_all(&[value]);
        let at = ((token * self.spec.num_heads as usize + head) * 128 + d) * bytes.len();
        self.q[at..][..bytes.len()].copy_from_slice(&bytes);
    }

    pub(super) fn csr(&self) -> (Vec<i32>, Vec<i32>) {
        let (mut indptr, mut indices) = (vec![0], Vec::new());
        for (row, &len) in self.block_table.chunks(self.max_pages).zip(&self.seq_lens) {
            indices.extend_from_slice(&row[..(len as usize).div_ceil(self.spec.index.page_size as usize)]);
            indptr.push(indices.len() as i32);
        }
        (indptr, indices)
    }

    /// The sequence of a query token, and how many keys it sees.
    pub(super) fn sees(&self, mask: Mask<'_>, token: u32) -> (usize, usize) {
        let seq = self.starts.iter().skip(1).position(|&end| token < end as u32).expect("a sequence");
        let (len, begin, end) = (i64::from(self.seq_lens[seq]), self.starts[seq], self.starts[seq + 1]);
        let i = i64::from(token) - i64::from(begin);
        let seen = match mask {
            Mask::Causal => len - i64::from(end - begin) + i + 1,
            Mask::CausalFrom(first) => first.saturating_add(i),
            Mask::Full => len,
            Mask::Bounds(bounds) => bounds[token as usize].into(),
        };
        (seq, seen.clamp(0, len) as usize)
    }

    /// The oracle's view of a query token of a sequence, by its decoded queries.
    fn row<'a>(&'a self, seq: usize, token: usize, q: &'a [f32]) -> IndexRow<'a> {
        let heads = self.spec.num_heads as usize;
        IndexRow {
            cache: &self.cache,
            index: self.spec.index,
            pages: &self.block_table[seq * self.max_pages..][..self.max_pages],
            q: &q[token * heads * 128..][..heads * 128],
            weights: &self.weights[token * heads..][..heads],
        }
    }

    /// Compares the logits of a step, dense rows of `columns`, encoded.
    pub(super) fn compare(&self, how: &How<'_>, columns: usize, got: &[u8]) -> Result<(), String> {
        let q = self.spec.query.decode_all(&self.q);
        for (row, token) in how.tokens.clone().enumerate() {
            let (seq, seen) = self.sees(how.mask, token);
            let oracle = self.row(seq, token as usize, &q);
            for column in 0..columns {
                let bytes = &got[(row * columns + column) * 4..][..4];
                let bits = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                let wrong =
                    |want: &str| Err(format!("token {token} key {column}: {bits:#x} instead of {want}"));
                if column >= seen {
                    let want = if column < how.fill as usize {
                        0xFF80_0000
                    } else {
                        u32::from_le_bytes([POISON; 4])
                    };
                    if bits != want {
                        return wrong(&format!("{want:#x}, which it does not see"));
                    }
                    continue;
                }
                let [want, size] = indexer_logit(&oracle, column);
                let logit = f64::from(f32::from_bits(bits));
                let is_close = if want.is_finite() {
                    (logit - want).abs() <= SHARE * size + 1e-37
                } else {
                    logit == want || logit.is_nan() && want.is_nan()
                };
                if !is_close {
                    return wrong(&format!("{want} ({logit}, of {size})"));
                }
            }
        }
        Ok(())
    }
}

/// Compares logits with those of a case file: the largest error as a share of what is allowed.
///
/// # Errors
/// The first logit that is further away.
pub fn close_logits(case: &IndexLogitsCase, got: &[f32]) -> Result<f64, String> {
    let problem = Problem::of_case(case);
    let q = case.spec.query.decode_all(&case.q);
    let mask = if case.causal { Mask::Causal } else { Mask::Full };
    if got.len() != case.logits.len() {
        return Err(format!("{} logits instead of {}", got.len(), case.logits.len()));
    }
    let mut worst = 0.0;
    for (i, (&got, &want)) in got.iter().zip(&case.logits).enumerate() {
        let (token, key) = (i / case.columns, i % case.columns);
        let (seq, seen) = problem.sees(mask, token as u32);
        let [_, size] = if key < seen { indexer_logit(&problem.row(seq, token, &q), key) } else { [0.0; 2] };
        let (error, allowed) = ((f64::from(got) - f64::from(want)).abs(), SHARE * size + 1e-37);
        // A NaN is never within what is allowed.
        if got != want && (error.is_nan() || error > allowed) {
            return Err(format!("token {token} key {key}: {got} instead of {want}, of {size}"));
        }
        worst = if got == want { worst } else { f64::max(worst, error / allowed) };
    }
    Ok(worst)
}

/// Elements of a size that uses a dtype's range.
fn size_of(dtype: Dtype) -> f32 {
    match dtype {
        Dtype::E4m3 => 90.0,
        Dtype::F16 => 3.0,
        Dtype::Bf16 => 1e3,
        Dtype::F32 => 0.1,
    }
}
