//! The small ops on wgpu, on a device with WebGPU's default limits and no features.
#![cfg(feature = "wgpu")]

use std::sync::OnceLock;

use half::{bf16, f16};
use wgpu_mla::gpu::Pipelines;
use wgpu_mla::gpu::ops::{AppendStep, CopySpec, CopyStep, KvAppend, KvCopyPages, MergeAttnStates};
use wgpu_mla::{
    AppendLayer, AppendSpec, Dtype, Error, KvSpec, KvView, MergeStates, MergeStatesSpec, MlaShape, View,
    e4m3_decode, e4m3_encode,
};

// ---------------------------------------------------------------------------------------------------------------
// A device, and bytes in and out

struct Gpu {
    device: wgpu::Device,
    queue: wgpu::Queue,
}

fn open(limits: wgpu::Limits) -> Option<Gpu> {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
    let adapter = match pollster::block_on(instance.request_adapter(&Default::default())) {
        Ok(adapter) => adapter,
        Err(e) if std::env::var("MLA_REQUIRE_GPU").as_deref() == Ok("1") => panic!("no adapter: {e}"),
        Err(e) => {
            eprintln!("skipped: no adapter: {e}");
            return None;
        }
    };
    println!("on {}", adapter.get_info().name);
    let descriptor = wgpu::DeviceDescriptor { required_limits: limits, ..Default::default() };
    let (device, queue) = pollster::block_on(adapter.request_device(&descriptor)).expect("a device");
    Some(Gpu { device, queue })
}

fn gpu() -> Option<&'static Gpu> {
    static GPU: OnceLock<Option<Gpu>> = OnceLock::new();
    GPU.get_or_init(|| open(wgpu::Limits::default())).as_ref()
}

impl Gpu {
    fn buffer(&self, bytes: &[u8]) -> wgpu::Buffer {
        self.buffer_with(bytes, wgpu::BufferUsages::STORAGE)
    }

    fn buffer_with(&self, bytes: &[u8], usage: wgpu::BufferUsages) -> wgpu::Buffer {
        let mut bytes = bytes.to_vec();
        bytes.resize(bytes.len().next_multiple_of(4).max(4), 0);
        let buffer = self.device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: bytes.len() as u64,
            usage: usage | wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        });
        self.queue.write_buffer(&buffer, 0, &bytes);
        buffer
    }

    fn submit(&self, record: impl FnOnce(&mut wgpu::CommandEncoder)) {
        let mut encoder = self.device.create_command_encoder(&Default::default());
        record(&mut encoder);
        self.queue.submit([encoder.finish()]);
    }

    fn read(&self, buffer: &wgpu::Buffer) -> Vec<u8> {
        let staging = self.device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: buffer.size(),
            usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        self.submit(|encoder| encoder.copy_buffer_to_buffer(buffer, 0, &staging, 0, buffer.size()));
        staging.map_async(wgpu::MapMode::Read, .., |result| result.expect("mapped"));
        self.device.poll(wgpu::PollType::wait_indefinitely()).expect("polled");
        staging.get_mapped_range(..).expect("mapped").to_vec()
    }
}

/// A fixed pseudo-random sequence.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let x = self.0 ^ (self.0 >> 29);
        (x.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as u32
    }

    /// In -1..1.
    fn unit(&mut self) -> f32 {
        self.bits() as f32 / u32::MAX as f32 * 2.0 - 1.0
    }
}

/// f32 patterns that are hard to convert: every f16 and bf16 value, what lies halfway between two f16 or e4m3 values,
/// the neighbours of those, infinities, NaNs and subnormals.
fn hard_patterns() -> Vec<u32> {
    let mut all = Vec::new();
    let mut near = |bits: u32| all.extend([bits.wrapping_sub(1), bits, bits.wrapping_add(1)]);
    for code in 0..=u16::MAX {
        near(f16::from_bits(code).to_f32().to_bits());
        near(u32::from(code) << 16);
        near((u32::from(code) << 16) | 0x8000);
        let (low, high) = (f16::from_bits(code).to_f32(), f16::from_bits(code.wrapping_add(1)).to_f32());
        near(f32::midpoint(low, high).to_bits());
    }
    for code in 0..0x7Eu8 {
        let middle = f32::midpoint(e4m3_decode(code), e4m3_decode(code + 1));
        near(middle.to_bits());
        near((-middle).to_bits());
    }
    for x in [448f32, 464.0, 480.0, 65504.0, 65520.0, 65536.0, f32::MAX, f32::MIN_POSITIVE] {
        near(x.to_bits());
        near((-x).to_bits());
    }
    all
}

// ---------------------------------------------------------------------------------------------------------------
// Rounding

const ROUND_TEST: &str = "
@group(0) @binding(0) var<storage, read> x: array<u32>; // [n] f32 bits, or a 16-bit code
@group(0) @binding(1) var<storage, read_write> y: array<vec4<u32>>; // [n] f16 and bf16, e4m3, f32 of f16, f32 of bf16

@compute @workgroup_size(64)
fn round_test(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    for (var i = id.x; i < arrayLength(&x); i += groups.x * 64u) {
        let b = x[i];
        y[i] = vec4<u32>(f16_bits(b) | (bf16_bits(b) << 16u), e4m3_bits(b), f32_bits_of_f16(b & 0xFFFFu), f32_bits_of_bf16(b & 0xFFFFu));
    }
}";

