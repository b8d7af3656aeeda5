//! Reads the case files. Everything in them is checked: a broken file is an `Err` that names what is wrong.

mod file;
mod index_logits;
mod indexer;
mod saved;
mod sparse;
mod top_k;

pub use index_logits::IndexLogitsCase;
pub use indexer::{IndexAppendCase, IndexQueryCase};
pub use saved::{Saved, save};
pub use top_k::TopKCase;

use std::path::Path;

use super::paint::Lists;
use file::{File, narrow};
use safetensors::tensor::Dtype as FileDtype;
use wgpu_mla::{
    Dtype, KvAppend, KvLayout, KvSpec, LseBase, MergeState, MergeStates, MlaDecode, MlaShape, Op, Shares,
};

/// One conformance case.
#[derive(Debug, Clone)]
pub enum Case {
    /// Kind `decode`.
    Decode(DecodeCase),
    /// Kind `merge_attn_states`.
    Merge(MergeCase),
    /// Kind `concat_and_cache_mla`.
    Append(AppendCase),
    /// Kind `decode_sparse`.
    Sparse(SparseCase),
    /// Kinds `top_k` and `top_k_slots`.
    TopK(TopKCase),
    /// Kind `dcp_decode`.
    DcpDecode(DcpDecodeCase),
    /// Kind `dcp_combine`.
    DcpCombine(DcpCombineCase),
    /// Kind `indexer_append`.
    IndexAppend(IndexAppendCase),
    /// Kind `indexer_query`.
    IndexQuery(IndexQueryCase),
    /// Kind `indexer_logits`.
    IndexLogits(IndexLogitsCase),
}

/// A decode: arrays as in the spec, dense and little-endian.
#[derive(Debug, Clone)]
pub struct DecodeCase {
    /// Dims and dtypes; `out` is f32.
    pub spec: MlaDecode,
    /// Factor of the logits.
    pub softmax_scale: f32,
    /// Factor of every cache element.
    pub k_scale: f32,
    /// Factor of every query element.
    pub q_scale: f32,
    /// Causal, or every key of the sequence.
    pub causal: bool,
    /// `[total_q, H, L + R]` of `spec.query`.
    pub q: Vec<u8>,
    /// `[num_pages, page_size, L + R]` of `spec.kv.dtype()`.
    pub kv_cache: Vec<u8>,
    /// `[batch, max_pages]`.
    pub block_table: Vec<i32>,
    /// Entries in a row of `block_table`.
    pub max_pages: usize,
    /// `[batch]`.
    pub seq_lens: Vec<i32>,
    /// `[batch + 1]`.
    pub query_start_loc: Vec<i32>,
    /// Expected `[total_q, H, L]`.
    pub out: Vec<f32>,
    /// Expected `[total_q, H]`, natural.
    pub lse: Vec<f32>,
}

/// A sparse decode: each query token attends a list of slots.
#[derive(Debug, Clone)]
pub struct SparseCase {
    /// Dims, dtypes and the cache's layout; `out` is f32.
    pub spec: MlaDecode,
    /// Factor of the logits.
    pub softmax_scale: f32,
    /// Factor of every cache element.
    pub k_scale: f32,
    /// Factor of every query element.
    pub q_scale: f32,
    /// `[total_q, H, L + R]` of `spec.query`.
    pub q: Vec<u8>,
    /// `[num_pages, page_size]` tokens of `spec.kv.layout`.
    pub kv_cache: Vec<u8>,
    /// What each query token attends; entries may be anything, lengths are at most `topk`.
    pub lists: Lists,
    /// `[H]`, or `None` without sinks.
    pub attn_sink: Option<Vec<f32>>,
    /// Expected `[total_q, H, L]`.
    pub out: Vec<f32>,
    /// Expected `[total_q, H]`, natural.
    pub lse: Vec<f32>,
}

/// A pairwise merge.
#[derive(Debug, Clone)]
pub struct MergeCase {
    /// Dtype and head size.
    pub spec: MergeState,
    /// Query tokens.
    pub num_tokens: usize,
    /// Heads.
    pub num_heads: usize,
    /// `[tokens, heads, head_size]` of `spec.dtype`.
    pub prefix_output: Vec<u8>,
    /// `[heads, tokens]`.
    pub prefix_lse: Vec<f32>,
    /// `[tokens, heads, head_size]` of `spec.dtype`.
    pub suffix_output: Vec<u8>,
    /// `[heads, tokens]`.
    pub suffix_lse: Vec<f32>,
    /// Expected `[tokens, heads, head_size]`.
    pub output: Vec<f32>,
    /// Expected `[heads, tokens]`.
    pub output_lse: Vec<f32>,
}

