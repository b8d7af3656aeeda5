//! `rope_append`: what comes before a decode, in one dispatch.

use super::kv_append;
use super::rope::{self, Layer, Pipes, Place};
use super::table::Table;
use crate::Result;
use crate::gpu::Gpu;
use crate::gpu::kernels::compose::{Const, Source, compose};
use crate::gpu::kernels::formats::Format;
use crate::gpu::pipelines::{Access, Pipe, dispatch, group_with_params};
use crate::ops::variants::only;
use crate::ops::{Choice, Kernel, OpOptions, RopeAppend, RopeAppendArgs, RopeAppendBatch, RopeAppendExtent};

/// Sections of a token's items begin at multiples of this: the subgroups of most devices.
const LANES: u32 = 32;

/// In a table's count: behind the slots stand as many positions. A step has far fewer tokens.
const POSITIONS_FOLLOW: u32 = 1 << 31;

/// `RopeAppendParams` of the shader.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Params {
    append: kv_append::Params,
    query: rope::Params,
}

impl Kernel<RopeAppend> for Gpu {
    type Kernels = Pipes;
    type Step = Table;
    type Binding = Layer;

    fn kernel_compile(&self, spec: &RopeAppend, options: &OpOptions) -> Result<(Pipes, (), Choice)> {
        let labels = ["mla.rope_append.step", "mla.rope_append.layer"];
        use Access::{Read, Uniform, Write};
        // With the step's table they are all of WebGPU's eight storage buffers.
        let entries = [Uniform, Read, Read, Write, Read, Read, Read, Write];
        // Every index is in bounds, for every pair of table and binding:
        // - the table holds its count and as many slots, and positions if it says so (`Table`; besides it only `batch_slots` writes slots,
        //   and leaves the count); the shader reads those of a token below the count, or of token 0, and takes them for an item below
        //   the count only;
        // - token < max_tokens, by a `min` in the shader. `check_args` refuses rows and positions that end past their buffers for max_tokens
        //   tokens, and the windows reach at least up to there;
        // - inside a row: part < HEAD_UNITS, part - QUERY_ITEMS < UNITS, and the rest is below LATENT_QUADS by TOKEN_ITEMS;
        // - 0 <= position < max_position, by `max` and `min` in the shader, and cos_sin has as many rows (`check_args`);
        // - slot < num_slots is checked in the shader, so the page is one of the slab's, whose last `check_args` found inside the buffer.
        // There are no loops.
        let compile = |place| Pipe::new(self, labels, &entries, &source(spec, place));
        Ok((Pipes::new(compile)?, (), only(options)?))
    }

    fn kernel_step(&self, _: &RopeAppend, _: &Pipes, _: u32) -> Result<Table> {
        Ok(Table::default())
    }

    fn kernel_prepare(
        &self,
        spec: &RopeAppend,
        pipes: &Pipes,
        step: &mut Table,
        batch: RopeAppendBatch<'_>,
    ) -> Result<RopeAppendExtent> {
        let used = batch.extent()?;
        rope::checked_items(batch.slot_mapping.len() as u64, Items::of(spec).token())?;
        self.grid(u64::from(used.tokens) * Items::of(spec).token())?;
        let positions = batch.positions.unwrap_or(&[]).iter().map(|&position| position as u32);
        let words = spec.append.slots(batch.slot_mapping)?.into_iter().chain(positions);
        let follow = if batch.positions.is_some() { POSITIONS_FOLLOW } else { 0 };
        step.upload(self, &pipes.apart.step, used.tokens | follow, words)?;
        Ok(used)
    }

