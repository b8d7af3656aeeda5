//! `kv_calibrate`: amax and saturation counts of new tokens, for an e4m3 cache's `k_scale`.

use std::ops::Range;

use cudarc::driver::DeviceRepr;

use super::table::Table;
use super::{Divisor, THREADS, address, checked_items, stride};
use crate::Result;
use crate::cuda::{Buffer, Cuda, Function};
use crate::ops::variants::only;
use crate::ops::{Choice, Kernel, KvCalibrate, KvCalibrateArgs, OpOptions};
use crate::view::check_tokens;

/// `TOKENS_PER_THREAD` of kv_calibrate.cu.
const TOKENS_PER_THREAD: u32 = 8;

/// `Args` of kv_calibrate.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CalibrateParams {
    kv_c: u64,
    k_pe: u64,
    table: u64,
    stats: u64,
    kv_c_stride: u64,
    k_pe_stride: u64,
    max_tokens: u32,
    latent_quads: u32,
    row_quads: u32,
    limit_bits: u32,
    by_row_quads: Divisor,
}

// SAFETY: plain data without padding, as the kernels have it.
unsafe impl DeviceRepr for CalibrateParams {}

/// One layer's new tokens and counters. It owns handles of the buffers.
#[derive(Debug)]
pub struct Layer {
    args: CalibrateParams,
    buffers: [Buffer; 3],
}

impl Kernel<KvCalibrate> for Cuda {
    type Kernels = Function;
    type Step = Table;
    type Binding = Layer;

    fn kernel_compile(&self, spec: &KvCalibrate, options: &OpOptions) -> Result<(Function, (), Choice)> {
        let kernel = self.kernel(&calibrate_entry(spec))?;
        Ok((kernel, (), only(options)?))
    }

    fn kernel_step(&self, _: &KvCalibrate, _: &Function, (): ()) -> Result<Table> {
        Table::new(self, 1)
    }

    fn kernel_prepare(
        &self,
        _: &KvCalibrate,
        _: &Function,
        step: &mut Table,
        tokens: Range<u32>,
    ) -> Result<u32> {
        let (count, end) = check_tokens(&tokens)?;
        step.upload(self, count, [tokens.start])?;
        Ok(end)
    }

    fn kernel_bind(
        &self,
        spec: &KvCalibrate,
        _: &Function,
        args: &KvCalibrateArgs<&Buffer>,
        max_tokens: u32,
    ) -> Result<Layer> {
        items(spec, max_tokens)?;
        let (k_pe, bytes, row_quads) = (args.rotary(spec), spec.input.bytes(), spec.shape.row_elems() / 4);
        let bound = CalibrateParams {
            kv_c: address(args.kv_c.buffer, args.kv_c.offset, bytes),
            k_pe: address(k_pe.buffer, k_pe.offset, bytes),
            table: 0,
            stats: args.stats.ptr(),
            kv_c_stride: stride(max_tokens, args.kv_c.token_stride, bytes),
            k_pe_stride: stride(max_tokens, k_pe.token_stride, bytes),
            max_tokens,
            latent_quads: spec.shape.kv_lora_rank / 4,
            row_quads,
            limit_bits: args.limit().to_bits(),
            by_row_quads: Divisor::new(row_quads),
        };
        Ok(Layer { args: bound, buffers: [args.kv_c.buffer, k_pe.buffer, args.stats].map(Buffer::clone) })
    }

    /// The grid covers the binding's capacity: a captured launch counts the tokens that the step's table holds at the replay.
    fn kernel_record(
        &self,
        spec: &KvCalibrate,
        kernel: &Function,
        (): &mut (),
        step: &Table,
        layer: &Layer,
    ) -> Result<()> {
        let Some(table) = step.ptr() else { return Ok(()) };
        // Every address is in its buffer, for every pair of step and binding and whatever the table holds: the kernel reads rows of
        // tokens below max_tokens, whose last row's end `check_args` found inside, and adds to 8 words of counters, likewise checked.
        let items = items(spec, layer.args.max_tokens)?;
        let args = CalibrateParams { table, ..layer.args };
        self.launch(
            kernel,
            items.div_ceil(THREADS),
            THREADS,
            0,
            &args,
            layer.buffers.iter().chain(step.buffer()),
        )
    }
}

/// An item is a quad (4 consecutive elements) of TOKENS_PER_THREAD tokens.
fn items(spec: &KvCalibrate, tokens: u32) -> Result<u32> {
    let blocks = u64::from(tokens.div_ceil(TOKENS_PER_THREAD));
    let items = blocks * u64::from(spec.shape.row_elems() / 4);
    checked_items("items of a calibration", items, "calibrate in several steps")
}

pub(super) fn calibrate_entry(spec: &KvCalibrate) -> String {
    format!("kv_calibrate_{}", spec.input)
}
