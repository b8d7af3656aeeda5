//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::{Error, Generation, Result, Sampling, Where};
use wgpu_mla::{Dtype, KvLayout};

pub const HELP: &str = "\
Continues text with a checkpoint of a model with DeepSeek's attention (MLA), which runs through wgpu-mla over a paged cache.

generate [DIR]                           a checkpoint: config.json, *.safetensors, tokenizer.json; or a GGUF file, of a split any one;
                                         default: the small one in the repo; -m DIR and --model DIR are the same. Values also
                                         come as --option=value
         [--tokenizer FILE]              instead of the model's own, such as where a GGUF file has one that is not known
         [-p, --prompt TEXT]             may be given several times; default: a short scene
         [-f, --file FILE]               a prompt from a file, - for standard input; several times too
         [--batch N]                     N sequences at once: the prompts in turn, each with a seed of its own; default: one a prompt
         [-n, --max-tokens N]            of a text or an answer; default: 200, and with --chat all that the conversation has room for
         [--stop TEXT]                   ends a text or an answer where it writes this; several times too
         [-t, --temperature X]           0: always the likeliest token; default: generation_config.json's, or 0.5
         [--top-k N] [--top-p X] [--min-p X]
                                         only the N likeliest tokens, those whose probabilities sum to X, those with X of the likeliest
                                         one's; defaults: generation_config.json's, or all
         [--repetition-penalty X]        of logits of tokens that were there before; default: generation_config.json's, or 1
         [-s, --seed N]                  default: 1
         [--chat]                        a conversation: a question from each line of standard input, after those of -p and -f. Ctrl-C stops
                                         the answer, and leaves where none is being written
         [--system TEXT]                 what the model is told before the first question
         [--think show|hide|off]         whether its reasoning is written, or left out, or not done, if its template knows how;
                                         default: show
         [--context N]                   tokens of a conversation at most; default: 8192, or what the model has
         [--chat-template FILE]          default: chat_template.jinja, or that of tokenizer_config.json
         [--kv-dtype f32|f16|bf16|e4m3|fp8_ds_mla]
                                         of the cache; fp8_ds_mla: records of 656 bytes; default: f16
         [--index-dtype f32|f16|bf16|e4m3]
                                         of the index cache of a model with sparse attention; default: e4m3, as the models were released
         [--page-size N]                 tokens of a page, 1 to 256; default: 64
         [--backend auto|cuda|wgpu|cpu]  default: auto, the best that is here
         [--engine burn|cpu]             burn: the whole model on the GPU, by a program that is built with it: burn/generate; cpu: all but
                                         attention on the CPU; default: burn, where it is built in, serves the model, and there is a GPU
         [--weight-dtype f32|f16|bf16]   of the weights on that GPU; default: f16, or f32 where it has none
         [--exact]                       attention rounds nothing but the cache: no tensor cores for decodes
         [--guard]                       counts what rounding to the cache's dtype loses, and shows a table a layer at the end
         [--evaluate FILE]               foretells the text in it instead, in windows, and shows perplexity and accuracy
         [--accuracy[=FILE]]             measures every dtype and layout of the cache, and e4m3 and 16-bit queries,
                                         weights and outputs, on the CPU and on the GPU, on the held-out text or that of
                                         --evaluate, and writes the tables to FILE, - for standard output; default: docs/accuracy.md
                                         of the repo
         [--window N] [--windows N]      tokens of a window, and how many at most; default: 512, and all; with --accuracy 512 and 24
         [--list-devices]                what each backend would run on, and why others cannot
         [--version] [-h, --help]        the version; this text";

const ACCURACY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/accuracy.md");

/// In the style of the text that the checkpoint in the repo was trained on.
const SCENE: &str = "\
First Citizen:
Good morrow, neighbour. Have you heard the news?

Second Citizen:
";

#[derive(Debug)]
pub struct Args {
    /// The directory of a checkpoint, or a GGUF file.
    pub dir: PathBuf,
    pub tokenizer: Option<PathBuf>,
    pub prompts: Vec<String>,
    pub batch: Option<usize>,
    pub max_tokens: Option<usize>,
    pub stops: Vec<String>,
    /// `None` without a conversation.
    pub chat: Option<ChatArgs>,
    pub seed: u64,
    /// What was given of a way to choose tokens.
    pub sampling: Generation,
    pub kv: KvLayout,
    pub index: Option<Dtype>,
    pub page_size: u32,
    pub backend: Where,
    pub engine: Option<Engine>,
    pub weight_dtype: Option<Dtype>,
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
            tokenizer: None,
            prompts: Vec::new(),
            batch: None,
            max_tokens: None,
            stops: Vec::new(),
            chat: None,
            seed: 1,
            sampling: Generation::default(),
            kv: Dtype::F16.into(),
            index: None,
            page_size: 64,
            backend: Where::Auto,
            engine: None,
            weight_dtype: None,
            exact: false,
            guard: false,
            evaluate: None,
            accuracy: None,
            window: 512,
            windows: None,
        }
    }
}

