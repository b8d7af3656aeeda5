//! The decode op: split, then merge.

use std::sync::atomic::{AtomicU64, Ordering};

use super::args::{Args, Copying, code};
use super::buffer::Buffer;
use super::driver::{Cuda, Kernel};
use super::ladder::{self, Body, Compiled, ROWS, Row};
use super::step::Step;
use super::tensor_map::{MOST_STRIDE, TensorMap};
use crate::layer::{Layer, kernel_scales, no_aliases};
use crate::plan::{Plan, Tiling, check_plan};
use crate::tables::{Capacity, PageTable};
use crate::{Dtype, Error, MlaSpec, Result};

/// Choices of a decode that have a default.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Forces a row of the ladder by name.
    pub variant: Option<String>,
    /// Query tokens of a sequence that the decode is made for, such as 2 with one speculative token; 0 is 1. Other lengths stay right.
    pub query_tokens: u32,
    /// Page lists are written on the card ([`PageTable::Device`]): kernels clamp every page id to the pool.
    pub device_page_list: bool,
}

/// Paged, split-KV MLA decode for one [`MlaSpec`].
#[derive(Debug, Clone)]
pub struct Decode {
    cuda: Cuda,
    spec: MlaSpec,
    row: &'static Row,
    split: Split,
    /// For few rows, and for many: the same bits.
    merges: [Kernel; 2],
    device_page_list: bool,
    id: u64,
}

/// The kernel that takes one item a block, and its numbers.
#[derive(Debug, Clone)]
struct Split {
    compiled: Compiled,
    kernel: Kernel,
}

/// A layer's buffers, checked and held.
#[derive(Debug, Clone)]
pub struct Binding {
    owner: u64,
    max_queries: u32,
    args: Args,
    split: Split,
    /// Of a split that may copy by tensor.
    map: Option<TensorMap>,
    _buffers: [Buffer; 5],
}

/// Of `mla_merge_few`: columns of a block, and its threads.
const FEW: (u32, u32) = (32, 64);
/// Of `mla_merge_many`: columns of a warp, and threads of a block.
const MANY: (u32, u32) = (128, 256);
/// Blocks of the first for each multiprocessor, beyond which the other is faster.
const FEW_BLOCKS: u32 = 16;

