//! The ops of a layer's step, each recorded by itself over arrays of its own between them.

use wgpu_mla::{
    Batch, Capacity, GatherBatch, GatherRange, HeadProject, HeadProjectArgs, KvAppend, KvAppendArgs,
    KvGather, KvGatherArgs, LseBase, MlaDecode, MlaDecodeArgs, MlaPrefill, MlaPrefillArgs, Plan,
    PrefillSequence, Query, RopeAppend, RopeAppendArgs, RopeAppendBatch, SplitPolicy, View,
};

use super::problem::{DTYPE, Problem};
use crate::support::Result;
use crate::support::clock::Timing;
use crate::support::device::{Layers, Timed};

/// What follows the append.
enum Rest<D: Timed> {
    Decode {
        absorb: Layers<HeadProject, D>,
        decode: Layers<MlaDecode, D>,
        v_up: Layers<HeadProject, D>,
    },
    Prompt {
        gather: Layers<KvGather, D>,
        k_up: Layers<HeadProject, D>,
        v_up: Layers<HeadProject, D>,
        prefill: Layers<MlaPrefill, D>,
    },
}

pub struct Ops<D: Timed> {
    append: Layers<RopeAppend, D>,
    rest: Rest<D>,
}

impl<D: Timed> Ops<D> {
    /// All ops, bound to the problem's layers.
    pub fn new(gpu: &D, problem: &Problem<D::Buffer>) -> Result<Self> {
        let (spec, shape) = (problem.spec, problem.shape);
        let (heads, tokens) = (spec.shape.num_heads, shape.tokens());
        let rope = spec.shape.qk_rope_head_dim;
        let q_pe = queries(gpu, problem, heads * rope)?;
        let rotated = View::dense(&q_pe, heads, rope);
        let append = RopeAppend {
            append: KvAppend { shape: spec.shape, kv: spec.kv, input: DTYPE, guard: false },
            query: DTYPE,
            query_out: spec.query,
            num_heads: heads,
            layout: spec.rope,
        };
        // Steps have positions of their own: this is unread.
        let positions = gpu.buffer(u64::from(tokens) * 4)?;
        let layers = (0..problem.copies).map(|copy| {
            let args = problem.args(copy);
            RopeAppendArgs {
                q_pe: args.q_pe,
                q_pe_out: rotated,
                layer: KvAppendArgs {
                    kv_c: args.kv_c,
                    k_pe: args.k_pe,
                    kv: args.kv,
                    k_scale: 1.0,
                    guard: None,
                },
                positions: &positions,
                cos_sin: args.cos_sin,
                max_position: args.max_position,
                q_pe_scale: if spec.query == DTYPE { KEYS } else { 1.0 },
                q_scale: args.q_scale,
            }
        });
        let positions = Some(&problem.batch.positions[..]);
        let batch = RopeAppendBatch { slot_mapping: &problem.batch.slot_mapping, positions };
        let append = Layers::new(gpu.compile(append)?, tokens, batch, layers)?;
        let rest =
            if shape.is_prompt() { prompt(gpu, problem, rotated)? } else { decode(gpu, problem, rotated)? };
        Ok(Self { append, rest })
    }

    /// Runs each op of the first layer, in the layer's order.
    pub fn run_first(&self) -> Result<()> {
        self.append.run_first()?;
        match &self.rest {
            Rest::Decode { absorb, decode, v_up } => {
                absorb.run_first()?;
                decode.run_first()?;
                v_up.run_first()?;
            }
            Rest::Prompt { gather, k_up, v_up, prefill } => {
                gather.run_first()?;
                k_up.run_first()?;
                v_up.run_first()?;
                prefill.run_first()?;
            }
        }
        Ok(())
    }

