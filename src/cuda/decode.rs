//! The decode: split, then merge.

mod args;
mod bodies;
mod grids;
mod inputs;
mod step;
mod variants;

use args::{Args, Copying};
use bodies::Boxes;
use grids::{FEW_THREADS, MANY_THREADS, MergeBlocks, merge_blocks};
use step::Tables;
use variants::{Compiled, Kernel as Chosen, Tile, VARIANTS};

/// The names of the variants, in dispatch order.
pub fn decode_variants() -> impl Iterator<Item = &'static str> {
    VARIANTS.iter().map(|variant| variant.name)
}

use super::kernels::{MOST_STRIDE, TensorMap, address};
use super::{Buffer, Cuda, Function};
use crate::base::dtype::Dtype;
use crate::base::error::Result;
use crate::cache::KvSpec;
use crate::cache::decode_spec::MlaDecode;
use crate::cuda::formats::code;
use crate::cuda::ops::Divisor;
use crate::ops::variants::{candidates, choose};
use crate::ops::{
    Candidate, Choice, DecodeInputs, DecodeOptions, DecodeRequest, Device, Kernel, MlaDecodeArgs,
};
use crate::plan::tables::{Capacity, PageTable};
use crate::plan::{Plan, Slabbed, Tiling, check_plan};

/// The kernels of a decode.
#[derive(Debug)]
pub struct Functions {
    tile: &'static Tile,
    split: Split,
    /// The merge for few rows and the one for many, which give the same bits.
    merges: [Function; 2],
    device_page_list: bool,
    inputs: DecodeInputs,
}

/// The kernel that takes one item a block, and its numbers.
#[derive(Debug, Clone)]
struct Split {
    compiled: Compiled,
    kernel: Function,
}

/// A layer's buffers, with the cache of each slab.
#[derive(Debug)]
pub struct Layer {
    max_queries: u32,
    slabs: Vec<Bound>,
    slab_pages: u32,
}

/// A layer's buffers, held.
#[derive(Debug)]
struct Bound {
    args: Args,
    split: Split,
    /// The tensor map of the cache, for a variant that uses TMA.
    map: Option<TensorMap>,
    buffers: Vec<Buffer>,
}

impl Kernel<MlaDecode> for Cuda {
    type Kernels = Functions;
    type Step = Slabbed<Tables>;
    type Binding = Layer;

    const SERVES_RECORDS: bool = true;

    fn kernel_variants(&self, spec: &MlaDecode) -> Vec<Candidate> {
        candidates(VARIANTS, self.card(), &DecodeRequest::one_token(spec))
    }

    fn kernel_compile(
        &self,
        spec: &MlaDecode,
        options: &DecodeOptions,
    ) -> Result<(Functions, Tiling, Choice)> {
        let inputs = DecodeInputs::new(options)?;
        let request = DecodeRequest::new(spec, options);
        let (chosen, choice) = choose(VARIANTS, self.card(), &request, options.variant.as_deref())?;
        let tiling = options.tiling.unwrap_or(tiling(self, &chosen));
        let merges = match spec.shape.kv_lora_rank {
            512 => ["mla_merge_few_512", "mla_merge_many_512"],
            _ => ["mla_merge_few_256", "mla_merge_many_256"],
        };
        let merge = |entry| self.kernel(entry);
        let functions = Functions {
            tile: chosen.tile,
            split: Split::new(self, chosen.compiled)?,
            merges: [merge(merges[0])?, merge(merges[1])?],
            device_page_list: options.device_page_list,
            inputs,
        };
        Ok((functions, tiling, choice))
    }

    fn kernel_step(
        &self,
        spec: &MlaDecode,
        kernels: &Functions,
        capacity: Capacity,
    ) -> Result<Slabbed<Tables>> {
        Tables::new(self, spec, kernels.device_page_list, capacity).map(Slabbed::new)
    }

    fn kernel_capacity(step: &Slabbed<Tables>) -> Capacity {
        step.own.capacity
    }

    fn recording_key(step: &Slabbed<Tables>) -> u64 {
        step::form(step)
    }

