//! `batch_tables`: the slots of new tokens and the tables of a decode, from a batch that only the device knows.

use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::THREADS;
use super::single::kernel_args;
use super::table::Table;
use crate::base::error::{Error, Result};
use crate::cache::KvSpec;
use crate::cache::decode_spec::MlaDecode;
use crate::cuda::{Buffer, Cuda, Function};
use crate::ops::{
    AppendsSlots, Compiled, Device, DeviceBatch, Kernel, Replay, Sequences, Step, check_binding, no_slots,
    template,
};
use crate::plan::Plan;
use crate::plan::shares::{Pattern, Shares};
use crate::plan::tables::PageTable;

/// Makes tables on the card from `seq_lens`, `query_start_loc` and `block_table` that the host never reads back: batches may be
/// padded to a fixed size, and a step is planned once for the longest that its sequences may become.
///
/// ```text
/// once      tables = BatchTables::new(&cuda, kv), batch = tables.bind(&DeviceBatch { .. })
///           slots = tables.slots(&append, max_tokens)
///           tables.prepare(&mut lists, &mla, &mut step, &plan)     a plan of upper bounds
/// a step    tables.record_slots(&slots, &batch), append.record(slots.step(), ..) for each layer
///           tables.record_lists(&lists, &step, &batch), mla.record(&step, ..) for each layer
/// ```
/// All of a step may be one graph, which then replays with whatever the arrays hold.
#[derive(Debug, Clone)]
pub struct BatchTables {
    cuda: Cuda,
    kv: KvSpec,
    /// Which blocks of tokens this rank holds; empty where it holds whole sequences.
    share: Arc<Pattern>,
    /// Its marks, at least a word.
    marks: Buffer,
    slots: Function,
    items: Function,
    pages: Function,
}

/// A batch's arrays, checked and held.
#[derive(Debug, Clone)]
pub struct BatchBinding {
    args: BatchParams,
    kv: KvSpec,
    share: Arc<Pattern>,
    device: u64,
    buffers: [Buffer; 4],
}

/// Slots that the device writes and an append of new tokens, [`crate::KvAppend`] or [`crate::RopeAppend`], reads.
#[derive(Debug)]
pub struct DeviceSlots<O: AppendsSlots>
where
    Cuda: Kernel<O>,
{
    step: Step<O, Cuda>,
    /// The table, if it has room for a token.
    table: Option<Buffer>,
    max_tokens: u32,
    kv: KvSpec,
    device: u64,
}

/// The template of a decode's tables for each batch: the plan for its upper bounds.
#[derive(Debug, Default)]
pub struct DecodeLists {
    plan: Table,
    /// The device of the tables that prepared it.
    device: u64,
    /// The tables that it was prepared for, held so that no other has their address.
    tables: Option<Buffer>,
    now: Arc<Mutex<Option<Prepared>>>,
}

/// Which `prepare` of a step lists belong to, and the sequences that it planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Prepared {
    generation: u64,
    batch: u32,
}

/// Lists in a graph: each replay needs the step as the lists' own last prepare left it.
struct RecordedLists {
    now: Arc<Mutex<Option<Prepared>>>,
    step: Arc<AtomicU64>,
    batch: u32,
}

impl RecordedLists {
    fn new(lists: &DecodeLists, step: &Step<MlaDecode, Cuda>, batch: &BatchBinding) -> Self {
        Self { now: lists.now.clone(), step: step.raw.own.generation().clone(), batch: batch.args.batch }
    }
}

impl Replay for RecordedLists {
    fn check(&self) -> Result<()> {
        let generation = self.step.load(Ordering::Relaxed);
        let now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(now) = now.filter(|now| now.generation == generation) else {
            let detail = "the step was prepared by another call than the last BatchTables::prepare of these lists: prepare both again by it";
            return Err(Error::LayoutMismatch { detail });
        };
        if now.batch != self.batch {
            let detail = "the plan has another number of sequences than the batch";
            return Err(Error::LayoutMismatch { detail });
        }
        Ok(())
    }

    fn is(&self, other: &dyn Any) -> bool {
        other.downcast_ref::<Self>().is_some_and(|other| {
            Arc::ptr_eq(&self.now, &other.now)
                && Arc::ptr_eq(&self.step, &other.step)
                && self.batch == other.batch
        })
    }
}

kernel_args! {
    /// `Args` of batch_tables.cu.
    pub(super) struct BatchParams {
        seq_lens: u64,
        query_start_loc: u64,
        block_table: u64,
        marks: u64,
        slots: u64,
        plan: u64,
        tables: u64,
        pages: u64,
        batch: u32,
        max_pages: u32,
        page_size: u32,
        num_pages: u32,
        max_tokens: u32,
        interleave: u32,
        owned: u32,
        blocks: u32,
    }
}

pub(super) const ENTRIES: [&str; 3] = ["batch_slots", "batch_items", "batch_pages"];