/// An append.
#[derive(Debug, Clone)]
pub struct AppendCase {
    /// Dims and dtypes, with one head.
    pub spec: KvAppend,
    /// An e4m3 cache holds `x / k_scale`.
    pub k_scale: f32,
    /// `[tokens, L]` of `spec.input`.
    pub kv_c: Vec<u8>,
    /// `[tokens, R]` of `spec.input`.
    pub k_pe: Vec<u8>,
    /// `[tokens]`, negative to skip.
    pub slot_mapping: Vec<i64>,
    /// The cache before the append.
    pub kv_cache_before: Vec<u8>,
    /// Expected bytes of the cache.
    pub kv_cache: Vec<u8>,
}

/// A decode that is cut into ranks.
#[derive(Debug, Clone)]
pub struct DcpDecodeCase {
    /// The whole.
    pub decode: DecodeCase,
    /// Whose each token is.
    pub shares: Shares,
    /// Expected `[world, batch]`.
    pub local_seq_lens: Vec<i32>,
}

/// The results of several ranks, to be combined.
#[derive(Debug, Clone)]
pub struct DcpCombineCase {
    /// Dtype and head size.
    pub spec: MergeStates,
    /// Ranks.
    pub world: usize,
    /// Query tokens.
    pub num_tokens: usize,
    /// Heads.
    pub num_heads: usize,
    /// The base of `lses` and `lse`.
    pub lse_base: LseBase,
    /// `[world, tokens, heads, head_size]` of `spec.dtype`.
    pub outs: Vec<u8>,
    /// `[world, tokens, heads]`.
    pub lses: Vec<f32>,
    /// Expected `[tokens, heads, head_size]`.
    pub out: Vec<f32>,
    /// Expected `[tokens, heads]`.
    pub lse: Vec<f32>,
}

impl Case {
    /// Reads a case file.
    pub fn load(path: &Path) -> Result<Self, String> {
        let bytes = std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
        Self::parse(&bytes).map_err(|error| format!("{}: {error}", path.display()))
    }

    /// Reads the bytes of a case file.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let file = File::open(bytes)?;
        match file.text("format")? {
            "mla-case/1" => {}
            other => return Err(format!("format is {other:?}: must be \"mla-case/1\"")),
        }
        match file.text("kind")? {
            "decode" => decode(&file).map(Self::Decode),
            "decode_sparse" => sparse::read(&file).map(Self::Sparse),
            "merge_attn_states" => merge(&file).map(Self::Merge),
            "concat_and_cache_mla" => append(&file, None).map(Self::Append),
            "concat_and_cache_ds_mla_656" => append(&file, Some(KvLayout::Ds656)).map(Self::Append),
            "concat_and_cache_ds_mla_528" => append(&file, Some(KvLayout::Ds528)).map(Self::Append),
            "top_k" => top_k::read(&file, false).map(Self::TopK),
            "top_k_slots" => top_k::read(&file, true).map(Self::TopK),
            "dcp_decode" => dcp_decode(&file).map(Self::DcpDecode),
            "dcp_combine" => dcp_combine(&file).map(Self::DcpCombine),
            "indexer_append" => indexer::append(&file).map(Self::IndexAppend),
            "indexer_query" => indexer::query(&file).map(Self::IndexQuery),
            "indexer_logits" => index_logits::read(&file).map(Self::IndexLogits),
            other => Err(format!(
                "kind is {other:?}: must be decode, decode_sparse, merge_attn_states, concat_and_cache_mla, concat_and_cache_ds_mla_656, concat_and_cache_ds_mla_528, indexer_append, indexer_query, indexer_logits, top_k, top_k_slots, dcp_decode or dcp_combine"
            )),
        }
    }
}

