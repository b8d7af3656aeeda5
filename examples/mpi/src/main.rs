//! `examples/context_parallel` with a process a rank: `mpirun -n 4 target/debug/wgpu-mla-mpi --devices cpu,wgpu,cpu,wgpu`.

use std::process::ExitCode;

use context_parallel::args::{Args, HELP, Parsed};
use context_parallel::rank::Kill;
use context_parallel::{Result, bench, devices, on_device, problems, report, threads};
use wgpu_mla::communicator::Communicator;
use wgpu_mla::cpu::Cpu;
use wgpu_mla_mpi::Mpi;

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(why) => {
            eprintln!("error: {why}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<bool> {
    // The time-out is an argument, and the number of ranks is MPI's: a world that is given is of no use.
    let words = || std::env::args_os().skip(1);
    let timeout = match Args::parse(words())? {
        Parsed::Help => {
            println!(
                "{HELP}\n\nUnder mpirun: a device a rank, or one for all; --engine, --rank and --id-file are of no use."
            );
            return Ok(true);
        }
        Parsed::Run(args) => args.timeout,
    };
    let mpi = Mpi::new(timeout).map_err(context_parallel::text)?;
    let (rank, world) = (Communicator::<Cpu>::rank(&mpi), Communicator::<Cpu>::world(&mpi));
    let Parsed::Run(mut args) = Args::parse(words())? else { return Ok(true) };
    let given = words().any(|word| word.to_string_lossy().starts_with("--devices"));
    if given && ![1, world as usize].contains(&args.devices.len()) {
        return Err(format!(
            "--devices names {} ranks, mpirun has {world}: name one for all, or one each",
            args.devices.len()
        ));
    }
    if args.devices.len() != world as usize {
        let name = if args.devices.len() == 1 { args.devices[0].clone() } else { "cpu".to_owned() };
        args.devices = vec![name; world as usize];
    }
    let sharers = args.devices.iter().filter(|name| *name == "cpu").count();
    let device = devices::open(&args.devices[rank as usize], sharers)?;
    if args.bench {
        return Ok(on_device!(device, device => bench::run(&device, &mpi, &args)));
    }
    let work = problems::load(&args.paths, world)?;
    let did = on_device!(device, device => threads::job(&device, &mpi, &work, &args, Kill::Abort));
    let did = did.map_err(|error| format!("rank {rank}: {error}"));
    Ok(report::print(&work, |heads| threads::forms(&args, heads), &[did]))
}
