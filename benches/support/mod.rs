//! What the bench is made of.

pub mod host;
pub mod problem;
pub mod startup;
pub mod workload;

use std::path::PathBuf;

pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

pub enum Mode {
    Decode,
    Host,
    Startup(PathBuf),
    StartupChild(PathBuf),
}

pub struct Args {
    pub mode: Mode,
    pub backend: String,
    pub variant: Option<String>,
    pub only: Option<String>,
    pub threads: Option<usize>,
    pub items: Option<u32>,
    pub test: bool,
}

impl Args {
    pub fn parse() -> Self {
        let mut args = Self {
            mode: Mode::Decode,
            backend: "wgpu".into(),
            variant: None,
            only: None,
            threads: None,
            items: None,
            test: false,
        };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().unwrap_or_else(|| fail(&format!("{word} needs a value")));
            match word.as_str() {
                "--backend" => args.backend = value(),
                "--variant" => args.variant = Some(value()),
                "--only" => args.only = Some(value()),
                "--threads" => args.threads = value().parse().ok(),
                "--items" => args.items = value().parse().ok(),
                "--host" => args.mode = Mode::Host,
                "--startup" => args.mode = Mode::Startup(value().into()),
                "--startup-child" => args.mode = Mode::StartupChild(value().into()),
                "--test" => args.test = true,
                // What cargo itself passes.
                "--bench" => {}
                other => fail(&format!("unknown argument {other}; see the head of benches/decode.rs")),
            }
        }
        args
    }
}

fn fail(message: &str) -> ! {
    eprintln!("error: {message}");
    std::process::exit(2);
}

pub fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