    fn kernel_prepare(
        &self,
        spec: &MlaDecode,
        kernels: &Functions,
        step: &mut Slabbed<Tables>,
        (plan, pages): (&Plan, PageTable<'_>),
    ) -> Result<u32> {
        kernels.inputs.check_plan(plan, pages)?;
        pages.check_device(kernels.device_page_list, plan)?;
        check_plan(plan, spec, pages, kernels.tile.rows)?;
        step::prepare(step, self, spec, (plan, pages))?;
        Ok(plan.num_queries)
    }

    fn kernel_bind(
        &self,
        spec: &MlaDecode,
        kernels: &Functions,
        args: &MlaDecodeArgs<&Buffer>,
        max_queries: u32,
    ) -> Result<Layer> {
        kernels.inputs.check_args(spec, args, max_queries, Self::size)?;
        let bind = |args| self.bind_decode(spec, kernels, &args, max_queries);
        let slabs = args.each_slab().map(bind).collect::<Result<_>>()?;
        Ok(Layer { max_queries, slabs, slab_pages: args.kv.slabs.slab_pages() })
    }

    fn kernel_record(
        &self,
        spec: &MlaDecode,
        kernels: &Functions,
        (): &mut (),
        step: &Slabbed<Tables>,
        layer: &Layer,
    ) -> Result<()> {
        step.check(layer.slab_pages)?;
        if layer.max_queries == 0 {
            return Ok(());
        }
        // Another thread's launches of this step would write its partial results before the merge reads them.
        let _turn = self.turn();
        for (bound, tables) in layer.slabs.iter().zip(step.each()) {
            self.launch_split(bound, tables, &step.own.partials)?;
        }
        layer.slabs.first().map_or(Ok(()), |bound| self.launch_merge(spec, kernels, bound, &step.own))
    }
}

impl Cuda {
    /// Binds the one slab that the arguments have.
    fn bind_decode(
        &self,
        spec: &MlaDecode,
        kernels: &Functions,
        args: &MlaDecodeArgs<&Buffer>,
        max_queries: u32,
    ) -> Result<Bound> {
        let num_pages = args.kv.pages(&spec.kv).len() as u32;
        let slots = args.kv.slots(&spec.kv);
        let spec = &MlaDecode { kv: KvSpec { num_pages, ..spec.kv }, ..*spec };
        let [q_nope, q_pe] = args.query_parts(spec);
        let (kv, out, lse) = (&args.kv, args.out, args.lse);
        let (logit_scale, out_scale, lse_scale) = args.kernel_scales();
        let at = |buffer, offset, dtype: Dtype| address(buffer, offset, dtype.bytes());
        let kv_at = address(kv.buffer, kv.base(), 1);
        // The stride of a single page may be anything.
        let (split, map, copies) = kernels.copies_of(self, spec, kv_at, kv.block_stride)?;
        let (tokens, page_size) = (split.compiled.tokens, spec.kv.page_size);
        let lists = inputs::Lists::new(args.indices.as_ref(), max_queries, kernels.inputs.topk)?;
        let (first_slot, num_slots) = slots;
        let sinks = args.attn_sink.as_deref().map(|sinks| inputs::upload_sinks(self, sinks)).transpose()?;
        let bound = Args {
            q_nope: at(q_nope.buffer, q_nope.offset, spec.query),
            q_pe: at(q_pe.buffer, q_pe.offset, spec.query),
            kv: kv_at,
            out: at(out.buffer, out.offset, spec.out),
            lse: at(lse.buffer, lse.offset, Dtype::F32),
            q_nope_token_stride: q_nope.token_stride,
            q_nope_head_stride: q_nope.head_stride,
            q_pe_token_stride: q_pe.token_stride,
            q_pe_head_stride: q_pe.head_stride,
            kv_block_stride: kv.block_stride / spec.kv.dtype().bytes() as u64,
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
            page_size,
            num_pages: spec.kv.num_pages,
            tile_pages: if lists.is_listed { tokens } else { tokens / page_size },
            tile_rest: if lists.is_listed { 0 } else { tokens % page_size },
            clamp_pages: kernels.device_page_list.into(),
            multiprocessors: self.card().multiprocessors,
            pages: lists.slots,
            topk_lengths: lists.lengths,
            topk_length_stride: lists.length_stride,
            sinks: sinks.as_ref().map_or(0, Buffer::ptr),
            is_listed: lists.is_listed.into(),
            list_stride: lists.stride,
            first_slot,
            num_slots,
            by_page_size: Divisor::new(page_size),
            ..Args::default()
        };
        let mut buffers: Vec<_> =
            [q_nope.buffer, q_pe.buffer, kv.buffer, out.buffer, lse.buffer].map(Buffer::clone).into();
        buffers.extend(lists.buffers);
        buffers.extend(sinks);
        Ok(Bound { args: bound, split, map, buffers })
    }

