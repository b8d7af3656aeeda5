//! The files of a checkpoint. A checkpoint may come from anywhere, so its index may only name files in its directory, and only regular
//! files are opened: a pipe would block.

use std::io::ErrorKind;
use std::path::Path;

use crate::{Error, Result};

/// Whether there is a file; what is there is a regular file or a link to one, as in Hugging Face's cache.
///
/// # Errors
/// [`Error::File`] for a directory, a pipe, a device, or what cannot be looked at.
pub fn is_there(path: &Path) -> Result<bool> {
    match std::fs::metadata(path) {
        Ok(about) if about.is_file() => Ok(true),
        Ok(_) => Err(Error::file(path, "not a regular file; put the checkpoint's file there")),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(false),
        Err(error) => Err(Error::file(path, error)),
    }
}

/// A regular file's text; `missing` says what to do where there is none.
///
/// # Errors
/// [`Error::File`].
pub fn read_text(path: &Path, missing: &str) -> Result<String> {
    if !is_there(path)? {
        return Err(Error::file(path, format!("not there; {missing}")));
    }
    std::fs::read_to_string(path).map_err(|error| Error::file(path, error))
}

/// What to do where there is no config.json.
pub fn missing_config(dir: &Path) -> &'static str {
    match any_ends(dir, ".gguf").is_some() {
        true => "there are GGUF files: name one of them instead of the directory",
        false => "name the directory of a checkpoint in Hugging Face's format",
    }
}

/// The first of the files of a directory whose names end so.
pub fn any_ends(dir: &Path, end: &str) -> Option<String> {
    let names = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.file_name());
    names.filter_map(|name| name.into_string().ok()).filter(|name| name.ends_with(end)).min()
}

/// Whether a name of an index is that of a safetensors file beside it, on any system.
pub fn is_plain(name: &str) -> bool {
    // Windows takes these for devices, whatever the extension.
    const DEVICES: [&str; 6] = ["con", "prn", "aux", "nul", "conin$", "conout$"];
    let stem = name.split('.').next().unwrap_or_default().trim_end().to_ascii_lowercase();
    let numbered = |device| stem.strip_prefix(device).is_some_and(|number| number.chars().count() == 1);
    let odd = |c: char| matches!(c, '/' | '\\' | ':') || c.is_control();
    name.ends_with(".safetensors")
        && !stem.is_empty()
        && !name.contains(odd)
        && !DEVICES.contains(&stem.as_str())
        && !numbered("com")
        && !numbered("lpt")
}
