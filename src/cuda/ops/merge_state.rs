//! `merge_state`: two partial attention results into one.

use cudarc::driver::DeviceRepr;

use super::{Divisor, MAX_ITEMS, THREADS};
use crate::base::error::{Error, Result};
use crate::base::view::View;
use crate::cuda::kernels::address;
use crate::cuda::{Buffer, Cuda, Function};
use crate::ops::variants::only;
use crate::ops::{Choice, Kernel, MergeState, MergeStateArgs, OpOptions};

/// Threads of a block, for a merge too small to fill the card.
const FEW_THREADS: u32 = 128;
/// Threads that a multiprocessor runs at a time.
const THREADS_AT_A_TIME: u32 = 2048;

/// `Rows` of merge_state.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Rows<Stride> {
    address: u64,
    token_stride: Stride,
    head_stride: Stride,
}

/// `Args` of merge_state.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct MergeStateParams<Stride> {
    num_items: u32,
    row_items: u32,
    num_heads: u32,
    output_scale: f32,
    by_row_items: Divisor,
    by_num_heads: Divisor,
    prefix_lse: Rows<Stride>,
    suffix_lse: Rows<Stride>,
    prefix_output: Rows<Stride>,
    suffix_output: Rows<Stride>,
    output: Rows<Stride>,
    output_lse: Rows<Stride>,
}

// SAFETY: plain data without padding, as the kernels have it.
unsafe impl DeviceRepr for MergeStateParams<u32> {}
// SAFETY: as above.
unsafe impl DeviceRepr for MergeStateParams<u64> {}

/// The merge by units of 16 bytes, or by elements; the alignment tells which.
#[derive(Debug)]
pub struct Functions {
    /// One or two units of 16 bytes a thread.
    units: [Function; 2],
    /// Any size, offset and stride.
    elements: Function,
}

/// The buffers of one merge, held.
#[derive(Debug)]
pub struct Layer {
    /// `None` where there is nothing to merge.
    work: Option<Work>,
    buffers: [Buffer; 6],
}

#[derive(Debug)]
struct Work {
    kernel: Function,
    grid: u32,
    threads: u32,
    args: Items,
}

#[derive(Debug, Clone, Copy)]
enum Items {
    Units(MergeStateParams<u32>),
    Elements(MergeStateParams<u64>),
}

impl Kernel<MergeState> for Cuda {
    type Kernels = Functions;
    type Step = ();
    type Binding = Layer;

    fn kernel_compile(&self, spec: &MergeState, options: &OpOptions) -> Result<(Functions, (), Choice)> {
        let kernel = |entry: &str| self.kernel(entry);
        let one = kernel(&format!("merge_state_units1_{}", spec.dtype))?;
        let two = kernel(&format!("merge_state_units2_{}", spec.dtype))?;
        let elements = kernel(&format!("merge_state_elements_{}", spec.dtype))?;
        Ok((Functions { units: [one, two], elements }, (), only(options)?))
    }

    fn kernel_step(&self, _: &MergeState, _: &Functions, (): ()) -> Result<()> {
        Ok(())
    }

    fn kernel_prepare(&self, _: &MergeState, _: &Functions, (): &mut (), (): ()) -> Result<()> {
        Ok(())
    }

    fn kernel_bind(
        &self,
        spec: &MergeState,
        kernels: &Functions,
        args: &MergeStateArgs<&Buffer>,
        (): (),
    ) -> Result<Layer> {
        let work = if args.is_empty() { None } else { Some(work(self, kernels, spec, args)?) };
        let views = [args.prefix_output, args.prefix_lse, args.suffix_output, args.suffix_lse, args.output];
        let [a, b, c, d, e] = views.map(|view| view.buffer.clone());
        let last = args.output_lse.unwrap_or(args.output).buffer.clone();
        Ok(Layer { work, buffers: [a, b, c, d, e, last] })
    }

