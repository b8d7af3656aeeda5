//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

pub const HELP: &str = "\
Runs conformance cases of wgpu-mla and checks every result.

decode [FILE | DIRECTORY]...     case files; without any, the repository's tests/cases
  --backend cuda|wgpu|cpu        default: the best that is here, as AnyBackend::best finds it:
                                 cuda (feature `cuda`) on NVIDIA cards since Ampere, wgpu on
                                 other adapters, also in software, cpu where there is none
  --variant NAME                 forces a kernel variant; --list names them
  --list                         lists backends, adapters, variants and case files, and ends
  --save DIRECTORY               writes what was computed to DIRECTORY/<case>.safetensors
  --help                         this text

WGPU_BACKEND and WGPU_ADAPTER_NAME choose an adapter, CUDA_VISIBLE_DEVICES a card.
Status 0: all cases that the backend serves passed (it says which it does not serve);
1: a case failed or could not be read, or none is served; 2: bad arguments.";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Where {
    Cuda,
    Wgpu,
    Cpu,
}

#[derive(Debug, Default)]
pub struct Args {
    pub paths: Vec<PathBuf>,
    pub backend: Option<Where>,
    pub variant: Option<String>,
    pub list: bool,
    pub save: Option<PathBuf>,
}

pub enum Parsed {
    Help,
    Run(Args),
}

impl Args {
    pub fn parse(mut words: impl Iterator<Item = OsString>) -> Result<Parsed, String> {
        let mut args = Self::default();
        let mut only_paths = false;
        while let Some(word) = words.next() {
            // A path need not be Unicode; an option is.
            let option = word.to_str().filter(|text| !only_paths && text.starts_with('-') && *text != "-");
            let Some(option) = option else {
                args.paths.push(word.into());
                continue;
            };
            let (name, joined) = match option.split_once('=') {
                Some((name, value)) => (name.to_owned(), Some(OsString::from(value))),
                None => (option.to_owned(), None),
            };
            let flag = joined.is_none();
            let mut value = |what: &str| {
                let value = joined.clone().or_else(|| words.next()).filter(|value| !value.is_empty());
                value.ok_or_else(|| format!("{name} needs {what}"))
            };
            match name.as_str() {
                "--" if flag => only_paths = true,
                "--help" | "-h" if flag => return Ok(Parsed::Help),
                "--list" if flag => args.list = true,
                "--backend" => args.backend = Some(backend(&value("cuda, wgpu or cpu")?)?),
                "--variant" => args.variant = Some(value("a name")?.to_string_lossy().into_owned()),
                "--save" => args.save = Some(value("a directory")?.into()),
                _ => return Err(format!("{option}: no such option")),
            }
        }
        Ok(Parsed::Run(args))
    }
}

fn backend(value: &OsString) -> Result<Where, String> {
    match value.to_str() {
        Some("cuda") => Ok(Where::Cuda),
        Some("wgpu") => Ok(Where::Wgpu),
        Some("cpu") => Ok(Where::Cpu),
        _ => Err(format!("--backend {}: must be cuda, wgpu or cpu", value.to_string_lossy())),
    }
}
