//! A case file of tensors that fit together, but for a few.

use std::collections::HashMap;

use safetensors::tensor::{Dtype, TensorView};

use crate::source::Source;

/// The kinds of cases.
pub const KINDS: [&str; 10] = [
    "decode",
    "dcp_decode",
    "merge_attn_states",
    "concat_and_cache_mla",
    "dcp_combine",
    "decode_sparse",
    "indexer_append",
    "indexer_query",
    "top_k",
    "top_k_slots",
];

/// A file's parts.
struct Draft<'s, 'a> {
    source: &'s mut Source<'a>,
    tensors: Vec<(&'static str, Dtype, Vec<usize>, Vec<u8>)>,
    metadata: HashMap<String, String>,
}

/// How many of 256 dims and numbers are wrong.
const WRONG: u8 = 2;

impl Draft<'_, '_> {
    fn text(&mut self, key: &str, good: &str) {
        if self.source.chance(WRONG) {
            return;
        }
        let bad = ["", "-1", "0", "4294967296", "nan", "inf", "1e-50", "16", "2"];
        let text = if self.source.chance(WRONG) { self.source.pick(&bad) } else { good };
        self.metadata.insert(key.into(), text.into());
    }

    fn numbers(
        &mut self,
        name: &'static str,
        shape: &[usize],
        good: impl Fn(&mut Source<'_>, usize) -> i64,
        dtype: Dtype,
    ) {
        let count = shape.iter().product();
        let mut bytes = Vec::new();
        for at in 0..count {
            let good = good(self.source, at);
            let number =
                if self.source.chance(WRONG) { i64::from(self.source.hostile() as i32) } else { good };
            match dtype {
                Dtype::I64 => bytes.extend(number.to_le_bytes()),
                _ => bytes.extend((number as i32).to_le_bytes()),
            }
        }
        self.tensors.push((name, dtype, shape.to_vec(), bytes));
    }

    fn floats(&mut self, name: &'static str, dtype: Dtype, shape: &[usize]) {
        let mut shape = shape.to_vec();
        if self.source.chance(WRONG) {
            let at = self.source.index(shape.len());
            shape[at] = self.source.index(5);
        }
        if self.source.chance(WRONG) {
            shape.push(1);
        }
        let dtype = if self.source.chance(WRONG) {
            self.source.pick(&[Dtype::I32, Dtype::F64, Dtype::F16])
        } else {
            dtype
        };
        let bits = match dtype {
            Dtype::F8_E4M3 | Dtype::U8 => 1,
            Dtype::F16 | Dtype::BF16 => 2,
            Dtype::F64 => 8,
            _ => 4,
        };
        let bytes = vec![0; shape.iter().product::<usize>() * bits];
        if !self.source.chance(WRONG) {
            self.tensors.push((name, dtype, shape, bytes));
        }
    }
}

/// The bytes of a file.
pub fn file(source: &mut Source<'_>) -> Vec<u8> {
    let kind = source.pick(&KINDS);
    let float = |source: &mut Source<'_>| source.pick(&[Dtype::F32, Dtype::F16, Dtype::BF16]);
    let mut draft = Draft { source, tensors: Vec::new(), metadata: HashMap::new() };
    draft.text("format", "mla-case/1");
    draft.text("kind", kind);
    let dtype = float(draft.source);
    match kind {
        "decode" | "dcp_decode" => decode(&mut draft, kind != "decode"),
        "merge_attn_states" => {
            let [tokens, heads, dim] = [3, 3, 9].map(|most| draft.source.between(1, most) as usize);
            for (output, lse) in [("prefix_output", "prefix_lse"), ("suffix_output", "suffix_lse")] {
                draft.floats(output, dtype, &[tokens, heads, dim]);
                draft.floats(lse, Dtype::F32, &[heads, tokens]);
            }
            draft.floats("output", Dtype::F32, &[tokens, heads, dim]);
            draft.floats("output_lse", Dtype::F32, &[heads, tokens]);
        }
        "concat_and_cache_mla" => append(&mut draft, dtype),
        "decode_sparse" => sparse(&mut draft),
        "indexer_append" => index_append(&mut draft, dtype),
        "indexer_query" => index_query(&mut draft, dtype),
        "top_k" | "top_k_slots" => top_k(&mut draft, kind == "top_k_slots"),
        _ => {
            let [world, tokens, heads, dim] = [3, 3, 3, 9].map(|most| draft.source.between(1, most) as usize);
            draft.text("lse_base", "e");
            draft.floats("outs", dtype, &[world, tokens, heads, dim]);
            draft.floats("lses", Dtype::F32, &[world, tokens, heads]);
            draft.floats("out", Dtype::F32, &[tokens, heads, dim]);
            draft.floats("lse", Dtype::F32, &[tokens, heads]);
        }
    }
    let Draft { tensors, metadata, .. } = draft;
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        (*name, TensorView::new(*dtype, shape.clone(), bytes).expect("bytes of the shape"))
    });
    safetensors::serialize(views.collect::<Vec<_>>(), Some(metadata)).expect("a file")
}

