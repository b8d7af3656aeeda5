//! Times of other implementations on one NVIDIA H200, for comparison.
//!
//! Driver 580.159.04, CUDA 13.0, measured on 2026-11-21. CUDA peers: CUDA-graph medians of 31 replays, KV rotating past the
//! L2, 512/64, paged 64 tokens, outputs checked against fp32. Triton and the CUDA merge: vLLM 0.33.0 (the best of five split counts
//! where it has one). FlashMLA: upstream 9241ae3 for bf16, vLLM 0.33.0's FP8 kernel with an FP8 query for e4m3. llama.cpp: its Vulkan
//! backend, commit 0c1e57098, NV_coopmat2, f16 beside our bf16 and q8_0 beside our e4m3. Floor: a plain read of the KV bytes.
//! Their ragged batches are other random lengths, with as many tokens in all as ours (within 0.1 %).

use wgpu_mla::Dtype;

/// The device that every peer's figure is from.
pub const DEVICE: &str = "NVIDIA H200";

/// What a CUDA kernel that only reads reached there, GB/s: the ceiling of the peers' figures.
pub const READ_CEILING: f64 = 4317.0;

const NONE: f64 = f64::NAN;

/// Microseconds of a decode; NaN where a peer has none.
#[derive(Debug, Clone, Copy)]
pub struct Decode {
    heads: u32,
    q_len: u32,
    e4m3: bool,
    shape: &'static str,
    /// In the order of [`NAMES`].
    pub us: [f64; 4],
}

/// The columns.
pub const NAMES: [&str; 4] = ["llama.cpp Vulkan", "vLLM Triton", "FlashMLA", "floor"];

pub fn decode_of(heads: u32, q_len: u32, kv: Dtype, shape: &str) -> Option<[f64; 4]> {
    let of = |peer: &&Decode| {
        (peer.heads, peer.q_len, peer.e4m3, peer.shape) == (heads, q_len, kv == Dtype::E4m3, shape)
    };
    DECODE.iter().find(of).filter(|_| kv != Dtype::F32).map(|peer| peer.us)
}

/// `(Triton, CUDA)`, microseconds of a replayed graph whose buffers rotate past the L2.
pub fn merge_of(dtype: Dtype, tokens: u32, heads: u32) -> Option<(f64, f64)> {
    MERGE.iter().find(|row| (row.0, row.1, row.2) == (dtype, tokens, heads)).map(|row| (row.3, row.4))
}

const fn decode(heads: u32, q_len: u32, e4m3: bool, shape: &'static str, us: [f64; 4]) -> Decode {
    Decode { heads, q_len, e4m3, shape, us }
}