    fn launch_split(&self, layer: &Bound, step: &Tables, partials: &Buffer) -> Result<()> {
        // bounds: mla_decode
        let args = layer.with_tables(step, partials);
        let Split { compiled: Compiled { threads, shared_bytes, .. }, kernel } = &layer.split;
        let items = step.capacity.items;
        let held = layer.buffers.iter().chain([&step.tables, partials]);
        self.launch_with_maps(kernel, items, *threads, *shared_bytes, &args, layer.map.as_slice(), held)
    }

    fn launch_merge(
        &self,
        spec: &MlaDecode,
        kernels: &Functions,
        layer: &Bound,
        step: &Tables,
    ) -> Result<()> {
        let args = layer.with_tables(step, &step.partials);
        let held = || layer.buffers.iter().chain([&step.tables, &step.partials]);
        let [few, many] = &kernels.merges;
        match merge_blocks(spec, step.capacity.merges, self.card().multiprocessors)? {
            MergeBlocks::Few(blocks) => self.launch(few, blocks, FEW_THREADS, 0, &args, held()),
            MergeBlocks::Many(blocks) => self.launch(many, blocks, MANY_THREADS, 0, &args, held()),
        }
    }
}

impl Bound {
    fn with_tables(&self, step: &Tables, partials: &Buffer) -> Args {
        let (tables, header) = (step.tables.ptr(), &step.header);
        let at = |words: u32| tables + u64::from(words) * 4;
        Args {
            header: tables,
            items: at(header.items),
            queries: at(header.queries),
            merges: at(header.merges),
            merge_partials: at(header.merge_partials),
            pages: if self.args.is_listed == 0 { at(header.pages) } else { self.args.pages },
            partials: partials.ptr(),
            ..self.args
        }
    }
}

/// The tiling of a variant, for the planner.
fn tiling(cuda: &Cuda, kernel: &Chosen) -> Tiling {
    let (card, body) = (cuda.card(), &kernel.tile.body);
    // Blocks that run at a time on a multiprocessor, by shared memory and by registers, of which a thread may have 256.
    let Compiled { threads, shared_bytes, .. } = kernel.compiled;
    let by_shared = (card.shared_bytes + 1024) / (shared_bytes + 1024);
    let by_registers = 65536 / (256 * threads);
    let blocks = if body.tensor_cores { by_shared.min(by_registers) } else { 8 };
    let blocks = blocks.max(1);
    // Where an item begins, a box of a tile does.
    let tokens_per_block = if body.begins_at_tiles { kernel.compiled.tokens } else { 16 };
    Tiling {
        rows_per_tile: kernel.tile.rows,
        tokens_per_block,
        target_items: card.multiprocessors * blocks,
        min_split_tokens: 64,
        // On an H200 the merge of a single sequence waits where the split leaves it no room: a third of the multiprocessors, or the
        // second block of each (1 x 32768 of bf16: 18.6 us with 86 items, 21.5 with 128; 1 x 131072 of e4m3: 35.7 with 131, 40.9 with
        // 256). Beside `wgmma_swap_ab_n16` there is room (1 x 131072: 45.8 with 86, 43.8 with 114).
        single_sequence_items: match blocks {
            _ if body.leaves_room => card.multiprocessors * 7 / 8,
            1 => card.multiprocessors * 2 / 3,
            _ => card.multiprocessors * blocks / 2,
        },
        // An H200 attended 80 to 160 tokens in the overhead of an item where a block has a multiprocessor alone. Where two blocks share
        // one, the overhead is set so high that 64 ragged sequences are cut into equal shares: 263 of them take 96 us, 291 pieces 102.
        item_overhead_tokens: if blocks == 1 { 128 } else { 384 },
    }
}

impl Cuda {
    /// Whether a variant on tensor cores is selected for a spec.
    pub(crate) fn has_tensor_cores_for(&self, spec: &MlaDecode) -> bool {
        let choice = choose(VARIANTS, self.card(), &DecodeRequest::one_token(spec), None);
        choice.is_ok_and(|(_, choice)| choice.tensor_cores)
    }
}

impl Functions {
    /// The kernel of a variant with equally large tiles, for a binding whose cache this one cannot copy.
    fn instead(&self, cuda: &Cuda, spec: &MlaDecode, variant: &str) -> Result<Split> {
        let request = DecodeRequest::one_token(spec);
        let (kernel, _) = choose(VARIANTS, cuda.card(), &request, Some(variant))?;
        debug_assert_eq!(kernel.tile.rows, self.tile.rows);
        Split::new(cuda, kernel.compiled)
    }