    /// Times each op by itself.
    pub fn time(&self, gpu: &D, replays: usize) -> Result<Vec<(&'static str, Timing)>> {
        let mut parts = vec![("rope_append", gpu.time(replays, |r, call| self.append.record(r, call))?)];
        match &self.rest {
            Rest::Decode { absorb, decode, v_up } => {
                parts.push(("absorb", gpu.time(replays, |r, call| absorb.record(r, call))?));
                parts.push(("decode", gpu.time(replays, |r, call| decode.record(r, call))?));
                parts.push(("v_up", gpu.time(replays, |r, call| v_up.record(r, call))?));
            }
            Rest::Prompt { gather, k_up, v_up, prefill } => {
                parts.push(("kv_gather", gpu.time(replays, |r, call| gather.record(r, call))?));
                parts.push(("k_up", gpu.time(replays, |r, call| k_up.record(r, call))?));
                parts.push(("v_up", gpu.time(replays, |r, call| v_up.record(r, call))?));
                parts.push(("prefill", gpu.time(replays, |r, call| prefill.record(r, call))?));
            }
        }
        Ok(parts)
    }
}

/// The factors of what a layer of f16 stores between its ops: docs/numbers.md, "Range of a layer of f16".
const SATURATES: bool = matches!(DTYPE, wgpu_mla::Dtype::F16);
const KEYS: f32 = if SATURATES { 1.0 / 64.0 } else { 1.0 };
const VALUES: f32 = if SATURATES { 1.0 / 8.0 } else { 1.0 };

/// Absorbed queries of all tokens.
fn queries<D: Timed>(gpu: &D, problem: &Problem<D::Buffer>, elems: u32) -> Result<D::Buffer> {
    let bytes = problem.spec.query.bytes() as u64;
    Ok(gpu.buffer(u64::from(problem.shape.tokens()) * u64::from(elems) * bytes)?)
}

fn array<D: Timed>(gpu: &D, rows: u32, elems: u32) -> Result<D::Buffer> {
    Ok(gpu.buffer(u64::from(rows) * u64::from(elems) * DTYPE.bytes() as u64)?)
}

fn decode<D: Timed>(gpu: &D, problem: &Problem<D::Buffer>, q_pe: View<&D::Buffer>) -> Result<Rest<D>> {
    let (spec, tokens, dims) = (problem.spec, problem.shape.tokens(), problem.dims());
    let (heads, latent) = (dims.num_heads, dims.kv_lora_rank);
    let (ql_nope, latent_out) = (queries(gpu, problem, heads * latent)?, array(gpu, tokens, heads * latent)?);
    let (ql_nope, latent_out) =
        (View::dense(&ql_nope, heads, latent), View::dense(&latent_out, heads, latent));
    let lse = gpu.buffer(u64::from(tokens * heads) * 4)?;
    let layers = || (0..problem.copies).map(|copy| problem.args(copy));

    let keys = if spec.query == DTYPE { KEYS } else { 1.0 };
    let absorbs = layers().map(|args| HeadProjectArgs {
        x: args.q_nope,
        weight: spec.weights(args.kv_b_proj, args.kv_b_scales).0,
        y: ql_nope,
        scale: keys,
        out_scale: args.q_scale,
        saturates: SATURATES,
        guard: None,
    });
    let absorb = gpu.compile(HeadProject::absorb(&dims, DTYPE, spec.weight, spec.query))?;
    let decodes = layers().map(|args| MlaDecodeArgs {
        query: Query::Split { q_nope: ql_nope, q_pe },
        kv: args.kv,
        out: latent_out,
        lse: View::dense(&lse, heads, 1),
        lse_base: LseBase::E,
        softmax_scale: args.softmax_scale / keys,
        k_scale: 1.0,
        q_scale: args.q_scale,
        indices: None,
        attn_sink: None,
    });
    let mla = gpu.compile(spec.mla())?;
    let batch = Batch::new(&problem.batch.seq_lens, problem.batch.query_start_loc());
    let plan = Plan::new(&spec.mla(), &mla.tiling(), &batch, SplitPolicy::Auto)?;
    let v_ups = layers().map(|args| HeadProjectArgs {
        x: latent_out,
        weight: spec.weights(args.kv_b_proj, args.kv_b_scales).1,
        y: args.out,
        scale: 1.0,
        out_scale: 1.0,
        saturates: false,
        guard: None,
    });
    let v_up = gpu.compile(HeadProject::v_up(&dims, DTYPE, spec.weight, DTYPE))?;
    Ok(Rest::Decode {
        absorb: Layers::new(absorb, tokens, 0..tokens, absorbs)?,
        decode: Layers::new(mla, Capacity::default(), (&plan, problem.batch.pages()), decodes)?,
        v_up: Layers::new(v_up, tokens, 0..tokens, v_ups)?,
    })
}

