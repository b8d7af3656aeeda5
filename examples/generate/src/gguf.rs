//! GGUF files: a model's config, weights, tokenizer and chat template in one file, or in the files of a split. candle reads the header; the
//! file is mapped, and weights stay in it as they are.

mod config;
mod keys;
pub mod names;
mod patterns;
mod scan;
mod tokenizer;

use std::collections::BTreeMap;
use std::io::Cursor;
use std::ops::Range;
use std::path::{Path, PathBuf};

use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Content;
use wgpu_mla::Dtype;

use crate::bytes::Bytes;
use crate::encoding::{Blocks, Encoding};
use crate::guard::caught;
use crate::tokenizer_config::TokenizerConfig;
use crate::{Config, Error, Result, files};
use keys::Keys;

/// An opened model.
pub struct Gguf {
    /// The first of its files.
    path: PathBuf,
    keys: Keys,
    pub files: Vec<Bytes>,
    pub tensors: BTreeMap<String, Tensor>,
}

/// Where a tensor is, and what it is.
#[derive(Debug, Clone)]
pub struct Tensor {
    pub file: usize,
    /// In the file.
    pub part: Range<usize>,
    pub encoding: Encoding,
    /// Rows first, as in safetensors.
    pub shape: Vec<usize>,
}

impl Gguf {
    /// The model of a file whose name ends in `.gguf`. `None` for any other path, such as the directory of a checkpoint.
    ///
    /// # Errors
    /// [`Error::File`] for a file that is missing or malformed, and for a tensor of a type that is not read.
    pub fn of(path: &Path) -> Result<Option<Self>> {
        match path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf")) && !path.is_dir() {
            true => Self::open(path).map(Some),
            false => Ok(None),
        }
    }

    fn open(path: &Path) -> Result<Self> {
        let paths = parts(path)?;
        let mut all = Self {
            path: paths[0].clone(),
            keys: Keys::default(),
            files: Vec::new(),
            tensors: BTreeMap::new(),
        };
        for (number, path) in paths.iter().enumerate() {
            let file = Bytes::open(path)?;
            let fault = |why: String| Error::file(path, why);
            let header = header(file.all()).map_err(fault)?;
            let keys = Keys::new(header.metadata);
            let of_split = [keys.size("split.no"), keys.size("split.count")];
            let of_split = of_split.map(|it| it.map_err(fault));
            let [no, count] = of_split;
            let (no, count) = (no?.unwrap_or(0), count?.unwrap_or(1).max(1));
            if (no, count) != (number, paths.len()) {
                return Err(fault(format!(
                    "it says that it is file {} of {count} and is named as {} of {}; give the files the names that they were released with",
                    no + 1,
                    number + 1,
                    paths.len()
                )));
            }
            for (name, info) in header.tensor_infos {
                let at = header.tensor_data_offset.saturating_add(info.offset);
                let tensor = tensor(&name, number, &file, at, info.ggml_dtype, info.shape.dims());
                if all.tensors.insert(name.clone(), tensor.map_err(fault)?).is_some() {
                    return Err(fault(format!("{name} is in another file of the split too; {AGAIN}")));
                }
            }
            // The first file has the metadata.
            if number == 0 {
                all.keys = keys;
            }
            all.files.push(file);
        }
        let wanted = all.keys.size("split.tensors.count").map_err(|why| all.fault(why))?;
        match wanted.filter(|&wanted| wanted != all.tensors.len()) {
            Some(wanted) => {
                Err(all.fault(format!("{} tensors in all files, not {wanted}; {AGAIN}", all.tensors.len())))
            }
            None => Ok(all),
        }
    }

    /// # Errors
    /// [`Error::File`] that names the key and the cure.
    pub fn config(&self) -> Result<Config> {
        config::read(self).map_err(|why| self.fault(why))
    }

    /// The tokenizer in the form of tokenizer.json.
    ///
    /// # Errors
    /// [`Error::File`] for one that is not known, or has keys that are missing.
    pub fn tokenizer(&self) -> Result<serde_json::Value> {
        tokenizer::json(&self.keys).map_err(|why| self.fault(why))
    }

    /// # Errors
    /// [`Error::File`] that names the key.
    pub fn tokenizer_config(&self) -> Result<TokenizerConfig> {
        tokenizer::config(&self.keys).map_err(|why| self.fault(why))
    }

    fn fault(&self, why: impl ToString) -> Error {
        Error::file(&self.path, why)
    }
}