#[test]
fn every_rounding_is_that_of_the_host() {
    let Some(gpu) = gpu() else { return };
    let mut patterns = hard_patterns();
    patterns.extend(0..=0xFFFF); // every 16-bit code, for the decoders
    let mut random = Random(1);
    patterns.extend((0..1 << 20).map(|_| random.bits()));

    let text = [include_str!("../shaders/lib/round.wgsl"), ROUND_TEST].concat();
    let module = gpu.device.create_shader_module(wgpu::ShaderModuleDescriptor {
        label: None,
        source: wgpu::ShaderSource::Wgsl(text.into()),
    });
    let pipeline = gpu.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: None,
        layout: None,
        module: &module,
        entry_point: None,
        compilation_options: Default::default(),
        cache: None,
    });
    let x = gpu.buffer(bytemuck::cast_slice(&patterns));
    let y = gpu.buffer(&vec![0; patterns.len() * 16]);
    let group = gpu.device.create_bind_group(&wgpu::BindGroupDescriptor {
        label: None,
        layout: &pipeline.get_bind_group_layout(0),
        entries: &[
            wgpu::BindGroupEntry { binding: 0, resource: x.as_entire_binding() },
            wgpu::BindGroupEntry { binding: 1, resource: y.as_entire_binding() },
        ],
    });
    gpu.submit(|encoder| {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        pass.set_pipeline(&pipeline);
        pass.set_bind_group(0, &group, &[]);
        pass.dispatch_workgroups(1024, 1, 1);
    });
    let got = gpu.read(&y);
    let got: &[[u32; 4]] = bytemuck::cast_slice(&got);
    for (&bits, got) in patterns.iter().zip(got) {
        let value = f32::from_bits(bits);
        let code = bits as u16;
        let want = [
            u32::from(f16::from_f32(value).to_bits()) | (u32::from(bf16::from_f32(value).to_bits()) << 16),
            u32::from(e4m3_encode(value)),
            f16::from_bits(code).to_f32().to_bits(),
            bf16::from_bits(code).to_f32().to_bits(),
        ];
        assert_eq!(*got, want, "{bits:#010x}: {got:x?} instead of {want:x?}");
    }
}

// ---------------------------------------------------------------------------------------------------------------
// kv_append

const SHAPE: MlaShape = MlaShape { num_heads: 1, kv_lora_rank: 256, qk_rope_head_dim: 32 };

/// Bytes of `count` input elements that are hard for every dtype.
fn hard_inputs(dtype: Dtype, count: usize, random: &mut Random, hard: &[u32]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..count {
        let bits = random.bits();
        match dtype {
            Dtype::F32 if bits.is_multiple_of(3) => bytes.extend(random.bits().to_le_bytes()),
            Dtype::F32 => bytes.extend(hard[random.bits() as usize % hard.len()].to_le_bytes()),
            _ => bytes.extend((bits as u16).to_le_bytes()),
        }
    }
    bytes
}

/// What the host stores for elements of `bytes`.
fn host_convert(bytes: &[u8], input: Dtype, cache: Dtype, k_scale: f32) -> Vec<u8> {
    if input == cache {
        return bytes.to_vec();
    }
    let scale = if cache == Dtype::E4m3 { k_scale } else { 1.0 };
    let divided = |x: f32| if scale == 1.0 { x } else { x / scale };
    let values: Vec<f32> = input.decode_all(bytes).into_iter().map(divided).collect();
    cache.encode_all(&values)
}

struct AppendCase {
    spec: AppendSpec,
    tokens: usize,
    k_scale: f32,
}

impl AppendCase {
    /// A strided append into layer 1 of a cache that holds two, with gaps everywhere; every byte of the buffer is
    /// compared.
    fn run(&self, gpu: &Gpu, seed: u64, hard: &[u32]) {
        let AppendCase { spec, tokens, k_scale } = *self;
        let (latent, rope) = (spec.shape.kv_lora_rank as usize, spec.shape.qk_rope_head_dim as usize);
        let (input, cache, row) = (spec.input.bytes(), spec.kv.dtype.bytes(), latent + rope);
        let mut random = Random(seed);
        let page = spec.kv.page_size as usize * row;
        let (block_stride, pages) = (page + 8, spec.kv.num_pages as usize);
        let layer_stride = block_stride * pages + 8;

        // one buffer holds latent and rotary rows, as a fused projection leaves them
        let token_stride = row + 12;
        let rows = hard_inputs(spec.input, 4 + tokens * token_stride, &mut random, hard);
        let before: Vec<u8> = (0..(2 * layer_stride + 8) * cache).map(|i| (i % 251) as u8).collect();
        let num_slots = spec.kv.num_slots() as usize;
        let slots: Vec<i64> =
            (0..tokens).map(|t| if t % 5 == 3 { -1 } else { ((t * 7 + 3) % num_slots) as i64 }).collect();

        let (rows_buffer, kv_buffer) = (gpu.buffer(&rows), gpu.buffer(&before));
        let view = |offset: usize| View {
            buffer: &rows_buffer,
            offset: offset as u64,
            token_stride: token_stride as u64,
            head_stride: 1,
        };
        let layer = AppendLayer {
            kv_c: view(4),
            k_pe: view(4 + latent),
            kv: KvView {
                buffer: &kv_buffer,
                offset: 8,
                layer_stride: layer_stride as u64,
                layer: 1,
                block_stride: block_stride as u64,
            },
            k_scale,
        };
        let op = KvAppend::new(&Pipelines::new(&gpu.device), spec).expect("compiles");
        let mut step = AppendStep::default();
        let binding = op.bind(&gpu.device, &layer, tokens as u32).expect("binds");
        // a first upload that is too small, so that the table grows
        op.prepare(&gpu.device, &gpu.queue, &mut step, &slots[..1]).expect("prepares");
        op.prepare(&gpu.device, &gpu.queue, &mut step, &slots).expect("prepares");
        gpu.submit(|encoder| op.record(encoder, &step, &binding));

        let mut want = before;
        for (t, &slot) in slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
            let from = (4 + t * token_stride) * input;
            let bytes = host_convert(&rows[from..from + row * input], spec.input, spec.kv.dtype, k_scale);
            let (in_page, slot_page) =
                (slot as usize % spec.kv.page_size as usize, slot as usize / spec.kv.page_size as usize);
            let at = (8 + layer_stride + slot_page * block_stride + in_page * row) * cache;
            want[at..at + row * cache].copy_from_slice(&bytes);
        }
        let got = gpu.read(&kv_buffer);
        let wrong = (0..want.len()).find(|&i| got[i] != want[i]);
        assert_eq!(wrong, None, "first wrong byte; {spec:?}, k_scale {k_scale}");
    }
}

