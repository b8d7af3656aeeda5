//! A step's tables and scratch, kept from step to step.

use std::sync::Mutex;
use std::sync::atomic::AtomicU32;

use bytemuck::{Pod, cast_slice};

use crate::base::error::{Error, Result};
use crate::cache::KvSpec;
use crate::cache::decode_spec::MlaDecode;
use crate::cpu::buffer::{Line, zeroed};
use crate::cpu::kernels::lanes::MAX_LANES;
use crate::cpu::kernels::tile::{BLOCK, MAX_ROWS, Tile};
use crate::plan::tables::{Capacity, Header, PageTable, write_tables};
use crate::plan::{Merge, Plan, QueryToken, Slabbed, WorkItem, check_plan};

/// A step's tables, room for its partial results, and each thread's scratch.
#[derive(Debug)]
pub struct Prepared {
    spec: MlaDecode,
    pub(super) words: Slabbed<Words>,
    /// Partial outputs `[partials, L]`, then a [`Weight`](crate::cpu::kernels::tile::Weight) each. Locked by a run.
    pub(super) partials: Mutex<Vec<AtomicU32>>,
    num_partials: u32,
    /// One a thread, taken by the thread of that index only.
    pub(super) scratch: Vec<Mutex<Scratch>>,
}

/// The tables of one plan.
#[derive(Debug, Default)]
pub(super) struct Words {
    capacity: Capacity,
    words: Vec<u32>,
    /// None until a plan was prepared.
    header: Option<Header>,
}

impl Words {
    /// Makes room; what they held is lost where they had to grow.
    fn grow(&mut self, need: Capacity) -> Result<()> {
        if self.capacity.holds(need) && !self.words.is_empty() {
            return Ok(());
        }
        let capacity = self.capacity.grown_to(need);
        capacity.check_words()?;
        self.words = zeroed(capacity.words() as usize, "a step's tables")?;
        self.capacity = capacity;
        Ok(())
    }

    fn write(&mut self, plan: &Plan, pages: PageTable<'_>, kv: &KvSpec) -> Result<()> {
        self.header = Some(write_tables(&mut self.words, &self.capacity, plan, pages, kv)?);
        Ok(())
    }

    /// `None` where no plan was prepared.
    pub(super) fn tables(&self) -> Option<Tables<'_>> {
        Some(Tables { words: &self.words, header: self.header.as_ref()? })
    }
}

impl Prepared {
    pub(super) fn new(spec: MlaDecode, capacity: Capacity, threads: usize) -> Result<Self> {
        let scratch = (0..threads).map(|_| Scratch::of_decode(&spec).map(Mutex::new));
        let mut step = Self {
            spec,
            words: Slabbed::new(Words::default()),
            partials: Mutex::default(),
            num_partials: 0,
            scratch: scratch.collect::<Result<_>>()?,
        };
        step.grow(capacity)?;
        Ok(step)
    }

    /// Where there is no memory, the step is as it was: it still serves what it has room for.
    fn grow(&mut self, need: Capacity) -> Result<()> {
        let partials = self.words.own.capacity.grown_to(need).partials;
        if partials > self.num_partials {
            let per_partial = self.spec.shape.kv_lora_rank as usize + 2;
            let grown = zeroed((partials as usize).saturating_mul(per_partial), "partial results")?;
            (self.partials, self.num_partials) = (Mutex::new(grown), partials);
        }
        self.words.own.grow(need)
    }

    pub(super) fn prepare(&mut self, rows_per_tile: u32, plan: &Plan, pages: PageTable<'_>) -> Result<()> {
        self.words.own.header = None;
        if matches!(pages, PageTable::Device) {
            let cure = "there is no device to write the page list here: pass PageTable::Dense or Csr";
            return Err(Error::Shape {
                what: "PageTable::Device pages",
                got: plan.page_list_len().into(),
                cure,
            });
        }
        check_plan(plan, &self.spec, pages, rows_per_tile)?;
        self.grow(Capacity::of(plan))?;
        let write = |words: &mut Words, spec: &MlaDecode, plan: &Plan, pages: PageTable<'_>| {
            words.grow(Capacity::of(plan))?;
            words.write(plan, pages, &spec.kv)
        };
        self.words.prepare(&self.spec, (plan, pages), write, |_, _| true, |_, _, _| Ok(Words::default()))
    }

    pub(super) fn capacity(&self) -> Capacity {
        self.words.own.capacity
    }

    pub(super) fn num_partials(&self) -> usize {
        self.num_partials as usize
    }
}

