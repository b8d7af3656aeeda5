//! `rope_append`: queries and new keys rotated, and new rows appended, in one dispatch before a decode.

use super::e4m3_scale::Scale;
use super::kv_append;
use super::rope::{self, Place};
use super::single::{Kernels, Layer, SingleOp, uniform};
use super::table::Table;
use crate::base::error::Result;
use crate::gpu::Gpu;
use crate::gpu::kernels::compose::{Const, Source, compose};
use crate::gpu::kernels::formats::Format;
use crate::gpu::kernels::guard::guarded;
use crate::gpu::pipelines::Access::{self, Read, Write};
use crate::ops::guard::GuardBounds;
use crate::ops::step_table::{StepTable, TableOp};
use crate::ops::{RopeAppend, RopeAppendArgs, RopeAppendBatch, RopeAppendExtent};

/// Sections of a token's items begin at multiples of this: the subgroups of most devices, and the quads of a record that share a scale.
const LANES: u32 = 32;

/// A bit of a table's count, set if as many positions follow the slots. A step has far fewer tokens.
const POSITIONS_FOLLOW: u32 = 1 << 31;

uniform! {
    "RopeAppendParams":
    pub struct Params {
        append: kv_append::Params,
        query: rope::Params,
        query_scale: Scale,
    }
}

impl SingleOp for RopeAppend {
    type Params = Params;
    const LABELS: [&'static str; 2] = ["mla.rope_append.step", "mla.rope_append.layer"];
    /// Together with the step's table these are eight storage buffers, as many as WebGPU guarantees. Counters are a ninth, which `wanted`
    /// asks for.
    const BUFFERS: &'static [Access] = &[Read, Read, Write, Read, Read, Read, Write];
    const SERVES_RECORDS: bool = true;

    fn guards(&self) -> bool {
        self.append.guard
    }

    fn sources(&self) -> Vec<Source> {
        // bounds: rope_append
        let places = if is_coded(self) { &Place::ALL[..1] } else { &Place::ALL[..] };
        places.iter().map(|&place| source(self, place)).collect()
    }

    fn check_count(&self, tokens: u64) -> Result<()> {
        rope::checked_items(tokens, Items::of(self).token())
    }

    fn items(&self, count: u32, _: Option<&Params>) -> u64 {
        u64::from(count & !POSITIONS_FOLLOW) * Items::of(self).token()
    }

    fn upload(
        &self,
        gpu: &Gpu,
        layout: &wgpu::BindGroupLayout,
        table: &mut Table,
        batch: RopeAppendBatch<'_>,
    ) -> Result<RopeAppendExtent> {
        let StepTable { count, words, extent } = self.table(batch, |count| self.check_table(gpu, count))?;
        let positions = batch.positions.unwrap_or(&[]);
        let follow = if positions.is_empty() { 0 } else { POSITIONS_FOLLOW };
        let words = words.into_iter().chain(positions.iter().map(|&position| position as u32));
        table.upload(gpu, layout, count | follow, words)?;
        Ok(extent)
    }

    fn bind(
        &self,
        gpu: &Gpu,
        kernels: &Kernels,
        args: &RopeAppendArgs<&wgpu::Buffer>,
        RopeAppendExtent { tokens: max_tokens, .. }: RopeAppendExtent,
    ) -> Result<Option<Layer<Params>>> {
        self.check_count(max_tokens.into())?;
        if max_tokens == 0 {
            return Ok(None);
        }
        let queries = args.rope();
        let place = Place::of(&queries);
        let guard_rows = self.guard_rows();
        let (append, rows, guard) =
            kv_append::Params::new(gpu, &self.append, &args.layer, guard_rows, max_tokens)?;
        let names = ["q_pe", "q_pe_out"];
        let rows_of = (&self.rope(), self.query_out);
        let (mut query, windows) = rope::Params::new(gpu, rows_of, &queries, max_tokens, place, names)?;
        let bounds = GuardBounds::of(self.query_out, args.q_scale);
        (query.guard_flushed, query.guard_top) = (bounds.flushed, bounds.top);
        let windows = windows.into_iter().chain(rows).chain(guard).map(Some);
        let params = Params { append, query, query_scale: Scale::new(args.q_scale) };
        kernels.layer(gpu, params, windows, place as usize)
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

/// Whether rotated queries are codes. They have a buffer of their own.
fn is_coded(spec: &RopeAppend) -> bool {
    spec.query_out != spec.query
}

fn source(spec: &RopeAppend, place: Place) -> Source {
    let (append, query) = (&spec.append, spec.rope());
    let items = Items::of(spec);
    let mut consts = rope::prelude(&query);
    if is_coded(spec) {
        consts.retain(|(name, _)| *name != "QueryOut");
        consts.push(("QueryOut", Const::Alias("u32")));
    }
    consts.extend(
        [
            ("QUERY_ITEMS", items.query),
            ("KEY_ITEMS", items.key),
            ("TOKEN_ITEMS", items.token() as u32),
            ("POSITIONS_FOLLOW", POSITIONS_FOLLOW),
        ]
        .into_iter()
        .chain(kv_append::convert_consts(append, 1))
        .map(|(name, value)| (name, Const::U32(value))),
    );
    let of_query = if is_coded(spec) {
        rope::reads("query", "QueryQuad", spec.query)
            + "\n"
            + &rope::writes("query", "QueryOut", "code_quad(bits, params.query_scale)")
    } else {
        rope::role("query", ["QueryQuad", "QueryOut"], spec.query)
    };
    let roles = of_query + "\n" + &rope::role("input", ["InQuad", "InQuad"], append.input);
    let mut files = vec![roles.as_str(), Format::of(spec.query).rotated.1];
    if append.input != spec.query {
        files.push(Format::of(append.input).rotated.1);
    }
    files.extend(kv_append::convert_libs(append));
    // A cache of codes has brought it.
    if is_coded(spec) && !append.kv.dtype().is_fp8() {
        files.push(include_str!("../../../shaders/lib/code_e4m3.wgsl"));
    }
    files.extend(rope::libs(place));
    files.push(match kv_append::record(append) {
        Some(_) => include_str!("../../../shaders/lib/append_record.wgsl"),
        None => include_str!("../../../shaders/lib/append_plain.wgsl"),
    });
    files.push(include_str!("../../../shaders/rope_append.wgsl"));
    let codes = if is_coded(spec) { ".q_e4m3" } else { "" };
    let variant = format!("{}{codes}.from_{}.{}", rope::name(&query, place), append.input, append.kv.layout);
    let queries = [("guarded queries", append.guard && is_coded(spec))];
    guarded(&files, RopeAppend::BUFFERS.len(), append.guard, &queries, &variant, |files, name| {
        compose("rope_append", name, &consts, files)
    })
}
