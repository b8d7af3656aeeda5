//! A checkpoint's tensors, in one file or several, of safetensors or GGUF. The headers are checked first. A matrix is not read when it is
//! taken, as its file is mapped; other tensors, which are small, are.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use safetensors::tensor::{Dtype as Stored, Metadata};
use wgpu_mla::Dtype;

use crate::bytes::Bytes;
use crate::encoding::Encoding;
use crate::index::{self, Index};
use crate::matrix::Matrix;
use crate::names::Names;
use crate::{Config, Error, Result, quantization};

/// Elements by which parts of noise begin apart, at most.
const SHIFT: usize = 1 << 20;

/// A size, and the fields of config.json that it comes from.
#[derive(Debug, Clone, Copy)]
pub struct Dim(pub usize, pub &'static str);

/// All tensors of a checkpoint, until each is taken.
pub struct Weights {
    dir: PathBuf,
    names: Names,
    quant_method: Option<String>,
    is_gguf: bool,
    files: Vec<Bytes>,
    tensors: BTreeMap<String, Place>,
    /// Tensors of the files that the index does not have, and their files.
    unlisted: BTreeMap<String, PathBuf>,
    taken: Vec<(Bytes, Range<usize>)>,
    /// Weights that there are not, for measurements: each matrix is a part of it.
    noise: Option<Bytes>,
}

/// Where a tensor is.
struct Place {
    file: usize,
    /// In the file.
    part: Range<usize>,
    /// What it has instead where it is not served.
    encoding: Result<Encoding, Stored>,
    shape: Vec<usize>,
}

impl Weights {
    /// `model.safetensors`, or what `model.safetensors.index.json` lists: where there is an index, each tensor is that of the file that it
    /// maps the tensor to, whatever other files have.
    ///
    /// # Errors
    /// [`Error::File`]; for weights that are not f32, f16 or bf16 it names one and the cure.
    pub fn open(dir: &Path, config: &Config) -> Result<Self> {
        #[cfg(not(target_arch = "wasm32"))]
        if let Some(gguf) = crate::gguf::Gguf::of(dir)? {
            return Ok(Self::of_gguf(dir, config, gguf));
        }
        let mut weights = Self::none(dir, config);
        let Some(index) = Index::open(dir, |name| weights.names.own(name).is_none())? else {
            let only = index::only_file(dir)?;
            weights.add(&only, Bytes::open(&only)?, |_| true)?;
            return weights.checked();
        };
        for (path, names) in &index.files {
            weights.add(path, Bytes::open(path)?, |name| names.contains(name))?;
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
        weights.add(Path::new(name), bytes.into(), |_| true)?;
        weights.checked()
    }

    /// The tensors of GGUF files, by the names that they have in checkpoints of transformers.
    #[cfg(not(target_arch = "wasm32"))]
    fn of_gguf(path: &Path, config: &Config, gguf: crate::gguf::Gguf) -> Self {
        let mut weights = Self { is_gguf: true, files: gguf.files, ..Self::none(path, config) };
        for (name, tensor) in gguf.tensors {
            let name = crate::gguf::names::own(&name);
            if let Some(own) = name.and_then(|name| weights.names.own(&name)) {
                let crate::gguf::Tensor { file, part, encoding, shape } = tensor;
                weights.tensors.insert(own, Place { file, part, encoding: Ok(encoding), shape });
            }
        }
        weights
    }

    /// Whether a tensor is there, by its name in the files.
    fn has(&self, name: &str) -> bool {
        self.names.own(name).is_some_and(|own| self.tensors.contains_key(&own))
    }

    fn none(dir: &Path, config: &Config) -> Self {
        Self {
            dir: dir.into(),
            names: Names::new(config),
            quant_method: config.quant_method.clone(),
            is_gguf: false,
            files: Vec::new(),
            tensors: BTreeMap::new(),
            unlisted: BTreeMap::new(),
            taken: Vec::new(),
            noise: None,
        }
    }

    /// Weights of any model of a config, in bf16, that are noise: only its speed is then the model's. All are parts of one array, as large
    /// as the largest.
    pub fn noise(config: &Config) -> Self {
        let experts = config.experts.as_ref().map_or(0, |it| it.intermediate_size * it.num_shared.max(1));
        let queries = config.shape.num_heads as usize * (config.qk_nope_head_dim + config.v_head_dim + 64);
        let rows = [config.vocab_size, config.intermediate_size, experts, queries];
        let columns = config.hidden_size.max(config.q_lora_rank.unwrap_or(0)).max(512);
        let elems = rows.into_iter().max().unwrap_or(1) * columns + SHIFT;
        let most = (3.0 / config.hidden_size as f32).sqrt();
        let mut state = 1u32;
        let word = |_| {
            // A generator of Numerical Recipes; two elements of its high bits.
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let elem = |bits: u32| ((bits & 0xff) as f32 / 127.5 - 1.0) * most;
            let [low, high] = [elem(state >> 16), elem(state >> 24)].map(f32::to_bits);
            f32::from_bits(high & 0xffff_0000 | low >> 16)
        };
        let noise: Vec<f32> = (0..elems.div_ceil(2)).map(word).collect();
        Self { noise: Some(noise.into()), ..Self::none(Path::new("noise"), config) }
    }

    fn checked(self) -> Result<Self> {
        self.check_dtypes()?;
        Ok(self)
    }

    /// The tensors of a file that are wanted from it.
    fn add(&mut self, path: &Path, file: Bytes, is_wanted: impl Fn(&str) -> bool) -> Result<()> {
        let again = |why: &dyn std::fmt::Display| Error::file(path, format!("{why}; download it again"));
        let (begin, header) = header(file.all()).map_err(|why| again(&why))?;
        for (name, info) in header.tensors() {
            let Some(own) = self.names.own(&name) else { continue };
            if is_wanted(&name) {
                let part = begin + info.data_offsets.0..begin + info.data_offsets.1;
                let encoding = float(info.dtype).map(Encoding::Plain).ok_or(info.dtype);
                let shape = info.shape.clone();
                self.tensors.insert(own, Place { file: self.files.len(), part, encoding, shape });
            } else {
                self.unlisted.insert(own, path.into());
            }
        }
        self.files.push(file);
        Ok(())
    }

    fn check_dtypes(&self) -> Result<()> {
        let odd = |(name, place): (_, &Place)| Some((name, place.encoding.err()?));
        let Some((name, dtype)) = self.tensors.iter().find_map(odd) else { return Ok(()) };
        let fp8 = format!("{dtype:?}").starts_with("F8");
        Err(self.fault(format!("{name} has dtype {dtype:?}; {}", self.cure(fp8))))
    }

    /// A tensor in f32, contiguous.
    ///
    /// # Errors
    /// [`Error::File`] where it is missing or has another shape.
    pub fn take(&mut self, name: &str, shape: &[Dim]) -> Result<Tensor> {
        if self.noise.is_some() {
            let shape: Vec<usize> = shape.iter().map(|Dim(size, _)| *size).collect();
            return Ok(Tensor::ones(shape, candle_core::DType::F32, &Device::Cpu)?);
        }
        match self.take_if_there(name, shape)? {
            Some(tensor) => Ok(tensor),
            None => Err(self.missing(name)),
        }
    }

    /// A tensor that some checkpoints have, in f32.
    ///
    /// # Errors
    /// The errors of [`Weights::matrix_if_there`].
    pub fn take_if_there(&mut self, name: &str, shape: &[Dim]) -> Result<Option<Tensor>> {
        let Some((file, part, encoding)) = self.place(name, shape)? else { return Ok(None) };
        let values = encoding.decode(&file.all()[part]);
        let shape: Vec<usize> = shape.iter().map(|Dim(size, _)| *size).collect();
        Ok(Some(Tensor::from_vec(values, shape, &Device::Cpu)?))
    }

    /// A matrix, as its file has it.
    ///
    /// # Errors
    /// The errors of [`Weights::take`].
    pub fn matrix(&mut self, name: &str, rows: Dim, columns: Dim) -> Result<Matrix> {
        if let Some(noise) = &self.noise {
            let begin = name.bytes().fold(0, |sum: usize, byte| sum * 31 % SHIFT + usize::from(byte)) / 2 * 4;
            let part = begin..begin + rows.0 * columns.0 * 2;
            self.taken.push((noise.clone(), part.clone()));
            return Ok(Matrix::new(noise, part, Dtype::Bf16.into(), rows.0, columns.0));
        }
        match self.matrix_if_there(name, &[rows, columns])? {
            Some(matrix) => Ok(matrix),
            None => Err(self.missing(name)),
        }
    }

    /// A matrix that some checkpoints have, or a stack of them, one below the other.
    ///
    /// # Errors
    /// [`Error::File`] where it has another shape, or is in a file but not in the index: the index may be cut off.
    pub fn matrix_if_there(&mut self, name: &str, shape: &[Dim]) -> Result<Option<Matrix>> {
        let Some((file, part, encoding)) = self.place(name, shape)? else { return Ok(None) };
        let columns = shape.last().map_or(1, |Dim(size, _)| *size);
        let rows = part.len() / encoding.bytes(columns).max(1);
        self.taken.push((file.clone(), part.clone()));
        Ok(Some(Matrix::new(&file, part, encoding, rows, columns)))
    }

    /// Where a tensor is. It is then taken.
    fn place(&mut self, name: &str, shape: &[Dim]) -> Result<Option<(Bytes, Range<usize>, Encoding)>> {
        if let Some(path) = self.unlisted.get(name) {
            let cure = "download the index again, or add it there";
            return Err(Error::file(path, format!("{name} is here, but the index does not have it; {cure}")));
        }
        let Some(Place { file, part, encoding, shape: got }) = self.tensors.remove(name) else {
            return Ok(None);
        };
        if !got.iter().eq(shape.iter().map(|Dim(size, _)| size)) {
            let wanted: Vec<String> =
                shape.iter().map(|Dim(size, field)| format!("{size} ({field})")).collect();
            let (name, wanted, asks) = (self.shown(name), wanted.join(", "), self.asks());
            return Err(
                self.fault(format!("{name} has shape {got:?}, {} for [{wanted}]; {}", asks.0, asks.1))
            );
        }
        // The dtype was checked when it was opened.
        Ok(encoding.ok().map(|encoding| (self.files[file].clone(), part, encoding)))
    }

    /// The error of a tensor that is not there.
    pub fn missing(&self, name: &str) -> Error {
        // After a cast of FP8 weights, another cast would not bring it.
        let cure = match self.is_packed() {
            true => self.cure(false),
            false => format!("{} for it; {}", self.asks().0, self.asks().1),
        };
        self.fault(format!("no tensor {}; {cure}", self.shown(name)))
    }

    /// After the model took its tensors: what is left would change its results. Gives the parts of the files that are matrices.
    ///
    /// # Errors
    /// [`Error::File`] that names a few.
    pub fn finish(self) -> Result<Vec<(Bytes, Range<usize>)>> {
        let left: Vec<String> = self.tensors.keys().map(|name| self.shown(name)).collect();
        if left.is_empty() {
            return Ok(self.taken);
        }
        let scaled = left.iter().any(|name| quantization::is_scale(name));
        let cure = match scaled || self.is_packed() {
            true => self.cure(scaled),
            false if self.is_gguf => "name the file of another model".into(),
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

    /// A tensor's name in the files.
    fn shown(&self, name: &str) -> String {
        #[cfg(not(target_arch = "wasm32"))]
        if self.is_gguf {
            return crate::gguf::names::theirs(name);
        }
        name.into()
    }

    /// What asks for tensors, and what to do where they are others.
    fn asks(&self) -> (&'static str, &'static str) {
        match self.is_gguf {
            true => ("its metadata asks", "download the file again, or one that a newer llama.cpp made"),
            false => ("its config.json asks", "take both from one checkpoint"),
        }
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

/// Where the tensors begin, and what they are. The file is as long as they need, so each is inside.
fn header(file: &[u8]) -> Result<(usize, Metadata), String> {
    let (length, rest) = file.split_first_chunk().ok_or("it has no header")?;
    let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
    let text = rest.get(..length).ok_or("its header is cut off")?;
    let header: Metadata = serde_json::from_slice(text).map_err(|error| format!("its header: {error}"))?;
    let (begin, size) = (8 + length, file.len());
    match begin.checked_add(header.data_len()) {
        Some(end) if end == size => Ok((begin, header)),
        end => Err(format!("it has {size} bytes, its header asks for {}", end.unwrap_or(usize::MAX))),
    }
}
