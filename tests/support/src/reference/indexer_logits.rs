//! `indexer_logits`: DeepGEMM's `fp8_paged_mqa_logits`.

use wgpu_mla::{Dtype, IndexSpec};

/// Arguments of [`indexer_logit`]: a query token's sequence, and its queries.
#[derive(Debug, Clone, Copy)]
pub struct IndexRow<'a> {
    /// The cache, dense pages as `index` describes them.
    pub cache: &'a [u8],
    /// Its format.
    pub index: IndexSpec,
    /// Pages of the sequence. Entries that no key is in may hold anything.
    pub pages: &'a [i32],
    /// `[heads, 128]`.
    pub q: &'a [f32],
    /// `[heads]`.
    pub weights: &'a [f32],
}

/// The logit of a key, and the sum of the magnitudes of its terms, of which its error is a share.
///
/// # Panics
/// Where the arrays are shorter than the key's place says.
pub fn indexer_logit(row: &IndexRow<'_>, key: usize) -> [f64; 2] {
    let (dtype, page_size) = (row.index.format.dtype, row.index.page_size as usize);
    let page_bytes = row.index.page_bytes() as usize;
    let page = &row.cache[row.pages[key / page_size] as usize * page_bytes..][..page_bytes];
    let token = key % page_size;
    let k: Vec<f64> = (0..128).map(|d| dtype.decode_at(page, token * 128 + d).into()).collect();
    let scale: f64 = match dtype {
        Dtype::E4m3 => Dtype::F32.decode_at(page, page_size * 32 + token).into(),
        _ => 1.0,
    };
    let (mut sum, mut size) = (0.0, 0.0);
    for (q, &weight) in row.q.chunks(128).zip(row.weights) {
        let products = || q.iter().zip(&k).map(|(&q, k)| f64::from(q) * k);
        let score: f64 = products().sum();
        // NaN is not below 0.
        sum += f64::from(weight) * if score < 0.0 { 0.0 } else { score };
        size += f64::from(weight).abs() * products().map(f64::abs).sum::<f64>();
    }
    [scale * sum, scale * size]
}
