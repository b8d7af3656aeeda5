//! The CUDA backend: PTX kernels on the host's stream, for NVIDIA cards since Ampere. Only the driver is needed, 520 or later (that of
//! CUDA 11.8), and is looked for at run time.
//!
//! ```text
//! once       cuda = Cuda::new(0), or Cuda::on_stream(stream)        the host's CudaStream is borrowed
//!            mla = Decode::new(&cuda, &spec, &Options::default())    a row of the ladder, loaded from PTX
//! per step   mla.prepare(&mut step, &plan, pages)                   checks and uploads
//! once       binding = mla.bind(max_queries, &layer)                a layer of the model: checked
//! per layer  mla.record(&step, &binding)                            two launches: allocates nothing, waits for nothing
//! ```
//!
//! What `record` launches may be captured in a graph, of the small ops ([`ops`]) too. The grid is the step's capacity: a `prepare` before a
//! replay gives the graph new lengths, slots or copies, as long as they fit.

mod args;
mod buffer;
mod decode;
mod driver;
mod ladder;
mod library;
#[cfg(test)]
mod manifest_test;
pub mod ops;
mod ptx;
mod step;
mod tensor_map;

pub use buffer::Buffer;
pub use decode::{Binding, Decode, Options};
pub use driver::Cuda;
pub use step::Step;
pub use {cudarc, cudarc::driver::CudaStream};

use std::ops::Range;

use crate::backend::{Backend, sealed::Sealed};
use crate::layer::{KvView, Layer};
use crate::ops::{
    AppendLayer, AppendSpec, Calibrate, CalibrateSpec, CopySpec, Gather, GatherRange, GatherSpec,
    MergeStates, MergeStatesSpec, Project, ProjectSpec, Rope, RopeAppend, RopeAppendSpec, RopeSpec,
    StateSets,
};
use crate::plan::{Plan, Tiling};
use crate::prefill::{Prefill, PrefillSequence, PrefillSpec, PrefillVariant};
use crate::tables::{Capacity, PageTable};
use crate::{Error, KvSpec, MlaSpec, Result};
use ops::{
    AppendStep, CalibrateStep, CopyStep, GatherStep, HeadProject, KvAppend, KvCalibrate, KvCopyPages,
    KvGather, MergeAttnStates, MergeStateSets, MlaPrefill, PREFILL_VARIANT, PrefillStep, ProjectStep, Rotate,
    RotateAppend, RotateStep,
};

impl Cuda {
    /// Whether a row on tensor cores serves a spec.
    pub(crate) fn has_matrices_for(&self, spec: &MlaSpec) -> bool {
        ladder::choose(self.card(), spec, spec.shape.num_heads).is_some_and(ladder::Row::on_matrices)
    }
}

impl Sealed for Cuda {}

impl Backend for Cuda {
    type Buffer = Buffer;
    type Decode = Decode;
    type Step = Step;
    type Binding = Binding;

    fn name(&self) -> String {
        self.describe()
    }

    fn buffer(&self, bytes: u64) -> Result<Buffer> {
        Buffer::zeroed(self, bytes)
    }

    fn upload(&self, buffer: &Buffer, offset: u64, bytes: &[u8]) -> Result<()> {
        buffer.upload(self, offset, bytes)
    }

    fn download(&self, buffer: &Buffer, bytes: u64) -> Result<Vec<u8>> {
        buffer.download(self, bytes)
    }

