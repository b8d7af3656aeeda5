//! Prints text: at once for one sequence, line by line for several.

use std::io::{IsTerminal, Write, stderr, stdout};
use std::time::{Duration, Instant};

use crate::{Error, Result, bytes};

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

/// How far weights are read: on a terminal a bar that moves, and at the end a line.
pub struct Bar {
    begin: Instant,
    shown: Option<Instant>,
    all: u64,
}

impl Bar {
    pub fn new(all: u64) -> Self {
        Self { begin: Instant::now(), shown: None, all }
    }

    pub fn at(&mut self, done: u64) {
        const WIDTH: u64 = 24;
        let is_new = self.shown.is_none_or(|shown| shown.elapsed() > Duration::from_millis(50));
        if !is_new || !stderr().is_terminal() {
            return;
        }
        self.shown = Some(Instant::now());
        let full = done * WIDTH / self.all.max(1);
        let bar: String = (0..WIDTH).map(|at| if at < full { '#' } else { '.' }).collect();
        tell(&format!("\rweights: {bar} {} of {}, {}   ", bytes(done), bytes(self.all), self.rate(done)));
    }

    pub fn finish(self) {
        let (over, seconds) =
            (if self.shown.is_some() { "\r" } else { "" }, self.begin.elapsed().as_secs_f64());
        let end = if self.shown.is_some() { " ".repeat(40) } else { String::new() };
        tell(&format!(
            "{over}weights: {} in {seconds:.1} s, {}{end}\n",
            bytes(self.all),
            self.rate(self.all)
        ));
    }

    fn rate(&self, done: u64) -> String {
        format!("{}/s", bytes((done as f64 / self.begin.elapsed().as_secs_f64().max(1e-6)) as u64))
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