    fn kernel_record(
        &self,
        _: &MergeState,
        _: &Functions,
        (): &mut (),
        (): &(),
        layer: &Layer,
    ) -> Result<()> {
        let Some(Work { kernel, grid, threads, args }) = &layer.work else { return Ok(()) };
        match args {
            Items::Units(args) => self.launch(kernel, *grid, *threads, 0, args, &layer.buffers),
            Items::Elements(args) => self.launch(kernel, *grid, *threads, 0, args, &layer.buffers),
        }
    }
}

fn work(cuda: &Cuda, kernels: &Functions, spec: &MergeState, args: &MergeStateArgs<&Buffer>) -> Result<Work> {
    // bounds: merge_state
    let [one, two] = &kernels.units;
    if let Some(in_units) = MergeStateParams::<u32>::new(spec, args, 16 / spec.dtype.bytes() as u32) {
        // With few items each thread takes one, to occupy more multiprocessors.
        let fills = cuda.card().multiprocessors * THREADS_AT_A_TIME;
        let (kernel, per_thread, threads) = match in_units.num_items / fills {
            0 => (one, 1, FEW_THREADS),
            1 => (one, 1, THREADS),
            _ => (two, 2, THREADS),
        };
        let grid = in_units.num_items.div_ceil(threads * per_thread);
        return Ok(Work { kernel: kernel.clone(), grid, threads, args: Items::Units(in_units) });
    }
    let Some(in_elements) = MergeStateParams::<u64>::new(spec, args, 1) else {
        let need = merge_items(spec, args, 1);
        let cure = "merge fewer tokens a call";
        return Err(Error::Limit { what: "elements of a merge", need, limit: MAX_ITEMS.into(), cure });
    };
    let (kernel, grid) = (kernels.elements.clone(), in_elements.num_items.div_ceil(THREADS));
    Ok(Work { kernel, grid, threads: THREADS, args: Items::Elements(in_elements) })
}

fn merge_items(spec: &MergeState, args: &MergeStateArgs<&Buffer>, unit: u32) -> u64 {
    let rows = u64::from(args.num_tokens).saturating_mul(args.num_heads.into());
    rows.saturating_mul((spec.head_size / unit).into())
}

impl<Stride: TryFrom<u64> + Default> MergeStateParams<Stride> {
    /// Arguments with items of `unit` elements. `None` where a size, offset or stride is no multiple of that, or too large for its type.
    fn new(spec: &MergeState, args: &MergeStateArgs<&Buffer>, unit: u32) -> Option<Self> {
        // The stride of a dimension of one is unused and may be anything.
        let stride = |count: u32, elems: u64, unit: u32| match count {
            0 | 1 => Some(Stride::default()),
            _ if elems.is_multiple_of(unit.into()) => Stride::try_from(elems / u64::from(unit)).ok(),
            _ => None,
        };
        let rows = |view: View<&Buffer>, bytes: u64, unit: u32| {
            let address = address(view.buffer, view.offset, bytes as usize);
            Some(Rows {
                address: address.is_multiple_of(bytes * u64::from(unit)).then_some(address)?,
                token_stride: stride(args.num_tokens, view.token_stride, unit)?,
                head_stride: stride(args.num_heads, view.head_stride, unit)?,
            })
        };
        let bytes = spec.dtype.bytes() as u64;
        let row_items = spec.head_size.is_multiple_of(unit).then_some(spec.head_size / unit)?;
        Some(Self {
            num_items: u32::try_from(merge_items(spec, args, unit))
                .ok()
                .filter(|&items| items <= MAX_ITEMS)?,
            row_items,
            num_heads: args.num_heads,
            output_scale: args.output_scale,
            by_row_items: Divisor::new(row_items),
            by_num_heads: Divisor::new(args.num_heads),
            prefix_lse: rows(args.prefix_lse, 4, 1)?,
            suffix_lse: rows(args.suffix_lse, 4, 1)?,
            prefix_output: rows(args.prefix_output, bytes, unit)?,
            suffix_output: rows(args.suffix_output, bytes, unit)?,
            output: rows(args.output, bytes, unit)?,
            output_lse: args.output_lse.map_or(Some(Rows::default()), |view| rows(view, 4, 1))?,
        })
    }
}
