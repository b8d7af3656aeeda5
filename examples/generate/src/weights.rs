//! A checkpoint's tensors, in one file or several. The headers are checked first; a tensor is read when it is taken.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Cursor, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use safetensors::tensor::{Dtype as Stored, Metadata, TensorInfo};
use wgpu_mla::Dtype;

use crate::index::{self, Index};
use crate::names::Names;
use crate::{Config, Error, Result, quantization};

/// A size, and the fields of config.json that it comes from.
#[derive(Debug, Clone, Copy)]
pub struct Dim(pub usize, pub &'static str);

/// All tensors of a checkpoint, until each is taken.
pub struct Weights {
    dir: PathBuf,
    names: Names,
    quant_method: Option<String>,
    files: Vec<(PathBuf, Box<dyn Source>)>,
    tensors: BTreeMap<String, Place>,
    /// Tensors of the files that the index does not have, and their files.
    unlisted: BTreeMap<String, PathBuf>,
}

/// A file, or what was downloaded of one.
trait Source: Read + Seek {}

impl<T: Read + Seek> Source for T {}

/// Where a tensor is.
struct Place {
    file: usize,
    /// In the file.
    offset: u64,
    info: TensorInfo,
}

impl Weights {
    /// `model.safetensors`, or what `model.safetensors.index.json` lists: where there is an index, each tensor is that of the file that it
    /// maps the tensor to, whatever other files have.
    ///
    /// # Errors
    /// [`Error::File`]; for weights that are not f32, f16 or bf16 it names one and the cure.
    pub fn open(dir: &Path, config: &Config) -> Result<Self> {
        let mut weights = Self::none(dir, config);
        let open = |path: &Path| File::open(path).map_err(|error| Error::file(path, error));
        let Some(index) = Index::open(dir, |name| weights.names.own(name).is_none())? else {
            let only = index::only_file(dir)?;
            weights.add(&only, Box::new(open(&only)?), |_| true)?;
            return weights.checked();
        };
        for (path, names) in &index.files {
            weights.add(path, Box::new(open(path)?), |name| names.contains(name))?;
            if let Some(lost) = names.iter().find(|name| !weights.has(name)) {
                let cure = "download it and the index again";
                return Err(Error::file(
                    path,
                    format!("no tensor {lost}, but the index says that it is here; {cure}"),
                ));
            }
        }
        weights.unlisted.retain(|name, _| !weights.tensors.contains_key(name));
        weights.checked()
    }

    /// The weights of one file, `name`, that is in memory.
    ///
    /// # Errors
    /// The errors of [`Weights::open`].
    pub fn of(name: &str, bytes: Vec<u8>, config: &Config) -> Result<Self> {
        let mut weights = Self::none(Path::new(name), config);
        weights.add(Path::new(name), Box::new(Cursor::new(bytes)), |_| true)?;
        weights.checked()
    }

    /// Whether a tensor is there, by its name in the files.
    fn has(&self, name: &str) -> bool {
        self.names.own(name).is_some_and(|own| self.tensors.contains_key(&own))
    }

    fn none(dir: &Path, config: &Config) -> Self {
        let quant_method = config.quant_method.clone();
        let (files, tensors, unlisted) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
        Self { dir: dir.into(), names: Names::new(config), quant_method, files, tensors, unlisted }
    }

    fn checked(self) -> Result<Self> {
        self.check_dtypes()?;
        Ok(self)
    }

    /// The tensors of a file that are wanted from it.
    fn add(
        &mut self,
        path: &Path,
        mut file: Box<dyn Source>,
        is_wanted: impl Fn(&str) -> bool,
    ) -> Result<()> {
        let again = |why: &dyn std::fmt::Display| Error::file(path, format!("{why}; download it again"));
        let (begin, header) = header(file.as_mut()).map_err(|why| again(&why))?;
        for (name, info) in header.tensors() {
            let Some(own) = self.names.own(&name) else { continue };
            if is_wanted(&name) {
                let offset = begin + info.data_offsets.0 as u64;
                self.tensors.insert(own, Place { file: self.files.len(), offset, info: info.clone() });
            } else {
                self.unlisted.insert(own, path.into());
            }
        }
        self.files.push((path.into(), file));
        Ok(())
    }

    fn check_dtypes(&self) -> Result<()> {
        let odd = self.tensors.iter().find(|(_, place)| float(place.info.dtype).is_none());
        let Some((name, Place { info, .. })) = odd else { return Ok(()) };
        let fp8 = format!("{:?}", info.dtype).starts_with("F8");
        Err(self.fault(format!("{name} has dtype {:?}; {}", info.dtype, self.cure(fp8))))
    }

    /// A tensor in f32, contiguous.
    ///
    /// # Errors
    /// [`Error::File`] where it is missing or has another shape.
    pub fn take(&mut self, name: &str, shape: &[Dim]) -> Result<Tensor> {
        if let Some(tensor) = self.take_if_there(name, shape)? {
            return Ok(tensor);
        }
        // After a cast of FP8 weights, another cast would not bring it.
        let cure = match self.is_packed() {
            true => self.cure(false),
            false => "its config.json asks for it; take both from one checkpoint".into(),
        };
        Err(self.fault(format!("no tensor {name}; {cure}")))
    }

    /// A tensor that some checkpoints have.
    ///
    /// # Errors
    /// [`Error::File`] where it has another shape, or is in a file but not in the index: the index may be cut off.
    pub fn take_if_there(&mut self, name: &str, shape: &[Dim]) -> Result<Option<Tensor>> {
        if let Some(path) = self.unlisted.get(name) {
            let cure = "download the index again, or add it there";
            return Err(Error::file(path, format!("{name} is here, but the index does not have it; {cure}")));
        }
        let Some(Place { file, offset, info }) = self.tensors.remove(name) else { return Ok(None) };
        if !info.shape.iter().eq(shape.iter().map(|Dim(size, _)| size)) {
            let wanted: Vec<String> =
                shape.iter().map(|Dim(size, field)| format!("{size} ({field})")).collect();
            let (got, wanted) = (&info.shape, wanted.join(", "));
            return Err(self.fault(format!(
                "{name} has shape {got:?}, its config.json asks for [{wanted}]; take both from one checkpoint"
            )));
        }
        let Some(dtype) = float(info.dtype) else { return Ok(None) }; // Checked when it was opened.
        let (path, file) = &mut self.files[file];
        let mut bytes = vec![0; info.data_offsets.1 - info.data_offsets.0];
        file.seek(SeekFrom::Start(offset))
            .and_then(|_| file.read_exact(&mut bytes))
            .map_err(|error| Error::file(path, error))?;
        Ok(Some(Tensor::from_vec(dtype.decode_all(&bytes), info.shape, &Device::Cpu)?))
    }

    /// After the model took its tensors: what is left would change its results.
    ///
    /// # Errors
    /// [`Error::File`] that names a few.
    pub fn finish(self) -> Result<()> {
        let left: Vec<&str> = self.tensors.keys().map(String::as_str).collect();
        if left.is_empty() {
            return Ok(());
        }
        let scaled = left.iter().any(|name| quantization::is_scale(name));
        let cure = match scaled || self.is_packed() {
            true => self.cure(scaled),
            false => "take config.json and the weights from one checkpoint".into(),
        };
        let few = left[..left.len().min(3)].join(", ");
        let more = if left.len() > 3 { format!(" and {} more", left.len() - 3) } else { String::new() };
        Err(self.fault(format!("tensors that the model does not use: {few}{more}; {cure}")))
    }

    /// AWQ, GPTQ and others store weights under names of their own.
    fn is_packed(&self) -> bool {
        self.quant_method.as_deref().is_some_and(|method| method != "fp8")
    }

    fn cure(&self, fp8: bool) -> String {
        quantization::cure(self.quant_method.as_deref(), fp8)
    }

    fn fault(&self, why: String) -> Error {
        Error::file(&self.dir, why)
    }
}

fn float(stored: Stored) -> Option<Dtype> {
    match stored {
        Stored::F32 => Some(Dtype::F32),
        Stored::F16 => Some(Dtype::F16),
        Stored::BF16 => Some(Dtype::Bf16),
        _ => None,
    }
}

/// Where the tensors begin, and what they are. The file is as long as they need, so a tensor's length is no more than the file's.
fn header(file: &mut dyn Source) -> Result<(u64, Metadata), String> {
    let size = file.seek(SeekFrom::End(0)).and_then(|size| file.rewind().map(|()| size));
    let size = size.map_err(|error| error.to_string())?;
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(|_| "it has no header")?;
    let begin = u64::from_le_bytes(length).checked_add(8).filter(|&begin| begin <= size);
    let begin = begin.ok_or("its header is cut off")?;
    let mut text = vec![0; (begin - 8) as usize];
    file.read_exact(&mut text).map_err(|error| error.to_string())?;
    let header: Metadata = serde_json::from_slice(&text).map_err(|error| format!("its header: {error}"))?;
    let end = begin.saturating_add(header.data_len() as u64);
    match end == size {
        true => Ok((begin, header)),
        false => Err(format!("it has {size} bytes, its header asks for {end}")),
    }
}
