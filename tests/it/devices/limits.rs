//! Devices made with less than WebGPU's default limits, each op on them: it runs, or an error names the limit. On wgpu's noop backend,
//! which validates all and computes nothing.

use wgpu_mla::gpu::ops::BatchTables;
use wgpu_mla::gpu::{DeviceKind, Gpu, Setup};
use wgpu_mla::{
    Batch, Caps, CorrectAttnOut, CorrectAttnOutArgs, Device, DeviceBatch, Dtype, Error, GatherBatch,
    GatherRange, HeadProject, HeadProjectArgs, KvAppend, KvAppendArgs, KvCalibrate, KvCalibrateArgs,
    KvCopyPages, KvGather, KvGatherArgs, KvSpec, KvView, LseBase, MergeState, MergeStateArgs, MergeStates,
    MergeStatesArgs, MlaDecode, MlaDecodeArgs, MlaPrefill, MlaPrefillArgs, MlaShape, PageTable, Plan,
    PrefillSequence, ReorgBatch, ReorgChunk, ReorgKvCache, ReorgKvCacheArgs, Result, Rope, RopeAppend,
    RopeAppendArgs, RopeAppendBatch, RopeArgs, RopeLayout, Shares, SplitPolicy, View, WeightOrder,
    WeightView, wgpu,
};

fn device(change: impl FnOnce(&mut wgpu::Limits)) -> Gpu {
    let mut required_limits = wgpu::Limits::default();
    change(&mut required_limits);
    let descriptor = wgpu::DeviceDescriptor { required_limits, ..Default::default() };
    let (device, queue) = wgpu::Device::noop(&descriptor);
    // It says that it is in software; the kernels of a card have workgroup memory too.
    let card = Caps { kind: DeviceKind::Discrete, ..Caps::WEBGPU };
    Gpu::without_adapter(&device, &queue, &Setup { no_better_than: Some(card), ..Setup::default() })
}

const SHAPE: MlaShape = MlaShape { num_heads: 2, kv_lora_rank: 256, qk_rope_head_dim: 32 };
const KV: KvSpec = KvSpec { layout: wgpu_mla::KvLayout::Plain(Dtype::F16), page_size: 16, num_pages: 256 };
/// More than the grids below hold, and no more than the pool.
const MANY: u32 = 4000;

type Run = fn(&Gpu, &[wgpu::Buffer; 8], u32) -> Result<()>;

/// Each op once, of so many tokens.
const OPS: [(&str, Run); 14] = [
    ("mla_decode", decode),
    ("mla_prefill", prefill),
    ("head_project", project),
    ("kv_append", append),
    ("kv_copy_pages", copy),
    ("kv_gather", gather),
    ("kv_calibrate", calibrate),
    ("reorg_kvcache", reorg),
    ("rope", rope),
    ("rope_append", rope_append),
    ("merge_state", merge_state),
    ("merge_states", merge_states),
    ("correct_attn_out", correct),
    ("batch_tables", batch_tables),
];

fn decode(gpu: &Gpu, [q, kv, out, lse, ..]: &[wgpu::Buffer; 8], tokens: u32) -> Result<()> {
    let spec = MlaDecode { shape: SHAPE, kv: KV, query: Dtype::F16, out: Dtype::F32 };
    let mla = gpu.compile(spec)?;
    let (seq_lens, starts) = ([tokens as i32], [0, tokens as i32]);
    let plan = Plan::new(&spec, &mla.tiling(), &Batch::new(&seq_lens, &starts), SplitPolicy::OneSplit)?;
    let pages: Vec<i32> = (0..256).collect();
    let mut step = mla.step(Default::default())?;
    mla.prepare(&mut step, (&plan, PageTable::Dense { block_table: &pages, max_pages: 256 }))?;
    let args = MlaDecodeArgs::dense(&spec, q, kv, out, lse, 0.1);
    mla.run(&step, &mla.bind(&args, tokens)?)
}

