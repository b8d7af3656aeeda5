//! What the model is fed with. Measured figures name their record; the others are assumptions, and say so.

use wgpu_mla::Dtype;

/// A device that decodes.
#[derive(Debug, Clone, Copy)]
pub struct Machine {
    pub name: &'static str,
    /// Micro-seconds before the first token and after the last: launches, and the merge of splits.
    pub start_us: [f64; 2],
    /// Nanoseconds a token of the cache, by [`Machine::column`].
    pub token_ns: [f64; 4],
    /// GB/s read and written by what combines, and micro-seconds of its launch.
    pub combine_gbs: f64,
    pub launch_us: f64,
    /// Ranks that this many cores serve without sharing them: 0 for a device each.
    pub cores: u32,
}

/// NVIDIA H200, CUDA. Start and slope of 16 heads bf16: 1 x 32768 and 1 x 131072, 17.5 and 44.1 us; e4m3: 1 x 131072, 32.6 us, the same
/// start; 128 heads: 64 x 8192, 301.9 us bf16 and 380.7 e4m3, all in `benches/results/h200-cuda9-2026-11-24.md`, and a start that makes 1 x
/// 131072 the 88.0 us of `h200-cuda6-2026-11-23.md`. Today's kernels for 128 heads take less (269.9 and 250.8 us, `h200-2026-11-26.md`).
/// Combine: the merge of `h200-cuda2-2026-11-22.md` at 0.9 of its copy ceiling of 4112 GB/s; its launch is an assumption.
pub const H200: Machine = Machine {
    name: "NVIDIA H200, CUDA",
    start_us: [8.6, 12.5],
    token_ns: [0.2706, 0.183, 0.576, 0.726],
    combine_gbs: 3700.0,
    launch_us: 3.0,
    cores: 0,
};

/// The cards of `benches/results/h200x2-context-parallel-2026-11-25.md`, outputs in f32: 1 x 1048576 and 1 x 524288.
pub const H200_OF_TWO: Machine = Machine {
    name: "NVIDIA H200, CUDA, outputs in f32",
    start_us: [29.0, 25.0],
    token_ns: [0.2561, 0.2298, 0.514, 0.6895],
    combine_gbs: 3700.0,
    launch_us: 3.0,
    cores: 0,
};

/// The machine of docs/scale.md's check: 2 cores that every rank shares, one thread a rank.
pub const TWO_CORES: Machine = Machine {
    name: "2 cores, AVX2, a thread a rank",
    start_us: [100.0, 100.0],
    token_ns: [862.0, 884.0, 6030.0, 6100.0],
    combine_gbs: 0.65,
    launch_us: 20.0,
    cores: 2,
};

impl Machine {
    /// The column of a figure's table: 16 heads bf16 and e4m3, then 128 heads bf16 and e4m3.
    #[must_use]
    pub fn column(heads: u32, cache: Dtype) -> usize {
        2 * usize::from(heads > 16) + usize::from(cache == Dtype::E4m3)
    }
}

/// What joins the ranks.
#[derive(Debug, Clone, Copy)]
pub struct Link {
    pub name: &'static str,
    /// Micro-seconds of an exchange, whatever its size.
    pub latency_us: f64,
    /// Micro-seconds a further rank.
    pub rank_us: f64,
    /// GB/s that a rank sends.
    pub gbs: f64,
    /// Ranks that it joins at most.
    pub ranks: u32,
}

/// Two ranks on NVLink, through NCCL: latency and rate of `benches/results/h200x2-context-parallel-2026-11-25.md`. More ranks than two are
/// an assumption.
pub const NVLINK: Link =
    Link { name: "NVLink 4 in a host", latency_us: 4.5, rank_us: 0.5, gbs: 170.0, ranks: 8 };

/// All but NVLink are assumptions: rates are what collectives reach of the data sheets' (128, 400 Gbit/s and 100 Gbit/s both ways),
/// latencies what NCCL's tests commonly show. `--bench` measures its own.
pub const LINKS: [Link; 4] = [
    NVLINK,
    Link { name: "PCIe 5 x16 in a host", latency_us: 12.0, rank_us: 1.0, gbs: 45.0, ranks: 8 },
    Link {
        name: "InfiniBand NDR, 400 Gbit/s a card",
        latency_us: 18.0,
        rank_us: 1.0,
        gbs: 46.0,
        ranks: 1024,
    },
    Link { name: "Ethernet, 100 Gbit/s a card", latency_us: 40.0, rank_us: 4.0, gbs: 11.0, ranks: 1024 },
];

