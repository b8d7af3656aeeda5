//! The decode: work items over the pool, then merges.

mod binding;
mod merge;
mod step;
mod tokens;

use std::sync::PoisonError;
use std::sync::atomic::{AtomicU32, Ordering};

pub(super) use binding::{Pages, Rows};
pub(super) use step::Scratch;

use binding::{Bound, INDICES, KV, LSE, OUT, Q_NOPE, Q_PE, TOPK_LENGTH};
use step::{Prepared, Tables, Words};
use tokens::Tokens;

use super::buffer::{Buffer, Locked, exclusive, store_elements};
use super::device::Cpu;
use super::kernels::tile::{BLOCK, CARRY_BLOCKS, MAX_ROWS, Tile, Weight};
use super::kernels::{Kernels, VARIANTS};
use crate::base::dtype::Dtype;
use crate::base::error::Result;
use crate::cache::TokenLayout;
use crate::cache::decode_spec::MlaDecode;
use crate::cpu::kernels::formats::{bits_of, widen_token};
use crate::ops::variants::{candidates, choose};
use crate::ops::{Candidate, Choice, DecodeInputs as Inputs, DecodeOptions, Device, Kernel, MlaDecodeArgs};
use crate::plan::tables::{Capacity, PageTable};
use crate::plan::{DIRECT, Plan, QueryToken, Tiling, WorkItem};

impl Kernel<MlaDecode> for Cpu {
    const SERVES_RECORDS: bool = true;
    type Kernels = Compiled;
    type Step = Prepared;
    type Binding = Layer;

    fn kernel_variants(&self, _: &MlaDecode) -> Vec<Candidate> {
        candidates(VARIANTS, &(), &())
    }

    /// `DecodeOptions::query_tokens` changes nothing: tiles hold several query tokens of a sequence anyway.
    fn kernel_compile(
        &self,
        spec: &MlaDecode,
        options: &DecodeOptions,
    ) -> Result<(Compiled, Tiling, Choice)> {
        let inputs = Inputs::new(options)?;
        let (kernels, choice) = choose(VARIANTS, &(), &(), options.variant.as_deref())?;
        Ok((Compiled { kernels, inputs }, options.tiling.unwrap_or(tiling(spec, self)), choice))
    }

    fn kernel_step(&self, spec: &MlaDecode, _: &Compiled, capacity: Capacity) -> Result<Prepared> {
        Prepared::new(*spec, capacity, self.threads())
    }

    fn kernel_capacity(step: &Prepared) -> Capacity {
        step.capacity()
    }

