//! `mla_prefill` on host memory: a tile of query rows of one head at a time, by the kernels of a decode.

use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use crate::base::error::Result;
use crate::cpu::buffer::{Access, Buffer, Locked, lock, store_elements};
use crate::cpu::decode::{Rows, Scratch};
use crate::cpu::device::Cpu;
use crate::cpu::kernels::formats::bits_of;
use crate::cpu::kernels::tile::{BLOCK, CARRY_BLOCKS, MAX_ROWS, Tile};
use crate::cpu::kernels::{Kernels, VARIANTS};
use crate::ops::mla_prefill::tiles::{PrefillTile, tiles};
use crate::ops::variants::{candidates, choose};
use crate::ops::{
    Candidate, Choice, Kernel, MlaPrefill, MlaPrefillArgs, Op, PrefillExtent, PrefillOptions,
    PrefillSequence, PrefillTiling,
};

/// The arguments in the order in which they are locked.
const Q_NOPE: usize = 0;
const Q_PE: usize = 1;
const K_NOPE: usize = 2;
const K_PE: usize = 3;
const V: usize = 4;
const OUT: usize = 5;
const LSE: usize = 6;

/// The kernels, and each thread's scratch.
#[derive(Debug)]
pub struct Threads {
    kernels: Kernels,
    scratch: Vec<Mutex<Scratch>>,
}

/// One layer's arrays.
#[derive(Debug)]
pub struct Bound(MlaPrefillArgs<Buffer>);

impl Kernel<MlaPrefill> for Cpu {
    type Kernels = Threads;
    type Step = Vec<PrefillTile>;
    type Binding = Bound;

    fn kernel_variants(&self, _: &MlaPrefill) -> Vec<Candidate> {
        candidates(VARIANTS, &(), &())
    }

    fn kernel_compile(
        &self,
        spec: &MlaPrefill,
        options: &PrefillOptions,
    ) -> Result<(Threads, PrefillTiling, Choice)> {
        let (kernels, choice) = choose(VARIANTS, &(), &(), options.variant.as_deref())?;
        let dim = (spec.qk_nope_head_dim + spec.qk_rope_head_dim) as usize;
        let scratch = || Scratch::new(dim, spec.v_head_dim as usize, true).map(Mutex::new);
        let scratch = (0..self.threads()).map(|_| scratch()).collect::<Result<_>>()?;
        let tiling = PrefillTiling {
            rows: MAX_ROWS as u32,
            target_groups: self.target_items(),
            num_heads: spec.num_heads,
        };
        Ok((Threads { kernels, scratch }, tiling, choice))
    }

    fn kernel_step(&self, _: &MlaPrefill, _: &Threads, _: u32) -> Result<Vec<PrefillTile>> {
        Ok(Vec::new())
    }

    fn kernel_prepare(
        &self,
        _: &MlaPrefill,
        _: &Threads,
        step: &mut Vec<PrefillTile>,
        sequences: &[PrefillSequence],
    ) -> Result<PrefillExtent> {
        let extent = PrefillExtent::of(sequences)?;
        *step = tiles(sequences, MAX_ROWS as u32)?;
        Ok(extent)
    }

    fn kernel_bind(
        &self,
        spec: &MlaPrefill,
        _: &Threads,
        args: &MlaPrefillArgs<&Buffer>,
        _: PrefillExtent,
    ) -> Result<Bound> {
        spec.map(args, |_, buffer| Ok(Buffer::clone(buffer))).map(Bound)
    }

