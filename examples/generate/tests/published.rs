//! Ids that llama.cpp publishes for its test strings, with the models' own vocabularies, which are not in the repo: `MLA_VOCABULARIES`
//! names a folder of `ggml-vocab-NAME.gguf`, or a tokenizer.json as `ggml-vocab-NAME.json`, beside the `.gguf.inp` and `.gguf.out` of
//! llama.cpp's folder models.

mod common;

use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::Value;
use generate::Text;

/// A vocabulary of bytes in the form of a GGUF file, from a tokenizer.json whose pre-tokenizer this project has by that name.
fn gguf_of(json: &Path, pre: &str) -> PathBuf {
    let text = std::fs::read_to_string(json).expect("a tokenizer.json");
    let all: serde_json::Value = serde_json::from_str(&text).expect("json");
    let id = |value: &serde_json::Value| value.as_u64().expect("an id") as usize;
    let plain = all["model"]["vocab"].as_object().expect("a vocabulary").iter();
    let added = all["added_tokens"].as_array().expect("a list").iter();
    let added = added.map(|it| {
        let kind = if it["special"] == serde_json::Value::Bool(true) { 3 } else { 4 };
        (id(&it["id"]), it["content"].as_str().expect("a text"), kind)
    });
    let named: Vec<_> = plain.map(|(token, at)| (id(at), token.as_str(), 1)).chain(added).collect();
    let count = named.iter().map(|it| it.0 + 1).max().unwrap_or(0);
    let mut tokens: Vec<(String, i32)> = (0..count).map(|at| (format!("[PAD{at}]"), 5)).collect();
    named.into_iter().for_each(|(at, token, kind)| tokens[at] = (token.into(), kind));
    let merge = |it: &serde_json::Value| match it.as_array() {
        Some(pair) => pair.iter().filter_map(|half| half.as_str()).collect::<Vec<_>>().join(" "),
        None => it.as_str().expect("a merge").into(),
    };
    let merges = all["model"]["merges"].as_array().expect("merges").iter().map(merge);
    let keys = [
        ("tokenizer.ggml.model", Value::String("gpt2".into())),
        ("tokenizer.ggml.pre", Value::String(pre.into())),
        ("tokenizer.ggml.merges", Value::Array(merges.map(Value::String).collect())),
        ("tokenizer.ggml.token_type", Value::Array(tokens.iter().map(|it| Value::I32(it.1)).collect())),
        ("tokenizer.ggml.tokens", Value::Array(tokens.into_iter().map(|it| Value::String(it.0)).collect())),
    ];
    let path = common::gguf::folder("published").join("vocabulary.gguf");
    let mut file = std::fs::File::create(&path).expect("a file");
    let keys: Vec<_> = keys.iter().map(|(name, value)| (*name, value)).collect();
    candle_core::quantized::gguf_file::write(&mut file, &keys, &[]).expect("gguf");
    path
}

#[test]
fn ids_are_those_that_llama_cpp_publishes() {
    let Some(folder) = std::env::var_os("MLA_VOCABULARIES").map(PathBuf::from) else {
        eprintln!("NOT TESTED: MLA_VOCABULARIES names no folder");
        return;
    };
    let (mut wrong, mut compared) = (Vec::new(), 0);
    for entry in std::fs::read_dir(&folder).expect("a folder") {
        let expected = entry.expect("an entry").path();
        let Some(name) = expected.file_name().and_then(|name| name.to_str()?.strip_suffix(".gguf.out"))
        else {
            continue;
        };
        let (own, json) = (folder.join(format!("{name}.gguf")), folder.join(format!("{name}.json")));
        let pre = name.strip_prefix("ggml-vocab-").expect("llama.cpp's name");
        let path = if own.exists() { own } else { gguf_of(&json, pre) };
        let tokenizer = match Text::open(&path) {
            Ok(tokenizer) => tokenizer,
            Err(error) => {
                println!("{name}: {error}");
                continue;
            }
        };
        let strings = std::fs::read_to_string(folder.join(format!("{name}.gguf.inp"))).expect("test strings");
        let mut strings: Vec<&str> = strings.split("\n__ggml_vocab_test__\n").collect();
        strings.pop();
        let ids = std::fs::read_to_string(&expected).expect("ids");
        assert_eq!(strings.len(), ids.lines().count(), "{name}");
        for (string, want) in strings.iter().zip(ids.lines()) {
            let want: Vec<u32> = want.split_whitespace().map(|id| id.parse().expect("an id")).collect();
            let got = tokenizer.encode_only(string).expect("tokens");
            if got != want {
                wrong.push(format!("{name}, {string:?}: {got:?}, not {want:?}"));
            }
            compared += 1;
        }
        println!("{name}: {} strings", strings.len());
    }
    assert!(compared > 0, "no vocabulary in {}", folder.display());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
