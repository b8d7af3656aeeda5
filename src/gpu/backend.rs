//! [`Backend`] for [`Gpu`]: each verb with a submit of its own.

use std::ops::Range;

use super::ops::{
    AppendStep, CalibrateStep, CopySpec, CopyStep, GatherStep, HeadProject, KvAppend, KvCalibrate,
    KvCopyPages, KvGather, MergeAttnStates, MergeSetsStep, MergeStateSets, MlaPrefill, PrefillStep,
    ProjectStep, Rotate, RotateAppend, RotateStep,
};
use super::read::{check_range, read};
use super::{Gpu, LayerBinding, MlaDecode, Options, Step, scope::scoped};
use crate::backend::{Backend, sealed::Sealed};
use crate::ops::{
    AppendLayer, AppendSpec, Calibrate, CalibrateSpec, Gather, GatherRange, GatherSpec, MergeStates,
    MergeStatesSpec, Project, ProjectSpec, Rope, RopeAppend, RopeAppendSpec, RopeSpec, StateSets,
};
use crate::plan::{Plan, Tiling};
use crate::prefill::{Prefill, PrefillSequence, PrefillSpec, PrefillVariant};
use crate::tables::{Capacity, PageTable};
use crate::{Error, KvSpec, KvView, Layer, MlaSpec, Result};

/// A compiled decode.
pub type GpuDecode = MlaDecode;

impl Sealed for Gpu {}

impl Backend for Gpu {
    type Buffer = wgpu::Buffer;
    type Decode = GpuDecode;
    type Step = Step;
    type Binding = LayerBinding;

    fn name(&self) -> String {
        self.describe()
    }

    fn buffer(&self, bytes: u64) -> Result<wgpu::Buffer> {
        let limit = self.pipelines.caps().max_buffer_bytes;
        if bytes > limit {
            let cure = "split it into several buffers, or make the device with `wanted`'s limits";
            return Err(Error::Limit { what: "max_buffer_size", need: bytes, limit, cure });
        }
        self.check_lost()?;
        scoped(&self.device, "a buffer", || {
            self.device.create_buffer(&wgpu::BufferDescriptor {
                label: None,
                size: bytes.next_multiple_of(4).max(4),
                usage: wgpu::BufferUsages::STORAGE
                    | wgpu::BufferUsages::COPY_DST
                    | wgpu::BufferUsages::COPY_SRC,
                mapped_at_creation: false,
            })
        })
    }

    fn upload(&self, buffer: &wgpu::Buffer, offset: u64, bytes: &[u8]) -> Result<()> {
        check_range(offset, bytes.len() as u64, buffer)?;
        self.check_lost()?;
        self.queue.write_buffer(buffer, offset, bytes);
        Ok(())
    }

    fn download(&self, buffer: &wgpu::Buffer, bytes: u64) -> Result<Vec<u8>> {
        self.check_lost()?;
        let bytes = pollster::block_on(read(&self.device, &self.queue, buffer, bytes))?;
        self.check_lost().map(|()| bytes)
    }

