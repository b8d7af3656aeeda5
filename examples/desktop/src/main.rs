//! A window in which a model writes: the checkpoint of `examples/generate`, its attention through wgpu-mla on egui's own device.
//!
//! ```text
//! cargo run --release -p desktop -- [--help]
//! ```
//! The device is made from egui's needs and [`wgpu_mla::gpu::wanted`]. egui hands its encoder to a paint callback ahead of its own render
//! pass; the callback records a slice of attention there, and eframe submits, once a frame. `window.rs` has what a person sees,
//! `writer.rs` the thread behind it.
//!
//! Status 0: all right; 1: an error, or a figure that was asked for and not reached; 2: bad arguments.

mod args;
mod closing;
mod compiled;
mod device;
mod look;
mod open;
mod pace;
mod panels;
mod publish;
mod sequence;
mod shared;
mod shown;
mod slice;
mod speed;
mod step;
mod times;
mod window;
mod windows;
mod wish;
mod writer;

use std::process::ExitCode;

use args::Args;

fn main() -> ExitCode {
    one_thread();
    compiled::listen();
    let args = match Args::parse(std::env::args_os().skip(1)) {
        Ok(Some(args)) => args,
        Ok(None) => {
            println!("{}", args::HELP);
            return ExitCode::SUCCESS;
        }
        Err(message) => {
            eprintln!("desktop: {message}\n\n{}", args::HELP);
            return ExitCode::from(2);
        }
    };
    match windows::run(&args).and_then(|report| closing::line(&args, &report)) {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(message) => {
            eprintln!("desktop: {message}");
            ExitCode::FAILURE
        }
    }
}

/// candle takes all cores for a matrix, which are the window's too; a token of this model is quick enough on one. And without this variable
/// candle asks the system for its cores at every matrix.
fn one_thread() {
    const THREADS: &str = "RAYON_NUM_THREADS";
    if std::env::var_os(THREADS).is_none() {
        // SAFETY: this comes first in `main`, before there is another thread.
        unsafe { std::env::set_var(THREADS, "1") };
    }
}
