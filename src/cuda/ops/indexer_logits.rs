//! `indexer_logits`: scores of index keys, a run of them a block.

use super::single::kernel_args;
use super::table::Table;
use super::{Divisor, MAX_ITEMS, address, checked_items, code, stride};
#[cfg(test)]
use crate::base::dtype::Dtype;
use crate::base::error::Result;
use crate::cuda::caps::Card;
use crate::cuda::kernels::ptx;
use crate::cuda::{Buffer, Cuda, Function};
use crate::ops::indexer_logits::runs::{Cut, RUN_WORDS};
use crate::ops::variants::{Variant, candidates, choose};
use crate::ops::{
    Candidate, Choice, IndexerLogits, IndexerLogitsArgs, IndexerLogitsBatch, IndexerLogitsCapacity,
    IndexerLogitsExtent, Kernel, OpOptions,
};

/// A kernel, and its blocks.
#[derive(Debug, Clone)]
struct Body {
    name: String,
    threads: u32,
    shared_bytes: u32,
    /// Keys that a block scores at a time.
    keys: u32,
    /// Blocks that fill a multiprocessor.
    resident: u32,
}

/// In dispatch order; the last runs everywhere.
const VARIANTS: [Variant<Card, IndexerLogits, Body>; 3] = [
    Variant::new("wgmma", |card: &Card, spec| {
        card.has_wgmma()?;
        on_tensor_cores(card, spec, "wgmma")
    })
    .on_tensor_cores(),
    Variant::new("mma", |card, spec| on_tensor_cores(card, spec, "mma")).on_tensor_cores(),
    Variant::new("simple", |_, spec| Ok(simple(spec))),
];

/// What keys and queries of kernels on tensor cores are: what f16 or bf16 holds of both.
#[cfg(test)]
const PAIRS: [(Dtype, Dtype); 5] = [
    (Dtype::E4m3, Dtype::E4m3),
    (Dtype::E4m3, Dtype::F16),
    (Dtype::E4m3, Dtype::Bf16),
    (Dtype::F16, Dtype::F16),
    (Dtype::Bf16, Dtype::Bf16),
];

/// # Errors
/// What is missing.
fn on_tensor_cores(card: &Card, spec: &IndexerLogits, by: &str) -> Result<Body, String> {
    let (key, query) = (spec.key(), spec.query);
    let heads = if spec.num_heads > 32 { 64 } else { 32 };
    let name = format!("indexer_logits_{by}_h{heads}_{key}_{query}");
    let entry = ptx::named(&name).ok_or_else(|| format!("no kernel for {key} keys and {query} queries"))?;
    card.has_shared(entry.shared_bytes)?;
    // A multiprocessor has 64 Ki registers, and as much shared memory as a block may have, or a little more.
    let by_registers = (64 << 10) / (entry.registers.next_multiple_of(8) * entry.threads);
    let resident = by_registers.min(card.shared_bytes / entry.shared_bytes).max(1);
    Ok(Body { name, threads: entry.threads, shared_bytes: entry.shared_bytes, keys: 128, resident })
}

/// The kernel without tensor cores.
fn simple(spec: &IndexerLogits) -> Body {
    let name = format!("indexer_logits_simple_{}", spec.key());
    Body { name, threads: 128, shared_bytes: 0, keys: 128, resident: 4 }
}

kernel_args! {
    /// `Args` of indexer_logits.cuh.
    pub struct LogitsParams {
        q: u64,
        weights: u64,
        kv: u64,
        logits: u64,
        table: u64,
        q_token_stride: u64,
        q_head_stride: u64,
        weights_token_stride: u64,
        weights_head_stride: u64,
        block_stride: u64,
        logits_row_stride: u64,
        max_tokens: u32,
        max_rows: u32,
        max_columns: u32,
        max_runs: u32,
        first_page: u32,
        num_pages: u32,
        num_heads: u32,
        page_size: u32,
        is_wide: u32,
        query: u32,
        reserved_0: u32,
        table_words: u32,
        by_page_size: Divisor,
    }
}

/// The kernel of a variant.
#[derive(Debug)]
pub struct Scores {
    kernel: Function,
    threads: u32,
    shared_bytes: u32,
    cut: Cut,
}

/// One layer's buffers, held.
#[derive(Debug)]
pub struct Layer {
    args: LogitsParams,
    buffers: Vec<Buffer>,
}

impl Kernel<IndexerLogits> for Cuda {
    const SERVES_RECORDS: bool = true;
    type Kernels = Scores;
    type Step = Table;
    type Binding = Layer;

    fn kernel_variants(&self, spec: &IndexerLogits) -> Vec<Candidate> {
        candidates(&VARIANTS, self.card(), spec)
    }

    fn kernel_compile(&self, spec: &IndexerLogits, options: &OpOptions) -> Result<(Scores, (), Choice)> {
        let (body, choice) = choose(&VARIANTS, self.card(), spec, options.variant.as_deref())?;
        let Body { name, threads, shared_bytes, keys, resident } = body;
        let kernel = self.kernel(&name)?;
        kernel.allow_shared(self, shared_bytes)?;
        let cut = Cut { block: keys, target: self.card().multiprocessors.saturating_mul(resident) };
        Ok((Scores { kernel, threads, shared_bytes, cut }, (), choice))
    }

    fn kernel_step(&self, _: &IndexerLogits, _: &Scores, capacity: IndexerLogitsCapacity) -> Result<Table> {
        let IndexerLogitsCapacity { runs, pages } = capacity;
        blocks(runs.into())?;
        Table::new(self, u64::from(runs) * u64::from(RUN_WORDS) + u64::from(pages), runs)
    }