/// What only a conversation has.
#[derive(Debug, Default)]
pub struct ChatArgs {
    pub system: Option<String>,
    pub think: Think,
    pub context: Option<usize>,
    pub template: Option<PathBuf>,
}

/// What becomes of a model's reasoning.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum Think {
    #[default]
    Show,
    Hide,
    /// It is asked not to.
    Off,
}

/// What computes the layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    Burn,
    Cpu,
}

/// What the program is to do.
pub enum Wish {
    Help,
    Version,
    Devices,
    Run(Box<Args>),
}

impl Args {
    /// # Errors
    /// [`Error::Input`].
    pub fn parse(words: impl Iterator<Item = OsString>) -> Result<Wish> {
        let text =
            |word: OsString| word.into_string().map_err(|word| wrong(format!("{word:?}: must be UTF-8")));
        let mut words = words.map(text).collect::<Result<Vec<_>>>()?.into_iter();
        let mut args = Self::default();
        let mut dirs = 0;
        // Options that only a conversation has, and the last of them.
        let (mut chat, mut is_chat, mut of_chat) = (ChatArgs::default(), false, None);
        while let Some(word) = words.next() {
            // --accuracy takes its value in this way only.
            let (word, mut given) = match word.split_once('=') {
                Some((option, value)) if option.starts_with("--") && option != "--accuracy" => {
                    (option.to_owned(), Some(value.to_owned()))
                }
                _ => (word, None),
            };
            let mut value = || {
                given.take().or_else(|| words.next()).ok_or_else(|| wrong(format!("{word} needs a value")))
            };
            match word.as_str() {
                "--help" | "-h" => return Ok(Wish::Help),
                "--version" => return Ok(Wish::Version),
                "--list-devices" => return Ok(Wish::Devices),
                "--model" | "-m" => {
                    args.dir = value()?.into();
                    dirs += 1;
                }
                "--tokenizer" => args.tokenizer = Some(value()?.into()),
                "--prompt" | "-p" => args.prompts.push(value()?),
                "--file" | "-f" => args.prompts.push(prompt_of(&value()?)?),
                "--batch" => args.batch = Some(number(&word, &value()?)?),
                "--max-tokens" | "-n" => args.max_tokens = Some(number(&word, &value()?)?),
                "--stop" => args.stops.push(value()?),
                "--chat" => is_chat = true,
                "--system" => chat.system = Some(value()?),
                "--think" => chat.think = think(&word, &value()?)?,
                "--context" => chat.context = Some(number(&word, &value()?)?),
                "--chat-template" => chat.template = Some(value()?.into()),
                "--temperature" | "-t" => {
                    args.sampling.temperature = Some(share(&word, &value()?, f32::MAX)?)
                }
                "--top-k" => args.sampling.top_k = Some(number(&word, &value()?)?),
                "--top-p" => args.sampling.top_p = Some(share(&word, &value()?, 1.0)?),
                "--min-p" => args.sampling.min_p = Some(share(&word, &value()?, 1.0)?),
                "--repetition-penalty" => {
                    args.sampling.repetition_penalty = Some(share(&word, &value()?, 1000.0)?);
                }
                "--seed" | "-s" => args.seed = number(&word, &value()?)?,
                "--kv-dtype" => args.kv = layout(&word, &value()?)?,
                "--index-dtype" => args.index = Some(dtype(&word, &value()?)?),
                "--page-size" => args.page_size = number(&word, &value()?)?,
                "--backend" => args.backend = value()?.parse()?,
                "--engine" => args.engine = Some(engine(&word, &value()?)?),
                "--weight-dtype" => args.weight_dtype = Some(weight_dtype(&word, &value()?)?),
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
            if given.is_some() {
                return Err(wrong(format!("{word} takes no value")));
            }
            if ["--system", "--think", "--context", "--chat-template"].contains(&word.as_str()) {
                of_chat = Some(word);
            }
        }
        if let Some(word) = of_chat.filter(|_| !is_chat) {
            return Err(wrong(format!("{word}: only with --chat; give it too")));
        }
        args.chat = is_chat.then_some(chat);
        args.check(dirs)?;
        Ok(Wish::Run(Box::new(args)))
    }

    /// How tokens are chosen: as the command line says, else as the model's makers do.
    pub fn sampling(&self, advised: &Generation) -> Sampling {
        let (own, none) = (&self.sampling, Sampling::default());
        Sampling {
            seed: self.seed,
            temperature: own.temperature.or(advised.temperature).unwrap_or(0.5),
            top_k: own.top_k.or(advised.top_k).unwrap_or(none.top_k),
            top_p: own.top_p.or(advised.top_p).unwrap_or(none.top_p),
            min_p: own.min_p.or(advised.min_p).unwrap_or(none.min_p),
            repetition_penalty: own.repetition_penalty.or(advised.repetition_penalty).unwrap_or(1.0),
        }
    }

    fn check(&mut self, dirs: usize) -> Result<()> {
        if dirs > 1 {
            return Err(wrong("one directory at a time; a prompt comes after --prompt".into()));
        }
        if self.sampling.repetition_penalty == Some(0.0) {
            return Err(wrong("--repetition-penalty 0: must be more than 0".into()));
        }
        if !(1..=256).contains(&self.page_size) {
            return Err(wrong(format!("--page-size {}: must be 1 to 256", self.page_size)));
        }
        let context = self.chat.as_ref().and_then(|chat| chat.context);
        let counts = [
            ("--batch", self.batch.unwrap_or(1)),
            ("--max-tokens", self.max_tokens.unwrap_or(1)),
            ("--context", context.unwrap_or(1)),
        ];
        for (what, count) in
            counts.into_iter().chain([("--window", self.window), ("--windows", self.windows.unwrap_or(1))])
        {
            if count == 0 {
                return Err(wrong(format!("{what} 0: must be at least 1")));
            }
        }
        if self.engine == Some(Engine::Burn) && self.accuracy.is_some() {
            return Err(wrong(
                "--engine burn and --accuracy: it measures the engine cpu; leave --engine out".into(),
            ));
        }
        if self.stops.iter().any(String::is_empty) {
            return Err(wrong("--stop needs a text of at least one character".into()));
        }
        if self.chat.is_some() {
            let others = [
                ("--batch", self.batch.is_some()),
                ("--evaluate", self.evaluate.is_some()),
                ("--accuracy", self.accuracy.is_some()),
            ];
            return match others.iter().find(|(_, is_given)| *is_given) {
                Some((option, _)) => Err(wrong(format!("{option} and --chat: one at a time"))),
                None => Ok(()),
            };
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

/// A number from 0 to the most.
fn share(option: &str, text: &str, most: f32) -> Result<f32> {
    let must = if most < f32::MAX { format!("from 0 to {most}") } else { "0 or more".into() };
    let number = text.parse().ok().filter(|number| (0.0..=most).contains(number));
    number.ok_or_else(|| wrong(format!("{option} {text}: must be a number, {must}")))
}

fn think(option: &str, text: &str) -> Result<Think> {
    match text {
        "show" => Ok(Think::Show),
        "hide" => Ok(Think::Hide),
        "off" => Ok(Think::Off),
        other => Err(wrong(format!("{option} {other}: must be show, hide or off"))),
    }
}

/// A prompt in a file, or on standard input, without the newline at its end.
fn prompt_of(file: &str) -> Result<String> {
    let text = match file {
        "-" => std::io::read_to_string(std::io::stdin()),
        file => std::fs::read_to_string(file),
    };
    let text = text.map_err(|error| wrong(format!("{file}: {error}; give a file of UTF-8 text")))?;
    Ok(text.strip_suffix('\n').unwrap_or(&text).into())
}

/// With vLLM's name of records.
fn layout(option: &str, text: &str) -> Result<KvLayout> {
    match text {
        "fp8_ds_mla" => Ok(KvLayout::Ds656),
        _ => match dtype(option, text) {
            Ok(dtype) => Ok(dtype.into()),
            Err(_) => Err(wrong(format!("{option} {text}: must be f32, f16, bf16, e4m3 or fp8_ds_mla"))),
        },
    }
}

fn engine(option: &str, text: &str) -> Result<Engine> {
    match text {
        "burn" => Ok(Engine::Burn),
        "cpu" => Ok(Engine::Cpu),
        other => Err(wrong(format!("{option} {other}: must be burn or cpu"))),
    }
}

fn weight_dtype(option: &str, text: &str) -> Result<Dtype> {
    match dtype(option, text) {
        Ok(dtype) if dtype != Dtype::E4m3 => Ok(dtype),
        _ => Err(wrong(format!("{option} {text}: must be f32, f16 or bf16"))),
    }
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
