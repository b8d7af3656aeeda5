//! The files of a checkpoint, as `examples/generate` reads them: config.json, the weights' headers and index, scales, and tokenizer.json.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use generate::{Checkpoint, Config, Options, Sampling, Setup, Text, Where};

use crate::source::Source;
use crate::{Target, Verdict};

/// The target. Few changed files are those of a checkpoint, so no share of them must run.
pub const TARGET: Target = Target {
    name: "checkpoints",
    about: "config.json, headers and index of weights, scales and tokenizer.json of examples/generate",
    run,
    seeds,
    least_ran: 0,
    longest: 16 << 10,
    memory: 256 << 20,
};

const GENERATE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/generate");

/// A tiny checkpoint of the package's tests.
struct Tiny {
    config: String,
    /// The header of its weights, and what is behind that.
    header: Vec<u8>,
    data: Vec<u8>,
}

fn tiny() -> &'static Tiny {
    static TINY: OnceLock<Tiny> = OnceLock::new();
    TINY.get_or_init(|| {
        let folder = Path::new(GENERATE).join("tests/tiny/v3-dense");
        let config = std::fs::read_to_string(folder.join("config.json")).expect("a config");
        let weights = std::fs::read(folder.join("model.safetensors")).expect("weights");
        let (length, rest) = weights.split_first_chunk::<8>().expect("a length");
        let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
        Tiny { config, header: header.to_vec(), data: data.to_vec() }
    })
}

const SCALES: &str =
    r#"{"kv_cache": {"dtype": "fp8", "scaling_factor": {"0": {"0": 0.5, "1": 0.25, "2": 1.0}}}}"#;
const TOKENIZER: &str = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [{"id": 0, "content": "<|end|>",
"single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}], "normalizer": null, "pre_tokenizer":
{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}, "post_processor": null, "decoder":
{"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}, "model": {"type": "BPE", "dropout": null,
"unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
"ignore_merges": false, "vocab": {"<|end|>": 0, "R": 1, "O": 2, "M": 3, "E": 4, ":": 5, "RO": 6}, "merges": [["R", "O"]]}}"#;

/// The first byte says which file the rest is.
fn run(input: &[u8]) -> Verdict {
    let mut source = Source::new(input);
    let kind = source.below(5);
    let rest = source.rest();
    let text = String::from_utf8_lossy(rest);
    let done = match kind {
        0 => config(&text),
        1 => loaded(Checkpoint::parse(&tiny().config, weights(rest), SCALES)),
        2 => loaded(Checkpoint::parse(&tiny().config, weights(&tiny().header), &text)),
        3 => indexed(&text),
        _ => tokenizer(&text),
    };
    match done {
        Ok(()) => Verdict::Ran,
        Err(error) => {
            names_a_cure(&error.to_string());
            Verdict::Refused
        }
    }
}

/// An error says what to do, not only what is wrong.
fn names_a_cure(error: &str) {
    const CURES: [&str; 14] = [
        "must",
        "download",
        "use ",
        "give",
        "has to be",
        "name the",
        "put ",
        "shorten",
        "delete",
        "asks for",
        "only",
        "make",
        "move ",
        "set ",
    ];
    assert!(CURES.iter().any(|cure| error.contains(cure)), "no cure in: {error}");
    assert!(error.len() < 4096, "{} bytes: {error}", error.len());
}

fn weights(header: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header, &tiny().data].concat()
}

fn config(text: &str) -> generate::Result<()> {
    let config = Config::from_json(text)?;
    let _ = config.softmax_scale();
    // Weights of another shape are refused before anything of the config's size is made.
    loaded(Checkpoint::parse(text, weights(&tiny().header), SCALES))
}

/// Two tokens of what is loaded.
fn loaded(checkpoint: generate::Result<Checkpoint>) -> generate::Result<()> {
    let checkpoint = checkpoint?;
    let k_scales = checkpoint.k_scales.clone();
    let setup = Setup { backend: Where::Cpu, tokens: 64, page_size: 16, k_scales, ..Setup::default() };
    let mut attention = generate::paged(&checkpoint.model, &setup)?;
    let options =
        Options { max_tokens: 2, sampling: Sampling { temperature: 0.0, seed: 1, ..Sampling::default() } };
    generate::generate(
        &checkpoint.model,
        attention.as_mut(),
        &[vec![1, 2, 3]],
        &options,
        &mut |_, _| Ok(()),
    )?;
    Ok(())
}

/// A folder with the files of a checkpoint in shards, whose index is `text`.
fn indexed(text: &str) -> generate::Result<()> {
    let folder = shards();
    std::fs::write(folder.join("model.safetensors.index.json"), text).expect("an index");
    Checkpoint::open(folder).map(drop)
}

fn shards() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = std::env::temp_dir().join(format!("mla-fuzz-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        for file in std::fs::read_dir(Path::new(GENERATE).join("tests/tiny/v3-halves")).expect("a folder") {
            let path = file.expect("a file").path();
            std::fs::copy(&path, folder.join(path.file_name().expect("a name"))).expect("copied");
        }
        folder
    })
}

fn tokenizer(text: &str) -> generate::Result<()> {
    let tokenizer = Text::parse(text)?;
    for text in ["ROMEO:", "", "\u{1F600} \u{0}e\u{301}"] {
        let tokens = tokenizer.encode(text)?;
        tokenizer.decode(&tokens)?;
        let mut stream = tokenizer.stream();
        tokens.into_iter().try_for_each(|token| stream(token).map(drop))?;
    }
    tokenizer.decode(&[0, u32::MAX, 7]).map(drop)
}

fn seeds() -> Vec<Vec<u8>> {
    let index = Path::new(GENERATE).join("tests/tiny/v3-halves/model.safetensors.index.json");
    let index = std::fs::read(index).expect("an index");
    let files = [tiny().config.as_bytes(), &tiny().header, SCALES.as_bytes(), &index, TOKENIZER.as_bytes()];
    let mut seeds: Vec<Vec<u8>> = (0u8..).zip(files).map(|(kind, file)| [&[kind], file].concat()).collect();
    // Configs of models whose attention is sparse.
    for name in ["v32", "glm-dsa"] {
        let path = Path::new(GENERATE).join("tests/tiny").join(name).join("config.json");
        seeds.push([&[0u8][..], &std::fs::read(path).expect("a config")].concat());
    }
    seeds
}
