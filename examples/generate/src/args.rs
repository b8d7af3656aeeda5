//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

use generate::{Error, Result, Where};
use wgpu_mla::Dtype;

pub const HELP: &str = "\
Continues text with a checkpoint of a model with DeepSeek's attention (MLA), which runs through wgpu-mla over a paged cache.

generate [DIR]                           a checkpoint: config.json, *.safetensors, tokenizer.json; default: the small one in the repo
         [--prompt TEXT]                 may be given several times; default: a short scene
         [--batch N]                     N sequences at once: the prompts in turn, each with a seed of its own; default: one a prompt
         [--max-tokens N]                default: 200
         [--temperature X]               0: always the likeliest token; default: 0.5
         [--seed N]                      default: 1
         [--kv-dtype f32|f16|bf16|e4m3]  of the cache; default: f16
         [--index-dtype f32|f16|bf16|e4m3]
                                         of the index cache of a model with sparse attention; default: e4m3, as the models were released
         [--page-size N]                 tokens of a page, 1 to 256; default: 64
         [--backend auto|cuda|wgpu|cpu]  default: auto, the best that is here
         [--exact]                       attention rounds nothing but the cache: no tensor cores for decodes
         [--guard]                       counts what rounding to the cache's dtype loses, and shows a table a layer at the end
         [--evaluate FILE]               foretells the text in it instead, in windows, and shows perplexity and accuracy
         [--accuracy[=FILE]]             measures every dtype of the cache on the CPU and on the GPU, on the held-out text or that of
                                         --evaluate, and writes the tables to FILE, - for standard output; default: docs/accuracy.md
                                         of the repo
         [--window N] [--windows N]      tokens of a window, and how many at most; default: 512, and all; with --accuracy 512 and 24
         [--help]                        this text";

const ACCURACY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/accuracy.md");

/// In the style of the text that the checkpoint in the repo was trained on.
const SCENE: &str = "\
First Citizen:
Good morrow, neighbour. Have you heard the news?

Second Citizen:
";

#[derive(Debug)]
pub struct Args {
    pub dir: PathBuf,
    pub prompts: Vec<String>,
    pub batch: Option<usize>,
    pub max_tokens: usize,
    pub temperature: f32,
    pub seed: u64,
    pub kv: Dtype,
    pub index: Option<Dtype>,
    pub page_size: u32,
    pub backend: Where,
    pub exact: bool,
    pub guard: bool,
    pub evaluate: Option<PathBuf>,
    /// Where the tables go.
    pub accuracy: Option<PathBuf>,
    pub window: usize,
    pub windows: Option<usize>,
}

impl Default for Args {
    fn default() -> Self {
        Self {
            dir: concat!(env!("CARGO_MANIFEST_DIR"), "/model").into(),
            prompts: Vec::new(),
            batch: None,
            max_tokens: 200,
            temperature: 0.5,
            seed: 1,
            kv: Dtype::F16,
            index: None,
            page_size: 64,
            backend: Where::Auto,
            exact: false,
            guard: false,
            evaluate: None,
            accuracy: None,
            window: 512,
            windows: None,
        }
    }
}

impl Args {
    /// `None` for `--help`.
    pub fn parse(words: impl Iterator<Item = OsString>) -> Result<Option<Self>> {
        let text =
            |word: OsString| word.into_string().map_err(|word| wrong(format!("{word:?}: must be UTF-8")));
        let mut words = words.map(text).collect::<Result<Vec<_>>>()?.into_iter();
        let mut args = Self::default();
        let mut dirs = 0;
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or_else(|| wrong(format!("{word} needs a value")));
            match word.as_str() {
                "--help" | "-h" => return Ok(None),
                "--prompt" => args.prompts.push(value()?),
                "--batch" => args.batch = Some(number(&word, &value()?)?),
                "--max-tokens" => args.max_tokens = number(&word, &value()?)?,
                "--temperature" => args.temperature = temperature(&value()?)?,
                "--seed" => args.seed = number(&word, &value()?)?,
                "--kv-dtype" => args.kv = dtype(&word, &value()?)?,
                "--index-dtype" => args.index = Some(dtype(&word, &value()?)?),
                "--page-size" => args.page_size = number(&word, &value()?)?,
                "--backend" => args.backend = value()?.parse()?,
                "--exact" => args.exact = true,
                "--guard" => args.guard = true,
                "--evaluate" => {
                    let file = Some(value()?).filter(|file| !file.is_empty());
                    args.evaluate = Some(file.ok_or_else(|| wrong("--evaluate needs a file".into()))?.into());
                }
                "--window" => args.window = number(&word, &value()?)?,
                "--windows" => args.windows = Some(number(&word, &value()?)?),
                "--accuracy" => args.accuracy = Some(ACCURACY.into()),
                "--accuracy=" => return Err(wrong("--accuracy= needs a file, - for standard output".into())),
                other if other.starts_with("--accuracy=") => {
                    args.accuracy = other.split_once('=').map(|(_, file)| file.into());
                }
                other if other.starts_with('-') => return Err(wrong(format!("{other}: no such option"))),
                dir => {
                    args.dir = dir.into();
                    dirs += 1;
                }
            }
        }
        args.check(dirs)?;
        Ok(Some(args))
    }

    fn check(&mut self, dirs: usize) -> Result<()> {
        if dirs > 1 {
            return Err(wrong("one directory at a time; a prompt comes after --prompt".into()));
        }
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return Err(wrong(format!("--temperature {}: must be 0 or more", self.temperature)));
        }
        if !(1..=256).contains(&self.page_size) {
            return Err(wrong(format!("--page-size {}: must be 1 to 256", self.page_size)));
        }
        let counts = [("--batch", self.batch.unwrap_or(1)), ("--max-tokens", self.max_tokens)];
        for (what, count) in
            counts.into_iter().chain([("--window", self.window), ("--windows", self.windows.unwrap_or(1))])
        {
            if count == 0 {
                return Err(wrong(format!("{what} 0: must be at least 1")));
            }
        }
        if self.prompts.is_empty() {
            self.prompts.push(SCENE.into());
        }
        if self.batch.is_some_and(|batch| !(self.prompts.len()..=4096).contains(&batch)) {
            return Err(wrong(format!("--batch: must be {}, the prompts, to 4096", self.prompts.len())));
        }
        Ok(())
    }

    /// The prompts of all sequences.
    pub fn sequences(&self) -> Vec<&str> {
        let count = self.batch.unwrap_or(self.prompts.len());
        self.prompts.iter().map(String::as_str).cycle().take(count).collect()
    }
}

fn wrong(why: String) -> Error {
    Error::Input(why)
}

fn number<T: std::str::FromStr>(option: &str, text: &str) -> Result<T> {
    let bits = 8 * size_of::<T>();
    text.parse()
        .map_err(|_| wrong(format!("{option} {text}: must be a number, whole and from 0 to 2^{bits} - 1")))
}

fn temperature(text: &str) -> Result<f32> {
    text.parse().map_err(|_| wrong(format!("--temperature {text}: must be a number, 0 or more")))
}

fn dtype(option: &str, text: &str) -> Result<Dtype> {
    match text {
        "f32" => Ok(Dtype::F32),
        "f16" => Ok(Dtype::F16),
        "bf16" => Ok(Dtype::Bf16),
        "e4m3" => Ok(Dtype::E4m3),
        other => Err(wrong(format!("{option} {other}: must be f32, f16, bf16 or e4m3"))),
    }
}
