//! ```text
//! cargo run --release -p generate -- [DIR] [--prompt TEXT] [--kv-dtype f16] [--help]
//! ```
//! Status 0: all right; 1: an error; 2: bad arguments.

fn main() -> std::process::ExitCode {
    generate::program::run(None)
}
