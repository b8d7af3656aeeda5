//! A conversation in a terminal, and Ctrl-C in it.
#![cfg(unix)]

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

const TEMPLATE: &str = "{% for m in messages %}{{ m.content }}:\n{% endfor %}";
const PATIENCE: Duration = Duration::from_secs(120);

/// The program in a terminal of its own.
struct Terminal {
    child: Child,
    keys: File,
    shown: Receiver<Vec<u8>>,
    /// What was shown and not looked for yet.
    text: String,
}

impl Terminal {
    fn new(words: &[&str]) -> Self {
        let (mut ours, mut theirs) = (0, 0);
        let none = std::ptr::null_mut();
        // SAFETY: both numbers are written to, and the pointers that may be null are.
        let opened = unsafe { libc::openpty(&raw mut ours, &raw mut theirs, none, none.cast(), none.cast()) };
        assert_eq!(opened, 0, "a terminal");
        // SAFETY: `openpty` gave both, and nothing else has them.
        let (ours, theirs) = unsafe { (OwnedFd::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) };
        let handle = || theirs.try_clone().expect("a handle");
        let mut command = Command::new(env!("CARGO_BIN_EXE_generate"));
        command.args(["--backend", "cpu", "-t", "0"]).args(words);
        command.stdin(handle()).stdout(handle()).stderr(handle());
        // SAFETY: both calls are allowed between fork and exec. The terminal becomes the program's own, so that Ctrl-C reaches it.
        unsafe {
            command.pre_exec(|| {
                if libc::setsid() < 0 || libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
                Ok(())
            })
        };
        let child = command.spawn().expect("it runs");
        drop((command, theirs));
        let (sender, shown) = channel();
        let mut screen = File::from(ours.try_clone().expect("a handle"));
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            // A terminal that nobody has any more is an error on Linux.
            while let Some(count) = screen.read(&mut buffer).ok().filter(|&count| count > 0) {
                let _ = sender.send(buffer[..count].to_vec());
            }
        });
        Self { child, keys: File::from(ours), shown, text: String::new() }
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).expect("a terminal");
    }

    /// Waits for a text, and forgets what was before.
    fn wait_for(&mut self, what: &str) {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(at) = self.text.find(what) {
                self.text.drain(..at + what.len());
                return;
            }
            let left = end.saturating_duration_since(Instant::now());
            match self.shown.recv_timeout(left) {
                Ok(bytes) => self.text += &String::from_utf8_lossy(&bytes),
                Err(error) => panic!("no {what:?}: {error}; {}", self.text),
            }
        }
    }

    fn status(&mut self) -> ExitStatus {
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end {
            if let Some(status) = self.child.try_wait().expect("it runs") {
                return status;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("it does not end");
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A text of some hundred tokens is being written when the first one comes.
#[test]
fn ctrl_c_stops_an_answer_and_the_next_one_leaves() {
    let template = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("terminal.jinja");
    std::fs::write(&template, TEMPLATE).expect("a file");
    let template = template.to_str().expect("UTF-8");
    for at_the_prompt in [true, false] {
        let mut terminal = Terminal::new(&["--chat", "--chat-template", template, "--page-size", "32"]);
        terminal.wait_for("ready in ");
        terminal.wait_for("> ");
        terminal.press("First Citizen\n");
        terminal.wait_for("First Citizen\r\n");
        terminal.wait_for("\n");
        terminal.press("\u{3}");
        terminal.wait_for("[stopped]\r\n");
        terminal.wait_for("> ");
        if at_the_prompt {
            terminal.press("\u{3}");
        } else {
            terminal.press("Second Citizen\n");
            terminal.wait_for("Second Citizen\r\n");
            terminal.wait_for("\n");
            terminal.press("\u{3}");
            // The second comes before the answer is stopped, or after.
            std::thread::sleep(Duration::from_millis(5));
            terminal.press("\u{3}");
        }
        terminal.wait_for("prefill: ");
        terminal.wait_for("decode: ");
        terminal.wait_for("pages of 32 tokens in use");
        assert_eq!(terminal.status().code(), Some(0), "{}", terminal.text);
    }
}

#[test]
fn ctrl_c_stops_a_text() {
    let mut terminal = Terminal::new(&["-p", "KING HENRY:", "-n", "900"]);
    // The bar, with bytes and rate; where the file is in memory it may be shown once.
    terminal.wait_for("weights: ");
    terminal.wait_for("B of 10.4 MB, ");
    terminal.wait_for("B/s");
    terminal.wait_for("KING HENRY:\r\n");
    terminal.press("\u{3}");
    terminal.wait_for("decode: ");
    assert_eq!(terminal.status().code(), Some(0), "{}", terminal.text);
}
