//! The command line.

use std::ffi::OsString;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use wgpu_mla::{CombineForm, Shares};

use crate::Result;

pub const HELP: &str = "\
Decodes batches whose sequences lie on several devices, and checks every value against the f64 oracle.

context_parallel [FILE | DIRECTORY]...   case files of kind decode, dcp_decode and dcp_combine, and a few batches of its own
  --devices LIST        a device a rank: cpu, wgpu, cuda, cuda:1, ..           default: cpu,cpu
  --shares LIST         the share of each rank, such as 3,1; 0 holds nothing   default: equal
  --interleave N        tokens in a row that one rank holds                    default: the case's, or 16
  --form FORM           a2a, ag_rs (vLLM's cp_lse_ag_out_rs), or ag (all heads everywhere)   default: all that the heads allow
  --engine ENGINE       threads, or nccl (feature `nccl`): what joins the ranks  default: threads
  --timeout SECONDS     how long a rank waits for the others                   default: 30
  --steps N             decodes of each batch, at least 1                      default: 3
  --kill-after N        the last rank dies in its Nth step, at most --steps: the others must say so in time, with status 1

One process a rank, with --engine nccl and one device:
  --rank R --world W --id-file PATH      rank 0 writes NCCL's id to PATH, the others wait for it

  --bench               times instead: one long sequence, exchanges, replays of a graph
  --tokens N            of the long sequence                                   default: 1048576; 16384 on cpu and wgpu
  --parts LIST          of the bench: long, exchange, replays, plain           default: all
  --blocking            NCCL's blocking communicators
  --model               prints the cost model of docs/scale.md, and ends
  --help                this text

Status 0: all passed; 1: a value is wrong, or a rank failed; 2: bad arguments; 3: out of time.";

/// The parts of the bench, in their order.
pub const PARTS: [&str; 4] = ["long", "exchange", "replays", "plain"];

/// Lengths are i32, and the bench's is rounded up to whole pages on every rank.
const MOST_TOKENS: u32 = 1 << 30;

/// What joins the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Engine {
    #[default]
    Threads,
    Nccl,
}

/// One rank of many processes.
#[derive(Debug, Clone)]
pub struct OneRank {
    pub rank: u32,
    pub world: u32,
    pub id_file: PathBuf,
}

#[derive(Debug, Clone)]
pub struct Args {
    pub paths: Vec<PathBuf>,
    pub devices: Vec<String>,
    pub weights: Vec<u32>,
    pub interleave: Option<u32>,
    pub form: Option<CombineForm>,
    pub engine: Engine,
    pub timeout: Duration,
    pub steps: u64,
    pub kill_after: Option<u64>,
    pub one_rank: Option<OneRank>,
    pub bench: bool,
    pub tokens: Option<u32>,
    pub parts: Vec<String>,
    pub blocking: bool,
    pub model: bool,
}

impl Default for Args {
    fn default() -> Self {
        Self {
            paths: Vec::new(),
            devices: Vec::new(),
            weights: Vec::new(),
            interleave: None,
            form: None,
            engine: Engine::Threads,
            timeout: Duration::from_secs(30),
            steps: 3,
            kill_after: None,
            one_rank: None,
            bench: false,
            tokens: None,
            parts: Vec::new(),
            blocking: false,
            model: false,
        }
    }
}

pub enum Parsed {
    Help,
    Run(Box<Args>),
}

impl Args {
    /// # Errors
    /// What is wrong with the arguments.
    pub fn parse(words: impl Iterator<Item = OsString>) -> Result<Parsed> {
        let mut args = Self::default();
        let (mut rank, mut world, mut id_file) = (None, None, None);
        let text = |word: OsString| word.into_string().map_err(|word| format!("{word:?}: must be UTF-8"));
        let mut words = words.map(text).collect::<Result<Vec<_>>>()?.into_iter();
        while let Some(word) = words.next() {
            if !word.starts_with('-') {
                args.paths.push(word.into());
                continue;
            }
            let (name, joined) = match word.split_once('=') {
                Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
                None => (word.clone(), None),
            };
            let flag = joined.is_none();
            let mut value = || {
                let value = joined.clone().or_else(|| words.next()).filter(|value| !value.is_empty());
                value.ok_or_else(|| format!("{name} needs a value"))
            };
            match name.as_str() {
                "--help" | "-h" if flag => return Ok(Parsed::Help),
                "--devices" => args.devices = list(&name, &value()?)?,
                "--shares" => args.weights = numbers(&name, &value()?)?,
                "--interleave" => args.interleave = Some(number(&name, &value()?, 1..=u32::MAX)?),
                "--form" => args.form = Some(form(&value()?)?),
                "--engine" => args.engine = engine(&value()?)?,
                "--timeout" => args.timeout = seconds(&value()?)?,
                "--steps" => args.steps = number(&name, &value()?, 1..=u32::MAX)?.into(),
                "--kill-after" => args.kill_after = Some(number(&name, &value()?, 1..=u32::MAX)?.into()),
                "--rank" => rank = Some(number(&name, &value()?, 0..=u32::MAX)?),
                "--world" => world = Some(number(&name, &value()?, 1..=u32::MAX)?),
                "--id-file" => id_file = Some(PathBuf::from(value()?)),
                "--bench" if flag => args.bench = true,
                "--tokens" => args.tokens = Some(number(&name, &value()?, 1..=MOST_TOKENS)?),
                "--parts" => args.parts = parts(&name, &value()?)?,
                "--blocking" if flag => args.blocking = true,
                "--model" if flag => args.model = true,
                "--help" | "-h" | "--bench" | "--blocking" | "--model" => {
                    return Err(format!("{word}: {name} has no value"));
                }
                _ => return Err(format!("{word}: no such option")),
            }
        }
        args.check_together()?;
        args.one_rank = match (rank, world, id_file) {
            (None, None, None) => None,
            (Some(rank), Some(world), Some(id_file)) if rank < world => {
                Some(OneRank { rank, world, id_file })
            }
            _ => {
                return Err(
                    "--rank, --world and --id-file go together, and the rank is below the world".into()
                );
            }
        };
        if args.one_rank.is_some() && (args.engine != Engine::Nccl || args.devices.len() > 1) {
            return Err("--rank is of one process a rank: give --engine nccl and one device".into());
        }
        if args.devices.is_empty() {
            args.devices = match (args.engine, args.one_rank.is_some()) {
                (Engine::Nccl, true) => vec!["cuda".into()],
                (Engine::Nccl, false) => vec!["cuda:0".into(), "cuda:1".into()],
                _ => vec!["cpu".into(); args.weights.len().max(2)],
            };
        }
        Ok(Parsed::Run(Box::new(args)))
    }

