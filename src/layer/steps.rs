//! A layer's tables of a step: those of each of its ops.

use super::MlaLayer;
use super::batch::LayerBatch;
use super::composed::{Append, Ops};
use super::list_steps::{ListsStep, decode_words};
use super::plan::LayerPlan;
use crate::base::error::{Error, Result};
use crate::base::memory::collected;
use crate::cache::decode_spec::MlaDecode;
use crate::ops::composes::Composes;
use crate::ops::op::Step;
use crate::ops::{
    GatherBatch, HeadProject, KvAppend, KvGather, MergeStates, MlaPrefill, RopeAppend, RopeAppendBatch,
};
use crate::plan::tables::{Capacity, PageTable};

pub(super) const MIXED: Error = Error::LayoutMismatch { detail: "a layer has one kind of append" };

/// A step's tables. They grow as needed.
#[derive(Debug)]
pub struct Steps<D: Composes> {
    pub(super) append: Append<Step<RopeAppend, D>, Step<KvAppend, D>>,
    /// The append of decodes whose rotated queries are codes.
    pub(super) codes: Option<Step<RopeAppend, D>>,
    pub(super) decode: Step<MlaDecode, D>,
    pub(super) plan: LayerPlan,
    /// One for each run of tokens in absorbed form; an earlier step may have left more.
    pub(super) absorbed: Vec<Step<HeadProject, D>>,
    pub(super) chunks: Vec<ChunkStep<D>>,
    pub(super) prefixes: Option<PrefixesStep<D>>,
    pub(super) lists: Option<ListsStep<D>>,
    /// Recorded commands stay valid while these are unchanged: the number of runs in absorbed form, and whether decodes attend prefixes or
    /// lists; the rounds of each chunk, and whether each is merged; the rounds of an indexer; the capacity of every step.
    shape: Vec<u64>,
    pub(super) generation: u64,
}

/// The steps of one chunk of the plan.
#[derive(Debug)]
pub(super) struct ChunkStep<D: Composes> {
    pub(super) gather: Step<KvGather, D>,
    pub(super) rows: Step<HeadProject, D>,
    /// Two steps for each round: [`super::plan::Round::first`] and [`super::plan::Round::more`].
    pub(super) rounds: Vec<[Step<MlaPrefill, D>; 2]>,
}

#[derive(Debug)]
pub(super) struct PrefixesStep<D: Composes> {
    pub(super) parts: Step<MlaPrefill, D>,
    /// One for each run of decoded tokens; an earlier step may have left more.
    pub(super) merges: Vec<Step<MergeStates, D>>,
}

impl<D: Composes> Steps<D> {
    pub(super) fn new(ops: &Ops<D>, decode: Capacity) -> Result<Self> {
        Ok(Self {
            append: match &ops.append {
                Append::Rotated(append) => Append::Rotated(append.step(ops.capacity.tokens)?),
                Append::Plain(append) => Append::Plain(append.step(ops.capacity.tokens)?),
            },
            codes: match &ops.codes {
                Some(append) => Some(append.step(ops.capacity.decode_tokens)?),
                None => None,
            },
            decode: ops.decode.step(decode)?,
            plan: LayerPlan::default(),
            absorbed: Vec::new(),
            chunks: Vec::new(),
            prefixes: match &ops.prefixes {
                Some(prefixes) => Some(PrefixesStep { parts: prefixes.prefill.step(0)?, merges: Vec::new() }),
                None => None,
            },
            lists: match &ops.lists {
                Some(lists) => Some(ListsStep::new(lists, decode, &ops.capacity)?),
                None => None,
            },
            shape: Vec::new(),
            generation: 0,
        })
    }

    /// Which appends a step has: that whose rotated queries are codes, and that whose queries are of the layer's dtype. Each new row is
    /// appended by one of them: the first appends what it reaches.
    pub(super) fn appends(&self) -> [bool; 2] {
        let plan = &self.plan;
        let coded = self.codes.is_some() && plan.num_absorbed() > 0;
        // Attention over keys of each head, and tokens behind those of the first append.
        let is_wide = !plan.chunks.is_empty() || !plan.over_prefixes.is_empty();
        [coded, !coded || is_wide || plan.used().decode_tokens < plan.used().tokens]
    }

    pub(super) fn prepare_appends(&mut self, ops: &Ops<D>, batch: &LayerBatch<'_>) -> Result<()> {
        let [coded, wide] = self.appends();
        let (slot_mapping, positions) = (batch.slot_mapping, &self.plan.positions[..]);
        let reach = if coded { self.plan.used().decode_tokens as usize } else { 0 };
        if let (true, Some(append), Some(step)) = (coded, &ops.codes, &mut self.codes) {
            // A slot mapping of another length is refused by the op.
            let slot_mapping = slot_mapping.get(..reach).unwrap_or(slot_mapping);
            append.prepare(step, RopeAppendBatch { slot_mapping, positions: Some(&positions[..reach]) })?;
        }
        if !wide {
            return Ok(());
        }
        match (&ops.append, &mut self.append) {
            (Append::Rotated(append), Append::Rotated(step)) => {
                let mut rest = Vec::new();
                if coded {
                    let slots = slot_mapping.iter().enumerate();
                    let slots = slots.map(|(token, &slot)| if token < reach { -1 } else { slot });
                    rest = collected(slots, slot_mapping.len(), "a layer's slots")?;
                }
                let slot_mapping = if coded { &rest } else { slot_mapping };
                append.prepare(step, RopeAppendBatch { slot_mapping, positions: Some(positions) })
            }
            (Append::Plain(append), Append::Plain(step)) => append.prepare(step, slot_mapping),
            _ => Err(MIXED),
        }
    }