impl Decode {
    /// Chooses a row and loads it.
    ///
    /// # Errors
    /// Those of [`MlaSpec::check`], [`Error::VariantUnavailable`] and [`Error::Cuda`].
    pub fn new(cuda: &Cuda, spec: &MlaSpec, options: &Options) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        spec.check()?;
        let unavailable = |name: &str, why: String| Error::VariantUnavailable { name: name.to_owned(), why };
        let query_rows = spec.shape.num_heads * options.query_tokens.clamp(1, 64);
        let row = match options.variant.as_deref() {
            None => ladder::choose(cuda.card(), spec, query_rows)
                .ok_or_else(|| unavailable("any", "no row runs on this card".into()))?,
            Some(name) => {
                let known = ROWS.map(|row| row.name).join(", ");
                let row = ROWS.iter().find(|row| row.name == name);
                row.ok_or_else(|| unavailable(name, format!("there is no such row; the rows are {known}")))?
            }
        };
        let split = Split::new(cuda, spec, row)?;
        let merges = match spec.shape.kv_lora_rank {
            512 => ["mla_merge_few_512", "mla_merge_many_512"],
            _ => ["mla_merge_few_256", "mla_merge_many_256"],
        };
        let merge = |entry| cuda.kernel(entry);
        let merges = [merge(merges[0])?, merge(merges[1])?];
        log::info!("mla.decode: row {}", row.name);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let device_page_list = options.device_page_list;
        Ok(Self { cuda: cuda.clone(), spec: *spec, row, split, merges, device_page_list, id })
    }

    /// What it was made for.
    pub fn spec(&self) -> &MlaSpec {
        &self.spec
    }

    /// The row that was chosen.
    pub fn variant(&self) -> &'static str {
        self.row.name
    }

    /// Whether that row rounds the softmax weights to 16 bits, as tensor cores take them.
    pub fn rounds_weights(&self) -> bool {
        self.row.on_matrices()
    }

    /// How the planner is to cut work for it.
    pub fn tiling(&self) -> Tiling {
        let card = self.cuda.card();
        // Blocks that run at a time on a multiprocessor, by shared memory and by registers, of which a thread may have 256.
        let Compiled { threads, shared_bytes, .. } = self.split.compiled;
        let by_shared = (card.shared_bytes + 1024) / (shared_bytes + 1024);
        let by_registers = 65536 / (256 * threads);
        let blocks = if self.row.on_matrices() { by_shared.min(by_registers) } else { 8 };
        let blocks = blocks.max(1);
        // Where an item begins, a box of a tile does.
        let tokens_per_block = match self.row.body {
            Body::Warpgroups { .. } => self.split.compiled.tokens,
            _ => 16,
        };
        Tiling {
            rows_per_tile: self.row.rows,
            tokens_per_block,
            target_items: card.multiprocessors * blocks,
            min_split_tokens: 64,
            // On an H200 the merge of a lone sequence waits where the split leaves it no room: a third of the multiprocessors, or the
            // second block of each (1 x 32768 of bf16: 18.6 us with 86 items, 21.5 with 128; 1 x 131072 of e4m3: 35.7 with 131, 40.9 with
            // 256). Beside `rows16_wgmma` there is room (1 x 131072: 45.8 with 86, 43.8 with 114).
            lone_items: match self.row.body {
                Body::Warpgroups { swapped: true, .. } => card.multiprocessors * 7 / 8,
                _ if blocks == 1 => card.multiprocessors * 2 / 3,
                _ => card.multiprocessors * blocks / 2,
            },
            // On an H200 80 to 160 tokens of a block alone. Where two share a multiprocessor, so much that 64 ragged sequences stay equal
            // shares: 96 us with 263 of them, 102 with 291 pieces.
            item_overhead_tokens: if blocks == 1 { 128 } else { 384 },
        }
    }

    /// A step with room for `capacity`; [`Capacity::default`] leaves it to the first `prepare`.
    ///
    /// # Errors
    /// [`Error::Limit`], [`Error::OutOfMemory`], [`Error::Cuda`].
    pub fn step(&self, capacity: Capacity) -> Result<Step> {
        Step::new(&self.cuda, &self.spec, self.id, self.device_page_list, capacity)
    }

    /// Checks a plan and its pages and uploads them. Allocates only where the step has to grow.
    ///
    /// # Errors
    /// Those of [`crate::write_tables`], [`Error::Limit`], [`Error::OutOfMemory`], [`Error::Cuda`] and [`Error::LayoutMismatch`];
    /// [`Error::Shape`] for a plan that this decode cannot run. The step then still holds what it held.
    pub fn prepare(&self, step: &mut Step, plan: &Plan, pages: PageTable<'_>) -> Result<()> {
        if step.owner != self.id {
            return Err(Error::LayoutMismatch { detail: "the step was made by another decode" });
        }
        if matches!(pages, PageTable::Device) && !self.device_page_list {
            let detail = "PageTable::Device needs a decode made with Options::device_page_list";
            return Err(Error::LayoutMismatch { detail });
        }
        check_plan(plan, &self.spec, self.row.rows)?;
        step.prepare(&self.cuda, &self.spec, plan, pages)
    }

    /// Checks and binds a layer for batches of at most `max_queries` query tokens.
    ///
    /// # Errors
    /// [`Error::Scale`], [`Error::Alignment`], [`Error::Shape`], [`Error::BufferTooSmall`], [`Error::Aliased`].
    pub fn bind(&self, max_queries: u32, layer: &Layer<&Buffer>) -> Result<Binding> {
        let spec = &self.spec;
        layer.check(spec, max_queries, Buffer::bytes)?;
        let (q_nope, mut q_pe) = layer.query.parts(spec.shape.kv_lora_rank);
        if spec.shape.qk_rope_head_dim == 0 {
            q_pe = q_nope;
        }
        let (kv, out, lse) = (layer.kv, layer.out, layer.lse);
        let inputs = [("q_nope", q_nope.buffer), ("q_pe", q_pe.buffer), ("kv", kv.buffer)];
        no_aliases(&inputs, &[("out", out.buffer), ("lse", lse.buffer)], Buffer::same_as)?;
        let (tokens, heads) = (u64::from(max_queries), u64::from(spec.shape.num_heads));
        let range = |view: &crate::View<&Buffer>, dim: u32, element: u64| {
            let first = view.buffer.ptr();
            first + view.offset * element..first + view.end(tokens, heads, dim.into()) * element
        };
        let (a, b) = (range(&out, spec.shape.kv_lora_rank, spec.out.bytes() as u64), range(&lse, 1, 4));
        if a.start < b.end && b.start < a.end {
            return Err(Error::Aliased { a: "out", b: "lse" });
        }

        let (logit_scale, out_scale, lse_scale) = kernel_scales(layer);
        let at = |buffer: &Buffer, offset: u64, dtype: Dtype| buffer.ptr() + offset * dtype.bytes() as u64;
        let kv_at = at(kv.buffer, kv.base(), spec.kv.dtype);
        let block_bytes = kv.block_stride * spec.kv.dtype.bytes() as u64;
        let (split, map, copies) = self.copies_of(kv_at, block_bytes)?;
        let tokens = split.compiled.tokens;
        let args = Args {
            q_nope: at(q_nope.buffer, q_nope.offset, spec.query),
            q_pe: at(q_pe.buffer, q_pe.offset, spec.query),
            kv: kv_at,
            out: at(out.buffer, out.offset, spec.out),
            lse: at(lse.buffer, lse.offset, Dtype::F32),
            q_nope_token_stride: q_nope.token_stride,
            q_nope_head_stride: q_nope.head_stride,
            q_pe_token_stride: q_pe.token_stride,
            q_pe_head_stride: q_pe.head_stride,
            kv_block_stride: kv.block_stride,
            out_token_stride: out.token_stride,
            out_head_stride: out.head_stride,
            lse_token_stride: lse.token_stride,
            lse_head_stride: lse.head_stride,
            logit_scale,
            out_scale,
            lse_scale,
            num_heads: spec.shape.num_heads,
            max_queries: max_queries.max(1),
            query_dtype: code(spec.query),
            out_dtype: code(spec.out),
            copies: copies as u32,
            page_size: spec.kv.page_size,
            num_pages: spec.kv.num_pages,
            tile_pages: tokens / spec.kv.page_size,
            tile_rest: tokens % spec.kv.page_size,
            clamp_pages: self.device_page_list.into(),
            multiprocessors: self.cuda.card().multiprocessors,
            ..Args::default()
        };
        let buffers = [q_nope.buffer, q_pe.buffer, kv.buffer, out.buffer, lse.buffer];
        Ok(Binding { owner: self.id, max_queries, args, split, map, _buffers: buffers.map(Buffer::clone) })
    }

    /// The kernel for the cache at an address, and how it copies.
    fn copies_of(&self, address: u64, block_bytes: u64) -> Result<(Split, Option<TensorMap>, Copying)> {
        let spec = &self.spec;
        let row_bytes = u64::from(spec.shape.row_elems()) * spec.kv.dtype.bytes() as u64;
        // Rows of e4m3 may begin between multiples of 16 bytes.
        let aligned = [address, row_bytes, block_bytes].iter().all(|bytes| bytes % 16 == 0);
        let chunks = if aligned { Copying::Chunks16 } else { Copying::Chunks8 };
        // A stride that a lone page has no use for may be anything.
        let boxes = aligned && block_bytes < MOST_STRIDE;
        let map = |tokens| TensorMap::of_cache(spec, address, block_bytes, tokens);
        Ok(match self.row.body {
            Body::TensorCopies { tokens, .. } if boxes => {
                (self.split.clone(), Some(map(tokens)?), Copying::Boxes)
            }
            Body::TensorCopies { otherwise, .. } => (Split::new(&self.cuda, spec, otherwise)?, None, chunks),
            Body::Warpgroups { tokens, .. } if boxes && spec.kv.page_size.is_multiple_of(tokens) => {
                (self.split.clone(), Some(map(tokens)?), Copying::Boxes)
            }
            Body::Warpgroups { .. } => (self.split.clone(), Some(TensorMap::none()), chunks),
            Body::Matrices | Body::Simple => (self.split.clone(), None, chunks),
        })
    }

    /// Whether a step and a binding can be recorded together.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`].
    pub fn check(&self, step: &Step, binding: &Binding) -> Result<()> {
        if step.owner != self.id || binding.owner != self.id {
            return Err(Error::LayoutMismatch { detail: "one of them was made by another decode" });
        }
        if step.num_queries > binding.max_queries {
            return Err(Error::LayoutMismatch { detail: "the step has more query tokens than the binding" });
        }
        Ok(())
    }

    /// Launches one layer's decode on the stream. Allocates nothing, waits for nothing, and may be captured in a graph.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`] and [`Error::Cuda`].
    pub fn record(&self, step: &Step, binding: &Binding) -> Result<()> {
        self.check(step, binding)?;
        if binding.max_queries == 0 {
            return Ok(());
        }
        // Every index of the kernels is bounded as src/gpu/decode.rs lists: `check_plan` and `write_tables` for what tables and page list
        // name, `KvView::check` and `Layer::check` for what that makes of the buffers, `bound_token` for a replay.
        let (tables, header) = (step.tables.ptr(), &step.header);
        let place = |words: u32| tables + u64::from(words) * 4;
        let args = Args {
            header: tables,
            items: place(header.items),
            queries: place(header.queries),
            merges: place(header.merges),
            merge_slots: place(header.merge_slots),
            pages: place(header.pages),
            partials: step.partials.ptr(),
            ..binding.args
        };
        let Split { compiled: Compiled { threads, shared_bytes, .. }, kernel } = &binding.split;
        let items = step.capacity.items;
        self.cuda.launch_with_map(kernel, items, *threads, *shared_bytes, &args, binding.map.as_ref())?;
        let units = |columns| {
            step.capacity.merges * self.spec.shape.num_heads * (self.spec.shape.kv_lora_rank / columns)
        };
        let [few, many] = &self.merges;
        if units(FEW.0) <= FEW_BLOCKS * self.cuda.card().multiprocessors {
            self.cuda.launch(few, units(FEW.0), FEW.1, 0, &args)
        } else {
            self.cuda.launch(many, units(MANY.0).div_ceil(MANY.1 / 32), MANY.1, 0, &args)
        }
    }
}

impl Split {
    /// Loads it, once for each of a row's kernels.
    fn new(cuda: &Cuda, spec: &MlaSpec, row: &Row) -> Result<Self> {
        let unavailable = |why: String| Error::VariantUnavailable { name: row.name.to_owned(), why };
        row.runs_on(cuda.card(), spec).map_err(unavailable)?;
        let compiled = row.compiled(spec).map_err(unavailable)?;
        let kernel = cuda.load(compiled.entry)?;
        kernel.allow_shared(compiled.shared_bytes)?;
        Ok(Self { compiled, kernel })
    }
}
