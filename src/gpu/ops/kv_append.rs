//! `kv_append`: new rows into the paged cache, the field's `concat_and_cache_mla`.

use super::e4m3_scale::Scale;
use super::table::Table;
use crate::gpu::Gpu;
use crate::gpu::buffer::{Window, stride};
use crate::gpu::kernels::compose::Source;
use crate::gpu::kernels::formats::Format;
use crate::gpu::kernels::{GROUP, unrolled};
use crate::gpu::pipelines::{Access, Pipe, dispatch, group_with_params};
use crate::ops::variants::only;
use crate::ops::{Choice, Kernel, KvAppend, KvAppendArgs, OpOptions};
use crate::view::View;
use crate::{Error, Result};

/// Tokens of which an invocation converts a quad each, so that enough loads are in flight. Fastest on an H200.
const TOKENS_PER_LANE: u32 = 8;

/// `AppendParams` of the shader.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub(super) struct Params {
    scale: Scale,
    kv_base_quads: u32,
    kv_block_stride_quads: u32,
    kv_c_base_quads: u32,
    kv_c_stride_quads: u32,
    k_pe_base_quads: u32,
    k_pe_stride_quads: u32,
    max_tokens: u32,
    first_slot: u32,
    num_slots: u32,
    reserved: [u32; 3],
}

impl Kernel<KvAppend> for Gpu {
    type Kernels = Pipe;
    type Step = Table;
    /// `None` where there is room for no token.
    type Binding = Option<wgpu::BindGroup>;

    fn kernel_compile(&self, spec: &KvAppend, options: &OpOptions) -> Result<(Pipe, (), Choice)> {
        let labels = ["mla.kv_append.step", "mla.kv_append.layer"];
        let entries = [Access::Uniform, Access::Read, Access::Read, Access::Write];
        // Every index is in bounds, for every pair of table and binding:
        // - the table holds its count and as many slots (`Table`; besides it only `batch_slots` writes slots, and leaves the
        //   count), and the shader reads slots below that count only;
        // - token < max_tokens, by a `min` in the shader: `prepare` may have been called again since `record`. `check_args` refuses
        //   rows that end past the buffer for max_tokens tokens, and `Window::of` binds up to there;
        // - quad < ROW_QUADS, split at LATENT_QUADS: without a rotary part `k_pe` is never read;
        // - slot < num_slots is checked in the shader, so the page is one of the slab's, whose last `check_args` found inside the
        //   buffer (`KvView::check`).
        // All loops are unrolled.
        Ok((Pipe::new(self, labels, &entries, &source(spec))?, (), only(options)?))
    }

    fn kernel_step(&self, _: &KvAppend, _: &Pipe, _: u32) -> Result<Table> {
        Ok(Table::default())
    }

    fn kernel_prepare(
        &self,
        spec: &KvAppend,
        pipe: &Pipe,
        step: &mut Table,
        slot_mapping: &[i64],
    ) -> Result<u32> {
        let tokens = checked_tokens(spec, slot_mapping.len() as u64)?;
        self.grid(items(spec, tokens))?;
        step.upload(self, &pipe.step, tokens, spec.slots(slot_mapping)?)?;
        Ok(tokens)
    }

    fn kernel_bind(
        &self,
        spec: &KvAppend,
        pipe: &Pipe,
        args: &KvAppendArgs<&wgpu::Buffer>,
        max_tokens: u32,
    ) -> Result<Option<wgpu::BindGroup>> {
        checked_tokens(spec, max_tokens.into())?;
        if max_tokens == 0 {
            return Ok(None);
        }
        let (params, windows) = Params::new(self, spec, args, max_tokens)?;
        let resources = windows.map(|window| window.resource());
        group_with_params(self, "mla.kv_append.layer", &pipe.layer, &params, resources).map(Some)
    }

    fn kernel_record(
        &self,
        spec: &KvAppend,
        pipe: &Pipe,
        pass: &mut wgpu::ComputePass<'_>,
        step: &Table,
        binding: &Option<wgpu::BindGroup>,
    ) -> Result<()> {
        if let (Some(table), Some(layer), tokens @ 1..) = (step.group(), binding, step.count()) {
            dispatch(pass, &pipe.pipeline, &[table, layer], self.grid(items(spec, tokens))?);
        }
        Ok(())
    }
}

fn items(spec: &KvAppend, tokens: u32) -> u64 {
    u64::from(tokens.div_ceil(TOKENS_PER_LANE)) * u64::from(spec.shape.row_elems() / 4)
}