fn decode(file: &File<'_>) -> Result<DecodeCase, String> {
    let (latent, rope) = (file.number("kv_lora_rank")?, file.number("qk_rope_head_dim")?);
    let page_size = file.number("page_size")?;
    let row = u64::from(latent) + u64::from(rope);

    let q = file.floats("q")?;
    let [total_q, heads, _] = q.shape(["total_q", "num_heads", "L + R"])?;
    let kv = file.floats("kv_cache")?;
    let [num_pages, _, _] = kv.shape(["num_pages", "page_size", "L + R"])?;
    let shape =
        MlaShape { num_heads: narrow("num_heads", heads)?, kv_lora_rank: latent, qk_rope_head_dim: rope };
    let kv_spec = KvSpec { layout: kv.dtype.into(), page_size, num_pages: narrow("num_pages", num_pages)? };
    let spec = MlaDecode { shape, kv: kv_spec, query: q.dtype, out: Dtype::F32 };
    spec.check().map_err(|error| error.to_string())?;
    narrow("total_q", total_q)?;
    q.expect(&[total_q, heads, row])?;
    kv.expect(&[num_pages, page_size.into(), row])?;

    let seq_lens = file.i32s("seq_lens", ["batch"])?;
    let batch = seq_lens.len() as u64;
    let query_start_loc = file.i32s("query_start_loc", ["batch + 1"])?;
    let table = file.tensor("block_table")?;
    let [_, max_pages] = table.shape(["batch", "max_pages"])?;
    narrow("max_pages", max_pages)?;
    table.expect(&[batch, max_pages])?;
    let block_table = file.i32s("block_table", ["batch", "max_pages"])?;
    check_starts(&query_start_loc, batch, total_q)?;
    check_pages(&spec.kv, &seq_lens, &block_table, max_pages as usize)?;

    let out = file.f32s("out", &[total_q, heads, latent.into()])?;
    let lse = file.f32s("lse", &[total_q, heads])?;
    Ok(DecodeCase {
        spec,
        softmax_scale: file.softmax_scale()?,
        k_scale: file.scale("k_scale")?,
        q_scale: file.scale("q_scale")?,
        causal: file.flag("causal")?,
        q: q.bytes(),
        kv_cache: kv.bytes(),
        block_table,
        max_pages: max_pages as usize,
        seq_lens,
        query_start_loc,
        out,
        lse,
    })
}

/// `query_start_loc` begins at 0, never falls and ends at `total_q`.
fn check_starts(starts: &[i32], batch: u64, total_q: u64) -> Result<(), String> {
    if starts.len() as u64 != batch + 1 {
        return Err(format!(
            "query_start_loc has {} entries: must be batch + 1 = {}",
            starts.len(),
            batch + 1
        ));
    }
    let mut before = 0;
    for (index, &start) in starts.iter().enumerate() {
        if start < before || index == 0 && start != 0 {
            return Err(format!("query_start_loc[{index}] is {start}: must begin at 0 and never fall"));
        }
        before = start;
    }
    if before as u64 != total_q {
        return Err(format!("query_start_loc ends at {before}: must be total_q = {total_q}"));
    }
    Ok(())
}

/// Every page that a sequence uses is in its table row and in the pool.
fn check_pages(kv: &KvSpec, seq_lens: &[i32], table: &[i32], max_pages: usize) -> Result<(), String> {
    for (seq, &len) in seq_lens.iter().enumerate() {
        let tokens =
            u32::try_from(len).map_err(|_| format!("seq_lens[{seq}] is {len}: must be at least 0"))?;
        let used = kv.pages_for(tokens) as usize;
        if used > max_pages {
            return Err(format!(
                "seq_lens[{seq}] is {len}: a block_table row of {max_pages} pages is too short"
            ));
        }
        let row = table.get(seq * max_pages..seq * max_pages + used).unwrap_or(&[]);
        for (block, &page) in row.iter().enumerate() {
            if !(0..i64::from(kv.num_pages)).contains(&i64::from(page)) {
                let pages = kv.num_pages;
                return Err(format!(
                    "block_table[{seq}][{block}] is {page}: must be below num_pages {pages}"
                ));
            }
        }
    }
    Ok(())
}

fn merge(file: &File<'_>) -> Result<MergeCase, String> {
    let prefix = file.floats("prefix_output")?;
    let [tokens, heads, head_size] = prefix.shape(["tokens", "heads", "head_size"])?;
    let suffix = file.floats("suffix_output")?;
    suffix.expect(&[tokens, heads, head_size])?;
    if suffix.dtype != prefix.dtype {
        return Err(format!("suffix_output is {} but prefix_output {}", suffix.dtype, prefix.dtype));
    }
    if tokens == 0 || heads == 0 {
        return Err(format!("prefix_output is {:?}: no dim may be 0", prefix.dims));
    }
    narrow("tokens", tokens)?;
    narrow("heads", heads)?;
    let spec = MergeState { dtype: prefix.dtype, head_size: narrow("head_size", head_size)? };
    spec.check().map_err(|error| error.to_string())?;
    Ok(MergeCase {
        spec,
        num_tokens: tokens as usize,
        num_heads: heads as usize,
        prefix_output: prefix.bytes(),
        prefix_lse: file.f32s("prefix_lse", &[heads, tokens])?,
        suffix_output: suffix.bytes(),
        suffix_lse: file.f32s("suffix_lse", &[heads, tokens])?,
        output: file.f32s("output", &[tokens, heads, head_size])?,
        output_lse: file.f32s("output_lse", &[heads, tokens])?,
    })
}

