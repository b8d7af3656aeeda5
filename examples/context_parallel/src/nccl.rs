//! Ranks that are cards, joined by NCCL: a thread each, or a process each.

use std::path::Path;
use std::time::{Duration, Instant};

use wgpu_mla::communicator::{Nccl, NcclId, NcclSetup};
use wgpu_mla::cuda::Cuda;

use crate::args::{Args, OneRank};
use crate::rank::{Did, Kill};
use crate::{Result, bench, devices, problems, report, text, threads};

/// Runs the cases, or the bench; true if all was right.
///
/// # Errors
/// What keeps it from running.
pub fn run(args: &Args) -> Result<bool> {
    println!("NCCL {}", Nccl::version().map_err(text)?);
    match &args.one_rank {
        Some(one) => one_process(args, one),
        None => one_thread_a_card(args),
    }
}

/// This process is one rank of many.
fn one_process(args: &Args, one: &OneRank) -> Result<bool> {
    let cuda = card(&args.devices[0])?;
    let id = if one.rank == 0 { make_id(&one.id_file)? } else { wait_for_id(&one.id_file, args.timeout)? };
    let nccl = join(args, &cuda, id, one.rank)?;
    if one.rank == 0 {
        // All have joined; the next run makes another.
        std::fs::remove_file(&one.id_file).map_err(text)?;
    }
    if args.bench {
        return Ok(bench::run(&cuda, &nccl, args));
    }
    let work = problems::load(&args.paths, one.world)?;
    let did = threads::job(&cuda, &nccl, &work, args, Kill::Abort);
    let did = did.map_err(|error| format!("rank {}: {error}", one.rank));
    Ok(report::print(&work, |heads| threads::forms(args, heads), &[did]))
}

/// A thread for each card.
fn one_thread_a_card(args: &Args) -> Result<bool> {
    let id = NcclId::new().map_err(text)?;
    if args.bench {
        let ranks = each(args, id, |cuda, nccl| Ok(bench::run(&cuda, &nccl, args)));
        let errors: Vec<_> = ranks.iter().filter_map(|rank| rank.as_ref().err()).collect();
        errors.iter().for_each(|error| println!("error: {error}"));
        return Ok(ranks.iter().all(|rank| *rank == Ok(true)));
    }
    let work = problems::load(&args.paths, args.world())?;
    let ranks: Vec<Result<Vec<Did>>> =
        each(args, id, |cuda, nccl| threads::job(&cuda, &nccl, &work, args, Kill::Panic));
    Ok(report::print(&work, |heads| threads::forms(args, heads), &ranks))
}

fn each<T: Send>(args: &Args, id: NcclId, run: impl Fn(Cuda, Nccl) -> Result<T> + Sync) -> Vec<Result<T>> {
    // One after another: drivers load their libraries then.
    let cards: Vec<Result<Cuda>> = args.devices.iter().map(|name| card(name)).collect();
    std::thread::scope(|scope| {
        let run = &run;
        let ranks = (0u32..).zip(cards);
        let threads: Vec<_> = ranks
            .map(|(rank, cuda)| {
                scope.spawn(move || {
                    let cuda = cuda?;
                    let nccl = join(args, &cuda, id, rank)?;
                    run(cuda, nccl).map_err(|error| format!("rank {rank}: {error}"))
                })
            })
            .collect();
        threads::join(threads)
    })
}

fn join(args: &Args, cuda: &Cuda, id: NcclId, rank: u32) -> Result<Nccl> {
    let setup = NcclSetup { blocking: args.blocking, ..NcclSetup::new(args.timeout) };
    Nccl::with(cuda, id, rank, args.world(), &setup).map_err(text)
}

fn card(name: &str) -> Result<Cuda> {
    match name.split_once(':') {
        None if name == "cuda" => devices::cuda(0),
        Some(("cuda", number)) => {
            let cure = "must be a card's number, as in cuda:1";
            devices::cuda(number.parse().map_err(|_| format!("--devices {name}: {number:?} {cure}"))?)
        }
        _ => Err(format!("--devices {name}: --engine nccl is of cuda, cuda:1, ..")),
    }
}

/// The file appears whole: it is renamed.
fn make_id(path: &Path) -> Result<NcclId> {
    if path.exists() {
        return Err(format!("{}: left by another run: remove it", path.display()));
    }
    let id = NcclId::new().map_err(text)?;
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    let part = path.with_extension("part");
    std::fs::write(&part, id.bytes()).map_err(failed)?;
    std::fs::rename(&part, path).map_err(failed)?;
    Ok(id)
}

fn wait_for_id(path: &Path, timeout: Duration) -> Result<NcclId> {
    let begin = Instant::now();
    loop {
        match std::fs::read(path) {
            Ok(bytes) => {
                let bytes: Result<[u8; 128], _> = bytes.try_into();
                return bytes.map(NcclId::from).map_err(|_| format!("{}: no id of NCCL's", path.display()));
            }
            Err(error) if begin.elapsed() > timeout => return Err(format!("{}: {error}", path.display())),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}
