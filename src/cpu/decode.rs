//! One decode call: work items over the pool, then merges.

use std::sync::PoisonError;
use std::sync::atomic::{AtomicU32, Ordering};

use super::bind::{Binding, KV, LSE, OUT, Q_NOPE, Q_PE};
use super::buffer::{bits_of, exclusive, store_elements};
use super::kernel::{BLOCK, MAX_ROWS, Tile, VARIANTS, Variant};
use super::merge;
use super::pool::Pool;
use super::step::{Step, Tables};
use crate::plan::{DIRECT, QueryToken, Tiling, WorkItem};
use crate::{Dtype, Error, MlaSpec, Result};

/// A decode for one spec, with the chosen variant.
pub struct Decode {
    pub(super) spec: MlaSpec,
    variant: &'static Variant,
}

impl std::fmt::Debug for Decode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Decode").field("spec", &self.spec).field("variant", &self.variant.name).finish()
    }
}

impl Decode {
    pub(super) fn new(spec: &MlaSpec, forced: Option<&str>) -> Result<Self> {
        spec.check()?;
        let variant = variant(forced)?;
        log::debug!("mla.decode.{}.{} on the CPU", variant.name, spec.kv.dtype);
        Ok(Self { spec: *spec, variant })
    }

    /// The name of the chosen variant.
    pub fn variant(&self) -> &'static str {
        self.variant.name
    }

    /// Whole tokens in a tile where they fit, equal parts of a token where not, so that no tile is a small rest.
    pub(super) fn rows_per_tile(&self) -> u32 {
        let (heads, most) = (self.spec.shape.num_heads, MAX_ROWS as u32);
        if heads <= most { most / heads * heads } else { heads.div_ceil(heads.div_ceil(most)) }
    }

    pub(super) fn tiling(&self, threads: usize) -> Tiling {
        Tiling {
            rows_per_tile: self.rows_per_tile(),
            tokens_per_block: BLOCK as u32,
            // A few items a thread, so that a late thread leaves little for the others to wait for.
            target_items: u32::try_from(threads).unwrap_or(u32::MAX).saturating_mul(4),
            min_split_tokens: 256,
            lone_items: 0,
            // By its arithmetic: queries and sums of a tile are read and written about as often as four tokens are multiplied.
            item_overhead_tokens: 4,
        }
    }

    pub(super) fn run(&self, pool: &Pool, step: &Step, binding: &Binding) -> Result<()> {
        let mismatch = |detail| Err(Error::LayoutMismatch { detail });
        if step.spec != self.spec || binding.spec != self.spec {
            return mismatch("the decode has another spec");
        }
        if step.num_queries > binding.max_queries {
            return mismatch("the step has more query tokens than the binding was checked for");
        }
        if step.scratch.len() < pool.threads() {
            return mismatch("the step was made by a Cpu of fewer threads");
        }
        let tables = step.tables()?;
        let locked = binding.lock();
        let mut partials = step.partials.lock().unwrap_or_else(PoisonError::into_inner);
        let slots_at = step.num_slots() * self.spec.shape.kv_lora_rank as usize;
        let (outs, lses) = partials.split_at_mut(slots_at);
        let call = Call {
            decode: self,
            binding,
            tables,
            queries: tables.queries(),
            pages: tables.pages(),
            q_nope: locked.bytes(Q_NOPE),
            q_pe: locked.bytes(Q_PE),
            kv: locked.bytes(KV),
            out: locked.words(OUT),
            lse: locked.words(LSE),
        };
        let (partial_outs, partial_lses) = (&*outs, &*lses);
        let items = tables.items();
        pool.for_each(items.len(), |thread, unit| {
            let mut scratch = step.scratch[thread].lock().unwrap_or_else(PoisonError::into_inner);
            call.attend(&mut scratch.tile(), &items[unit], partial_outs, partial_lses);
        });
        merge::run(pool, &call, exclusive(outs), exclusive(lses));
        Ok(())
    }
}

/// The forced row of the CPU's kernels, or the best.
///
/// # Errors
/// [`Error::VariantUnavailable`].
pub(super) fn variant(forced: Option<&str>) -> Result<&'static Variant> {
    let unavailable = |why: String| {
        let name = forced.unwrap_or("of the CPU").to_owned();
        Error::VariantUnavailable { name, why }
    };
    let known = || {
        let names: Vec<_> = VARIANTS.iter().map(|variant| variant.name).collect();
        format!("there is no such row; the CPU's rows are {}", names.join(", "))
    };
    let variant = VARIANTS
        .iter()
        .find(|variant| forced.map_or((variant.runs_here)(), |name| name == variant.name))
        .ok_or_else(|| unavailable(known()))?;
    if !(variant.runs_here)() {
        return Err(unavailable("the processor lacks its instructions; see Backend::variants".into()));
    }
    Ok(variant)
}

/// Everything that the threads of one call share.
pub(super) struct Call<'a> {
    pub decode: &'a Decode,
    pub binding: &'a Binding,
    pub tables: Tables<'a>,
    queries: &'a [QueryToken],
    pages: &'a [u32],
    q_nope: &'a [u8],
    q_pe: &'a [u8],
    kv: &'a [u8],
    out: &'a [AtomicU32],
    lse: &'a [AtomicU32],
}

