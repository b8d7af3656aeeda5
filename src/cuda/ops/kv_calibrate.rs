//! `kv_calibrate`: amax and saturation counts of new tokens, for an e4m3 cache's `k_scale`.

use super::single::{SingleOp, kernel_args};
use super::table::Table;
use super::{Divisor, address, checked_items, stride};
use crate::base::error::Result;
use crate::cuda::{Buffer, Cuda};
use crate::ops::{KvCalibrate, KvCalibrateArgs};

/// `TOKENS_PER_THREAD` of kv_calibrate.cu.
const TOKENS_PER_THREAD: u32 = 8;

kernel_args! {
    /// `Args` of kv_calibrate.cu.
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
}

impl SingleOp for KvCalibrate {
    type Params = CalibrateParams;

    fn entries(&self) -> Vec<String> {
        vec![format!("kv_calibrate_{}", self.input)]
    }

    fn new_table(cuda: &Cuda, (): ()) -> Result<Table> {
        Table::new(cuda, 1, 0)
    }

    fn capacity(_: &Table) {}

    fn params(&self, args: &KvCalibrateArgs<&Buffer>, max_tokens: u32) -> Result<CalibrateParams> {
        items(self, max_tokens)?;
        let (k_pe, bytes, row_quads) = (args.rotary(self), self.input.bytes(), self.shape.row_elems() / 4);
        Ok(CalibrateParams {
            kv_c: address(args.kv_c.buffer, args.kv_c.offset, bytes),
            k_pe: address(k_pe.buffer, k_pe.offset, bytes),
            stats: args.stats.ptr(),
            kv_c_stride: stride(max_tokens, args.kv_c.token_stride, bytes),
            k_pe_stride: stride(max_tokens, k_pe.token_stride, bytes),
            max_tokens,
            latent_quads: self.shape.kv_lora_rank / 4,
            row_quads,
            limit_bits: args.limit().to_bits(),
            by_row_quads: Divisor::new(row_quads),
            ..CalibrateParams::default()
        })
    }

    fn launch(&self, params: CalibrateParams, table: &Table) -> Result<(CalibrateParams, u64)> {
        // bounds: kv_calibrate
        let items = items(self, params.max_tokens)?;
        Ok((CalibrateParams { table: table.address(), ..params }, items.into()))
    }
}

/// An item is a quad (4 consecutive elements) of TOKENS_PER_THREAD tokens.
fn items(spec: &KvCalibrate, tokens: u32) -> Result<u32> {
    let blocks = u64::from(tokens.div_ceil(TOKENS_PER_THREAD));
    let items = blocks * u64::from(spec.shape.row_elems() / 4);
    checked_items("items of a calibration", items, "calibrate in several steps")
}
