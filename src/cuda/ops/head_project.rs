//! `head_project`: a batched GEMM, each head's rows times its matrix.

use std::ops::Range;

use cudarc::driver::DeviceRepr;

use super::array::Array;
use super::range::TokenTable;
use super::{Divisor, THREADS, checked_items, code};
use crate::Result;
use crate::cuda::{Buffer, Cuda, Function};
use crate::ops::variants::only;
use crate::ops::{Choice, HeadProject, HeadProjectArgs, Kernel, OpOptions, WeightOrder};
use crate::view::View;

/// An entry of head_project.cu, and the tokens of its tile.
type Entry = (&'static str, u32);
const FEW: Entry = ("head_project_few", 16);
const MANY: Entry = ("head_project_many", 64);
/// `COLUMNS` of head_project.cu.
const COLUMNS: u32 = 64;
const CURE: &str = "project in several steps, and bind a part of the tokens for each";

/// `Args` of head_project.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ProjectParams {
    x: Array,
    weight: Array,
    y: Array,
    table: u64,
    max_tokens: u32,
    k_quads: u32,
    n_quads: u32,
    x_dtype: u32,
    weight_dtype: u32,
    y_dtype: u32,
    is_kn: u32,
    column_tiles: u32,
    token_tiles: u32,
    reserved: u32,
    by_column_tiles: Divisor,
    by_token_tiles: Divisor,
}

// SAFETY: plain data without padding, as the kernels have it.
unsafe impl DeviceRepr for ProjectParams {}

/// For few tokens and for many; both give the same bits.
#[derive(Debug)]
pub struct Functions {
    few: Function,
    many: Function,
}

/// One layer's buffers, held.
#[derive(Debug)]
pub struct Layer {
    args: ProjectParams,
    buffers: [Buffer; 3],
}

impl Kernel<HeadProject> for Cuda {
    type Kernels = Functions;
    type Step = TokenTable;
    type Binding = Layer;

    fn kernel_compile(&self, _: &HeadProject, options: &OpOptions) -> Result<(Functions, (), Choice)> {
        let load = |(name, _): Entry| self.kernel(name);
        Ok((Functions { few: load(FEW)?, many: load(MANY)? }, (), only(options)?))
    }

    fn kernel_step(&self, _: &HeadProject, _: &Functions, max_tokens: u32) -> Result<TokenTable> {
        TokenTable::new(self, max_tokens)
    }

    fn kernel_capacity(step: &TokenTable) -> u32 {
        step.max_tokens()
    }

    fn kernel_prepare(
        &self,
        _: &HeadProject,
        _: &Functions,
        step: &mut TokenTable,
        tokens: Range<u32>,
    ) -> Result<u32> {
        step.upload(self, &tokens)
    }

    fn kernel_bind(
        &self,
        spec: &HeadProject,
        _: &Functions,
        args: &HeadProjectArgs<&Buffer>,
        max_tokens: u32,
    ) -> Result<Layer> {
        grid(spec, max_tokens)?;
        let rows = [max_tokens, spec.num_heads];
        let weight = View {
            buffer: args.weight.buffer,
            offset: args.weight.offset,
            token_stride: args.weight.row_stride,
            head_stride: args.weight.head_stride,
        };
        let column_tiles = spec.n.div_ceil(COLUMNS);
        let bound = ProjectParams {
            x: Array::new(&args.x, spec.input.bytes(), rows),
            weight: Array::new(&weight, spec.weight.bytes(), [spec.matrix().0, spec.num_heads]),
            y: Array::new(&args.y, spec.output.bytes(), rows),
            table: 0,
            max_tokens,
            k_quads: spec.k / 4,
            n_quads: spec.n / 4,
            x_dtype: code(spec.input),
            weight_dtype: code(spec.weight),
            y_dtype: code(spec.output),
            is_kn: (spec.order == WeightOrder::Kn).into(),
            column_tiles,
            token_tiles: 0,
            reserved: 0,
            by_column_tiles: Divisor::new(column_tiles),
            by_token_tiles: Divisor::new(1),
        };
        let buffers = [args.x.buffer, args.weight.buffer, args.y.buffer].map(Buffer::clone);
        Ok(Layer { args: bound, buffers })
    }

    /// The grid covers the smaller capacity of step and binding: a captured launch projects what the step's range holds at the replay.
    fn kernel_record(
        &self,
        spec: &HeadProject,
        kernels: &Functions,
        (): &mut (),
        step: &TokenTable,
        layer: &Layer,
    ) -> Result<()> {
        let max_tokens = step.max_tokens().min(layer.args.max_tokens);
        if max_tokens == 0 {
            return Ok(());
        }
        // Every address is in its buffer, for every pair of step and binding and whatever the table holds:
        // - the kernels cut the table's range to the binding's max_tokens, up to where `check_args` found `x` and `y`; tokens past the range
        //   read its last one, and are not stored;
        // - rows and quads of matrices are below k and n by `min`, and those that are stored by comparison; heads are below num_heads, as
        //   the grid has column_tiles * token_tiles blocks of each;
        // - offsets in shared memory are those of a slice: sums of thread numbers and loop counters below what the arrays have.
        let (tokens_of_block, blocks) = grid(spec, max_tokens)?;
        let token_tiles = max_tokens.div_ceil(tokens_of_block);
        let by_token_tiles = Divisor::new(token_tiles);
        let args = ProjectParams { table: step.ptr(), token_tiles, by_token_tiles, ..layer.args };
        let kernel = if tokens_of_block == FEW.1 { &kernels.few } else { &kernels.many };
        self.launch(kernel, blocks, THREADS, 0, &args, layer.buffers.iter().chain(step.buffer()))
    }
}

/// Tokens of a block, and the number of blocks, for a number of tokens.
fn grid(spec: &HeadProject, tokens: u32) -> Result<(u32, u32)> {
    let (_, tokens_of_block) = if tokens <= FEW.1 { FEW } else { MANY };
    let tiles = u64::from(spec.n.div_ceil(COLUMNS)) * u64::from(tokens.div_ceil(tokens_of_block));
    let blocks = tiles.saturating_mul(spec.num_heads.into());
    Ok((tokens_of_block, checked_items("blocks of a projection", blocks, CURE)?))
}

#[cfg(test)]
pub(super) const ENTRIES: [&str; 2] = [FEW.0, MANY.0];
