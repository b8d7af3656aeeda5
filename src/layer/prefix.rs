//! The expansion of a prefix as an op made of ops: rows of the cache as the keys and values of each head.

use super::each::{Check, Record, Visit};
use super::names::{self, named};
use super::range::{Scales, check_range};
use super::{Expanded, MlaLayer};
use crate::base::error::{Error, Result};
use crate::base::view::View;
use crate::cache::KvView;
use crate::ops::composes::Composes;
use crate::ops::op::{Binding, Compiled, Kernel, Op, Step, Use};
use crate::ops::variants::{Choice, OpOptions};
use crate::ops::{GatherBatch, GatherRange, HeadProject, HeadProjectArgs, KvGather, KvGatherArgs};
use crate::plan::tables::PageTable;

/// Expands a prefix that sequences share: its rows of the cache become the keys and values of each head, in [`Expanded`] arrays that an
/// [`MlaLayer`] of the same spec attends: see [`ExpandedPrefix`](crate::ExpandedPrefix).
///
/// Arguments of a layer: [`MlaExpandArgs`]. Input of a step: an [`ExpandBatch`]; `prepare` refuses one with [`Error::Length`] for pages
/// that do not hold its tokens, [`Error::PageOutOfRange`] for a page that is not in the pool, and [`Error::GatherRange`] for rows that 32
/// bits do not count.
///
/// Room of a binding: `u32`, rows of the arrays. Capacity of a step: `()`.
///
/// ```
/// use wgpu_mla::{Device, Dtype, ExpandBatch, Expanded, KvView, MlaExpand, MlaExpandArgs, cpu::Cpu};
/// # use wgpu_mla::{KvSpec, MlaLayer, MlaShape, RopeLayout};
///
/// # fn main() -> wgpu_mla::Result<()> {
/// # let spec = MlaLayer {
/// #     shape: MlaShape { num_heads: 1, kv_lora_rank: 256, qk_rope_head_dim: 32 }, qk_nope_head_dim: 16, v_head_dim: 24,
/// #     kv: KvSpec { layout: Dtype::F32.into(), page_size: 4, num_pages: 2 },
/// #     dtype: Dtype::F32, query: Dtype::F32, weight: Dtype::F32, out: Dtype::F32,
/// #     rope: RopeLayout::Interleaved, decode_threshold: 1, workspace_bytes: 1 << 16,
/// # };
/// // `spec` is the `MlaLayer`: L 256, R 32, P 16, V 24, one head, pages of 4 tokens.
/// let cpu = Cpu::new();
/// let (cache, kv_b_proj) = (cpu.buffer(spec.mla().cache_bytes())?, cpu.buffer((16 + 24) * 256 * 4)?);
/// cpu.upload(&cache, 0, &Dtype::F32.encode_all(&[1.0; 8 * 288]))?;
/// cpu.upload(&kv_b_proj, 0, &Dtype::F32.encode_all(&[0.5; (16 + 24) * 256]))?;
/// let [rows, k_nope, v] = spec.expanded_bytes(4).map(|bytes| cpu.buffer(bytes));
/// let (rows, k_nope, v) = (rows?, k_nope?, v?);
/// let expanded = Expanded::dense(&spec, [&rows, &k_nope, &v]);
/// let kv = KvView::dense(&cache, &spec.mla());
/// let layer = MlaExpandArgs { kv, k_scale: 1.0, kv_b_proj: &kv_b_proj, kv_b_scales: None, expanded };
///
/// // A prefix of 4 tokens, in page 1. k_nope = latents . W_UK^T: 256 products of 1 and 0.5 each.
/// cpu.once(MlaExpand(spec), ExpandBatch { pages: &[1], tokens: 4, first_row: 0 }, &layer)?;
/// assert_eq!(Dtype::F32.decode_all(&cpu.download(&k_nope, 4 * 16 * 4)?), [128.0; 4 * 16]);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MlaExpand(pub MlaLayer);

