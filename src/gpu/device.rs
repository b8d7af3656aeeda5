//! A wgpu device as this crate uses it: the host's handles, what the card can do, and what was compiled on it.

use crate::base::id::next_id;
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};

use super::caps::Caps;
use super::disk_cache::DiskCache;
use super::read::{check_range, check_usage};
use super::scope::{alive, hosts, scoped};
use super::wanted::caps_on;
use crate::base::error::{Error, Result};
use crate::base::threads::WasmNotSendSync;
use crate::ops::op::sealed::Sealed;
use crate::ops::op::{Binding, Compiled, Device, Kernel, Op, Step};

/// A compiled pipeline: [`Gpu`] keeps one, and each op and binding that uses it another, so that it knows which are unused.
pub(super) type Pipeline = Arc<wgpu::ComputePipeline>;

/// A device, its queue, and what was compiled on them. A clone is another handle; the device stays the host's.
#[derive(Debug, Clone)]
pub struct Gpu {
    pub(super) shared: Arc<Shared>,
}

#[derive(Debug)]
pub(super) struct Shared {
    adapter: Option<wgpu::Adapter>,
    pub(super) device: wgpu::Device,
    pub(super) queue: wgpu::Queue,
    caps: Caps,
    /// By their WGSL.
    pub(super) pipelines: Mutex<HashMap<String, Pipeline>>,
    pub(super) disk: Option<DiskCache>,
    pub(super) checked_shaders: bool,
    pub(super) shared_buffers: bool,
    /// What the host has called before this crate submits.
    flush: OnceLock<Flush>,
    /// Why the device was lost, where this crate made it.
    pub(super) lost: Option<Arc<Mutex<Option<String>>>>,
    /// Why adapter and device cannot be used together, if they cannot.
    mixed: Option<Error>,
    id: u64,
}

/// Choices of [`Gpu::with`].
#[derive(Debug, Clone, Copy, Default)]
pub struct Setup<'a> {
    /// Where to keep what the driver compiled, if the device was made with [`wgpu::Features::PIPELINE_CACHE`]: see
    /// [`DiskCache`]. Call [`Gpu::save`] once all is compiled.
    pub disk_cache: Option<&'a Path>,
    /// Keeps wgpu's run-time checks of every index and loop in kernels that do without, since the host has proved them.
    /// The environment variable `MLA_CHECKED_SHADERS` does the same.
    pub checked_shaders: bool,
    /// Arrays that an op reads and arrays that it writes may be parts of one buffer, as those of an allocator that hands out parts of large
    /// buffers are. wgpu refuses a dispatch that reads a buffer through one binding and writes it through another; with this every array
    /// is bound as one that is written, and only its own part of the buffer. [`Compiled::bind`] then refuses arrays that overlap, in place
    /// of arrays of one buffer.
    ///
    /// A part is bound from a multiple of [`wgpu::Limits::min_storage_buffer_offset_alignment`] on, so nothing else that the op uses may
    /// lie between that and the begin of an array that is written. [`Rope`](crate::Rope) and [`RopeAppend`](crate::RopeAppend), which work
    /// in place, still need buffers of their own for what they write elsewhere.
    pub shared_buffers: bool,
    /// Treats the device as one that can do no more than this, and is of this kind, to run the kernels of another vendor's card on this
    /// one. It adds no capability that the device lacks: see [`Caps::no_better_than`].
    pub no_better_than: Option<Caps>,
}

impl Gpu {
    /// A `Gpu` on the host's device and queue, and the adapter that the device was made from, which alone tells the sizes of cooperative
    /// matrices. For an adapter of another card the first [`Device::compile`] returns [`Error::ForeignResource`].
    ///
    /// `queue` must be the one that was made with `device`, and every buffer and encoder of `device` too. wgpu tells of another queue or
    /// encoder to the error handler of the device that it is of, which panics by default, and not to this crate; what is of another
    /// `wgpu::Instance` may panic inside of wgpu.
    #[must_use]
    pub fn on(adapter: &wgpu::Adapter, device: &wgpu::Device, queue: &wgpu::Queue) -> Self {
        Self::with(adapter, device, queue, &Setup::default())
    }

    /// Like [`Gpu::on`], with other choices than the defaults.
    #[must_use]
    pub fn with(
        adapter: &wgpu::Adapter,
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        setup: &Setup<'_>,
    ) -> Self {
        Self::open(Some(adapter), device, queue, setup, None)
    }

    /// A `Gpu` for a host that has no adapter at hand. Variants on cooperative matrices are then not selected.
    #[must_use]
    pub fn without_adapter(device: &wgpu::Device, queue: &wgpu::Queue, setup: &Setup<'_>) -> Self {
        Self::open(None, device, queue, setup, None)
    }

