//! The tokenizer of a GGUF file, in the form of tokenizer.json, and what tokenizer_config.json says elsewhere.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::keys::{Keys, missing};
use super::patterns;
use crate::sentencepiece::{self, CONTROL, NORMAL, Piece, UNKNOWN, USER_DEFINED};
use crate::tokenizer_config::TokenizerConfig;

/// What to do where a text would be split in another way than the model was trained with.
const GIVE: &str = "give the model's own tokenizer.json with --tokenizer FILE";

/// Tokens of an unused id.
const UNUSED: u64 = 5;

/// Tokens that end a turn or a text, in models whose files name but one of them.
const ENDS: [&str; 4] =
    ["<|im_end|>", "<|eot_id|>", "<|end|>", "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>"];

/// # Errors
/// A tokenizer that is not known; a key that is missing or malformed.
pub fn json(keys: &Keys) -> Result<Value, String> {
    match keys.text("tokenizer.ggml.model")? {
        Some("gpt2") => byte_level(keys),
        Some("llama") => pieces(keys),
        None => Err(format!("tokenizer.ggml.model: missing; {GIVE}")),
        Some(other) => Err(format!("tokenizer.ggml.model {other}: must be gpt2 or llama; {GIVE}")),
    }
}

fn byte_level(keys: &Keys) -> Result<Value, String> {
    let pre = keys.text("tokenizer.ggml.pre")?.unwrap_or("missing");
    let splits = patterns::of(pre).ok_or_else(|| {
        format!(
            "tokenizer.ggml.pre {pre}: a pre-tokenizer that is not known here, where {} are; {GIVE}",
            patterns::NAMES
        )
    })?;
    let (tokens, kinds) = tokens(keys)?;
    let merges = keys.strings("tokenizer.ggml.merges")?.ok_or_else(|| missing("tokenizer.ggml.merges"))?;
    let pair = |merge: &&str| {
        // A space is another letter in vocabularies of bytes, so none is in either half.
        let (a, b) = merge.split_once(' ').ok_or(format!("tokenizer.ggml.merges has {merge:?}: no pair"))?;
        Ok([a.to_owned(), b.to_owned()])
    };
    let merges = merges.iter().map(pair).collect::<Result<Vec<_>, String>>()?;
    let all = || tokens.iter().zip(&kinds).enumerate();
    let vocab: BTreeMap<&str, usize> =
        all().filter(|(_, (_, kind))| **kind != UNUSED).map(|(id, (text, _))| (*text, id)).collect();
    let added = all().filter(|(_, (_, kind))| [CONTROL, USER_DEFINED].contains(kind)).map(|(id, (text, kind))| {
        json!({"id": id, "content": text, "special": *kind == CONTROL, "normalized": false, "single_word": false, "lstrip": false,
            "rstrip": false})
    });
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let split = |pattern: &String| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    let mut steps: Vec<Value> = splits.patterns.iter().map(split).collect();
    steps.push(byte_level.clone());
    Ok(json!({
        "version": "1.0",
        "added_tokens": added.collect::<Vec<_>>(),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": splits.ignore_merges, "fuse_unk": false,
            "byte_fallback": false},
    }))
}

/// SentencePiece's BPE.
fn pieces(keys: &Keys) -> Result<Value, String> {
    for name in ["tokenizer.ggml.precompiled_charsmap", "tokenizer.ggml.remove_extra_whitespaces"] {
        if keys.has(name) && keys.flag(name).ok().flatten() != Some(false) {
            return Err(format!("{name}: a tokenizer with a normalizer is not served; {GIVE}"));
        }
    }
    let (tokens, kinds) = tokens(keys)?;
    let scores = keys.scores("tokenizer.ggml.scores")?.ok_or_else(|| missing("tokenizer.ggml.scores"))?;
    if scores.len() != tokens.len() {
        return Err(format!("tokenizer.ggml.scores has {} entries: must be {}", scores.len(), tokens.len()));
    }
    let unknown = keys.size("tokenizer.ggml.unknown_token_id")?;
    let mut all: Vec<Piece<'_>> = Vec::new();
    for ((text, kind), score) in tokens.into_iter().zip(kinds).zip(scores) {
        let kind = if unknown == Some(all.len()) { UNKNOWN } else { kind };
        all.push(Piece { text, score, kind });
    }
    let dummy_prefix = keys.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    sentencepiece::of_pieces(&all, dummy_prefix).map_err(|why| format!("{why}; {GIVE}"))
}

/// Tokens by id, and their kinds.
fn tokens(keys: &Keys) -> Result<(Vec<&str>, Vec<u64>), String> {
    let tokens = keys.strings("tokenizer.ggml.tokens")?.ok_or_else(|| missing("tokenizer.ggml.tokens"))?;
    let kinds = keys.kinds("tokenizer.ggml.token_type")?.unwrap_or_else(|| vec![NORMAL; tokens.len()]);
    match kinds.len() == tokens.len() {
        true => Ok((tokens, kinds)),
        false => Err(format!(
            "tokenizer.ggml.token_type has {} entries: must be {}, as tokenizer.ggml.tokens",
            kinds.len(),
            tokens.len()
        )),
    }
}

/// The tokens that end a text: that of its end, those of a turn's, and what is named so.
///
/// # Errors
/// A key that is malformed.
pub fn ends(keys: &Keys) -> Result<Vec<u32>, String> {
    let mut ends = Vec::new();
    for name in ["eos", "eot", "eom"] {
        ends.extend(keys.size(&format!("tokenizer.ggml.{name}_token_id"))?);
    }
    if keys.has("tokenizer.ggml.tokens") {
        let (tokens, kinds) = tokens(keys)?;
        let is_end = |(text, kind): (&&str, &u64)| *kind == CONTROL && ENDS.contains(text);
        ends.extend(tokens.iter().zip(&kinds).enumerate().filter(|(_, it)| is_end(*it)).map(|(id, _)| id));
    }
    ends.sort_unstable();
    ends.dedup();
    Ok(ends.into_iter().filter_map(|id| u32::try_from(id).ok()).collect())
}

/// # Errors
/// A key that is malformed.
pub fn config(keys: &Keys) -> Result<TokenizerConfig, String> {
    let mut config = TokenizerConfig::default();
    let tokens = if keys.has("tokenizer.ggml.tokens") { tokens(keys)?.0 } else { Vec::new() };
    for (name, key) in [("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")] {
        if let Some(token) =
            keys.size(&format!("tokenizer.ggml.{key}_token_id"))?.and_then(|id| tokens.get(id))
        {
            config.special.insert(format!("{name}_token"), (*token).into());
        }
    }
    let adds_bos = match keys.text("tokenizer.ggml.model")? {
        Some("llama") => true,
        _ => keys.text("tokenizer.ggml.pre")?.and_then(patterns::of).is_some_and(|splits| splits.adds_bos),
    };
    config.add_bos = Some(keys.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(adds_bos));
    config.add_eos = keys.flag("tokenizer.ggml.add_eos_token")?;
    config.chat_template = keys.text("tokenizer.chat_template")?.map(Into::into);
    Ok(config)
}
