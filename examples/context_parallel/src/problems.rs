//! Batches of whole sequences, with what is expected: of case files, and drawn here.

use std::path::{Path, PathBuf};

use mla_support::case::Case;
use mla_support::paint::{Data, Make, Problem, sequences};
use wgpu_mla::Dtype;

use crate::Result;

/// A batch of whole sequences.
pub struct Whole {
    pub problem: Problem,
    /// `[total_q, H, L]`.
    pub out: Vec<f64>,
    /// `[total_q, H]`, natural.
    pub lse: Vec<f64>,
    /// That of a case.
    pub interleave: Option<u32>,
    /// Of a case: `world`, and the lengths `[world, batch]` that even shares have there.
    pub local_seq_lens: Option<(u32, Vec<i32>)>,
}

impl Whole {
    fn drawn(name: &str, make: &Make) -> Self {
        let mut problem = make.build();
        name.clone_into(&mut problem.name);
        let (out, lse) = problem.expected();
        Self { problem, out, lse, interleave: None, local_seq_lens: None }
    }
}

/// Small batches of every cache dtype, with several query tokens a sequence, empty sequences, and fewer tokens than ranks. 12 heads are a
/// multiple of 2, 3 and 4 ranks.
#[must_use]
pub fn drawn() -> Vec<Whole> {
    let small = Make { dims: (256, 32), heads: 12, page_size: 8, ..Make::default() };
    let lens = |lens: &[(u32, u32)]| sequences(lens);
    let make = |cache, query, data, lens: &[(u32, u32)]| Make {
        cache,
        query,
        data,
        sequences: sequences(lens),
        ..small.clone()
    };
    vec![
        Whole::drawn(
            "f32, ragged, 1 to 4 query tokens",
            &Make { sequences: lens(&[(70, 1), (3, 2), (0, 0), (133, 4), (1, 1), (17, 0)]), ..make(Dtype::F32, Dtype::F32, Data::Painted, &[]) },
        ),
        Whole::drawn("f32, one token takes the weight", &make(Dtype::F32, Dtype::F32, Data::Needle, &[(200, 1), (90, 2)])),
        Whole::drawn("f16", &make(Dtype::F16, Dtype::F16, Data::Painted, &[(150, 2), (64, 1)])),
        Whole::drawn("bf16 up to 1e5", &make(Dtype::Bf16, Dtype::Bf16, Data::Huge, &[(100, 1), (31, 3)])),
        Whole::drawn("e4m3", &make(Dtype::E4m3, Dtype::Bf16, Data::Painted, &[(120, 1), (0, 1), (77, 2)])),
    ]
}

/// The cases of files and directories that are batches; the others are passed over.
///
/// # Errors
/// A file that cannot be read.
pub fn load(paths: &[PathBuf]) -> Result<Vec<Whole>> {
    let mut wholes = Vec::new();
    for file in files(paths)? {
        let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        wholes.extend(whole_of(&name, Case::load(&file)?));
    }
    Ok(wholes)
}

fn whole_of(name: &str, case: Case) -> Option<Whole> {
    let wide = |xs: &[f32]| xs.iter().map(|&x| x.into()).collect();
    match case {
        Case::Decode(case) => Some(Whole {
            problem: Problem::of_case(name, &case),
            out: wide(&case.out),
            lse: wide(&case.lse),
            interleave: None,
            local_seq_lens: None,
        }),
        _ => None,
    }
}

fn files(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        if path.is_dir() {
            files.extend(safetensors_in(path)?);
        } else {
            files.push(path.clone());
        }
    }
    Ok(files)
}

fn safetensors_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let failed = |error: std::io::Error| format!("{}: {error}", folder.display());
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_some_and(|ext| ext == "safetensors") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}
