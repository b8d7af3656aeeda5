//! Ranks that are threads of this process, a device each.

use std::sync::Mutex;
use std::thread::ScopedJoinHandle;

use wgpu_mla::communicator::{Communicator, InProcess};
use wgpu_mla::{Backend, CombineForm};

use crate::args::{Args, Engine};
use crate::problems::Work;
use crate::rank::{self, Did, Kill, Setup};
use crate::{Result, devices, on_device, text};

/// Every batch in every form, by one rank: what it did, in order.
///
/// # Errors
/// The first of a device or of an exchange. What comes after it is not run.
pub fn job<D: Backend + 'static>(
    device: &D,
    communicator: &dyn Communicator<D>,
    work: &Work,
    args: &Args,
    kill: Kill,
) -> Result<Vec<Did>> {
    let mut all = Vec::new();
    for whole in &work.wholes {
        for form in forms(args, whole.problem.spec.shape.num_heads) {
            let shares = args.shares(args.interleave.or(whole.interleave).unwrap_or(16))?;
            let kill = args.kill_after.map(|after| (after, kill));
            let setup = Setup { shares, form, steps: args.steps, kill };
            let did = rank::run(device, communicator, whole, &setup);
            all.push(did.map_err(|error| format!("{}: {error}", whole.problem.name))?);
        }
    }
    for (name, case) in &work.combines {
        for form in forms(args, case.num_heads as u32) {
            let did = rank::combine(device, communicator, case, form);
            all.push(did.map_err(|error| format!("{name}: {error}"))?);
        }
    }
    Ok(all)
}

/// The forms that a batch of so many heads is decoded in.
#[must_use]
pub fn forms(args: &Args, heads: u32) -> Vec<CombineForm> {
    let divides = heads.is_multiple_of(args.world());
    match args.form {
        Some(form) if divides || form == CombineForm::AllGather => vec![form],
        Some(_) => Vec::new(),
        None if divides => {
            vec![CombineForm::AllToAll, CombineForm::AllGatherReduceScatter, CombineForm::AllGather]
        }
        None => vec![CombineForm::AllGather],
    }
}

/// Runs all ranks; what each did, or why it could not, in their order.
pub fn run(args: &Args, work: &Work) -> Vec<Result<Vec<Did>>> {
    each(args, |rank, device, end| {
        on_device!(device, device => job(&device, &end, work, args, Kill::Panic))
            .map_err(|error| format!("rank {rank}: {error}"))
    })
}

/// Opens every rank's device and hands it to a thread of its own.
///
/// Devices are opened one after another, since drivers load their libraries then.
pub fn each<T: Send>(
    args: &Args,
    run: impl Fn(usize, devices::AnyDevice, InProcess) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    debug_assert_eq!(args.engine, Engine::Threads);
    let sharers = args.devices.iter().filter(|name| *name == "cpu").count();
    let group = match InProcess::group(args.world(), args.timeout) {
        Ok(group) => group,
        Err(error) => return vec![Err(text(error))],
    };
    let opening = Mutex::new(());
    std::thread::scope(|scope| {
        let (run, opening) = (&run, &opening);
        let ranks = args.devices.iter().zip(group).enumerate();
        let threads: Vec<_> = ranks
            .map(|(rank, (name, end))| {
                scope.spawn(move || {
                    let opened = {
                        let _one = opening.lock();
                        devices::open(name, sharers)
                    };
                    // A rank without a device leaves the group, which tells the others.
                    run(rank, opened?, end)
                })
            })
            .collect();
        join(threads)
    })
}

/// Waits for a thread of each rank, in their order; a rank that panicked is an error.
pub fn join<T>(threads: Vec<ScopedJoinHandle<'_, Result<T>>>) -> Vec<Result<T>> {
    let joined = (0..).zip(threads).map(|(rank, thread): (u32, _)| {
        thread.join().unwrap_or_else(|_| Err(format!("rank {rank}: it panicked")))
    });
    joined.collect()
}
