//! Merges the partial results of each query row that several work items attended.

use bytemuck::cast_slice;

use super::Call;
use crate::cpu::kernels::tile::Weight;
use crate::cpu::pool::Pool;

/// Columns that are summed at a time, on the stack.
const COLUMNS: usize = 512;

/// Rows of a unit of work: taking a unit from the pool costs more than merging one row.
const ROWS: usize = 8;

/// Merges every row of a call. `outs` is `[partials, L]`, `weights` a [`Weight`] each.
pub(super) fn run(pool: &Pool, call: &Call<'_>, outs: &[u32], weights: &[u32]) {
    let (outs, weights): (&[f32], &[Weight]) = (cast_slice(outs), cast_slice(weights));
    let (merges, merge_partials) = (call.tables.merges(), call.tables.merge_partials());
    let heads = call.spec.shape.num_heads as usize;
    let rows = merges.len() * heads;
    pool.for_each(rows.div_ceil(ROWS), |_, unit| {
        for row in unit * ROWS..rows.min((unit + 1) * ROWS) {
            let (merge, head) = (&merges[row / heads], row % heads);
            let partials = &merge_partials[merge.begin as usize..merge.end as usize];
            merge_row(call, merge.token as usize, head, partials, outs, weights);
        }
    });
}

fn merge_row(call: &Call<'_>, token: usize, head: usize, partials: &[u32], outs: &[f32], weights: &[Weight]) {
    let (latent, scale) = (call.spec.shape.kv_lora_rank as usize, call.binding.logit_scale);
    let mut columns = [0f32; COLUMNS];
    let out = &mut columns[..latent];
    let parts = partials
        .iter()
        .map(|&partial| partial as usize + head)
        .filter(|&partial| !weights[partial].is_empty());
    let part = |partial: usize| &outs[partial * latent..][..latent];

    let mut one = parts.clone();
    let half_lse = match (one.next(), one.next()) {
        (None, _) => f32::NEG_INFINITY,
        // Copied, so that splits without visible keys do not change a bit.
        (Some(partial), None) if !weights[partial].is_nothing() => {
            out.copy_from_slice(part(partial));
            weights[partial].half_lse(scale)
        }
        _ => {
            let weighty = parts.clone().map(|partial| weights[partial]).filter(|part| !part.is_nothing());
            let max = weighty.map(|part| part.max).fold(f32::NEG_INFINITY, f32::max);
            // In f64, as there may be very many partial results.
            let (mut sum, mut sums) = (0f64, [0f64; COLUMNS]);
            for partial in parts {
                let Weight { max: own, sum: weight } = weights[partial];
                // Maxima are subtracted before they are scaled, as within a split. 0 times an infinite value is NaN, likewise.
                let weight = match f64::from(weight) {
                    weight if weight == 0.0 || own == max => weight,
                    weight => weight * (f64::from(own - max) * f64::from(scale)).exp2(),
                };
                sum += weight;
                sums.iter_mut().zip(part(partial)).for_each(|(sum, &x)| *sum += weight * f64::from(x));
            }
            out.iter_mut().zip(sums).for_each(|(out, x)| *out = (x / sum) as f32);
            Weight { max, sum: sum as f32 }.half_lse(scale)
        }
    };
    call.store(token, head, out, half_lse);
}
