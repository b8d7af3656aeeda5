//! Errors of a layer's ops, told by the names of the layer's arguments.

use crate::base::error::Error;

/// Pairs of names: an op's of an argument, and the layer's. An argument that is not listed has one name, or lies in the workspace.
pub(super) type Names = &'static [(&'static str, &'static str)];

pub(super) const ABSORB: Names = &[("x", "q_nope"), ("weight", "kv_b_proj"), ("scales", "kv_b_scales")];
pub(super) const K_UP: Names = &[("weight", "kv_b_proj"), ("scales", "kv_b_scales")];
/// The projection of values up to the output.
pub(super) const V_UP: Names = &[("weight", "kv_b_proj"), ("scales", "kv_b_scales"), ("y", "out")];
pub(super) const MERGE: Names = &[("prefix_output", "out"), ("output", "out")];
/// The attention over prefixes that are kept expanded.
pub(super) const PARTS: Names =
    &[("k_nope", "expanded.k_nope"), ("k_pe", "expanded.rows"), ("v", "expanded.v")];
/// The decode over a list.
pub(super) const LISTED: Names = &[("indices", "selection.indices")];
/// The ops of an indexer.
pub(super) const SELECTION: Names = &[
    ("k", "selection.k"),
    ("q", "selection.q"),
    ("weights", "selection.weights"),
    ("norm_weight", "selection.norm_weight"),
    ("norm_bias", "selection.norm_bias"),
    ("norm_eps", "selection.norm_eps"),
    ("weight_scale", "selection.weight_scale"),
    ("cos_sin", "selection.cos_sin"),
    ("kv", "selection.cache"),
    ("indices", "selection.indices"),
];
/// The parts of an [`MlaExpand`](super::MlaExpand).
pub(super) const GATHER_PREFIX: Names = &[("out", "expanded.rows")];
pub(super) const EXPAND_K: Names =
    &[("x", "expanded.rows"), ("weight", "kv_b_proj"), ("scales", "kv_b_scales"), ("y", "expanded.k_nope")];
pub(super) const EXPAND_V: Names =
    &[("x", "expanded.rows"), ("weight", "kv_b_proj"), ("scales", "kv_b_scales"), ("y", "expanded.v")];

/// The error with these names.
pub(super) fn named(names: Names) -> impl Fn(Error) -> Error {
    let name = move |name: &mut &'static str| {
        if let Some((_, of_layer)) = names.iter().find(|(of_op, _)| of_op == name) {
            *name = of_layer;
        }
    };
    move |mut error| {
        match &mut error {
            Error::Shape { what, .. }
            | Error::Length { what, .. }
            | Error::BufferTooSmall { what, .. }
            | Error::Alignment { what, .. }
            | Error::DtypeUnsupported { what, .. }
            | Error::Limit { what, .. }
            | Error::BufferUsage { what, .. } => name(what),
            Error::Aliased { a, b } => {
                name(a);
                name(b);
            }
            _ => {}
        }
        error
    }
}