/// What to do with a file that is malformed.
const AGAIN: &str = "download it again";

/// The files of a model, of which one is given: itself, or all of a split, whose names end in `-00001-of-00003.gguf`.
fn parts(path: &Path) -> Result<Vec<PathBuf>> {
    let all = match path.file_name().and_then(|name| split_name(name.to_str()?)) {
        None => vec![path.to_owned()],
        Some((stem, count)) => {
            (1..=count).map(|no| path.with_file_name(format!("{stem}-{no:05}-of-{count:05}.gguf"))).collect()
        }
    };
    match all.iter().map(|path| Ok((path, files::is_there(path)?))).collect::<Result<Vec<_>>>()? {
        there if there.iter().all(|(_, is_there)| *is_there) => Ok(all),
        there => {
            let missing = there.into_iter().find(|(_, is_there)| !is_there).map_or(path, |(path, _)| path);
            let cure = match all.len() {
                1 => "name a .gguf file, or the directory of a checkpoint in Hugging Face's format",
                _ => "download all files of the split",
            };
            Err(Error::file(missing, format!("not there; {cure}")))
        }
    }
}

/// What the names of a split's files begin with, and how many there are.
fn split_name(name: &str) -> Option<(&str, usize)> {
    let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, no) = rest.rsplit_once('-')?;
    let number = |text: &str| text.parse().ok().filter(|number| text.len() == 5 && *number > 0);
    number(no).zip(number(count)).filter(|(no, count)| no <= count).map(|(_, count)| (stem, count))
}

fn header(file: &[u8]) -> Result<Content, String> {
    // candle panics on some malformed files.
    let read = caught(|| Content::read(&mut Cursor::new(file)));
    read.and_then(|it| it.map_err(|error| error.to_string())).map_err(|why| match scan::unread(file) {
        Some((name, kind)) => unread(&name, &kind),
        None => format!("{}; it must be GGUF of version 1 to 3, whole: {AGAIN}", why.trim()),
    })
}

/// The error of a tensor of a type that is not read.
fn unread(name: &str, kind: &str) -> String {
    let read = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and Q2_K to Q6_K";
    format!(
        "{name} has the type {kind}, and {read} are read; take a file of another quantisation, such as Q8_0 or Q4_K_M, or make it with llama-quantize"
    )
}

fn tensor(
    name: &str,
    number: usize,
    file: &Bytes,
    begin: u64,
    dtype: GgmlDType,
    shape: &[usize],
) -> Result<Tensor, String> {
    let encoding = match dtype {
        GgmlDType::F32 => Encoding::Plain(Dtype::F32),
        GgmlDType::F16 => Encoding::Plain(Dtype::F16),
        GgmlDType::BF16 => Encoding::Plain(Dtype::Bf16),
        other => Encoding::Blocks(Blocks::of(other).ok_or_else(|| unread(name, &format!("{other:?}")))?),
    };
    let (columns, block) = (shape.last().copied().unwrap_or(1), encoding.block());
    if !columns.is_multiple_of(block) {
        return Err(format!(
            "{name} has rows of {columns} elements, which are no blocks of {block}; {AGAIN}"
        ));
    }
    let elems = shape.iter().try_fold(1usize, |all, size| all.checked_mul(*size));
    let begin = usize::try_from(begin).ok();
    let end = elems
        .filter(|elems| *elems <= usize::MAX / 4)
        .and_then(|elems| begin?.checked_add(encoding.bytes(elems)))
        .filter(|end| *end <= file.all().len());
    let (Some(begin), Some(end)) = (begin, end) else {
        return Err(format!("{name} of shape {shape:?} is beyond the end of the file; {AGAIN}"));
    };
    Ok(Tensor { file: number, part: begin..end, encoding, shape: shape.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_splits() {
        assert_eq!(split_name("m-Q4_K_M-00002-of-00003.gguf"), Some(("m-Q4_K_M", 3)));
        for name in
            ["m.gguf", "m-00004-of-00003.gguf", "m-0001-of-0003.gguf", "m-00000-of-00003.gguf", "-of-.gguf"]
        {
            assert_eq!(split_name(name), None, "{name}");
        }
    }
}
