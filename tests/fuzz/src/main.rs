//! Runs fuzz targets: README.md.

use std::process::ExitCode;
use std::time::Duration;

use mla_fuzz::targets::TARGETS;
use mla_fuzz::{Target, memory, run};

#[global_allocator]
static ALLOCATOR: memory::Limited = memory::Limited;

const USAGE: &str = "mla-fuzz --list
mla-fuzz TARGET [SECONDS [SEED]]       replays the corpus, then runs new inputs: for 60 seconds, from seed 1
mla-fuzz TARGET --replay FILE...       runs these inputs
mla-fuzz TARGET --reduce FILE...       makes the corpus of the few of these that reach most";

/// Inputs of a reduced corpus.
const MOST: usize = 40;

fn main() -> ExitCode {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let is_child = arguments.first().is_some_and(|first| first == "--child");
    if is_child {
        arguments.remove(0);
    }
    if arguments.first().is_some_and(|first| first == "--list") {
        TARGETS.iter().for_each(|target| println!("{:12} {}", target.name, target.about));
        return ExitCode::SUCCESS;
    }
    let target = arguments.first().and_then(|name| TARGETS.iter().find(|target| target.name == name));
    let Some(target) = target else {
        eprintln!("{USAGE}");
        return ExitCode::FAILURE;
    };
    let well = if is_child { child(target, &arguments[1..]) } else { run::guarded(target, &arguments) };
    if well { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn child(target: &Target, arguments: &[String]) -> bool {
    let is = |option| arguments.first().is_some_and(|first| first == option);
    if is("--replay") || is("--reduce") {
        let read = |path: &String| std::fs::read(path).unwrap_or_else(|error| panic!("{path}: {error}"));
        let inputs: Vec<_> = arguments[1..].iter().map(read).collect();
        if is("--reduce") {
            run::reduce(target, &inputs, MOST);
            return true;
        }
        let count = run::replay(target, &inputs);
        println!("{}: {} inputs, {} ran", target.name, count.inputs, count.ran);
        return true;
    }
    let number =
        |at: usize, default| arguments.get(at).map_or(default, |text| text.parse().expect("a number"));
    let count = run::search(target, Duration::from_secs(number(0, 60)), number(1, 1));
    let enough = count.ran * 100 >= count.inputs * target.least_ran;
    if !enough {
        println!(
            "{}: fewer than {} % of the inputs ran: generate more that are valid",
            target.name, target.least_ran
        );
    }
    enough
}
