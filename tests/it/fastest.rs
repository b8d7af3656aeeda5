//! `AnyBackend::best` by measurement: where CUDA and wgpu are on the same card, what it picks is not slower than the other.
//!
//! Run it alone, `it fastest:: --test-threads 1`: other tests on the card disturb its times.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use mla_support::{Ignored, Outcome, cuda, gpu, ignored_unless_required};
use wgpu_mla::any::{AnyBackend, Chosen};
use wgpu_mla::cuda::Cuda;
use wgpu_mla::gpu::Gpu;
use wgpu_mla::{
    Backend, Batch, Binding, Capacity, Compiled, Device, DeviceKind, Dtype, Kernel, KvSpec, KvView,
    LayerBatch, LayerCapacity, LayerOptions, MlaDecode, MlaDecodeArgs, MlaLayer, MlaLayerArgs, MlaPrefill,
    MlaPrefillArgs, MlaShape, Op, PageTable, Plan, PrefillSequence, RopeFrequencies, RopeLayout, SplitPolicy,
    Step, View, wgpu,
};

/// How much slower the pick may be. Medians by turns on one card differ by up to 1.3 % (benches/results/h200-cuda9-2026-11-24.md); the rest
/// is for what a submit costs beside [`LEAST`].
const MARGIN: f64 = 1.05;
/// Seconds of calls in a submit, so that the submit itself does not count.
const LEAST: f64 = 5e-3;
const TURNS: usize = 7;
/// A row that fails is measured again: another program may have had the card.
const TRIES: usize = 3;
const PAGE_SIZE: u32 = 64;
/// One test measures at a time.
static CARD: Mutex<()> = Mutex::new(());
const HEAD_DIM: u32 = 128;

/// What is timed: an op of a model with so many heads.
#[derive(Debug, Clone, Copy)]
enum What {
    /// Sequences, and tokens of each.
    Decode(u32, u32),
    /// Tokens of a causal prompt.
    Prefill(u32),
    /// A layer's step of one new token a sequence: sequences, and tokens of each.
    Layer(u32, u32),
}

/// An op, and the dtypes of queries and cache.
#[derive(Debug, Clone, Copy)]
struct Row {
    what: What,
    num_heads: u32,
    query: Dtype,
    kv: Dtype,
}

/// Seconds a call of something that was bound, for a number of calls in one submit.
type Timed = Box<dyn Fn(usize) -> f64>;

