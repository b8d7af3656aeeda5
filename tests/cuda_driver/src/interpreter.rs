//! The interpreter: a process of Python that maps the same memory, and answers a line for a line.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::{Value, json};

use crate::kernels::Launch;
use crate::memory::Memory;

pub struct Interpreter {
    folder: std::path::PathBuf,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    /// Kept so that its pipes stay open; it ends when they close.
    _process: Child,
    modules: u64,
}

impl Interpreter {
    /// With the Python of `MLA_PYTHON`, which has numpy.
    pub fn start(memory: &Memory) -> Self {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/ptxemu/serve.py");
        let python = std::env::var_os("MLA_PYTHON").unwrap_or_else(|| "python3".into());
        let mut command = Command::new(python);
        command.arg(script).arg(memory.folder()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().expect("Python for the interpreter");
        let input = process.stdin.take().expect("a pipe");
        let output = BufReader::new(process.stdout.take().expect("a pipe"));
        Self { folder: memory.folder().to_owned(), input, output, _process: process, modules: 0 }
    }

    /// Gives the text of a module a number.
    pub fn load(&mut self, text: &str) -> u64 {
        self.modules += 1;
        std::fs::write(self.folder.join(format!("{}.ptx", self.modules)), text).expect("room for a module");
        self.modules
    }

    /// # Errors
    /// What the kernel does wrong.
    pub fn launch(&mut self, launch: &Launch, end: u64) -> Result<(), String> {
        let parameters: Vec<String> = launch
            .parameters
            .iter()
            .map(|bytes| bytes.iter().map(|byte| format!("{byte:02x}")).collect())
            .collect();
        let told = json!({
            "module": launch.module, "name": launch.name, "grid": launch.grid, "block": launch.block,
            "shared": launch.shared_bytes, "parameters": parameters, "end": end,
        });
        writeln!(self.input, "{told}").map_err(|error| format!("the interpreter has ended: {error}"))?;
        let mut line = String::new();
        self.output.read_line(&mut line).map_err(|error| format!("the interpreter has ended: {error}"))?;
        let answer: Value =
            serde_json::from_str(&line).map_err(|error| format!("the interpreter said {line:?}: {error}"))?;
        answer["fault"].as_str().map_or(Ok(()), |fault| Err(fault.to_owned()))
    }
}
