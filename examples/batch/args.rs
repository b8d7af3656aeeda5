//! The command line.

use std::ffi::OsString;

pub const HELP: &str = "\
A continuous batch on wgpu-mla, checked against the f64 oracle.

batch [--backend cuda|wgpu|cpu]   default: the best that is here, as AnyBackend::best finds it
      [--steps N]                 default: 300
      [--seed N]                  another traffic
      [--help]                    this text";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Where {
    Cuda,
    Wgpu,
    Cpu,
}

#[derive(Debug)]
pub struct Args {
    pub backend: Option<Where>,
    pub steps: u32,
    pub seed: u64,
}

impl Args {
    /// `None` for `--help`.
    pub fn parse(words: impl Iterator<Item = OsString>) -> Result<Option<Self>, String> {
        let text = |word: OsString| word.into_string().map_err(|word| format!("{word:?}: must be UTF-8"));
        let mut words = words.map(text).collect::<Result<Vec<_>, _>>()?.into_iter();
        let mut args = Self { backend: None, steps: 300, seed: 1 };
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
            match word.as_str() {
                "--help" | "-h" => return Ok(None),
                "--backend" => {
                    args.backend = Some(match value()?.as_str() {
                        "cuda" => Where::Cuda,
                        "wgpu" => Where::Wgpu,
                        "cpu" => Where::Cpu,
                        other => return Err(format!("--backend {other}: must be cuda, wgpu or cpu")),
                    });
                }
                "--steps" => args.steps = number(&word, &value()?)?,
                "--seed" => args.seed = number(&word, &value()?)?,
                other => return Err(format!("{other}: no such option")),
            }
        }
        if args.steps == 0 {
            return Err("--steps 0: must be at least 1".into());
        }
        Ok(Some(args))
    }
}

fn number<T: std::str::FromStr>(option: &str, text: &str) -> Result<T, String> {
    let bits = 8 * size_of::<T>();
    text.parse().map_err(|_| format!("{option} {text}: must be a whole number from 0 to 2^{bits} - 1"))
}
