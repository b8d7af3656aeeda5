//! `model.safetensors.index.json`: which file has which tensor.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::{Error, Result, files};

const INDEX: &str = "model.safetensors.index.json";

/// It decides: an overlay maps a tensor to a newer file, and an older one may still hold a copy. Files that it does not name are not read.
pub struct Index {
    /// The tensors that each file is to have.
    pub files: BTreeMap<PathBuf, BTreeSet<String>>,
}

#[derive(serde::Deserialize)]
struct Written {
    weight_map: BTreeMap<String, String>,
}

impl Index {
    /// `None` where the directory has no index. A file of nothing but ignored tensors need not be there.
    ///
    /// # Errors
    /// [`Error::File`] for a file that is not there, and one outside of the directory.
    pub fn open(dir: &Path, is_ignored: impl Fn(&str) -> bool) -> Result<Option<Self>> {
        let path = dir.join(INDEX);
        if !files::is_there(&path)? {
            return Ok(None);
        }
        let text = files::read_text(&path, "download it again")?;
        let again = |why: String| Error::file(&path, format!("{why}; download it again"));
        let written: Written = serde_json::from_str(&text).map_err(|error| again(error.to_string()))?;
        if written.weight_map.is_empty() {
            return Err(again("its weight_map is empty".into()));
        }
        let mut files: BTreeMap<PathBuf, BTreeSet<String>> = BTreeMap::new();
        for (tensor, file) in written.weight_map {
            if !files::is_plain(&file) {
                let must = "must be the name of a .safetensors file in the checkpoint's directory";
                return Err(again(format!("weight_map names {file:?}: {must}")));
            }
            if !is_ignored(&tensor) {
                files.entry(dir.join(file)).or_default().insert(tensor);
            }
        }
        for path in files.keys() {
            if !files::is_there(path)? {
                let cure = "download all files of the checkpoint";
                return Err(Error::file(path, format!("not there, but the index lists it; {cure}")));
            }
        }
        Ok(Some(Self { files }))
    }
}

/// `model.safetensors`, where there is no index.
///
/// # Errors
/// [`Error::File`] where it is not there.
pub fn only_file(dir: &Path) -> Result<PathBuf> {
    let only = dir.join("model.safetensors");
    if files::is_there(&only)? {
        return Ok(only);
    }
    let shard = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let shard = shard
        .filter_map(|name| name.into_string().ok())
        .filter(|name| name.contains("-of-") && name.ends_with(".safetensors"))
        .min();
    let found = |end| files::any_ends(dir, end);
    let convert = "save it as safetensors: load it with transformers and call save_pretrained, or download the repository's safetensors";
    Err(Error::file(
        &only,
        match (shard, found(".bin").or_else(|| found(".pt")).or_else(|| found(".pth")), found(".gguf")) {
            (Some(shard), ..) => {
                format!("not there, and {INDEX}, which says what {shard} is for, neither; download the index")
            }
            (_, Some(pickle), _) => {
                format!("not there; {pickle} is a file of PyTorch, which is not read here; {convert}")
            }
            (.., Some(gguf)) => {
                format!("not there; {gguf} has weights too: name that file instead of the directory")
            }
            _ => "not there; download the checkpoint's weights as safetensors".into(),
        },
    ))
}
