//! A layer's attention as a module of burn's.

use std::path::Path;

use burn::module::Module;
use burn::nn::{Linear, RmsNorm};
use burn::store::{FloatCastAdapter, ModuleAdapter, ModuleSnapshot, PyTorchToBurnAdapter, SafetensorsStore};
use burn::tensor::{DType, Tensor};

use crate::cache::PagedCache;
use crate::error::{Error, Result};

/// The attention of an MLA layer: projections and norms in burn's operations, and wgpu-mla's [`MlaLayer`](wgpu_mla::MlaLayer) between them.
/// Its fields have the names of a checkpoint's tensors. [`MlaAttentionConfig::init`](crate::MlaAttentionConfig::init) makes one.
#[derive(Module, Debug)]
pub struct MlaAttention {
    /// `[hidden, q_lora_rank]`.
    pub q_a_proj: Option<Linear>,
    /// The norm of the query's latent.
    pub q_a_layernorm: Option<RmsNorm>,
    /// `[q_lora_rank, H * (P + R)]`.
    pub q_b_proj: Option<Linear>,
    /// `[hidden, H * (P + R)]`, in place of the three before.
    pub q_proj: Option<Linear>,
    /// `[hidden, L + R]`.
    pub kv_a_proj_with_mqa: Linear,
    /// The norm of the latent that is cached.
    pub kv_a_layernorm: RmsNorm,
    /// `[L, H * (P + V)]`. A [`PagedCache`] has a copy of it, made with the cache.
    pub kv_b_proj: Linear,
    /// `[H * V, hidden]`.
    pub o_proj: Linear,
}

impl MlaAttention {
    /// Loads what a safetensors file has of the layer, such as with the prefix `model.layers.3.self_attn.`, cast to `dtype`. Returns the
    /// names of what it does not have: a checkpoint may be in several files.
    ///
    /// A cache that was made before keeps the `kv_b_proj` of before.
    ///
    /// # Errors
    /// [`Error::Weights`] for a file that cannot be read, and for tensors of other shapes.
    pub fn load_safetensors(&mut self, file: &Path, prefix: &str, dtype: DType) -> Result<Vec<String>> {
        let escaped: String =
            prefix.chars().flat_map(|c| [(c == '.').then_some('\\'), Some(c)]).flatten().collect();
        let mut store = SafetensorsStore::from_file(file)
            .with_key_remapping(format!("^{escaped}"), "")
            .with_from_adapter(PyTorchToBurnAdapter.chain(FloatCastAdapter::to(dtype)))
            .allow_partial(true);
        let loaded = self.load_from(&mut store);
        let loaded = loaded.map_err(|error| Error::Weights { detail: error.to_string() })?;
        match loaded.errors.first() {
            Some(error) => Err(Error::Weights { detail: error.to_string() }),
            None => Ok(loaded.missing.into_iter().map(|(name, _)| name).collect()),
        }
    }

    /// Attends the step that `cache` is at: `x`, `[T, hidden]`, the new tokens of its requests in their order, to `[T, hidden]`. Their keys
    /// go into the cache of layer `layer`.
    ///
    /// # Errors
    /// The errors of [`PagedCache::attend`].
    pub fn forward(&self, x: Tensor<2>, cache: &PagedCache, layer: usize) -> Result<Tensor<2>> {
        let kv_a = self.kv_a_proj_with_mqa.forward(x.clone());
        let [latent] = self.kv_a_layernorm.gamma.dims();
        let kv_c = self.kv_a_layernorm.forward(kv_a.clone().narrow(1, 0, latent));
        let q = match (&self.q_a_proj, &self.q_a_layernorm, &self.q_b_proj, &self.q_proj) {
            (Some(down), Some(norm), Some(up), _) => up.forward(norm.forward(down.forward(x))),
            (.., Some(q_proj)) => q_proj.forward(x),
            _ => {
                return Err(Error::Order(
                    "an MlaAttention has q_proj, or q_a_proj, q_a_layernorm and q_b_proj",
                ));
            }
        };
        Ok(self.o_proj.forward(cache.attend(layer, q, kv_c, kv_a)?))
    }
}
