//! What a host does with wgpu-mla: it owns the buffers, records into an encoder that it was given, and never waits.

use std::time::Instant;

use wgpu_mla::gpu::Gpu;
use wgpu_mla::{
    Batch, Binding, Capacity, Compiled, Device, Dtype, KvAppend, KvAppendArgs, KvSpec, KvView, MlaDecode,
    MlaDecodeArgs, MlaShape, PagePool, Plan, Result, SeqId, SplitPolicy, Step, View, wgpu,
};

use crate::check::Check;
use crate::pace::Pace;

/// Tokens that each sequence begins with, and goes back to once it is full.
const PROMPTS: [u32; 4] = [64, 320, 576, 832];
const FULL_TOKENS: u32 = 1024;
pub const SEQUENCES: u32 = PROMPTS.len() as u32;
/// A slice is made of whole splits, so they bound how finely a step can be cut.
const SPLIT_TOKENS: u32 = 64;

pub const SPEC: MlaDecode = MlaDecode {
    shape: MlaShape { num_heads: 16, kv_lora_rank: 512, qk_rope_head_dim: 64 },
    kv: KvSpec { dtype: Dtype::F16, page_size: 64, num_pages: SEQUENCES * FULL_TOKENS / 64 },
    query: Dtype::F32,
    out: Dtype::F32,
};

pub struct Model {
    /// egui's device and queue.
    pub gpu: Gpu,
    // The cache's book-keeping.
    pool: PagePool,
    sequences: Vec<SeqId>,
    // The two ops: compiled once, prepared once a step, bound once a layer.
    append: Compiled<KvAppend, Gpu>,
    append_step: Step<KvAppend, Gpu>,
    append_binding: Binding<KvAppend, Gpu>,
    pub mla: Compiled<MlaDecode, Gpu>,
    plan: Plan,
    pub step: Step<MlaDecode, Gpu>,
    binding: Binding<MlaDecode, Gpu>,
    // The host's own pass.
    token: wgpu::ComputePipeline,
    token_group: wgpu::BindGroup,
    token_params: wgpu::Buffer,
    pub buffers: Buffers,
    /// The slice that the next frame records.
    pub next_slice: usize,
    pub pace: Pace,
    pub check: Option<Check>,
    pub stats: Stats,
}

pub struct Buffers {
    /// New cache rows, f32 `[tokens, L + R]`.
    rows: wgpu::Buffer,
    /// f32 `[sequences, H, L + R]`.
    pub query: wgpu::Buffer,
    /// f16 `[num_pages, page_size, L + R]`.
    pub cache: wgpu::Buffer,
    /// f32 `[sequences, H, L]`.
    pub out: wgpu::Buffer,
    /// f32 `[sequences, H]`.
    lse: wgpu::Buffer,
}

#[derive(Default)]
pub struct Stats {
    pub frames: u64,
    pub decodes: u64,
    /// Of the last frames, and of the last steps.
    pub frame_ms: f64,
    pub step_ms: f64,
    started: Option<Instant>,
    last_frame: Option<Instant>,
    last_decode: Option<Instant>,
}

impl Model {
    pub fn new(gpu: Gpu) -> Result<Self> {
        let device = gpu.device();
        let buffers = Buffers::new(device);
        let (shape, latent) = (SPEC.shape, SPEC.shape.kv_lora_rank);

        let append = gpu.compile(KvAppend { shape, kv: SPEC.kv, input: Dtype::F32 })?;
        let kv_c = View::dense(&buffers.rows, 1, shape.row_elems());
        let k_pe = View { offset: latent.into(), ..kv_c };
        let kv = KvView::dense(&buffers.cache, &SPEC);
        let layer = KvAppendArgs { kv_c, k_pe, kv, k_scale: 1.0 };
        let append_binding = append.bind(&layer, PROMPTS.iter().sum())?;

        let mla = gpu.compile(SPEC)?;
        let Buffers { query, cache, out, lse, .. } = &buffers;
        let layer = MlaDecodeArgs::dense(&SPEC, query, cache, out, lse, softmax_scale());
        let binding = mla.bind(&layer, SEQUENCES)?;
        let step = mla.step(Capacity::default())?;

        let mut pool = PagePool::new(SPEC.kv)?;
        let sequences = PROMPTS.map(|_| pool.add()).to_vec();

        let token = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some("host.token"),
            layout: None,
            module: &device.create_shader_module(wgpu::include_wgsl!("token.wgsl")),
            entry_point: Some("token"),
            compilation_options: Default::default(),
            cache: None,
        });
        let token_params =
            buffer(device, "host.token", 8, wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST);
        let token_group =
            bind(device, &token.get_bind_group_layout(0), &[&token_params, &buffers.rows, &buffers.query]);
        Ok(Self {
            pool,
            sequences,
            append_step: append.step(0)?,
            append,
            append_binding,
            mla,
            plan: Plan::default(),
            step,
            binding,
            token,
            token_group,
            token_params,
            buffers,
            next_slice: 0,
            pace: Pace::new(device, gpu.queue()),
            check: None,
            stats: Stats::default(),
            gpu,
        })
    }

    /// Records this frame's share of a step. Whoever owns the encoder submits it, once, with the rest of the frame.
    pub fn record_frame(&mut self, encoder: &mut wgpu::CommandEncoder) -> Result<()> {
        self.stats.frame();
        if self.next_slice == 0 {
            self.begin_step()?;
        }

        // The host's pass, and in it the append that reads what it wrote.
        let mut pass = encoder.begin_compute_pass(&Default::default());
        pass.set_pipeline(&self.token);
        pass.set_bind_group(0, &self.token_group, &[]);
        pass.dispatch_workgroups(256, 1, 1);
        if self.next_slice == 0 {
            self.append.record_on(&mut pass, &self.append_step, &self.append_binding)?;
        }
        drop(pass);

        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
            label: Some("host.slice"),
            timestamp_writes: self.pace.timestamps(),
        });
        self.mla.record_slice_on(&mut pass, &self.step, &self.binding, self.next_slice)?;
        drop(pass);
        // Slices are about equal, whole splits that they are.
        self.pace.measure(encoder, self.plan.work() as f64 / self.step.num_slices() as f64);
        self.next_slice += 1;

        if self.next_slice == self.step.num_slices() {
            self.next_slice = 0;
            self.stats.decode();
            if self.check.is_none() {
                self.check = Some(Check::record(self, encoder)?);
            }
        }
        Ok(())
    }

    /// One more token a sequence: pages for it, where its row goes, and who attends what.
    fn begin_step(&mut self) -> Result<()> {
        let mut requests = Vec::new();
        for (&sequence, prompt) in self.sequences.iter().zip(PROMPTS) {
            if self.pool.len(sequence)? == FULL_TOKENS {
                self.pool.truncate(sequence, prompt)?;
            }
            requests.push((sequence, if self.pool.len(sequence)? == 0 { prompt } else { 1 }));
        }
        // No sequence was forked, so there are no pages to copy.
        let new = self.pool.append_batch(&requests)?;
        let slots = self.pool.slot_mapping(&new.tokens)?;
        self.append.prepare(&mut self.append_step, &slots)?;
        let params = [self.stats.decodes as u32, slots.len() as u32];
        self.gpu.queue().write_buffer(&self.token_params, 0, bytemuck::bytes_of(&params));

        let (seq_lens, starts) = (self.seq_lens()?, query_start_loc());
        let batch = Batch::new(&seq_lens, &starts);
        self.plan.update(&SPEC, &self.mla.tiling(), &batch, SplitPolicy::FixedTokens(SPLIT_TOKENS))?;
        self.step.set_slice_budget(Some(self.pace.budget()));
        let table = self.block_table()?;
        self.mla.prepare(&mut self.step, (&self.plan, table.page_table()))
    }

    pub fn seq_lens(&self) -> Result<Vec<i32>> {
        self.pool.seq_lens(&self.sequences)
    }

    pub fn block_table(&self) -> Result<wgpu_mla::BlockTable> {
        self.pool.block_table(&self.sequences, 0)
    }
}