    /// The kernel for the cache at an address, and how it copies.
    fn copies_of(
        &self,
        cuda: &Cuda,
        spec: &MlaDecode,
        address: u64,
        block_bytes: u64,
    ) -> Result<(Split, Option<TensorMap>, Copying)> {
        cuda.make_current("to describe an array by a tensor map")?;
        let row_bytes = spec.kv.token(&spec.shape).bytes;
        // Rows of e4m3 may begin between multiples of 16 bytes.
        let aligned = [address, row_bytes, block_bytes].iter().all(|bytes| bytes % 16 == 0);
        let chunks = if aligned { Copying::Chunks16 } else { Copying::Chunks8 };
        // A stride that a single page has no use for may be anything.
        let boxes = aligned && block_bytes < MOST_STRIDE;
        Ok(match self.tile.body.boxes {
            None => (self.split.clone(), None, chunks),
            // Boxes are of consecutive tokens, and of elements of one dtype.
            Some(_) if self.inputs.topk > 0 || !spec.kv.layout.is_plain() => {
                (self.split.clone(), Some(TensorMap::none()), chunks)
            }
            Some(of) if boxes && spec.kv.page_size.is_multiple_of((of.tokens)(spec)) => {
                let shape = (of.shape)(spec, self.split.compiled.tokens);
                let map = TensorMap::of_cache(spec, address, block_bytes, shape)?;
                (self.split.clone(), Some(map), Copying::Boxes)
            }
            Some(Boxes { otherwise: Some(variant), .. }) => {
                (self.instead(cuda, spec, variant)?, None, chunks)
            }
            Some(_) => (self.split.clone(), Some(TensorMap::none()), chunks),
        })
    }
}

impl Split {
    fn new(cuda: &Cuda, compiled: Compiled) -> Result<Self> {
        let kernel = cuda.load(compiled.entry)?;
        kernel.allow_shared(cuda, compiled.shared_bytes)?;
        Ok(Self { compiled, kernel })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use wgpu_mla_ptx::Entry;

    use super::*;
    use crate::cache::{KvLayout, KvSpec, MlaShape, SUPPORTED_DIMS};
    use crate::cuda::caps::Card;
    use crate::cuda::manifest_test::{compare, takes};

    /// The kernels of decodes that a spec can ask for, and the merges.
    pub(in crate::cuda) fn entries() -> Vec<&'static Entry> {
        let mut found: Vec<_> =
            ["mla_merge_few_256", "mla_merge_few_512", "mla_merge_many_256", "mla_merge_many_512"]
                .map(takes::<Args>)
                .into();
        for (kv_lora_rank, qk_rope_head_dim, _) in SUPPORTED_DIMS {
            let plain = Dtype::ALL.map(KvLayout::from);
            let records = match (kv_lora_rank, qk_rope_head_dim) {
                (512, 64) => Some(KvLayout::Ds656),
                (512, 0) => Some(KvLayout::Ds528),
                _ => None,
            };
            for layout in plain.into_iter().chain(records) {
                for query in Dtype::ALL {
                    let shape = MlaShape { num_heads: 16, kv_lora_rank, qk_rope_head_dim };
                    let kv = KvSpec { layout, page_size: 64, num_pages: 4 };
                    let spec = MlaDecode { shape, kv, query, out: Dtype::F32 };
                    let all = candidates(VARIANTS, &Card::H200, &DecodeRequest::one_token(&spec));
                    for name in all.iter().filter(|one| one.lacks.is_none()).map(|one| one.name) {
                        let (Chosen { tile, compiled }, _) =
                            choose(VARIANTS, &Card::H200, &DecodeRequest::one_token(&spec), Some(name))
                                .expect("it runs");
                        let entry = compiled.entry;
                        compare::<Args>(entry);
                        assert_eq!(entry.tensor_maps, u32::from(tile.body.boxes.is_some()), "{entry:?}");
                        assert_eq!(entry.tokens.is_some(), tile.body.tensor_cores, "{entry:?}");
                        found.push(entry);
                    }
                }
            }
        }
        found
    }
}