/// A format, and the angles of so many tokens.
fn index_format(draft: &mut Draft<'_, '_>, tokens: usize) {
    let rope = draft.source.pick(&["half", "interleaved", "none"]);
    draft.text("rope_layout", rope);
    for flag in ["hadamard", "ue8m0"] {
        let set = draft.source.pick(&["true", "false"]);
        draft.text(flag, set);
    }
    let positions = draft.source.between(1, 4) as usize;
    draft.floats("cos_sin", Dtype::F32, &[positions, 64]);
    draft.numbers("positions", &[tokens], |source, _| source.below(4) as i64, Dtype::I32);
}

fn index_append(draft: &mut Draft<'_, '_>, dtype: Dtype) {
    let [pages, page_size] = [3, 5].map(|most| draft.source.between(1, most) as usize);
    let tokens = draft.source.between(0, (pages * page_size) as u32) as usize;
    index_format(draft, tokens);
    draft.text("page_size", &page_size.to_string());
    draft.text("norm_eps", "1e-06");
    draft.floats("k", dtype, &[tokens, 128]);
    draft.floats("norm_weight", Dtype::F32, &[128]);
    draft.floats("norm_bias", Dtype::F32, &[128]);
    draft.floats("index_cache_before", Dtype::U8, &[pages, page_size * 132]);
    draft.floats("index_cache", Dtype::U8, &[pages, page_size * 132]);
    draft.numbers("slot_mapping", &[tokens], |_, at| at as i64, Dtype::I64);
}

fn index_query(draft: &mut Draft<'_, '_>, dtype: Dtype) {
    let [tokens, heads] = [3, 4].map(|most| draft.source.between(1, most) as usize);
    index_format(draft, tokens);
    draft.text("weight_scale", "0.1");
    draft.floats("q", dtype, &[tokens, heads, 128]);
    draft.floats("weights", Dtype::F32, &[tokens, heads]);
    draft.floats("q_codes", Dtype::F8_E4M3, &[tokens, heads, 128]);
    draft.floats("q_weights", Dtype::F32, &[tokens, heads]);
}

fn dims(draft: &mut Draft<'_, '_>, page_size: usize) {
    draft.text("kv_lora_rank", "256");
    draft.text("qk_rope_head_dim", "32");
    draft.text("page_size", &page_size.to_string());
}

fn decode(draft: &mut Draft<'_, '_>, has_ranks: bool) {
    let source = &mut *draft.source;
    let [sequences, heads, pages, page_size] = [3, 2, 4, 5].map(|most| source.between(1, most) as usize);
    let (max_pages, queries) = (source.between(1, 3) as usize, source.between(0, 2) as usize);
    let floats = [Dtype::F8_E4M3, Dtype::F32, Dtype::F16, Dtype::BF16];
    let (query, cache) = (source.pick(&floats), source.pick(&floats));
    let tokens = sequences * queries;
    dims(draft, page_size);
    draft.text("softmax_scale", "0.1");
    draft.text("causal", "true");
    draft.floats("q", query, &[tokens, heads, 288]);
    draft.floats("kv_cache", cache, &[pages, page_size, 288]);
    draft.numbers(
        "block_table",
        &[sequences, max_pages],
        |source, _| source.below(pages as u64) as i64,
        Dtype::I32,
    );
    let most = (max_pages.min(pages) * page_size) as u32;
    draft.numbers("seq_lens", &[sequences], |source, _| source.between(0, most).into(), Dtype::I32);
    draft.numbers("query_start_loc", &[sequences + 1], |_, at| (at * queries) as i64, Dtype::I32);
    draft.floats("out", Dtype::F32, &[tokens, heads, 256]);
    draft.floats("lse", Dtype::F32, &[tokens, heads]);
    if has_ranks {
        draft.text("world", "2");
        draft.text("interleave", "1");
        draft.numbers("local_seq_lens", &[2, sequences], |_, _| 0, Dtype::I32);
    }
}