    fn kernel_capacity(step: &Table) -> IndexerLogitsCapacity {
        let runs = grid(step);
        let pages = step.room(1).saturating_sub(runs.saturating_mul(RUN_WORDS));
        IndexerLogitsCapacity { runs, pages }
    }

    fn kernel_prepare(
        &self,
        spec: &IndexerLogits,
        scores: &Scores,
        step: &mut Table,
        batch: IndexerLogitsBatch<'_>,
    ) -> Result<IndexerLogitsExtent> {
        let all = spec.runs(&batch, scores.cut)?;
        let count = blocks(all.runs.len() as u64)?;
        let runs: &[u32] = bytemuck::cast_slice(&all.runs);
        step.upload(self, count, runs.iter().chain(&all.pages).copied())?;
        Ok(all.extent)
    }

    fn kernel_bind(
        &self,
        spec: &IndexerLogits,
        _: &Scores,
        args: &IndexerLogitsArgs<&Buffer>,
        room: IndexerLogitsExtent,
    ) -> Result<Layer> {
        let IndexerLogitsExtent { tokens, rows, columns } = room;
        let (heads, bytes, pool) = (spec.num_heads, spec.query.bytes(), spec.index.kv());
        let held = args.cache.pages(&pool);
        let (kv, block_stride) = (
            address(args.cache.buffer, args.cache.base(), 1),
            stride(held.len() as u32, args.cache.block_stride, 1),
        );
        let bound = LogitsParams {
            q: address(args.q.buffer, args.q.offset, bytes),
            weights: address(args.weights.buffer, args.weights.offset, 4),
            kv,
            logits: address(args.logits.buffer, args.logits.offset, 4),
            q_token_stride: stride(tokens, args.q.token_stride, bytes),
            q_head_stride: stride(heads, args.q.head_stride, bytes),
            weights_token_stride: stride(tokens, args.weights.token_stride, 4),
            weights_head_stride: stride(heads, args.weights.head_stride, 4),
            block_stride,
            logits_row_stride: stride(rows, args.logits.token_stride, 4),
            max_tokens: tokens,
            max_rows: rows,
            max_columns: columns,
            first_page: held.start,
            num_pages: held.len() as u32,
            num_heads: heads,
            page_size: pool.page_size,
            is_wide: ((kv | block_stride).is_multiple_of(16)).into(),
            query: code(spec.query),
            by_page_size: Divisor::new(pool.page_size),
            ..LogitsParams::default()
        };
        let mut buffers = Vec::new();
        crate::ops::Op::map(spec, args, |_, buffer| {
            buffers.push(Buffer::clone(buffer));
            Ok(())
        })?;
        Ok(Layer { args: bound, buffers })
    }

    /// The grid covers the step's capacity: a captured launch scores what the step's table holds at the replay.
    fn kernel_record(
        &self,
        _: &IndexerLogits,
        scores: &Scores,
        (): &mut (),
        step: &Table,
        layer: &Layer,
    ) -> Result<()> {
        let LogitsParams { max_tokens, max_rows, max_columns, .. } = layer.args;
        let is_empty = max_tokens == 0 || max_rows == 0 || max_columns == 0;
        let Some(table) = step.ptr().filter(|_| !is_empty) else { return Ok(()) };
        // bounds: indexer_logits
        let max_runs = grid(step);
        let args =
            LogitsParams { table, max_runs, table_words: step.room(1).saturating_add(1), ..layer.args };
        let held = layer.buffers.iter().chain(step.buffer());
        self.launch(&scores.kernel, max_runs, scores.threads, scores.shared_bytes, &args, held)
    }
}

/// Runs that a grid covers: with room to grow, so that a graph serves somewhat longer sequences.
fn grid(step: &Table) -> u32 {
    step.most().checked_next_power_of_two().map_or(MAX_ITEMS, |runs| runs.clamp(16, MAX_ITEMS))
}

fn blocks(runs: u64) -> Result<u32> {
    checked_items(
        "runs of indexer_logits",
        runs,
        "score fewer query tokens a step: IndexerLogitsBatch::tokens",
    )
}

/// The entries, for the check that the manifest has them.
#[cfg(test)]
pub(super) fn entries() -> Vec<String> {
    let on_tensor_cores = ["mma", "wgmma"].into_iter().flat_map(|by| {
        PAIRS.into_iter().flat_map(move |(key, query)| {
            [32, 64].map(|heads| format!("indexer_logits_{by}_h{heads}_{key}_{query}"))
        })
    });
    Dtype::ALL.map(|key| format!("indexer_logits_simple_{key}")).into_iter().chain(on_tensor_cores).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Op;

    #[test]
    fn what_tensor_cores_hold_exactly_runs_on_them() {
        for spec in IndexerLogits::samples() {
            let is_held = PAIRS.contains(&(spec.key(), spec.query));
            for (card, best) in [(Card::H200, "wgmma"), (Card::RTX_5090, "mma"), (Card::A100, "mma")] {
                let (body, choice) = choose(&VARIANTS, &card, &spec, None).expect("one runs everywhere");
                assert_eq!(choice.variant, if is_held { best } else { "simple" }, "{card:?} {spec:?}");
                if spec.key().is_fp8() && is_held {
                    let resident =
                        if best == "wgmma" || spec.num_heads <= 32 && card != Card::RTX_5090 { 2 } else { 1 };
                    assert!(body.resident <= resident, "{card:?} {body:?}");
                }
            }
        }
    }
}
