//! The runner: tests by name, as libtest has them, but a test that cannot run here is counted as ignored, with its reason.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Completion, Trial};

use mla_support::{Ignored, Outcome};

/// A test by its name, `module::function`.
pub struct Test {
    pub name: String,
    run: Box<dyn FnOnce() -> Outcome + Send>,
}

impl Test {
    pub fn new<E: Ends>(name: impl Into<String>, run: impl FnOnce() -> E + Send + 'static) -> Self {
        Self { name: name.into(), run: Box::new(move || run().outcome()) }
    }

    fn trial(self) -> Trial {
        let Self { name, run } = self;
        Trial::ignorable_test(name.clone(), move || {
            let begin = Instant::now();
            let outcome = run();
            TIMES.lock().unwrap_or_else(PoisonError::into_inner).push((begin.elapsed(), name));
            match outcome {
                Ok(()) => Ok(Completion::Completed),
                Err(Ignored(why)) => Ok(Completion::ignored_with(why)),
            }
        })
    }
}

/// What a test function may return.
pub trait Ends {
    fn outcome(self) -> Outcome;
}

impl Ends for () {
    fn outcome(self) -> Outcome {
        Ok(())
    }
}

impl Ends for Outcome {
    fn outcome(self) -> Outcome {
        self
    }
}

/// A module's test functions, as `pub fn tests`; `(in a, b)` adds those of its modules. One that is in no list is dead code,
/// which the lints refuse.
macro_rules! tests {
    ($((in $($(#[$of:meta])* $module:ident),+ $(,)?))? $($(#[$attr:meta])* $name:ident),* $(,)?) => {
        pub fn tests() -> Vec<$crate::harness::Test> {
            let mut tests = Vec::new();
            $($($(#[$of])* tests.extend($module::tests());)+)?
            $($(#[$attr])* {
                let name = concat!(module_path!(), "::", stringify!($name));
                tests.push($crate::harness::Test::new(name.trim_start_matches("it::"), $name));
            })*
            tests
        }
    };
}
pub(crate) use tests;

/// Checks that ran, and that were left out as not served, by backend and variant.
static CHECKS: Mutex<BTreeMap<String, (usize, usize)>> = Mutex::new(BTreeMap::new());

pub fn count(of: &str, checks: usize, left_out: usize) {
    let mut all = CHECKS.lock().unwrap_or_else(PoisonError::into_inner);
    let entry = all.entry(of.to_owned()).or_default();
    *entry = (entry.0 + checks, entry.1 + left_out);
}

/// How long each test took.
static TIMES: Mutex<Vec<(Duration, String)>> = Mutex::new(Vec::new());

/// The tests that took longest, of runs that are worth it, and the groups of tests.
fn print_slowest() {
    let mut times = std::mem::take(&mut *TIMES.lock().unwrap_or_else(PoisonError::into_inner));
    if times.len() <= 100 {
        return;
    }
    let mut groups = BTreeMap::<String, Duration>::new();
    for (time, name) in &times {
        let group = name.split("::").take(2).collect::<Vec<_>>().join("::");
        *groups.entry(group).or_default() += *time;
    }
    let mut groups: Vec<_> = groups.into_iter().map(|(name, time)| (time, name)).collect();
    for (what, times) in [("slowest", &mut times), ("slowest groups", &mut groups)] {
        times.sort_unstable();
        for (time, name) in times.iter().rev().take(12) {
            println!("{what}: {:5.1} s {name}", time.as_secs_f64());
        }
    }
}

/// Runs the tests whose name contains one of the filters on the command line, or all. `--help` tells of the options.
pub fn run(tests: Vec<Test>) -> ExitCode {
    let (words, filters) = filters_of(std::env::args());
    let args = Arguments::from_iter(words);
    let chosen = |test: &Test| {
        let is = |filter: &String| if args.exact { test.name == *filter } else { test.name.contains(filter) };
        filters.is_empty() || filters.iter().any(is)
    };
    let count = tests.len();
    let trials: Vec<Trial> = tests.into_iter().filter(chosen).map(Test::trial).collect();
    if trials.is_empty() {
        eprintln!("none of {count} tests is named {}: --list names them", filters.join(" or "));
        return ExitCode::FAILURE;
    }
    let conclusion = libtest_mimic::run(&args, trials);
    for (of, (checks, left_out)) in CHECKS.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        println!("checks: {of}: {checks} ran, {left_out} left out as not served");
    }
    print_slowest();
    conclusion.exit_code()
}

/// libtest takes several filters, libtest-mimic one: what is neither an option nor an option's value is a filter.
fn filters_of(words: impl Iterator<Item = String>) -> (Vec<String>, Vec<String>) {
    const WITH_VALUE: [&str; 6] = ["-Z", "--test-threads", "--logfile", "--skip", "--color", "--format"];
    let (mut options, mut filters) = (Vec::new(), Vec::new());
    for (at, word) in words.enumerate() {
        let is_value = options.last().is_some_and(|last: &String| WITH_VALUE.contains(&last.as_str()));
        if at == 0 || is_value || word.starts_with('-') {
            options.push(word);
        } else {
            filters.push(word);
        }
    }
    (options, filters)
}