    /// An option that would change nothing is an error.
    fn check_together(&self) -> Result<()> {
        let of_bench = [("--tokens", self.tokens.is_some()), ("--parts", !self.parts.is_empty())];
        if let Some((name, _)) = of_bench.iter().find(|(_, given)| *given && !self.bench) {
            return Err(format!("{name} is of the bench: give --bench too"));
        }
        if self.blocking && self.engine != Engine::Nccl {
            return Err("--blocking is of NCCL: give --engine nccl too".into());
        }
        if let Some(after) = self.kill_after.filter(|&after| self.bench || after > self.steps) {
            let (steps, cure) = (self.steps, "must be 1 to --steps, and is not of --bench");
            return Err(format!("--kill-after {after} of {steps} steps: {cure}"));
        }
        Ok(())
    }

    /// Ranks.
    #[must_use]
    pub fn world(&self) -> u32 {
        self.one_rank.as_ref().map_or(self.devices.len() as u32, |one| one.world)
    }

    /// Which rank holds which token.
    ///
    /// # Errors
    /// Shares of another number of ranks, or that cannot be.
    pub fn shares(&self, interleave: u32) -> Result<Shares> {
        let world = self.world();
        if self.weights.is_empty() {
            return Shares::even(world, interleave).map_err(crate::text);
        }
        if self.weights.len() != world as usize {
            return Err(format!("--shares names {} ranks, there are {world}", self.weights.len()));
        }
        Shares::weighted(&self.weights, interleave).map_err(crate::text)
    }
}

fn list(name: &str, value: &str) -> Result<Vec<String>> {
    let words: Vec<String> = value.split(',').map(|word| word.trim().to_owned()).collect();
    match words.iter().any(String::is_empty) {
        true => {
            Err(format!("{name} {value}: a name is empty; separate names by one comma each, such as a,b"))
        }
        false => Ok(words),
    }
}

fn parts(name: &str, value: &str) -> Result<Vec<String>> {
    let words = list(name, value)?;
    match words.iter().find(|word| !PARTS.contains(&word.as_str())) {
        Some(other) => Err(format!("{name} {other}: must be of {}", PARTS.join(", "))),
        None => Ok(words),
    }
}

fn number(name: &str, value: &str, served: RangeInclusive<u32>) -> Result<u32> {
    let number = value.parse().ok().filter(|number| served.contains(number));
    number.ok_or_else(|| {
        format!("{name} {value}: must be a whole number from {} to {}", served.start(), served.end())
    })
}

fn numbers(name: &str, value: &str) -> Result<Vec<u32>> {
    list(name, value)?.iter().map(|word| number(name, word, 0..=u32::MAX)).collect()
}

fn seconds(value: &str) -> Result<Duration> {
    let seconds: Option<f64> = value.parse().ok().filter(|&seconds| seconds > 0.0 && seconds < 1e6);
    seconds
        .map(Duration::from_secs_f64)
        .ok_or_else(|| format!("--timeout {value}: must be seconds above 0, below 1000000"))
}

fn form(value: &str) -> Result<CombineForm> {
    match value {
        "a2a" => Ok(CombineForm::AllToAll),
        "ag_rs" => Ok(CombineForm::AllGatherReduceScatter),
        "ag" => Ok(CombineForm::AllGather),
        _ => Err(format!("--form {value}: must be a2a, ag_rs or ag")),
    }
}

fn engine(value: &str) -> Result<Engine> {
    match value {
        "threads" => Ok(Engine::Threads),
        "nccl" => Ok(Engine::Nccl),
        _ => Err(format!("--engine {value}: must be threads or nccl")),
    }
}