#[test]
fn append_is_byte_exact_for_every_pair_of_dtypes() {
    let Some(gpu) = gpu() else { return };
    let hard = hard_patterns();
    for input in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        for dtype in Dtype::ALL {
            let spec = AppendSpec { shape: SHAPE, kv: KvSpec { dtype, page_size: 48, num_pages: 3 }, input };
            AppendCase { spec, tokens: 67, k_scale: 1.0 }.run(gpu, 7, &hard);
        }
        // powers of two are exact, however small or large
        for k_scale in [0.25, 64.0, (-126f32).exp2(), (-110f32).exp2(), 100f32.exp2(), 127f32.exp2()] {
            let kv = KvSpec { dtype: Dtype::E4m3, page_size: 1, num_pages: 101 };
            AppendCase { spec: AppendSpec { shape: SHAPE, kv, input }, tokens: 33, k_scale }
                .run(gpu, 9, &hard);
        }
    }
    let shape = MlaShape { num_heads: 1, kv_lora_rank: 512, qk_rope_head_dim: 0 };
    let kv = KvSpec { dtype: Dtype::Bf16, page_size: 256, num_pages: 1 };
    AppendCase { spec: AppendSpec { shape, kv, input: Dtype::F32 }, tokens: 5, k_scale: 1.0 }
        .run(gpu, 3, &hard);
}

/// The e4m3 code nearest to a magnitude, ties to even. The f64 quotient of two f32 is on the same side of every tie as
/// the exact one.
fn nearest_code(quotient: f64) -> u8 {
    let distance = |code: u8| (f64::from(e4m3_decode(code)) - quotient.abs()).abs();
    let code = (0..0x7F_u8)
        .min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a % 2).cmp(&(b % 2))))
        .unwrap_or_default();
    code | if quotient.is_sign_negative() { 0x80 } else { 0 }
}

#[test]
fn append_divides_exactly_by_any_scale() {
    let Some(gpu) = gpu() else { return };
    let kv = KvSpec { dtype: Dtype::E4m3, page_size: 64, num_pages: 2 };
    let pipelines = Pipelines::new(&gpu.device);
    // 1.75 and 0.4375 put many bf16 values exactly on ties; 448 and 0.01 reach both ends of the range.
    for (input, k_scale) in [
        (Dtype::Bf16, 1.75),
        (Dtype::Bf16, 0.4375),
        (Dtype::F16, 1.75),
        (Dtype::F16, 1.375),
        (Dtype::F32, 0.037),
        (Dtype::F32, 448.0),
        (Dtype::F32, 0.01),
    ] {
        let spec = AppendSpec { shape: SHAPE, kv, input };
        let (tokens, mut random) = (128, Random(5));
        let values: Vec<f32> = (0..tokens * 288).map(|_| random.unit() * 20.0).collect();
        let bytes = input.encode_all(&values);
        let (rows, cache) = (gpu.buffer(&bytes), gpu.buffer(&vec![0; tokens * 288]));
        let view = |offset| View { buffer: &rows, offset, token_stride: 288, head_stride: 1 };
        let op = KvAppend::new(&pipelines, spec).expect("compiles");
        let mla = wgpu_mla::MlaSpec { shape: SHAPE, kv, query: Dtype::F32, out: Dtype::F32 };
        let layer = AppendLayer { kv_c: view(0), k_pe: view(256), kv: KvView::dense(&cache, &mla), k_scale };
        let binding = op.bind(&gpu.device, &layer, tokens as u32).expect("binds");
        let mut step = AppendStep::default();
        let slots: Vec<i64> = (0..tokens as i64).collect();
        op.prepare(&gpu.device, &gpu.queue, &mut step, &slots).expect("prepares");
        gpu.submit(|encoder| op.record(encoder, &step, &binding));
        for (got, x) in gpu.read(&cache).into_iter().zip(input.decode_all(&bytes)) {
            let want = nearest_code(f64::from(x) / f64::from(k_scale));
            assert_eq!(got, want, "{input} {x} / {k_scale}");
        }
    }
}

