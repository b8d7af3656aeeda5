//! What the benches share.

pub mod args;
pub mod ceiling;
pub mod clock;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod device;
pub mod paint;
pub mod peers;
pub mod read_once;
pub mod record;

pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Runs a bench of wgpu and CUDA: `$run` is generic over the device. An error is printed, and the status is 1.
#[allow(unused_macros)]
macro_rules! on_cards {
    ($run:ident) => {{
        let args = $crate::support::args::Args::parse();
        $crate::support::end(match args.backend.as_str() {
            "wgpu" => wgpu_mla::gpu::Gpu::new().map_err(Into::into).and_then(|gpu| $run(&gpu, &args)),
            #[cfg(feature = "cuda")]
            "cuda" => wgpu_mla::cuda::Cuda::new(0).map_err(Into::into).and_then(|cuda| $run(&cuda, &args)),
            other => Err(format!("--backend {other}: wgpu, or cuda with that feature").into()),
        });
    }};
}
#[allow(unused_imports)]
pub(crate) use on_cards;

pub fn end(done: Result<()>) {
    if let Err(error) = done {
        eprintln!("error: {error}");
        std::process::exit(1);
    }
}

pub fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// A fixed sequence of random numbers in 0..1.
pub struct Draws(pub u64);

impl Draws {
    pub fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / (1u64 << 24) as f32
    }
}
