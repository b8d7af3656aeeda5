//! `kv_append`: new rows into the paged cache, the field's `concat_and_cache_mla`.

use super::e4m3_scale::Scale;
use super::guard::guard_window;
use super::single::{Kernels, Layer, SingleOp, uniform};
use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};
use crate::base::view::View;
use crate::gpu::Gpu;
use crate::gpu::buffer::{Window, stride};
use crate::gpu::kernels::compose::Source;
use crate::gpu::kernels::formats::{Format, Record, slot_quads};
use crate::gpu::kernels::guard::guarded;
use crate::gpu::kernels::{GROUP, unrolled};
use crate::gpu::pipelines::Access;
use crate::ops::{KvAppend, KvAppendArgs};

/// Tokens of which an invocation converts a quad each, so that enough loads are in flight. Fastest on an H200.
const TOKENS_PER_LANE: u32 = 8;

/// The same for records, which also need the largest element of each group.
const RECORDS_PER_LANE: u32 = 4;

uniform! {
    "AppendParams":
    pub struct Params {
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
        guard_row: u32,
        guard_flushed: u32,
        guard_top: u32,
    }
}

impl SingleOp for KvAppend {
    type Params = Params;
    const LABELS: [&'static str; 2] = ["mla.kv_append.step", "mla.kv_append.layer"];
    const BUFFERS: &'static [Access] = &[Access::Read, Access::Read, Access::Write];
    const SERVES_RECORDS: bool = true;

    fn guards(&self) -> bool {
        self.guard
    }

    fn sources(&self) -> Vec<Source> {
        // bounds: kv_append
        vec![source(self)]
    }

    /// The shader numbers its items in a `u32`.
    fn check_count(&self, need: u64) -> Result<()> {
        let limit = u64::from(u32::MAX / self.shape.row_elems());
        if need > limit {
            let cure = "append in several steps";
            return Err(Error::Limit { what: "tokens of an append", need, limit, cure });
        }
        Ok(())
    }

    fn items(&self, tokens: u32, _: Option<&Params>) -> u64 {
        match record(self) {
            Some(record) => {
                u64::from(tokens.div_ceil(RECORDS_PER_LANE)) * u64::from(record_items(self, &record))
            }
            None => u64::from(tokens.div_ceil(TOKENS_PER_LANE)) * u64::from(self.shape.row_elems() / 4),
        }
    }

    fn bind(
        &self,
        gpu: &Gpu,
        kernels: &Kernels,
        args: &KvAppendArgs<&wgpu::Buffer>,
        max_tokens: u32,
    ) -> Result<Option<Layer<Params>>> {
        self.check_count(max_tokens.into())?;
        if max_tokens == 0 {
            return Ok(None);
        }
        let (params, windows, guard) = Params::new(gpu, self, args, 1, max_tokens)?;
        kernels.layer(gpu, params, windows.into_iter().chain(guard).map(Some), 0)
    }
}

impl Params {
    /// One layer for up to `max_tokens` tokens, at least 1, and what is bound of `kv_c`, `k_pe` and the cache, and of `guard_rows` rows of
    /// counters.
    pub(super) fn new<'a>(
        gpu: &Gpu,
        spec: &KvAppend,
        args: &KvAppendArgs<&'a wgpu::Buffer>,
        guard_rows: u32,
        max_tokens: u32,
    ) -> Result<(Self, [Window<'a>; 3], Option<Window<'a>>)> {
        let (shape, bytes, k_pe_view) = (&spec.shape, spec.input.bytes(), args.rotary(spec));
        let k_pe_dim = if shape.qk_rope_head_dim > 0 { shape.qk_rope_head_dim } else { shape.kv_lora_rank };
        let kv_c = Window::of(gpu, "kv_c", &args.kv_c, [max_tokens, 1, shape.kv_lora_rank], bytes)?;
        let k_pe = Window::of(gpu, "k_pe", &k_pe_view, [max_tokens, 1, k_pe_dim], bytes)?;
        let kv = Window::of_cache(gpu, &args.kv, &spec.kv, shape)?;
        let token_stride = |view: &View<_>| stride(max_tokens, view.token_stride, 4);
        let (first_slot, num_slots) = args.kv.slots(&spec.kv);
        let quad = 4 * spec.kv.dtype().bytes() as u64;
        let (guard, guard_row) = guard_window(gpu, args.guard.as_ref(), guard_rows)?;
        let [_, bounds] = spec.guard_bounds(args.k_scale);
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
            guard_row,
            guard_flushed: bounds.flushed,
            guard_top: bounds.top,
        };
        Ok((params, [kv_c, k_pe, kv], guard))
    }
}

