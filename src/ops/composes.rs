//! What a device must have besides its ops so that [`MlaLayer`](crate::MlaLayer) can be made of them.

use std::sync::Mutex;

use super::op::{Device, Kernel};
use super::{
    HeadProject, IndexerAppend, IndexerLogits, IndexerQuery, KvAppend, KvGather, MergeState, MergeStates,
    MlaPrefill, RopeAppend, TopK,
};
use crate::cache::decode_spec::MlaDecode;

/// A device that runs the ops of a layer itself.
pub trait Composes:
    Device
    + Kernel<KvAppend>
    + Kernel<RopeAppend>
    + Kernel<HeadProject>
    + Kernel<MlaDecode>
    + Kernel<KvGather>
    + Kernel<MlaPrefill>
    + Kernel<MergeState>
    + Kernel<MergeStates>
    + Kernel<IndexerAppend>
    + Kernel<IndexerQuery>
    + Kernel<IndexerLogits>
    + Kernel<TopK>
{
    /// A guard that is held while a step is recorded. Where recording an op runs it, or launches it on the device's stream, the guard keeps
    /// other threads from using the layer's workspace in between. An encoder belongs to one thread, so on wgpu it guards nothing.
    type Turn<'a>
    where
        Self: 'a;

    /// Takes the guard. `of_layer` is a mutex of the layer that nothing else locks.
    fn turn<'a>(&'a self, of_layer: &'a Mutex<()>) -> Self::Turn<'a>;

    /// The costs of expanded prefixes, for a decode with or without tensor cores and a prefill in tiles of `tile_queries` query tokens.
    fn prefix_cost(on_tensor_cores: bool, tile_queries: u32) -> PrefixCost;
}

/// A device's costs of attending a prefix that decodes share, in expanded and in absorbed form. The unit is the time that an absorbed
/// decode takes for one query row and one token of a bf16 cache, at L 512, R 64 and P and V of 128.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefixCost {
    /// The most that the arithmetic of an absorbed tile costs for one token, however many rows the tile has.
    pub tile_rows: u32,
    /// The cost of reading a token of the cache, on tensor cores, where the arithmetic does not hide it.
    pub read: u32,
    /// The cost of reading one expanded token of one head.
    pub token: u32,
    /// Query tokens in a tile of the expanded attention; a tile with fewer costs as much as a full one.
    pub tile_queries: u32,
    /// The extra cost of a step for its dispatches.
    pub step: u32,
    /// The extra cost of a step for writing and merging the partial result of a query row.
    pub step_row: u32,
}

impl PrefixCost {
    /// The costs of a device that is bound by multiplications alone.
    pub const ARITHMETIC: Self =
        Self { tile_rows: u32::MAX, read: 0, token: 0, tile_queries: 1, step: 0, step_row: 0 };

    /// With tiles of so many query tokens.
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    pub const fn with_tiles(self, tile_queries: u32) -> Self {
        Self { tile_queries: if tile_queries == 0 { 1 } else { tile_queries }, ..self }
    }
}
