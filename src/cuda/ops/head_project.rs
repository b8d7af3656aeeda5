//! `head_project`: each token's rows times the matrix of their head.

use cudarc::driver::DeviceRepr;

use super::place::Place;
use super::table::Table;
use super::{Divisor, THREADS, checked_items};
use crate::cuda::args::code;
use crate::cuda::driver::Kernel;
use crate::cuda::{Buffer, Cuda};
use crate::layer::View;
use crate::ops::{Project, ProjectSpec, WeightOrder};
use crate::{Error, Result};

/// An entry of head_project.cu, and the tokens of its blocks.
type Entry = (&'static str, u32);
const FEW: Entry = ("head_project_few", 16);
const MANY: Entry = ("head_project_many", 64);
/// `COLUMNS` of head_project.cu.
const COLUMNS: u32 = 64;
const CURE: &str = "project in several steps, and bind a part of the tokens for each";

/// `Args` of head_project.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct ProjectArgs {
    x: Place,
    weight: Place,
    y: Place,
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
unsafe impl DeviceRepr for ProjectArgs {}

/// Tokens times the matrices of their heads, in f32: `absorb`, `v_up` and `k_up`. See [`Project`].
///
/// Which of the two kernels runs changes no bit.
#[derive(Debug, Clone)]
pub struct HeadProject {
    cuda: Cuda,
    spec: ProjectSpec,
    /// For few tokens and for many.
    kernels: [Kernel; 2],
}

/// Which tokens a step projects: the same of `x` and `y`. It serves every layer of the model.
///
/// A [`HeadProject::prepare`] rewrites them in place, in the stream's order: a captured graph then replays with the new ones, up to
/// the [`ProjectStep::max_tokens`] that the step had when it was captured.
#[derive(Debug, Default)]
pub struct ProjectStep {
    table: Table,
    first: u32,
    tokens: u32,
    max_tokens: u32,
}

/// One layer's buffers, checked and held.
#[derive(Debug, Clone)]
pub struct ProjectBinding {
    spec: ProjectSpec,
    args: ProjectArgs,
    _buffers: [Buffer; 3],
}

impl ProjectStep {
    /// Tokens of the last [`HeadProject::prepare`].
    pub fn num_tokens(&self) -> u32 {
        self.tokens
    }

    /// Tokens that a launch's grid is for.
    pub fn max_tokens(&self) -> u32 {
        self.max_tokens
    }
}

impl HeadProject {
    /// Loads the projection of a spec.
    ///
    /// # Errors
    /// Those of [`ProjectSpec::check`], and [`Error::Cuda`].
    pub fn new(cuda: &Cuda, spec: ProjectSpec) -> Result<Self> {
        spec.check()?;
        let load = |(name, _): Entry| cuda.kernel(name);
        Ok(Self { cuda: cuda.clone(), spec, kernels: [load(FEW)?, load(MANY)?] })
    }

    /// What this projection was made for.
    pub fn spec(&self) -> &ProjectSpec {
        &self.spec
    }

    /// A step whose grids are for `max_tokens`, and no token yet; [`ProjectStep::default`] leaves it to the first `prepare`.
    ///
    /// # Errors
    /// [`Error::Limit`], [`Error::OutOfMemory`] and [`Error::Cuda`].
    pub fn step(&self, max_tokens: u32) -> Result<ProjectStep> {
        self.grid(max_tokens.into())?;
        Ok(ProjectStep { table: Table::new(&self.cuda, 1)?, first: 0, tokens: 0, max_tokens })
    }

    /// Says which tokens a step projects: `num_tokens` from `first_token` on, of `x` and of `y`.
    ///
    /// # Errors
    /// [`Error::Limit`], with which the step still holds what it held; [`Error::OutOfMemory`], [`Error::Cuda`].
    pub fn prepare(&self, step: &mut ProjectStep, first_token: u32, num_tokens: u32) -> Result<()> {
        self.grid(u64::from(first_token) + u64::from(num_tokens))?;
        step.table.upload(&self.cuda, num_tokens, [first_token])?;
        (step.first, step.tokens) = (first_token, num_tokens);
        step.max_tokens = step.max_tokens.max(num_tokens);
        Ok(())
    }

    /// Checks and binds one layer for steps whose tokens are among the first `args.num_tokens`.
    ///
    /// # Errors
    /// [`Error::Alignment`], [`Error::Shape`], [`Error::BufferTooSmall`], [`Error::Aliased`] where `y` is an input too, [`Error::Limit`].
    pub fn bind(&self, args: &Project<&Buffer>) -> Result<ProjectBinding> {
        let spec = &self.spec;
        args.check(spec, Buffer::bytes)?;
        args.check_aliases(Buffer::same_as)?;
        self.grid(args.num_tokens.into())?;
        let rows = [args.num_tokens, spec.num_heads];
        let weight = View {
            buffer: args.weight.buffer,
            offset: args.weight.offset,
            token_stride: args.weight.row_stride,
            head_stride: args.weight.head_stride,
        };
        let column_tiles = spec.n.div_ceil(COLUMNS);
        let bound = ProjectArgs {
            x: Place::new(&args.x, spec.input.bytes(), rows),
            weight: Place::new(&weight, spec.weight.bytes(), [spec.matrix().0, spec.num_heads]),
            y: Place::new(&args.y, spec.output.bytes(), rows),
            table: 0,
            max_tokens: args.num_tokens,
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
        Ok(ProjectBinding { spec: *spec, args: bound, _buffers: buffers })
    }

    /// Whether a step and a binding can be recorded together.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`].
    pub fn check(&self, step: &ProjectStep, binding: &ProjectBinding) -> Result<()> {
        let end = u64::from(step.first) + u64::from(step.tokens);
        if step.tokens > 0 && end > binding.args.max_tokens.into() {
            let detail = "the step's tokens end past the binding's num_tokens";
            return Err(Error::LayoutMismatch { detail });
        }
        if binding.spec != self.spec {
            return Err(Error::LayoutMismatch { detail: "the binding is of a projection of another spec" });
        }
        Ok(())
    }

    /// Launches one layer's projection on the stream. Allocates nothing, waits for nothing, and may be captured in a graph: its grid is
    /// for what both the step and the binding have, and a replay projects what the step then holds.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`] and [`Error::Cuda`].
    pub fn record(&self, step: &ProjectStep, binding: &ProjectBinding) -> Result<()> {
        self.check(step, binding)?;
        let max_tokens = step.max_tokens.min(binding.args.max_tokens);
        let Some(table) = step.table.ptr().filter(|_| max_tokens > 0) else { return Ok(()) };
        // Every place is in its buffer, whichever pair is recorded and whatever the table holds:
        // - the kernels cut the table's range to the binding's max_tokens, up to where `bind` checked `x` and `y`; tokens past the range
        //   read its last one, and are not stored;
        // - rows and quads of matrices are below k and n by `min`, and those that are stored by comparison; heads are below num_heads, as
        //   the grid has column_tiles * token_tiles blocks of each;
        // - places in shared memory are those of a slice: sums of thread numbers and loop counters below what the arrays have.
        let (tokens_of_block, blocks) = self.grid(max_tokens.into())?;
        let token_tiles = max_tokens.div_ceil(tokens_of_block);
        let args =
            ProjectArgs { table, token_tiles, by_token_tiles: Divisor::new(token_tiles), ..binding.args };
        let [few, many] = &self.kernels;
        let kernel = if tokens_of_block == FEW.1 { few } else { many };
        self.cuda.launch(kernel, blocks, THREADS, 0, &args)
    }

    /// Tokens of a block, and blocks, for so many tokens.
    fn grid(&self, tokens: u64) -> Result<(u32, u32)> {
        let (_, tokens_of_block) = if tokens <= FEW.1.into() { FEW } else { MANY };
        let tiles = u64::from(self.spec.n.div_ceil(COLUMNS)) * tokens.div_ceil(tokens_of_block.into());
        let blocks = tiles.saturating_mul(self.spec.num_heads.into());
        Ok((tokens_of_block, checked_items("blocks of a projection", blocks, CURE)?))
    }
}

#[cfg(test)]
pub(super) const ENTRIES: [&str; 2] = [FEW.0, MANY.0];