/// Threads of one process, through host memory, two cores for all: of the runs below.
pub const IN_PROCESS: Link = Link { name: "InProcess", latency_us: 60.0, rank_us: 20.0, gbs: 5.0, ranks: 8 };

/// A run that the model is compared with.
#[derive(Debug, Clone, Copy)]
pub struct Measured {
    pub ranks: u32,
    pub heads: u32,
    pub cache: Dtype,
    pub us: f64,
}

const fn run(ranks: u32, heads: u32, cache: Dtype, us: f64) -> Measured {
    Measured { ranks, heads, cache, us }
}

/// Tokens of those runs; 16,512 of three ranks.
pub const MEASURED_TOKENS: u32 = 16_384;

/// `context_parallel --bench --parts long --devices cpu` and `cpu,cpu` to `cpu,cpu,cpu,cpu`, release build, 2 cores of an x86-64 with AVX2,
/// beside other work, 2026-11-25. One rank has two threads; of one thread each, the whole took what `token_ns` says.
pub const MEASURED: [Measured; 16] = [
    run(1, 16, Dtype::Bf16, 5992.2),
    run(1, 16, Dtype::E4m3, 6779.6),
    run(1, 128, Dtype::Bf16, 49_067.9),
    run(1, 128, Dtype::E4m3, 50_324.9),
    run(2, 16, Dtype::Bf16, 6696.1),
    run(2, 16, Dtype::E4m3, 7196.7),
    run(2, 128, Dtype::Bf16, 50_101.0),
    run(2, 128, Dtype::E4m3, 50_983.7),
    run(3, 16, Dtype::Bf16, 7741.9),
    run(3, 16, Dtype::E4m3, 7372.9),
    run(3, 128, Dtype::Bf16, 52_429.8),
    run(3, 128, Dtype::E4m3, 52_752.3),
    run(4, 16, Dtype::Bf16, 6956.9),
    run(4, 16, Dtype::E4m3, 7323.0),
    run(4, 128, Dtype::Bf16, 50_057.0),
    run(4, 128, Dtype::E4m3, 50_607.8),
];

/// The same, `--parts exchange`: 8 sequences, 128 heads x 512, f32, by ranks: all-to-all, all-gather and reduce-scatter, all-gather.
pub const MEASURED_EXCHANGES: [(u32, [Option<f64>; 3]); 3] = [
    (2, [Some(5207.0), Some(9145.4), Some(10_183.1)]),
    (3, [None, None, Some(19_854.8)]),
    (4, [Some(7691.7), Some(16_696.2), Some(32_905.0)]),
];

/// Two H200s, 1 x 1048576 tokens, all-to-all: `context_parallel --bench --parts long --devices cuda:0,cuda:1 --engine nccl`, the means of
/// `benches/results/h200x2-context-parallel-2026-11-25.md`.
pub const MEASURED_CARDS: [Measured; 8] = [
    run(1, 16, Dtype::Bf16, 297.5),
    run(1, 16, Dtype::E4m3, 270.0),
    run(1, 128, Dtype::Bf16, 564.0),
    run(1, 128, Dtype::E4m3, 747.9),
    run(2, 16, Dtype::Bf16, 170.0),
    run(2, 16, Dtype::E4m3, 158.7),
    run(2, 128, Dtype::Bf16, 317.7),
    run(2, 128, Dtype::E4m3, 413.3),
];

/// The same, `--parts exchange`, two ranks: sequences, dtype of the output, all-to-all, all-gather and reduce-scatter, all-gather.
pub const MEASURED_CARD_EXCHANGES: [(u32, Dtype, [f64; 3]); 4] = [
    (1, Dtype::Bf16, [9.0, 13.2, 9.0]),
    (1, Dtype::F32, [10.0, 13.4, 10.0]),
    (64, Dtype::Bf16, [41.7, 47.5, 67.6]),
    (64, Dtype::F32, [62.3, 69.4, 105.8]),
];

/// Bytes that a card has for the caches of all layers, and layers of DeepSeek-V3: an assumption.
pub const CARD_BYTES: f64 = 100e9;
pub const LAYERS: f64 = 61.0;