fn prefill(gpu: &Gpu, [a, b, c, d, e, out, lse, _]: &[wgpu::Buffer; 8], tokens: u32) -> Result<()> {
    let op = MlaPrefill {
        num_heads: 2,
        qk_nope_head_dim: 64,
        qk_rope_head_dim: 32,
        v_head_dim: 64,
        dtype: Dtype::F16,
        out: Dtype::F16,
    };
    let args = MlaPrefillArgs {
        q_nope: View::dense(a, 2, 64),
        q_pe: View::dense(b, 2, 32),
        k_nope: View::dense(c, 2, 64),
        k_pe: View { head_stride: 0, ..View::dense(d, 1, 32) },
        v: View::dense(e, 2, 64),
        out: View::dense(out, 2, 64),
        lse: View::dense(lse, 2, 1),
        softmax_scale: 0.1,
        v_scale: 1.0,
    };
    gpu.once(op, &[PrefillSequence::causal(0, tokens, 0, tokens)], &args)
}

fn project(gpu: &Gpu, [x, w, y, ..]: &[wgpu::Buffer; 8], tokens: u32) -> Result<()> {
    let f16 = Dtype::F16;
    let (num_heads, k, n, order) = (2, 64, 64, WeightOrder::Kn);
    let op =
        HeadProject { input: f16, weight: f16.into(), output: f16, num_heads, k, n, order, guard: false };
    let weight = WeightView { buffer: w, offset: 0, head_stride: 64 * 64, row_stride: 64, scales: None };
    let args = HeadProjectArgs {
        x: View::dense(x, 2, 64),
        weight,
        y: View::dense(y, 2, 64),
        scale: 1.0,
        out_scale: 1.0,
        saturates: false,
        guard: None,
    };
    gpu.once(op, 0..tokens, &args)
}

fn append_args([kv_c, k_pe, kv, ..]: &[wgpu::Buffer; 8]) -> KvAppendArgs<&wgpu::Buffer> {
    let spec = MlaDecode { shape: SHAPE, kv: KV, query: Dtype::F16, out: Dtype::F32 };
    KvAppendArgs {
        kv_c: View::dense(kv_c, 1, 256),
        k_pe: View::dense(k_pe, 1, 32),
        kv: KvView::dense(kv, &spec),
        k_scale: 1.0,
        guard: None,
    }
}

const APPEND: KvAppend = KvAppend { shape: SHAPE, kv: KV, input: Dtype::F16, guard: false };

fn append(gpu: &Gpu, buffers: &[wgpu::Buffer; 8], tokens: u32) -> Result<()> {
    let slots: Vec<_> = (0..i64::from(tokens)).collect();
    gpu.once(APPEND, &slots, &append_args(buffers))
}

fn copy(gpu: &Gpu, buffers: &[wgpu::Buffer; 8], tokens: u32) -> Result<()> {
    let pairs: Vec<_> = (0..tokens.min(128)).map(|page| (page, page + 128)).collect();
    gpu.once(KvCopyPages { shape: SHAPE, kv: KV }, &pairs, &append_args(buffers).kv)
}

fn gather(gpu: &Gpu, buffers: &[wgpu::Buffer; 8], tokens: u32) -> Result<()> {
    let pages: Vec<i32> = (0..256).collect();
    let batch = GatherBatch {
        pages: PageTable::Dense { block_table: &pages, max_pages: 256 },
        seq_lens: &[tokens as i32],
        ranges: &[GatherRange { sequence: 0, begin: 0, tokens, out_row: 0 }],
    };
    let args =
        KvGatherArgs { kv: append_args(buffers).kv, k_scale: 1.0, out: View::dense(&buffers[5], 1, 288) };
    gpu.once(KvGather { shape: SHAPE, kv: KV, output: Dtype::F16 }, batch, &args)
}

fn calibrate(gpu: &Gpu, buffers: &[wgpu::Buffer; 8], tokens: u32) -> Result<()> {
    let KvAppendArgs { kv_c, k_pe, .. } = append_args(buffers);
    let args = KvCalibrateArgs { kv_c, k_pe, k_scale: 1.0, stats: &buffers[5] };
    gpu.once(KvCalibrate { shape: SHAPE, input: Dtype::F16 }, 0..tokens, &args)
}

