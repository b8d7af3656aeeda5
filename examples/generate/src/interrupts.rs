//! Ctrl-C: what is being written stops at its next token, so that the figures are printed.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};

use crate::print::tell;

static IS_WRITING: AtomicBool = AtomicBool::new(false);
static COUNT: AtomicU32 = AtomicU32::new(0);

/// The status of a program that SIGINT ended.
const ENDED: i32 = 130;

/// From here on Ctrl-C is counted while something is being written, and ends the program at once at the `last` time. Otherwise `or` is
/// called.
pub fn catch(last: u32, or: impl Fn() + Send + 'static) {
    let handler = move || match IS_WRITING.load(SeqCst) {
        false => or(),
        true if COUNT.fetch_add(1, SeqCst) + 1 >= last => std::process::exit(ENDED),
        true => (),
    };
    if let Err(error) = ctrlc::set_handler(handler) {
        tell(&format!("Ctrl-C will end the program at once: {error}\n"));
    }
}

/// Something is being written.
pub fn begin() {
    COUNT.store(0, SeqCst);
    IS_WRITING.store(true, SeqCst);
}

/// It is written. Gives how often Ctrl-C came meanwhile.
pub fn end() -> u32 {
    IS_WRITING.store(false, SeqCst);
    count()
}

/// How often Ctrl-C came since it began.
pub fn count() -> u32 {
    COUNT.load(SeqCst)
}