    // In a browser wgpu's objects stay on their thread, and so does what holds them.
    #[cfg_attr(target_arch = "wasm32", allow(clippy::arc_with_non_send_sync))]
    pub(super) fn open(
        adapter: Option<&wgpu::Adapter>,
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        setup: &Setup<'_>,
        lost: Option<Arc<Mutex<Option<String>>>>,
    ) -> Self {
        let own = caps_on(adapter, device);
        let shared = Shared {
            adapter: adapter.cloned(),
            device: device.clone(),
            queue: queue.clone(),
            caps: setup.no_better_than.map_or(own, |other| own.no_better_than(&other)),
            pipelines: Mutex::default(),
            disk: setup.disk_cache.map(|directory| DiskCache::open(device, directory)),
            shared_buffers: setup.shared_buffers,
            flush: OnceLock::new(),
            checked_shaders: setup.checked_shaders || std::env::var_os("MLA_CHECKED_SHADERS").is_some(),
            lost,
            mixed: mixed(adapter, device),
            id: next_id(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// The adapter, if it was given.
    #[must_use]
    pub fn adapter(&self) -> Option<&wgpu::Adapter> {
        self.shared.adapter.as_ref()
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &wgpu::Device {
        &self.shared.device
    }

    /// Its queue.
    #[must_use]
    pub fn queue(&self) -> &wgpu::Queue {
        &self.shared.queue
    }

    /// What the device can do.
    #[must_use]
    pub fn caps(&self) -> &Caps {
        &self.shared.caps
    }

    /// Has `flush` called before this crate submits anything or uploads to a buffer of the host's: by [`Device::submit`], a `run`, `once`,
    /// an upload and a download. A host that records commands into an encoder of its own, and submits it later, submits it there, so that
    /// all commands run in the order of the calls. It must not use this `Gpu`. `record` and `record_on` submit nothing and do not call it.
    ///
    /// False, without any change, if one was given before.
    pub fn flush_before_submit(&self, flush: impl Fn() + WasmNotSendSync + 'static) -> bool {
        self.shared.flush.set(Flush(Box::new(flush))).is_ok()
    }

    /// Submits what the host has recorded, where it said how.
    fn flush_hosts(&self) {
        if let Some(Flush(flush)) = self.shared.flush.get() {
            flush();
        }
    }

    /// From a uniform to the next that is bound with a dynamic offset, in bytes.
    pub(super) fn uniform_stride(&self) -> u32 {
        self.device().limits().min_uniform_buffer_offset_alignment.max(64)
    }

    /// What offsets of storage bindings are multiples of, in bytes: 256 is enough unless the device was made with more.
    pub(super) fn storage_alignment(&self) -> u64 {
        u64::from(self.device().limits().min_storage_buffer_offset_alignment).max(256)
    }

    /// Writes the file of [`Setup::disk_cache`], if what was compiled changed it. True if it was written.
    ///
    /// # Errors
    /// The errors of the file system.
    pub fn save(&self) -> std::io::Result<bool> {
        self.disk().map_or(Ok(false), DiskCache::save)
    }

    /// The cache that [`Setup::disk_cache`] asked for.
    #[must_use]
    pub fn disk(&self) -> Option<&DiskCache> {
        self.shared.disk.as_ref()
    }

    /// The adapter's name, driver and API, for a person.
    #[must_use]
    pub fn describe(&self) -> String {
        let info = self.device().adapter_info();
        format!("{} ({} {}, {:?})", info.name, info.driver, info.driver_info, info.backend)
    }

    /// Whether the device is still there. It costs about two microseconds, and takes nothing of the host's: its own callback for a lost
    /// device (`wgpu::Device::set_device_lost_callback`) stays in place. Of a device in a browser only one that this crate made tells.
    ///
    /// # Errors
    /// [`Error::DeviceLost`], from the first call after the loss on. A driver tells of a loss when it is next given work or waited for.
    pub fn check_lost(&self) -> Result<()> {
        match self.why_lost() {
            Some(detail) => Err(Error::DeviceLost { detail }),
            None => alive(self.device()),
        }
    }

    /// What the driver said of a device that this crate made, once it was lost.
    fn why_lost(&self) -> Option<String> {
        self.shared.lost.as_ref()?.lock().ok()?.clone()
    }

    /// With the driver's reason for a loss, where it gave one.
    fn told<T>(&self, result: Result<T>) -> Result<T> {
        match (self.why_lost(), result) {
            (Some(detail), Ok(_) | Err(Error::DeviceLost { .. })) => Err(Error::DeviceLost { detail }),
            (_, result) => result,
        }
    }
}

/// A function of the host.
struct Flush(Box<dyn FlushFn>);

/// What [`Gpu::flush_before_submit`] takes.
trait FlushFn: Fn() + WasmNotSendSync {}

impl<F: Fn() + WasmNotSendSync> FlushFn for F {}

impl std::fmt::Debug for Flush {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Flush")
    }
}

/// The error for an adapter and a device that are not of one card.
fn mixed(adapter: Option<&wgpu::Adapter>, device: &wgpu::Device) -> Option<Error> {
    let (info, of_device) = (adapter?.get_info(), device.adapter_info());
    if (&info.name, info.backend) == (&of_device.name, of_device.backend) {
        return None;
    }
    let detail = format!("the device is of {}, the adapter is {}", of_device.name, info.name);
    Some(Error::ForeignResource { what: "the adapter that the `Gpu` was made on", detail })
}

impl Sealed for Gpu {}

impl Device for Gpu {
    type Buffer = wgpu::Buffer;
    type Recorder<'r> = wgpu::ComputePass<'r>;

    fn name(&self) -> String {
        self.describe()
    }

    fn id(&self) -> u64 {
        self.shared.id
    }

    fn ready(&self) -> Result<()> {
        self.shared.mixed.clone().map_or(Ok(()), Err)
    }

    fn buffer(&self, bytes: u64) -> Result<wgpu::Buffer> {
        self.ready()?;
        let limit = self.caps().max_buffer_bytes;
        if bytes > limit {
            let cure = "split it into several buffers, or make the device with `wanted`'s limits";
            return Err(Error::Limit { what: "max_buffer_size", need: bytes, limit, cure });
        }
        let made = scoped(self.device(), "a buffer", || {
            self.device().create_buffer(&wgpu::BufferDescriptor {
                label: None,
                size: bytes.checked_next_multiple_of(4).unwrap_or(bytes).max(4),
                usage: wgpu::BufferUsages::STORAGE
                    | wgpu::BufferUsages::COPY_DST
                    | wgpu::BufferUsages::COPY_SRC,
                mapped_at_creation: false,
            })
        });
        self.told(made)
    }

    fn upload(&self, buffer: &wgpu::Buffer, offset: u64, bytes: &[u8]) -> Result<()> {
        check_range(offset, bytes.len() as u64, buffer)?;
        check_usage("the buffer to upload to", buffer, wgpu::BufferUsages::COPY_DST, "COPY_DST")?;
        self.flush_hosts();
        let written = hosts(self.device(), "an upload", || self.queue().write_buffer(buffer, offset, bytes));
        self.told(written)
    }

    #[cfg(not(target_arch = "wasm32"))]
    fn download(&self, buffer: &wgpu::Buffer, bytes: u64) -> Result<Vec<u8>> {
        self.check_lost()?;
        self.flush_hosts();
        let bytes = pollster::block_on(super::read(self.device(), self.queue(), buffer, bytes))?;
        self.check_lost().map(|()| bytes)
    }

    #[cfg(target_arch = "wasm32")]
    fn download(&self, _: &wgpu::Buffer, _: u64) -> Result<Vec<u8>> {
        Err(Error::Waits { what: "download", cure: "await `gpu::read`" })
    }

    fn submit(&self, record: impl FnOnce(wgpu::ComputePass<'_>) -> Result<()>) -> Result<()> {
        self.flush_hosts();
        // A buffer of a binding may have been destroyed or mapped since it was bound, which wgpu tells here.
        let submitted = scoped(self.device(), "what a run uses", || {
            let mut encoder = self.device().create_command_encoder(&Default::default());
            record(encoder.begin_compute_pass(&Default::default()))?;
            self.queue().submit([encoder.finish()]);
            Ok(())
        });
        self.told(submitted)?
    }

    fn shares_buffers(&self) -> bool {
        self.shared.shared_buffers
    }

    fn largest_binding(&self) -> u64 {
        self.caps().max_binding_bytes.min(self.caps().max_buffer_bytes)
    }

    fn size(buffer: &wgpu::Buffer) -> u64 {
        buffer.size()
    }

    fn offset(a: &wgpu::Buffer, b: &wgpu::Buffer) -> Option<i64> {
        (a == b).then_some(0)
    }
}

impl<O: Op> Compiled<O, Gpu>
where
    Gpu: Kernel<O>,
{
    /// Records one layer in a compute pass of its own. Creates nothing; the host submits.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`], before anything is recorded.
    pub fn record(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        step: &Step<O, Gpu>,
        binding: &Binding<O, Gpu>,
    ) -> Result<()> {
        self.check(step, binding)?;
        let descriptor = wgpu::ComputePassDescriptor { label: Some(O::NAME), timestamp_writes: None };
        self.record_on(&mut encoder.begin_compute_pass(&descriptor), step, binding)
    }
}
