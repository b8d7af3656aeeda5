//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

use wgpu_mla::Dtype;

use crate::wish::Wish;

pub const HELP: &str = "\
usage: desktop [options]
  --model DIR          a checkpoint in Hugging Face's format (examples/generate/model)
  --prompt TEXT        what to begin with
  --new-tokens N       tokens that each sequence gets (200)
  --temperature X      0: always the likeliest token (0.5)
  --seed N             (1)
  --kv-dtype DTYPE     of the cache: f32, f16, bf16 or e4m3 (f16)
  --theme NAME         dark or light (the system's)
  --size WIDTHxHEIGHT  of the window, in points (1180x760)
for tests and pictures:
  --frames N           closes after N frames that decoded, checks one decode against an oracle, and at temperature 0 the text against the CPU
  --p95 MS             fails if more than 5 % of these frames took longer, times what other programs took of the cores
  --fork N             forks the first sequence once it has N new tokens; may be given more than once
  --lose N             loses the device after N frames that decoded, and starts again
  --help";

#[derive(Clone)]
pub struct Args {
    pub model: PathBuf,
    pub wish: Wish,
    pub dark: Option<bool>,
    pub size: [f32; 2],
    pub frames: Option<usize>,
    pub p95_ms: Option<f32>,
    pub forks: Vec<usize>,
    pub lose: Option<usize>,
}

impl Args {
    /// `None` where help is asked for.
    pub fn parse(args: impl Iterator<Item = OsString>) -> Result<Option<Self>, String> {
        let text = |word: OsString| word.into_string().map_err(|word| format!("{word:?}: must be UTF-8"));
        let mut args = args.map(text).collect::<Result<Vec<_>, _>>()?.into_iter();
        let mut parsed = Self {
            model: concat!(env!("CARGO_MANIFEST_DIR"), "/../generate/model").into(),
            wish: Wish::default(),
            dark: None,
            size: [1180.0, 760.0],
            frames: None,
            p95_ms: None,
            forks: Vec::new(),
            lose: None,
        };
        while let Some(name) = args.next() {
            if name == "--help" {
                return Ok(None);
            }
            let mut value = || args.next().ok_or(format!("{name} needs a value"));
            let wish = &mut parsed.wish;
            match name.as_str() {
                "--model" => parsed.model = value()?.into(),
                "--prompt" => wish.prompt = value()?,
                "--new-tokens" => wish.new_tokens = number(&name, &value()?, 1.0)?,
                "--temperature" => {
                    let temperature = value()?;
                    let parsed = temperature.parse().ok().filter(|it: &f32| it.is_finite() && *it >= 0.0);
                    wish.temperature =
                        parsed.ok_or(format!("{name} {temperature}: must be a number from 0"))?;
                }
                "--seed" => wish.seed = number(&name, &value()?, 0.0)? as u64,
                "--kv-dtype" => wish.kv = dtype(&value()?)?,
                "--theme" => parsed.dark = Some(is_dark(&value()?)?),
                "--size" => parsed.size = size(&value()?)?,
                "--frames" => parsed.frames = Some(number(&name, &value()?, 1.0)?),
                "--p95" => parsed.p95_ms = Some(number(&name, &value()?, 1.0)? as f32),
                "--fork" => parsed.forks.push(number(&name, &value()?, 1.0)?),
                "--lose" => parsed.lose = Some(number(&name, &value()?, 1.0)?),
                _ => return Err(format!("unknown argument {name}")),
            }
        }
        parsed.forks.sort_unstable();
        Ok(Some(parsed))
    }
}

fn number(name: &str, text: &str, least: f64) -> Result<usize, String> {
    let number = text.parse::<u32>().ok().filter(|&number| f64::from(number) >= least);
    number
        .map(|number| number as usize)
        .ok_or(format!("{name} {text}: must be a whole number from {least} to {}", u32::MAX))
}

fn dtype(name: &str) -> Result<Dtype, String> {
    let all = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::E4m3];
    let named = all.into_iter().find(|dtype| dtype.to_string() == name);
    named.ok_or(format!("--kv-dtype {name}: must be f32, f16, bf16 or e4m3"))
}

fn size(text: &str) -> Result<[f32; 2], String> {
    let sides =
        text.split_once('x').and_then(|(width, height)| Some([width.parse().ok()?, height.parse().ok()?]));
    let served = sides.filter(|sides| sides.iter().all(|side: &f32| (100.0..=10_000.0).contains(side)));
    served.ok_or(format!("--size {text}: must be like 1180x760, of 100 to 10000 each"))
}

fn is_dark(name: &str) -> Result<bool, String> {
    match name {
        "dark" => Ok(true),
        "light" => Ok(false),
        _ => Err(format!("--theme {name}: must be dark or light")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Option<Args>, String> {
        Args::parse(line.split_whitespace().map(Into::into))
    }

    #[test]
    fn what_is_wrong_is_said_with_the_cure() {
        for (line, words) in [
            ("--frames", "--frames needs a value"),
            ("--frames 0", "--frames 0: must be a whole number from 1 to 4294967295"),
            ("--fork -1", "--fork -1: must be a whole number from 1 to 4294967295"),
            ("--seed 4294967296", "--seed 4294967296: must be a whole number from 0 to 4294967295"),
            ("--temperature warm", "--temperature warm: must be a number from 0"),
            ("--kv-dtype int4", "--kv-dtype int4: must be f32, f16, bf16 or e4m3"),
            ("--size 10", "--size 10: must be like 1180x760, of 100 to 10000 each"),
            ("--theme blue", "--theme blue: must be dark or light"),
            ("--frame 3", "unknown argument --frame"),
        ] {
            assert_eq!(parse(line).err().as_deref(), Some(words));
        }
    }

    #[test]
    fn a_run_for_a_test() {
        let args = parse("--frames 60 --p95 50 --temperature 0 --fork 40 --fork 20").unwrap().unwrap();
        assert_eq!((args.frames, args.p95_ms, args.forks), (Some(60), Some(50.0), vec![20, 40]));
        assert!(parse("--help").unwrap().is_none());
    }
}
