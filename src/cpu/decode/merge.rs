//! Merges the partial results of each query row that several work items attended.

use bytemuck::cast_slice;

use super::Call;
use crate::cpu::kernels::attend::WEIGHTLESS;
use crate::cpu::pool::Pool;

/// Columns that are summed at a time, on the stack.
const COLUMNS: usize = 512;

/// Rows of a unit of work: taking a unit from the pool costs more than merging one row.
const ROWS: usize = 8;

/// Merges every row of a call. `outs` is `[partials, L]`, `lses` `[partials]`, each half of one in base 2.
pub(super) fn run(pool: &Pool, call: &Call<'_>, outs: &[u32], lses: &[u32]) {
    let (outs, lses): (&[f32], &[f32]) = (cast_slice(outs), cast_slice(lses));
    let (merges, merge_partials) = (call.tables.merges(), call.tables.merge_partials());
    let heads = call.spec.shape.num_heads as usize;
    let rows = merges.len() * heads;
    pool.for_each(rows.div_ceil(ROWS), |_, unit| {
        for row in unit * ROWS..rows.min((unit + 1) * ROWS) {
            let (merge, head) = (&merges[row / heads], row % heads);
            let partials = &merge_partials[merge.begin as usize..merge.end as usize];
            merge_row(call, merge.token as usize, head, partials, outs, lses);
        }
    });
}

fn merge_row(call: &Call<'_>, token: usize, head: usize, partials: &[u32], outs: &[f32], lses: &[f32]) {
    let latent = call.spec.shape.kv_lora_rank as usize;
    let mut columns = [0f32; COLUMNS];
    let out = &mut columns[..latent];
    let parts = partials
        .iter()
        .map(|&partial| partial as usize + head)
        .filter(|&partial| lses[partial] != f32::NEG_INFINITY);
    let part = |partial: usize| &outs[partial * latent..][..latent];

    let mut one = parts.clone();
    let half_lse = match (one.next(), one.next()) {
        (None, _) => f32::NEG_INFINITY,
        // Copied, so that splits without visible keys do not change a bit.
        (Some(partial), None) if lses[partial] != WEIGHTLESS => {
            out.copy_from_slice(part(partial));
            lses[partial]
        }
        _ => {
            let weighty = parts.clone().map(|partial| lses[partial]).filter(|&lse| lse != WEIGHTLESS);
            let max = weighty.fold(f32::NEG_INFINITY, f32::max);
            let mut sum = 0.0;
            for partial in parts {
                let half = lses[partial];
                // 0 times an infinite value is NaN, as within one split.
                let weight = if half == WEIGHTLESS { 0.0 } else { (2.0 * (half - max)).exp2() };
                sum += weight;
                out.iter_mut().zip(part(partial)).for_each(|(out, x)| *out += weight * x);
            }
            out.iter_mut().for_each(|out| *out /= sum);
            if sum == 0.0 { f32::NAN } else { max + 0.5 * sum.log2() }
        }
    };
    call.store(token, head, out, half_lse);
}
