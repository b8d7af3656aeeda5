//! A checkpoint's tensors, in one file or several.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};

use crate::{Error, Result};

/// All tensors of a checkpoint, until each is taken.
pub struct Weights {
    dir: PathBuf,
    tensors: HashMap<String, Tensor>,
}

impl Weights {
    /// `model.safetensors`, or what `model.safetensors.index.json` lists.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn open(dir: &Path) -> Result<Self> {
        let mut tensors = HashMap::new();
        for path in files(dir)? {
            tensors.extend(
                candle_core::safetensors::load(&path, &Device::Cpu)
                    .map_err(|error| Error::file(&path, format!("{error}; download it again")))?,
            );
        }
        Ok(Self { dir: dir.into(), tensors })
    }

    /// A tensor in f32, contiguous.
    ///
    /// # Errors
    /// [`Error::File`] where it is missing or has another shape.
    pub fn take(&mut self, name: &str, shape: &[usize]) -> Result<Tensor> {
        self.take_if_there(name, shape)?
            .ok_or_else(|| self.fault(format!("no tensor {name}; its config.json asks for it")))
    }

    /// A tensor that some models have.
    ///
    /// # Errors
    /// [`Error::File`] where it has another shape.
    pub fn take_if_there(&mut self, name: &str, shape: &[usize]) -> Result<Option<Tensor>> {
        let Some(tensor) = self.tensors.remove(name) else { return Ok(None) };
        if tensor.dims() != shape {
            return Err(self
                .fault(format!("{name} has shape {:?}, its config.json asks for {shape:?}", tensor.dims())));
        }
        Ok(Some(tensor.to_dtype(DType::F32)?.contiguous()?))
    }

    fn fault(&self, why: String) -> Error {
        Error::file(&self.dir, why)
    }
}

fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    let index = dir.join("model.safetensors.index.json");
    if !index.exists() {
        let only = dir.join("model.safetensors");
        if !only.exists() {
            return Err(Error::file(&only, "not there; download the checkpoint's weights as safetensors"));
        }
        return Ok(vec![only]);
    }
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: HashMap<String, String>,
    }
    let text = std::fs::read_to_string(&index).map_err(|error| Error::file(&index, error))?;
    let of: Index = serde_json::from_str(&text).map_err(|error| Error::file(&index, error))?;
    let names: BTreeSet<&String> = of.weight_map.values().collect();
    let paths: Vec<PathBuf> = names.into_iter().map(|name| dir.join(name)).collect();
    if let Some(missing) = paths.iter().find(|path| !path.exists()) {
        return Err(Error::file(
            missing,
            "not there, but the index lists it; download all files of the checkpoint",
        ));
    }
    Ok(paths)
}
