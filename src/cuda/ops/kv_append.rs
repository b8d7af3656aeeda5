//! `kv_append`: new tokens into the paged cache, vLLM's `concat_and_cache_mla`.

use super::codes::E4m3Scale;
use super::guard::Guard;
use super::single::{SingleOp, kernel_args};
use super::table::Table;
use super::{Divisor, address, checked_items, stride};
use crate::base::error::Result;
use crate::cache::Scales;
use crate::cuda::{Buffer, Cuda};
use crate::ops::{KvAppend, KvAppendArgs};

/// `TOKENS_PER_THREAD` of kv_append.cu.
const TOKENS_PER_THREAD: u32 = 4;

kernel_args! {
    /// `AppendParams` of append.cuh.
    pub struct AppendParams {
        kv_c: u64,
        k_pe: u64,
        kv: u64,
        table: u64,
        kv_c_stride: u64,
        k_pe_stride: u64,
        block_stride: u64,
        max_tokens: u32,
        num_slots: u32,
        first_slot: u32,
        reserved_0: u32,
        page_size: u32,
        latent_octs: u32,
        row_octs: u32,
        is_wide: u32,
        by_row_octs: Divisor,
        by_page_size: Divisor,
        scale: E4m3Scale,
        guard: Guard,
    }
}

impl AppendParams {
    /// One checked layer, for up to `max_tokens` tokens; without a table.
    pub(super) fn new(spec: &KvAppend, args: &KvAppendArgs<&Buffer>, max_tokens: u32) -> Self {
        let (shape, kv, k_pe) = (&spec.shape, &args.kv, args.rotary(spec));
        let (input, row_octs) = (spec.input.bytes(), shape.row_elems() / 8);
        let rows = [&args.kv_c, &k_pe].map(|view| {
            let first = address(view.buffer, view.offset, input);
            (first, stride(max_tokens, view.token_stride, input))
        });
        let (first_slot, num_slots) = kv.slots(&spec.kv);
        let is_wide = rows.iter().all(|(first, stride)| (first | stride).is_multiple_of(16));
        Self {
            kv_c: rows[0].0,
            k_pe: rows[1].0,
            kv: address(kv.buffer, kv.base(), 1),
            kv_c_stride: rows[0].1,
            k_pe_stride: rows[1].1,
            block_stride: stride(spec.kv.num_pages, kv.block_stride, 1),
            max_tokens,
            num_slots,
            first_slot,
            page_size: spec.kv.page_size,
            latent_octs: shape.kv_lora_rank / 8,
            row_octs,
            is_wide: is_wide.into(),
            by_row_octs: Divisor::new(row_octs),
            by_page_size: Divisor::new(spec.kv.page_size),
            scale: E4m3Scale::new(args.k_scale),
            guard: Guard::new(args.guard.as_ref(), spec.guard_bounds(args.k_scale)[1]),
            ..Self::default()
        }
    }

    /// With a table, and as many tokens as it and the layer have room for.
    pub(super) fn with_table(self, table: &Table) -> Self {
        Self { table: table.address(), max_tokens: table.room(1).min(self.max_tokens), ..self }
    }

    pub(super) fn max_tokens(&self) -> u32 {
        self.max_tokens
    }
}

impl SingleOp for KvAppend {
    type Params = AppendParams;
    const SERVES_RECORDS: bool = true;

    fn entries(&self) -> Vec<String> {
        vec![format!("kv_append_{}_{}", self.input, self.kv.layout)]
    }

    fn new_table(cuda: &Cuda, max_tokens: u32) -> Result<Table> {
        Table::new(cuda, max_tokens.into(), 0)
    }

    fn capacity(table: &Table) -> u32 {
        table.room(1)
    }

    fn params(&self, args: &KvAppendArgs<&Buffer>, max_tokens: u32) -> Result<AppendParams> {
        items(self, max_tokens)?;
        Ok(AppendParams::new(self, args, max_tokens))
    }

    fn launch(&self, params: AppendParams, table: &Table) -> Result<(AppendParams, u64)> {
        // bounds: kv_append
        let params = params.with_table(table);
        Ok((params, items(self, params.max_tokens)?.into()))
    }
}

/// An item is an oct (8 consecutive elements) of TOKENS_PER_THREAD tokens; of a record, rounded up to whole groups that share a scale.
fn items(spec: &KvAppend, tokens: u32) -> Result<u32> {
    let blocks = u64::from(tokens.div_ceil(TOKENS_PER_THREAD));
    let row = match spec.kv.token(&spec.shape).scales {
        Scales::Groups { of, .. } => spec.shape.row_elems().next_multiple_of(of),
        Scales::None | Scales::PerTensor | Scales::PageFooter => spec.shape.row_elems(),
    };
    let items = blocks * u64::from(row / 8);
    checked_items("items of an append", items, "append in several steps")
}
