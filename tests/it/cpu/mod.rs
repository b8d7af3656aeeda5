//! The CPU backend against a short f64 check of its own, its bit-exact promises, and its errors.
#![allow(clippy::unwrap_used)]

mod case;
mod decode;
mod errors;
mod lists_of_layers;
mod ops;
mod steps;

use wgpu_mla::cpu::{Buffer, Cpu};
use wgpu_mla::{
    Batch, Capacity, DecodeOptions, Device, Dtype, Error, Kernel, KvAppend, KvAppendArgs, KvCopyPages,
    KvSpec, KvView, LayerBatch, LayerCapacity, LayerOptions, LseBase, Mask, MergeState, MergeStateArgs,
    MlaDecode, MlaDecodeArgs, MlaShape, Op, OpOptions, PageTable, Plan, Query, Rope, RopeArgs, RopeLayout,
    SharedPrefix, SplitPolicy, Step, Tiling, View,
};

use crate::every_op::layer_args;
use case::{Case, Seq, bits, shape};

const DTYPES: [Dtype; 4] = Dtype::ALL;
const WILD: i32 = 2_147_480_000;

/// About normal, from a counter, so that an element does not depend on the batch around it.
fn noise(stream: u64, index: u64) -> f32 {
    let mut x = stream.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ index.wrapping_mul(0xD6E8_FEB8_6659_FD93);
    let mut sum = 0.0;
    for _ in 0..4 {
        x = (x ^ x >> 32).wrapping_mul(0xD6E8_FEB8_6659_FD93);
        x ^= x >> 29;
        sum += (x >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
    }
    sum * 1.7
}

/// Element `index` of a stream.
type Data = fn(stream: u64, index: u64) -> f32;

/// A decode of this variant.
fn forced(variant: &str) -> DecodeOptions {
    DecodeOptions { variant: Some(variant.to_owned()), ..DecodeOptions::default() }
}

fn small_spec() -> MlaDecode {
    let kv = KvSpec { layout: Dtype::F16.into(), page_size: 16, num_pages: 4 };
    MlaDecode { shape: shape(2, 256, 32), kv, query: Dtype::F16, out: Dtype::F32 }
}

struct Small {
    cpu: Cpu,
    q: Buffer,
    kv: Buffer,
    out: Buffer,
    lse: Buffer,
}

fn small() -> Small {
    let cpu = Cpu::with_threads(2);
    let [q, kv, out, lse] = [1 << 12, 1 << 16, 1 << 13, 1 << 8].map(|bytes| cpu.buffer(bytes).unwrap());
    Small { cpu, q, kv, out, lse }
}

crate::tests![(in decode, errors, lists_of_layers, ops, steps)];
