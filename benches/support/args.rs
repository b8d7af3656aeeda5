//! The command line of a bench.

use std::path::PathBuf;

#[derive(Default)]
pub struct Args {
    /// `wgpu` or `cpu`, or `cuda` with that feature.
    pub backend: String,
    pub variant: Option<String>,
    /// A workload whose name holds one of these is run; all are if there is none.
    pub only: Vec<String>,
    pub threads: Option<usize>,
    pub items: Option<u32>,
    pub replays: Option<usize>,
    pub json: Option<PathBuf>,
    /// Tiny shapes.
    pub test: bool,
    /// The table for a card, whatever the device is.
    pub full: bool,
    /// Names only.
    pub list: bool,
    pub host: bool,
    pub startup: Option<PathBuf>,
    pub startup_child: Option<PathBuf>,
}

impl Args {
    pub fn parse() -> Self {
        let mut args = Self { backend: "wgpu".into(), ..Self::default() };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().unwrap_or_else(|| fail(&format!("{word} needs a value")));
            match word.as_str() {
                "--backend" => args.backend = value(),
                "--variant" => args.variant = Some(value()),
                "--only" => args.only.push(value()),
                "--threads" => args.threads = Some(number(&word, &value())),
                "--items" => args.items = Some(number(&word, &value())),
                "--replays" => args.replays = Some(number(&word, &value())),
                "--json" => args.json = Some(value().into()),
                "--test" => args.test = true,
                "--full" => args.full = true,
                "--list" => args.list = true,
                "--host" => args.host = true,
                "--startup" => args.startup = Some(value().into()),
                "--startup-child" => args.startup_child = Some(value().into()),
                // What cargo itself passes.
                "--bench" => {}
                other => fail(&format!("unknown argument {other}; see BENCHMARKS.md")),
            }
        }
        args
    }

    pub fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| name.contains(only.as_str()))
    }

    /// Submits, or calls on the CPU, that a median is taken over.
    pub fn replays(&self) -> usize {
        let usual = match self.backend.as_str() {
            _ if self.test => 3,
            "cpu" => 201,
            _ => 31,
        };
        self.replays.unwrap_or(usual).max(1)
    }
}

fn number<T: std::str::FromStr>(word: &str, text: &str) -> T {
    text.parse().unwrap_or_else(|_| fail(&format!("{word} {text}: not a number that fits")))
}

fn fail(message: &str) -> ! {
    eprintln!("error: {message}");
    std::process::exit(2);
}