impl Call<'_> {
    /// Does one work item.
    fn attend(&self, tile: &mut Tile<'_>, item: &WorkItem, outs: &[AtomicU32], lses: &[AtomicU32]) {
        let (num_rows, latent) = (item.num_rows as usize, tile.latent);
        // The row's query token and its last visible key in this item, exclusive.
        let mut rows = [(QueryToken { token: 0, visible: 0 }, 0u32); MAX_ROWS];
        for (r, row) in rows[..num_rows].iter_mut().enumerate() {
            let query = self.queries[self.row(item, r).0];
            *row = (query, query.visible.clamp(item.kv_begin, item.kv_end));
            self.load_query(tile, item, r);
        }
        tile.o[..num_rows * latent].fill(0.0);
        tile.max[..num_rows].fill(f32::NEG_INFINITY);
        tile.sum[..num_rows].fill(0.0);

        for begin in (item.kv_begin..item.kv_end).step_by(BLOCK) {
            let end = item.kv_end.min(begin.saturating_add(BLOCK as u32));
            self.load_block(tile, item, begin, end);
            // Rows with the same number of visible keys go together; the kernel sees visible keys only, so that
            // a row computes the same whatever its neighbours see.
            let visible = |r: usize| rows[r].1.clamp(begin, end) - begin;
            let mut r = 0;
            while r < num_rows {
                let tokens = visible(r);
                let next = (r + 1..num_rows).find(|&next| visible(next) != tokens).unwrap_or(num_rows);
                if tokens > 0 {
                    // SAFETY: `Decode::new` has chosen a variant that runs here.
                    unsafe {
                        (self.decode.variant.attend)(
                            tile,
                            r..next,
                            tokens as usize,
                            self.binding.logit_scale,
                        );
                    }
                }
                r = next;
            }
        }

        for (r, &(query, visible)) in rows[..num_rows].iter().enumerate() {
            let empty = visible == item.kv_begin;
            let out = &mut tile.o[r * latent..][..latent];
            let mut lse = f32::NEG_INFINITY;
            if !empty {
                lse = tile.max[r] + tile.sum[r].log2();
                out.iter_mut().for_each(|x| *x /= tile.sum[r]);
            }
            if item.slot == DIRECT {
                self.store(query.token as usize, self.row(item, r).1, out, lse);
                continue;
            }
            let slot = item.slot as usize + r;
            lses[slot].store(lse.to_bits(), Ordering::Relaxed);
            for (to, x) in outs[slot * latent..][..latent].iter().zip(&*out) {
                to.store(x.to_bits(), Ordering::Relaxed);
            }
        }
    }

    /// `(index in the queries, head)` of a row of an item.
    fn row(&self, item: &WorkItem, r: usize) -> (usize, usize) {
        let heads = self.decode.spec.shape.num_heads as usize;
        let row = item.first_row as usize + r;
        (row / heads, row % heads)
    }

    fn load_query(&self, tile: &mut Tile<'_>, item: &WorkItem, r: usize) {
        let (query, head) = self.row(item, r);
        let token = self.queries[query].token as usize;
        let (dtype, binding) = (self.decode.spec.query, self.binding);
        let (nope, pe) = tile.q[r * tile.stride..][..tile.dim].split_at_mut(tile.latent);
        self.widen(dtype, self.q_nope, binding.q_nope.at(token, head), nope);
        if !pe.is_empty() {
            self.widen(dtype, self.q_pe, binding.q_pe.at(token, head), pe);
        }
    }

    fn load_block(&self, tile: &mut Tile<'_>, item: &WorkItem, begin: u32, end: u32) {
        let page_size = self.decode.spec.kv.page_size;
        let pages = &self.pages[item.page_begin as usize..];
        for (token, row) in (begin..end).zip(tile.kv.chunks_exact_mut(tile.stride)) {
            let page = pages[(token / page_size) as usize] as usize;
            let at = self.binding.kv.at(page, (token % page_size) as usize);
            self.widen(self.decode.spec.kv.dtype, self.kv, at, &mut row[..tile.dim]);
        }
    }

    /// The elements from `first` on as f32.
    fn widen(&self, dtype: Dtype, bytes: &[u8], first: usize, to: &mut [f32]) {
        let bytes = &bytes[first * dtype.bytes()..][..to.len() * dtype.bytes()];
        // SAFETY: `Decode::new` has chosen a variant that runs here.
        unsafe { (self.decode.variant.widen)(dtype, bytes, to) }
    }

    /// Writes a finished row: its normalised output, not yet scaled, and its LSE in base 2.
    pub(super) fn store(&self, token: usize, head: usize, out: &[f32], lse: f32) {
        let Binding { out_scale, lse_scale, .. } = *self.binding;
        let (dtype, first) = (self.decode.spec.out, self.binding.out.at(token, head));
        store_elements(self.out, dtype.bytes(), first, out.len(), |i| bits_of(dtype, out[i] * out_scale));
        let lse = (lse * lse_scale).to_bits();
        self.lse[self.binding.lse.at(token, head)].store(lse, Ordering::Relaxed);
    }
}
