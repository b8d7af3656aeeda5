//! The CPU backend: the same tables and numerics as on a GPU, in f32 on all cores, for machines with no adapter.
//!
//! ```
//! use wgpu_mla::{Batch, Capacity, Device, Dtype, KvSpec, MlaDecodeArgs, MlaShape, MlaDecode, PageTable, Plan, SplitPolicy};
//!
//! # fn main() -> wgpu_mla::Result<()> {
//! let cpu = wgpu_mla::cpu::Cpu::new();
//! let spec = MlaDecode {
//!     shape: MlaShape { num_heads: 16, kv_lora_rank: 512, qk_rope_head_dim: 64 },
//!     kv: KvSpec { layout: Dtype::F16.into(), page_size: 64, num_pages: 4 },
//!     query: Dtype::F16,
//!     out: Dtype::F32,
//! };
//! let (q, kv) = (cpu.buffer(16 * 576 * 2)?, cpu.buffer(4 * 64 * 576 * 2)?);
//! let (out, lse) = (cpu.buffer(16 * 512 * 4)?, cpu.buffer(16 * 4)?);
//!
//! let mla = cpu.compile(spec)?;
//! let plan = Plan::new(&spec, &mla.tiling(), &Batch::new(&[100], &[0, 1]), SplitPolicy::Auto)?;
//! let mut step = mla.step(Capacity::of(&plan))?;
//! mla.prepare(&mut step, (&plan, PageTable::Dense { block_table: &[2, 0], max_pages: 2 }))?;
//! let layer = mla.bind(&MlaDecodeArgs::dense(&spec, &q, &kv, &out, &lse, 0.135), 1)?;
//! mla.run(&step, &layer)?;
//! # let lse = f32::from_le_bytes(cpu.download(&lse, 4)?.try_into().unwrap());
//! # assert!((lse - 100f32.ln()).abs() < 1e-5);
//! # Ok(())
//! # }
//! ```

mod buffer;
mod decode;
mod device;
mod kernels;
mod layer;
mod ops;
mod pool;

pub use buffer::Buffer;
pub use device::Cpu;
pub use ops::BatchTables;