fn prompt<D: Timed>(gpu: &D, problem: &Problem<D::Buffer>, q_pe: View<&D::Buffer>) -> Result<Rest<D>> {
    let (spec, tokens, dims) = (problem.spec, problem.shape.tokens(), problem.dims());
    let (heads, latent) = (dims.num_heads, dims.kv_lora_rank);
    let (nope, value) = (dims.qk_nope_head_dim, dims.v_head_dim);
    let row = spec.shape.row_elems();
    let rows = array(gpu, tokens, row)?;
    let (k_nope, v) = (array(gpu, tokens, heads * nope)?, array(gpu, tokens, heads * value)?);
    let (k_nope, v) = (View::dense(&k_nope, heads, nope), View::dense(&v, heads, value));
    let rows = View::dense(&rows, 1, row);
    let shared = View { head_stride: 0, ..rows };
    let lse = gpu.buffer(u64::from(tokens * heads) * 4)?;
    let layers = || (0..problem.copies).map(|copy| problem.args(copy));

    let gather = gpu.compile(KvGather { shape: spec.shape, kv: spec.kv, output: DTYPE })?;
    let ranges = [GatherRange { sequence: 0, begin: 0, tokens, out_row: 0 }];
    let batch =
        GatherBatch { pages: problem.batch.pages(), seq_lens: &problem.batch.seq_lens, ranges: &ranges };
    let gathers = layers().map(|args| KvGatherArgs { kv: args.kv, k_scale: 1.0, out: rows });
    let k_ups = layers().map(|args| HeadProjectArgs {
        x: shared,
        weight: spec.weights(args.kv_b_proj, args.kv_b_scales).0,
        y: k_nope,
        scale: KEYS,
        out_scale: 1.0,
        saturates: SATURATES,
        guard: None,
    });
    let v_ups = layers().map(|args| HeadProjectArgs {
        x: shared,
        weight: spec.weights(args.kv_b_proj, args.kv_b_scales).1,
        y: v,
        scale: VALUES,
        out_scale: 1.0,
        saturates: SATURATES,
        guard: None,
    });
    let (k_up, v_up) =
        (HeadProject::k_up(&dims, DTYPE, DTYPE, DTYPE), HeadProject::v_up(&dims, DTYPE, DTYPE, DTYPE));
    let prefill = MlaPrefill {
        num_heads: heads,
        qk_nope_head_dim: nope,
        qk_rope_head_dim: spec.shape.qk_rope_head_dim,
        v_head_dim: value,
        dtype: DTYPE,
        out: DTYPE,
    };
    let prefills = layers().map(|args| MlaPrefillArgs {
        q_nope: args.q_nope,
        q_pe,
        k_nope,
        k_pe: View { offset: latent.into(), ..shared },
        v,
        out: args.out,
        lse: View::dense(&lse, heads, 1),
        softmax_scale: args.softmax_scale / KEYS,
        v_scale: 1.0 / VALUES,
    });
    let prefill = gpu.compile(prefill)?;
    let tiles = tokens.div_ceil(prefill.facts().rows);
    let sequence = [PrefillSequence::causal(0, tokens, 0, tokens)];
    Ok(Rest::Prompt {
        gather: Layers::new(gather, tokens, batch, gathers)?,
        k_up: Layers::new(gpu.compile(k_up)?, tokens, 0..tokens, k_ups)?,
        v_up: Layers::new(gpu.compile(v_up)?, tokens, 0..tokens, v_ups)?,
        prefill: Layers::new(prefill, tiles, &sequence, prefills)?,
    })
}
