//! `mla_prefill`: attention over expanded keys and values.

use super::table::Table;
use crate::base::error::{Error, Result};
use crate::base::view::View;
use crate::gpu::Gpu;
use crate::gpu::buffer::{Window, stride};
use crate::gpu::caps::DeviceKind;
use crate::gpu::kernels::prefill::VARIANTS;
use crate::gpu::pipelines::{Access, Pipe, dispatch, group_with_params, storage};
use crate::ops::mla_prefill::tiles::{PrefillTile, tiles};
use crate::ops::variants::{candidates, choose};
use crate::ops::{
    Candidate, Choice, Kernel, MlaPrefill, MlaPrefillArgs, PrefillExtent, PrefillOptions, PrefillSequence,
    PrefillTiling,
};

/// The kernel, and how it reads.
#[derive(Debug)]
pub struct Pipes {
    pipe: Pipe,
    /// Query rows of a tile.
    rows: u32,
    /// Elements that queries, keys and values are read by.
    unit: u64,
    /// Bound where there is room for no key: one row as long as a key or a value, which a kernel may load.
    no_keys: wgpu::Buffer,
}

/// `PrefillParams` of the shader.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
struct Params {
    logit_scale: f32,
    max_tokens: u32,
    max_keys: u32,
    max_rows: u32,
    q_nope: Array,
    q_pe: Array,
    k_nope: Array,
    k_pe: Array,
    v: Array,
    out: Array,
    lse: Array,
    v_scale: f32,
}

/// Where an array begins, and its strides.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
struct Array {
    at: u32,
    token_stride: u32,
    head_stride: u32,
}

impl Array {
    /// In units of `unit` elements.
    fn new(
        view: &View<&wgpu::Buffer>,
        window: &Window<'_>,
        bytes: usize,
        unit: u64,
        [rows, heads]: [u32; 2],
    ) -> Self {
        Self {
            at: window.at(view.offset, bytes, unit),
            token_stride: stride(rows, view.token_stride, unit),
            head_stride: stride(heads, view.head_stride, unit),
        }
    }
}

impl Kernel<MlaPrefill> for Gpu {
    type Kernels = Pipes;
    type Step = Table;
    /// `None` where there is room for no token.
    type Binding = Option<wgpu::BindGroup>;

    fn kernel_variants(&self, spec: &MlaPrefill) -> Vec<Candidate> {
        candidates(&VARIANTS, self.caps(), &(*spec, 0))
    }

    fn kernel_compile(
        &self,
        spec: &MlaPrefill,
        options: &PrefillOptions,
    ) -> Result<(Pipes, PrefillTiling, Choice)> {
        let request = (*spec, options.query_tokens);
        let (kernel, choice) = choose(&VARIANTS, self.caps(), &request, options.variant.as_deref())?;
        let read = if kernel.pins_loads { Access::ReadPinned } else { Access::Read };
        let entries = [Access::Uniform, read, read, read, read, read, Access::Write, Access::Write];
        // bounds: mla_prefill
        let labels = ["mla.prefill.step", "mla.prefill.layer"];
        let pipe = Pipe::new(self, labels, &entries, &kernel.source)?;
        let longest = spec.qk_nope_head_dim.max(spec.qk_rope_head_dim).max(spec.v_head_dim);
        let no_keys = storage(self, "mla.prefill.no_keys", u64::from(longest) * spec.dtype.bytes() as u64)?;
        let target_groups = match self.caps().kind {
            DeviceKind::Software => 8,
            DeviceKind::Integrated => 32,
            // A workgroup for each multiprocessor of an H200, whose shared memory holds one at a time.
            _ => 132,
        };
        let tiling = PrefillTiling { rows: kernel.rows, target_groups, num_heads: spec.num_heads };
        Ok((Pipes { pipe, rows: kernel.rows, unit: kernel.unit.into(), no_keys }, tiling, choice))
    }

    fn kernel_step(&self, _: &MlaPrefill, _: &Pipes, _: u32) -> Result<Table> {
        Ok(Table::default())
    }

    fn kernel_prepare(
        &self,
        spec: &MlaPrefill,
        pipes: &Pipes,
        step: &mut Table,
        sequences: &[PrefillSequence],
    ) -> Result<PrefillExtent> {
        let extent = PrefillExtent::of(sequences)?;
        let tiles = tiles(sequences, pipes.rows)?;
        let need = tiles.len() as u64 * u64::from(spec.num_heads);
        let limit = u64::from(self.caps().max_workgroups).pow(2).min(1 << 31);
        if need > limit {
            let cure = "attend fewer query tokens a step, or make the device with a higher max_compute_workgroups_per_dimension";
            return Err(Error::Limit { what: "workgroups of a prefill", need, limit, cure });
        }
        let words = tiles.iter().flat_map(PrefillTile::words);
        step.upload(self, &pipes.pipe.step, tiles.len() as u32, words)?;
        Ok(extent)
    }