    fn kernel_bind(
        &self,
        spec: &RopeAppend,
        pipes: &Pipes,
        args: &RopeAppendArgs<&wgpu::Buffer>,
        RopeAppendExtent { tokens: max_tokens, .. }: RopeAppendExtent,
    ) -> Result<Layer> {
        rope::checked_items(max_tokens.into(), Items::of(spec).token())?;
        let queries = args.rope();
        let in_place = queries.is_in_place(|a, b| a == b);
        let pipe = pipes.of(in_place);
        let mut group = None;
        if max_tokens > 0 {
            let (append, rows) = kv_append::Params::new(self, &spec.append, &args.layer, max_tokens)?;
            let names = ["q_pe", "q_pe_out"];
            let (query, windows) =
                rope::Params::new(self, &spec.rope(), &queries, max_tokens, in_place, names)?;
            let resources = windows.resources().into_iter().chain(rows.iter().map(|row| row.resource()));
            let (label, params) = ("mla.rope_append.layer", Params { append, query });
            group = Some(group_with_params(self, label, &pipe.layer, &params, resources)?);
        }
        Ok(Layer { group, pipeline: pipe.pipeline.clone() })
    }

    fn kernel_record(
        &self,
        spec: &RopeAppend,
        _: &Pipes,
        pass: &mut wgpu::ComputePass<'_>,
        step: &Table,
        layer: &Layer,
    ) -> Result<()> {
        let tokens = step.count() & !POSITIONS_FOLLOW;
        if let (Some(table), Some(group), 1..) = (step.group(), &layer.group, tokens) {
            let grid = self.grid(u64::from(tokens) * Items::of(spec).token())?;
            dispatch(pass, &layer.pipeline, &[table, group], grid);
        }
        Ok(())
    }
}

/// A token's items: `QUERY_ITEMS`, `KEY_ITEMS` and `LATENT_QUADS` of the shader.
struct Items {
    query: u32,
    key: u32,
    latent: u32,
}

impl Items {
    fn of(spec: &RopeAppend) -> Self {
        let query = (rope::token_units(&spec.rope()) as u32).next_multiple_of(LANES);
        let key = (spec.append.shape.qk_rope_head_dim / 8).next_multiple_of(LANES);
        Self { query, key, latent: spec.append.shape.kv_lora_rank / 4 }
    }

    fn token(&self) -> u64 {
        (self.query + self.key + self.latent).into()
    }
}

fn source(spec: &RopeAppend, place: Place) -> Source {
    let (append, query) = (&spec.append, spec.rope());
    let items = Items::of(spec);
    let mut consts = rope::prelude(&query);
    consts.extend(
        [
            ("QUERY_ITEMS", items.query),
            ("KEY_ITEMS", items.key),
            ("TOKEN_ITEMS", items.token() as u32),
            ("POSITIONS_FOLLOW", POSITIONS_FOLLOW),
            ("PAGE_SIZE", append.kv.page_size),
            ("LATENT_QUADS", items.latent),
            ("ROW_QUADS", append.shape.row_elems() / 4),
        ]
        .map(|(name, value)| (name, Const::U32(value))),
    );
    let roles =
        rope::role("query", "QueryQuad", spec.query) + "\n" + &rope::role("input", "InQuad", append.input);
    let mut files = vec![roles.as_str(), Format::of(spec.query).rotated.1];
    if append.input != spec.query {
        files.push(Format::of(append.input).rotated.1);
    }
    files.extend(kv_append::convert_libs(append));
    files.extend(rope::libs(place));
    files.push(include_str!("../../../shaders/rope_append.wgsl"));
    let variant = format!("{}.from_{}.{}", rope::name(&query, place), append.input, append.kv.dtype());
    compose("rope_append", &variant, &consts, &files)
}

#[cfg(test)]
pub(super) fn every_source() -> Vec<Source> {
    use crate::{Dtype, KvAppend, KvSpec, MlaShape};
    let shape = MlaShape { num_heads: 1, kv_lora_rank: 512, qk_rope_head_dim: 64 };
    let mut all = Vec::new();
    for query in rope::every_spec() {
        for input in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            for dtype in Dtype::ALL {
                let append = KvAppend {
                    shape,
                    kv: KvSpec { layout: dtype.into(), page_size: 48, num_pages: 7 },
                    input,
                };
                let (query, layout) = (query.dtype, query.layout);
                let spec = RopeAppend { append, query, num_heads: 6, layout };
                all.extend(Place::ALL.map(|place| source(&spec, place)));
            }
        }
    }
    all
}

#[cfg(test)]
pub(super) fn host_layout() -> super::HostLayout {
    super::layout_of!("RopeAppendParams", Params: append, query)
}
