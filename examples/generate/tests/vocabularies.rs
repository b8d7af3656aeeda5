//! Files that checkpoints have instead of tokenizer.json: ids are those of the libraries that made the formats.

mod common;

use generate::Text;
use serde_json::Value;

#[test]
fn ids_are_those_of_transformers() {
    let goldens = std::fs::read_to_string(common::path("tests/vocabularies/goldens.json")).expect("goldens");
    let goldens: Value = serde_json::from_str(&goldens).expect("goldens");
    let texts = goldens["texts"].as_array().expect("texts");
    let all = goldens["ids"].as_object().expect("vocabularies");
    assert_eq!(all.len(), 3);
    let mut wrong = Vec::new();
    for (name, ids) in all {
        let tokenizer = Text::open(&common::path(&format!("tests/vocabularies/{name}"))).expect(name);
        for (text, ids) in texts.iter().zip(ids.as_array().expect("a list")) {
            let text = text.as_str().expect("a text");
            let Some(want) = ids.as_array() else { continue };
            let want: Vec<u32> = want.iter().map(|id| id.as_u64().expect("an id") as u32).collect();
            let got = tokenizer.encode_only(text).expect("tokens");
            if got != want {
                wrong.push(format!("{name}, {text:?}: {got:?}, not {want:?}"));
            }
            let (decoded, mut streamed, mut stream) =
                (tokenizer.decode(&got).expect("a text"), String::new(), tokenizer.stream());
            got.iter().for_each(|id| streamed += &stream(*id).expect("a text"));
            assert_eq!(streamed, decoded, "{name}, {text:?}");
            let is_plain =
                !text.starts_with(' ') && !["<|im", "<s>", "\u{2581}"].iter().any(|it| text.contains(it));
            assert!(!is_plain || decoded == text, "{name}, {text:?}: {decoded:?}");
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn other_files_are_refused_with_the_cure() {
    let dir = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("vocabulary");
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).expect("a folder");
    let refused = |what: &str| {
        let error = Text::open(&dir).err().expect(what).to_string();
        assert!(error.contains(what), "{error}\nlacks {what}");
    };
    refused(
        "tokenizer.json: not there; download the checkpoint's tokenizer.json, tiktoken.model or tokenizer.model",
    );
    let good = std::fs::read(common::path("tests/vocabularies/bpe/tokenizer.model")).expect("a file");
    for (bytes, why) in [
        (&good[..good.len() - 5], "or one that is cut off"),
        (&b"\xff\xff\xff"[..], "no model of SentencePiece"),
        (b"\x0a\x02\x18\x02\x1a\x00", "normalised is not served; download a tokenizer.json"),
        (b"\x0a\x02\x18\x02\x12\x02\x18\x03\x1a\x02\x20\x00", "model_type 3: must be 1, unigram, or 2, BPE"),
        (b"", "no piece for what is unknown"),
    ] {
        std::fs::write(dir.join("tokenizer.model"), bytes).expect("a file");
        refused(why);
    }
    let good =
        std::fs::read_to_string(common::path("tests/vocabularies/tiktoken/tiktoken.model")).expect("a file");
    let named = r#"{"tokenizer_class": "TikTokenTokenizer"}"#;
    for (config, ranks, why) in [
        ("{}", &*good, "tokenizer_class missing of tokenizer_config.json: must be TikTokenTokenizer"),
        (
            r#"{"tokenizer_class": "GLMTokenizer"}"#,
            &good,
            "how others split texts is not known; download a tokenizer.json",
        ),
        (named, "IQ== x\n", "line 1: must be a token in base64 and its rank"),
        (named, "?? 0\n", "line 1: must be"),
        (named, "IQ== 1\n", "1 tokens, 1 of one byte"),
        (
            r#"{"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": {"5": {"content": "x"}}}"#,
            &good,
            "added_tokens_decoder",
        ),
    ] {
        std::fs::write(dir.join("tokenizer_config.json"), config).expect("a file");
        std::fs::write(dir.join("tiktoken.model"), ranks).expect("a file");
        refused(why);
    }
}
