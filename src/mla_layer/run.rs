//! The layer on any backend, verb by verb.

mod ops;
mod workspace;

use ops::Ops;
use workspace::{Room, Workspace};

use super::plan::{LayerBatch, LayerPlan};
use super::{LayerArgs, MlaLayerSpec};
use crate::prefill::LEAST_PART_KEYS;
use crate::tables::{Capacity, PageTable};
use crate::{Backend, Policy, Result};

/// The attention layer of a model, made for one [`MlaLayerSpec`]: prepared once a step, run once a layer.
///
/// It owns its workspace, which all layers share and which grows with the batch; the part that grows with the context stays within
/// [`MlaLayerSpec::workspace_bytes`].
#[derive(Debug)]
pub struct MlaLayer<B: Backend> {
    spec: MlaLayerSpec,
    decode: B::Decode,
    step: B::Step,
    plan: LayerPlan,
    slot_mapping: Vec<i64>,
    seq_lens: Vec<i32>,
    /// The page table of the step, in CSR form.
    pages: (Vec<i32>, Vec<i32>),
    space: Workspace<B::Buffer>,
    /// Parts that the keys of expanded prefixes are split into; 0 without any.
    num_parts: u32,
}

impl<B: Backend> MlaLayer<B> {
    /// Compiles the decode of a spec; the other ops are compiled when they are first run.
    ///
    /// # Errors
    /// Those of [`MlaLayerSpec::check`] and [`Backend::decode`].
    pub fn new(backend: &B, spec: &MlaLayerSpec) -> Result<Self> {
        Self::with_variant(backend, spec, None)
    }

    /// As [`MlaLayer::new`]; `variant` forces one of [`Backend::variants`] for the decode, such as one that rounds no softmax weights.
    ///
    /// # Errors
    /// Those of [`MlaLayer::new`], and [`crate::Error::VariantUnavailable`].
    pub fn with_variant(backend: &B, spec: &MlaLayerSpec, variant: Option<&str>) -> Result<Self> {
        spec.check()?;
        let decode = backend.decode_for(&spec.mla(), variant, spec.decode_threshold)?;
        let step = backend.step(&decode, Capacity::default())?;
        Ok(Self {
            spec: *spec,
            decode,
            step,
            plan: LayerPlan::default(),
            slot_mapping: Vec::new(),
            seq_lens: Vec::new(),
            pages: Default::default(),
            space: Workspace::default(),
            num_parts: 0,
        })
    }

    /// What it was made for.
    pub fn spec(&self) -> &MlaLayerSpec {
        &self.spec
    }

    /// The compiled decode.
    pub fn decode(&self) -> &B::Decode {
        &self.decode
    }

    /// How the step is worked off.
    pub fn plan(&self) -> &LayerPlan {
        &self.plan
    }

    /// Bytes that the keys and values of prefills take now: never more than [`MlaLayerSpec::workspace_bytes`].
    pub fn workspace_bytes(&self) -> u64 {
        [&self.space.rows, &self.space.k_nope, &self.space.v].map(Room::bytes).iter().sum()
    }

    /// Plans a step for all layers, and makes room for it.
    ///
    /// # Errors
    /// Those of [`LayerPlan::new`] and [`Backend::prepare`]; the step before is then gone.
    pub fn prepare(&mut self, backend: &B, batch: &LayerBatch<'_>, policy: Policy) -> Result<()> {
        self.plan = LayerPlan::default();
        let plan = LayerPlan::new(&self.spec, &backend.tiling(&self.decode), batch, policy)?;
        if !plan.decoded.is_empty() {
            let (kv_indptr, kv_indices) = &plan.decode_pages;
            let pages = PageTable::Csr { kv_indptr, kv_indices };
            backend.prepare(&self.decode, &mut self.step, &plan.decode, pages)?;
        }
        self.num_parts = prefix_parts(&self.spec, &plan, backend.tiling(&self.decode).target_items);
        self.space.grow(backend, &self.spec, &plan, self.num_parts)?;
        if let Some((positions, _)) = &self.space.positions.0 {
            backend.upload(positions, 0, bytemuck::cast_slice(&plan.positions))?;
        }
        self.slot_mapping.clear();
        self.slot_mapping.extend_from_slice(batch.slot_mapping);
        self.seq_lens.clear();
        self.seq_lens.extend_from_slice(batch.seq_lens);
        self.pages = super::plan::csr(&self.spec, batch)?;
        self.plan = plan;
        Ok(())
    }

    /// Fills one layer's [`super::Expanded`] arrays with a prefix, rows `first_row` to `first_row + tokens`, from its pages in the
    /// layer's cache, which hold it by now. Its keys and values serve every step until the pages change; other layers have arrays of
    /// their own.
    ///
    /// # Errors
    /// [`crate::Error::LayoutMismatch`] without [`LayerArgs::expanded`], and those of `kv_gather` and the projections: pages, sizes, aliases.
    pub fn expand_prefix(
        &self,
        backend: &B,
        pages: &[i32],
        tokens: u32,
        first_row: u32,
        args: &LayerArgs<&B::Buffer>,
    ) -> Result<()> {
        let ops = Ops { layer: self, backend, args };
        ops.expand_prefix(pages, tokens, first_row)
    }

    /// Runs one layer of the step.
    ///
    /// # Errors
    /// Those of the ops: scales, strides, sizes, aliases, limits.
    pub fn run(&self, backend: &B, args: &LayerArgs<&B::Buffer>) -> Result<()> {
        if self.plan.positions.is_empty() {
            return Ok(());
        }
        let ops = Ops { layer: self, backend, args };
        ops.append()?;
        for chunk in &self.plan.chunks {
            ops.expand(chunk)?;
            for round in &chunk.rounds {
                ops.attend(round)?;
            }
        }
        ops.decode()
    }
}

/// Parts for the keys of expanded prefixes, so that a device of so many workers has something for each; 0 where the plan has no prefix.
fn prefix_parts(spec: &MlaLayerSpec, plan: &LayerPlan, workers: u32) -> u32 {
    let most = plan.longest_prefix().div_ceil(LEAST_PART_KEYS);
    most.min(workers.div_ceil(spec.shape.num_heads).max(1))
}
