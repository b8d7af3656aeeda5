//! Times over several devices, as tables in markdown. Results are compared before they are timed; a wrong one ends the run with status 1.
//!
//! Each part ends within its limit, or the process does with status 3: for a machine that nobody watches.

mod exchange;
mod launch;
mod long;
mod plain;
mod replays;

use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use wgpu_mla::Error;
use wgpu_mla::communicator::Communicator;

use crate::args::{Args, PARTS};
use crate::{on_device, threads};
pub use launch::Launch;

/// A part that takes longer is stuck.
const LIMIT: Duration = Duration::from_secs(60);

/// Every rank's view of the bench.
pub struct Bench<'a, D: Launch> {
    device: &'a D,
    communicator: &'a dyn Communicator<D>,
    args: &'a Args,
    rank: u32,
    world: u32,
    /// To wait for the device by a download of 4 bytes.
    probe: D::Buffer,
}

type PartOf<D> = fn(&Bench<'_, D>) -> Result<(), Error>;

/// All parts, by threads of this process; true if all was right.
#[must_use]
pub fn over_threads(args: &Args) -> bool {
    let ranks =
        threads::each(args, |_, device, end| on_device!(device, device => Ok(run(&device, &end, args))));
    ranks.iter().filter_map(|rank| rank.as_ref().err()).for_each(|error| println!("error: {error}"));
    ranks.iter().all(|rank| *rank == Ok(true))
}

/// All parts, as one rank; rank 0 prints.
pub fn run<D: Launch>(device: &D, communicator: &dyn Communicator<D>, args: &Args) -> bool {
    let runs: [PartOf<D>; 4] = [long::run, exchange::run, replays::run, plain::run];
    let (rank, world) = (communicator.rank(), communicator.world());
    let wanted = |name: &str| args.parts.is_empty() || args.parts.iter().any(|part| part == name);
    for (name, part) in PARTS.into_iter().zip(runs).filter(|(name, _)| wanted(name)) {
        let _watch = Watch::new(name, LIMIT.max(args.timeout * 2));
        let run = || -> Result<(), Error> {
            let probe = device.buffer(4)?;
            part(&Bench { device, communicator, args, rank, world, probe })
        };
        if let Err(error) = run() {
            println!("error: rank {rank}, {name}: {error}");
            return false;
        }
    }
    true
}

impl<D: Launch> Bench<'_, D> {
    /// Prints on rank 0.
    fn say(&self, line: &str) {
        if self.rank == 0 {
            println!("{line}");
        }
    }

    /// Whether the ranks' exchanges may be part of a graph.
    fn in_graph(&self) -> bool {
        D::HAS_GRAPHS && self.communicator.in_stream_order()
    }

    /// Waits for all that was launched.
    fn finish(&self) -> Result<(), Error> {
        self.communicator.wait(self.device)?;
        self.device.download(&self.probe, 4).map(drop)
    }

    /// The largest number of any rank.
    fn most(&self, mine: u64) -> Result<u64, Error> {
        let all = self.communicator.all_gather_host(&mine.to_le_bytes())?;
        let numbers = all.as_chunks::<8>().0.iter().map(|&bytes| u64::from_le_bytes(bytes));
        Ok(numbers.max().unwrap_or(mine))
    }

    /// Seconds of a launch, of the slowest rank: the median of 5 rounds of as many launches on each; of a slow
    /// one, its second.
    fn time(&self, launch: &dyn Fn() -> Result<(), Error>) -> Result<f64, Error> {
        let round = |count: u64| {
            // All begin together.
            self.most(0)?;
            let begin = Instant::now();
            (0..count).try_for_each(|_| launch())?;
            self.finish()?;
            Ok::<_, Error>(begin.elapsed().as_secs_f64() / count as f64)
        };
        round(1)?;
        let once = round(1)?;
        let count = self.most(((0.03 / once) as u64).clamp(1, 300))?;
        // All ranks make as many.
        let rounds = if count == 1 { 1 } else { 5 };
        let mut times = (0..rounds).map(|_| round(count)).collect::<Result<Vec<_>, Error>>()?;
        times.sort_by(f64::total_cmp);
        Ok(self.most((times[rounds / 2] * 1e12) as u64)? as f64 / 1e12)
    }
}

/// Ends the process if it is not dropped in time.
struct Watch {
    _done: Sender<()>,
}

impl Watch {
    fn new(part: &'static str, limit: Duration) -> Self {
        let (_done, wait) = channel::<()>();
        std::thread::spawn(move || {
            if wait.recv_timeout(limit) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                eprintln!("error: {part}: not done after {limit:?}");
                std::process::exit(3);
            }
        });
        Self { _done }
    }
}

/// Micro-seconds.
fn us(seconds: f64) -> String {
    format!("{:.1}", seconds * 1e6)
}