/// How the tokens of its cache are found, if they are records.
pub(super) fn record(spec: &KvAppend) -> Option<Record> {
    Record::of(spec.kv.layout, &spec.kv.token(&spec.shape))
}

/// Invocations of a record: a quad of the latent or of the rotary part each, rounded up so that each group of quads that has a scale begins
/// at a multiple of its length.
fn record_items(spec: &KvAppend, record: &Record) -> u32 {
    (spec.shape.row_elems() / 4).next_multiple_of(record.group / 4)
}

/// How new rows are read, converted and placed.
pub(super) fn convert_libs(spec: &KvAppend) -> Vec<&'static str> {
    let mut files = vec![
        include_str!("../../../shaders/lib/round.wgsl"),
        Format::of(spec.input).element,
        Format::of(spec.kv.dtype()).out,
        include_str!("../../../shaders/lib/slots.wgsl"),
        include_str!("../../../shaders/lib/append.wgsl"),
    ];
    match record(spec) {
        Some(record) => files.extend([
            record.lib,
            include_str!("../../../shaders/lib/record_scale.wgsl"),
            include_str!("../../../shaders/lib/record_put.wgsl"),
        ]),
        None if spec.input == spec.kv.dtype() => {
            files.push(include_str!("../../../shaders/lib/convert_copy.wgsl"));
        }
        None => files.push(include_str!("../../../shaders/lib/convert_round.wgsl")),
    }
    files
}

/// The constants of [`convert_libs`]; `tokens_per_lane` is that of a kernel of records.
pub(super) fn convert_consts(spec: &KvAppend, tokens_per_lane: u32) -> Vec<(&'static str, u32)> {
    let mut consts = vec![
        ("PAGE_SIZE", spec.kv.page_size),
        ("SLOT_QUADS", slot_quads(&spec.kv, &spec.shape)),
        ("LATENT_QUADS", spec.shape.kv_lora_rank / 4),
    ];
    if let Some(record) = record(spec) {
        consts.extend(record.consts);
        consts.push(("TOKENS_PER_LANE", tokens_per_lane));
        consts.push(("COPIES_ROPE", (spec.input == Dtype::Bf16).into()));
    }
    consts
}

fn source(spec: &KvAppend) -> Source {
    let mut consts = vec![("GROUP", GROUP), ("ROW_QUADS", spec.shape.row_elems() / 4)];
    consts.extend(convert_consts(spec, RECORDS_PER_LANE));
    let mut files = vec![include_str!("../../../shaders/lib/grid.wgsl")];
    files.extend(convert_libs(spec));
    if let Some(record) = record(spec) {
        consts.push(("ROW_ITEMS", record_items(spec, &record)));
        files.push(include_str!("../../../shaders/kv_append_record.wgsl"));
    } else {
        consts.push(("TOKENS_PER_LANE", TOKENS_PER_LANE));
        files.push(include_str!("../../../shaders/kv_append.wgsl"));
    }
    let name = format!("from_{}.{}", spec.input, spec.kv.layout);
    guarded(&files, KvAppend::BUFFERS.len(), spec.guard, &[], &name, |files, name| {
        unrolled("kv_append", name, &consts, &[], files)
    })
}
