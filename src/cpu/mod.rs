//! Decode on host memory: the same verbs, tables and numerics as on a GPU, in f32 on all cores. For machines with
//! no adapter, and the last row of the ladder.
//!
//! ```
//! use wgpu_mla::{Backend, Batch, Capacity, Dtype, KvSpec, Layer, MlaShape, MlaSpec, PageTable, Plan, Policy};
//!
//! # fn main() -> wgpu_mla::Result<()> {
//! let cpu = wgpu_mla::cpu::Cpu::new();
//! let spec = MlaSpec {
//!     shape: MlaShape { num_heads: 16, kv_lora_rank: 512, qk_rope_head_dim: 64 },
//!     kv: KvSpec { dtype: Dtype::F16, page_size: 64, num_pages: 4 },
//!     query: Dtype::F16,
//!     out: Dtype::F32,
//! };
//! let (q, kv) = (cpu.buffer(16 * 576 * 2)?, cpu.buffer(4 * 64 * 576 * 2)?);
//! let (out, lse) = (cpu.buffer(16 * 512 * 4)?, cpu.buffer(16 * 4)?);
//!
//! let mla = cpu.decode(&spec, None)?;
//! let plan = Plan::new(&spec, &cpu.tiling(&mla), &Batch::new(&[100], &[0, 1]), Policy::Auto)?;
//! let mut step = cpu.step(&mla, Capacity::of(&plan))?;
//! cpu.prepare(&mla, &mut step, &plan, PageTable::Dense { block_table: &[2, 0], max_pages: 2 })?;
//! let layer = cpu.bind(&mla, 1, &Layer::dense(&spec, &q, &kv, &out, &lse, 0.135))?;
//! cpu.run(&mla, &step, &layer)?;
//! # let lse = f32::from_le_bytes(cpu.download(&lse, 4)?.try_into().unwrap());
//! # assert!((lse - 100f32.ln()).abs() < 1e-5);
//! # Ok(())
//! # }
//! ```

#[cfg(target_arch = "x86_64")]
mod avx2;
mod batch_tables;
mod bind;
mod buffer;
mod decode;
mod kernel;
mod lanes;
mod merge;
mod ops;
mod pool;
mod prefill;
mod project;
mod rope;
mod step;
mod widen;

pub use batch_tables::BatchTables;
pub use bind::Binding;
pub use buffer::Buffer;
pub use decode::Decode;
pub use step::Step;

use std::ops::Range;

use crate::backend::{Backend, sealed::Sealed};
use crate::layer::{KvView, Layer};
use crate::ops::{
    AppendLayer, AppendSpec, Calibrate, CalibrateSpec, CopySpec, Gather, GatherRange, GatherSpec,
    MergeStates, MergeStatesSpec, Project, ProjectSpec, Rope, RopeAppend, RopeAppendSpec, RopeSpec,
    StateSets,
};
use crate::plan::{Plan, Tiling};
use crate::prefill::{Prefill, PrefillSequence, PrefillSpec, PrefillVariant};
use crate::tables::{Capacity, PageTable};
use crate::{KvSpec, MlaSpec, Result};

/// The host's processor and memory, with a pool of threads that sleep between calls.
///
/// With [`crate::Policy::FixedTokens`] the number of threads changes no bit of a result; the automatic policy
/// makes more splits for more threads.
pub struct Cpu {
    pool: pool::Pool,
}

impl std::fmt::Debug for Cpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cpu").field("threads", &self.threads()).finish()
    }
}

impl Default for Cpu {
    fn default() -> Self {
        Self::new()
    }
}

impl Cpu {
    /// As many threads as the system says it can run at once.
    pub fn new() -> Self {
        Self::with_threads(std::thread::available_parallelism().map_or(1, usize::from))
    }

    /// This many threads, the calling one included; at least 1, and fewer where the system gives no more.
    pub fn with_threads(threads: usize) -> Self {
        Self { pool: pool::Pool::new(threads) }
    }

    /// Threads in use, the calling one included.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }
}

impl Sealed for Cpu {}

impl Backend for Cpu {
    type Buffer = Buffer;
    type Decode = Decode;
    type Step = Step;
    type Binding = Binding;

    fn name(&self) -> String {
        format!("CPU, {} threads", self.threads())
    }

    fn buffer(&self, bytes: u64) -> Result<Buffer> {
        Buffer::new(bytes)
    }

    fn upload(&self, buffer: &Buffer, offset: u64, bytes: &[u8]) -> Result<()> {
        buffer.upload(offset, bytes)
    }

