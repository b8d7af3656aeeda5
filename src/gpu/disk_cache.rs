//! Compiled pipelines kept between runs: a [`wgpu::PipelineCache`] and its file.
//!
//! wgpu passes the contents of a pipeline cache to the driver unverified but for a short header, so a
//! file is checked here first: length, checksum, and the adapter, driver and release that it was made
//! by. One that fails is ignored with a warning, and the next [`DiskCache::save`] replaces it.

mod header;
mod replace;

pub use header::Rejection;

use super::scope::scoped;
use crate::base::fnv::{FNV_START, fnv1a};
use header::{decode, encode};
use replace::replace;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// The largest file that is read or written: hundreds of times what the pipelines of this crate take.
pub const MAX_FILE_BYTES: u64 = 64 << 20;

/// The wgpu release of the key. The shaders that naga writes are part of the driver's own lookup, so
/// that patch releases need not be told apart: a changed shader is only not found.
const WGPU: &str = "wgpu 30";

/// What became of the file when the cache was opened.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Status {
    /// The device has no [`wgpu::Features::PIPELINE_CACHE`], or could not make a cache. Nothing is kept.
    Unsupported,
    /// There is no file yet.
    Empty,
    /// A file was checked and handed to the driver, which can still choose to compile again.
    Loaded {
        /// Bytes handed over.
        bytes: u64,
    },
    /// There is a file and it is not used. The cache is empty, and works.
    Rejected(Rejection),
}

/// A pipeline cache in memory, with a file behind it where the device supports one.
///
/// ```no_run
/// # fn f(device: &wgpu::Device, module: &wgpu::ShaderModule, directory: &std::path::Path) -> std::io::Result<()> {
/// let cache = wgpu_mla::gpu::disk_cache::DiskCache::open(device, directory);
/// let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
///     label: None,
///     layout: None,
///     module,
///     entry_point: None,
///     compilation_options: Default::default(),
///     cache: cache.as_wgpu(),
/// });
/// cache.save()?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct DiskCache {
    cache: Option<wgpu::PipelineCache>,
    path: PathBuf,
    key: String,
    status: Status,
    /// What the file is known to hold. Held while a save is under way.
    on_disk: Mutex<Option<Contents>>,
}

/// A file's contents, in brief.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Contents {
    file_bytes: u64,
    payload_hash: u64,
}

impl DiskCache {
    /// Opens the cache of this device in `directory`, which need not exist yet. Never fails: whatever is
    /// wrong, the result is a cache that works, and [`status`](Self::status) and the log say what it was.
    ///
    /// The checks find accidents, not forgeries: name a directory that only this user can write to.
    #[must_use]
    pub fn open(device: &wgpu::Device, directory: &Path) -> Self {
        // The device's own info: a key that the caller brings could be another adapter's.
        let info = device.adapter_info();
        let base = wgpu::util::pipeline_cache_key(&info);
        let key = key(&info);
        let path = directory.join(file_name(base.as_deref().unwrap_or("none"), &info.driver));
        let (cache, status, on_disk) =
            if base.is_some() && device.features().contains(wgpu::Features::PIPELINE_CACHE) {
                load(device, &path, &key)
            } else {
                log::info!("pipelines are not kept on disk: the device lacks Features::PIPELINE_CACHE");
                (None, Status::Unsupported, None)
            };
        match &status {
            Status::Loaded { bytes } => log::debug!("pipeline cache {path:?}: {bytes} bytes loaded"),
            Status::Empty => log::debug!("pipeline cache {path:?}: no file yet"),
            Status::Rejected(why) => log::warn!("pipeline cache {path:?} is ignored: {why}"),
            Status::Unsupported => {}
        }
        Self { cache, path, key, status, on_disk: Mutex::new(on_disk) }
    }

    /// For the `cache` field of a pipeline descriptor.
    pub fn as_wgpu(&self) -> Option<&wgpu::PipelineCache> {
        self.cache.as_ref()
    }

    /// What became of the file in [`open`](Self::open). Saving does not change it.
    pub fn status(&self) -> &Status {
        &self.status
    }

    /// The file, whether or not it exists. Its name tells adapters and drivers apart.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the file if it would change, making the directory where needed. True if it was written.
    ///
    /// Call it once the pipelines are made; it waits for the disk. A reader sees the old file or the new
    /// one, never a part. Of two processes that save at once the later wins, and the pipelines that only
    /// the other had are compiled again.
    ///
    /// Some file systems refuse to replace a file that someone has open. It is tried again for half a
    /// second; then the old file stays, the log has a warning, and the next call tries again.
    ///
    /// # Errors
    ///
    /// The directory or the file could not be written, or the data exceed [`MAX_FILE_BYTES`]. The old
    /// file, if any, is as it was, and no temporary file is left.
    pub fn save(&self) -> io::Result<bool> {
        // None after the device was lost, as well as from drivers that keep nothing.
        let Some(payload) = self.cache.as_ref().and_then(wgpu::PipelineCache::get_data) else {
            return Ok(false);
        };
        let file =
            encode(&self.key, &payload).filter(|file| file.len() as u64 <= MAX_FILE_BYTES).ok_or_else(
                || io::Error::new(ErrorKind::FileTooLarge, "the pipeline cache exceeds its size limit"),
            )?;
        let new = Contents::new(&file, &payload);
        // A thread that panicked here left no half-made state: the value is set after the rename.
        let mut on_disk = self.on_disk.lock().unwrap_or_else(PoisonError::into_inner);
        // The length on disk is asked again since a user may have emptied the directory meanwhile.
        if *on_disk == Some(new) && fs::metadata(&self.path).is_ok_and(|m| m.len() == new.file_bytes) {
            return Ok(false);
        }
        if !replace(&self.path, &file, |from, to| fs::rename(from, to))? {
            log::warn!("pipeline cache {:?} is open elsewhere and cannot be replaced: not saved", self.path);
            return Ok(false);
        }
        *on_disk = Some(new);
        log::debug!("pipeline cache {:?}: {} bytes saved", self.path, file.len());
        Ok(true)
    }
}