/// Heads, query tokens a sequence, e4m3 cache, sequences x tokens.
#[rustfmt::skip]
const DECODE: &[Decode] = &[
    decode(16, 1, false, "b1x4096", [25.5, 25.9, 22.0, 3.1]),
    decode(16, 1, false, "b1x32768", [69.1, 77.7, 43.8, 10.2]),
    decode(16, 1, false, "b1x131072", [168.5, 155.7, 69.7, 34.2]),
    decode(16, 1, false, "b8x8192", [83.8, 59.9, 30.6, 17.9]),
    decode(16, 1, false, "b32x4096", [144.4, 95.0, 45.7, 34.2]),
    decode(16, 1, false, "b64x8192", [498.0, 339.1, 150.9, 139.3]),
    decode(16, 1, false, "b128x4096", [509.0, 350.6, 147.2, 139.5]),
    decode(16, 1, false, "ragged64", [NONE, 389.3, 150.3, 137.3]),
    decode(16, 2, false, "b1x4096", [NONE, 61.5, 23.3, 3.1]),
    decode(16, 2, false, "b1x32768", [NONE, 78.4, 45.3, 10.2]),
    decode(16, 2, false, "b1x131072", [NONE, 258.8, 71.4, 34.2]),
    decode(16, 2, false, "b8x8192", [NONE, 91.3, 31.7, 17.9]),
    decode(16, 2, false, "b32x4096", [NONE, 174.3, 47.6, 34.2]),
    decode(16, 2, false, "b64x8192", [NONE, 663.1, 155.7, 139.3]),
    decode(16, 2, false, "b128x4096", [NONE, 665.0, 152.4, 139.5]),
    decode(16, 2, false, "ragged64", [NONE, 674.5, 155.7, 137.3]),
    decode(128, 1, false, "b1x4096", [203.2, 32.6, 19.2, 3.1]),
    decode(128, 1, false, "b1x32768", [1653.3, 156.3, 39.6, 10.2]),
    decode(128, 1, false, "b1x131072", [6362.0, 572.8, 77.4, 34.2]),
    decode(128, 1, false, "b8x8192", [2050.2, 308.5, 47.3, 17.9]),
    decode(128, 1, false, "b32x4096", [3058.8, 600.2, 71.5, 34.2]),
    decode(128, 1, false, "b64x8192", [12008.0, 2307.0, 247.8, 139.3]),
    decode(128, 1, false, "b128x4096", [10885.0, 2492.0, 254.9, 139.5]),
    decode(128, 1, false, "ragged64", [NONE, 2414.0, 257.1, 137.3]),
    decode(128, 2, false, "b1x4096", [NONE, 62.4, 20.3, 3.1]),
    decode(128, 2, false, "b1x32768", [NONE, 337.4, 56.6, 10.2]),
    decode(128, 2, false, "b1x131072", [NONE, 1281.0, 127.5, 34.2]),
    decode(128, 2, false, "b8x8192", [NONE, 597.3, 65.5, 17.9]),
    decode(128, 2, false, "b32x4096", [NONE, 1185.0, 113.6, 34.2]),
    decode(128, 2, false, "b64x8192", [NONE, 4677.0, 490.3, 139.3]),
    decode(128, 2, false, "b128x4096", [NONE, 4994.0, 502.1, 139.5]),
    decode(128, 2, false, "ragged64", [NONE, 4854.0, 475.0, 137.3]),
    decode(16, 1, true, "b1x4096", [45.5, 27.6, 12.8, 2.4]),
    decode(16, 1, true, "b1x32768", [224.0, 80.0, 22.5, 5.9]),
    decode(16, 1, true, "b1x131072", [792.4, 152.6, 42.1, 17.9]),
    decode(16, 1, true, "b8x8192", [390.4, 58.0, 24.4, 9.9]),
    decode(16, 1, true, "b32x4096", [768.5, 92.2, 36.6, 17.9]),
    decode(16, 1, true, "b64x8192", [3074.3, 336.0, 110.9, 66.7]),
    decode(16, 1, true, "b128x4096", [3093.0, 348.9, 110.4, 66.8]),
    decode(16, 1, true, "ragged64", [NONE, 408.7, 114.6, 65.6]),
    decode(16, 2, true, "b1x4096", [NONE, 64.6, 14.2, 2.4]),
    decode(16, 2, true, "b1x32768", [NONE, 80.7, 24.1, 5.9]),
    decode(16, 2, true, "b1x131072", [NONE, 261.8, 43.6, 17.9]),
    decode(16, 2, true, "b8x8192", [NONE, 92.8, 25.8, 9.9]),
    decode(16, 2, true, "b32x4096", [NONE, 176.8, 38.3, 17.9]),
    decode(16, 2, true, "b64x8192", [NONE, 683.7, 118.4, 66.7]),
    decode(16, 2, true, "b128x4096", [NONE, 684.1, 117.0, 66.8]),
    decode(16, 2, true, "ragged64", [NONE, 747.5, 122.1, 65.6]),
    decode(128, 1, true, "b1x4096", [NONE, 35.0, 15.2, 2.4]),
    decode(128, 1, true, "b1x32768", [NONE, 171.5, 28.5, 5.9]),
    decode(128, 1, true, "b1x131072", [NONE, 639.8, 65.3, 17.9]),
    decode(128, 1, true, "b8x8192", [NONE, 323.4, 40.6, 9.9]),
    decode(128, 1, true, "b32x4096", [NONE, 657.6, 68.2, 17.9]),
    decode(128, 1, true, "b64x8192", [NONE, 2540.0, 218.9, 66.7]),
    decode(128, 1, true, "b128x4096", [NONE, 2628.0, 232.5, 66.8]),
    decode(128, 1, true, "ragged64", [NONE, 2575.0, 231.6, 65.6]),
    decode(128, 2, true, "b1x4096", [NONE, 64.9, 17.5, 2.4]),
    decode(128, 2, true, "b1x32768", [NONE, 352.2, 39.3, 5.9]),
    decode(128, 2, true, "b1x131072", [NONE, 1380.0, 111.5, 17.9]),
    decode(128, 2, true, "b8x8192", [NONE, 649.3, 65.4, 9.9]),
    decode(128, 2, true, "b32x4096", [NONE, 1296.0, 113.3, 17.9]),
    decode(128, 2, true, "b64x8192", [NONE, 5143.0, 418.1, 66.7]),
    decode(128, 2, true, "b128x4096", [NONE, 5226.0, 446.7, 66.8]),
    decode(128, 2, true, "ragged64", [NONE, 5460.0, 418.0, 65.6]),
];