fn reorg(gpu: &Gpu, [gathered, out, ..]: &[wgpu::Buffer; 8], tokens: u32) -> Result<()> {
    let shares = Shares::even(2, 1)?;
    let chunks = [ReorgChunk { begin: 0, tokens, local_row: 0, out_row: 0 }];
    let args = ReorgKvCacheArgs {
        gathered: View::dense(gathered, 1, 288),
        rank_stride: 2000 * 288,
        out: View::dense(out, 1, 288),
    };
    let op = ReorgKvCache { dtype: Dtype::F16, row_elems: 288 };
    gpu.once(op, ReorgBatch { shares: &shares, chunks: &chunks }, &args)
}

fn rope(gpu: &Gpu, [x, y, positions, cos_sin, ..]: &[wgpu::Buffer; 8], tokens: u32) -> Result<()> {
    let op = Rope { dtype: Dtype::F16, num_heads: 2, rope_dim: 32, layout: RopeLayout::Interleaved };
    let (x, y) = (View::dense(x, 2, 32), View::dense(y, 2, 32));
    gpu.once(op, 0..tokens, &RopeArgs { x, y, positions, cos_sin, max_position: 4096, scale: 1.0 })
}

fn rope_append(gpu: &Gpu, buffers: &[wgpu::Buffer; 8], tokens: u32) -> Result<()> {
    let [.., q, out, positions, cos_sin] = buffers;
    let op = RopeAppend {
        append: APPEND,
        query: Dtype::F16,
        query_out: Dtype::F16,
        num_heads: 2,
        layout: RopeLayout::Interleaved,
    };
    let args = RopeAppendArgs {
        q_pe: View::dense(q, 2, 32),
        q_pe_out: View::dense(out, 2, 32),
        layer: append_args(buffers),
        positions,
        cos_sin,
        max_position: 4096,
        q_pe_scale: 1.0,
        q_scale: 1.0,
    };
    let slots: Vec<_> = (0..i64::from(tokens)).collect();
    gpu.once(op, RopeAppendBatch::slots(&slots), &args)
}

const F32_256: (Dtype, u32) = (Dtype::F32, 256);

fn merge_state(gpu: &Gpu, [a, b, c, d, out, ..]: &[wgpu::Buffer; 8], tokens: u32) -> Result<()> {
    let args = MergeStateArgs {
        prefix_output: View::dense(a, 2, 256),
        prefix_lse: View::dense(b, 2, 1),
        suffix_output: View::dense(c, 2, 256),
        suffix_lse: View::dense(d, 2, 1),
        output: View::dense(out, 2, 256),
        output_lse: None,
        num_tokens: tokens,
        num_heads: 2,
        output_scale: 1.0,
    };
    gpu.once(MergeState { dtype: F32_256.0, head_size: F32_256.1 }, (), &args)
}

fn merge_states(gpu: &Gpu, [states, lse, output, ..]: &[wgpu::Buffer; 8], tokens: u32) -> Result<()> {
    let args = MergeStatesArgs {
        states: View::dense(states, 2, 256),
        set_stride: u64::from(tokens) * 512,
        lse: View::dense(lse, 2, 1),
        lse_set_stride: u64::from(tokens) * 2,
        output: View::dense(output, 2, 256),
        output_lse: None,
        lse_base: LseBase::E,
        num_heads: 2,
        output_scale: 1.0,
    };
    gpu.once(MergeStates { dtype: F32_256.0, head_size: F32_256.1 }, (0..tokens, 2), &args)
}

fn correct(gpu: &Gpu, [out, lses, output, ..]: &[wgpu::Buffer; 8], tokens: u32) -> Result<()> {
    let args = CorrectAttnOutArgs {
        out: View::dense(out, 2, 256),
        lses: View::dense(lses, 2, 1),
        lse_rank_stride: u64::from(tokens) * 2,
        output: View::dense(output, 2, 256),
        output_lse: None,
        lse_base: LseBase::E,
        world: 2,
        rank: 1,
        num_heads: 2,
    };
    gpu.once(CorrectAttnOut { dtype: F32_256.0, head_size: F32_256.1 }, 0..tokens, &args)
}

