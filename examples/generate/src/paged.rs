//! Attention by [`MlaLayer`], an op of every backend: what a model does between its projections and `o_proj`.

use wgpu_mla::{
    Backend, Binding, Compiled, KvCopyPages, LayerCapacity, LayerGuard, LayerOptions, MlaLayer, SeqId,
    SplitPolicy, Step, View,
};

use crate::arrays::{Arrays, guard_bytes};
use crate::attention::{Attention, Rows};
use crate::index_arrays::IndexArrays;
use crate::{Model, Pages, Result, Setup};

/// An attention for a model, on the backend that is asked for.
///
/// # Errors
/// The errors of the backend; [`wgpu_mla::Error::OutOfMemory`] for a cache that is too large, and on the CPU [`crate::Error::Input`] for
/// one that the memory which is free does not hold.
#[cfg(not(target_arch = "wasm32"))]
pub fn paged(model: &Model, setup: &Setup) -> Result<Box<dyn Attention>> {
    let device = crate::backend::open(setup.backend, &setup.spec(model).mla())?;
    if wgpu_mla::Device::name(&device).starts_with("CPU") {
        crate::memory::check(model, setup, crate::memory::free())?;
    }
    Ok(Box::new(Paged::new(&device, model, setup)?))
}

/// An attention on one device. The cache has memory for what its sequences need: slab by slab, as they grow.
pub struct Paged<D: Backend> {
    device: D,
    options: LayerOptions,
    ops: Ops<D>,
    pub(crate) arrays: Arrays<D::Buffer>,
    pages: Pages,
}

/// The ops for the slabs that there are, compiled and bound to each layer once. They are prepared once a step.
struct Ops<D: Backend> {
    copy: Compiled<KvCopyPages, D>,
    copy_step: Step<KvCopyPages, D>,
    /// The same for index caches, where the model has any.
    index_copy: Option<(Compiled<KvCopyPages, D>, Step<KvCopyPages, D>)>,
    mla: Compiled<MlaLayer, D>,
    step: Step<MlaLayer, D>,
    layers: Vec<Bound<D>>,
}

/// One layer.
struct Bound<D: Backend> {
    copy: Binding<KvCopyPages, D>,
    index_copy: Option<Binding<KvCopyPages, D>>,
    mla: Binding<MlaLayer, D>,
}

impl<D: Backend> Paged<D> {
    /// An attention for a model.
    ///
    /// # Errors
    /// The errors of the backend; [`wgpu_mla::Error::OutOfMemory`] for a cache that is too large.
    pub fn new(device: &D, model: &Model, setup: &Setup) -> Result<Self> {
        let (spec, max_tokens) = (setup.spec(model), setup.max_tokens());
        // A prompt's last piece may be one token, which is decoded, anywhere in a batch.
        let capacity =
            LayerCapacity { tokens: max_tokens, decode_tokens: max_tokens, ..LayerCapacity::default() };
        let variant = if setup.exact { exact_variant(device, &spec) } else { None };
        let indexer = setup.indexer(model);
        let topk = model.config.indexer.as_ref().filter(|_| indexer.is_some()).map_or(0, |it| it.topk);
        let options =
            LayerOptions { variant, capacity, topk, indexer, guard: setup.guard, ..LayerOptions::default() };
        let arrays = Arrays::new(device, model, setup)?;
        let max_position = setup.max_position(model) as usize;
        Ok(Self {
            ops: Ops::new(device, &options, &arrays)?,
            pages: Pages::new(spec.kv, arrays.slab_pages(), max_position, max_tokens)?,
            device: device.clone(),
            options,
            arrays,
        })
    }

    /// Another slab, of which some pages are needed now.
    fn grow(&mut self) -> Result<()> {
        #[cfg(not(target_arch = "wasm32"))]
        if self.device.name().starts_with("CPU") {
            let tokens = self.arrays.spec().kv.num_slots();
            crate::memory::check_growth(self.arrays.slab_bytes(), tokens, crate::memory::free())?;
        }
        self.arrays.grow(&self.device)?;
        match Ops::new(&self.device, &self.options, &self.arrays) {
            Ok(ops) => self.ops = ops,
            Err(error) => {
                self.arrays.shrink();
                return Err(error);
            }
        }
        self.pages.grow()
    }

    /// Slabs that the cache has. Views of it are of these.
    pub(crate) fn num_slabs(&self) -> usize {
        self.arrays.num_slabs()
    }

    /// The layer that was compiled, which knows its variant and why it was chosen.
    pub fn layer(&self) -> &Compiled<MlaLayer, D> {
        &self.ops.mla
    }

    /// Like [`Attention::attend`], without waiting for what [`Paged::out`] will hold.
    ///
    /// # Errors
    /// The errors of the backend.
    pub fn submit(&self, layer: usize, rows: &Rows) -> Result<()> {
        self.upload(rows)?;
        Ok(self.device.submit(|mut recorder| self.record_on(&mut recorder, layer))?)
    }

    /// Uploads a layer's rows, for a host that records the layer itself: they are there for its next submit.
    ///
    /// # Errors
    /// The errors of the backend.
    pub fn upload(&self, rows: &Rows) -> Result<()> {
        if let (Some(index), Some(rows)) = (&self.arrays.index, &rows.index) {
            self.device.upload(index.rows(), 0, &index.packed(rows))?;
        }
        Ok(self.device.upload(self.arrays.rows(), 0, &self.arrays.packed(rows))?)
    }