    fn download(&self, buffer: &Buffer, bytes: u64) -> Result<Vec<u8>> {
        buffer.download(bytes)
    }

    fn variants(&self, _: &MlaSpec) -> Vec<&'static str> {
        kernel::VARIANTS.iter().filter(|variant| (variant.runs_here)()).map(|variant| variant.name).collect()
    }

    fn ladder(&self, _: &MlaSpec) -> Vec<(&'static str, Option<String>)> {
        let lacking = |runs: bool| (!runs).then(|| "the processor lacks its instructions".to_owned());
        kernel::VARIANTS.iter().map(|variant| (variant.name, lacking((variant.runs_here)()))).collect()
    }

    /// Its tiles hold several tokens of a sequence whatever they are made for.
    fn decode_for(&self, spec: &MlaSpec, variant: Option<&str>, _: u32) -> Result<Decode> {
        Decode::new(spec, variant)
    }

    fn rounds_weights(&self, _: &Decode) -> bool {
        false
    }

    fn tiling(&self, decode: &Decode) -> Tiling {
        decode.tiling(self.threads())
    }

    fn step(&self, decode: &Decode, capacity: Capacity) -> Result<Step> {
        Step::new(decode.spec, capacity, self.threads())
    }

    fn prepare(&self, decode: &Decode, step: &mut Step, plan: &Plan, pages: PageTable<'_>) -> Result<()> {
        step.prepare(decode, plan, pages)
    }

    fn bind(&self, decode: &Decode, max_queries: u32, layer: &Layer<&Buffer>) -> Result<Binding> {
        Binding::new(&decode.spec, max_queries, layer)
    }

    fn run(&self, decode: &Decode, step: &Step, binding: &Binding) -> Result<()> {
        decode.run(&self.pool, step, binding)
    }

    fn merge_attn_states(&self, spec: &MergeStatesSpec, args: &MergeStates<&Buffer>) -> Result<()> {
        ops::merge_attn_states(&self.pool, spec, args)
    }

    fn merge_states(&self, spec: &MergeStatesSpec, args: &StateSets<&Buffer>) -> Result<()> {
        ops::merge_states(&self.pool, spec, args)
    }

    fn kv_append(&self, spec: &AppendSpec, slot_mapping: &[i64], layer: &AppendLayer<&Buffer>) -> Result<()> {
        ops::kv_append(&self.pool, spec, slot_mapping, layer)
    }

    fn rope(&self, spec: &RopeSpec, args: &Rope<&Buffer>) -> Result<()> {
        rope::rope(&self.pool, spec, args)
    }

    fn rope_append(
        &self,
        spec: &RopeAppendSpec,
        slot_mapping: &[i64],
        args: &RopeAppend<&Buffer>,
    ) -> Result<()> {
        rope::rope_append(&self.pool, spec, slot_mapping, args)
    }

    fn kv_copy_pages(
        &self,
        kv: &KvSpec,
        row_elems: u32,
        copies: &[(u32, u32)],
        view: &KvView<&Buffer>,
    ) -> Result<()> {
        ops::kv_copy_pages(&CopySpec { kv: *kv, row_elems }, copies, view)
    }

    fn kv_gather(
        &self,
        spec: &GatherSpec,
        pages: PageTable<'_>,
        seq_lens: &[i32],
        ranges: &[GatherRange],
        args: &Gather<&Buffer>,
    ) -> Result<()> {
        ops::kv_gather(&self.pool, spec, pages, seq_lens, ranges, args)
    }

    fn project(&self, spec: &ProjectSpec, args: &Project<&Buffer>) -> Result<()> {
        project::project(&self.pool, spec, args)
    }

    fn prefill_variants(&self, _: &PrefillSpec) -> Vec<PrefillVariant> {
        let here = kernel::VARIANTS.iter().filter(|variant| (variant.runs_here)());
        here.map(|variant| PrefillVariant { name: variant.name, rounds_weights: false }).collect()
    }

    fn prefill_with(
        &self,
        spec: &PrefillSpec,
        variant: Option<&str>,
        sequences: &[PrefillSequence],
        args: &Prefill<&Buffer>,
    ) -> Result<()> {
        prefill::prefill(&self.pool, spec, decode::variant(variant)?, sequences, args)
    }

    fn kv_calibrate(
        &self,
        spec: &CalibrateSpec,
        tokens: Range<u32>,
        args: &Calibrate<&Buffer>,
    ) -> Result<()> {
        ops::kv_calibrate(&self.pool, spec, tokens, args)
    }
}
