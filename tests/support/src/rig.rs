//! Problems on a wgpu device, one call at a time: for tests of recording.

use std::sync::OnceLock;

use wgpu_mla::gpu::Gpu;
use wgpu_mla::{
    Batch, Binding, Capacity, Compiled, Device, Dtype, MlaDecode, MlaDecodeArgs, PageTable, Plan,
    SplitPolicy, Step, wgpu,
};

use super::Ignored;
use super::close::{Tolerance, close};
use super::paint::{Make, POISON, Problem, sequences};

/// A device and a decode on it.
pub struct Rig {
    pub gpu: Gpu,
    pub mla: Compiled<MlaDecode, Gpu>,
}

/// A problem's arrays on the device, bound.
pub struct Loaded {
    pub problem: Problem,
    pub q: wgpu::Buffer,
    pub kv: wgpu::Buffer,
    pub out: wgpu::Buffer,
    pub lse: wgpu::Buffer,
    pub binding: Binding<MlaDecode, Gpu>,
}

/// A problem. All have one spec, since a software device takes seconds to compile its kernels.
pub fn small(lens: &[(u32, u32)]) -> Problem {
    Make {
        dims: (256, 32),
        heads: 6,
        cache: Dtype::F16,
        query: Dtype::F16,
        sequences: sequences(lens),
        ..Make::default()
    }
    .build()
}

/// The same arrays with fewer tokens in use.
pub fn shortened(problem: &Problem, seq_lens: &[i32]) -> Problem {
    Problem { seq_lens: seq_lens.to_vec(), ..problem.clone() }
}

pub fn plan(mla: &Compiled<MlaDecode, Gpu>, problem: &Problem, policy: SplitPolicy) -> Plan {
    let batch = Batch { mask: problem.mask(), ..Batch::new(&problem.seq_lens, &problem.query_start_loc) };
    Plan::new(mla.op(), &mla.tiling(), &batch, policy).expect("a plan")
}

pub fn pages(problem: &Problem) -> PageTable<'_> {
    PageTable::Dense { block_table: &problem.block_table, max_pages: problem.max_pages as u32 }
}

impl Rig {
    /// The device and decode that tests share.
    pub fn shared() -> Result<&'static Self, Ignored> {
        static RIG: OnceLock<Result<Rig, Ignored>> = OnceLock::new();
        let make = || super::gpu().map(|gpu| Self::on(gpu, &small(&[(1, 1)]).spec));
        RIG.get_or_init(make).as_ref().map_err(Ignored::clone)
    }

    pub fn on(gpu: Gpu, spec: &MlaDecode) -> Self {
        let mla = gpu.compile(*spec).expect("a decode");
        Self { gpu, mla }
    }

    pub fn buffer(&self, bytes: &[u8]) -> wgpu::Buffer {
        let buffer = self.gpu.buffer(bytes.len() as u64).expect("a buffer");
        self.gpu.upload(&buffer, 0, bytes).expect("uploaded");
        buffer
    }

    /// Uploads a problem; its outputs are poison.
    pub fn load(&self, problem: Problem) -> Loaded {
        let rows = problem.total_q() * problem.spec.shape.num_heads as usize;
        let latent = problem.spec.shape.kv_lora_rank as usize;
        let [q, kv] = [&problem.q, &problem.kv].map(|bytes| self.buffer(bytes));
        let [out, lse] = [latent, 1].map(|dim| self.buffer(&vec![POISON; rows * dim * 4]));
        let layer = MlaDecodeArgs::dense(self.mla.op(), &q, &kv, &out, &lse, problem.softmax_scale);
        let binding = self.mla.bind(&layer, problem.total_q() as u32).expect("a binding");
        Loaded { problem, q, kv, out, lse, binding }
    }

    /// A step that holds the problem's plan.
    pub fn step(&self, problem: &Problem, policy: SplitPolicy) -> Step<MlaDecode, Gpu> {
        let mut step = self.mla.step(Capacity::default()).expect("a step");
        self.prepare(&mut step, problem, policy);
        step
    }

    pub fn prepare(&self, step: &mut Step<MlaDecode, Gpu>, problem: &Problem, policy: SplitPolicy) {
        let plan = plan(&self.mla, problem, policy);
        self.mla.prepare(step, (&plan, pages(problem))).expect("prepared");
    }

    pub fn encoder(&self) -> wgpu::CommandEncoder {
        self.gpu.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default())
    }

    pub fn submit(&self, encoder: wgpu::CommandEncoder) {
        self.gpu.queue().submit([encoder.finish()]);
    }

    /// Records and submits one decode.
    pub fn run(&self, step: &Step<MlaDecode, Gpu>, loaded: &Loaded) {
        let mut encoder = self.encoder();
        self.mla.record(&mut encoder, step, &loaded.binding).expect("recorded");
        self.submit(encoder);
    }

    pub fn poison(&self, loaded: &Loaded) {
        for buffer in [&loaded.out, &loaded.lse] {
            self.gpu.upload(buffer, 0, &vec![POISON; buffer.size() as usize]).expect("uploaded");
        }
    }

    /// The bytes of out and LSE.
    pub fn bits(&self, loaded: &Loaded) -> [Vec<u8>; 2] {
        [&loaded.out, &loaded.lse].map(|buffer| self.gpu.download(buffer, buffer.size()).expect("downloaded"))
    }

    pub fn untouched(&self, loaded: &Loaded) -> bool {
        self.bits(loaded).iter().flatten().all(|&byte| byte == POISON)
    }

    /// Compares what is in the outputs with the oracle's answer to a problem.
    pub fn check(&self, loaded: &Loaded, problem: &Problem) {
        let [out, lse] = self.bits(loaded).map(|bytes| Dtype::F32.decode_all(&bytes));
        let (want_out, want_lse) = problem.expected();
        let spec = problem.spec;
        let latent = spec.shape.kv_lora_rank as usize;
        let rounds_p = self.mla.rounds_weights();
        let tolerance = Tolerance::decode(
            spec.kv.dtype(),
            spec.query,
            spec.out,
            rounds_p,
            problem.largest_latent(),
            latent,
        );
        for report in
            [close("lse", &lse, &want_lse, &Tolerance::lse()), close("out", &out, &want_out, &tolerance)]
        {
            assert!(report.ok(), "{}: {report}", problem.name);
        }
    }
}