    /// Records one layer of the step into the host's commands: page copies, then the layer.
    ///
    /// # Errors
    /// [`wgpu_mla::Error::LayoutMismatch`] where no step was begun, before anything is recorded; those of the backend.
    pub fn record_on(&self, recorder: &mut D::Recorder<'_>, layer: usize) -> wgpu_mla::Result<()> {
        let Ops { copy, copy_step, index_copy, mla, step, layers } = &self.ops;
        let bound = &layers[layer];
        // In most steps there is none, and each pair of slabs would have a launch.
        if !self.pages.copies.is_empty() {
            copy.record_on(recorder, copy_step, &bound.copy)?;
            if let (Some((copy, step)), Some(binding)) = (index_copy, &bound.index_copy) {
                copy.record_on(recorder, step, binding)?;
            }
        }
        mla.record_on(recorder, step, &bound.mla)
    }

    /// The list that the last layer with an indexer made, i32 `[T, topk]`, slots and then -1. Only for a model that attends a part of the
    /// tokens.
    /// Rows of sequences that have no more tokens than `topk` mean nothing.
    pub fn list(&self) -> Option<View<&D::Buffer>> {
        self.arrays.index.as_ref().map(IndexArrays::list)
    }

    /// Where a layer's output is once it is done, `[T, H, V]` in f32, and its bytes.
    pub fn out(&self) -> (&D::Buffer, u64) {
        (self.arrays.out(), self.arrays.out_bytes(self.pages.positions.len()))
    }
}

impl<D: Backend> Ops<D> {
    fn new(device: &D, options: &LayerOptions, arrays: &Arrays<D::Buffer>) -> Result<Self> {
        let (spec, capacity) = (*arrays.spec(), options.capacity);
        let mla = device
            .compile_with(spec, &LayerOptions { slab_pages: arrays.slab_pages(), ..options.clone() })?;
        let copy = device.compile(KvCopyPages { shape: spec.shape, kv: spec.kv })?;
        let index_copy = match &arrays.index {
            Some(index) => {
                let copy = device.compile(index.spec().copies())?;
                let step = copy.step(0)?;
                Some((copy, step))
            }
            None => None,
        };
        let bind = |layer| {
            let cache = arrays.index.as_ref().map(|index| index.cache(layer)).transpose()?.flatten();
            let index_copy = index_copy.as_ref().zip(cache).map(|((copy, _), cache)| copy.bind(&cache, ()));
            Ok(Bound {
                copy: copy.bind(&arrays.kv(layer)?, ())?,
                index_copy: index_copy.transpose()?,
                mla: mla.bind(&arrays.args(layer)?, capacity)?,
            })
        };
        let layers = (0..arrays.num_layers()).map(bind).collect::<Result<_>>()?;
        Ok(Self {
            layers,
            step: mla.step(Default::default())?,
            copy_step: copy.step(0)?,
            copy,
            index_copy,
            mla,
        })
    }
}

/// The best variant of the decode that runs here and rounds no softmax weights.
fn exact_variant<D: Backend>(device: &D, spec: &MlaLayer) -> Option<String> {
    let mut variants = device.variants(spec).into_iter();
    variants.find(|one| one.lacks.is_none() && !one.rounds_weights).map(|one| one.name.into())
}

impl<D: Backend> Attention for Paged<D> {
    fn describe(&self) -> String {
        let chosen = match &self.arrays.index {
            Some(index) => format!(
                ", {} of the tokens by {} index keys",
                index.list().token_stride,
                index.spec().format.dtype
            ),
            None => String::new(),
        };
        format!("{}, variant {}{chosen}", self.device.name(), self.ops.mla.variant())
    }

    fn pages(&self) -> &Pages {
        &self.pages
    }

    fn pages_mut(&mut self) -> &mut Pages {
        &mut self.pages
    }

    fn begin(&mut self, batch: &[(SeqId, u32)]) -> Result<()> {
        while let Err(error) = self.pages.begin(batch) {
            match self.pages.may_grow(&error) {
                true => self.grow()?,
                false => return Err(error),
            }
        }
        let Ops { copy, copy_step, index_copy, mla, step, .. } = &mut self.ops;
        copy.prepare(copy_step, &self.pages.copies)?;
        if let Some((copy, step)) = index_copy {
            copy.prepare(step, &self.pages.copies)?;
        }
        Ok(mla.prepare(step, (&self.pages.batch(), SplitPolicy::Auto))?)
    }

    fn cache_bytes(&self) -> u64 {
        self.arrays.cache_bytes()
    }

    fn attend(&mut self, layer: usize, rows: &Rows) -> Result<Vec<f32>> {
        self.submit(layer, rows)?;
        let (out, bytes) = self.out();
        Ok(self.arrays.spec().out.decode_all(&self.device.download(out, bytes)?))
    }

    fn losses(&mut self) -> Result<Vec<LayerGuard>> {
        let Some(guard) = &self.arrays.guard else { return Ok(Vec::new()) };
        let counters = self.device.download(guard, guard_bytes(self.arrays.num_layers()))?;
        self.device.upload(guard, 0, &vec![0; counters.len()])?;
        let spec = self.arrays.spec();
        let read = |layer| LayerGuard::read(layer as u32, spec, &self.arrays.args(layer)?, &counters);
        Ok((0..self.arrays.num_layers()).map(read).collect::<wgpu_mla::Result<_>>()?)
    }
}
