//! `kv_append` into e4m3 divides exactly: each code is that of the nearest value to the quotient of the input and the scale, ties to even.

use wgpu_mla::{
    Backend, Dtype, KvAppend, KvAppendArgs, KvSpec, KvView, MlaDecode, MlaShape, View, e4m3_decode,
};

use super::Session;
use super::memory::{download, upload};

const SHAPE: MlaShape = MlaShape { num_heads: 1, kv_lora_rank: 256, qk_rope_head_dim: 32 };
const ROW: usize = 288;

/// 1.75 puts many 16-bit values on ties, 448 and 0.01 reach both ends of the range; the others are near the limits of a kernel's fast path,
/// and of f32.
const SCALES: [f32; 11] =
    [1.0, 1.75, 0.37, 448.0, 0.01, 1.175_494_4e-38, 3e38, 4e-38, 7.888_609e-31, 1.267_650_6e30, 8.963_647e29];

/// Values on ties between two codes, and their neighbours; for 16-bit inputs every code.
pub fn exact_appends<B: Backend>(session: &Session<'_, B>) {
    let every_code: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let ties = ties();
    for k_scale in SCALES {
        let mut near = Vec::new();
        for tie in ties.iter().map(|tie| (tie * f64::from(k_scale)) as f32).filter(|tie| tie.is_normal()) {
            let bits = tie.to_bits();
            for bits in [bits - 1, bits, bits + 1] {
                near.extend_from_slice(&[bits, bits | 1 << 31]);
            }
        }
        // Zero, the smallest and the largest subnormal and normal numbers, infinity, and NaN.
        near.extend([0, 1, 0x7F_FFFF, 0x80_0000, 0x7F7F_FFFF, 0x7F80_0000, 0x7F80_0001, 0xFFC0_0000]);
        let near = near.into_iter().flat_map(u32::to_le_bytes).collect::<Vec<u8>>();
        for (input, bytes) in [(Dtype::F32, &near), (Dtype::F16, &every_code), (Dtype::Bf16, &every_code)] {
            let what = format!("exact append of {input} with k_scale {k_scale}");
            session.note(&what, check(session.backend, input, bytes, k_scale, &ties));
        }
    }
    session.finish("exact appends");
}

/// Halfway between each e4m3 value and the next.
pub fn ties() -> Vec<f64> {
    let value = |code| f64::from(e4m3_decode(code));
    (0..0x7E).map(|code| f64::midpoint(value(code), value(code + 1))).collect()
}

/// The code of a quotient: that of the nearest e4m3 value, ties to even. The f64 quotient of two f32 is on the same side of every tie as
/// the exact one.
pub fn nearest_code(quotient: f64, ties: &[f64]) -> u8 {
    if quotient.is_nan() {
        return 0x7F;
    }
    let below = ties.partition_point(|&tie| tie < quotient.abs());
    let up = below % 2 == 1 && ties.get(below) == Some(&quotient.abs());
    (below as u8 + u8::from(up)) | if quotient.is_sign_negative() { 0x80 } else { 0 }
}

fn check<B: Backend>(
    backend: &B,
    input: Dtype,
    bytes: &[u8],
    k_scale: f32,
    ties: &[f64],
) -> Result<(), String> {
    let mut bytes = bytes.to_vec();
    bytes.resize(bytes.len().next_multiple_of(ROW * input.bytes()), 0);
    let tokens = bytes.len() / (ROW * input.bytes());
    let kv = KvSpec { layout: Dtype::E4m3.into(), page_size: 64, num_pages: tokens.div_ceil(64) as u32 };
    let shapes = MlaDecode { shape: SHAPE, kv, query: Dtype::F32, out: Dtype::F32 };
    let text = |error: wgpu_mla::Error| error.to_string();
    let rows = upload(backend, &bytes).map_err(text)?;
    let cache = upload(backend, &vec![0; kv.num_slots() as usize * ROW]).map_err(text)?;
    let view = |offset| View { buffer: &rows, offset, token_stride: ROW as u64, head_stride: 1 };
    let args = KvAppendArgs {
        kv_c: view(0),
        k_pe: view(256),
        kv: KvView::dense(&cache, &shapes),
        k_scale,
        guard: None,
    };
    let slots: Vec<i64> = (0..tokens as i64).collect();
    backend.once(KvAppend { shape: SHAPE, kv, input, guard: false }, &slots, &args).map_err(text)?;
    let codes = download(backend, &cache, tokens * ROW).map_err(text)?;
    for (&got, x) in codes.iter().zip(input.decode_all(&bytes)) {
        let want = nearest_code(f64::from(x) / f64::from(k_scale), ties);
        if got != want {
            return Err(format!("{x:e} / {k_scale:e} is stored as {got:#x}, not {want:#x}"));
        }
    }
    Ok(())
}
