//! [`Backend`] for [`AnyBackend`]: each verb is that of the backend that was chosen.

use std::ops::Range;

use super::parts::{Binding, Buffer, Decode, Part, Step};
use super::{AnyBackend, Chosen, views};
use crate::backend::{Backend, sealed::Sealed};
use crate::layer::{KvView, Layer};
use crate::ops::{
    AppendLayer, AppendSpec, Calibrate, CalibrateSpec, Gather, GatherRange, GatherSpec, MergeStates,
    MergeStatesSpec, Project, ProjectSpec, Rope, RopeAppend, RopeAppendSpec, RopeSpec, StateSets,
};
use crate::plan::{Plan, Tiling};
use crate::prefill::{Prefill, PrefillSequence, PrefillSpec, PrefillVariant};
use crate::tables::{Capacity, PageTable};
use crate::{KvSpec, MlaSpec, Result};

/// The same expression for each backend.
macro_rules! on {
    ($any:expr, $backend:ident => $result:expr) => {
        match &$any.chosen {
            #[cfg(feature = "cuda")]
            Chosen::Cuda($backend) => $result,
            #[cfg(feature = "wgpu")]
            Chosen::Wgpu($backend) => $result,
            Chosen::Cpu($backend) => $result,
        }
    };
}

/// What this backend has in `any`.
fn own<'a, B: Part<T>, T>(_: &B, any: &'a T) -> Result<&'a B::Own> {
    B::own(any)
}

fn own_mut<'a, B: Part<T>, T>(_: &B, any: &'a mut T) -> Result<&'a mut B::Own> {
    B::own_mut(any)
}

impl Sealed for AnyBackend {}

impl Backend for AnyBackend {
    type Buffer = Buffer;
    type Decode = Decode;
    type Step = Step;
    type Binding = Binding;

    fn name(&self) -> String {
        on!(self, b => b.name())
    }

    fn buffer(&self, bytes: u64) -> Result<Buffer> {
        on!(self, b => b.buffer(bytes).map(Buffer::from))
    }

    fn upload(&self, buffer: &Buffer, offset: u64, bytes: &[u8]) -> Result<()> {
        on!(self, b => b.upload(own(b, buffer)?, offset, bytes))
    }

    fn download(&self, buffer: &Buffer, bytes: u64) -> Result<Vec<u8>> {
        on!(self, b => b.download(own(b, buffer)?, bytes))
    }

    fn variants(&self, spec: &MlaSpec) -> Vec<&'static str> {
        on!(self, b => b.variants(spec))
    }

    fn ladder(&self, spec: &MlaSpec) -> Vec<(&'static str, Option<String>)> {
        on!(self, b => Backend::ladder(b, spec))
    }

    fn decode_for(&self, spec: &MlaSpec, variant: Option<&str>, query_tokens: u32) -> Result<Decode> {
        on!(self, b => b.decode_for(spec, variant, query_tokens).map(Decode::from))
    }

    /// False for another backend's decode.
    fn rounds_weights(&self, decode: &Decode) -> bool {
        on!(self, b => own(b, decode).is_ok_and(|decode| b.rounds_weights(decode)))
    }

    /// Of no use for another backend's decode: [`Backend::prepare`] then refuses the plan.
    fn tiling(&self, decode: &Decode) -> Tiling {
        const NONE: Tiling = Tiling {
            rows_per_tile: 1,
            tokens_per_block: 16,
            target_items: 1,
            min_split_tokens: 16,
            lone_items: 0,
            item_overhead_tokens: 0,
        };
        on!(self, b => own(b, decode).map_or(NONE, |decode| b.tiling(decode)))
    }

    fn step(&self, decode: &Decode, capacity: Capacity) -> Result<Step> {
        on!(self, b => b.step(own(b, decode)?, capacity).map(Step::from))
    }

    fn prepare(&self, decode: &Decode, step: &mut Step, plan: &Plan, pages: PageTable<'_>) -> Result<()> {
        on!(self, b => b.prepare(own(b, decode)?, own_mut(b, step)?, plan, pages))
    }

    fn bind(&self, decode: &Decode, max_queries: u32, layer: &Layer<&Buffer>) -> Result<Binding> {
        on!(self, b => {
            let layer = views::layer(layer, &|any| own(b, any))?;
            b.bind(own(b, decode)?, max_queries, &layer).map(Binding::from)
        })
    }

    fn run(&self, decode: &Decode, step: &Step, binding: &Binding) -> Result<()> {
        on!(self, b => b.run(own(b, decode)?, own(b, step)?, own(b, binding)?))
    }

    fn merge_attn_states(&self, spec: &MergeStatesSpec, args: &MergeStates<&Buffer>) -> Result<()> {
        on!(self, b => b.merge_attn_states(spec, &views::merge_states(args, &|any| own(b, any))?))
    }

    fn merge_states(&self, spec: &MergeStatesSpec, args: &StateSets<&Buffer>) -> Result<()> {
        on!(self, b => b.merge_states(spec, &views::state_sets(args, &|any| own(b, any))?))
    }

    fn kv_append(&self, spec: &AppendSpec, slot_mapping: &[i64], layer: &AppendLayer<&Buffer>) -> Result<()> {
        on!(self, b => b.kv_append(spec, slot_mapping, &views::append_layer(layer, &|any| own(b, any))?))
    }

    fn rope(&self, spec: &RopeSpec, args: &Rope<&Buffer>) -> Result<()> {
        on!(self, b => b.rope(spec, &views::rope(args, &|any| own(b, any))?))
    }

    fn rope_append(
        &self,
        spec: &RopeAppendSpec,
        slot_mapping: &[i64],
        args: &RopeAppend<&Buffer>,
    ) -> Result<()> {
        on!(self, b => b.rope_append(spec, slot_mapping, &views::rope_append(args, &|any| own(b, any))?))
    }

    fn kv_copy_pages(
        &self,
        kv: &KvSpec,
        row_elems: u32,
        copies: &[(u32, u32)],
        view: &KvView<&Buffer>,
    ) -> Result<()> {
        on!(self, b => b.kv_copy_pages(kv, row_elems, copies, &views::kv_view(view, &|any| own(b, any))?))
    }

    fn kv_gather(
        &self,
        spec: &GatherSpec,
        pages: PageTable<'_>,
        seq_lens: &[i32],
        ranges: &[GatherRange],
        args: &Gather<&Buffer>,
    ) -> Result<()> {
        on!(self, b => {
            b.kv_gather(spec, pages, seq_lens, ranges, &views::gather(args, &|any| own(b, any))?)
        })
    }

    fn project(&self, spec: &ProjectSpec, args: &Project<&Buffer>) -> Result<()> {
        on!(self, b => b.project(spec, &views::project(args, &|any| own(b, any))?))
    }

    fn prefill_variants(&self, spec: &PrefillSpec) -> Vec<PrefillVariant> {
        on!(self, b => b.prefill_variants(spec))
    }

    fn prefill_with(
        &self,
        spec: &PrefillSpec,
        variant: Option<&str>,
        sequences: &[PrefillSequence],
        args: &Prefill<&Buffer>,
    ) -> Result<()> {
        on!(self, b => b.prefill_with(spec, variant, sequences, &views::prefill(args, &|any| own(b, any))?))
    }

    fn kv_calibrate(
        &self,
        spec: &CalibrateSpec,
        tokens: Range<u32>,
        args: &Calibrate<&Buffer>,
    ) -> Result<()> {
        on!(self, b => b.kv_calibrate(spec, tokens, &views::calibrate(args, &|any| own(b, any))?))
    }
}