impl Contents {
    fn new(file: &[u8], payload: &[u8]) -> Self {
        Self { file_bytes: file.len() as u64, payload_hash: fnv1a(FNV_START, payload) }
    }
}

/// Everything that must be the same for a file to be of use. The crate's version is in it so that
/// pipelines of old releases do not pile up, which no call could remove.
fn key(info: &wgpu::AdapterInfo) -> String {
    format!(
        "wgpu-mla {} {WGPU} {} {} {:?} vendor {:#x} device {:#x} driver {:?} {:?}",
        env!("CARGO_PKG_VERSION"),
        std::env::consts::ARCH,
        info.backend,
        info.name,
        info.vendor,
        info.device,
        info.driver,
        info.driver_info,
    )
}

/// Two drivers of one adapter (RADV, AMDVLK) have a file each; versions of a driver replace each other's.
fn file_name(base: &str, driver: &str) -> String {
    let safe = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
    format!("{base}.{}.mla", driver.chars().take(32).map(safe).collect::<String>())
}

/// A cache of what is in the file, or an empty one, or none where the device can make neither.
fn load(
    device: &wgpu::Device,
    path: &Path,
    key: &str,
) -> (Option<wgpu::PipelineCache>, Status, Option<Contents>) {
    let rejection = match read_capped(path) {
        Ok(None) => None,
        Err(why) => Some(why),
        Ok(Some(file)) => match decode(&file, key).and_then(|payload| {
            create(device, Some(payload)).map(|cache| (cache, payload)).map_err(Rejection::Refused)
        }) {
            Ok((cache, payload)) => {
                let status = Status::Loaded { bytes: payload.len() as u64 };
                return (Some(cache), status, Some(Contents::new(&file, payload)));
            }
            Err(why) => Some(why),
        },
    };
    match create(device, None) {
        Ok(cache) => (Some(cache), rejection.map_or(Status::Empty, Status::Rejected), None),
        Err(why) => {
            log::warn!("pipelines are not kept on disk: {why}");
            (None, Status::Unsupported, None)
        }
    }
}

/// The whole file, or `None` if there is none. Never more than [`MAX_FILE_BYTES`], whatever the file
/// does while it is read.
fn read_capped(path: &Path) -> Result<Option<Vec<u8>>, Rejection> {
    let too_large = |got| Rejection::TooLarge { got, max: MAX_FILE_BYTES };
    let read = || -> io::Result<Result<Vec<u8>, Rejection>> {
        // Asked before opening, since opening a pipe would wait for its writer.
        let metadata = fs::metadata(path)?;
        if !metadata.is_file() {
            return Err(io::Error::other("not a regular file"));
        }
        if metadata.len() > MAX_FILE_BYTES {
            return Ok(Err(too_large(metadata.len())));
        }
        let mut file = Vec::new();
        File::open(path)?.take(MAX_FILE_BYTES + 1).read_to_end(&mut file)?;
        let got = file.len() as u64;
        Ok(if got > MAX_FILE_BYTES { Err(too_large(got)) } else { Ok(file) })
    };
    match read() {
        Ok(file) => file.map(Some),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Rejection::Unreadable(e.to_string())),
    }
}

/// `payload` must be what [`decode`] returned for this device's key.
fn create(device: &wgpu::Device, payload: Option<&[u8]>) -> Result<wgpu::PipelineCache, String> {
    let descriptor =
        // With data, a refusal is to be heard; without, there is nothing to fall back from.
        wgpu::PipelineCacheDescriptor { label: Some("mla.pipelines"), data: payload, fallback: payload.is_none() };
    let made = scoped(device, "a pipeline cache", || {
        // SAFETY: the data came from `PipelineCache::get_data`. `save`, which writes nothing else, put
        // them under a key that names adapter, driver and release and under a checksum, and `decode`
        // found both to be right for this device. That nobody forged them is the caller's part in
        // choosing the directory, as `open` says.
        unsafe { device.create_pipeline_cache(&descriptor) }
    });
    made.map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_names_the_wgpu_in_use() {
        // WGPU is written by hand, since wgpu does not tell its version.
        let manifest = include_str!("../../Cargo.toml");
        let major = WGPU.strip_prefix("wgpu ").expect("WGPU starts with its name");
        // The dependency as the repository's Cargo.toml has it, and as cargo rewrites it for a package.
        let written = ["\nwgpu = { version = ", "\n[dependencies.wgpu]\nversion = "];
        let names = |line: &&str| manifest.contains(&format!("{line}\"{major}."));
        assert!(written.iter().any(names), "{WGPU}");
    }

    #[test]
    fn file_names_are_safe() {
        assert_eq!(file_name("base_1_2", "radv"), "base_1_2.radv.mla");
        assert_eq!(file_name("b", "../../etc/x\0 é"), "b.______etc_x___.mla");
        assert_eq!(file_name("b", &"x".repeat(1000)).len(), 2 + 32 + 4);
    }
}