fn batch_tables(
    gpu: &Gpu,
    [seq_lens, query_start_loc, block_table, ..]: &[wgpu::Buffer; 8],
    tokens: u32,
) -> Result<()> {
    let (tables, append) = (BatchTables::new(gpu, KV)?, gpu.compile(APPEND)?);
    let slots = tables.slots(&append, tokens * 2)?;
    let batch =
        tables.bind(&DeviceBatch { seq_lens, query_start_loc, block_table, batch: 1, max_pages: 256 })?;
    gpu.submit(|mut pass| tables.record_slots(&mut pass, &slots, &batch))
}

/// Runs every op and returns what became of each: no error may reach the device's own handler.
fn run_all(gpu: &Gpu, tokens: u32) -> Vec<(&'static str, Result<()>)> {
    // The cache takes 2.3 MB; all else is of the tokens.
    let bytes = if tokens == 1 { 4 << 20 } else { 32 << 20 };
    let buffers = std::array::from_fn(|_| gpu.buffer(bytes).expect("a buffer"));
    let run = |(name, run): (&'static str, Run)| {
        let scope = gpu.device().push_error_scope(wgpu::ErrorFilter::Validation);
        let result = run(gpu, &buffers, tokens);
        let error = pollster::block_on(scope.pop()).map(|error| error.to_string());
        assert_eq!(error, None, "{name} of {tokens} tokens");
        (name, result)
    };
    OPS.into_iter().map(run).collect()
}

fn every_op_runs_within_webgpus_defaults() {
    for tokens in [1, MANY] {
        for (name, result) in run_all(&device(|_| ()), tokens) {
            assert_eq!(result, Ok(()), "{name} of {tokens} tokens");
        }
    }
    // Alignments are limits too, of which less is better.
    let coarse = device(|limits| {
        limits.min_storage_buffer_offset_alignment = 1024;
        limits.min_uniform_buffer_offset_alignment = 1024;
    });
    for (name, result) in run_all(&coarse, MANY) {
        assert_eq!(result, Ok(()), "{name} with alignments of 1024");
    }
}

/// 16 workgroups in two dimensions.
fn a_grid_that_is_too_small() {
    let gpu = device(|limits| limits.max_compute_workgroups_per_dimension = 4);
    for (name, result) in run_all(&gpu, 1) {
        assert_eq!(result, Ok(()), "{name} of a token");
    }
    for (name, result) in run_all(&gpu, MANY) {
        let error = result.expect_err(name);
        assert!(matches!(error, Error::Limit { .. }), "{name}: {error}");
        assert!(error.to_string().contains("max_compute_workgroups_per_dimension"), "{name}: {error}");
    }
}

/// Each limit of what a pipeline is made and bound with, and how many ops it keeps from running; decodes, prefills and projections have
/// variants, and say which of their needs is not met.
fn a_limit_that_is_too_low_is_named() {
    type Change = fn(&mut wgpu::Limits);
    let limits: [(&str, Change, usize); 12] = [
        ("max_bind_groups", |limits| limits.max_bind_groups = 1, 13),
        ("max_bindings_per_bind_group", |limits| limits.max_bindings_per_bind_group = 1, 14),
        (
            "max_uniform_buffers_per_shader_stage",
            |limits| limits.max_uniform_buffers_per_shader_stage = 0,
            14,
        ),
        (
            "max_dynamic_uniform_buffers_per_pipeline_layout",
            |limits| limits.max_dynamic_uniform_buffers_per_pipeline_layout = 0,
            1,
        ),
        (
            "max_storage_buffers_per_shader_stage",
            |limits| limits.max_storage_buffers_per_shader_stage = 1,
            12,
        ),
        (
            "max_buffers_and_acceleration_structures_per_shader_stage",
            |limits| limits.max_buffers_and_acceleration_structures_per_shader_stage = 2,
            14,
        ),
        ("max_uniform_buffer_binding_size", |limits| limits.max_uniform_buffer_binding_size = 8, 14),
        ("max_compute_workgroup_size_x", |limits| limits.max_compute_workgroup_size_x = 4, 12),
        (
            "max_compute_invocations_per_workgroup",
            |limits| limits.max_compute_invocations_per_workgroup = 4,
            12,
        ),
        ("max_compute_workgroup_size_y", |limits| limits.max_compute_workgroup_size_y = 0, 14),
        ("max_compute_workgroup_size_z", |limits| limits.max_compute_workgroup_size_z = 0, 14),
        ("max_compute_workgroup_storage_size", |limits| limits.max_compute_workgroup_storage_size = 64, 2),
    ];
    for (limit, change, refused) in limits {
        let mut named = 0;
        for (name, result) in run_all(&device(change), 1) {
            match result {
                Ok(()) | Err(Error::NoVariant { .. }) => {}
                Err(Error::Limit { what, .. }) if what == limit => named += 1,
                Err(error) => panic!("{name} with a low {limit}: {error:?}"),
            }
        }
        assert_eq!(named, refused, "ops that a low {limit} keeps from running");
    }
}