#[test]
fn append_binds_a_window_of_a_buffer_that_is_too_large() {
    let limits = wgpu::Limits { max_storage_buffer_binding_size: 1 << 18, ..wgpu::Limits::default() };
    let Some(gpu) = open(limits) else { return };
    let kv = KvSpec { dtype: Dtype::Bf16, page_size: 16, num_pages: 13 };
    let spec = AppendSpec { shape: SHAPE, kv, input: Dtype::Bf16 };
    let mla = wgpu_mla::MlaSpec { shape: SHAPE, kv, query: Dtype::F32, out: Dtype::F32 };
    let row = [3u16, 5, 7, 11].repeat(72);
    let (rows, cache) = (gpu.buffer(bytemuck::cast_slice(&row)), gpu.buffer(&vec![0; 1 << 20]));
    let view = |offset| View { buffer: &rows, offset, token_stride: 288, head_stride: 1 };
    let layer_elems = 16 * 288 * 13 + 8;
    let kv_view = KvView { offset: 8, layer_stride: layer_elems, layer: 3, ..KvView::dense(&cache, &mla) };
    let layer = AppendLayer { kv_c: view(0), k_pe: view(256), kv: kv_view, k_scale: 1.0 };
    let op = KvAppend::new(&Pipelines::new(&gpu.device), spec).expect("compiles");
    let binding = op.bind(&gpu.device, &layer, 1).expect("a window of 120 KB fits");
    let mut step = AppendStep::default();
    op.prepare(&gpu.device, &gpu.queue, &mut step, &[207]).expect("prepares");
    gpu.submit(|encoder| op.record(encoder, &step, &binding));
    let got = gpu.read(&cache);
    let got: &[u16] = bytemuck::cast_slice(&got);
    let at = 8 + 3 * layer_elems as usize + 207 * 288;
    assert_eq!(got[at..at + 288], row);
    assert_eq!(got.iter().filter(|x| **x != 0).count(), 288, "nothing else was written");

    let kv = KvSpec { num_pages: 40, ..kv };
    let op = KvAppend::new(&Pipelines::new(&gpu.device), AppendSpec { kv, ..spec }).expect("compiles");
    let error = op.bind(&gpu.device, &layer, 1).expect_err("a layer of 368 KB does not fit");
    assert!(matches!(error, Error::Limit { what: "kv", limit: 0x40000, .. }), "{error}");
}

// ---------------------------------------------------------------------------------------------------------------
// kv_copy_pages

#[test]
fn pages_are_copied_bit_for_bit() {
    let Some(gpu) = gpu() else { return };
    // wide units; a page of 12 bytes; and a base that is no multiple of 16 bytes
    for (dtype, page_size, row_elems, offset, gap) in [
        (Dtype::Bf16, 16, 576, 0, 0),
        (Dtype::E4m3, 3, 4, 8, 4),
        (Dtype::E4m3, 1, 576, 8, 0),
        (Dtype::F32, 7, 288, 8, 8),
    ] {
        let spec = CopySpec { kv: KvSpec { dtype, page_size, num_pages: 9 }, row_elems };
        let page = (page_size * row_elems) as usize * dtype.bytes();
        let stride = page + gap * dtype.bytes();
        let base = offset * dtype.bytes();
        let before: Vec<u8> = (0..base + 9 * stride).map(|i| (i * i % 251) as u8).collect();
        let kv = gpu.buffer(&before);
        let block_stride = (stride / dtype.bytes()) as u64;
        let view = KvView { buffer: &kv, offset: offset as u64, layer_stride: 0, layer: 0, block_stride };
        let op = KvCopyPages::new(&Pipelines::new(&gpu.device), spec).expect("compiles");
        let binding = op.bind(&gpu.device, &view).expect("binds");
        let mut step = CopyStep::default();
        let copies = [(0u32, 8u32), (3, 1), (0, 5)];
        op.prepare(&gpu.device, &gpu.queue, &mut step, &copies).expect("prepares");
        gpu.submit(|encoder| op.record(encoder, &step, &binding));
        let mut want = before;
        for (from, to) in copies {
            let from = base + from as usize * stride;
            want.copy_within(from..from + page, base + to as usize * stride);
        }
        assert!(gpu.read(&kv)[..want.len()] == want, "{spec:?}");
        // an empty list is no work
        op.prepare(&gpu.device, &gpu.queue, &mut step, &[]).expect("prepares");
        gpu.submit(|encoder| op.record(encoder, &step, &binding));
        assert!(gpu.read(&kv)[..want.len()] == want, "{spec:?}");
    }
}

// ---------------------------------------------------------------------------------------------------------------
// merge_attn_states

/// Where rows of `[tokens, heads, dim]` lie, in elements.
#[derive(Debug, Clone, Copy)]
struct Rows {
    offset: usize,
    token: usize,
    head: usize,
}

impl Rows {
    fn dense(heads: usize, dim: usize) -> Self {
        Rows { offset: 0, token: heads * dim, head: dim }
    }
    fn at(&self, t: usize, h: usize) -> usize {
        self.offset + t * self.token + h * self.head
    }
    fn end(&self, tokens: usize, heads: usize, dim: usize) -> usize {
        self.at(tokens - 1, heads - 1) + dim
    }
    fn view<'a>(&self, buffer: &'a wgpu::Buffer) -> View<'a, wgpu::Buffer> {
        View {
            buffer,
            offset: self.offset as u64,
            token_stride: self.token as u64,
            head_stride: self.head as u64,
        }
    }
}

