//! Cases of index logits.

use wgpu_mla::{Dtype, IndexFormat, IndexSpec, IndexerLogits, Op};

use super::file::{File, narrow};
use super::{check_pages, check_starts};

/// Logits of index keys: arrays dense and little-endian.
#[derive(Debug, Clone)]
pub struct IndexLogitsCase {
    /// Heads, dtypes and pages. How keys were rotated is unknown, and does not matter.
    pub spec: IndexerLogits,
    /// Causal, or every key of the sequence.
    pub causal: bool,
    /// `[total_q, Hi, 128]` of `spec.query`.
    pub q: Vec<u8>,
    /// `[total_q, Hi]`.
    pub weights: Vec<f32>,
    /// `[num_pages]` pages of `spec.index`.
    pub index_cache: Vec<u8>,
    /// `[batch, max_pages]`.
    pub block_table: Vec<i32>,
    /// Entries in a row of `block_table`.
    pub max_pages: usize,
    /// `[batch]`.
    pub seq_lens: Vec<i32>,
    /// `[batch + 1]`.
    pub query_start_loc: Vec<i32>,
    /// Expected `[total_q, columns]`, -inf where a token sees no key.
    pub logits: Vec<f32>,
    /// The largest of `seq_lens`.
    pub columns: usize,
}

pub fn read(file: &File<'_>) -> Result<IndexLogitsCase, String> {
    let page_size = file.number("page_size")?;
    let q = file.floats("q")?;
    let [total_q, heads, _] = q.shape(["total_q", "Hi", "128"])?;
    narrow("total_q", total_q)?;
    q.expect(&[total_q, heads, 128])?;
    let cache = file.codes("index_cache")?;
    let [num_pages, _] = cache.shape(["num_pages", "page_size * 132"])?;
    let format = IndexFormat { dtype: Dtype::E4m3, ..IndexFormat::DEEPSEEK_V32 };
    let index = IndexSpec { format, page_size, num_pages: narrow("num_pages", num_pages)? };
    let spec = IndexerLogits { index, num_heads: narrow("Hi", heads)?, query: q.dtype };
    spec.check().map_err(|error| error.to_string())?;
    cache.expect(&[num_pages, index.page_bytes()])?;

    let seq_lens = file.i32s("seq_lens", ["batch"])?;
    let batch = seq_lens.len() as u64;
    let query_start_loc = file.i32s("query_start_loc", ["batch + 1"])?;
    let table = file.tensor("block_table")?;
    let [_, max_pages] = table.shape(["batch", "max_pages"])?;
    narrow("max_pages", max_pages)?;
    table.expect(&[batch, max_pages])?;
    let block_table = file.i32s("block_table", ["batch", "max_pages"])?;
    check_starts(&query_start_loc, batch, total_q)?;
    check_pages(&index.kv(), &seq_lens, &block_table, max_pages as usize)?;
    let columns = seq_lens.iter().copied().max().unwrap_or(0).max(0) as usize;
    Ok(IndexLogitsCase {
        spec,
        causal: file.flag("causal")?,
        q: q.bytes(),
        weights: file.f32s("weights", &[total_q, heads])?,
        index_cache: cache.bytes(),
        block_table,
        max_pages: max_pages as usize,
        seq_lens,
        query_start_loc,
        logits: file.f32s("logits", &[total_q, columns as u64])?,
        columns,
    })
}
