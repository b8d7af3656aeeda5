//! Text on its way to a terminal: at once where there is one sequence, line by line where there are several.

use std::io::{Write, stdout};

pub struct Printer {
    /// The unfinished line of each sequence.
    lines: Vec<String>,
}

impl Printer {
    pub fn new(prompts: &[&str]) -> Self {
        let mut printer = Self { lines: vec![String::new(); prompts.len()] };
        for (sequence, prompt) in prompts.iter().enumerate() {
            printer.add(sequence, prompt);
        }
        printer
    }

    pub fn add(&mut self, sequence: usize, text: &str) {
        if self.lines.len() == 1 {
            say(text);
            return;
        }
        self.lines[sequence].push_str(text);
        while let Some(end) = self.lines[sequence].find('\n') {
            let line: String = self.lines[sequence].drain(..=end).collect();
            say(&format!("[{}] {line}", sequence + 1));
        }
    }

    /// Ends every sequence's line.
    pub fn finish(&mut self) {
        for sequence in 0..self.lines.len() {
            self.add(sequence, "\n");
        }
    }
}

/// A reader that went away, such as `head`, is no reason to panic.
pub fn say(text: &str) {
    let mut out = stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}
