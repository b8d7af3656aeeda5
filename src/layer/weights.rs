//! `kv_b_proj` as a layer's projections take it: the matrices of keys and of values, with the scales of each where they are codes.

use super::MlaLayer;
use crate::base::error::{Error, Result};
use crate::ops::{WeightScales, WeightView};

impl MlaLayer {
    /// Whether scales are there, and must be.
    pub(crate) fn check_scales(&self, given: bool) -> Result<()> {
        let cure = match (given, self.weight.is_fp8()) {
            (false, true) => "need `kv_b_scales`, which `KvBProj::prepare_e4m3` makes with the codes",
            (true, false) => "have no scales beside them: leave `kv_b_scales` empty",
            _ => return Ok(()),
        };
        Err(Error::WeightScales { format: self.weight.name(), cure })
    }

    /// `W_UK` and `W_UV` of [`MlaLayerArgs::kv_b_proj`](super::MlaLayerArgs::kv_b_proj), with the scales of each where there are any: for
    /// [`HeadProject`](crate::HeadProject)s beside the layer.
    pub fn weights<B: Copy>(&self, kv_b_proj: B, scales: Option<B>) -> (WeightView<B>, WeightView<B>) {
        let dims = self.dims();
        let (w_uk, w_uv) = (WeightView::w_uk(&dims, kv_b_proj), WeightView::w_uv(&dims, kv_b_proj));
        match scales {
            Some(scales) => (
                w_uk.with_scales(WeightScales::w_uk(scales)),
                w_uv.with_scales(WeightScales::w_uv(&dims, scales)),
            ),
            None => (w_uk, w_uv),
        }
    }
}
