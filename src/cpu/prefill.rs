//! `mla_prefill` on host memory: a tile of query rows of one head at a time, by the kernels of a decode.

use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use super::bind::Rows;
use super::buffer::{Access, Buffer, Locked, bits_of, lock, store_elements};
use super::kernel::{BLOCK, MAX_ROWS, Tile, Variant};
use super::pool::Pool;
use super::step::Scratch;
use crate::Result;
use crate::prefill::plan::{PrefillTile, tiles};
use crate::prefill::{Prefill, PrefillExtent, PrefillSequence, PrefillSpec};

/// The arguments in the order in which they are locked.
const Q_NOPE: usize = 0;
const Q_PE: usize = 1;
const K_NOPE: usize = 2;
const K_PE: usize = 3;
const V: usize = 4;
const OUT: usize = 5;
const LSE: usize = 6;

/// See [`crate::Backend::prefill`].
pub(super) fn prefill(
    pool: &Pool,
    spec: &PrefillSpec,
    variant: &'static Variant,
    sequences: &[PrefillSequence],
    args: &Prefill<&Buffer>,
) -> Result<()> {
    args.check(spec, PrefillExtent::of(sequences)?, Buffer::bytes)?;
    args.check_aliases(spec, Buffer::same_as)?;
    let dim = (spec.qk_nope_head_dim + spec.qk_rope_head_dim) as usize;
    let scratch = || Scratch::new(dim, spec.v_head_dim as usize, dim).map(Mutex::new);
    let scratch = (0..pool.threads()).map(|_| scratch()).collect::<Result<Vec<_>>>()?;

    let [q_nope, q_pe, k_nope, k_pe, v] = args.read_views(spec).map(|(_, view, _)| view);
    let read = [q_nope, q_pe, k_nope, k_pe, v].map(|view| (view.buffer, Access::Read));
    let [a, b, c, d, e] = read;
    let call = Call {
        spec,
        variant,
        locked: lock([a, b, c, d, e, (args.out.buffer, Access::Write), (args.lse.buffer, Access::Write)]),
        at: [q_nope, q_pe, k_nope, k_pe, v, args.out, args.lse].map(|view| Rows::of(&view)),
        scale: (f64::from(args.softmax_scale) * std::f64::consts::LOG2_E) as f32,
    };
    let tiles = tiles(sequences, MAX_ROWS as u32);
    pool.for_each(tiles.len() * spec.num_heads as usize, |thread, unit| {
        let mut scratch = scratch[thread].lock().unwrap_or_else(PoisonError::into_inner);
        // Heads one after the other: their keys are most of what is read.
        call.attend(&mut scratch.tile(), &tiles[unit % tiles.len()], unit / tiles.len());
    });
    Ok(())
}

/// Everything that the threads of one call share.
struct Call<'a> {
    spec: &'a PrefillSpec,
    variant: &'static Variant,
    locked: Locked<'a, 7>,
    at: [Rows; 7],
    /// Dot products to logits in base 2.
    scale: f32,
}

impl Call<'_> {
    fn attend(&self, tile: &mut Tile<'_>, item: &PrefillTile, head: usize) {
        let (num_rows, dim) = (item.num_rows as usize, tile.latent);
        let nope = self.spec.qk_nope_head_dim as usize;
        for r in 0..num_rows {
            let token = item.first_token as usize + r;
            let (q_nope, q_pe) = tile.q[r * tile.stride..][..tile.dim].split_at_mut(nope);
            self.widen(Q_NOPE, token, head, q_nope);
            self.widen(Q_PE, token, head, q_pe);
        }
        tile.o[..num_rows * dim].fill(0.0);
        tile.max[..num_rows].fill(f32::NEG_INFINITY);
        tile.sum[..num_rows].fill(0.0);

        let mut begin = 0;
        while begin < item.num_keys {
            let end = item.num_keys.min(begin + BLOCK as u32);
            for (key, row) in (begin..end).zip(tile.kv.chunks_exact_mut(tile.stride)) {
                let key = (item.kv_begin + key) as usize;
                let (k, v) = row[..tile.value_at + dim].split_at_mut(tile.value_at);
                let (k_nope, k_pe) = k.split_at_mut(nope);
                self.widen(K_NOPE, key, head, k_nope);
                self.widen(K_PE, key, head, k_pe);
                self.widen(V, key, head, v);
            }
            // Neighbours that see as much of the block are attended together.
            let seen = |r: usize| item.visible(r as u32).clamp(begin, end) - begin;
            let mut r = 0;
            while r < num_rows {
                let keys = seen(r);
                let next = (r + 1..num_rows).find(|&next| seen(next) != keys).unwrap_or(num_rows);
                if keys > 0 {
                    // SAFETY: `variant` gives only what runs here.
                    unsafe { (self.variant.attend)(tile, r..next, keys as usize, self.scale) }
                }
                r = next;
            }
            begin = end;
        }

        for r in 0..num_rows {
            let row = item.first_row as usize + r;
            let out = &mut tile.o[r * dim..][..dim];
            let mut lse = f32::NEG_INFINITY;
            if item.visible(r as u32) > 0 {
                lse = (tile.max[r] + tile.sum[r].log2()) * std::f32::consts::LN_2;
                out.iter_mut().for_each(|x| *x /= tile.sum[r]);
            }
            let (dtype, first) = (self.spec.out, self.at[OUT].at(row, head));
            store_elements(self.locked.words(OUT), dtype.bytes(), first, dim, |i| bits_of(dtype, out[i]));
            self.locked.words(LSE)[self.at[LSE].at(row, head)].store(lse.to_bits(), Ordering::Relaxed);
        }
    }

    /// A row of an argument as f32.
    fn widen(&self, argument: usize, token: usize, head: usize, to: &mut [f32]) {
        if to.is_empty() {
            return;
        }
        let (dtype, first) = (self.spec.dtype, self.at[argument].at(token, head));
        let bytes = &self.locked.bytes(argument)[first * dtype.bytes()..][..to.len() * dtype.bytes()];
        // SAFETY: `variant` gives only what runs here.
        unsafe { (self.variant.widen)(dtype, bytes, to) }
    }
}
