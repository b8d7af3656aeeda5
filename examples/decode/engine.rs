//! What this program asks of a backend beyond [`Backend`]: jobs that are prepared once and timed alone.

use wgpu_mla::cpu::Cpu;
#[cfg(feature = "cuda")]
use wgpu_mla::cuda::Cuda;
use wgpu_mla::{AppendLayer, AppendSpec, Backend, MergeStates, MergeStatesSpec, MlaSpec, Result};
#[cfg(feature = "wgpu")]
use wgpu_mla::{
    gpu::{
        Gpu,
        ops::{AppendStep, KvAppend, MergeAttnStates},
    },
    wgpu::{CommandEncoder, PollType},
};

/// Runs an op once and waits until it is done.
pub type Job<'a> = Box<dyn Fn() -> Result<()> + 'a>;

/// A backend whose ops can be timed.
pub trait Engine: Backend {
    /// The name of the chosen row.
    fn variant(decode: &Self::Decode) -> &'static str;

    /// Which row was chosen, and what each better one lacks here.
    fn why(&self, spec: &MlaSpec, decode: &Self::Decode) -> String {
        let mut why = format!("row {}", Self::variant(decode));
        for (name, lacks) in self.ladder(spec) {
            if let Some(lacks) = lacks {
                why += &format!("; not {name}: {lacks}");
            }
        }
        why
    }

    /// One decode.
    fn decode_job<'a>(
        &'a self,
        decode: &'a Self::Decode,
        step: &'a Self::Step,
        binding: &'a Self::Binding,
    ) -> Job<'a>;

    /// One `merge_attn_states`.
    fn merge_job<'a>(&'a self, spec: MergeStatesSpec, args: MergeStates<&'a Self::Buffer>)
    -> Result<Job<'a>>;

    /// One `kv_append`.
    fn append_job<'a>(
        &'a self,
        spec: AppendSpec,
        slot_mapping: &'a [i64],
        layer: AppendLayer<&'a Self::Buffer>,
    ) -> Result<Job<'a>>;
}

impl Engine for Cpu {
    fn variant(decode: &Self::Decode) -> &'static str {
        decode.variant()
    }

    fn decode_job<'a>(
        &'a self,
        decode: &'a Self::Decode,
        step: &'a Self::Step,
        binding: &'a Self::Binding,
    ) -> Job<'a> {
        Box::new(move || self.run(decode, step, binding))
    }

    fn merge_job<'a>(
        &'a self,
        spec: MergeStatesSpec,
        args: MergeStates<&'a Self::Buffer>,
    ) -> Result<Job<'a>> {
        Ok(Box::new(move || self.merge_attn_states(&spec, &args)))
    }

    fn append_job<'a>(
        &'a self,
        spec: AppendSpec,
        slot_mapping: &'a [i64],
        layer: AppendLayer<&'a Self::Buffer>,
    ) -> Result<Job<'a>> {
        Ok(Box::new(move || self.kv_append(&spec, slot_mapping, &layer)))
    }
}

#[cfg(feature = "cuda")]
impl Engine for Cuda {
    fn variant(decode: &Self::Decode) -> &'static str {
        decode.variant()
    }

    fn decode_job<'a>(
        &'a self,
        decode: &'a Self::Decode,
        step: &'a Self::Step,
        binding: &'a Self::Binding,
    ) -> Job<'a> {
        Box::new(move || decode.record(step, binding).and_then(|()| wait(self)))
    }

    fn merge_job<'a>(
        &'a self,
        spec: MergeStatesSpec,
        args: MergeStates<&'a Self::Buffer>,
    ) -> Result<Job<'a>> {
        Ok(Box::new(move || self.merge_attn_states(&spec, &args).and_then(|()| wait(self))))
    }

    fn append_job<'a>(
        &'a self,
        spec: AppendSpec,
        slot_mapping: &'a [i64],
        layer: AppendLayer<&'a Self::Buffer>,
    ) -> Result<Job<'a>> {
        // It uploads its slots each time.
        Ok(Box::new(move || self.kv_append(&spec, slot_mapping, &layer).and_then(|()| wait(self))))
    }
}

/// Waits for the stream.
#[cfg(feature = "cuda")]
fn wait(cuda: &Cuda) -> Result<()> {
    let failed = |detail: String| wgpu_mla::Error::Cuda { what: "to wait for the card", detail };
    cuda.stream().synchronize().map_err(|error| failed(error.to_string()))
}

#[cfg(feature = "wgpu")]
impl Engine for Gpu {
    fn variant(decode: &Self::Decode) -> &'static str {
        decode.variant()
    }

    fn why(&self, _: &MlaSpec, decode: &Self::Decode) -> String {
        decode.why().to_owned()
    }

    fn decode_job<'a>(
        &'a self,
        decode: &'a Self::Decode,
        step: &'a Self::Step,
        binding: &'a Self::Binding,
    ) -> Job<'a> {
        Box::new(move || {
            decode.check(step, binding)?;
            submit(self, |encoder| decode.record(encoder, step, binding))
        })
    }

    fn merge_job<'a>(
        &'a self,
        spec: MergeStatesSpec,
        args: MergeStates<&'a Self::Buffer>,
    ) -> Result<Job<'a>> {
        let merge = MergeAttnStates::new(&self.pipelines, spec)?;
        let binding = merge.bind(&self.device, &args)?;
        Ok(Box::new(move || submit(self, |encoder| merge.record(encoder, &binding))))
    }

    fn append_job<'a>(
        &'a self,
        spec: AppendSpec,
        slot_mapping: &'a [i64],
        layer: AppendLayer<&'a Self::Buffer>,
    ) -> Result<Job<'a>> {
        let append = KvAppend::new(&self.pipelines, spec)?;
        let mut step = AppendStep::default();
        append.prepare(&self.device, &self.queue, &mut step, slot_mapping)?;
        let binding = append.bind(&self.device, &layer, step.num_tokens())?;
        append.check(&step, &binding)?;
        Ok(Box::new(move || submit(self, |encoder| append.record(encoder, &step, &binding))))
    }
}

/// Records into an encoder, submits it and waits.
#[cfg(feature = "wgpu")]
fn submit(gpu: &Gpu, record: impl FnOnce(&mut CommandEncoder)) -> Result<()> {
    gpu.check_lost()?;
    let mut encoder = gpu.device.create_command_encoder(&Default::default());
    record(&mut encoder);
    gpu.queue.submit([encoder.finish()]);
    let done = gpu.device.poll(PollType::wait_indefinitely());
    done.map_err(|error| wgpu_mla::Error::DeviceLost { detail: error.to_string() })?;
    gpu.check_lost()
}
