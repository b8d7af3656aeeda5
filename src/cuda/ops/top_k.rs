//! `top_k`: the positions of the largest logits of each row.

use super::single::kernel_args;
use super::table::Table;
use super::{Divisor, checked_items, stride};
use crate::base::error::Result;
use crate::base::view::View;
use crate::cuda::caps::Card;
use crate::cuda::kernels::{address, ptx};
use crate::cuda::{Buffer, Cuda, Function};
use crate::ops::step_table::TableOp;
use crate::ops::variants::{Variant, candidates, choose};
use crate::ops::{Candidate, Choice, Kernel, OpOptions, TopK, TopKArgs, TopKBatch, TopKCapacity, TopKExtent};

/// Threads of a block, and logits of a slice that they hold: `TOP_K_THREADS` and `CHUNK` of top_k.cuh.
const THREADS: u32 = 512;
const CHUNK: u32 = 32 * THREADS;
/// Logits of a slice, at least, where a row is cut to use more multiprocessors.
const LEAST_SLICE: u32 = 4096;

/// The kernel of a number of blocks a row.
type Tile = (&'static str, u32);

/// By blocks a row, fewest first.
const TILES: [Tile; 4] =
    [("top_k_block", 1), ("top_k_cluster2", 2), ("top_k_cluster4", 4), ("top_k_cluster8", 8)];

/// In dispatch order. `cluster` takes a number of blocks for each launch, one for short rows or many.
const VARIANTS: [Variant<Card, TopK, &[Tile]>; 5] = [
    Variant::new("cluster", |card, _| clusters(card, &TILES)),
    Variant::new("cluster2", |card, _| clusters(card, &TILES[1..2])).not_by_default(forced_only),
    Variant::new("cluster4", |card, _| clusters(card, &TILES[2..3])).not_by_default(forced_only),
    Variant::new("cluster8", |card, _| clusters(card, &TILES[3..])).not_by_default(forced_only),
    Variant::new("block", |_, _| Ok(&TILES[..1])),
];

fn forced_only(_: &Card, _: &TopK) -> Result<(), String> {
    Err("cluster chooses among the numbers of blocks".into())
}

/// # Errors
/// What is missing.
fn clusters(card: &Card, tiles: &'static [Tile]) -> Result<&'static [Tile], String> {
    if card.capability >= ptx::HOPPER {
        Ok(tiles)
    } else {
        Err("no clusters of blocks (needs compute capability 9.0)".into())
    }
}

kernel_args! {
    /// `Args` of top_k.cuh.
    pub struct TopKParams {
        logits: u64,
        lengths: u64,
        indices: u64,
        values: u64,
        table: u64,
        logits_stride: u64,
        indices_stride: u64,
        values_stride: u64,
        columns: u32,
        max_rows: u32,
        out_rows: u32,
        k: u32,
        row_words: u32,
        table_words: u32,
        page_size: u32,
        reserved: u32,
        by_page_size: Divisor,
    }
}

/// One layer's buffers, held.
#[derive(Debug)]
pub struct Layer {
    args: TopKParams,
    buffers: Vec<Buffer>,
}

impl Kernel<TopK> for Cuda {
    type Kernels = Vec<(u32, Function)>;
    type Step = Table;
    type Binding = Layer;

    fn kernel_variants(&self, spec: &TopK) -> Vec<Candidate> {
        candidates(&VARIANTS, self.card(), spec)
    }

    fn kernel_compile(&self, spec: &TopK, options: &OpOptions) -> Result<(Self::Kernels, (), Choice)> {
        let (tiles, choice) = choose(&VARIANTS, self.card(), spec, options.variant.as_deref())?;
        let load = |&(name, blocks): &Tile| Ok((blocks, self.kernel(name)?));
        Ok((tiles.iter().map(load).collect::<Result<_>>()?, (), choice))
    }

    fn kernel_step(&self, _: &TopK, _: &Self::Kernels, room: TopKCapacity) -> Result<Table> {
        // Rows of slots take most words.
        let words = 1 + 3 * u64::from(room.rows) + u64::from(room.pages);
        Table::new(self, if room == TopKCapacity::default() { 0 } else { words }, room.rows)
    }

    fn kernel_capacity(step: &Table) -> TopKCapacity {
        let rows = step.most();
        TopKCapacity { rows, pages: step.room(1).saturating_sub(rows.saturating_mul(3).saturating_add(1)) }
    }

    fn kernel_prepare(
        &self,
        spec: &TopK,
        _: &Self::Kernels,
        step: &mut Table,
        batch: TopKBatch<'_>,
    ) -> Result<TopKExtent> {
        let words = spec.table(batch, |_| Ok(()))?;
        step.upload(self, words.count, words.words)?;
        Ok(words.extent)
    }

    fn kernel_bind(
        &self,
        spec: &TopK,
        _: &Self::Kernels,
        args: &TopKArgs<&Buffer>,
        TopKExtent { rows, out_rows, .. }: TopKExtent,
    ) -> Result<Layer> {
        let at = |view: &View<&Buffer>| address(view.buffer, view.offset, 4);
        let page_size = spec.slots.map_or(1, |slots| slots.page_size);
        let bound = TopKParams {
            logits: at(&args.logits),
            lengths: args.lengths.ptr(),
            indices: at(&args.indices),
            values: args.values.map_or(0, |view| at(&view)),
            logits_stride: stride(rows, args.logits.token_stride, 4),
            indices_stride: stride(out_rows, args.indices.token_stride, 4),
            values_stride: args.values.map_or(0, |view| stride(out_rows, view.token_stride, 4)),
            columns: args.columns,
            max_rows: rows,
            out_rows,
            k: spec.k,
            row_words: spec.row_words(),
            page_size,
            by_page_size: Divisor::new(page_size),
            ..TopKParams::default()
        };
        let buffers = [args.logits.buffer, args.lengths, args.indices.buffer].into_iter();
        let buffers = buffers.chain(args.values.map(|view| view.buffer)).map(Buffer::clone).collect();
        Ok(Layer { args: bound, buffers })
    }

    /// The grid covers the smaller capacity of step and binding: a captured launch does the rows that the step's table holds at the replay.
    fn kernel_record(
        &self,
        _: &TopK,
        kernels: &Self::Kernels,
        (): &mut (),
        step: &Table,
        layer: &Layer,
    ) -> Result<()> {
        let max_rows = step.most().min(layer.args.max_rows);
        if max_rows == 0 {
            return Ok(());
        }
        // bounds: top_k
        let args = TopKParams { table: step.address(), table_words: step.room(1), max_rows, ..layer.args };
        let wanted = blocks(self.card(), max_rows, args.columns);
        let (blocks, kernel) = kernels.iter().rfind(|(blocks, _)| *blocks <= wanted).unwrap_or(&kernels[0]);
        let cure = "choose in several steps, of fewer rows each";
        let grid = checked_items("blocks of a top_k", u64::from(max_rows) * u64::from(*blocks), cure)?;
        self.launch(kernel, grid, THREADS, 0, &args, layer.buffers.iter().chain(step.held()))
    }
}

/// Blocks of a row: as few as hold its logits, and more where there are multiprocessors left for them.
fn blocks(card: &Card, rows: u32, columns: u32) -> u32 {
    let mut blocks = 1;
    while blocks < TILES[TILES.len() - 1].1
        && (columns > blocks * CHUNK
            || (columns > blocks * LEAST_SLICE && rows.saturating_mul(2 * blocks) <= card.multiprocessors))
    {
        blocks *= 2;
    }
    blocks
}

#[cfg(test)]
pub(super) fn entries() -> Vec<&'static str> {
    TILES.map(|(name, _)| name).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On an H200: enough blocks that all logits are held, and that few rows use the card.
    #[test]
    fn blocks_fill_the_card() {
        for (rows, columns, want) in [
            (1, 131_072, 8),
            (16, 131_072, 8),
            (64, 65_536, 4),
            (64, 4096, 1),
            (1, 4097, 2),
            (1, 16_384, 4),
            (4096, 16_384, 1),
            (4096, 16_385, 2),
            (1, 1 << 20, 8),
            (u32::MAX, 0, 1),
        ] {
            assert_eq!(blocks(&Card::H200, rows, columns), want, "{rows} x {columns}");
        }
    }
}
