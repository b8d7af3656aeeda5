//! A step's tables and scratch on the card.

use crate::base::id::next_id;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::base::error::{Error, Result};
use crate::cache::decode_spec::MlaDecode;
use crate::cuda::{Buffer, Cuda};
use crate::ops::Step;
use crate::ops::op::Device;
use crate::plan::tables::{Capacity, Header, PageTable, write_tables};
use crate::plan::{Plan, Slabbed};

/// A step's tables and scratch. A prepare that fits the capacity rewrites the tables in place, in the stream's order.
#[derive(Debug)]
pub struct Tables {
    pub(super) capacity: Capacity,
    pub(super) tables: Buffer,
    pub(super) partials: Buffer,
    pub(super) header: Header,
    /// Whether the host may write the page list itself.
    device_page_list: bool,
    /// A number unique to the last `prepare`. Captured graphs share it, so that a replay can tell whether the step was prepared since.
    generation: Arc<AtomicU64>,
    words: Vec<u32>,
    /// Whether these are the tables of one slab, which have no partial results of their own.
    is_slab: bool,
}

impl Step<MlaDecode, Cuda> {
    /// The card's copy of the flat page list, for a host that writes it on the card: [`Capacity::pages`] words, or up to three more, of
    /// the tables, which a prepare beyond the capacity replaces. Sequence `i` begins at word [`Plan::page_begin`]`[i]`.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`] for a step of a decode made without [`crate::DecodeOptions::device_page_list`]: its kernels trust the
    /// page list, which only a prepare writes.
    pub fn page_list(&self) -> Result<Buffer> {
        if !self.raw.own.device_page_list {
            let detail = "Step::page_list needs a decode made with DecodeOptions::device_page_list";
            return Err(Error::LayoutMismatch { detail });
        }
        let (begin, end) = (self.raw.own.header.pages, self.raw.own.header.end);
        Ok(self.raw.own.tables.part(u64::from(begin) * 4, u64::from(end - begin) * 4))
    }
}

/// A hash of what a captured launch depends on besides the step's capacity: how many slabs there are, and where their tables lie.
pub(super) fn form(step: &Slabbed<Tables>) -> u64 {
    let words = step.of_slabs().iter().map(|slab| slab.tables.ptr() ^ u64::from(slab.capacity.items));
    words.fold(step.slab_pages().into(), |form, word| form.wrapping_mul(0x100_0000_01B3).wrapping_add(word))
}

/// Uploads the tables of a plan that passed [`crate::plan::check_plan`].
pub(super) fn prepare(
    step: &mut Slabbed<Tables>,
    cuda: &Cuda,
    spec: &MlaDecode,
    plan: (&Plan, PageTable<'_>),
) -> Result<()> {
    let write = |tables: &mut Tables, spec: &MlaDecode, plan: &Plan, pages: PageTable<'_>| {
        tables.prepare_one(cuda, spec, plan, pages)
    };
    let new = |_: &Tables, spec: &MlaDecode, capacity| {
        Ok(Tables { is_slab: true, ..Tables::with_partials(cuda, spec, (false, capacity), 0)? })
    };
    step.prepare(spec, plan, write, |_, _| true, new)
}

impl Tables {
    pub(super) fn new(
        cuda: &Cuda,
        spec: &MlaDecode,
        device_page_list: bool,
        capacity: Capacity,
    ) -> Result<Self> {
        Self::with_partials(cuda, spec, (device_page_list, capacity), capacity.partials)
    }

    fn with_partials(
        cuda: &Cuda,
        spec: &MlaDecode,
        (device_page_list, capacity): (bool, Capacity),
        partials: u32,
    ) -> Result<Self> {
        super::grids::check_grids(spec, &capacity, cuda.card().multiprocessors)?;
        capacity.check_words()?;
        let header = capacity.header(&spec.kv);
        let partial = u64::from(spec.shape.kv_lora_rank) + 4;
        Ok(Self {
            capacity,
            tables: Buffer::zeroed(cuda.stream(), u64::from(header.end) * 4)?,
            partials: Buffer::zeroed(cuda.stream(), u64::from(partials) * partial * 4)?,
            header,
            device_page_list,
            generation: Arc::new(next_id().into()),
            words: Vec::new(),
            is_slab: false,
        })
    }

    /// The number of the last `prepare`.
    pub(in crate::cuda) fn generation(&self) -> &Arc<AtomicU64> {
        &self.generation
    }

    /// The tables, the page list included.
    pub(in crate::cuda) fn buffer(&self) -> &Buffer {
        &self.tables
    }

    /// The address of the page list.
    pub(in crate::cuda) fn pages(&self) -> u64 {
        self.tables.ptr() + u64::from(self.header.pages) * 4
    }

    fn prepare_one(
        &mut self,
        cuda: &Cuda,
        spec: &MlaDecode,
        plan: &Plan,
        pages: PageTable<'_>,
    ) -> Result<()> {
        let capacity = self.capacity.grown_to(Capacity::of(plan));
        // Checked in full before anything on the card changes.
        let header = write_tables(&mut self.words, &capacity, plan, pages, &spec.kv)?;
        if capacity != self.capacity {
            let partials = if self.is_slab { 0 } else { capacity.partials };
            let grown = Self::with_partials(cuda, spec, (self.device_page_list, capacity), partials)?;
            let words = std::mem::take(&mut self.words);
            *self = Self { words, is_slab: self.is_slab, generation: self.generation.clone(), ..grown };
        }
        self.generation.store(next_id(), Ordering::Relaxed);
        let used = match pages {
            // The page list is written on the card.
            PageTable::Device => header.pages,
            _ => header.pages + plan.page_list_len(),
        };
        let used = used as usize;
        cuda.upload(&self.tables, 0, bytemuck::cast_slice(&self.words[..used]))?;
        self.header = header;
        Ok(())
    }
}