    fn kernel_record(
        &self,
        spec: &MlaPrefill,
        threads: &Threads,
        (): &mut (),
        tiles: &Vec<PrefillTile>,
        Bound(args): &Bound,
    ) -> Result<()> {
        let args = spec.map(args, |_, buffer| Ok(buffer))?;
        let [q_nope, q_pe, k_nope, k_pe, v] = args.read_views(spec).map(|(_, view, _)| view);
        let [a, b, c, d, e] = [q_nope, q_pe, k_nope, k_pe, v].map(|view| (view.buffer, Access::Read));
        let written = [args.out.buffer, args.lse.buffer].map(|buffer| (buffer, Access::Write));
        let call = Call {
            spec,
            kernels: &threads.kernels,
            locked: lock([a, b, c, d, e, written[0], written[1]]),
            at: [q_nope, q_pe, k_nope, k_pe, v, args.out, args.lse].map(|view| Rows::of(&view)),
            scale: (f64::from(args.softmax_scale) * std::f64::consts::LOG2_E) as f32,
            v_scale: args.v_scale,
        };
        self.pool.for_each(tiles.len() * spec.num_heads as usize, |thread, unit| {
            let mut scratch = threads.scratch[thread].lock().unwrap_or_else(PoisonError::into_inner);
            // One head after the other: their keys are most of what is read.
            call.attend(&mut scratch.tile(), &tiles[unit % tiles.len()], unit / tiles.len());
        });
        Ok(())
    }
}

/// Everything that the threads of one call share.
struct Call<'a> {
    spec: &'a MlaPrefill,
    kernels: &'a Kernels,
    locked: Locked<'a, 7>,
    at: [Rows; 7],
    /// Dot products to logits in base 2.
    scale: f32,
    v_scale: f32,
}

impl Call<'_> {
    fn attend(&self, tile: &mut Tile<'_>, item: &PrefillTile, head: usize) {
        let num_rows = item.num_rows as usize;
        let [nope, rope, dim] =
            [self.spec.qk_nope_head_dim, self.spec.qk_rope_head_dim, self.spec.v_head_dim]
                .map(|elements| elements as usize);
        for r in 0..num_rows {
            let token = item.first_token as usize + r;
            let (q_nope, q_pe) = tile.q[r * tile.stride..][..nope + rope].split_at_mut(nope);
            self.widen(Q_NOPE, token, head, q_nope);
            self.widen(Q_PE, token, head, q_pe);
        }
        tile.clear(num_rows);

        let mut begin = 0;
        while begin < item.num_keys {
            let end = item.num_keys.min(begin + BLOCK as u32);
            for (key, row) in (begin..end).zip(tile.kv.chunks_exact_mut(tile.stride)) {
                let key = (item.kv_begin + key) as usize;
                let (k, v) = row.split_at_mut(tile.value_at);
                let (k_nope, k_pe) = k[..nope + rope].split_at_mut(nope);
                self.widen(K_NOPE, key, head, k_nope);
                self.widen(K_PE, key, head, k_pe);
                self.widen(V, key, head, &mut v[..dim]);
            }
            // Neighbouring rows with equally many visible keys are attended together.
            let seen = |r: usize| item.visible(r as u32).clamp(begin, end) - begin;
            let mut r = 0;
            while r < num_rows {
                let keys = seen(r);
                let next = (r + 1..num_rows).find(|&next| seen(next) != keys).unwrap_or(num_rows);
                if keys > 0 {
                    // SAFETY: the table of variants gives only what runs here.
                    unsafe { (self.kernels.attend)(tile, r..next, keys as usize, self.scale, &[]) }
                }
                r = next;
            }
            begin = end;
            if begin.is_multiple_of((CARRY_BLOCKS * BLOCK) as u32) {
                tile.carry(num_rows, self.scale);
            }
        }

        for r in 0..num_rows {
            let row = item.first_row as usize + r;
            let mut lse = f32::NEG_INFINITY;
            if item.visible(r as u32) > 0 {
                lse = tile.finish_alone(r, self.scale) * (2.0 * std::f32::consts::LN_2);
            }
            let out = &tile.o[r * tile.latent..][..dim];
            let (dtype, first) = (self.spec.out, self.at[OUT].at(row, head));
            let bits = |i: usize| bits_of(dtype, out[i] * self.v_scale);
            store_elements(self.locked.words(OUT), dtype.bytes(), first, dim, bits);
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
        // SAFETY: the table of variants gives only what runs here.
        unsafe { (self.kernels.widen)(dtype, bytes, to) }
    }
}
