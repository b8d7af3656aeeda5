//! `rope_append`: `rope` and `kv_append` fused in one launch, before a decode.

use cudarc::driver::DeviceRepr;

use super::kv_append::AppendParams;
use super::rope::{CURE, Rows, THREADS};
use super::table::Table;
use super::{Divisor, checked_items, code};
use crate::Result;
use crate::cuda::{Buffer, Cuda, Function};
use crate::ops::variants::only;
use crate::ops::{Choice, Kernel, OpOptions, RopeAppend, RopeAppendArgs, RopeAppendBatch, RopeAppendExtent};

/// Lanes of a warp; each kind of a token's items begins at a multiple.
const LANES: u32 = 32;

/// `Args` of rope_append.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct RopeAppendParams {
    query: Rows,
    append: AppendParams,
    query_dtype: u32,
    query_items: u32,
    key_items: u32,
    token_items: u32,
    by_token_items: Divisor,
}

// SAFETY: plain data without padding, as the kernels have it.
unsafe impl DeviceRepr for RopeAppendParams {}

/// One layer's buffers, held.
#[derive(Debug)]
pub struct Layer {
    args: RopeAppendParams,
    buffers: [Buffer; 7],
}

impl Kernel<RopeAppend> for Cuda {
    type Kernels = Function;
    type Step = Table;
    type Binding = Layer;

    fn kernel_compile(&self, spec: &RopeAppend, options: &OpOptions) -> Result<(Function, (), Choice)> {
        let kernel = self.kernel(&rope_append_entry(spec))?;
        Ok((kernel, (), only(options)?))
    }

    fn kernel_step(&self, _: &RopeAppend, _: &Function, max_tokens: u32) -> Result<Table> {
        Table::new(self, max_tokens.into())
    }

    fn kernel_capacity(step: &Table) -> u32 {
        step.room(1)
    }

    /// Whether it has positions of its own: the kernel is given where they are.
    fn kernel_form(step: &Table) -> u64 {
        step.positions().is_some().into()
    }

    fn kernel_prepare(
        &self,
        spec: &RopeAppend,
        _: &Function,
        step: &mut Table,
        batch: RopeAppendBatch<'_>,
    ) -> Result<RopeAppendExtent> {
        let used = batch.extent()?;
        let slots = spec.append.slots(batch.slot_mapping)?;
        step.upload(self, used.tokens, slots)?;
        step.upload_positions(self, batch.positions)?;
        Ok(used)
    }

    fn kernel_bind(
        &self,
        spec: &RopeAppend,
        _: &Function,
        args: &RopeAppendArgs<&Buffer>,
        RopeAppendExtent { tokens: max_tokens, .. }: RopeAppendExtent,
    ) -> Result<Layer> {
        items(spec, max_tokens)?;
        let token_items = Items::of(spec);
        let bound = RopeAppendParams {
            query: Rows::new(&spec.rope(), &args.rope(), max_tokens),
            append: AppendParams::new(&spec.append, &args.layer, max_tokens),
            query_dtype: code(spec.query),
            query_items: token_items.query,
            key_items: token_items.key,
            token_items: token_items.all(),
            by_token_items: Divisor::new(token_items.all()),
        };
        let (queries, layer) = ([args.q_pe.buffer, args.q_pe_out.buffer], &args.layer);
        let [a, b] = queries.map(Buffer::clone);
        let [c, d] = [args.positions, args.cos_sin].map(Buffer::clone);
        let [e, f, g] = [layer.kv_c.buffer, layer.k_pe.buffer, layer.kv.buffer].map(Buffer::clone);
        Ok(Layer { args: bound, buffers: [a, b, c, d, e, f, g] })
    }

    /// The grid covers the smaller capacity of step and binding: a captured launch rotates and appends what the step's table holds at the replay.
    fn kernel_record(
        &self,
        spec: &RopeAppend,
        kernel: &Function,
        (): &mut (),
        step: &Table,
        layer: &Layer,
    ) -> Result<()> {
        let Some(append) = layer.args.append.for_table(step) else { return Ok(()) };
        // Every address is in its buffer, for every pair of step and binding and whatever the table holds:
        // - the kernel reads slots, positions and rows of tokens below max_tokens, for which the table has room, for its positions too,
        //   and up to whose last `check_args` found rows and positions, and takes those below the table's count;
        // - inside a row: part < head_units, units or latent_octs, by their shares of token_items;
        // - 0 <= position < max_position, by `max` and `min` in the kernel, and cos_sin has as many rows (`check_args`);
        // - it writes slots below num_slots only, of pages whose last one's end `check_args` found inside.
        let items = items(spec, append.max_tokens())?;
        let query =
            step.positions().map_or(layer.args.query, |positions| layer.args.query.at_positions(positions));
        let args = RopeAppendParams { append, query, ..layer.args };
        self.launch(
            kernel,
            items.div_ceil(THREADS),
            THREADS,
            0,
            &args,
            layer.buffers.iter().chain(step.held()),
        )
    }
}

fn items(spec: &RopeAppend, tokens: u32) -> Result<u32> {
    let items = u64::from(tokens) * u64::from(Items::of(spec).all());
    checked_items("items of a rotation", items, CURE)
}

/// A token's items: `query_items`, `key_items` and octs of the latent.
struct Items {
    query: u32,
    key: u32,
    latent: u32,
}

impl Items {
    fn of(spec: &RopeAppend) -> Self {
        let units = spec.append.shape.qk_rope_head_dim / 8;
        Self {
            query: (units * spec.num_heads).next_multiple_of(LANES),
            key: units.next_multiple_of(LANES),
            latent: spec.append.shape.kv_lora_rank / 8,
        }
    }

    fn all(&self) -> u32 {
        self.query + self.key + self.latent
    }
}

pub(super) fn rope_append_entry(spec: &RopeAppend) -> String {
    format!("rope_append_{}_{}", spec.append.input, spec.append.kv.dtype())
}
