//! Batches of whole sequences, with what is expected: of case files, and drawn here.

use std::path::{Path, PathBuf};

use mla_support::case::{Case, DcpCombineCase, DcpDecodeCase, DecodeCase};
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
    /// The interleave of a case, if it has one.
    pub interleave: Option<u32>,
}

impl Whole {
    fn drawn(name: &str, make: &Make) -> Self {
        let mut problem = make.build();
        name.clone_into(&mut problem.name);
        let (out, lse) = problem.expected();
        Self { problem, out, lse, interleave: None }
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
            &Make {
                sequences: lens(&[(70, 1), (3, 2), (0, 0), (133, 4), (1, 1), (17, 0)]),
                ..make(Dtype::F32, Dtype::F32, Data::Painted, &[])
            },
        ),
        Whole::drawn(
            "f32, one token takes the weight",
            &make(Dtype::F32, Dtype::F32, Data::Needle, &[(200, 1), (90, 2)]),
        ),
        Whole::drawn("f16", &make(Dtype::F16, Dtype::F16, Data::Painted, &[(150, 2), (64, 1)])),
        Whole::drawn("bf16 up to 1e5", &make(Dtype::Bf16, Dtype::Bf16, Data::Huge, &[(100, 1), (31, 3)])),
        Whole::drawn("e4m3", &make(Dtype::E4m3, Dtype::Bf16, Data::Painted, &[(120, 1), (0, 1), (77, 2)])),
    ]
}

/// What is run: batches, and partial results to join.
#[derive(Default)]
pub struct Work {
    pub wholes: Vec<Whole>,
    pub combines: Vec<(String, DcpCombineCase)>,
}

impl Work {
    /// The names of what is run, and its heads, in order.
    pub fn names(&self) -> impl Iterator<Item = (&str, u32)> {
        let wholes =
            self.wholes.iter().map(|whole| (whole.problem.name.as_str(), whole.problem.spec.shape.num_heads));
        wholes.chain(self.combines.iter().map(|(name, case)| (name.as_str(), case.num_heads as u32)))
    }
}

/// The cases of files and directories that are batches, and those of partial results of so many ranks; the others are passed over.
/// Without paths the repository's of kind `dcp_decode` and `dcp_combine`. Then what is drawn here.
///
/// # Errors
/// A file that cannot be read, and a case whose tokens are not shared out as it says.
pub fn load(paths: &[PathBuf], world: u32) -> Result<Work> {
    let mut work = Work::default();
    let only_ranks = paths.is_empty();
    let own = own_cases();
    let paths = if only_ranks { &own[..] } else { paths };
    for file in files(paths)? {
        let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        match Case::load(&file)? {
            Case::Decode(case) if !only_ranks => work.wholes.push(of_case(&name, &case)),
            Case::DcpDecode(case) => {
                check_lens(&name, &case)?;
                let interleave = Some(case.shares.interleave());
                work.wholes.push(Whole { interleave, ..of_case(&name, &case.decode) });
            }
            Case::DcpCombine(case) if case.world == world as usize => work.combines.push((name, case)),
            Case::DcpCombine(case) => println!("{name}: not run, it is of {} ranks", case.world),
            _ => {}
        }
    }
    work.wholes.extend(drawn());
    Ok(work)
}

/// The repository's, where it was built or where this runs.
fn own_cases() -> Vec<PathBuf> {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/cases");
    let found = [repository, PathBuf::from("tests/cases")].into_iter().find(|folder| folder.is_dir());
    if found.is_none() {
        println!("no case files: there is no tests/cases here");
    }
    found.into_iter().collect()
}

fn of_case(name: &str, case: &DecodeCase) -> Whole {
    let wide = |xs: &[f32]| xs.iter().map(|&x| x.into()).collect();
    let (out, lse) = (wide(&case.out), wide(&case.lse));
    Whole { problem: Problem::of_case(name, case), out, lse, interleave: None }
}

fn check_lens(name: &str, case: &DcpDecodeCase) -> Result<()> {
    let ranks = 0..case.shares.world();
    let lens: Result<Vec<_>, _> =
        ranks.map(|rank| case.shares.local_seq_lens(rank, &case.decode.seq_lens)).collect();
    if lens.map_err(crate::text)?.concat() != case.local_seq_lens {
        return Err(format!("{name}: local_seq_lens are others"));
    }
    Ok(())
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