/// `records` is the layout of a cache that is bytes; else its dtype says it.
fn append(file: &File<'_>, records: Option<KvLayout>) -> Result<AppendCase, String> {
    let (latent, rope) = (file.number("kv_lora_rank")?, file.number("qk_rope_head_dim")?);
    let page_size = file.number("page_size")?;
    let kv_c = file.floats("kv_c")?;
    let (layout, before, after) = match records {
        Some(layout) => (layout, file.codes("kv_cache_before")?, file.codes("kv_cache")?),
        None => {
            let (before, after) = (file.floats("kv_cache_before")?, file.floats("kv_cache")?);
            if after.dtype != before.dtype {
                return Err(format!("kv_cache is {} but kv_cache_before {}", after.dtype, before.dtype));
            }
            (before.dtype.into(), before.tensor(), after.tensor())
        }
    };
    let [tokens, _] = kv_c.shape(["tokens", "L"])?;
    let [num_pages, _, _] = before.shape(["num_pages", "page_size", "L + R, or bytes"])?;
    let spec = KvAppend {
        shape: MlaShape { num_heads: 1, kv_lora_rank: latent, qk_rope_head_dim: rope },
        kv: KvSpec { layout, page_size, num_pages: narrow("num_pages", num_pages)? },
        input: kv_c.dtype,
        guard: false,
    };
    spec.check().map_err(|error| error.to_string())?;
    narrow("tokens", tokens)?;
    kv_c.expect(&[tokens, latent.into()])?;
    let row = if records.is_some() {
        spec.kv.token(&spec.shape).bytes
    } else {
        u64::from(latent) + u64::from(rope)
    };
    let pool = [num_pages, page_size.into(), row];
    before.expect(&pool)?;
    after.expect(&pool)?;
    // Without a rotary part a file may leave the tensor out.
    let k_pe = if rope == 0 && !file.has("k_pe") {
        Vec::new()
    } else {
        let k_pe = file.floats("k_pe")?;
        k_pe.expect(&[tokens, rope.into()])?;
        if k_pe.dtype != kv_c.dtype {
            return Err(format!("k_pe is {} but kv_c {}", k_pe.dtype, kv_c.dtype));
        }
        k_pe.bytes()
    };
    let slot_mapping = file.i64s("slot_mapping")?;
    if slot_mapping.len() as u64 != tokens {
        return Err(format!(
            "slot_mapping has {} entries: must be one a token, {tokens}",
            slot_mapping.len()
        ));
    }
    spec.slots(&slot_mapping).map_err(|error| error.to_string())?;
    let k_scale = file.scale("k_scale")?;
    let (kv_c, kv_cache_before, kv_cache) = (kv_c.bytes(), before.bytes(), after.bytes());
    Ok(AppendCase { spec, k_scale, kv_c, k_pe, slot_mapping, kv_cache_before, kv_cache })
}

fn dcp_decode(file: &File<'_>) -> Result<DcpDecodeCase, String> {
    let decode = decode(file)?;
    let (world, interleave) = (file.number("world")?, file.number("interleave")?);
    let shares = Shares::even(world, interleave).map_err(|error| error.to_string())?;
    let local = file.typed("local_seq_lens", FileDtype::I32)?;
    local.expect(&[world.into(), decode.seq_lens.len() as u64])?;
    Ok(DcpDecodeCase { decode, shares, local_seq_lens: local.elements(i32::from_le_bytes) })
}

fn dcp_combine(file: &File<'_>) -> Result<DcpCombineCase, String> {
    let outs = file.floats("outs")?;
    let [world, tokens, heads, head_size] = outs.shape(["world", "tokens", "heads", "head_size"])?;
    if [world, tokens, heads].contains(&0) {
        return Err(format!("outs is {:?}: no dim may be 0", outs.dims));
    }
    narrow("world", world)?;
    narrow("tokens", tokens)?;
    narrow("heads", heads)?;
    let spec = MergeStates { dtype: outs.dtype, head_size: narrow("head_size", head_size)? };
    spec.check().map_err(|error| error.to_string())?;
    Ok(DcpCombineCase {
        spec,
        world: world as usize,
        num_tokens: tokens as usize,
        num_heads: heads as usize,
        lse_base: match file.text("lse_base")? {
            "e" => LseBase::E,
            "2" => LseBase::Two,
            other => return Err(format!("lse_base is {other:?}: must be e or 2")),
        },
        outs: outs.bytes(),
        lses: file.f32s("lses", &[world, tokens, heads])?,
        out: file.f32s("out", &[tokens, heads, head_size])?,
        lse: file.f32s("lse", &[tokens, heads])?,
    })
}