/// A plan as the kernels read it.
#[derive(Clone, Copy)]
pub(super) struct Tables<'a> {
    words: &'a [u32],
    header: &'a Header,
}

impl<'a> Tables<'a> {
    pub(super) fn items(&self) -> &'a [WorkItem] {
        self.section(self.header.items, self.header.num_items as usize)
    }

    pub(super) fn queries(&self) -> &'a [QueryToken] {
        let count = (self.header.merges - self.header.queries) as usize / 2;
        self.section(self.header.queries, count)
    }

    pub(super) fn merges(&self) -> &'a [Merge] {
        self.section(self.header.merges, self.header.num_merges as usize)
    }

    pub(super) fn merge_partials(&self) -> &'a [u32] {
        &self.words[self.header.merge_partials as usize..self.header.pages as usize]
    }

    pub(super) fn pages(&self) -> &'a [u32] {
        &self.words[self.header.pages as usize..self.header.end as usize]
    }

    fn section<T: Pod>(&self, at: u32, count: usize) -> &'a [T] {
        cast_slice(&self.words[at as usize..][..count * size_of::<T>() / 4])
    }
}

/// One thread's scratch: the arrays of a [`Tile`].
pub(in crate::cpu) struct Scratch {
    lines: Vec<Line>,
    /// The lines that hold f64: sums carried over tokens.
    carried: Vec<Line>,
    stride: usize,
    dim: usize,
    latent: usize,
    value_at: usize,
}

impl std::fmt::Debug for Scratch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scratch").field("lines", &self.lines.len()).finish()
    }
}

impl Scratch {
    fn of_decode(spec: &MlaDecode) -> Result<Self> {
        Self::new(spec.shape.row_elems() as usize, spec.shape.kv_lora_rank as usize, false)
    }

    /// For keys of `dim` elements and values of `latent`, beside them or, as in a cache of latents, a part of them.
    pub(in crate::cpu) fn new(dim: usize, latent: usize, beside: bool) -> Result<Self> {
        // What pads them is zero from here on: nothing writes there.
        let [dim, latent] = [dim, latent].map(|elements| elements.next_multiple_of(MAX_LANES));
        let value_at = if beside { dim } else { 0 };
        // An odd number of cache lines, so that a column of a block is spread over every set of the cache.
        let stride = dim.max(value_at + latent).next_multiple_of(32) + 16;
        let floats = (MAX_ROWS + BLOCK) * stride + MAX_ROWS * (BLOCK + latent + 4);
        let what = "a thread's scratch";
        let (lines, carried) =
            (zeroed(floats.div_ceil(16), what)?, zeroed((MAX_ROWS * (latent + 1)).div_ceil(8), what)?);
        Ok(Self { lines, carried, stride, dim, latent, value_at })
    }

    pub(in crate::cpu) fn tile(&mut self) -> Tile<'_> {
        let Self { stride, dim, latent, value_at, .. } = *self;
        let mut rest: &mut [f32] = bytemuck::cast_slice_mut(&mut self.lines);
        let mut take = |floats: usize| rest.split_off_mut(..floats).unwrap_or_default();
        let (carried_o, carried_sum) =
            bytemuck::cast_slice_mut(&mut self.carried).split_at_mut(MAX_ROWS * latent);
        Tile {
            q: take(MAX_ROWS * stride),
            kv: take(BLOCK * stride),
            p: take(MAX_ROWS * BLOCK),
            o: take(MAX_ROWS * latent),
            max: take(MAX_ROWS),
            sum: take(MAX_ROWS),
            rescale: take(MAX_ROWS),
            carried_max: take(MAX_ROWS),
            carried_o,
            carried_sum,
            has_carried: false,
            stride,
            dim,
            latent,
            value_at,
        }
    }
}
