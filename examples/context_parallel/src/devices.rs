//! Devices by the names of the command line.

use wgpu_mla::cpu::Cpu;
#[cfg(feature = "cuda")]
use wgpu_mla::cuda::Cuda;
#[cfg(feature = "wgpu")]
use wgpu_mla::gpu::Gpu;

use crate::Result;
#[cfg(any(feature = "cuda", feature = "wgpu"))]
use crate::text;

/// A device of one of the kinds that were built in.
pub enum AnyDevice {
    Cpu(Cpu),
    #[cfg(feature = "wgpu")]
    Wgpu(Gpu),
    #[cfg(feature = "cuda")]
    Cuda(Cuda),
}

/// The same expression for each kind.
#[macro_export]
macro_rules! on_device {
    ($any:expr, $device:ident => $result:expr) => {
        match $any {
            $crate::devices::AnyDevice::Cpu($device) => $result,
            #[cfg(feature = "wgpu")]
            $crate::devices::AnyDevice::Wgpu($device) => $result,
            #[cfg(feature = "cuda")]
            $crate::devices::AnyDevice::Cuda($device) => $result,
        }
    };
}

/// Opens `cpu`, `wgpu`, `cuda` or `cuda:1`. Ranks on the CPU share its threads out: `sharers` of them.
///
/// # Errors
/// A name that is none, and a device that is not here.
pub fn open(name: &str, sharers: usize) -> Result<AnyDevice> {
    let (kind, number) = name.split_once(':').unwrap_or((name, "0"));
    let cure = "must be a card's number, as in cuda:1";
    let ordinal: usize = number.parse().map_err(|_| format!("--devices {name}: {number:?} {cure}"))?;
    if matches!(kind, "cpu" | "wgpu") && name != kind {
        return Err(format!(
            "--devices {name}: only cuda has a number; WGPU_ADAPTER_NAME chooses wgpu's adapter"
        ));
    }
    match kind {
        "cpu" => {
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            Ok(AnyDevice::Cpu(Cpu::with_threads(threads / sharers.max(1))))
        }
        #[cfg(feature = "wgpu")]
        "wgpu" => Gpu::new().map(AnyDevice::Wgpu).map_err(text),
        #[cfg(feature = "cuda")]
        "cuda" => cuda(ordinal).map(AnyDevice::Cuda),
        #[cfg(not(feature = "cuda"))]
        "cuda" => Err(format!("{name} {ordinal}: built without it; build with `--features cuda`")),
        _ => Err(format!("--devices {name}: must be cpu, wgpu, cuda or cuda:NUMBER, as built in")),
    }
}

/// A card.
///
/// # Errors
/// It is not here.
#[cfg(feature = "cuda")]
pub fn cuda(ordinal: usize) -> Result<Cuda> {
    Cuda::new(ordinal).map_err(text)
}
