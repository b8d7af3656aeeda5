//! The same views on a backend's own buffers.

use crate::Result;
use crate::layer::{KvView, Layer, Query, View};
use crate::ops::{
    AppendLayer, Calibrate, Gather, MergeStates, Project, Rope, RopeAppend, StateSets, WeightView,
};
use crate::prefill::Prefill;

fn view<'a, B, C>(view: &View<&'a B>, own: &impl Fn(&'a B) -> Result<&'a C>) -> Result<View<&'a C>> {
    let View { buffer, offset, token_stride, head_stride } = *view;
    Ok(View { buffer: own(buffer)?, offset, token_stride, head_stride })
}

pub(super) fn kv_view<'a, B, C>(
    view: &KvView<&'a B>,
    own: &impl Fn(&'a B) -> Result<&'a C>,
) -> Result<KvView<&'a C>> {
    let KvView { buffer, offset, layer_stride, layer, block_stride } = *view;
    Ok(KvView { buffer: own(buffer)?, offset, layer_stride, layer, block_stride })
}

pub(super) fn layer<'a, B, C>(
    layer: &Layer<&'a B>,
    own: &impl Fn(&'a B) -> Result<&'a C>,
) -> Result<Layer<&'a C>> {
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
    layer: &AppendLayer<&'a B>,
    own: &impl Fn(&'a B) -> Result<&'a C>,
) -> Result<AppendLayer<&'a C>> {
    let AppendLayer { kv_c, k_pe, kv, k_scale } = layer;
    Ok(AppendLayer {
        kv_c: view(kv_c, own)?,
        k_pe: view(k_pe, own)?,
        kv: kv_view(kv, own)?,
        k_scale: *k_scale,
    })
}

pub(super) fn merge_states<'a, B, C>(
    states: &MergeStates<&'a B>,
    own: &impl Fn(&'a B) -> Result<&'a C>,
) -> Result<MergeStates<&'a C>> {
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

pub(super) fn state_sets<'a, B, C>(
    sets: &StateSets<&'a B>,
    own: &impl Fn(&'a B) -> Result<&'a C>,
) -> Result<StateSets<&'a C>> {
    let StateSets { set_stride, lse_set_stride, num_sets, num_tokens, num_heads, .. } = *sets;
    Ok(StateSets {
        states: view(&sets.states, own)?,
        set_stride,
        lse: view(&sets.lse, own)?,
        lse_set_stride,
        output: view(&sets.output, own)?,
        output_lse: sets.output_lse.as_ref().map(|lse| view(lse, own)).transpose()?,
        num_sets,
        num_tokens,
        num_heads,
    })
}

pub(super) fn rope<'a, B, C>(
    rope: &Rope<&'a B>,
    own: &impl Fn(&'a B) -> Result<&'a C>,
) -> Result<Rope<&'a C>> {
    let Rope { x, y, positions, cos_sin, max_position, num_tokens } = *rope;
    Ok(Rope {
        x: view(&x, own)?,
        y: view(&y, own)?,
        positions: own(positions)?,
        cos_sin: own(cos_sin)?,
        max_position,
        num_tokens,
    })
}

pub(super) fn rope_append<'a, B, C>(
    args: &RopeAppend<&'a B>,
    own: &impl Fn(&'a B) -> Result<&'a C>,
) -> Result<RopeAppend<&'a C>> {
    let RopeAppend { q_pe, q_pe_out, layer, positions, cos_sin, max_position } = args;
    Ok(RopeAppend {
        q_pe: view(q_pe, own)?,
        q_pe_out: view(q_pe_out, own)?,
        layer: append_layer(layer, own)?,
        positions: own(positions)?,
        cos_sin: own(cos_sin)?,
        max_position: *max_position,
    })
}

pub(super) fn gather<'a, B, C>(
    args: &Gather<&'a B>,
    own: &impl Fn(&'a B) -> Result<&'a C>,
) -> Result<Gather<&'a C>> {
    let Gather { kv, k_scale, out } = args;
    Ok(Gather { kv: kv_view(kv, own)?, k_scale: *k_scale, out: view(out, own)? })
}

pub(super) fn project<'a, B, C>(
    args: &Project<&'a B>,
    own: &impl Fn(&'a B) -> Result<&'a C>,
) -> Result<Project<&'a C>> {
    let Project { x, weight, y, num_tokens } = args;
    let WeightView { buffer, offset, head_stride, row_stride } = *weight;
    let weight = WeightView { buffer: own(buffer)?, offset, head_stride, row_stride };
    Ok(Project { x: view(x, own)?, weight, y: view(y, own)?, num_tokens: *num_tokens })
}
pub(super) fn prefill<'a, B, C>(
    args: &Prefill<&'a B>,
    own: &impl Fn(&'a B) -> Result<&'a C>,
) -> Result<Prefill<&'a C>> {
    let Prefill { q_nope, q_pe, k_nope, k_pe, v, out, lse, softmax_scale } = args;
    Ok(Prefill {
        q_nope: view(q_nope, own)?,
        q_pe: view(q_pe, own)?,
        k_nope: view(k_nope, own)?,
        k_pe: view(k_pe, own)?,
        v: view(v, own)?,
        out: view(out, own)?,
        lse: view(lse, own)?,
        softmax_scale: *softmax_scale,
    })
}

pub(super) fn calibrate<'a, B, C>(
    args: &Calibrate<&'a B>,
    own: &impl Fn(&'a B) -> Result<&'a C>,
) -> Result<Calibrate<&'a C>> {
    let Calibrate { kv_c, k_pe, k_scale, stats } = args;
    Ok(Calibrate { kv_c: view(kv_c, own)?, k_pe: view(k_pe, own)?, k_scale: *k_scale, stats: own(*stats)? })
}