/// One query token a sequence.
pub fn query_start_loc() -> Vec<i32> {
    (0..=SEQUENCES as i32).collect()
}

pub fn softmax_scale() -> f32 {
    wgpu_mla::softmax_scale(128, 64, 1.0, 1.0)
}

impl Buffers {
    fn new(device: &wgpu::Device) -> Self {
        let (heads, row) = (u64::from(SPEC.shape.num_heads), u64::from(SPEC.shape.row_elems()));
        let queries = u64::from(SEQUENCES) * heads;
        let storage = |label, bytes| {
            buffer(device, label, bytes, wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC)
        };
        Self {
            rows: storage("host.rows", u64::from(PROMPTS.iter().sum::<u32>()) * row * 4),
            query: storage("host.query", queries * row * 4),
            cache: storage("host.cache", SPEC.kv.num_slots() * row * SPEC.kv.dtype.bytes() as u64),
            out: storage("host.out", queries * u64::from(SPEC.shape.kv_lora_rank) * 4),
            lse: storage("host.lse", queries * 4),
        }
    }
}

impl Stats {
    fn frame(&mut self) {
        let now = Instant::now();
        self.frames += 1;
        self.started.get_or_insert(now);
        blend(&mut self.frame_ms, self.last_frame.replace(now), now);
    }

    fn decode(&mut self) {
        let now = Instant::now();
        self.decodes += 1;
        blend(&mut self.step_ms, self.last_decode.replace(now), now);
    }

    /// Of the last steps.
    pub fn tokens_per_second(&self) -> f64 {
        if self.step_ms > 0.0 { f64::from(SEQUENCES) * 1000.0 / self.step_ms } else { 0.0 }
    }

    /// Seconds from the first frame to the last.
    pub fn seconds(&self) -> f64 {
        let (Some(first), Some(last)) = (self.started, self.last_frame) else { return 0.0 };
        last.duration_since(first).as_secs_f64()
    }
}

/// A running mean of the time between two calls.
fn blend(mean_ms: &mut f64, last: Option<Instant>, now: Instant) {
    if let Some(last) = last {
        let ms = now.duration_since(last).as_secs_f64() * 1000.0;
        *mean_ms = if *mean_ms > 0.0 { 0.9 * *mean_ms + 0.1 * ms } else { ms };
    }
}

pub fn buffer(device: &wgpu::Device, label: &str, size: u64, usage: wgpu::BufferUsages) -> wgpu::Buffer {
    device.create_buffer(&wgpu::BufferDescriptor {
        label: Some(label),
        size,
        usage,
        mapped_at_creation: false,
    })
}

pub fn bind(
    device: &wgpu::Device,
    layout: &wgpu::BindGroupLayout,
    buffers: &[&wgpu::Buffer],
) -> wgpu::BindGroup {
    let resources = buffers.iter().map(|buffer| buffer.as_entire_binding()).zip(0..);
    let entries: Vec<_> =
        resources.map(|(resource, binding)| wgpu::BindGroupEntry { binding, resource }).collect();
    device.create_bind_group(&wgpu::BindGroupDescriptor { label: None, layout, entries: &entries })
}
