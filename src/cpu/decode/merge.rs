//! Merges the partial results of each query row that several work items attended.

use bytemuck::cast_slice;

use super::Call;
use crate::cpu::pool::Pool;

/// Columns that are summed at a time, on the stack.
const COLUMNS: usize = 512;

/// Rows to a unit of work: one is too little to take a turn for.
const ROWS: usize = 8;

/// Merges every row of a call. `outs` is `[slots, L]`, `lses` `[slots]`, base 2.
pub(super) fn run(pool: &Pool, call: &Call<'_>, outs: &[u32], lses: &[u32]) {
    let (outs, lses): (&[f32], &[f32]) = (cast_slice(outs), cast_slice(lses));
    let (merges, merge_slots) = (call.tables.merges(), call.tables.merge_slots());
    let heads = call.spec.shape.num_heads as usize;
    let rows = merges.len() * heads;
    pool.for_each(rows.div_ceil(ROWS), |_, unit| {
        for row in unit * ROWS..rows.min((unit + 1) * ROWS) {
            let (merge, head) = (&merges[row / heads], row % heads);
            let slots = &merge_slots[merge.begin as usize..merge.end as usize];
            merge_row(call, merge.token as usize, head, slots, outs, lses);
        }
    });
}

fn merge_row(call: &Call<'_>, token: usize, head: usize, slots: &[u32], outs: &[f32], lses: &[f32]) {
    let latent = call.spec.shape.kv_lora_rank as usize;
    let mut columns = [0f32; COLUMNS];
    let out = &mut columns[..latent];
    let parts =
        slots.iter().map(|&slot| slot as usize + head).filter(|&slot| lses[slot] != f32::NEG_INFINITY);
    let part = |slot: usize| &outs[slot * latent..][..latent];

    let mut one = parts.clone();
    let lse = match (one.next(), one.next()) {
        (None, _) => f32::NEG_INFINITY,
        // Bit for bit: a row does not notice that its other splits were empty.
        (Some(slot), None) => {
            out.copy_from_slice(part(slot));
            lses[slot]
        }
        _ => {
            let max = parts.clone().map(|slot| lses[slot]).fold(f32::NEG_INFINITY, f32::max);
            let mut sum = 0.0;
            for slot in parts {
                let weight = (lses[slot] - max).exp2();
                sum += weight;
                out.iter_mut().zip(part(slot)).for_each(|(out, x)| *out += weight * x);
            }
            out.iter_mut().for_each(|out| *out /= sum);
            max + sum.log2()
        }
    };
    call.store(token, head, out, lse);
}