impl<O: AppendsSlots> DeviceSlots<O>
where
    Cuda: Kernel<O>,
{
    /// What [`Compiled::record`] takes: of `max_tokens` tokens, those without a slot skipped.
    pub fn step(&self) -> &Step<O, Cuda> {
        &self.step
    }
}

impl DecodeLists {
    fn set(&self, prepared: Option<Prepared>) {
        *self.now.lock().unwrap_or_else(PoisonError::into_inner) = prepared;
    }
}

impl BatchTables {
    /// Loads the kernels for a cache; its dtype does not matter.
    ///
    /// # Errors
    /// The errors of [`KvSpec::check`], and [`Error::Cuda`].
    pub fn new(cuda: &Cuda, kv: KvSpec) -> Result<Self> {
        Self::of_share(cuda, kv, Pattern::default())
    }

    /// Like [`BatchTables::new`], for a rank that holds its share of the tokens. A batch's `seq_lens` are those of the whole sequences,
    /// its `block_table` and the plan's bounds the rank's own: lengths, bounds and slots are made for its own tokens, and
    /// tokens of other ranks are skipped.
    ///
    /// # Errors
    /// The errors of [`BatchTables::new`], and [`Error::Shape`] for a rank that there is not.
    pub fn sharded(cuda: &Cuda, kv: KvSpec, shares: &Shares, rank: u32) -> Result<Self> {
        Self::of_share(cuda, kv, shares.pattern(rank)?)
    }

    fn of_share(cuda: &Cuda, kv: KvSpec, share: Pattern) -> Result<Self> {
        kv.check()?;
        let share = Arc::new(share);
        let marks = cuda.buffer(share.marks.len().max(1) as u64 * 4)?;
        cuda.upload(&marks, 0, bytemuck::cast_slice(&share.marks))?;
        // bounds: batch_tables
        let [slots, items, pages] = ENTRIES.map(|entry| cuda.kernel(entry));
        Ok(Self { cuda: cuda.clone(), kv, share, marks, slots: slots?, items: items?, pages: pages? })
    }

    /// Checks and binds a batch's arrays. They are read when the kernels run.
    ///
    /// # Errors
    /// [`Error::Shape`] and [`Error::BufferTooSmall`].
    pub fn bind(&self, batch: &DeviceBatch<&Buffer>) -> Result<BatchBinding> {
        batch.check(Buffer::bytes)?;
        let args = BatchParams {
            seq_lens: batch.seq_lens.ptr(),
            query_start_loc: batch.query_start_loc.ptr(),
            block_table: batch.block_table.ptr(),
            marks: self.marks.ptr(),
            batch: batch.batch,
            max_pages: batch.max_pages,
            page_size: self.kv.page_size,
            num_pages: self.kv.num_pages,
            interleave: self.share.interleave,
            owned: self.share.owned,
            blocks: self.share.marks.len() as u32,
            ..BatchParams::default()
        };
        let [a, b, c] = batch.arrays().map(|(_, buffer)| buffer.clone());
        let buffers = [a, b, c, self.marks.clone()];
        let (share, device) = (self.share.clone(), self.cuda.id());
        Ok(BatchBinding { args, kv: self.kv, share, device, buffers })
    }

    /// Slots for up to `max_tokens` new tokens, for an append of the same cache. All are skipped until
    /// [`BatchTables::record_slots`] has run.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`] for an append of another pool, [`Error::Limit`] for more than 2^26 tokens, [`Error::OutOfMemory`],
    /// [`Error::Cuda`].
    pub fn slots<O: AppendsSlots>(
        &self,
        append: &Compiled<O, Cuda>,
        max_tokens: u32,
    ) -> Result<DeviceSlots<O>>
    where
        Cuda: Kernel<O, Step = Table>,
    {
        if !self.serves(append.op().cache()) || append.device().id() != self.cuda.id() {
            return Err(Error::LayoutMismatch { detail: "the append is of another pool of pages or device" });
        }
        // All skipped, until the device has written slots.
        let none = no_slots(max_tokens)?;
        let mut step = append.step(max_tokens)?;
        append.prepare(&mut step, O::of_slots(&none))?;
        let table = step.raw.buffer().filter(|_| max_tokens > 0).cloned();
        Ok(DeviceSlots { step, table, max_tokens, kv: self.kv, device: self.cuda.id() })
    }

