//! The tables of a step on a device: one `T` for its plan, and if the pool is in several slabs, one more for each slab's plan.

use super::{Plan, SlabPlan, check_slabs};
use crate::base::error::Result;
use crate::cache::decode_spec::MlaDecode;
use crate::plan::tables::{Capacity, PageTable};

/// The tables of a step. Its own are those of the whole plan, or if the pool is in several slabs, of the plan's merges alone.
#[derive(Debug)]
pub struct Slabbed<T> {
    pub(crate) own: T,
    /// Kept for later batches: `num_slabs` are in use.
    slabs: Vec<T>,
    num_slabs: usize,
    /// 0 for a pool in one buffer.
    slab_pages: u32,
}

impl<T> Slabbed<T> {
    pub(crate) fn new(own: T) -> Self {
        Self { own, slabs: Vec::new(), num_slabs: 0, slab_pages: 0 }
    }

    /// What has work items: the tables of the whole step, or those of each slab.
    pub(crate) fn each(&self) -> impl Iterator<Item = &T> {
        let own = (self.num_slabs == 0).then_some(&self.own);
        own.into_iter().chain(self.of_slabs())
    }

    /// The tables of each slab; none for a pool in one buffer.
    pub(crate) fn of_slabs(&self) -> &[T] {
        &self.slabs[..self.num_slabs]
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn slab_pages(&self) -> u32 {
        self.slab_pages
    }

    /// Whether the step was planned for a layer's slabs.
    ///
    /// # Errors
    /// [`crate::Error::LayoutMismatch`].
    pub(crate) fn check(&self, layer_slab_pages: u32) -> Result<()> {
        check_slabs(self.slab_pages, layer_slab_pages)
    }

    /// Writes a plan that [`super::check_plan`] let pass, first the step's own tables, then those of slabs. `new` makes the tables of a
    /// slab beside the step's own, where there are none yet, or none that `serves` says are still good beside these.
    ///
    /// # Errors
    /// The errors of `write` and `new`. The step then has no slabs.
    pub(crate) fn prepare(
        &mut self,
        spec: &MlaDecode,
        (plan, pages): (&Plan, PageTable<'_>),
        mut write: impl FnMut(&mut T, &MlaDecode, &Plan, PageTable<'_>) -> Result<()>,
        serves: impl Fn(&T, &T) -> bool,
        mut new: impl FnMut(&T, &MlaDecode, Capacity) -> Result<T>,
    ) -> Result<()> {
        (self.num_slabs, self.slab_pages) = (0, plan.slab_pages());
        let merges_only = PageTable::Csr { kv_indptr: &[0], kv_indices: &[] };
        let own = if plan.slabs().is_empty() { pages } else { merges_only };
        write(&mut self.own, spec, plan, own)?;
        for (i, (spec, slab)) in plan.slab_plans(spec).enumerate() {
            if !self.slabs.get(i).is_some_and(|slab| serves(&self.own, slab)) {
                let made = new(&self.own, &spec, Capacity::of(slab.plan()))?;
                self.slabs.truncate(i);
                self.slabs.push(made);
            }
            write(&mut self.slabs[i], &spec, slab.plan(), SlabPlan::pages(slab))?;
        }
        self.num_slabs = plan.slabs().len();
        Ok(())
    }
}