/// The shader numbers its items in a `u32`.
pub(super) fn checked_tokens(spec: &KvAppend, tokens: u64) -> Result<u32> {
    let limit = u64::from(u32::MAX / spec.shape.row_elems());
    if tokens > limit {
        let cure = "append in several steps";
        return Err(Error::Limit { what: "tokens of an append", need: tokens, limit, cure });
    }
    Ok(tokens as u32)
}

impl Params {
    /// One layer for up to `max_tokens` tokens, at least 1, and what is bound of `kv_c`, `k_pe` and the cache.
    pub(super) fn new<'a>(
        gpu: &Gpu,
        spec: &KvAppend,
        args: &KvAppendArgs<&'a wgpu::Buffer>,
        max_tokens: u32,
    ) -> Result<(Self, [Window<'a>; 3])> {
        let (shape, bytes, k_pe_view) = (&spec.shape, spec.input.bytes(), args.rotary(spec));
        let k_pe_dim = if shape.qk_rope_head_dim > 0 { shape.qk_rope_head_dim } else { shape.kv_lora_rank };
        let kv_c = Window::of(gpu, "kv_c", &args.kv_c, [max_tokens, 1, shape.kv_lora_rank], bytes)?;
        let k_pe = Window::of(gpu, "k_pe", &k_pe_view, [max_tokens, 1, k_pe_dim], bytes)?;
        let kv = Window::of_cache(gpu, &args.kv, &spec.kv, shape)?;
        let token_stride = |view: &View<_>| stride(max_tokens, view.token_stride, 4);
        let (first_slot, num_slots) = args.kv.slots(&spec.kv);
        let quad = 4 * spec.kv.dtype().bytes() as u64;
        let params = Self {
            scale: Scale::new(if spec.kv.dtype().is_fp8() { args.k_scale } else { 1.0 }),
            kv_base_quads: kv.at(args.kv.base(), 1, quad),
            kv_block_stride_quads: stride(spec.kv.num_pages, args.kv.block_stride, quad),
            kv_c_base_quads: kv_c.at(args.kv_c.offset, bytes, 4),
            kv_c_stride_quads: token_stride(&args.kv_c),
            k_pe_base_quads: k_pe.at(k_pe_view.offset, bytes, 4),
            k_pe_stride_quads: token_stride(&k_pe_view),
            max_tokens,
            first_slot,
            num_slots,
            reserved: [0; 3],
        };
        Ok((params, [kv_c, k_pe, kv]))
    }
}

/// How new rows are read, converted and placed.
pub(super) fn convert_libs(spec: &KvAppend) -> [&'static str; 5] {
    let convert = if spec.input == spec.kv.dtype() {
        include_str!("../../../shaders/lib/convert_copy.wgsl")
    } else {
        include_str!("../../../shaders/lib/convert_round.wgsl")
    };
    [
        include_str!("../../../shaders/lib/round.wgsl"),
        Format::of(spec.input).element,
        Format::of(spec.kv.dtype()).out,
        convert,
        include_str!("../../../shaders/lib/append.wgsl"),
    ]
}

fn source(spec: &KvAppend) -> Source {
    let consts = [
        ("GROUP", GROUP),
        ("PAGE_SIZE", spec.kv.page_size),
        ("LATENT_QUADS", spec.shape.kv_lora_rank / 4),
        ("ROW_QUADS", spec.shape.row_elems() / 4),
        ("TOKENS_PER_LANE", TOKENS_PER_LANE),
    ];
    let mut files = vec![include_str!("../../../shaders/lib/grid.wgsl")];
    files.extend(convert_libs(spec));
    files.push(include_str!("../../../shaders/kv_append.wgsl"));
    unrolled("kv_append", &format!("from_{}.{}", spec.input, spec.kv.dtype()), &consts, &[], &files)
}

#[cfg(test)]
pub(super) fn every_source() -> Vec<Source> {
    use crate::Dtype;
    let shape = crate::MlaShape { num_heads: 1, kv_lora_rank: 512, qk_rope_head_dim: 64 };
    let kv = |dtype: Dtype| crate::KvSpec { layout: dtype.into(), page_size: 48, num_pages: 7 };
    let inputs = [Dtype::F32, Dtype::F16, Dtype::Bf16];
    let spec = |input| Dtype::ALL.map(|dtype| KvAppend { shape, kv: kv(dtype), input });
    inputs.into_iter().flat_map(spec).map(|spec| source(&spec)).collect()
}

#[cfg(test)]
pub(super) fn host_layout() -> super::HostLayout {
    super::layout_of!("AppendParams", Params: scale, kv_base_quads, kv_block_stride_quads, kv_c_base_quads, kv_c_stride_quads, k_pe_base_quads, k_pe_stride_quads, max_tokens, first_slot, num_slots; reserved: reserved_0, reserved_1, reserved_2)
}