    /// Prepares a decode's step with a plan for the longest that each sequence may be, [`PageTable::Device`], and keeps what
    /// [`BatchTables::record_lists`] needs of the plan.
    ///
    /// The plan has the batch's sequences, those of padding included, with `seq_lens` that no batch passes, and
    /// [`crate::Mask::Full`] (or one query token a sequence): the card finds what each query token sees, causal and
    /// bottom-right. A sequence's query tokens begin where the plan has them; those that the batch has not, by `query_start_loc`, see
    /// nothing: out is 0 and LSE -inf. Sequences longer than planned are cut off.
    ///
    /// A `prepare` that does not fit the step's capacity replaces buffers: graphs captured before must be captured again.
    ///
    /// # Errors
    /// The errors of [`Compiled::prepare`]; [`Error::LayoutMismatch`] for a decode of another pool or one without
    /// [`crate::DecodeOptions::device_page_list`]; [`Error::Shape`] for a plan with shared prefixes or with other bounds.
    pub fn prepare(
        &self,
        lists: &mut DecodeLists,
        mla: &Compiled<MlaDecode, Cuda>,
        step: &mut Step<MlaDecode, Cuda>,
        plan: &Plan,
    ) -> Result<()> {
        if !self.serves(&mla.op().kv) || mla.device().id() != self.cuda.id() {
            return Err(Error::LayoutMismatch { detail: "the decode is of another pool of pages or device" });
        }
        let sequences = Sequences::of(plan, mla.op().shape.num_heads)?;
        lists.set(None);
        mla.prepare(step, (plan, PageTable::Device))?;
        let tables = step.raw.own.buffer();
        let is_same = lists.tables.take().is_some_and(|prepared| prepared.ptr() == tables.ptr());
        if !is_same {
            // A template serves the tables of one capacity, in which its places are.
            lists.plan = Table::default();
        }
        let words = template(plan, &sequences, &step.capacity(), &self.kv);
        lists.plan.upload(&self.cuda, plan.items.len() as u32, words)?;
        lists.tables = Some(tables.clone());
        lists.device = self.cuda.id();
        let generation = step.raw.own.generation().load(Ordering::Relaxed);
        lists.set(Some(Prepared { generation, batch: plan.seq_lens.len() as u32 }));
        Ok(())
    }

    /// Whether these can be recorded together.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`].
    pub fn check(
        &self,
        lists: &DecodeLists,
        step: &Step<MlaDecode, Cuda>,
        batch: &BatchBinding,
    ) -> Result<()> {
        RecordedLists::new(lists, step, batch).check()?;
        self.is_here(lists.device)?;
        self.check_batch(batch)
    }

    /// Launches the kernel that writes the slots of the batch's new tokens. Allocates nothing, waits for nothing, and may be captured in a
    /// graph.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`] and [`Error::Cuda`].
    pub fn record_slots<O: AppendsSlots>(&self, slots: &DeviceSlots<O>, batch: &BatchBinding) -> Result<()>
    where
        Cuda: Kernel<O>,
    {
        self.is_here(slots.device)?;
        self.check_batch(batch)?;
        if !self.serves(&slots.kv) {
            return Err(Error::LayoutMismatch { detail: "slots and batch are of different pools" });
        }
        let (max_tokens, Some(table)) = (slots.max_tokens, &slots.table) else { return Ok(()) };
        let args = BatchParams { slots: table.ptr(), max_tokens, ..batch.args };
        self.cuda.launch(
            &self.slots,
            max_tokens.div_ceil(THREADS),
            THREADS,
            0,
            &args,
            batch.buffers.iter().chain([table]),
        )
    }

    /// Launches the two kernels that shorten the step's tables to the batch and write its page list. Allocates nothing, waits for
    /// nothing, and may be captured in a graph.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`] and [`Error::Cuda`].
    pub fn record_lists(
        &self,
        lists: &DecodeLists,
        step: &Step<MlaDecode, Cuda>,
        batch: &BatchBinding,
    ) -> Result<()> {
        self.check(lists, step, batch)?;
        self.cuda.note(|| Box::new(RecordedLists::new(lists, step, batch)));
        self.cuda.note(|| step.recorded(u32::MAX));
        let Some(plan) = lists.plan.ptr() else { return Ok(()) };
        let (tables, pages) = (step.raw.own.buffer().ptr(), step.raw.own.pages());
        let args = BatchParams { plan, tables, pages, ..batch.args };
        let held = || batch.buffers.iter().chain(lists.plan.buffer()).chain([step.raw.own.buffer()]);
        // Grids cover the capacity, as a decode's do: a captured launch serves the plan that was prepared last.
        let capacity = step.capacity();
        let items = capacity.items.max(capacity.queries);
        self.cuda.launch(&self.items, items.div_ceil(THREADS), THREADS, 0, &args, held())?;
        // In this order: see batch_tables.cu.
        self.cuda.launch(&self.pages, capacity.pages.div_ceil(THREADS), THREADS, 0, &args, held())
    }

    /// Whether a batch was bound by tables of this device, pool and share.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`].
    fn check_batch(&self, batch: &BatchBinding) -> Result<()> {
        self.is_here(batch.device)?;
        check_binding(self.serves(&batch.kv), &self.share, &batch.share)
    }

    /// # Errors
    /// [`Error::LayoutMismatch`] for what was made on another device, whose addresses mean nothing on this one.
    fn is_here(&self, device: u64) -> Result<()> {
        if device != self.cuda.id() {
            let detail = "slots, lists or batch were made on another device: make them with the BatchTables that record them";
            return Err(Error::LayoutMismatch { detail });
        }
        Ok(())
    }

    /// The dtype does not matter.
    fn serves(&self, kv: &KvSpec) -> bool {
        (kv.page_size, kv.num_pages) == (self.kv.page_size, self.kv.num_pages)
    }
}
