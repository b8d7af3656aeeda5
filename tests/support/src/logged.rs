//! The crate's log messages, for tests that check them: a program has only one logger.

use std::sync::{Mutex, Once, PoisonError};

struct Lines(Mutex<Vec<String>>);

static LINES: Lines = Lines(Mutex::new(Vec::new()));

impl log::Log for Lines {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.target().starts_with("wgpu_mla") && metadata.level() <= log::Level::Warn
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).push(record.args().to_string());
        }
    }

    fn flush(&self) {}
}

/// Keeps errors and warnings from now on.
pub fn start() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        log::set_logger(&LINES).expect("the only logger");
        log::set_max_level(log::LevelFilter::Warn);
    });
}

/// The lines so far that contain a text.
pub fn about(text: &str) -> usize {
    LINES.0.lock().unwrap_or_else(PoisonError::into_inner).iter().filter(|line| line.contains(text)).count()
}
