//! Tokens that are records of bytes: `fp8_ds_mla`'s 656 bytes, and 528 without the rotary part.
//!
//! ```text
//! [0, 512) e4m3 codes    [512, 528) four f32 scales, of 128 codes each    [528, 656) 64 bf16 rotary elements
//! latent[i] = code[i] * scale[i / 128]
//! ```

use wgpu_mla::{Dtype, KvLayout, KvSpec, MlaShape};

const LATENT: usize = 512;
const GROUP: usize = 128;

/// The scale of a group: the least power of two, from 2^-13 on, with which no element is past 448; 2^120, the largest, where an element is
/// not finite.
pub fn group_scale(group: &[f32]) -> f32 {
    if group.iter().any(|x| !x.is_finite()) {
        return f64::powi(2.0, 120) as f32;
    }
    let amax = group.iter().fold(0.0f64, |amax, x| amax.max(f64::from(x.abs())));
    let exponent = (-13..=127).find(|&e| 448.0 * f64::powi(2.0, e) >= amax);
    f64::powi(2.0, exponent.expect("finite elements")) as f32
}

/// The bytes of a token.
pub fn record(latent: &[f32], rope: &[f32]) -> Vec<u8> {
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for group in latent.chunks(GROUP) {
        let scale = group_scale(group);
        group.iter().for_each(|x| Dtype::E4m3.encode(x / scale, &mut codes));
        scales.extend_from_slice(&scale.to_le_bytes());
    }
    rope.iter().for_each(|&x| Dtype::Bf16.encode(x, &mut scales));
    [codes, scales].concat()
}

/// The elements of a cache, `[num_slots, L + R]`: of a dtype as they are, of records times their scales.
pub fn cache_values(kv: &KvSpec, shape: &MlaShape, cache: &[u8]) -> Vec<f32> {
    if let KvLayout::Plain(dtype) = kv.layout {
        return dtype.decode_all(cache);
    }
    let token = |bytes: &[u8]| -> Vec<f32> {
        let scales = Dtype::F32.decode_all(&bytes[LATENT..LATENT + 16]);
        let codes = Dtype::E4m3.decode_all(&bytes[..LATENT]).into_iter().enumerate();
        let latent = codes.map(|(i, code)| code * scales[i / GROUP]);
        latent.chain(Dtype::Bf16.decode_all(&bytes[LATENT + 16..])).collect()
    };
    cache.chunks(kv.token(shape).bytes as usize).flat_map(token).collect()
}