/// A step of an [`MlaExpand`]: a prefix in its pages, and where its rows go.
#[derive(Debug, Clone, Copy)]
pub struct ExpandBatch<'a> {
    /// Its pages.
    pub pages: &'a [i32],
    /// Its tokens.
    pub tokens: u32,
    /// Its first row in the arrays; the others follow.
    pub first_row: u32,
}

/// One layer of an [`MlaExpand`]: its cache, which holds the prefix, and the arrays for it. They serve every step until the pages change.
#[derive(Debug, Clone)]
pub struct MlaExpandArgs<B> {
    /// The layer's cache.
    pub kv: KvView<B>,
    /// Factor of every cache element; 1 unless the cache is e4m3.
    pub k_scale: f32,
    /// `[H, P + V, L]` as [`crate::KvBProj`] prepares it.
    pub kv_b_proj: B,
    /// Its scales, as [`MlaLayerArgs::kv_b_scales`](super::MlaLayerArgs::kv_b_scales).
    pub kv_b_scales: Option<B>,
    /// Where rows, keys and values go.
    pub expanded: Expanded<B>,
}

/// The ops of an expansion.
#[derive(Debug)]
pub struct Ops<D: Composes> {
    gather: Compiled<KvGather, D>,
    k_up: Compiled<HeadProject, D>,
    v_up: Compiled<HeadProject, D>,
}

/// Which prefix is expanded.
#[derive(Debug)]
pub struct Steps<D: Composes> {
    gather: Step<KvGather, D>,
    rows: Step<HeadProject, D>,
}

/// One layer's buffers, bound to each op.
#[derive(Debug)]
pub struct Bindings<D: Composes> {
    gather: Binding<KvGather, D>,
    k_up: Binding<HeadProject, D>,
    v_up: Binding<HeadProject, D>,
}

impl Op for MlaExpand {
    const NAME: &'static str = "mla_expand";
    type Options = OpOptions;
    type Facts = ();
    type Input<'a> = ExpandBatch<'a>;
    type Args<B> = MlaExpandArgs<B>;
    /// Rows of the arrays.
    type Extent = u32;
    type Capacity = ();

    fn samples() -> Vec<Self> {
        MlaLayer::samples().into_iter().map(Self).collect()
    }

    fn check(&self) -> Result<()> {
        self.0.check()
    }

    fn map<'a, B: 'a, C>(
        &self,
        args: &'a MlaExpandArgs<B>,
        mut f: impl FnMut(Use, &'a B) -> Result<C>,
    ) -> Result<MlaExpandArgs<C>> {
        Ok(MlaExpandArgs {
            kv: args.kv.map(|buffer| f(Use::Read("kv"), buffer))?,
            k_scale: args.k_scale,
            kv_b_proj: f(Use::Read("kv_b_proj"), &args.kv_b_proj)?,
            kv_b_scales: args
                .kv_b_scales
                .as_ref()
                .map(|scales| f(Use::Read("kv_b_scales"), scales))
                .transpose()?,
            expanded: args.expanded.map(Use::Write, f)?,
        })
    }

    /// Its ops check the rest.
    fn check_args<B>(&self, args: &MlaExpandArgs<&B>, _: u32, _: impl Fn(&B) -> u64 + Copy) -> Result<()> {
        self.0.check_scales(args.kv_b_scales.is_some())?;
        check_range(&self.0, args.k_scale)
    }

    fn fits(rows: u32, max_rows: u32) -> Result<(), &'static str> {
        if rows > max_rows { Err("the step expands to rows past the binding's") } else { Ok(()) }
    }
}

impl<D: Composes> Kernel<MlaExpand> for D {
    type Kernels = Ops<D>;
    type Step = Steps<D>;
    type Binding = Bindings<D>;

