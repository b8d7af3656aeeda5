//! `kv_gather`: tokens of the paged cache to rows of a contiguous workspace.

use super::e4m3_scale::Scale;
use super::single::{Kernels, Layer, SingleOp, uniform};
use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};
use crate::gpu::Gpu;
use crate::gpu::buffer::{Window, stride};
use crate::gpu::kernels::compose::Source;
use crate::gpu::kernels::formats::{Format, Record, slot_quads};
use crate::gpu::kernels::{GROUP, unrolled};
use crate::gpu::pipelines::Access;
use crate::ops::{KvGather, KvGatherArgs};

/// Tokens of which an invocation converts a quad each, so that enough loads are in flight.
const PLACES_PER_LANE: u32 = 8;

uniform! {
    "GatherParams":
    pub struct Params {
        scale: Scale,
        kv_base_quads: u32,
        kv_block_stride_quads: u32,
        out_base_quads: u32,
        out_stride_quads: u32,
        max_rows: u32,
        first_slot: u32,
        num_slots: u32,
        reserved_0: u32,
    }
}

impl SingleOp for KvGather {
    type Params = Params;
    const LABELS: [&'static str; 2] = ["mla.kv_gather.step", "mla.kv_gather.layer"];
    const BUFFERS: &'static [Access] = &[Access::Read, Access::Write];
    const SERVES_RECORDS: bool = true;

    fn sources(&self) -> Vec<Source> {
        // bounds: kv_gather
        vec![source(self)]
    }

    /// The shader counts items in a `u32`.
    fn check_count(&self, need: u64) -> Result<()> {
        let (places, row) = (u64::from(self.kv.page_size), u64::from(self.shape.row_elems()));
        let limit = u64::from(u32::MAX) / (places * row);
        if need > limit {
            let cure = "gather in several steps";
            return Err(Error::Limit { what: "pages of a gather", need, limit, cure });
        }
        Ok(())
    }

    fn items(&self, pieces: u32, _: Option<&Params>) -> u64 {
        let places = u64::from(pieces) * u64::from(self.kv.page_size);
        places.div_ceil(PLACES_PER_LANE.into()) * u64::from(self.shape.row_elems() / 4)
    }

    fn bind(
        &self,
        gpu: &Gpu,
        kernels: &Kernels,
        args: &KvGatherArgs<&wgpu::Buffer>,
        max_rows: u32,
    ) -> Result<Option<Layer<Params>>> {
        if max_rows == 0 {
            return Ok(None);
        }
        let (row_elems, output) = (self.shape.row_elems(), self.output.bytes());
        let kv = Window::of_cache(gpu, &args.kv, &self.kv, &self.shape)?;
        let out = Window::of(gpu, "out", &args.out, [max_rows, 1, row_elems], output)?;
        let (first_slot, num_slots) = args.kv.slots(&self.kv);
        let quad = 4 * self.kv.dtype().bytes() as u64;
        let params = Params {
            scale: Scale::new(if self.dequantises() { args.k_scale } else { 1.0 }),
            kv_base_quads: kv.at(args.kv.base(), 1, quad),
            kv_block_stride_quads: stride(self.kv.num_pages, args.kv.block_stride, quad),
            out_base_quads: out.at(args.out.offset, output, 4),
            out_stride_quads: stride(max_rows, args.out.token_stride, 4),
            max_rows,
            first_slot,
            num_slots,
            ..Params::default()
        };
        kernels.layer(gpu, params, [kv, out].map(Some), 0)
    }
}

fn source(spec: &KvGather) -> Source {
    let mut consts = vec![
        ("GROUP", GROUP),
        ("PAGE_SIZE", spec.kv.page_size),
        ("SLOT_QUADS", slot_quads(&spec.kv, &spec.shape)),
        ("ROW_QUADS", spec.shape.row_elems() / 4),
        ("PLACES_PER_LANE", PLACES_PER_LANE),
    ];
    let nothing = include_str!("../../../shaders/lib/convert_begin_nothing.wgsl");
    let plain = include_str!("../../../shaders/lib/gather_plain.wgsl");
    let convert = if let Some(record) = Record::of(spec.kv.layout, &spec.kv.token(&spec.shape)) {
        consts.extend(record.consts);
        consts.push(("LATENT_QUADS", spec.shape.kv_lora_rank / 4));
        [nothing, record.lib, include_str!("../../../shaders/lib/gather_record.wgsl")]
    } else if spec.dequantises() {
        let pack = match spec.output {
            Dtype::F32 => include_str!("../../../shaders/lib/pack_words.wgsl"),
            _ => include_str!("../../../shaders/lib/pack_halves.wgsl"),
        };
        [pack, plain, include_str!("../../../shaders/lib/convert_table.wgsl")]
    } else if spec.kv.dtype() == spec.output {
        [nothing, plain, include_str!("../../../shaders/lib/convert_copy.wgsl")]
    } else {
        [nothing, plain, include_str!("../../../shaders/lib/convert_round.wgsl")]
    };
    let files = [
        include_str!("../../../shaders/lib/grid.wgsl"),
        include_str!("../../../shaders/lib/round.wgsl"),
        Format::of(spec.kv.dtype()).element,
        Format::of(spec.output).out,
        convert[0],
        convert[1],
        convert[2],
        include_str!("../../../shaders/lib/slots.wgsl"),
        include_str!("../../../shaders/kv_gather.wgsl"),
    ];
    unrolled("kv_gather", &format!("from_{}.{}", spec.kv.layout, spec.output), &consts, &[], &files)
}