    fn variants(&self, spec: &MlaSpec) -> Vec<&'static str> {
        self.ladder(spec).into_iter().filter(|(_, lacks)| lacks.is_none()).map(|(name, _)| name).collect()
    }

    fn ladder(&self, spec: &MlaSpec) -> Vec<(&'static str, Option<String>)> {
        let row = |row: &ladder::Row| (row.name, row.runs_on(self.card(), spec).err());
        ladder::ROWS.iter().map(row).collect()
    }

    fn decode_for(&self, spec: &MlaSpec, variant: Option<&str>, query_tokens: u32) -> Result<Decode> {
        let variant = variant.map(str::to_owned);
        Decode::new(self, spec, &Options { variant, query_tokens, device_page_list: false })
    }

    fn rounds_weights(&self, decode: &Decode) -> bool {
        decode.rounds_weights()
    }

    fn tiling(&self, decode: &Decode) -> Tiling {
        decode.tiling()
    }

    fn step(&self, decode: &Decode, capacity: Capacity) -> Result<Step> {
        decode.step(capacity)
    }

    fn prepare(&self, decode: &Decode, step: &mut Step, plan: &Plan, pages: PageTable<'_>) -> Result<()> {
        decode.prepare(step, plan, pages)
    }

    fn bind(&self, decode: &Decode, max_queries: u32, layer: &Layer<&Buffer>) -> Result<Binding> {
        decode.bind(max_queries, layer)
    }

    fn run(&self, decode: &Decode, step: &Step, binding: &Binding) -> Result<()> {
        decode.record(step, binding)
    }

    fn merge_attn_states(&self, spec: &MergeStatesSpec, args: &MergeStates<&Buffer>) -> Result<()> {
        let merge = MergeAttnStates::new(self, *spec)?;
        merge.record(&merge.bind(args)?)
    }

    fn merge_states(&self, spec: &MergeStatesSpec, args: &StateSets<&Buffer>) -> Result<()> {
        let merge = MergeStateSets::new(self, *spec)?;
        merge.record(&merge.bind(args)?)
    }

    fn kv_append(&self, spec: &AppendSpec, slot_mapping: &[i64], layer: &AppendLayer<&Buffer>) -> Result<()> {
        let append = KvAppend::new(self, *spec)?;
        let mut step = AppendStep::default();
        append.prepare(&mut step, slot_mapping)?;
        append.record(&step, &append.bind(layer, step.num_tokens())?)
    }

    fn rope(&self, spec: &RopeSpec, args: &Rope<&Buffer>) -> Result<()> {
        let rotate = Rotate::new(self, *spec)?;
        let binding = rotate.bind(args)?;
        let mut step = RotateStep::default();
        rotate.prepare(&mut step, 0, args.num_tokens)?;
        rotate.record(&step, &binding)
    }

    fn rope_append(
        &self,
        spec: &RopeAppendSpec,
        slot_mapping: &[i64],
        args: &RopeAppend<&Buffer>,
    ) -> Result<()> {
        let rotate = RotateAppend::new(self, *spec)?;
        let mut step = AppendStep::default();
        rotate.prepare(&mut step, slot_mapping)?;
        rotate.record(&step, &rotate.bind(args, step.num_tokens())?)
    }

    fn kv_copy_pages(
        &self,
        kv: &KvSpec,
        row_elems: u32,
        copies: &[(u32, u32)],
        view: &KvView<&Buffer>,
    ) -> Result<()> {
        let copy = KvCopyPages::new(self, CopySpec { kv: *kv, row_elems })?;
        let mut step = CopyStep::default();
        copy.prepare(&mut step, copies)?;
        copy.record(&step, &copy.bind(view)?)
    }

    fn kv_gather(
        &self,
        spec: &GatherSpec,
        pages: PageTable<'_>,
        seq_lens: &[i32],
        ranges: &[GatherRange],
        args: &Gather<&Buffer>,
    ) -> Result<()> {
        let gather = KvGather::new(self, *spec)?;
        let mut step = GatherStep::default();
        gather.prepare(&mut step, pages, seq_lens, ranges)?;
        gather.record(&step, &gather.bind(args, step.num_rows())?)
    }

    fn project(&self, spec: &ProjectSpec, args: &Project<&Buffer>) -> Result<()> {
        let project = HeadProject::new(self, *spec)?;
        let binding = project.bind(args)?;
        let mut step = ProjectStep::default();
        project.prepare(&mut step, 0, args.num_tokens)?;
        project.record(&step, &binding)
    }

    fn prefill_variants(&self, _: &PrefillSpec) -> Vec<PrefillVariant> {
        vec![PREFILL_VARIANT]
    }

    fn prefill_with(
        &self,
        spec: &PrefillSpec,
        variant: Option<&str>,
        sequences: &[PrefillSequence],
        args: &Prefill<&Buffer>,
    ) -> Result<()> {
        if let Some(name) = variant.filter(|&name| name != PREFILL_VARIANT.name) {
            let why = format!("there is no such row; the only one is {}", PREFILL_VARIANT.name);
            return Err(Error::VariantUnavailable { name: name.to_owned(), why });
        }
        let prefill = MlaPrefill::new(self, *spec)?;
        let mut step = PrefillStep::default();
        prefill.prepare(&mut step, sequences)?;
        prefill.record(&step, &prefill.bind(args, step.extent())?)
    }

    fn kv_calibrate(
        &self,
        spec: &CalibrateSpec,
        tokens: Range<u32>,
        args: &Calibrate<&Buffer>,
    ) -> Result<()> {
        let calibrate = KvCalibrate::new(self, *spec)?;
        let mut step = CalibrateStep::default();
        calibrate.prepare(&mut step, tokens.clone())?;
        calibrate.record(&step, &calibrate.bind(args, tokens.end)?)
    }
}