    fn variants(&self, spec: &MlaSpec) -> Vec<&'static str> {
        self.ladder(spec).into_iter().filter(|(_, lacks)| lacks.is_none()).map(|(name, _)| name).collect()
    }

    fn ladder(&self, spec: &MlaSpec) -> Vec<(&'static str, Option<String>)> {
        self.pipelines.ladder(spec)
    }

    fn decode_for(&self, spec: &MlaSpec, variant: Option<&str>, query_tokens: u32) -> Result<MlaDecode> {
        let options = Options { variant: variant.map(Into::into), query_tokens, ..Default::default() };
        MlaDecode::new(&self.pipelines, spec, &options)
    }

    fn rounds_weights(&self, decode: &MlaDecode) -> bool {
        decode.rounds_weights()
    }

    fn tiling(&self, decode: &MlaDecode) -> Tiling {
        decode.tiling()
    }

    fn step(&self, decode: &MlaDecode, capacity: Capacity) -> Result<Step> {
        decode.step(capacity)
    }

    fn prepare(&self, decode: &MlaDecode, step: &mut Step, plan: &Plan, pages: PageTable<'_>) -> Result<()> {
        decode.prepare(&self.queue, step, plan, pages)
    }

    fn bind(
        &self,
        decode: &MlaDecode,
        max_queries: u32,
        layer: &Layer<&wgpu::Buffer>,
    ) -> Result<LayerBinding> {
        decode.bind(max_queries, layer)
    }

    fn run(&self, decode: &MlaDecode, step: &Step, binding: &LayerBinding) -> Result<()> {
        decode.check(step, binding)?;
        self.submit(|encoder| decode.record(encoder, step, binding))
    }

    fn merge_attn_states(&self, spec: &MergeStatesSpec, args: &MergeStates<&wgpu::Buffer>) -> Result<()> {
        let merge = MergeAttnStates::new(&self.pipelines, *spec)?;
        let binding = merge.bind(&self.device, args)?;
        self.submit(|encoder| merge.record(encoder, &binding))
    }

    fn merge_states(&self, spec: &MergeStatesSpec, args: &StateSets<&wgpu::Buffer>) -> Result<()> {
        let merge = MergeStateSets::new(&self.pipelines, *spec)?;
        let mut step = MergeSetsStep::default();
        merge.prepare(&self.device, &self.queue, &mut step, 0..args.num_tokens, args.num_sets)?;
        let binding = merge.bind(&self.device, args)?;
        merge.check(&step, &binding)?;
        self.submit(|encoder| merge.record(encoder, &step, &binding))
    }

    fn kv_append(
        &self,
        spec: &AppendSpec,
        slot_mapping: &[i64],
        layer: &AppendLayer<&wgpu::Buffer>,
    ) -> Result<()> {
        let append = KvAppend::new(&self.pipelines, *spec)?;
        let mut step = AppendStep::default();
        append.prepare(&self.device, &self.queue, &mut step, slot_mapping)?;
        let binding = append.bind(&self.device, layer, step.num_tokens())?;
        append.check(&step, &binding)?;
        self.submit(|encoder| append.record(encoder, &step, &binding))
    }

    fn rope(&self, spec: &RopeSpec, args: &Rope<&wgpu::Buffer>) -> Result<()> {
        let rotate = Rotate::new(&self.pipelines, *spec)?;
        let binding = rotate.bind(&self.device, args)?;
        let mut step = RotateStep::default();
        rotate.prepare(&self.device, &self.queue, &mut step, 0, args.num_tokens)?;
        rotate.check(&step, &binding)?;
        self.submit(|encoder| rotate.record(encoder, &step, &binding))
    }

    fn rope_append(
        &self,
        spec: &RopeAppendSpec,
        slot_mapping: &[i64],
        args: &RopeAppend<&wgpu::Buffer>,
    ) -> Result<()> {
        let rotate = RotateAppend::new(&self.pipelines, *spec)?;
        let mut step = AppendStep::default();
        rotate.prepare(&self.device, &self.queue, &mut step, slot_mapping)?;
        let binding = rotate.bind(&self.device, args, step.num_tokens())?;
        rotate.check(&step, &binding)?;
        self.submit(|encoder| rotate.record(encoder, &step, &binding))
    }

    fn kv_copy_pages(
        &self,
        kv: &KvSpec,
        row_elems: u32,
        copies: &[(u32, u32)],
        view: &KvView<&wgpu::Buffer>,
    ) -> Result<()> {
        let copy = KvCopyPages::new(&self.pipelines, CopySpec { kv: *kv, row_elems })?;
        let mut step = CopyStep::default();
        copy.prepare(&self.device, &self.queue, &mut step, copies)?;
        let binding = copy.bind(&self.device, view)?;
        copy.check(&step, &binding)?;
        self.submit(|encoder| copy.record(encoder, &step, &binding))
    }

    fn kv_gather(
        &self,
        spec: &GatherSpec,
        pages: PageTable<'_>,
        seq_lens: &[i32],
        ranges: &[GatherRange],
        args: &Gather<&wgpu::Buffer>,
    ) -> Result<()> {
        let gather = KvGather::new(&self.pipelines, *spec)?;
        let mut step = GatherStep::default();
        gather.prepare(&self.device, &self.queue, &mut step, pages, seq_lens, ranges)?;
        let binding = gather.bind(&self.device, args, step.num_rows())?;
        gather.check(&step, &binding)?;
        self.submit(|encoder| gather.record(encoder, &step, &binding))
    }

    fn project(&self, spec: &ProjectSpec, args: &Project<&wgpu::Buffer>) -> Result<()> {
        let project = HeadProject::new(&self.pipelines, *spec)?;
        let mut step = ProjectStep::default();
        project.prepare(&self.device, &self.queue, &mut step, 0, args.num_tokens)?;
        let binding = project.bind(&self.device, args)?;
        project.check(&step, &binding)?;
        self.submit(|encoder| project.record(encoder, &step, &binding))
    }

    fn prefill_variants(&self, spec: &PrefillSpec) -> Vec<PrefillVariant> {
        let runs = |(row, lacks): (_, Option<String>)| lacks.is_none().then_some(row);
        MlaPrefill::ladder(&self.pipelines, spec).into_iter().filter_map(runs).collect()
    }

    fn prefill_with(
        &self,
        spec: &PrefillSpec,
        variant: Option<&str>,
        sequences: &[PrefillSequence],
        args: &Prefill<&wgpu::Buffer>,
    ) -> Result<()> {
        let prefill = MlaPrefill::with_variant(&self.pipelines, *spec, variant)?;
        let mut step = PrefillStep::default();
        prefill.prepare(&self.device, &self.queue, &mut step, sequences)?;
        let binding = prefill.bind(&self.device, args, step.extent())?;
        prefill.check(&step, &binding)?;
        self.submit(|encoder| prefill.record(encoder, &step, &binding))
    }

    fn kv_calibrate(
        &self,
        spec: &CalibrateSpec,
        tokens: Range<u32>,
        args: &Calibrate<&wgpu::Buffer>,
    ) -> Result<()> {
        let calibrate = KvCalibrate::new(&self.pipelines, *spec)?;
        let mut step = CalibrateStep::default();
        calibrate.prepare(&self.device, &self.queue, &mut step, tokens.clone())?;
        let binding = calibrate.bind(&self.device, args, tokens.end)?;
        calibrate.check(&step, &binding)?;
        self.submit(|encoder| calibrate.record(encoder, &step, &binding))
    }
}

impl Gpu {
    fn submit(&self, record: impl FnOnce(&mut wgpu::CommandEncoder)) -> Result<()> {
        self.check_lost()?;
        let mut encoder = self.device.create_command_encoder(&Default::default());
        record(&mut encoder);
        self.queue.submit([encoder.finish()]);
        Ok(())
    }
}
