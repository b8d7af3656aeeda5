//! The same views on a backend's own buffers.

use crate::Result;
use crate::layer::{KvView, Layer, Query, View};
use crate::ops::{AppendLayer, Calibrate, Gather, MergeStates};

fn view<'a, B, C>(view: &View<'a, B>, own: &impl Fn(&'a B) -> Result<&'a C>) -> Result<View<'a, C>> {
    let View { buffer, offset, token_stride, head_stride } = *view;
    Ok(View { buffer: own(buffer)?, offset, token_stride, head_stride })
}

pub(super) fn kv_view<'a, B, C>(
    view: &KvView<'a, B>,
    own: &impl Fn(&'a B) -> Result<&'a C>,
) -> Result<KvView<'a, C>> {
    let KvView { buffer, offset, layer_stride, layer, block_stride } = *view;
    Ok(KvView { buffer: own(buffer)?, offset, layer_stride, layer, block_stride })
}

pub(super) fn layer<'a, B, C>(
    layer: &Layer<'a, B>,
    own: &impl Fn(&'a B) -> Result<&'a C>,
) -> Result<Layer<'a, C>> {
    let Layer { query, kv, out, lse, lse_base, softmax_scale, k_scale, q_scale } = layer;
    let query = match query {
        Query::Whole(q) => Query::Whole(view(q, own)?),
        Query::Split { q_nope, q_pe } => Query::Split { q_nope: view(q_nope, own)?, q_pe: view(q_pe, own)? },
    };
    Ok(Layer {
        query,
        kv: kv_view(kv, own)?,
        out: view(out, own)?,
        lse: view(lse, own)?,
        lse_base: *lse_base,
        softmax_scale: *softmax_scale,
        k_scale: *k_scale,
        q_scale: *q_scale,
    })
}

pub(super) fn append_layer<'a, B, C>(
    layer: &AppendLayer<'a, B>,
    own: &impl Fn(&'a B) -> Result<&'a C>,
) -> Result<AppendLayer<'a, C>> {
    let AppendLayer { kv_c, k_pe, kv, k_scale } = layer;
    Ok(AppendLayer {
        kv_c: view(kv_c, own)?,
        k_pe: view(k_pe, own)?,
        kv: kv_view(kv, own)?,
        k_scale: *k_scale,
    })
}

pub(super) fn merge_states<'a, B, C>(
    states: &MergeStates<'a, B>,
    own: &impl Fn(&'a B) -> Result<&'a C>,
) -> Result<MergeStates<'a, C>> {
    Ok(MergeStates {
        prefix_output: view(&states.prefix_output, own)?,
        prefix_lse: view(&states.prefix_lse, own)?,
        suffix_output: view(&states.suffix_output, own)?,
        suffix_lse: view(&states.suffix_lse, own)?,
        output: view(&states.output, own)?,
        output_lse: states.output_lse.as_ref().map(|lse| view(lse, own)).transpose()?,
        num_tokens: states.num_tokens,
        num_heads: states.num_heads,
    })
}

pub(super) fn gather<'a, B, C>(
    args: &Gather<'a, B>,
    own: &impl Fn(&'a B) -> Result<&'a C>,
) -> Result<Gather<'a, C>> {
    let Gather { kv, k_scale, out } = args;
    Ok(Gather { kv: kv_view(kv, own)?, k_scale: *k_scale, out: view(out, own)? })
}

pub(super) fn calibrate<'a, B, C>(
    args: &Calibrate<'a, B>,
    own: &impl Fn(&'a B) -> Result<&'a C>,
) -> Result<Calibrate<'a, C>> {
    let Calibrate { kv_c, k_pe, k_scale, stats } = args;
    Ok(Calibrate { kv_c: view(kv_c, own)?, k_pe: view(k_pe, own)?, k_scale: *k_scale, stats: own(*stats)? })
}