/// A backend that runs recorded calls, timed by the host from the submit until they are done.
trait Times: Backend + 'static {
    fn seconds(&self, record: &dyn Fn(&mut Self::Recorder<'_>)) -> f64;
}

impl Times for Cuda {
    fn seconds(&self, record: &dyn Fn(&mut ())) -> f64 {
        let graph = self
            .capture(|| {
                record(&mut ());
                Ok(())
            })
            .expect("captured");
        self.stream().synchronize().expect("done");
        let begin = Instant::now();
        graph.launch().expect("launched");
        self.stream().synchronize().expect("done");
        begin.elapsed().as_secs_f64()
    }
}

impl Times for Gpu {
    fn seconds(&self, record: &dyn Fn(&mut wgpu::ComputePass<'_>)) -> f64 {
        let mut encoder = self.device().create_command_encoder(&Default::default());
        record(&mut encoder.begin_compute_pass(&Default::default()));
        let commands = encoder.finish();
        let begin = Instant::now();
        self.queue().submit([commands]);
        self.device().poll(wgpu::PollType::wait_indefinitely()).expect("done");
        begin.elapsed().as_secs_f64()
    }
}

impl Row {
    fn mla(&self) -> MlaDecode {
        let tokens = match self.what {
            What::Decode(batch, len) | What::Layer(batch, len) => batch * len,
            What::Prefill(tokens) => tokens,
        };
        MlaDecode {
            shape: MlaShape { num_heads: self.num_heads, kv_lora_rank: 512, qk_rope_head_dim: 64 },
            kv: KvSpec {
                layout: self.kv.into(),
                page_size: PAGE_SIZE,
                num_pages: tokens.div_ceil(PAGE_SIZE),
            },
            query: self.query,
            out: self.query,
        }
    }

    fn on<D: Times>(&self, device: &D) -> Timed {
        match self.what {
            What::Decode(batch, len) => self.decode(device, batch, len),
            What::Prefill(tokens) => self.prefill(device, tokens),
            What::Layer(batch, len) => self.layer(device, batch, len),
        }
    }

    fn decode<D: Times>(&self, device: &D, batch: u32, len: u32) -> Timed {
        let (spec, heads) = (self.mla(), u64::from(self.num_heads));
        let mla = device.compile(spec).expect("a decode");
        let Lists { lens, starts, table, .. } = Lists::new(batch, len);
        let plan = Plan::new(&spec, &mla.tiling(), &Batch::new(&lens, &starts), SplitPolicy::Auto);
        let mut step = mla.step(Capacity::default()).expect("a step");
        let pages = PageTable::Dense { block_table: &table, max_pages: len.div_ceil(PAGE_SIZE) };
        mla.prepare(&mut step, (&plan.expect("a plan"), pages)).expect("prepared");
        let rows = u64::from(batch) * heads;
        let q = filled(device, self.query, rows * 576);
        let kv = filled(device, self.kv, spec.kv.num_slots() * 576);
        let out = filled(device, self.query, rows * 512);
        let lse = filled(device, Dtype::F32, rows);
        let args = MlaDecodeArgs::dense(&spec, &q, &kv, &out, &lse, 0.1);
        let binding = mla.bind(&args, batch).expect("bound");
        calls(mla, step, binding)
    }

    fn prefill<D: Times>(&self, device: &D, tokens: u32) -> Timed {
        let (heads, rope) = (self.num_heads, 64);
        let op = device.compile(MlaPrefill {
            num_heads: heads,
            qk_nope_head_dim: HEAD_DIM,
            qk_rope_head_dim: rope,
            v_head_dim: HEAD_DIM,
            dtype: self.query,
            out: self.query,
        });
        let op = op.expect("a prefill");
        let rows = u64::from(tokens) * u64::from(heads);
        let [q_nope, k_nope, v, out] =
            [HEAD_DIM; 4].map(|dim| filled(device, self.query, rows * u64::from(dim)));
        let [q_pe, k_pe] = [rope; 2].map(|dim| filled(device, self.query, rows * u64::from(dim)));
        let lse = filled(device, Dtype::F32, rows);
        let mut step = op.step(0).expect("a step");
        op.prepare(&mut step, &[PrefillSequence::causal(0, tokens, 0, tokens)]).expect("prepared");
        let args = MlaPrefillArgs {
            q_nope: View::dense(&q_nope, heads, HEAD_DIM),
            q_pe: View::dense(&q_pe, heads, rope),
            k_nope: View::dense(&k_nope, heads, HEAD_DIM),
            k_pe: View { head_stride: 0, ..View::dense(&k_pe, 1, rope) },
            v: View::dense(&v, heads, HEAD_DIM),
            out: View::dense(&out, heads, HEAD_DIM),
            lse: View::dense(&lse, heads, 1),
            softmax_scale: 0.1,
            v_scale: 1.0,
        };
        let binding = op.bind(&args, step.used()).expect("bound");
        calls(op, step, binding)
    }

    fn layer<D: Times>(&self, device: &D, batch: u32, len: u32) -> Timed {
        let (mla, heads, rope) = (self.mla(), self.num_heads, 64);
        // Weights are of 16 bits, as models have them.
        let weight = if self.query == Dtype::F32 { Dtype::Bf16 } else { self.query };
        let spec = MlaLayer {
            shape: mla.shape,
            qk_nope_head_dim: HEAD_DIM,
            v_head_dim: HEAD_DIM,
            kv: mla.kv,
            dtype: self.query,
            query: self.query,
            weight,
            out: self.query,
            rope: RopeLayout::Interleaved,
            decode_threshold: 1,
            workspace_bytes: 0,
        };
        let spec = MlaLayer { workspace_bytes: u64::from(PAGE_SIZE) * spec.workspace_row_bytes(), ..spec };
        let capacity = LayerCapacity { tokens: batch, decode_tokens: batch, ..LayerCapacity::default() };
        let op = device.compile_with(spec, &LayerOptions { capacity, ..LayerOptions::default() });
        let op = op.expect("a layer");
        let Lists { lens, starts, table, slots } = Lists::new(batch, len);
        let step_batch = LayerBatch {
            seq_lens: &lens,
            query_start_loc: &starts,
            slot_mapping: &slots,
            pages: PageTable::Dense { block_table: &table, max_pages: len.div_ceil(PAGE_SIZE) },
            shared_prefixes: &[],
            expanded: &[],
        };
        let mut step = op.step(Capacity::default()).expect("a step");
        op.prepare(&mut step, (&step_batch, SplitPolicy::Auto)).expect("prepared");
        let of = |dtype, elems: u32| filled(device, dtype, u64::from(batch) * u64::from(elems));
        let q = of(self.query, heads * (HEAD_DIM + rope));
        let (kv_c, k_pe) = (of(self.query, 512), of(self.query, rope));
        let kv = filled(device, self.kv, mla.kv.num_slots() * 576);
        let kv_b_proj = filled(device, weight, u64::from(heads * 2 * HEAD_DIM) * 512);
        let out = of(self.query, heads * HEAD_DIM);
        let angles = RopeFrequencies::plain(rope, 1e4).expect("frequencies").cos_sin(len).expect("a table");
        let cos_sin = device.buffer(angles.len() as u64 * 4).expect("memory");
        device.upload(&cos_sin, 0, bytemuck::cast_slice(&angles)).expect("uploaded");
        let q_nope = View::dense(&q, heads, HEAD_DIM + rope);
        let args = MlaLayerArgs {
            q_nope,
            q_pe: View { offset: HEAD_DIM.into(), ..q_nope },
            kv_c: View::dense(&kv_c, 1, 512),
            k_pe: View::dense(&k_pe, 1, rope),
            kv: KvView::dense(&kv, &mla),
            kv_b_proj: &kv_b_proj,
            kv_b_scales: None,
            cos_sin: &cos_sin,
            max_position: len,
            out: View::dense(&out, heads, HEAD_DIM),
            softmax_scale: 0.1,
            q_scale: 1.0,
            k_scale: 1.0,
            out_scale: 1.0,
            expanded: None,
            selection: wgpu_mla::Selection::All,
            guard: None,
        };
        let binding = op.bind(&args, step.used()).expect("bound");
        calls(op, step, binding)
    }

    /// Seconds a call of what `best` picks, over those of the other: medians by turns.
    fn ratio(&self, cuda: &Timed, gpu: &Timed, cuda_is_picked: bool) -> f64 {
        let count = |timed: &Timed| {
            timed(2);
            ((LEAST / timed(8)).ceil() as usize).clamp(4, 512)
        };
        let counts = [count(cuda), count(gpu)];
        let mut times = [const { Vec::new() }; 2];
        for _ in 0..TURNS {
            times[0].push(cuda(counts[0]));
            times[1].push(gpu(counts[1]));
        }
        let [cuda, gpu] = times.map(|mut times| {
            times.sort_by(f64::total_cmp);
            times[TURNS / 2]
        });
        println!("{self:?}: CUDA {:.1} us, wgpu {:.1} us", cuda * 1e6, gpu * 1e6);
        if cuda_is_picked { cuda / gpu } else { gpu / cuda }
    }
}

/// A batch of one new token a sequence, which is its last.
struct Lists {
    lens: Vec<i32>,
    starts: Vec<i32>,
    table: Vec<i32>,
    slots: Vec<i64>,
}

impl Lists {
    fn new(batch: u32, len: u32) -> Self {
        let max_pages = len.div_ceil(PAGE_SIZE);
        Self {
            lens: vec![len as i32; batch as usize],
            starts: (0..=batch as i32).collect(),
            table: (0..(batch * max_pages) as i32).collect(),
            slots: (0..batch).map(|i| i64::from(i * max_pages * PAGE_SIZE + len - 1)).collect(),
        }
    }
}

/// An array of small numbers.
fn filled<D: Device>(device: &D, dtype: Dtype, elems: u64) -> D::Buffer {
    let cycle: Vec<f32> = (0..10_007u32).map(|i| (i * 7919 % 10_007) as f32 / 20_014.0 - 0.25).collect();
    let bytes = (elems * dtype.bytes() as u64).next_multiple_of(16) as usize;
    let cycle = dtype.encode_all(&cycle);
    let mut all = cycle.repeat(bytes / cycle.len() + 1);
    all.truncate(bytes);
    let buffer = device.buffer(bytes as u64).expect("memory");
    device.upload(&buffer, 0, &all).expect("uploaded");
    buffer
}

fn calls<O: Op, D: Times + Kernel<O>>(op: Compiled<O, D>, step: Step<O, D>, binding: Binding<O, D>) -> Timed {
    Box::new(move |calls| {
        let record = |recorder: &mut D::Recorder<'_>| {
            (0..calls).for_each(|_| op.record_on(recorder, &step, &binding).expect("recorded"));
        };
        op.device().seconds(&record) / calls as f64
    })
}

/// Both backends, of one card.
fn both() -> Result<(Cuda, Gpu), Ignored> {
    let (cuda, gpu) = (cuda()?, gpu()?);
    let (card, adapter) = (cuda.stream().context().name().unwrap_or_default(), gpu.device().adapter_info());
    if adapter.name == card && gpu.caps().kind == DeviceKind::Discrete {
        return Ok((cuda, gpu));
    }
    let why = format!("wgpu's adapter is {}, CUDA's card {card}: there is nothing to compare", adapter.name);
    match std::env::var("MLA_REQUIRE_GPU").as_deref() {
        Ok("1") => Err(ignored_unless_required("MLA_REQUIRE_CUDA", why)),
        _ => Err(Ignored(why)),
    }
}

/// Measures rows; gives those whose pick is slower, and the geometric mean of all ratios.
fn measured(rows: &[Row]) -> Result<(Vec<String>, f64), Ignored> {
    let _alone = CARD.lock().unwrap_or_else(PoisonError::into_inner);
    let (cuda, gpu) = both()?;
    let (mut slower, mut logs) = (Vec::new(), 0.0);
    for row in rows {
        let best = AnyBackend::best(&row.mla());
        let cuda_is_picked = matches!(best.chosen(), Chosen::Cuda(_));
        assert!(cuda_is_picked || matches!(best.chosen(), Chosen::Wgpu(_)), "{}", best.why());
        let (on_cuda, on_gpu) = (row.on(&cuda), row.on(&gpu));
        let mut least = f64::INFINITY;
        for _ in 0..TRIES {
            least = least.min(row.ratio(&on_cuda, &on_gpu, cuda_is_picked));
            if least <= MARGIN {
                break;
            }
        }
        logs += least.ln();
        if least > MARGIN {
            slower.push(format!("{row:?}: {least:.2} of the other's time ({})", best.why()));
        }
    }
    Ok((slower, (logs / rows.len() as f64).exp()))
}

fn what_is_picked_for_16_bit_queries_is_not_slower() -> Outcome {
    let row = |what, num_heads, query, kv| Row { what, num_heads, query, kv };
    let (bf16, f16, e4m3) = (Dtype::Bf16, Dtype::F16, Dtype::E4m3);
    let (slower, _) = measured(&[
        row(What::Decode(64, 4096), 16, bf16, bf16),
        row(What::Decode(1, 4096), 16, bf16, bf16),
        row(What::Decode(64, 4096), 16, f16, f16),
        row(What::Decode(64, 4096), 16, bf16, e4m3),
        row(What::Decode(16, 4096), 128, bf16, bf16),
        row(What::Prefill(2048), 16, bf16, bf16),
        row(What::Prefill(2048), 16, f16, f16),
        row(What::Layer(64, 4096), 16, bf16, bf16),
        row(What::Layer(1, 4096), 16, bf16, bf16),
        row(What::Layer(16, 4096), 128, bf16, e4m3),
    ])?;
    assert!(slower.is_empty(), "the pick is slower: {slower:#?}");
    Ok(())
}

/// With f32 each is faster somewhere, and the pick knows no batch: their mean decides. See `AnyBackend::best`.
fn what_is_picked_for_f32_is_not_slower_on_the_whole() -> Outcome {
    let row = |what, num_heads, kv| Row { what, num_heads, query: Dtype::F32, kv };
    for kv in [Dtype::Bf16, Dtype::F32] {
        let (slower, mean) = measured(&[
            row(What::Decode(64, 4096), 16, kv),
            row(What::Decode(1, 4096), 16, kv),
            row(What::Decode(4, 4096), 128, kv),
            row(What::Prefill(1024), 16, kv),
            row(What::Layer(64, 4096), 16, kv),
        ])?;
        println!("f32 over {kv}: {mean:.2} of the other's time, the mean; {slower:#?}");
        assert!(mean <= MARGIN, "f32 over {kv}: the pick takes {mean:.2} of the other's time: {slower:#?}");
    }
    Ok(())
}

crate::tests![
    what_is_picked_for_16_bit_queries_is_not_slower,
    what_is_picked_for_f32_is_not_slower_on_the_whole,
];