    fn kernel_prepare(
        &self,
        spec: &MlaDecode,
        compiled: &Compiled,
        step: &mut Prepared,
        (plan, pages): (&Plan, PageTable<'_>),
    ) -> Result<u32> {
        compiled.inputs.check_plan(plan, pages)?;
        step.prepare(rows_per_tile(spec), plan, pages)?;
        Ok(plan.num_queries)
    }

    fn kernel_bind(
        &self,
        spec: &MlaDecode,
        compiled: &Compiled,
        args: &MlaDecodeArgs<&Buffer>,
        max_queries: u32,
    ) -> Result<Layer> {
        compiled.inputs.check_args(spec, args, max_queries, Self::size)?;
        let slabs = args.each_slab().map(|args| Bound::new(spec, &args));
        Ok(Layer { slabs: slabs.collect(), slab_pages: args.kv.slabs.slab_pages() })
    }

    fn kernel_record(
        &self,
        spec: &MlaDecode,
        Compiled { kernels, .. }: &Compiled,
        (): &mut (),
        step: &Prepared,
        layer: &Layer,
    ) -> Result<()> {
        step.words.check(layer.slab_pages)?;
        let Some(merges) = step.words.own.tables() else { return Ok(()) };
        let mut partials = step.partials.lock().unwrap_or_else(PoisonError::into_inner);
        let weights_at = step.num_partials() * spec.shape.kv_lora_rank as usize;
        let (outs, weights) = partials.split_at_mut(weights_at);
        let Some(first) = layer.slabs.first() else { return Ok(()) };
        for (binding, tables) in layer.slabs.iter().zip(step.words.each().filter_map(Words::tables)) {
            let locked = binding.lock();
            let call = Call::new(spec, kernels, binding, tables, &locked);
            let (partial_outs, partial_weights) = (&*outs, &*weights);
            let items = tables.items();
            self.pool.for_each(items.len(), |thread, unit| {
                let mut scratch = step.scratch[thread].lock().unwrap_or_else(PoisonError::into_inner);
                call.attend(&mut scratch.tile(), &items[unit], partial_outs, partial_weights);
            });
        }
        let locked = first.lock();
        let call = Call::new(spec, kernels, first, merges, &locked);
        merge::run(&self.pool, &call, exclusive(outs), exclusive(weights));
        Ok(())
    }
}

/// The kernels of a variant, and the optional inputs that they are run with.
#[derive(Debug)]
pub struct Compiled {
    kernels: Kernels,
    inputs: Inputs,
}

/// A layer's buffers, with the cache of each slab.
#[derive(Debug)]
pub struct Layer {
    slabs: Vec<Bound>,
    slab_pages: u32,
}

/// A tile has whole query tokens where they fit, else an equal share of one token's heads, so that no tile is left with a few rows.
fn rows_per_tile(spec: &MlaDecode) -> u32 {
    let (heads, most) = (spec.shape.num_heads, MAX_ROWS as u32);
    if heads <= most { most / heads * heads } else { heads.div_ceil(heads.div_ceil(most)) }
}

fn tiling(spec: &MlaDecode, cpu: &Cpu) -> Tiling {
    Tiling {
        rows_per_tile: rows_per_tile(spec),
        tokens_per_block: BLOCK as u32,
        target_items: cpu.target_items(),
        min_split_tokens: 256,
        single_sequence_items: 0,
        // An estimate: loading queries and storing sums moves about as much as attending four tokens.
        item_overhead_tokens: 4,
    }
}

/// Everything that the threads of one call share.
struct Call<'a> {
    spec: &'a MlaDecode,
    kernels: &'a Kernels,
    token: TokenLayout,
    binding: &'a Bound,
    tables: Tables<'a>,
    queries: &'a [QueryToken],
    pages: &'a [u32],
    q_nope: &'a [u8],
    q_pe: &'a [u8],
    kv: &'a [u8],
    indices: &'a [u8],
    topk_length: &'a [u8],
    out: &'a [AtomicU32],
    lse: &'a [AtomicU32],
}

impl<'a> Call<'a> {
    fn new(
        spec: &'a MlaDecode,
        kernels: &'a Kernels,
        binding: &'a Bound,
        tables: Tables<'a>,
        locked: &'a Locked<'_, 7>,
    ) -> Self {
        Self {
            spec,
            kernels,
            token: spec.kv.token(&spec.shape),
            binding,
            tables,
            queries: tables.queries(),
            pages: tables.pages(),
            q_nope: locked.bytes(Q_NOPE),
            q_pe: locked.bytes(Q_PE),
            kv: locked.bytes(KV),
            indices: locked.bytes(INDICES),
            topk_length: locked.bytes(TOPK_LENGTH),
            out: locked.words(OUT),
            lse: locked.words(LSE),
        }
    }

    /// Does one work item. `outs` is `[partials, L]`, `weights` the two words of a [`Weight`] each.
    fn attend(&self, tile: &mut Tile<'_>, item: &WorkItem, outs: &[AtomicU32], weights: &[AtomicU32]) {
        let (num_rows, latent) = (item.num_rows as usize, tile.latent);
        let mut tokens = Tokens::new(self, item);
        // The row's query token, and how many of the item's tokens it sees.
        let mut rows = [(QueryToken { token: 0, visible: 0 }, 0u32); MAX_ROWS];
        for (r, row) in rows[..num_rows].iter_mut().enumerate() {
            let query = self.queries[self.row(item, r).0];
            *row = (query, tokens.seen(query.visible));
            self.load_query(tile, item, r);
        }
        tile.clear(num_rows);

        let mut next = tokens.next_block();
        let mut begin = 0;
        while next.tokens > 0 {
            let (block, end) = (next, begin + next.tokens as u32);
            for (row, bytes) in tile.kv.chunks_exact_mut(tile.stride).zip(block.rows()) {
                self.widen_token(bytes, &mut row[..tile.dim]);
            }
            next = tokens.next_block();
            // Neighbouring rows with equally many visible keys are attended together. The kernel gets visible keys only, so a
            // row's result does not depend on what its neighbours see.
            let visible = |r: usize| rows[r].1.clamp(begin, end) - begin;
            let mut r = 0;
            while r < num_rows {
                let tokens = visible(r);
                let end_row = (r + 1..num_rows).find(|&next| visible(next) != tokens).unwrap_or(num_rows);
                if tokens > 0 {
                    // The keys are prefetched by the first tile only.
                    let ahead = if r == 0 { next.rows() } else { &[] };
                    // SAFETY: the table of variants gives only what runs here.
                    unsafe {
                        let scale = self.binding.logit_scale;
                        (self.kernels.attend)(tile, r..end_row, tokens as usize, scale, ahead);
                    }
                }
                r = end_row;
            }
            begin = end;
            if begin.is_multiple_of((CARRY_BLOCKS * BLOCK) as u32) {
                tile.carry(num_rows, self.binding.logit_scale);
            }
        }

        for (r, &(query, seen)) in rows[..num_rows].iter().enumerate() {
            let (empty, scale) = (seen.min(begin) == 0, self.binding.logit_scale);
            if item.partial == DIRECT {
                let half_lse = if empty { f32::NEG_INFINITY } else { tile.finish_alone(r, scale) };
                let out = &tile.o[r * latent..][..latent];
                self.store(query.token as usize, self.row(item, r).1, out, half_lse);
                continue;
            }
            let Weight { max, sum } = if empty { Weight::EMPTY } else { tile.finish(r, scale) };
            let partial = item.partial as usize + r;
            weights[2 * partial].store(max.to_bits(), Ordering::Relaxed);
            weights[2 * partial + 1].store(sum.to_bits(), Ordering::Relaxed);
            for (to, x) in outs[partial * latent..][..latent].iter().zip(&tile.o[r * latent..]) {
                to.store(x.to_bits(), Ordering::Relaxed);
            }
        }
    }

