//! `tiktoken.model`, the vocabulary of Moonlight and Kimi: a token a line in base64, and its rank. The file does not have the pattern that
//! splits a text before its parts become tokens, so that of each class of tokenizer is here.

use std::collections::{BTreeMap, HashMap};

use serde_json::{Value, json};

use crate::tokenizer_config::TokenizerConfig;

/// The class in Moonlight's and Kimi's `tokenizer_config.json`, and its pattern.
const CLASS: &str = "TikTokenTokenizer";
pub const PATTERN: [&str; 8] = [
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
];

/// Tokens after those of the file: special ones, of which those that have no name are reserved.
const SPECIAL: u32 = 256;

/// The tokenizer in the form of tokenizer.json.
///
/// # Errors
/// A malformed file; a class whose pattern is not known, as another pre-tokenizer would give wrong ids without any error.
pub fn read(text: &str, config: &TokenizerConfig) -> Result<Value, String> {
    match config.class.as_deref() {
        Some(CLASS) => (),
        other => {
            let class = other.unwrap_or("missing");
            return Err(format!(
                "tokenizer_class {class} of tokenizer_config.json: must be {CLASS}, as how others split texts is not known; download a tokenizer.json"
            ));
        }
    }
    let ranks = ranks(text)?;
    let by_bytes: HashMap<&[u8], u32> =
        ranks.iter().enumerate().map(|(rank, token)| (token.as_slice(), rank as u32)).collect();
    let shown = |bytes: &[u8]| bytes.iter().map(|&byte| shown(byte)).collect::<String>();
    let mut merges = Vec::new();
    for token in &ranks {
        let parts = (1..token.len()).map(|at| token.split_at(at));
        let known = |(a, b): (&[u8], &[u8])| Some((*by_bytes.get(a)?, *by_bytes.get(b)?, shown(a), shown(b)));
        let mut all: Vec<_> = parts.filter_map(known).collect();
        all.sort_unstable();
        merges.extend(all.into_iter().map(|(_, _, a, b)| [a, b]));
    }
    let base = ranks.len() as u32;
    let last = config.added.keys().max().copied().unwrap_or(0).max(base + SPECIAL - 1);
    if last >= base + (1 << 16) || config.added.keys().any(|&id| id < base) {
        return Err(format!(
            "added_tokens_decoder of tokenizer_config.json has tokens that are not those after the {base} of this file"
        ));
    }
    let added = |id: u32| {
        let (content, special) = match config.added.get(&id) {
            Some((content, special)) => (content.clone(), *special),
            None => (format!("<|reserved_token_{id}|>"), true),
        };
        json!({"id": id, "content": content, "special": special, "normalized": false, "single_word": false, "lstrip": false, "rstrip": false})
    };
    let vocab: BTreeMap<String, usize> =
        ranks.iter().enumerate().map(|(rank, token)| (shown(token), rank)).collect();
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let split = json!({"type": "Split", "pattern": {"Regex": PATTERN.join("|")}, "behavior": "Isolated", "invert": false});
    Ok(json!({
        "version": "1.0",
        "added_tokens": (base..=last).map(added).collect::<Vec<_>>(),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": true, "fuse_unk": false, "byte_fallback": false},
    }))
}

/// All tokens in the order of their ranks, which are those from 0 on.
fn ranks(text: &str) -> Result<Vec<Vec<u8>>, String> {
    let mut all: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let token =
            line.trim().split_once(' ').and_then(|(token, rank)| Some((base64(token)?, rank.parse().ok()?)));
        let (token, rank) =
            token.ok_or(format!("line {}: must be a token in base64 and its rank", number + 1))?;
        all.insert(rank, token);
    }
    let count = all.len();
    let bytes = all.values().filter(|token| token.len() == 1).count();
    match all.last_key_value() {
        Some((last, _)) if *last + 1 == count && bytes == 256 => Ok(all.into_values().collect()),
        _ => Err(format!(
            "{count} tokens, {bytes} of one byte: ranks must be all from 0 on, and bytes all 256"
        )),
    }
}

fn base64(text: &str) -> Option<Vec<u8>> {
    let (mut out, mut bits, mut count) = (Vec::new(), 0u32, 0);
    for byte in text.trim_end_matches('=').bytes() {
        let six = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        (bits, count) = ((bits << 6) | u32::from(six), count + 6);
        if count >= 8 {
            count -= 8;
            out.push((bits >> count) as u8);
            bits &= (1 << count) - 1;
        }
    }
    (!out.is_empty()).then_some(out)
}

/// The letter that stands for a byte in byte-level vocabularies: itself where it is printed, and else one from U+0100 on, in order.
fn shown(byte: u8) -> char {
    let is_printed = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    match is_printed(byte) {
        true => char::from(byte),
        false => {
            let before = (0..byte).filter(|&byte| !is_printed(byte)).count();
            char::from_u32(0x100 + before as u32).unwrap_or(' ')
        }
    }
}
