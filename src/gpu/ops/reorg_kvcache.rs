//! `reorg_kvcache`: gathered parts of several ranks, back in the order of their tokens.

use super::single::{Kernels, Layer, SingleOp, uniform};
use crate::base::error::Result;
use crate::gpu::Gpu;
use crate::gpu::buffer::{Window, stride};
use crate::gpu::kernels::GROUP;
use crate::gpu::kernels::compose::{Const, Source, compose};
use crate::gpu::pipelines::Access;
use crate::ops::{ReorgExtent, ReorgKvCache, ReorgKvCacheArgs};

uniform! {
    "ReorgParams":
    pub struct Params {
        gathered_base_units: u32,
        gathered_stride_units: u32,
        rank_stride_units: u32,
        out_base_units: u32,
        out_stride_units: u32,
        max_rows: u32,
        max_local_rows: u32,
        world: u32,
    }
}

impl SingleOp for ReorgKvCache {
    type Params = Params;
    const LABELS: [&'static str; 2] = ["mla.reorg_kvcache.step", "mla.reorg_kvcache.layer"];
    const BUFFERS: &'static [Access] = &[Access::Read, Access::Write];

    fn sources(&self) -> Vec<Source> {
        // bounds: reorg_kvcache
        vec![source(self)]
    }

    /// The rows of the output are in a window of less than 2^32 bytes, of 4 bytes a unit or more: they fit a `u32` as the shader counts.
    fn items(&self, tokens: u32, _: Option<&Params>) -> u64 {
        u64::from(tokens) * u64::from(self.row_elems / 4)
    }

    fn bind(
        &self,
        gpu: &Gpu,
        kernels: &Kernels,
        args: &ReorgKvCacheArgs<&wgpu::Buffer>,
        room: ReorgExtent,
    ) -> Result<Option<Layer<Params>>> {
        if room.rows == 0 || room.local_rows == 0 || room.world == 0 {
            return Ok(None);
        }
        let (elems, bytes) = (self.row_elems, self.dtype.bytes());
        // From the first rank's part to the end of the last.
        let end = args.last(room.world).end(room.local_rows.into(), 1, elems.into());
        let part = [args.gathered.offset, end].map(|element| element.saturating_mul(bytes as u64));
        let gathered = Window::new(gpu, "gathered", args.gathered.buffer, part[0]..part[1])?;
        let out = Window::of(gpu, "out", &args.out, [room.rows, 1, elems], bytes)?;
        let params = Params {
            gathered_base_units: gathered.at(args.gathered.offset, bytes, 4),
            gathered_stride_units: stride(room.local_rows, args.gathered.token_stride, 4),
            rank_stride_units: stride(room.world, args.rank_stride, 4),
            out_base_units: out.at(args.out.offset, bytes, 4),
            out_stride_units: stride(room.rows, args.out.token_stride, 4),
            max_rows: room.rows,
            max_local_rows: room.local_rows,
            world: room.world,
        };
        kernels.layer(gpu, params, [gathered, out].map(Some), 0)
    }
}

fn source(spec: &ReorgKvCache) -> Source {
    let (unit, width) = crate::gpu::kernels::formats::Format::of(spec.dtype).copied;
    let prelude = [
        ("GROUP", Const::U32(GROUP)),
        ("ROW_UNITS", Const::U32(spec.row_elems / 4)),
        ("Unit", Const::Alias(unit)),
    ];
    let files =
        [include_str!("../../../shaders/lib/grid.wgsl"), include_str!("../../../shaders/reorg_kvcache.wgsl")];
    compose("reorg_kvcache", width, &prelude, &files)
}