    fn kernel_compile(
        &self,
        MlaExpand(spec): &MlaExpand,
        options: &OpOptions,
    ) -> Result<(Ops<D>, (), Choice)> {
        let (dims, dtype, weight) = (spec.dims(), spec.dtype, spec.weight);
        let gather = self.compile_with(spec.gather(), options)?;
        let choice = gather.choice.clone();
        let k_up = self.compile(HeadProject::k_up(&dims, dtype, weight, dtype))?;
        let v_up = self.compile(HeadProject::v_up(&dims, dtype, weight, dtype))?;
        Ok((Ops { gather, k_up, v_up }, (), choice))
    }

    fn kernel_step(&self, _: &MlaExpand, ops: &Ops<D>, (): ()) -> Result<Steps<D>> {
        Ok(Steps { gather: ops.gather.step(0)?, rows: ops.k_up.step(0)? })
    }

    fn kernel_prepare(
        &self,
        MlaExpand(spec): &MlaExpand,
        ops: &Ops<D>,
        step: &mut Steps<D>,
        batch: ExpandBatch<'_>,
    ) -> Result<u32> {
        let ExpandBatch { pages, tokens, first_row } = batch;
        let (got, want) = (pages.len() as u64, u64::from(spec.kv.pages_for(tokens)));
        if got < want {
            let cure = "pass the pages of all of the prefix's tokens, or expand fewer tokens";
            return Err(Error::Length { what: "ExpandBatch::pages", got, want, cure });
        }
        let kv_indptr = [0, i32::try_from(pages.len()).unwrap_or(i32::MAX)];
        let pages = PageTable::Csr { kv_indptr: &kv_indptr, kv_indices: pages };
        let seq_lens = &[i32::try_from(tokens).unwrap_or(i32::MAX)];
        let ranges = &[GatherRange { sequence: 0, begin: 0, tokens, out_row: first_row }];
        ops.gather.prepare(&mut step.gather, GatherBatch { pages, seq_lens, ranges })?;
        let end = first_row.saturating_add(tokens);
        ops.k_up.prepare(&mut step.rows, first_row..end)?;
        Ok(if tokens > 0 { end } else { 0 })
    }

    fn kernel_bind(
        &self,
        MlaExpand(spec): &MlaExpand,
        ops: &Ops<D>,
        args: &MlaExpandArgs<&D::Buffer>,
        rows: u32,
    ) -> Result<Bindings<D>> {
        let expanded = &args.expanded;
        let (w_uk, w_uv) = spec.weights(args.kv_b_proj, args.kv_b_scales);
        let Scales { keys, values, saturates } = spec.scales();
        let project = |x, weight, y, scale| HeadProjectArgs {
            x,
            weight,
            y,
            scale,
            out_scale: 1.0,
            saturates,
            guard: None,
        };
        // All heads read the same row.
        let x = View { head_stride: 0, ..expanded.rows };
        let gathered = KvGatherArgs { kv: args.kv.clone(), k_scale: args.k_scale, out: expanded.rows };
        Ok(Bindings {
            gather: ops.gather.bind(&gathered, rows).map_err(named(names::GATHER_PREFIX))?,
            k_up: ops
                .k_up
                .bind(&project(x, w_uk, expanded.k_nope, keys), rows)
                .map_err(named(names::EXPAND_K))?,
            v_up: ops
                .v_up
                .bind(&project(x, w_uv, expanded.v, values), rows)
                .map_err(named(names::EXPAND_V))?,
        })
    }

    fn kernel_record(
        &self,
        _: &MlaExpand,
        ops: &Ops<D>,
        recorder: &mut D::Recorder<'_>,
        step: &Steps<D>,
        binding: &Bindings<D>,
    ) -> Result<()> {
        ops.each(step, binding, &mut Check)?;
        ops.each(step, binding, &mut Record::<D>(recorder))
    }
}

impl<D: Composes> Ops<D> {
    fn each(&self, step: &Steps<D>, binding: &Bindings<D>, visit: &mut impl Visit<D>) -> Result<()> {
        visit.op(&self.gather, &step.gather, &binding.gather)?;
        visit.op(&self.k_up, &step.rows, &binding.k_up)?;
        visit.op(&self.v_up, &step.rows, &binding.v_up)
    }
}