    fn kernel_bind(
        &self,
        spec: &MlaPrefill,
        pipes: &Pipes,
        args: &MlaPrefillArgs<&wgpu::Buffer>,
        room: PrefillExtent,
    ) -> Result<Option<wgpu::BindGroup>> {
        if room.tokens == 0 || room.rows == 0 {
            return Ok(None);
        }
        let heads = spec.num_heads;
        let mut windows = Vec::with_capacity(7);
        let mut arrays = [Array::default(); 5];
        for (i, (what, view, dim)) in args.read_views(spec).into_iter().enumerate() {
            let rows = if i < 2 { room.tokens } else { room.keys };
            let bytes = spec.dtype.bytes();
            if rows == 0 {
                windows.push(Window::new(self, what, &pipes.no_keys, 0..pipes.no_keys.size())?);
                continue;
            }
            let window = Window::of(self, what, &view, [rows, heads, dim], bytes)?;
            arrays[i] = Array::new(&view, &window, bytes, pipes.unit, [rows, heads]);
            windows.push(window);
        }
        let rows = [room.rows, heads];
        let out = Window::of(self, "out", &args.out, [room.rows, heads, spec.v_head_dim], spec.out.bytes())?;
        let lse = Window::of(self, "lse", &args.lse, [room.rows, heads, 1], 4)?;
        let [q_nope, q_pe, k_nope, k_pe, v] = arrays;
        let params = Params {
            logit_scale: (f64::from(args.softmax_scale) * std::f64::consts::LOG2_E) as f32,
            max_tokens: room.tokens,
            max_keys: room.keys.max(1),
            max_rows: room.rows,
            q_nope,
            q_pe,
            k_nope,
            k_pe,
            v,
            out: Array::new(&args.out, &out, spec.out.bytes(), 4, rows),
            lse: Array::new(&args.lse, &lse, 4, 1, rows),
            v_scale: args.v_scale,
        };
        windows.extend([out, lse]);
        let resources = windows.iter().map(Window::resource);
        group_with_params(self, "mla.prefill.layer", &pipes.pipe.layer, &params, resources).map(Some)
    }

    fn kernel_record(
        &self,
        spec: &MlaPrefill,
        pipes: &Pipes,
        pass: &mut wgpu::ComputePass<'_>,
        step: &Table,
        binding: &Option<wgpu::BindGroup>,
    ) -> Result<()> {
        if let (Some(table), Some(layer), tiles @ 1..) = (step.group(), binding, step.count()) {
            let groups = tiles * spec.num_heads;
            let x = groups.min(self.caps().max_workgroups);
            dispatch(pass, &pipes.pipe.pipeline, &[table, layer], [x, groups.div_ceil(x)]);
        }
        Ok(())
    }
}

#[cfg(test)]
impl super::Shaders for MlaPrefill {
    fn every_source(samples: &[Self]) -> Vec<crate::gpu::kernels::compose::Source> {
        crate::gpu::kernels::prefill::every_source(samples)
    }

    fn layouts() -> Vec<super::HostLayout> {
        use std::mem::offset_of;
        let mut fields = vec![
            ("logit_scale", offset_of!(Params, logit_scale)),
            ("max_tokens", offset_of!(Params, max_tokens)),
            ("max_keys", offset_of!(Params, max_keys)),
            ("max_rows", offset_of!(Params, max_rows)),
        ];
        let places = [
            (offset_of!(Params, q_nope), ["q_nope_at", "q_nope_token_stride", "q_nope_head_stride"]),
            (offset_of!(Params, q_pe), ["q_pe_at", "q_pe_token_stride", "q_pe_head_stride"]),
            (offset_of!(Params, k_nope), ["k_nope_at", "k_nope_token_stride", "k_nope_head_stride"]),
            (offset_of!(Params, k_pe), ["k_pe_at", "k_pe_token_stride", "k_pe_head_stride"]),
            (offset_of!(Params, v), ["v_at", "v_token_stride", "v_head_stride"]),
            (offset_of!(Params, out), ["out_at", "out_token_stride", "out_head_stride"]),
            (offset_of!(Params, lse), ["lse_at", "lse_token_stride", "lse_head_stride"]),
        ];
        for (at, [a, b, c]) in places {
            fields.push((a, at + offset_of!(Array, at)));
            fields.push((b, at + offset_of!(Array, token_stride)));
            fields.push((c, at + offset_of!(Array, head_stride)));
        }
        fields.push(("v_scale", offset_of!(Params, v_scale)));
        vec![("PrefillParams", fields, size_of::<Params>())]
    }
}
