//! One small trait over every backend, so that one conformance suite runs them all.
//!
//! Applications use the backends' own types, which borrow the host's device and encoder. This trait is the part
//! that all have in common, with a submit in each verb. It is sealed. Memory of different backends is never
//! shared silently: [`Backend::upload`] and [`Backend::download`] are the copies.

use std::ops::Range;

use crate::layer::Layer;
use crate::ops::{
    AppendLayer, AppendSpec, Calibrate, CalibrateSpec, Gather, GatherRange, GatherSpec, MergeStates,
    MergeStatesSpec, Project, ProjectSpec, Rope, RopeAppend, RopeAppendSpec, RopeSpec, StateSets,
};
use crate::plan::{Plan, Tiling};
use crate::prefill::{Prefill, PrefillSequence, PrefillSpec, PrefillVariant};
use crate::tables::{Capacity, PageTable};
use crate::{KvSpec, MlaSpec, Result};

pub(crate) mod sealed {
    /// Keeps [`super::Backend`] to this crate.
    pub trait Sealed {}
}

/// A place where decodes run: CUDA, wgpu, host memory, or `AnyBackend`, which is one of them.
pub trait Backend: sealed::Sealed {
    /// Memory that this backend's kernels read and write.
    type Buffer;
    /// Compiled kernels for one [`MlaSpec`].
    type Decode;
    /// A step's uploaded tables and scratch.
    type Step;
    /// A layer's buffers, checked and bound.
    type Binding;

    /// What runs here, for a person.
    fn name(&self) -> String;

    /// Zeroed memory of at least `bytes` bytes.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`] and [`crate::Error::Limit`].
    fn buffer(&self, bytes: u64) -> Result<Self::Buffer>;

    /// Copies host bytes into a buffer. `offset` and the length are multiples of 4.
    ///
    /// # Errors
    /// [`crate::Error::BufferTooSmall`] and [`crate::Error::Alignment`].
    fn upload(&self, buffer: &Self::Buffer, offset: u64, bytes: &[u8]) -> Result<()>;

    /// Waits for what was submitted and copies a buffer to the host, from its front. `bytes` is a multiple of 4.
    ///
    /// # Errors
    /// [`crate::Error::BufferTooSmall`], [`crate::Error::Alignment`] and [`crate::Error::DeviceLost`].
    fn download(&self, buffer: &Self::Buffer, bytes: u64) -> Result<Vec<u8>>;

    /// The decode variants that run here for a spec, best first.
    fn variants(&self, spec: &MlaSpec) -> Vec<&'static str>;

    /// Every decode variant there is, best first, and what keeps it from running here for a spec, if anything does.
    fn ladder(&self, spec: &MlaSpec) -> Vec<(&'static str, Option<String>)> {
        self.variants(spec).into_iter().map(|name| (name, None)).collect()
    }

    /// Compiles a decode; `variant` forces one of [`Backend::variants`].
    ///
    /// # Errors
    /// Those of [`MlaSpec::check`], and [`crate::Error::VariantUnavailable`].
    fn decode(&self, spec: &MlaSpec, variant: Option<&str>) -> Result<Self::Decode> {
        self.decode_for(spec, variant, 1)
    }

    /// As [`Backend::decode`], made for `query_tokens` query tokens a sequence, such as 2 with one speculative token; 0 is 1.
    /// Other lengths stay right.
    ///
    /// # Errors
    /// Those of [`Backend::decode`].
    fn decode_for(&self, spec: &MlaSpec, variant: Option<&str>, query_tokens: u32) -> Result<Self::Decode>;

    /// Whether that decode rounds the softmax weights to f16, as rows on tensor cores do: their results are up to twice as
    /// far from the exact ones as those of the others.
    fn rounds_weights(&self, decode: &Self::Decode) -> bool;

    /// How that decode cuts its work.
    fn tiling(&self, decode: &Self::Decode) -> Tiling;

    /// A step with room for `capacity`.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`] and [`crate::Error::Limit`].
    fn step(&self, decode: &Self::Decode, capacity: Capacity) -> Result<Self::Step>;

    /// Checks and uploads a plan; grows the step where it is too small.
    ///
    /// # Errors
    /// Those of [`crate::write_tables`], [`crate::Error::OutOfMemory`] and [`crate::Error::Limit`].
    fn prepare(
        &self,
        decode: &Self::Decode,
        step: &mut Self::Step,
        plan: &Plan,
        pages: PageTable<'_>,
    ) -> Result<()>;

    /// Checks and binds a layer for batches of at most `max_queries` query tokens.
    ///
    /// # Errors
    /// See [`crate::Error`]: scales, strides, sizes, limits.
    fn bind(
        &self,
        decode: &Self::Decode,
        max_queries: u32,
        layer: &Layer<&Self::Buffer>,
    ) -> Result<Self::Binding>;

    /// Records and submits one layer's decode.
    ///
    /// # Errors
    /// [`crate::Error::LayoutMismatch`] and [`crate::Error::DeviceLost`].
    fn run(&self, decode: &Self::Decode, step: &Self::Step, binding: &Self::Binding) -> Result<()>;

