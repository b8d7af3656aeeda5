//! ```text
//! cargo run --release --manifest-path burn/generate/Cargo.toml -- [DIR] [--engine burn|cpu] [--prompt TEXT] [--help]
//! cargo run --release --manifest-path burn/generate/Cargo.toml -- bench CONFIG.json [--help]
//! ```
//! The command line of examples/generate, whose engine is burn here where there is a GPU; and a benchmark of it, with weights that are
//! noise.

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1).peekable();
    if words.next_if(|word| word == "bench").is_some() {
        return generate_burn::bench(words);
    }
    generate::program::run(Some(&generate_burn::Burn::default()))
}
