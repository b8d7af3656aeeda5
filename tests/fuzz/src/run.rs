//! Replays a corpus, then runs new inputs for a time.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use mla_support::paint::Rng;

use crate::coverage::Coverage;
use crate::mutate::{fresh, mutated};
use crate::{Target, Verdict, memory};

/// The longest that one input may take on a loaded machine.
const LONGEST_RUN: Duration = Duration::from_secs(60);

/// The most inputs that are kept to be mutated further.
const KEPT: usize = 4096;

/// The folder of the package.
const HERE: &str = env!("CARGO_MANIFEST_DIR");

/// Where an input is while it runs, and stays where that fails.
fn current(target: &Target) -> PathBuf {
    let folder = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| Path::new(HERE).join("../../target"), PathBuf::from);
    folder.join("fuzz").join(format!("{}.input", target.name))
}

/// The committed inputs, in the order of their names.
///
/// # Panics
/// Where the folder cannot be read.
#[must_use]
pub fn corpus(target: &Target) -> Vec<Vec<u8>> {
    let Ok(folder) = fs::read_dir(Path::new(HERE).join("corpus").join(target.name)) else {
        return Vec::new();
    };
    let mut paths: Vec<_> = folder.map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    paths.iter().map(|path| fs::read(path).expect("an input")).collect()
}

/// How many inputs ran, and what became of them.
#[derive(Debug, Default, Clone, Copy)]
pub struct Count {
    /// Inputs.
    pub inputs: u64,
    /// Inputs that the code under test took.
    pub ran: u64,
}

impl Count {
    fn add(&mut self, verdict: Verdict) {
        self.inputs += 1;
        self.ran += u64::from(verdict == Verdict::Ran);
    }
}

/// Runs one input, within the target's memory and time.
struct Runner<'a> {
    target: &'a Target,
    path: PathBuf,
    started: &'static AtomicU64,
}

impl<'a> Runner<'a> {
    fn new(target: &'a Target) -> Self {
        static STARTED: AtomicU64 = AtomicU64::new(u64::MAX);
        let begin = Instant::now();
        // An input is a number of milliseconds late, or none is running.
        std::thread::spawn(move || {
            loop {
                std::thread::sleep(Duration::from_millis(500));
                let late =
                    (begin.elapsed().as_millis() as u64).saturating_sub(STARTED.load(Ordering::Relaxed));
                if Duration::from_millis(late) > LONGEST_RUN {
                    eprintln!("an input has not ended after {LONGEST_RUN:?}");
                    std::process::abort();
                }
            }
        });
        BEGIN.get_or_init(|| begin);
        let path = current(target);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder for inputs");
        Self { target, path, started: &STARTED }
    }

    fn run(&self, input: &[u8]) -> Verdict {
        fs::write(&self.path, input).expect("the input is kept");
        let now = BEGIN.get().map_or(0, |begin| begin.elapsed().as_millis() as u64);
        self.started.store(now, Ordering::Relaxed);
        memory::allow(self.target.memory);
        let verdict = (self.target.run)(input);
        memory::allow_all();
        self.started.store(u64::MAX, Ordering::Relaxed);
        verdict
    }
}

static BEGIN: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();

/// Runs inputs that are given, one after the other.
pub fn replay(target: &Target, inputs: &[Vec<u8>]) -> Count {
    let (runner, mut count) = (Runner::new(target), Count::default());
    inputs.iter().for_each(|input| count.add(runner.run(input)));
    let _ = fs::remove_file(&runner.path);
    count
}