    pub(super) fn prepare_decodes(&mut self, ops: &Ops<D>) -> Result<()> {
        let plan = &self.plan;
        while self.absorbed.len() < plan.absorbed.len() {
            self.absorbed.push(ops.absorb.step(ops.capacity.decode_tokens)?);
        }
        for (step, tokens) in self.absorbed.iter_mut().zip(&plan.absorbed) {
            ops.absorb.prepare(step, tokens.clone())?;
        }
        if plan.decoded.is_empty() {
            return Ok(());
        }
        let (kv_indptr, kv_indices) = &plan.decode_pages;
        ops.decode.prepare(&mut self.decode, (&plan.decode, PageTable::Csr { kv_indptr, kv_indices }))?;
        let (Some(prefixes), Some(step)) = (&ops.prefixes, &mut self.prefixes) else { return Ok(()) };
        if plan.over_prefixes.is_empty() {
            return Ok(());
        }
        let num_parts = prefixes.prefill.facts().key_parts(plan.decode.num_queries, plan.longest_prefix());
        let num_parts = num_parts.min(prefixes.num_sets - 1);
        let parts = plan.prefix_parts(num_parts, ops.capacity.decode_tokens)?;
        prefixes.prefill.prepare(&mut step.parts, &parts)?;
        while step.merges.len() < plan.decoded.len() {
            step.merges.push(prefixes.merge.step(ops.capacity.decode_tokens)?);
        }
        for (step, tokens) in step.merges.iter_mut().zip(&plan.decoded) {
            prefixes.merge.prepare(step, (tokens.clone(), num_parts + 1))?;
        }
        Ok(())
    }

    pub(super) fn prepare_lists(&mut self, ops: &Ops<D>, batch: &LayerBatch<'_>) -> Result<()> {
        match (&ops.lists, &mut self.lists) {
            (Some(lists), Some(step)) => step.prepare(lists, &self.plan, batch),
            _ => Ok(()),
        }
    }

    pub(super) fn prepare_chunks(&mut self, ops: &Ops<D>, batch: &LayerBatch<'_>) -> Result<()> {
        while self.chunks.len() < self.plan.chunks.len() {
            let (gather, rows) = (ops.gather.step(0)?, ops.k_up.step(0)?);
            self.chunks.push(ChunkStep { gather, rows, rounds: Vec::new() });
        }
        for (step, chunk) in self.chunks.iter_mut().zip(&self.plan.chunks) {
            let (pages, seq_lens, ranges) = (batch.pages, batch.seq_lens, &chunk.ranges[..]);
            ops.gather.prepare(&mut step.gather, GatherBatch { pages, seq_lens, ranges })?;
            ops.k_up.prepare(&mut step.rows, 0..chunk.rows)?;
            while step.rounds.len() < chunk.rounds.len() {
                step.rounds.push([ops.prefill.step(0)?, ops.prefill.step(0)?]);
            }
            for ([first, more], round) in step.rounds.iter_mut().zip(&chunk.rounds) {
                ops.prefill.prepare(first, &round.first)?;
                ops.prefill.prepare(more, &round.more)?;
            }
        }
        Ok(())
    }

    pub(super) fn note_shape(&mut self) {
        let appends = self.appends();
        let old = std::mem::take(&mut self.shape);
        let plan = &self.plan;
        let append = match &self.append {
            Append::Rotated(step) => step.capacity(),
            Append::Plain(step) => step.capacity(),
        };
        let (absorbed, runs) = (plan.absorbed.len(), plan.decoded.len());
        let shape = &mut self.shape;
        shape.extend([u64::from(plan.positions.is_empty()), append.into(), absorbed as u64, runs as u64]);
        shape.extend(appends.map(u64::from));
        shape.extend(self.codes.iter().map(|step| u64::from(step.capacity())));
        shape.extend(self.absorbed[..absorbed].iter().map(|step| u64::from(step.capacity())));
        shape.extend(if runs > 0 { decode_words(&self.decode) } else { [0; 7] });
        if let Some(step) = self.prefixes.as_ref().filter(|_| !plan.over_prefixes.is_empty()) {
            shape.push(step.parts.capacity().into());
            shape.extend(step.merges[..runs].iter().map(|step| u64::from(step.capacity())));
        }
        if let Some(step) = &self.lists {
            step.note_shape(&plan.lists, shape);
        }
        for (step, chunk) in self.chunks.iter().zip(&plan.chunks) {
            let rounds = chunk.rounds.len() as u64;
            shape.extend([step.gather.capacity().into(), step.rows.capacity().into(), rounds]);
            for ([first, more], round) in step.rounds.iter().zip(&chunk.rounds) {
                let merged = u64::from(!round.more.is_empty());
                shape.extend([round.state as u64, merged]);
                shape.extend([first, more].map(|step| u64::from(step.capacity())));
            }
        }
        self.generation += u64::from(old != self.shape);
    }
}

impl<D: Composes> Step<MlaLayer, D> {
    /// Grows with each prepare after which what was recorded before, such as a captured graph, no longer serves and must be recorded
    /// again: where the batch has other runs of decodes or other chunks of prefills, or where a table had to grow. Else what was
    /// recorded runs with the lengths, pages and slots that were prepared last. A `cuda::Graph` of an older generation refuses to launch.
    pub fn generation(&self) -> u64 {
        self.raw.generation
    }

    /// How the step is executed.
    pub fn plan(&self) -> &LayerPlan {
        &self.raw.plan
    }
}