    /// `(index in the queries, head)` of a row of an item.
    fn row(&self, item: &WorkItem, r: usize) -> (usize, usize) {
        let heads = self.spec.shape.num_heads as usize;
        let row = item.first_row as usize + r;
        (row / heads, row % heads)
    }

    fn load_query(&self, tile: &mut Tile<'_>, item: &WorkItem, r: usize) {
        let (query, head) = self.row(item, r);
        let token = self.queries[query].token as usize;
        let (dtype, binding) = (self.spec.query, self.binding);
        let (nope, pe) = tile.q[r * tile.stride..][..tile.dim].split_at_mut(tile.latent);
        self.widen(dtype, elements(self.q_nope, dtype, binding.q_nope.at(token, head), nope.len()), nope);
        if !pe.is_empty() {
            self.widen(dtype, elements(self.q_pe, dtype, binding.q_pe.at(token, head), pe.len()), pe);
        }
    }

    /// A token of the cache as f32: its latent, times scales of its own, then its rotary part.
    fn widen_token(&self, bytes: &[u8], to: &mut [f32]) {
        // SAFETY: the table of variants gives only what runs here.
        widen_token(
            |dtype, bytes, to| unsafe { (self.kernels.widen)(dtype, bytes, to) },
            &self.token,
            bytes,
            to,
        );
    }

    /// Elements as f32.
    fn widen(&self, dtype: Dtype, bytes: &[u8], to: &mut [f32]) {
        // SAFETY: the table of variants gives only what runs here.
        unsafe { (self.kernels.widen)(dtype, bytes, to) }
    }

    /// Writes a finished row: its normalised output, not yet scaled, and half its LSE in base 2.
    fn store(&self, token: usize, head: usize, out: &[f32], half_lse: f32) {
        let Bound { out_scale, lse_scale, .. } = *self.binding;
        // A row of no key stays 0, whatever its sink.
        let sinks = if half_lse == f32::NEG_INFINITY { &[] } else { &self.binding.sinks[..] };
        let out_scale = out_scale * sinks.get(head).map_or(1.0, |&sink| share_of_keys(sink, half_lse));
        let (dtype, first) = (self.spec.out, self.binding.out.at(token, head));
        store_elements(self.out, dtype.bytes(), first, out.len(), |i| bits_of(dtype, out[i] * out_scale));
        let lse = (half_lse * (2.0 * lse_scale)).to_bits();
        self.lse[self.binding.lse.at(token, head)].store(lse, Ordering::Relaxed);
    }
}

/// The share of a row's weight that its keys have beside a sink: `1 / (1 + 2^(sink - lse))`, given the sink and half the LSE in base 2.
fn share_of_keys(sink: f32, half_lse: f32) -> f32 {
    (1.0 / (1.0 + (f64::from(sink) - 2.0 * f64::from(half_lse)).exp2())) as f32
}

/// The bytes of `count` elements from the first on.
fn elements(bytes: &[u8], dtype: Dtype, first: usize, count: usize) -> &[u8] {
    &bytes[first * dtype.bytes()..][..count * dtype.bytes()]
}
