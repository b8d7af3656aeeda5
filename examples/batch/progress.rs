//! Output. A closed stdout or stderr never panics.

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use wgpu_mla::Plan;

use crate::oracle::Oracle;
use crate::traffic::Traffic;

pub fn say(text: &str) {
    let _ = writeln!(io::stdout(), "{text}");
}

pub fn complain(error: &str) {
    let _ = writeln!(io::stderr(), "error: {error}");
}

/// Sums over the steps so far, and a line of them on a terminal.
pub struct Progress {
    steps: u32,
    done: u32,
    tokens: u64,
    /// Sequences, one token each step that is not a prompt's.
    most_sequences: usize,
    most_pages: u32,
    shared_steps: u32,
    busy: Duration,
    terminal: bool,
}

impl Progress {
    pub fn new(steps: u32) -> Self {
        let terminal = io::stderr().is_terminal();
        Self {
            steps,
            done: 0,
            tokens: 0,
            most_sequences: 0,
            most_pages: 0,
            shared_steps: 0,
            busy: Duration::ZERO,
            terminal,
        }
    }

    /// Counts a step that took `time` from the first upload to the end of the GPU's work.
    pub fn step(&mut self, traffic: &Traffic, plan: &Plan, time: Duration) {
        self.done += 1;
        self.tokens += u64::from(plan.num_queries);
        self.most_sequences = self.most_sequences.max(traffic.batch.len());
        self.most_pages = self.most_pages.max(traffic.pool.num_used_pages());
        self.shared_steps += u32::from(!plan.shared.is_empty());
        self.busy += time;
    }

    fn rate(&self) -> f64 {
        self.tokens as f64 / self.busy.as_secs_f64().max(1e-9)
    }

    pub fn show(&self, traffic: &Traffic) {
        if self.terminal {
            let (sequences, pages) = (traffic.batch.len(), traffic.pool.num_used_pages());
            let line = format!(
                "step {}/{}: {sequences} sequences, {pages} pages, {:.0} tokens/s",
                self.done,
                self.steps,
                self.rate()
            );
            let _ = write!(io::stderr(), "\r\x1b[K{line}").and_then(|()| io::stderr().flush());
        }
    }

    pub fn finish(&self, traffic: &Traffic, oracle: &Oracle<'_>) {
        if self.terminal {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
        let counts = &traffic.counts;
        say(&format!(
            "{} steps, {} tokens in {:.2} s: {:.0} tokens/s",
            self.done,
            self.tokens,
            self.busy.as_secs_f64(),
            self.rate()
        ));
        say(&format!(
            "sequences: {} joined ({} forked), {} left, {} preempted, at most {} at once",
            counts.joined, counts.forked, counts.left, counts.preempted, self.most_sequences
        ));
        say(&format!(
            "pages: {} in use of {}, at most {}; {} copied on write; a prefix attended once for several in {} steps",
            traffic.pool.num_used_pages(),
            traffic.pool.num_used_pages() + traffic.pool.num_free_pages(),
            self.most_pages,
            counts.copied_pages,
            self.shared_steps
        ));
        say(&format!(
            "check: {} sequences against the f64 oracle, worst error {:.1} % of the allowed: PASS",
            oracle.checked,
            oracle.worst * 100.0
        ));
    }
}
