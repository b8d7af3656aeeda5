//! Finds the case files that arguments name.

use std::path::{Path, PathBuf};

use mla_support::case::Case;

/// Larger than any case. Without a limit, a device or a sparse file would fill the memory.
const MAX_BYTES: u64 = 4 << 30;

/// The files that arguments name, in order, and the arguments that name none.
#[derive(Default)]
pub struct Found {
    pub files: Vec<PathBuf>,
    pub errors: Vec<NotFound>,
}

pub struct NotFound {
    pub name: String,
    pub why: String,
}

impl Found {
    pub fn len(&self) -> usize {
        self.files.len() + self.errors.len()
    }

    pub fn names(&self) -> impl Iterator<Item = String> {
        self.files.iter().map(|file| stem(file)).chain(self.errors.iter().map(|error| error.name.clone()))
    }

    fn add(&mut self, path: &Path) {
        if !path.is_dir() {
            return self.files.push(path.to_owned());
        }
        let none = || Err("holds no .safetensors file".to_owned());
        match safetensors_in(path).and_then(|files| if files.is_empty() { none() } else { Ok(files) }) {
            Ok(files) => self.files.extend(files),
            Err(why) => self.errors.push(NotFound { name: path.display().to_string(), why }),
        }
    }
}

/// The files that `paths` name; without any, those of the repository.
pub fn find(paths: &[PathBuf]) -> Result<Found, String> {
    let mut found = Found::default();
    if paths.is_empty() {
        let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases");
        let folders = [repository, PathBuf::from("tests/cases")];
        let folder = folders.iter().find(|folder| folder.is_dir());
        found.add(folder.ok_or("there is no tests/cases here: name case files or directories")?);
    }
    paths.iter().for_each(|path| found.add(path));
    Ok(found)
}

fn safetensors_in(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(|error| error.to_string())? {
        let path = entry.map_err(|error| error.to_string())?.path();
        if path.extension().is_some_and(|ext| ext == "safetensors") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// What a case is called: its file's name without the extension.
pub fn stem(file: &Path) -> String {
    // Control characters of a name are not printed.
    let name = file.file_stem().unwrap_or(file.as_os_str()).to_string_lossy();
    name.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Reads a case, once it is known to be an ordinary file.
pub fn load(file: &Path) -> Result<Case, String> {
    let about = std::fs::metadata(file).map_err(|error| format!("{}: {error}", file.display()))?;
    if !about.is_file() {
        return Err(format!("{}: is not a file", file.display()));
    }
    if about.len() > MAX_BYTES {
        return Err(format!("{}: {} bytes are too many for a case", file.display(), about.len()));
    }
    Case::load(file)
}