struct MergeCase {
    dtype: Dtype,
    tokens: usize,
    heads: usize,
    dim: usize,
    inputs: Rows,
    output: Rows,
}

impl MergeCase {
    fn dense(dtype: Dtype, tokens: usize, heads: usize, dim: usize) -> Self {
        let rows = Rows::dense(heads, dim);
        MergeCase { dtype, tokens, heads, dim, inputs: rows, output: rows }
    }

    /// LSEs that are empty in every way, equal, far apart and huge.
    fn lse_bits(case: usize, random: &mut Random) -> (f32, f32) {
        let (a, b) = (random.unit() * 3.0, random.unit() * 3.0);
        match case {
            0 => (f32::NEG_INFINITY, b),
            1 => (a, f32::INFINITY),
            2 => (f32::NAN, b),
            3 => (f32::NEG_INFINITY, f32::from_bits(0xFFC0_1234)),
            4 => (-f32::MAX, f32::MAX),
            5 => (f32::INFINITY, f32::NAN),
            6 => (150.0 + a, 150.5),
            7 => (-900.0, a),
            8 => (a, a),
            9 => (f32::from_bits(1), f32::MIN_POSITIVE),
            _ => (a, b),
        }
    }

    fn run(&self, gpu: &Gpu, op: &MergeAttnStates) {
        let MergeCase { dtype, tokens, heads, dim, inputs, output } = *self;
        let mut random = Random((dim * 31 + tokens) as u64);
        let elem = dtype.bytes();
        let poison = |n: usize| dtype.encode_all(&vec![f32::NAN; n]);
        let input_end = inputs.end(tokens, heads, dim);
        let (mut prefix, mut suffix) = (poison(input_end), poison(input_end));
        // [heads, tokens], as users of vLLM have them
        let (mut prefix_lse, mut suffix_lse) = (vec![0f32; heads * tokens], vec![0f32; heads * tokens]);
        for t in 0..tokens {
            for h in 0..heads {
                let (p, s) = Self::lse_bits((t * heads + h) % 13, &mut random);
                (prefix_lse[h * tokens + t], suffix_lse[h * tokens + t]) = (p, s);
                for d in 0..dim {
                    let at = (inputs.at(t, h) + d) * elem;
                    for (side, lse) in [(&mut prefix, p), (&mut suffix, s)] {
                        let empty = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][d % 3];
                        let x = if lse.is_finite() { random.unit() } else { empty };
                        side[at..at + elem].copy_from_slice(&dtype.encode_all(&[x]));
                    }
                }
            }
        }
        let before: Vec<u8> =
            (0..(output.end(tokens, heads, dim) + 3) * elem).map(|i| (i % 241) as u8 + 7).collect();
        let [p, s, o] = [&prefix, &suffix, &before].map(|bytes| gpu.buffer(bytes));
        let [pl, sl] = [&prefix_lse, &suffix_lse].map(|lse| gpu.buffer(bytemuck::cast_slice(lse)));
        let ol = gpu.buffer(&vec![0x55; heads * tokens * 4]);
        let by_head = Rows { offset: 0, token: 1, head: tokens };
        let args = MergeStates {
            prefix_output: inputs.view(&p),
            prefix_lse: by_head.view(&pl),
            suffix_output: inputs.view(&s),
            suffix_lse: by_head.view(&sl),
            output: output.view(&o),
            output_lse: Some(by_head.view(&ol)),
            num_tokens: tokens as u32,
            num_heads: heads as u32,
        };
        let binding = op.bind(&gpu.device, &args).expect("binds");
        let without_lse = op.bind(&gpu.device, &MergeStates { output_lse: None, ..args }).expect("binds");
        gpu.submit(|encoder| op.record(encoder, &binding));
        let (got, got_lse) = (gpu.read(&o), gpu.read(&ol));
        let got_lse: &[f32] = bytemuck::cast_slice(&got_lse);

