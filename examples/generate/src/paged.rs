//! Attention by `wgpu_mla::MlaLayer`, on any backend: what a model does between its projections and `o_proj`.

use wgpu_mla::any::{AnyBackend, Buffer, Chosen};
use wgpu_mla::{Backend, Dtype, MlaLayer, MlaSpec, Policy, SeqId};

use crate::arrays::Arrays;
use crate::attention::{Attention, Rows};
use crate::recorded::Recorded;
use crate::{Model, Pages, Result, Setup, backend};

/// An attention for a model: recorded on wgpu, verb by verb elsewhere.
///
/// # Errors
/// Those of the backend; [`wgpu_mla::Error::OutOfMemory`] for a cache that is too large.
pub fn paged(model: &Model, setup: &Setup) -> Result<Box<dyn Attention>> {
    Ok(match backend::open(setup.backend, &setup.spec(model).mla())?.into_chosen() {
        Chosen::Wgpu(gpu) => Box::new(Recorded::new(gpu, model, setup)?),
        other => Box::new(Paged::new(other.into(), model, setup)?),
    })
}

/// Each op runs as it comes.
struct Paged {
    backend: AnyBackend,
    layer: MlaLayer<AnyBackend>,
    arrays: Arrays<Buffer>,
    pages: Pages,
}

impl Paged {
    fn new(backend: AnyBackend, model: &Model, setup: &Setup) -> Result<Self> {
        let spec = setup.spec(model);
        let variant = variant(&backend, &spec.mla(), setup.exact)?;
        Ok(Self {
            layer: MlaLayer::with_variant(&backend, &spec, variant)?,
            arrays: Arrays::new(&backend, model, setup)?,
            pages: Pages::new(spec.kv, model.config.max_position_embeddings, setup.max_tokens())?,
            backend,
        })
    }
}

/// The row of the decode: the backend's choice, or the best that rounds no softmax weights.
pub fn variant(backend: &impl Backend, spec: &MlaSpec, exact: bool) -> Result<Option<&'static str>> {
    if exact {
        for row in backend.variants(spec) {
            if !backend.rounds_weights(&backend.decode(spec, Some(row))?) {
                return Ok(Some(row));
            }
        }
    }
    Ok(None)
}

impl Attention for Paged {
    fn describe(&self) -> String {
        format!("{}, row {}", self.backend.name(), self.layer.decode().variant())
    }

    fn pages(&self) -> &Pages {
        &self.pages
    }

    fn pages_mut(&mut self) -> &mut Pages {
        &mut self.pages
    }

    fn begin(&mut self, batch: &[(SeqId, u32)]) -> Result<()> {
        self.pages.begin(batch)?;
        Ok(self.layer.prepare(&self.backend, &self.pages.batch(), Policy::Auto)?)
    }

    fn attend(&mut self, layer: usize, rows: &Rows) -> Result<Vec<f32>> {
        let (backend, arrays, spec) = (&self.backend, &self.arrays, self.layer.spec());
        backend.upload(arrays.rows(), 0, &arrays.packed(rows))?;
        let copies = &self.pages.append.copies;
        if !copies.is_empty() {
            backend.kv_copy_pages(&spec.kv, spec.shape.row_elems(), copies, &arrays.kv(layer))?;
        }
        self.layer.run(backend, &arrays.args(layer))?;
        let bytes = arrays.out_bytes(self.pages.positions.len());
        Ok(Dtype::F32.decode_all(&backend.download(arrays.out(), bytes)?))
    }
}
