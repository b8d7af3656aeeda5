//! Copies of tiny models with something changed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};

use super::path;

pub fn must_refuse<T>(result: generate::Result<T>, cure: &str) {
    match result {
        Ok(_) => panic!("taken, without: {cure}"),
        Err(error) => assert!(error.to_string().contains(cure), "{error}\nlacks: {cure}"),
    }
}

/// With one file changed.
pub fn changed(name: &str, model: &str, file: &str, change: impl Fn(String) -> String) -> PathBuf {
    let to = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&to);
    std::fs::create_dir_all(&to).expect("a folder");
    for entry in std::fs::read_dir(path("tests/tiny").join(model)).expect("a folder") {
        let from = entry.expect("an entry").path();
        std::fs::copy(&from, to.join(from.file_name().expect("a name"))).expect("a copy");
    }
    let text = std::fs::read_to_string(to.join(file)).expect("a file");
    std::fs::write(to.join(file), change(text)).expect("a file");
    to
}

/// With other fields in `config.json`: each `"name": value` is replaced or added.
pub fn with_fields(dir: &Path, fields: &[(&str, serde_json::Value)]) {
    let at = dir.join("config.json");
    let text = std::fs::read_to_string(&at).expect("a config");
    let mut config: serde_json::Map<_, _> = serde_json::from_str(&text).expect("an object");
    for (name, value) in fields {
        config.insert((*name).into(), value.clone());
    }
    std::fs::write(&at, serde_json::to_string(&config).expect("json")).expect("a file");
}

/// A tensor of a file.
#[derive(Clone)]
pub struct Stored {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// With other tensors in `model.safetensors`.
pub fn with_tensors(dir: &Path, change: impl FnOnce(&mut BTreeMap<String, Stored>)) {
    let at = dir.join("model.safetensors");
    let bytes = std::fs::read(&at).expect("a file");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let stored = |view: &TensorView<'_>| Stored {
        dtype: view.dtype(),
        shape: view.shape().to_vec(),
        bytes: view.data().to_vec(),
    };
    let mut all: BTreeMap<String, Stored> =
        file.tensors().iter().map(|(name, view)| (name.clone(), stored(view))).collect();
    change(&mut all);
    let views = all
        .iter()
        .map(|(name, it)| (name, TensorView::new(it.dtype, it.shape.clone(), &it.bytes).expect("a tensor")));
    std::fs::write(&at, safetensors::serialize(views, None).expect("safetensors")).expect("a file");
}
