//! `kv_calibrate`: the largest magnitude of new rows, and how many elements an e4m3 cache would saturate.

use super::single::{Kernels, Layer, SingleOp, uniform};
use crate::base::error::{Error, Result};
use crate::base::view::View;
use crate::gpu::Gpu;
use crate::gpu::buffer::{Window, stride};
use crate::gpu::kernels::compose::Source;
use crate::gpu::kernels::formats::Format;
use crate::gpu::kernels::{GROUP, unrolled};
use crate::gpu::pipelines::Access;
use crate::ops::{CalibrationStats, KvCalibrate, KvCalibrateArgs};

/// Tokens of which an invocation looks at a quad each, so that enough loads are in flight.
const TOKENS_PER_LANE: u32 = 8;

uniform! {
    "CalibrateParams":
    pub struct Params {
        kv_c_base_quads: u32,
        kv_c_stride_quads: u32,
        k_pe_base_quads: u32,
        k_pe_stride_quads: u32,
        max_tokens: u32,
        limit_bits: u32,
        reserved_0: u32,
        reserved_1: u32,
    }
}

impl SingleOp for KvCalibrate {
    type Params = Params;
    const LABELS: [&'static str; 2] = ["mla.kv_calibrate.step", "mla.kv_calibrate.layer"];
    const BUFFERS: &'static [Access] = &[Access::Read, Access::Read, Access::Write];

    fn sources(&self) -> Vec<Source> {
        // bounds: kv_calibrate
        vec![source(self)]
    }

    /// The shader numbers its items in a `u32`.
    fn check_count(&self, need: u64) -> Result<()> {
        let limit = u64::from(u32::MAX / self.shape.row_elems());
        if need > limit {
            let cure = "calibrate in several steps";
            return Err(Error::Limit { what: "tokens of a calibration", need, limit, cure });
        }
        Ok(())
    }

    fn items(&self, tokens: u32, _: Option<&Params>) -> u64 {
        u64::from(tokens.div_ceil(TOKENS_PER_LANE)) * u64::from(self.shape.row_elems() / 4)
    }

    fn bind(
        &self,
        gpu: &Gpu,
        kernels: &Kernels,
        args: &KvCalibrateArgs<&wgpu::Buffer>,
        max_tokens: u32,
    ) -> Result<Option<Layer<Params>>> {
        self.check_count(max_tokens.into())?;
        if max_tokens == 0 {
            return Ok(None);
        }
        let (shape, bytes, k_pe) = (&self.shape, self.input.bytes(), args.rotary(self));
        let k_pe_dim = if shape.qk_rope_head_dim > 0 { shape.qk_rope_head_dim } else { shape.kv_lora_rank };
        let rows = [
            Window::of(gpu, "kv_c", &args.kv_c, [max_tokens, 1, shape.kv_lora_rank], bytes)?,
            Window::of(gpu, "k_pe", &k_pe, [max_tokens, 1, k_pe_dim], bytes)?,
        ];
        let stats = Window::new(gpu, "stats", args.stats, 0..CalibrationStats::BYTES)?;
        let token_stride = |view: &View<_>| stride(max_tokens, view.token_stride, 4);
        let params = Params {
            kv_c_base_quads: rows[0].at(args.kv_c.offset, bytes, 4),
            kv_c_stride_quads: token_stride(&args.kv_c),
            k_pe_base_quads: rows[1].at(k_pe.offset, bytes, 4),
            k_pe_stride_quads: token_stride(&k_pe),
            max_tokens,
            limit_bits: args.limit().to_bits(),
            ..Params::default()
        };
        kernels.layer(gpu, params, [rows[0], rows[1], stats].map(Some), 0)
    }
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