    /// Merges two partial attention states: see [`MergeStates`].
    ///
    /// # Errors
    /// Those of [`MergeStates`]'s checks.
    fn merge_attn_states(&self, spec: &MergeStatesSpec, args: &MergeStates<&Self::Buffer>) -> Result<()>;

    /// Merges any number of partial attention states: FlashInfer's `merge_states`. See [`StateSets`].
    ///
    /// # Errors
    /// Those of [`StateSets`]'s checks.
    fn merge_states(&self, spec: &MergeStatesSpec, args: &StateSets<&Self::Buffer>) -> Result<()>;

    /// Writes new tokens into the cache: the field's `concat_and_cache_mla`. See [`AppendLayer`].
    ///
    /// # Errors
    /// [`crate::Error::SlotOutOfRange`], [`crate::Error::SlotOverlap`] and those of [`AppendLayer`]'s checks.
    fn kv_append(
        &self,
        spec: &AppendSpec,
        slot_mapping: &[i64],
        layer: &AppendLayer<&Self::Buffer>,
    ) -> Result<()>;

    /// Rotates rows by their positions. See [`Rope`].
    ///
    /// # Errors
    /// Those of [`Rope`]'s checks.
    fn rope(&self, spec: &RopeSpec, args: &Rope<&Self::Buffer>) -> Result<()>;

    /// Rotates queries and new keys, and appends the keys: what comes before a decode, in one dispatch. See [`RopeAppend`].
    ///
    /// # Errors
    /// Those of [`Backend::kv_append`] and of [`RopeAppend`]'s checks.
    fn rope_append(
        &self,
        spec: &RopeAppendSpec,
        slot_mapping: &[i64],
        args: &RopeAppend<&Self::Buffer>,
    ) -> Result<()>;

    /// Copies whole pages inside one layer's pool, `(from, to)` each.
    ///
    /// # Errors
    /// [`crate::Error::CopyConflict`].
    fn kv_copy_pages(
        &self,
        kv: &KvSpec,
        row_elems: u32,
        copies: &[(u32, u32)],
        view: &crate::layer::KvView<&Self::Buffer>,
    ) -> Result<()>;

    /// Copies tokens of the paged cache to rows of a workspace `[rows, L + R]`: the field's `cp_gather_cache`, and with an e4m3
    /// cache and a wider output its `gather_and_maybe_dequant_cache`.
    ///
    /// Ranges may begin and end anywhere in a page. Bits are copied where the dtypes agree. An e4m3 code becomes the f32
    /// product of its value and `k_scale`, then an element of the output: rounded to nearest even both times, on every device;
    /// a NaN code becomes a quiet NaN of its sign. Other pairs of dtypes are rounded once.
    ///
    /// # Errors
    /// [`crate::Error::GatherRange`], [`crate::Error::GatherOverlap`], [`crate::Error::PageOutOfRange`], and those of
    /// [`Gather`]'s checks.
    fn kv_gather(
        &self,
        spec: &GatherSpec,
        pages: PageTable<'_>,
        seq_lens: &[i32],
        ranges: &[GatherRange],
        args: &Gather<&Self::Buffer>,
    ) -> Result<()>;

    /// Each token's rows times the matrix of their head: `absorb`, `v_up` and `k_up`. See [`Project`].
    ///
    /// # Errors
    /// Those of [`Project`]'s checks.
    fn project(&self, spec: &ProjectSpec, args: &Project<&Self::Buffer>) -> Result<()>;

    /// The rows that [`Backend::prefill`] has here for a spec, best first.
    fn prefill_variants(&self, spec: &PrefillSpec) -> Vec<PrefillVariant>;

    /// Attention over expanded keys: see [`Prefill`].
    ///
    /// # Errors
    /// Those of [`Prefill`]'s checks.
    fn prefill(
        &self,
        spec: &PrefillSpec,
        sequences: &[PrefillSequence],
        args: &Prefill<&Self::Buffer>,
    ) -> Result<()> {
        self.prefill_with(spec, None, sequences, args)
    }

    /// As [`Backend::prefill`]; `variant` forces one of [`Backend::prefill_variants`].
    ///
    /// # Errors
    /// Those of [`Backend::prefill`], and [`crate::Error::VariantUnavailable`].
    fn prefill_with(
        &self,
        spec: &PrefillSpec,
        variant: Option<&str>,
        sequences: &[PrefillSequence],
        args: &Prefill<&Self::Buffer>,
    ) -> Result<()>;

    /// Looks at the rows that `kv_append` would write, and adds to the counters of [`CalibrationStats`] in a buffer: the largest
    /// finite magnitude, how many elements an e4m3 cache with that `k_scale` would saturate, and how many are not finite. The host
    /// downloads [`CalibrationStats::BYTES`] when it likes, and makes a `k_scale` of them.
    ///
    /// # Errors
    /// Those of [`Calibrate`]'s checks, and [`crate::Error::Shape`] for a range of tokens that ends before it begins.
    ///
    /// [`CalibrationStats`]: crate::CalibrationStats
    /// [`CalibrationStats::BYTES`]: crate::CalibrationStats::BYTES
    fn kv_calibrate(
        &self,
        spec: &CalibrateSpec,
        tokens: Range<u32>,
        args: &Calibrate<&Self::Buffer>,
    ) -> Result<()>;
}
