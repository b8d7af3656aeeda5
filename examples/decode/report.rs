//! Output. A closed stdout or stderr never panics.

use std::fmt;
use std::io::{self, ErrorKind, IsTerminal, Write};

/// An error on stderr, which may be closed.
pub fn complain(error: &str) {
    let _ = writeln!(io::stderr(), "error: {error}");
}

/// Standard output. After a broken pipe (`| head`) the cases still run, for the status and for `--save`.
#[derive(Default)]
pub struct Output {
    gone: bool,
    failed: bool,
    in_progress: bool,
}

impl Output {
    /// Whether everything was written. A closed pipe counts as written.
    pub fn ok(&self) -> bool {
        !self.failed
    }

    pub fn line(&mut self, text: &str) {
        self.end_progress();
        if self.gone {
            return;
        }
        let mut stdout = io::stdout().lock();
        if let Err(error) = writeln!(stdout, "{text}").and_then(|()| stdout.flush()) {
            self.gone = true;
            if error.kind() != ErrorKind::BrokenPipe {
                self.failed = true;
                complain(&format!("standard output: {error}"));
            }
        }
    }

    pub fn row(&mut self, tally: &mut Tally, width: usize, row: &Row) {
        tally.count(row.end);
        self.line(&row.line(width));
        if let Some(why) = &row.why {
            self.line(&format!("  {}", one_line(why)));
        }
    }

    /// The case that runs now, on a terminal only.
    pub fn progress(&mut self, text: &str) {
        let mut stderr = io::stderr();
        if stderr.is_terminal() {
            self.in_progress = true;
            let _ = write!(stderr, "\r\x1b[K{text}").and_then(|()| stderr.flush());
        }
    }

    fn end_progress(&mut self) {
        if std::mem::take(&mut self.in_progress) {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

/// A message may quote a file; it is kept to one line of moderate length.
fn one_line(text: &str) -> String {
    let line: String = text.chars().take(400).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if text.chars().count() > 400 { line + " ..." } else { line }
}

/// How a case ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    Pass,
    Fail,
    /// The backend has no kernel for a layout or an optional input, and says so.
    NotServed,
    Unreadable,
}

/// One case.
pub struct Row {
    pub name: String,
    pub kind: &'static str,
    pub shape: String,
    pub variant: &'static str,
    pub seconds: Option<f64>,
    pub bytes: u64,
    pub error: String,
    pub end: End,
    /// What is wrong.
    pub why: Option<String>,
}

impl Row {
    pub fn unreadable(name: &str, why: String) -> Self {
        let (name, end) = (name.to_owned(), End::Unreadable);
        Self {
            name,
            kind: "-",
            shape: "-".into(),
            variant: "-",
            seconds: None,
            bytes: 0,
            error: "-".into(),
            end,
            why: Some(why),
        }
    }

    fn line(&self, width: usize) -> String {
        let Self { name, kind, shape, variant, error, .. } = self;
        let time = self.seconds.map_or("-".to_owned(), duration);
        let rate = self.seconds.map_or("-".to_owned(), |s| format!("{:.2}", self.bytes as f64 / s / 1e9));
        let end = match self.end {
            End::Pass => "PASS",
            End::Fail => "FAIL",
            End::NotServed => "NOT SERVED",
            End::Unreadable => "FAIL (not run)",
        };
        format!("{name:width$}  {kind:11}  {shape:49}  {variant:8}  {time:>8}  {rate:>6}  {error:30}  {end}")
    }
}

pub fn heading(width: usize) -> String {
    let (error, pass) = ("worst error (of the allowed)", "result");
    format!(
        "{:width$}  {:11}  {:49}  {:8}  {:>8}  {:>6}  {error:30}  {pass}",
        "case", "kind", "shape", "variant", "time", "GB/s"
    )
}

fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 1e-3 => format!("{:.1} us", s * 1e6),
        s if s < 1.0 => format!("{:.2} ms", s * 1e3),
        s => format!("{s:.2} s"),
    }
}

/// How many cases ended how.
#[derive(Default)]
pub struct Tally {
    passed: usize,
    failed: usize,
    not_served: usize,
    unreadable: usize,
}

impl Tally {
    fn count(&mut self, end: End) {
        *match end {
            End::Pass => &mut self.passed,
            End::Fail => &mut self.failed,
            End::NotServed => &mut self.not_served,
            End::Unreadable => &mut self.unreadable,
        } += 1;
    }

    pub fn total(&self) -> usize {
        self.passed + self.failed + self.not_served + self.unreadable
    }

    /// Whether some case passed, and every other one is not served here.
    pub fn all_passed(&self) -> bool {
        self.passed + self.not_served == self.total() && (self.passed > 0 || self.not_served == 0)
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { passed, failed, not_served, unreadable } = self;
        let s = if self.total() == 1 { "" } else { "s" };
        write!(f, "{} case{s}: {passed} PASS, {failed} FAIL", self.total())?;
        if *not_served > 0 {
            write!(f, ", {not_served} NOT SERVED here")?;
        }
        if *unreadable > 0 {
            write!(f, ", {unreadable} could not be read")?;
        }
        Ok(())
    }
}
