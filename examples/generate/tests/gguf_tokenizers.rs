//! Tokenizers of GGUF files: ids are those of the library `tokenizers` with each model's pre-tokenizer (`scripts/train.sh vocabularies`).

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Value;
use common::changed::{changed, must_refuse};
use common::gguf::{Made, Style, folder};
use generate::{ChatTemplate, Text};
use serde_json::Value as Json;

type Keys = BTreeMap<String, Value>;

fn goldens(name: &str) -> Json {
    let text = std::fs::read_to_string(common::path("tests/vocabularies").join(name)).expect("goldens");
    serde_json::from_str(&text).expect("goldens")
}

fn texts(list: &Json) -> Vec<&str> {
    list.as_array().expect("a list").iter().map(|it| it.as_str().expect("a text")).collect()
}

fn ids(list: &Json) -> Vec<u32> {
    list.as_array().expect("a list").iter().map(|id| id.as_u64().expect("an id") as u32).collect()
}

fn list(texts: &[&str]) -> Value {
    Value::Array(texts.iter().map(|text| Value::String((*text).into())).collect())
}

/// The keys of a vocabulary of bytes.
fn of_bytes(goldens: &Json, pre: &str) -> Keys {
    let tokens = texts(&goldens["tokens"]);
    let kinds = (0..tokens.len()).map(|id| Value::I32(if id + 3 < tokens.len() { 1 } else { 3 })).collect();
    let last = tokens.len() as u32 - 1;
    [
        ("tokenizer.ggml.model", Value::String("gpt2".into())),
        ("tokenizer.ggml.pre", Value::String(pre.into())),
        ("tokenizer.ggml.tokens", list(&tokens)),
        ("tokenizer.ggml.token_type", Value::Array(kinds)),
        ("tokenizer.ggml.merges", list(&texts(&goldens["merges"]))),
        ("tokenizer.ggml.bos_token_id", Value::U32(last - 2)),
        ("tokenizer.ggml.eos_token_id", Value::U32(last)),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
}

/// The keys of SentencePiece's model.
fn of_pieces(goldens: &Json) -> Keys {
    let pieces = goldens["pieces"].as_array().expect("pieces");
    let of = |at: usize| pieces.iter().map(move |piece| &piece[at]);
    let tokens: Vec<&str> = of(0).map(|it| it.as_str().expect("a text")).collect();
    let scores = of(1).map(|it| Value::F32(it.as_f64().expect("a score") as f32)).collect();
    let kinds = of(2).map(|it| Value::I32(it.as_i64().expect("a kind") as i32)).collect();
    [
        ("tokenizer.ggml.model", Value::String("llama".into())),
        ("tokenizer.ggml.pre", Value::String("default".into())),
        ("tokenizer.ggml.tokens", list(&tokens)),
        ("tokenizer.ggml.scores", Value::Array(scores)),
        ("tokenizer.ggml.token_type", Value::Array(kinds)),
        ("tokenizer.ggml.bos_token_id", Value::U32(1)),
        ("tokenizer.ggml.unknown_token_id", Value::U32(0)),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
}

/// A file of nothing but keys.
fn file(dir: &Path, keys: &Keys) -> PathBuf {
    let path = dir.join("vocabulary.gguf");
    let keys: Vec<_> = keys.iter().map(|(name, value)| (name.as_str(), value)).collect();
    let mut file = std::fs::File::create(&path).expect("a file");
    candle_core::quantized::gguf_file::write(&mut file, &keys, &[]).expect("gguf");
    path
}

fn must_have_ids(tokenizer: &Text, name: &str, texts: &[&str], ids_of_texts: &Json) {
    let mut wrong = Vec::new();
    for (text, want) in texts.iter().zip(ids_of_texts.as_array().expect("a list")) {
        if want.is_null() {
            continue;
        }
        let (got, want) = (tokenizer.encode_only(text).expect("tokens"), ids(want));
        if got != want {
            wrong.push(format!("{name}, {text:?}: {got:?}, not {want:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn ids_are_those_of_each_pre_tokenizer() {
    let (dir, goldens) = (folder("gguf-vocabularies"), goldens("gguf.json"));
    let all = goldens["ids"].as_object().expect("pre-tokenizers");
    assert_eq!(all.len(), 7);
    for (pre, ids) in all {
        let tokenizer = Text::open(&file(&dir, &of_bytes(&goldens, pre))).expect("a tokenizer");
        must_have_ids(&tokenizer, pre, &texts(&goldens["texts"]), ids);
        let text = "It's 12345 \u{4f60}\u{597d} <x>";
        assert_eq!(tokenizer.decode(&tokenizer.encode_only(text).expect("tokens")).expect("a text"), text);
        // Llama 3's and Mistral's have BOS unless a key says otherwise.
        let bos = *tokenizer.encode("a").expect("tokens").first().expect("a token") as usize;
        let has_bos = texts(&goldens["tokens"])[bos] == "[BOS]";
        assert_eq!(has_bos, ["llama-bpe", "tekken"].contains(&pre.as_str()), "{pre}");
    }
}

#[test]
fn pieces_of_sentencepiece_are_those_of_its_own_file() {
    let (dir, own, gguf) = (folder("gguf-pieces"), goldens("goldens.json"), goldens("gguf.json"));
    let mut keys = of_pieces(&gguf);
    let tokenizer = Text::open(&file(&dir, &keys)).expect("a tokenizer");
    // SentencePiece's own, as transformers adds no space before one.
    let strings = texts(&own["texts"]);
    must_have_ids(&tokenizer, "llama", &strings, &gguf["piece_ids"]);
    for text in strings {
        let got = tokenizer.decode(&tokenizer.encode_only(text).expect("tokens")).expect("a text");
        assert!(got == text || text.contains("<s>") || text.contains('\u{2581}'), "{text:?}: {got:?}");
    }
    assert_eq!(tokenizer.encode("a").expect("tokens")[0], 1);
    keys.insert("tokenizer.ggml.add_bos_token".into(), Value::Bool(false));
    let without = Text::open(&file(&dir, &keys)).expect("a tokenizer");
    assert_eq!(without.encode("a").expect("tokens"), without.encode_only("a").expect("tokens"));
    keys.insert("tokenizer.ggml.precompiled_charsmap".into(), Value::Array(vec![Value::U8(1)]));
    must_refuse(
        Text::open(&file(&dir, &keys)),
        "precompiled_charsmap: a tokenizer with a normalizer is not served",
    );
}

/// A pre-tokenizer that is not known is not replaced by another.
#[test]
fn another_pre_tokenizer_is_refused() {
    let (dir, goldens) = (folder("gguf-other"), goldens("gguf.json"));
    for (pre, shown) in [("qwen2", "qwen2"), ("default", "default"), ("", "")] {
        let path = file(&dir, &of_bytes(&goldens, pre));
        must_refuse(
            Text::open(&path),
            &format!("tokenizer.ggml.pre {shown}: a pre-tokenizer that is not known here"),
        );
        must_refuse(Text::open(&path), "give the model's own tokenizer.json with --tokenizer FILE");
        let given = common::path("model/tokenizer.json");
        let tokenizer = Text::open_with(&path, Some(&given)).expect("a tokenizer");
        let own = Text::open(&common::path("model")).expect("a tokenizer");
        assert_eq!(tokenizer.encode_only("KING").expect("tokens"), own.encode_only("KING").expect("tokens"));
        assert_eq!(
            Text::open_with(&path, Some(&common::path("model"))).expect("a tokenizer").encode_only("a").ok(),
            own.encode_only("a").ok()
        );
    }
    let with = |name: &str, value: Option<Value>| {
        let mut keys = of_bytes(&goldens, "glm4");
        match value {
            Some(value) => drop(keys.insert(format!("tokenizer.ggml.{name}"), value)),
            None => drop(keys.remove(&format!("tokenizer.ggml.{name}")).expect("a key")),
        }
        Text::open(&file(&dir, &keys))
    };
    must_refuse(with("pre", None), "tokenizer.ggml.pre missing: a pre-tokenizer that is not known");
    must_refuse(with("model", None), "tokenizer.ggml.model: missing; give the model's own");
    must_refuse(
        with("model", Some(Value::String("bert".into()))),
        "tokenizer.ggml.model bert: must be gpt2 or llama",
    );
    must_refuse(with("tokens", None), "tokenizer.ggml.tokens: missing");
    must_refuse(with("merges", None), "tokenizer.ggml.merges: missing");
    must_refuse(with("merges", Some(list(&["ab"]))), "tokenizer.ggml.merges has \"ab\": no pair");
    must_refuse(
        with("token_type", Some(Value::Array(vec![Value::I32(1)]))),
        "token_type has 1 entries: must be 1003",
    );
    must_refuse(
        with("add_bos_token", Some(Value::U32(1))),
        "tokenizer.ggml.add_bos_token U32(1): must be true or false",
    );
}

/// What ends a turn, where the file says the end of a text alone; and the template.
#[test]
fn metadata_has_what_ends_a_text_and_the_template() {
    let (dir, goldens) = (changed("gguf-chat", "youtu", "config.json", |text| text), goldens("gguf.json"));
    let mut made = Made::new(&dir, "deepseek2", Style::new(GgmlDType::F32));
    made.keys.extend(of_bytes(&goldens, "youtu"));
    made.keys.insert("tokenizer.ggml.eot_token_id".into(), Value::U32(7));
    let template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}";
    made.keys.insert("tokenizer.chat_template".into(), Value::String(template.into()));
    let path = made.write(&dir.join("model.gguf"));
    assert_eq!(generate::Config::open(&path).expect("a config").eos, [7, 1001, 1002]);
    let template = ChatTemplate::open(&path, None).expect("a template");
    let asked = generate::Message { role: "user", content: "hi".into() };
    assert_eq!(template.render(&[asked], None).expect("a text"), "[BOS]hi<|end|>");
    must_refuse(
        ChatTemplate::open(&file(&dir, &of_bytes(&goldens, "youtu")), None),
        "take a checkpoint that was trained for chats",
    );
}

#[test]
fn the_program_runs_a_file() {
    let dir = folder("gguf-program");
    let mut made = Made::new(&common::path("model"), "deepseek2", Style::new(GgmlDType::Q8_0));
    made.keys.insert("tokenizer.ggml.pre".into(), Value::String("odd".into()));
    made.keys.insert("tokenizer.ggml.model".into(), Value::String("gpt2".into()));
    let path = made.write(&dir.join("model.gguf"));
    let tokenizer = common::path("model/tokenizer.json");
    let run = |words: &[&str]| {
        let words = [&["--backend", "cpu", "-n", "4", "-t", "0", "-p", "KING HENRY:", "-m"], words].concat();
        let output = Command::new(env!("CARGO_BIN_EXE_generate")).args(words).output().expect("it runs");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.success(), text(&output.stdout), text(&output.stderr))
    };
    let path = path.to_str().expect("UTF-8");
    let (is_good, _, told) = run(&[path]);
    assert!(!is_good && told.contains("tokenizer.ggml.pre odd: a pre-tokenizer that is not known"), "{told}");
    let (is_good, written, told) = run(&[path, "--tokenizer", tokenizer.to_str().expect("UTF-8")]);
    assert!(
        is_good && written.starts_with("KING HENRY:\n") && told.contains("4 layers, 8 heads of 512+64"),
        "{told}"
    );
}