/// Buffers of this crate's own, and bindings that a power of two would exceed.
fn small_buffers_and_bindings() {
    let gpu = device(|limits| limits.max_buffer_size = 4096);
    assert!(matches!(gpu.buffer(8192), Err(Error::Limit { what: "max_buffer_size", .. })));
    let decode = gpu.compile(MlaDecode { shape: SHAPE, kv: KV, query: Dtype::F16, out: Dtype::F32 });
    let step = decode.and_then(|mla| mla.step(Default::default()));
    assert!(matches!(step, Err(Error::Limit { what: "max_buffer_size", .. })), "{step:?}");

    let gpu = device(|limits| limits.max_storage_buffer_binding_size = 3000);
    let append = gpu.compile(APPEND).expect("compiles");
    let mut step = append.step(0).expect("a step");
    let slots: Vec<_> = (0..800).collect();
    // 600 words and their count, for which a power of two is too large.
    append.prepare(&mut step, &slots[..600]).expect("2404 of 3000 bytes");
    let refused = append.prepare(&mut step, &slots);
    assert!(matches!(refused, Err(Error::Limit { need: 3204, limit: 3000, .. })), "{refused:?}");
}

/// A host that compiles ever new specs.
fn pipelines_that_nothing_holds_are_dropped() {
    let gpu = device(|_| ());
    let compile = |head_size| gpu.compile(MergeState { dtype: Dtype::F32, head_size }).expect("compiles");
    let pairs = 20;
    for i in 1..=pairs {
        drop(compile(8 * i));
    }
    let held = compile(8);
    // By units and by words.
    assert_eq!(gpu.drop_unused_pipelines(), 2 * (pairs as usize - 1));
    assert_eq!(gpu.drop_unused_pipelines(), 0);

    let buffers: [_; 5] = std::array::from_fn(|_| gpu.buffer(4096).expect("a buffer"));
    let [a, b, c, d, out] = &buffers;
    let args = MergeStateArgs {
        prefix_output: View::dense(a, 2, 8),
        prefix_lse: View::dense(b, 2, 1),
        suffix_output: View::dense(c, 2, 8),
        suffix_lse: View::dense(d, 2, 1),
        output: View::dense(out, 2, 8),
        output_lse: None,
        num_tokens: 1,
        num_heads: 2,
        output_scale: 1.0,
    };
    let binding = held.bind(&args, ()).expect("bound");
    held.run(&held.step(()).expect("a step"), &binding).expect("runs");
    drop(held);
    // The binding holds the one that it runs.
    assert_eq!(gpu.drop_unused_pipelines(), 1);
    drop(binding);
    assert_eq!(gpu.drop_unused_pipelines(), 1);
    // What was dropped is compiled again.
    let again = compile(8);
    let binding = again.bind(&args, ()).expect("bound");
    again.run(&again.step(()).expect("a step"), &binding).expect("runs");
}

crate::tests![
    every_op_runs_within_webgpus_defaults,
    a_grid_that_is_too_small,
    a_limit_that_is_too_low_is_named,
    small_buffers_and_bindings,
    pipelines_that_nothing_holds_are_dropped,
];