/// A case whose cache is elements or records, with lengths and sinks or without.
fn sparse(draft: &mut Draft<'_, '_>) {
    let source = &mut *draft.source;
    let [tokens, heads, pages, page_size, topk] =
        [3, 2, 2, 3, 4].map(|most| source.between(1, most) as usize);
    let floats = [Dtype::F8_E4M3, Dtype::F32, Dtype::F16, Dtype::BF16];
    let (query, cache) = (source.pick(&floats), source.pick(&floats));
    let layout = source.pick(&["dense", "fp8_ds_mla_656", "fp8_ds_mla_528"]);
    let (latent, rope, token, cache) = match layout {
        "dense" => (256, 32, 288, cache),
        "fp8_ds_mla_656" => (512, 64, 656, Dtype::U8),
        _ => (512, 0, 528, Dtype::U8),
    };
    draft.text("kv_lora_rank", &latent.to_string());
    draft.text("qk_rope_head_dim", &rope.to_string());
    draft.text("page_size", &page_size.to_string());
    draft.text("softmax_scale", "0.1");
    draft.text("causal", "false");
    draft.text("kv_layout", layout);
    draft.floats("q", query, &[tokens, heads, latent + rope]);
    draft.floats("kv_cache", cache, &[pages, page_size, token]);
    let slots = (pages * page_size) as u64;
    draft.numbers("indices", &[tokens, topk], |source, _| source.below(slots + 1) as i64 - 1, Dtype::I32);
    if draft.source.chance(128) {
        draft.numbers("topk_length", &[tokens], |source, _| source.below(topk as u64 + 1) as i64, Dtype::I32);
    }
    if draft.source.chance(128) {
        draft.floats("attn_sink", Dtype::F32, &[heads]);
    }
    draft.floats("out", Dtype::F32, &[tokens, heads, latent]);
    draft.floats("lse", Dtype::F32, &[tokens, heads]);
}

/// Rows of logits, one a sequence, and pages that hold them, where slots are chosen.
fn top_k(draft: &mut Draft<'_, '_>, has_slots: bool) {
    let [rows, columns, k] = [3, 6, 4].map(|most| draft.source.between(1, most) as usize);
    draft.text("k", &k.to_string());
    draft.floats("logits", Dtype::F32, &[rows, columns]);
    draft.numbers("lengths", &[rows], |source, _| source.below(columns as u64 + 1) as i64, Dtype::I32);
    draft.numbers("indices", &[rows, k], |_, _| -1, Dtype::I32);
    if has_slots {
        draft.text("page_size", "2");
        let max_pages = columns.div_ceil(2);
        draft.numbers("block_table", &[rows, max_pages], |source, _| source.below(9) as i64, Dtype::I32);
        draft.numbers("query_start_loc", &[rows + 1], |_, at| at as i64, Dtype::I32);
    }
}

fn append(draft: &mut Draft<'_, '_>, input: Dtype) {
    let [pages, page_size] = [3, 4].map(|most| draft.source.between(1, most) as usize);
    let tokens = draft.source.index(pages * page_size + 1);
    let cache = draft.source.pick(&[Dtype::F8_E4M3, Dtype::F32, Dtype::F16, Dtype::BF16]);
    dims(draft, page_size);
    draft.floats("kv_c", input, &[tokens, 256]);
    draft.floats("k_pe", input, &[tokens, 32]);
    draft.floats("kv_cache_before", cache, &[pages, page_size, 288]);
    draft.floats("kv_cache", cache, &[pages, page_size, 288]);
    draft.numbers(
        "slot_mapping",
        &[tokens],
        |source, at| if source.chance(16) { -1 } else { at as i64 },
        Dtype::I64,
    );
}