/// Dtype, tokens, heads, Triton, CUDA; heads of 128 elements.
#[rustfmt::skip]
const MERGE: &[(Dtype, u32, u32, f64, f64)] = &[
    (Dtype::F16, 256, 16, 4.5, 3.1),
    (Dtype::F16, 256, 32, 7.5, 3.9),
    (Dtype::F16, 256, 48, 10.2, 4.7),
    (Dtype::F16, 512, 16, 7.5, 3.9),
    (Dtype::F16, 512, 32, 12.9, 5.4),
    (Dtype::F16, 512, 48, 18.1, 7.0),
    (Dtype::F16, 1024, 16, 12.9, 5.4),
    (Dtype::F16, 1024, 32, 23.5, 8.6),
    (Dtype::F16, 1024, 48, 34.7, 11.8),
    (Dtype::F16, 1536, 16, 18.1, 7.0),
    (Dtype::F16, 1536, 32, 34.6, 11.8),
    (Dtype::F16, 1536, 48, 51.8, 16.5),
    (Dtype::F16, 4096, 16, 46.2, 15.2),
    (Dtype::F16, 4096, 32, 90.2, 27.5),
    (Dtype::F16, 4096, 48, 133.8, 39.7),
    (Dtype::Bf16, 256, 16, 4.9, 3.1),
    (Dtype::Bf16, 256, 32, 7.5, 3.9),
    (Dtype::Bf16, 256, 48, 10.2, 4.7),
    (Dtype::Bf16, 512, 16, 7.5, 3.9),
    (Dtype::Bf16, 512, 32, 12.9, 5.4),
    (Dtype::Bf16, 512, 48, 18.1, 7.0),
    (Dtype::Bf16, 1024, 16, 12.9, 5.5),
    (Dtype::Bf16, 1024, 32, 23.5, 8.5),
    (Dtype::Bf16, 1024, 48, 34.7, 11.8),
    (Dtype::Bf16, 1536, 16, 18.1, 7.0),
    (Dtype::Bf16, 1536, 32, 34.7, 11.8),
    (Dtype::Bf16, 1536, 48, 51.8, 16.5),
    (Dtype::Bf16, 4096, 16, 46.2, 15.2),
    (Dtype::Bf16, 4096, 32, 90.3, 27.4),
    (Dtype::Bf16, 4096, 48, 134.3, 39.7),
    (Dtype::F32, 256, 16, 4.9, 3.9),
    (Dtype::F32, 256, 32, 7.6, 5.4),
    (Dtype::F32, 256, 48, 10.3, 6.8),
    (Dtype::F32, 512, 16, 7.7, 5.4),
    (Dtype::F32, 512, 32, 13.0, 8.3),
    (Dtype::F32, 512, 48, 19.0, 11.4),
    (Dtype::F32, 1024, 16, 13.0, 8.3),
    (Dtype::F32, 1024, 32, 25.5, 14.5),
    (Dtype::F32, 1024, 48, 37.3, 20.4),
    (Dtype::F32, 1536, 16, 19.2, 11.4),
    (Dtype::F32, 1536, 32, 37.2, 20.4),
    (Dtype::F32, 1536, 48, 54.6, 29.2),
    (Dtype::F32, 4096, 16, 48.7, 26.4),
    (Dtype::F32, 4096, 32, 95.4, 50.0),
    (Dtype::F32, 4096, 48, 142.0, 73.4),
];
