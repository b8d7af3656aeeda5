//! A file that is replaced as a whole.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::sleep;
use std::time::Duration;

/// Milliseconds before each further attempt to replace a file that someone has open: half a second in all.
const PAUSES: [u64; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];

/// Puts `contents` at `path` in one step: another process sees the old file or the new one. `rename` is [`fs::rename`], except in tests.
///
/// False where `rename` is refused for as long as it is tried, since someone has the old file open: then that file stays.
///
/// # Errors
/// Errors of the file system. The old file stays, and no temporary file is left.
pub(super) fn replace(
    path: &Path,
    contents: &[u8],
    rename: impl Fn(&Path, &Path) -> io::Result<()>,
) -> io::Result<bool> {
    let directory = path.parent().unwrap_or(Path::new(""));
    fs::create_dir_all(directory)?;
    // The file is closed at the end of the block, since Windows renames no open file.
    let (temporary, written) = {
        let (mut file, temporary) = create_temporary(path)?;
        (temporary, file.write_all(contents).and_then(|()| file.sync_all()))
    };
    let mut done = written.and_then(|()| rename(&temporary, path));
    for pause in PAUSES {
        if !is_held(&done, path) {
            break;
        }
        sleep(Duration::from_millis(pause));
        done = rename(&temporary, path);
    }
    if done.is_err() {
        // The first error is the one to report.
        let _ = fs::remove_file(&temporary);
    }
    if is_held(&done, path) { Ok(false) } else { done.map(|()| true) }
}

/// Whether a rename over `path` was refused since someone has the file there open. The directory has taken a new file, so a refusal is
/// about the old one: older versions of Windows and network file systems say so by these errors.
fn is_held(done: &io::Result<()>, path: &Path) -> bool {
    // Windows' sharing violation has no kind of its own.
    const SHARING_VIOLATION: i32 = 32;
    let kinds = [ErrorKind::PermissionDenied, ErrorKind::ResourceBusy, ErrorKind::ExecutableFileBusy];
    let refused = |error: &io::Error| {
        kinds.contains(&error.kind()) || cfg!(windows) && error.raw_os_error() == Some(SHARING_VIOLATION)
    };
    done.as_ref().is_err_and(refused) && path.is_file()
}

/// A new file beside `path`, so that the rename stays within one file system.
fn create_temporary(path: &Path) -> io::Result<(File, PathBuf)> {
    static SERIAL: AtomicU64 = AtomicU64::new(0);
    let mut attempts = 0;
    loop {
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".{}-{serial}.tmp", std::process::id()));
        // create_new: the name can be taken by a process with our id in another container, or by one
        // that was killed, and a link that somebody planted is not followed.
        match OpenOptions::new().write(true).create_new(true).open(&name) {
            Err(e) if e.kind() == ErrorKind::AlreadyExists && attempts < 100 => attempts += 1,
            other => return other.map(|file| (file, PathBuf::from(name))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// A directory with a file `cache` in it, which is removed afterwards.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(test: &str) -> Self {
            let directory = std::env::temp_dir().join(format!("wgpu-mla-{test}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&directory);
            fs::create_dir_all(&directory).expect("writable");
            fs::write(directory.join("cache"), "old").expect("writable");
            Self(directory)
        }

        fn path(&self) -> PathBuf {
            self.0.join("cache")
        }

        /// What the file holds, which is the only one.
        fn contents(&self) -> String {
            assert_eq!(fs::read_dir(&self.0).expect("readable").count(), 1, "a temporary file is left");
            fs::read_to_string(self.path()).expect("readable")
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_file_that_is_open_for_a_while_is_replaced() {
        let scratch = Scratch::new("held-for-a-while");
        for kind in [ErrorKind::PermissionDenied, ErrorKind::ResourceBusy, ErrorKind::ExecutableFileBusy] {
            let refusals = Cell::new(3);
            let rename = |from: &Path, to: &Path| match refusals.replace(refusals.get() - 1) {
                0 => fs::rename(from, to),
                _ => Err(kind.into()),
            };
            assert!(replace(&scratch.path(), kind.to_string().as_bytes(), rename).expect("writable"));
            assert_eq!((scratch.contents(), refusals.get()), (kind.to_string(), -1));
        }
    }

    #[test]
    fn a_file_that_stays_open_is_kept() {
        let scratch = Scratch::new("held");
        let attempts = Cell::new(0);
        let rename = |_: &Path, _: &Path| {
            attempts.set(attempts.get() + 1);
            Err(ErrorKind::PermissionDenied.into())
        };
        assert!(!replace(&scratch.path(), b"new", rename).expect("no other error"));
        assert_eq!((scratch.contents().as_str(), attempts.get()), ("old", 1 + PAUSES.len()));
        assert!(replace(&scratch.path(), b"new", |from, to| fs::rename(from, to)).expect("writable"));
        assert_eq!(scratch.contents(), "new");
    }

    #[test]
    fn another_error_is_told_at_once() {
        let scratch = Scratch::new("full");
        let attempts = Cell::new(0);
        let rename = |_: &Path, _: &Path| {
            attempts.set(attempts.get() + 1);
            Err(ErrorKind::StorageFull.into())
        };
        let error = replace(&scratch.path(), b"new", rename).expect_err("refused");
        assert_eq!((error.kind(), attempts.get()), (ErrorKind::StorageFull, 1));
        assert_eq!(scratch.contents(), "old");
    }

    /// A handle that shares nothing, as virus scanners and backups hold them, is closed while this waits; then one that stays open.
    #[cfg(windows)]
    #[test]
    fn windows_refuses_to_replace_an_open_file() {
        use std::os::windows::fs::OpenOptionsExt;
        let scratch = Scratch::new("share-mode");
        let open = || OpenOptions::new().read(true).share_mode(0).open(scratch.path()).expect("it is there");
        let new =
            |contents: &str| replace(&scratch.path(), contents.as_bytes(), |from, to| fs::rename(from, to));
        let held = open();
        let closes = std::thread::spawn(move || {
            sleep(Duration::from_millis(50));
            drop(held);
        });
        assert!(new("new").expect("writable"));
        closes.join().expect("it ends");
        assert_eq!(scratch.contents(), "new");
        let held = open();
        assert!(!new("newer").expect("no other error"));
        drop(held);
        assert_eq!(scratch.contents(), "new");
        assert!(new("newer").expect("writable"));
    }
}