/// Replays the corpus, then runs new inputs for a time. Nothing but the seed and the speed of this machine decides which.
pub fn search(target: &Target, time: Duration, seed: u64) -> Count {
    let (runner, mut count) = (Runner::new(target), Count::default());
    let mut coverage = Coverage::new();
    let mut kept = (target.seeds)();
    kept.extend(corpus(target));
    for input in &kept {
        count.add(runner.run(input));
    }
    coverage.take();
    let (begin, mut rng) = (Instant::now(), Rng(seed));
    while begin.elapsed() < time {
        let input = if kept.is_empty() || rng.below(4) == 0 && target.least_ran > 0 {
            fresh(&mut rng, target.longest)
        } else {
            // What was found last is changed most often.
            let recent = kept.len().saturating_sub(64);
            let from = if rng.below(2) == 0 { recent } else { 0 };
            let (one, other) = (from + rng.below(kept.len() - from), rng.below(kept.len()));
            mutated(&mut rng, &kept[one], &kept[other], target.longest)
        };
        count.add(runner.run(&input));
        if coverage.take() && kept.len() < KEPT {
            kept.push(input);
        }
    }
    let _ = fs::remove_file(&runner.path);
    let Count { inputs, ran } = count;
    let (reached, total) = (coverage.reached(), coverage.total());
    println!(
        "{}: {inputs} inputs, {ran} ran ({} %), {} kept, {reached} of {total} branches",
        target.name,
        ran * 100 / inputs.max(1),
        kept.len()
    );
    if let Some(folder) = std::env::var_os("MLA_FUZZ_KEEP") {
        keep(Path::new(&folder), &kept);
    }
    count
}

/// Replaces a target's corpus by at most `most` of some inputs: each time the one that reaches most that the others have not.
///
/// # Panics
/// Where nothing is instrumented.
pub fn reduce(target: &Target, inputs: &[Vec<u8>], most: usize) {
    let (runner, mut coverage) = (Runner::new(target), Coverage::new());
    assert!(coverage.total() > 0, "build it with RUSTC_WORKSPACE_WRAPPER=$PWD/tests/fuzz/instrument.sh");
    // What a target does once is no input's.
    for input in inputs.iter().take(20) {
        runner.run(input);
    }
    coverage.last();
    let reached = |input: &Vec<u8>| {
        runner.run(input);
        coverage.last().into_iter().collect::<BTreeSet<_>>()
    };
    let mut rest: Vec<_> = inputs.iter().map(reached).zip(inputs).collect();
    let _ = fs::remove_file(&runner.path);
    let mut chosen = Vec::new();
    while chosen.len() < most {
        let Some((at, _)) =
            rest.iter().enumerate().max_by_key(|(_, (new, input))| (new.len(), usize::MAX - input.len()))
        else {
            break;
        };
        let (new, input) = rest.swap_remove(at);
        if new.is_empty() {
            break;
        }
        rest.iter_mut().for_each(|(others, _)| others.retain(|counter| !new.contains(counter)));
        chosen.push(input.clone());
    }
    let folder = Path::new(HERE).join("corpus").join(target.name);
    let _ = fs::remove_dir_all(&folder);
    keep(&folder, &chosen);
    println!(
        "{}: {} of {} inputs, {} bytes",
        target.name,
        chosen.len(),
        inputs.len(),
        chosen.iter().map(Vec::len).sum::<usize>()
    );
}

/// Writes the inputs that were kept, for a new corpus.
fn keep(folder: &Path, kept: &[Vec<u8>]) {
    fs::create_dir_all(folder).expect("a folder");
    for input in kept {
        fs::write(folder.join(format!("{:016x}", name_of(input))), input).expect("an input is kept");
    }
}

/// FNV-1a.
fn name_of(input: &[u8]) -> u64 {
    input
        .iter()
        .fold(0xCBF2_9CE4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3))
}

/// Runs this program again with `arguments`: where that fails, by whatever signal, the input that it was at is in a file, and how to
/// replay it is printed.
pub fn guarded(target: &Target, arguments: &[String]) -> bool {
    let path = current(target);
    let _ = fs::remove_file(&path);
    let program = std::env::current_exe().expect("this program");
    let status = Command::new(program).arg("--child").args(arguments).status().expect("started");
    if status.success() {
        return true;
    }
    println!("{}: FAILED: {status}", target.name);
    if let Ok(input) = fs::read(&path) {
        let kept = path.with_file_name(format!("{}-{:016x}", target.name, name_of(&input)));
        fs::rename(&path, &kept).expect("the input is kept");
        let kept = fs::canonicalize(&kept).unwrap_or(kept);
        println!(
            "replay it with: cargo run --locked --profile test -p mla-fuzz -- {} --replay {}",
            target.name,
            kept.display()
        );
    }
    false
}
