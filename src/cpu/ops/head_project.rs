//! `head_project` on host memory.

use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};
use crate::base::view::check_tokens;
use crate::cpu::buffer::{Access, Buffer, lock, store_elements};
use crate::cpu::decode::Rows;
use crate::cpu::device::HostOp;
use crate::cpu::kernels::formats::{scaled_bits, widen, widen_weights};
use crate::cpu::pool::Pool;
use crate::ops::guard::{GuardBounds, Lost};
use crate::ops::{HeadProject, HeadProjectArgs, WeightOrder};

/// Columns and tokens whose sums are in registers together.
const COLUMNS: usize = 16;
const TOKENS: usize = 4;

thread_local! {
    /// A call's rows in f32. Kept for the next call, so that only a larger one allocates.
    static ROWS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
    /// The columns of a unit, and one column, kept likewise.
    static BLOCK: Cell<Vec<[f32; COLUMNS]>> = const { Cell::new(Vec::new()) };
    static COLUMN: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

impl HostOp for HeadProject {
    type Prepared = Range<u32>;

    fn prepare(&self, tokens: Range<u32>) -> Result<(Range<u32>, u32)> {
        let (_, end) = check_tokens(&tokens)?;
        Ok((tokens, end))
    }

    fn run(&self, pool: &Pool, range: &Range<u32>, args: &HeadProjectArgs<&Buffer>) -> Result<()> {
        let (first_token, tokens) = (range.start as usize, range.len());
        let (k, n) = (self.k as usize, self.n as usize);
        if tokens == 0 {
            return Ok(());
        }
        // All rows as f32, so that each is converted once and not once for every block of columns.
        let heads = if args.x.head_stride == 0 { 1 } else { self.num_heads as usize };
        let out_of_memory = Error::OutOfMemory { what: "a projection's rows in f32" };
        let mut rows = ROWS.take();
        rows.clear();
        rows.try_reserve_exact(tokens * heads * k).map_err(|_| out_of_memory)?;
        rows.resize(tokens * heads * k, 0.0);

        let (read, write) = (Access::Read, Access::Write);
        let scales = args.weight.scales.as_ref().map_or(args.weight.buffer, |scales| scales.buffer);
        let counters = args.guard.map_or(args.y.buffer, |guard| guard.counters);
        let inputs = [args.x.buffer, args.weight.buffer, scales].map(|buffer| (buffer, read));
        let [x, weight, scales] = inputs;
        let locked = lock([x, weight, (args.y.buffer, write), scales, (counters, write)]);
        let bounds = GuardBounds::of(self.output, args.out_scale);
        let (x_at, y_at) = (Rows::of(&args.x), Rows::of(&args.y));
        for (row, into) in rows.chunks_exact_mut(k).enumerate() {
            let at = x_at.at(first_token + row / heads, row % heads) * self.input.bytes();
            widen(self.input, &locked.bytes(0)[at..][..k * self.input.bytes()], into);
        }

        let (scale, limit) = (args.scale, args.limit(self.output));
        let stored = |sum: f32| {
            let product = sum * scale;
            if product.is_finite() { product.clamp(-limit, limit) } else { product }
        };
        let head_scale = |head: usize| match &args.weight.scales {
            Some(of) => {
                Dtype::F32.decode_at(locked.bytes(3), of.offset as usize + head * of.head_stride as usize)
            }
            None => 1.0,
        };
        // A unit is some columns of a head's result.
        let blocks = n.div_ceil(COLUMNS);
        let no_memory = AtomicBool::new(false);
        pool.for_each(self.num_heads as usize * blocks, |_, unit| {
            let (head, first) = (unit / blocks, unit % blocks * COLUMNS);
            let Some(weight) = columns_of(self, args, locked.bytes(1), head, first) else {
                return no_memory.store(true, Ordering::Relaxed);
            };
            let head_scale = head_scale(head);
            let mut lost = Lost::default();
            for token in (0..tokens).step_by(TOKENS) {
                // Rows past the end repeat the last token.
                let x: [&[f32]; TOKENS] = std::array::from_fn(|i| {
                    let row = (token + i).min(tokens - 1) * heads + head % heads;
                    &rows[row * k..][..k]
                });
                let sums = products(x, &weight);
                for (i, sums) in sums.iter().enumerate().take(tokens - token) {
                    let at = y_at.at(first_token + token + i, head) + first;
                    if args.guard.is_some() {
                        let sums = &sums[..COLUMNS.min(n - first)];
                        sums.iter().for_each(|sum| bounds.note(&mut lost, sum * head_scale * scale));
                    }
                    let bits = |column: usize| {
                        scaled_bits(self.output, stored(sums[column] * head_scale), args.out_scale)
                    };
                    store_elements(locked.words(2), self.output.bytes(), at, COLUMNS.min(n - first), bits);
                }
            }
            BLOCK.set(weight);
            if let Some(guard) = args.guard {
                lost.add_to(locked.words(4), guard.row);
            }
        });
        ROWS.set(rows);
        if no_memory.into_inner() {
            return Err(Error::OutOfMemory { what: "a projection's weights in f32" });
        }
        Ok(())
    }
}

/// `[k][COLUMNS]` of a head's matrix in f32, zeros past its end; nothing where there is no memory.
fn columns_of(
    spec: &HeadProject,
    args: &HeadProjectArgs<&Buffer>,
    bytes: &[u8],
    head: usize,
    first: usize,
) -> Option<Vec<[f32; COLUMNS]>> {
    let (k, width) = (spec.k as usize, COLUMNS.min(spec.n as usize - first));
    let view = &args.weight;
    let base = view.offset as usize + head * view.head_stride as usize;
    let row = |row: usize, skip: usize, into: &mut [f32]| {
        let at = (base + row * view.row_stride as usize) * spec.weight.unit_bytes();
        widen_weights(spec.weight, &bytes[at..], skip, into);
    };
    let mut block = BLOCK.take();
    block.clear();
    block.try_reserve(k).ok()?;
    block.resize(k, [0.0; COLUMNS]);
    match spec.order {
        WeightOrder::Kn => {
            block.iter_mut().enumerate().for_each(|(i, columns)| row(i, first, &mut columns[..width]));
        }
        WeightOrder::Nk => {
            let mut one = COLUMN.take();
            one.clear();
            one.try_reserve(k).ok()?;
            one.resize(k, 0.0);
            for column in 0..width {
                row(first + column, 0, &mut one);
                block.iter_mut().zip(&one).for_each(|(columns, &w)| columns[column] = w);
            }
            COLUMN.set(one);
        }
    }
    Some(block)
}

fn products(x: [&[f32]; TOKENS], weight: &[[f32; COLUMNS]]) -> [[f32; COLUMNS]; TOKENS] {
    let mut sums = [[0.0; COLUMNS]; TOKENS];
    for (i, w) in weight.iter().enumerate() {
        for (sums, x) in sums.iter_mut().zip(x) {
            for (sum, w) in sums.iter_mut().zip(w) {
                *sum += x[i] * w;
            }
        }
    }
    sums
}