        let label =
            |t, h| format!("{dtype} {tokens}x{heads}x{dim} in {inputs:?} out {output:?}: row {t}, {h}");
        let mut written = vec![false; before.len()];
        for t in 0..tokens {
            for h in 0..heads {
                let (pl, sl) = (prefix_lse[h * tokens + t], suffix_lse[h * tokens + t]);
                let row = |side: &[u8], rows: &Rows| {
                    let at = rows.at(t, h) * elem;
                    side[at..at + dim * elem].to_vec()
                };
                let (p, s, got) = (row(&prefix, &inputs), row(&suffix, &inputs), row(&got, &output));
                written[output.at(t, h) * elem..][..dim * elem].fill(true);
                let lse = got_lse[h * tokens + t];
                match (pl.is_finite(), sl.is_finite()) {
                    (true, false) => assert_eq!((got, lse.to_bits()), (p, pl.to_bits()), "{}", label(t, h)),
                    (false, true) => assert_eq!((got, lse.to_bits()), (s, sl.to_bits()), "{}", label(t, h)),
                    (false, false) => {
                        assert!(got.iter().all(|b| *b == 0), "{}", label(t, h));
                        assert_eq!(lse.to_bits(), 0xFF80_0000, "{}", label(t, h));
                    }
                    (true, true) => {
                        let (pl, sl) = (f64::from(pl), f64::from(sl));
                        let top = pl.max(sl);
                        let want_lse = top + ((pl - top).exp() + (sl - top).exp()).ln();
                        let within = |got: f64, want: f64, tol: f64| {
                            (got - want).abs() <= tol || (got - want).abs() <= tol * want.abs()
                        };
                        assert!(
                            within(lse.into(), want_lse, 2e-6),
                            "{}: lse {lse}, not {want_lse}",
                            label(t, h)
                        );
                        let tolerance = match dtype {
                            Dtype::F32 => 2e-6,
                            Dtype::F16 => 1e-3,
                            _ => 2e-2,
                        };
                        for d in 0..dim {
                            let [p, s, got] =
                                [&p, &s, &got].map(|bytes| f64::from(dtype.decode_at(bytes, d)));
                            let want = (pl - want_lse).exp() * p + (sl - want_lse).exp() * s;
                            assert!(within(got, want, tolerance), "{}, {d}: {got}, not {want}", label(t, h));
                        }
                    }
                }
            }
        }
        for (i, _) in written.iter().enumerate().filter(|(_, written)| !**written) {
            assert_eq!(got[i], before[i], "byte {i} is in no row: {}", label(0, 0));
        }

        gpu.queue.write_buffer(&o, 0, &vec![0; o.size() as usize]);
        gpu.queue.write_buffer(&ol, 0, &vec![0x55; ol.size() as usize]);
        gpu.submit(|encoder| op.record(encoder, &without_lse));
        assert!(gpu.read(&ol).iter().all(|b| *b == 0x55), "no LSE was asked for");
        let again = gpu.read(&o);
        assert!((0..before.len()).all(|i| !written[i] || again[i] == got[i]));
    }
}

#[test]
fn merge_is_right_for_any_head_size() {
    let Some(gpu) = gpu() else { return };
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        for dim in [1, 3, 4, 63, 96, 128, 200] {
            let op = MergeAttnStates::new(
                &Pipelines::new(&gpu.device),
                MergeStatesSpec { dtype, head_size: dim as u32 },
            );
            let op = op.expect("compiles");
            for (tokens, heads) in [(13, 5), (1, 16), (27, 1), (1, 1)] {
                MergeCase::dense(dtype, tokens, heads, dim).run(gpu, &op);
            }
            // odd strides and offsets on both sides; heads outside; gaps that must stay as they are
            for (inputs, output) in [
                (
                    Rows { offset: 1, token: 5 * dim + 3, head: dim },
                    Rows { offset: 3, token: 5 * dim + 1, head: dim },
                ),
                (Rows::dense(5, dim), Rows { offset: 1, token: dim, head: 13 * dim }),
                (
                    Rows { offset: 0, token: dim, head: 13 * dim },
                    Rows { offset: 0, token: dim + 1, head: 13 * (dim + 1) + 1 },
                ),
                (Rows::dense(5, dim), Rows { offset: 4, token: 5 * (dim + 8), head: dim + 8 }),
            ] {
                MergeCase { dtype, tokens: 13, heads: 5, dim, inputs, output }.run(gpu, &op);
            }
            // even, but no multiple of 4; and one head or one token, whose unused stride holds anything
            let (inputs, unused) = (Rows::dense(5, dim), usize::MAX / 2);
            let even = Rows { offset: 2, token: 5 * dim + 6, head: dim };
            MergeCase { dtype, tokens: 13, heads: 5, dim, inputs, output: even }.run(gpu, &op);
            let one_head = Rows { offset: 1, token: dim + 5, head: unused };
            MergeCase { dtype, tokens: 13, heads: 1, dim, inputs, output: one_head }.run(gpu, &op);
            let one_token = Rows { offset: 1, token: unused, head: dim + 3 };
            MergeCase { dtype, tokens: 1, heads: 5, dim, inputs, output: one_token }.run(gpu, &op);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------
// The case files

/// A case file: its tensors as bytes, and its metadata.
struct CaseFile {
    bytes: Vec<u8>,
}

impl CaseFile {
    fn open(name: &str) -> Self {
        let path = format!("{}/cases/{name}.safetensors", env!("CARGO_MANIFEST_DIR"));
        Self { bytes: std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}")) }
    }

    /// Dtype, dims and bytes.
    fn tensor(&self, name: &str) -> (Dtype, Vec<usize>, Vec<u8>) {
        let tensors = safetensors::SafeTensors::deserialize(&self.bytes).expect("a safetensors file");
        let tensor = tensors.tensor(name).expect(name);
        let dtype = match tensor.dtype() {
            safetensors::Dtype::F16 => Dtype::F16,
            safetensors::Dtype::BF16 => Dtype::Bf16,
            safetensors::Dtype::F8_E4M3 | safetensors::Dtype::U8 => Dtype::E4m3,
            _ => Dtype::F32,
        };
        (dtype, tensor.shape().to_vec(), tensor.data().to_vec())
    }

    fn has(&self, name: &str) -> bool {
        let tensors = safetensors::SafeTensors::deserialize(&self.bytes).expect("a safetensors file");
        tensors.tensor(name).is_ok()
    }
}

#[test]
fn append_cases_hold() {
    let Some(gpu) = gpu() else { return };
    for name in ["append_bf16", "append_fp8_pow2"] {
        let case = CaseFile::open(name);
        let (input, kv_c_dims, kv_c) = case.tensor("kv_c");
        let (_, k_pe_dims, k_pe) = case.tensor("k_pe");
        let (dtype, dims, before) = case.tensor("kv_cache_before");
        let (_, _, slots) = case.tensor("slot_mapping");
        let slots: Vec<i64> =
            slots.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().expect("8 bytes"))).collect();
        let k_scale =
            if case.has("k_scale") { Dtype::F32.decode_at(&case.tensor("k_scale").2, 0) } else { 1.0 };
        let shape = MlaShape {
            num_heads: 1,
            kv_lora_rank: kv_c_dims[1] as u32,
            qk_rope_head_dim: k_pe_dims[1] as u32,
        };
        let kv = KvSpec { dtype, page_size: dims[1] as u32, num_pages: dims[0] as u32 };
        let mla = wgpu_mla::MlaSpec { shape, kv, query: Dtype::F32, out: Dtype::F32 };
        let [kv_c, k_pe, cache] = [&kv_c, &k_pe, &before].map(|bytes| gpu.buffer(bytes));
        let layer = AppendLayer {
            kv_c: View::dense(&kv_c, 1, shape.kv_lora_rank),
            k_pe: View::dense(&k_pe, 1, shape.qk_rope_head_dim),
            kv: KvView::dense(&cache, &mla),
            k_scale,
        };
        let op =
            KvAppend::new(&Pipelines::new(&gpu.device), AppendSpec { shape, kv, input }).expect("compiles");
        let binding = op.bind(&gpu.device, &layer, slots.len() as u32).expect("binds");
        let mut step = AppendStep::default();
        op.prepare(&gpu.device, &gpu.queue, &mut step, &slots).expect("prepares");
        gpu.submit(|encoder| op.record(encoder, &step, &binding));
        let want = case.tensor("kv_cache").2;
        assert!(gpu.read(&cache)[..want.len()] == want, "{name}");
        assert_ne!(before, want, "{name} appends something");
    }
}

