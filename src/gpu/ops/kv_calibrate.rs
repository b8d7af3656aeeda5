//! `kv_calibrate`: what an e4m3 cache would make of new rows, counted on the device.

use crate::gpu::kernels::formats::Format;
use std::ops::Range;

use super::table::Table;
use crate::gpu::Gpu;
use crate::gpu::buffer::{Window, stride};
use crate::gpu::kernels::compose::Source;
use crate::gpu::kernels::{GROUP, unrolled};
use crate::gpu::pipelines::{Access, Pipe, dispatch, group_with_params};
use crate::ops::variants::only;
use crate::ops::{CalibrationStats, Choice, Kernel, KvCalibrate, KvCalibrateArgs, OpOptions};
use crate::view::{View, check_tokens};
use crate::{Error, Result};

/// Tokens of which an invocation looks at a quad each, so that enough loads are in flight.
const TOKENS_PER_LANE: u32 = 8;

/// `CalibrateParams` of the shader.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Params {
    kv_c_base_quads: u32,
    kv_c_stride_quads: u32,
    k_pe_base_quads: u32,
    k_pe_stride_quads: u32,
    max_tokens: u32,
    limit_bits: u32,
    reserved: [u32; 2],
}

impl Kernel<KvCalibrate> for Gpu {
    type Kernels = Pipe;
    type Step = Table;
    /// `None` where there is room for no token.
    type Binding = Option<wgpu::BindGroup>;

    fn kernel_compile(&self, spec: &KvCalibrate, options: &OpOptions) -> Result<(Pipe, (), Choice)> {
        let labels = ["mla.kv_calibrate.step", "mla.kv_calibrate.layer"];
        let entries = [Access::Uniform, Access::Read, Access::Read, Access::Write];
        // Every index is in bounds, for every pair of table and binding:
        // - the table has two words (`Table`, which nothing else writes);
        // - token < max_tokens, by both `min`s in the shader: `prepare` may have been called again since `record`. `check_args`
        //   refuses rows that end past the buffer for max_tokens tokens, and `Window::of` binds up to there;
        // - quad < ROW_QUADS, split at LATENT_QUADS: without a rotary part `k_pe` is never read;
        // - `stats` has 8 words (`check_args`), and offsets in it are constants below 8.
        // All loops are unrolled; every workgroup variable is stored to before it is read.
        Ok((Pipe::new(self, labels, &entries, &source(spec))?, (), only(options)?))
    }

    fn kernel_step(&self, _: &KvCalibrate, _: &Pipe, (): ()) -> Result<Table> {
        Ok(Table::default())
    }

    fn kernel_prepare(
        &self,
        spec: &KvCalibrate,
        pipe: &Pipe,
        step: &mut Table,
        tokens: Range<u32>,
    ) -> Result<u32> {
        let (count, end) = check_tokens(&tokens)?;
        checked_tokens(spec, count)?;
        self.grid(items(spec, count))?;
        step.upload(self, &pipe.step, count, [tokens.start])?;
        Ok(end)
    }

    fn kernel_bind(
        &self,
        spec: &KvCalibrate,
        pipe: &Pipe,
        args: &KvCalibrateArgs<&wgpu::Buffer>,
        max_tokens: u32,
    ) -> Result<Option<wgpu::BindGroup>> {
        checked_tokens(spec, max_tokens)?;
        if max_tokens == 0 {
            return Ok(None);
        }
        let (shape, bytes, k_pe) = (&spec.shape, spec.input.bytes(), args.rotary(spec));
        let k_pe_dim = if shape.qk_rope_head_dim > 0 { shape.qk_rope_head_dim } else { shape.kv_lora_rank };
        let rows = [
            Window::of(self, "kv_c", &args.kv_c, [max_tokens, 1, shape.kv_lora_rank], bytes)?,
            Window::of(self, "k_pe", &k_pe, [max_tokens, 1, k_pe_dim], bytes)?,
        ];
        let stats = Window::new(self, "stats", args.stats, 0..CalibrationStats::BYTES)?;
        let token_stride = |view: &View<_>| stride(max_tokens, view.token_stride, 4);
        let params = Params {
            kv_c_base_quads: rows[0].at(args.kv_c.offset, bytes, 4),
            kv_c_stride_quads: token_stride(&args.kv_c),
            k_pe_base_quads: rows[1].at(k_pe.offset, bytes, 4),
            k_pe_stride_quads: token_stride(&k_pe),
            max_tokens,
            limit_bits: args.limit().to_bits(),
            reserved: [0; 2],
        };
        let resources = [rows[0].resource(), rows[1].resource(), stats.resource()];
        group_with_params(self, "mla.kv_calibrate.layer", &pipe.layer, &params, resources).map(Some)
    }

    fn kernel_record(
        &self,
        spec: &KvCalibrate,
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

fn items(spec: &KvCalibrate, tokens: u32) -> u64 {
    u64::from(tokens.div_ceil(TOKENS_PER_LANE)) * u64::from(spec.shape.row_elems() / 4)
}

/// The shader numbers its items in a `u32`.
fn checked_tokens(spec: &KvCalibrate, tokens: u32) -> Result<()> {
    let (need, limit) = (u64::from(tokens), u64::from(u32::MAX / spec.shape.row_elems()));
    if need > limit {
        let cure = "calibrate in several steps";
        return Err(Error::Limit { what: "tokens of a calibration", need, limit, cure });
    }
    Ok(())
}

fn source(spec: &KvCalibrate) -> Source {
    let consts = [
        ("GROUP", GROUP),
        ("LATENT_QUADS", spec.shape.kv_lora_rank / 4),
        ("ROW_QUADS", spec.shape.row_elems() / 4),
        ("TOKENS_PER_LANE", TOKENS_PER_LANE),
    ];
    let files = [
        include_str!("../../../shaders/lib/grid.wgsl"),
        include_str!("../../../shaders/lib/round.wgsl"),
        Format::of(spec.input).element,
        include_str!("../../../shaders/kv_calibrate.wgsl"),
    ];
    unrolled("kv_calibrate", spec.input.name(), &consts, &[], &files)
}

#[cfg(test)]
pub(super) fn every_source() -> Vec<Source> {
    use crate::Dtype;
    let shape = crate::MlaShape { num_heads: 1, kv_lora_rank: 512, qk_rope_head_dim: 64 };
    [Dtype::F32, Dtype::F16, Dtype::Bf16].map(|input| source(&KvCalibrate { shape, input })).into()
}

#[cfg(test)]
pub(super) fn host_layout() -> super::HostLayout {
    super::layout_of!("CalibrateParams", Params: kv_c_base_quads, kv_c_stride_quads, k_pe_base_quads, k_pe_stride_quads, max_tokens, limit_bits; reserved: reserved_0, reserved_1)
}
