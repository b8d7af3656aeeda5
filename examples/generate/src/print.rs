//! Prints text: at once for one sequence, line by line for several.

use std::io::{Write, stderr, stdout};

use generate::{Error, Result};

pub struct Printer {
    /// The unfinished line of each sequence.
    lines: Vec<String>,
}

impl Printer {
    pub fn new(prompts: &[&str]) -> Result<Self> {
        let mut printer = Self { lines: vec![String::new(); prompts.len()] };
        for (sequence, prompt) in prompts.iter().enumerate() {
            printer.add(sequence, prompt)?;
        }
        Ok(printer)
    }

    pub fn add(&mut self, sequence: usize, text: &str) -> Result<()> {
        if self.lines.len() == 1 {
            return say(text);
        }
        self.lines[sequence].push_str(text);
        while let Some(end) = self.lines[sequence].find('\n') {
            let line: String = self.lines[sequence].drain(..=end).collect();
            say(&format!("[{}] {line}", sequence + 1))?;
        }
        Ok(())
    }

    /// Ends every sequence's line.
    pub fn finish(&mut self) -> Result<()> {
        (0..self.lines.len()).try_for_each(|sequence| self.add(sequence, "\n"))
    }
}

/// Writes to standard output.
///
/// # Errors
/// [`Error::Output`], such as for a reader that went away.
pub fn say(text: &str) -> Result<()> {
    let mut out = stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(Error::Output)
}

/// Writes to standard error, and ignores errors: `eprintln!` panics where it is closed.
pub fn tell(text: &str) {
    let _ = stderr().lock().write_all(text.as_bytes());
}
