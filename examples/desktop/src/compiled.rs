//! What compiles: the crate logs each op that it has compiled, and the window shows the last.

use std::sync::Mutex;

use crate::shared::lock;

/// Ops since [`restart`], and the last of them.
static COMPILED: Mutex<(usize, String)> = Mutex::new((0, String::new()));

struct Listener;

impl log::Log for Listener {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.target().starts_with("wgpu_mla") && metadata.level() <= log::Level::Info
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            let line = record.args().to_string();
            let mut compiled = lock(&COMPILED);
            compiled.0 += 1;
            compiled.1 = line.split(':').next().unwrap_or_default().into();
        }
    }

    fn flush(&self) {}
}

/// Listens, once a program.
pub fn listen() {
    // It fails where a logger is set already, and then nothing but the progress is lost.
    if log::set_logger(&Listener).is_ok() {
        log::set_max_level(log::LevelFilter::Info);
    }
}

/// Counts anew.
pub fn restart() {
    *lock(&COMPILED) = (0, String::new());
}

/// How many ops are compiled, and the last of them.
pub fn progress() -> (usize, String) {
    lock(&COMPILED).clone()
}