#[test]
fn merge_cases_hold() {
    let Some(gpu) = gpu() else { return };
    for (name, tolerance) in [("merge_f32", 2e-6), ("merge_bf16_d96", 2e-2)] {
        let case = CaseFile::open(name);
        let (dtype, dims, prefix) = case.tensor("prefix_output");
        let (tokens, heads, dim) = (dims[0] as u32, dims[1] as u32, dims[2] as u32);
        let [suffix, prefix_lse, suffix_lse] =
            ["suffix_output", "prefix_lse", "suffix_lse"].map(|name| gpu.buffer(&case.tensor(name).2));
        let (prefix, output) = (gpu.buffer(&prefix), gpu.buffer(&vec![0; prefix.len()]));
        let output_lse = gpu.buffer(&vec![0; (tokens * heads * 4) as usize]);
        let lse = |buffer| View { buffer, offset: 0, token_stride: 1, head_stride: tokens.into() };
        let args = MergeStates {
            prefix_output: View::dense(&prefix, heads, dim),
            prefix_lse: lse(&prefix_lse),
            suffix_output: View::dense(&suffix, heads, dim),
            suffix_lse: lse(&suffix_lse),
            output: View::dense(&output, heads, dim),
            output_lse: Some(lse(&output_lse)),
            num_tokens: tokens,
            num_heads: heads,
        };
        let op =
            MergeAttnStates::new(&Pipelines::new(&gpu.device), MergeStatesSpec { dtype, head_size: dim })
                .expect("compiles");
        let binding = op.bind(&gpu.device, &args).expect("binds");
        gpu.submit(|encoder| op.record(encoder, &binding));
        let outputs = [("output", dtype, &output, tolerance), ("output_lse", Dtype::F32, &output_lse, 2e-6)];
        for (what, dtype, buffer, tolerance) in outputs {
            let (want_dtype, _, want) = case.tensor(what);
            let got = dtype.decode_all(&gpu.read(buffer));
            for (i, want) in want_dtype.decode_all(&want).into_iter().enumerate() {
                let (off, at_most) = ((got[i] - want).abs(), tolerance * want.abs().max(1.0));
                assert!(got[i] == want || off <= at_most, "{name}: {what}[{i}] is {}, not {want}", got[i]);
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------
// What is refused

#[test]
fn every_refusal_names_its_cure() {
    let Some(gpu) = gpu() else { return };
    let device = &gpu.device;
    let kv = KvSpec { dtype: Dtype::F16, page_size: 4, num_pages: 2 };
    let spec = AppendSpec { shape: SHAPE, kv, input: Dtype::F32 };
    let mla = wgpu_mla::MlaSpec { shape: SHAPE, kv, query: Dtype::F32, out: Dtype::F32 };
    let append = KvAppend::new(&Pipelines::new(device), spec).expect("compiles");
    let (a, b) = (gpu.buffer(&[0; 8192]), gpu.buffer(&[0; 8192]));
    let no_storage = gpu.buffer_with(&[0; 8192], wgpu::BufferUsages::UNIFORM);
    let rows = |buffer, offset| View { buffer, offset, token_stride: 288, head_stride: 0 };
    let layer =
        || AppendLayer { kv_c: rows(&a, 0), k_pe: rows(&a, 256), kv: KvView::dense(&b, &mla), k_scale: 1.0 };

    let refused = |layer: AppendLayer<'_, wgpu::Buffer>| append.bind(device, &layer, 4).expect_err("refused");
    let error = refused(AppendLayer { kv: KvView::dense(&a, &mla), ..layer() });
    assert_eq!(error, Error::Aliased { a: "kv", b: "kv_c" });
    let error = refused(AppendLayer { kv: KvView::dense(&no_storage, &mla), ..layer() });
    assert_eq!(error, Error::BufferUsage { what: "kv", usage: "STORAGE" });
    let error = refused(AppendLayer { kv_c: rows(&no_storage, 0), ..layer() });
    assert_eq!(error, Error::BufferUsage { what: "kv_c", usage: "STORAGE" });
    for k_scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert!(matches!(refused(AppendLayer { k_scale, ..layer() }), Error::Scale { what: "k_scale", .. }));
    }
    let error = refused(AppendLayer { k_pe: rows(&a, 255), ..layer() });
    assert!(matches!(error, Error::Alignment { what: "k_pe", got: 255, .. }));
    assert!(matches!(
        append.bind(device, &layer(), 8),
        Err(Error::BufferTooSmall { what: "kv_c" | "k_pe", .. })
    ));

    let mut step = AppendStep::default();
    let mut prepare = |slots: &[i64]| append.prepare(device, &gpu.queue, &mut step, slots);
    assert!(matches!(prepare(&[0, 8]), Err(Error::SlotOutOfRange { index: 1, slot: 8, num_slots: 8 })));
    assert!(matches!(prepare(&[5, -1, 5]), Err(Error::SlotOverlap { first: 0, second: 2, slot: 5 })));
    prepare(&[0, 1, 2]).expect("fits");
    let binding = append.bind(device, &layer(), 2).expect("binds");
    assert!(matches!(append.check(&step, &binding), Err(Error::LayoutMismatch { .. })));
    // Recorded all the same it does nothing.
    gpu.submit(|encoder| append.record(encoder, &step, &binding));
    let nothing = append.bind(device, &layer(), 0).expect("room for no token");
    append.prepare(device, &gpu.queue, &mut step, &[]).expect("no token");
    gpu.submit(|encoder| append.record(encoder, &step, &nothing));

    let e4m3 = AppendSpec { input: Dtype::E4m3, ..spec };
    assert!(matches!(KvAppend::new(&Pipelines::new(device), e4m3), Err(Error::DtypeUnsupported { .. })));
    let odd = CopySpec { kv, row_elems: 6 };
    assert!(matches!(
        KvCopyPages::new(&Pipelines::new(device), odd),
        Err(Error::Shape { what: "row_elems", got: 6, .. })
    ));

    let copy = KvCopyPages::new(&Pipelines::new(device), CopySpec { kv, row_elems: 288 }).expect("compiles");
    let mut step = CopyStep::default();
    for copies in [&[(0, 2)][..], &[(0, 1), (1, 0)], &[(0, 0)]] {
        let error = copy.prepare(device, &gpu.queue, &mut step, copies).expect_err("refused");
        assert!(matches!(error, Error::CopyConflict { .. }), "{error}");
    }
    let error = copy.bind(device, &KvView::dense(&no_storage, &mla)).expect_err("refused");
    assert_eq!(error, Error::BufferUsage { what: "kv", usage: "STORAGE" });

    let spec = MergeStatesSpec { dtype: Dtype::Bf16, head_size: 8 };
    let merge = MergeAttnStates::new(&Pipelines::new(device), spec).expect("compiles");
    let (c, d, e) = (gpu.buffer(&[0; 256]), gpu.buffer(&[0; 256]), gpu.buffer(&[0; 256]));
    let heads = |buffer| View::dense(buffer, 2, 8);
    let args = |output, output_lse| MergeStates {
        prefix_output: heads(&c),
        prefix_lse: View { buffer: &c, offset: 0, token_stride: 1, head_stride: 2 },
        suffix_output: heads(&c),
        suffix_lse: View { buffer: &c, offset: 0, token_stride: 1, head_stride: 2 },
        output,
        output_lse: Some(View { buffer: output_lse, offset: 0, token_stride: 1, head_stride: 2 }),
        num_tokens: 2,
        num_heads: 2,
    };
    merge.bind(device, &args(heads(&d), &e)).expect("one buffer for every input");
    let error = merge.bind(device, &args(heads(&c), &e)).expect_err("refused");
    assert_eq!(error, Error::Aliased { a: "output", b: "prefix_output" });
    let error = merge.bind(device, &args(heads(&d), &d)).expect_err("refused");
    assert_eq!(error, Error::Aliased { a: "output", b: "output_lse" });
    let error = merge.bind(device, &args(View { head_stride: 7, ..heads(&d) }, &e)).expect_err("refused");
    assert!(matches!(error, Error::Shape { what: "output", .. }), "{error}");
    let error = merge.bind(device, &args(View { offset: 120, ..heads(&d) }, &e)).expect_err("refused");
    assert!(matches!(error, Error::BufferTooSmall { what: "output", .. }), "{error}");
    let e4m3 = MergeStatesSpec { dtype: Dtype::E4m3, ..spec };
    assert!(matches!(
        MergeAttnStates::new(&Pipelines::new(device), e4m3),
        Err(Error::DtypeUnsupported { .. })
    ));
}
