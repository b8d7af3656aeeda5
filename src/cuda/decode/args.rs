//! The arguments of `mla_decode` and `mla_merge`: `struct Args` of `shaders/cuda/kernels/decode/mla.cuh`.

use cudarc::driver::DeviceRepr;

use crate::cuda::ops::Divisor;

/// One step and one layer. Addresses are of device memory; strides count elements.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Args {
    pub header: u64,
    pub items: u64,
    pub queries: u64,
    pub merges: u64,
    pub merge_partials: u64,
    pub pages: u64,
    pub topk_lengths: u64,
    pub sinks: u64,
    pub partials: u64,
    pub q_nope: u64,
    pub q_pe: u64,
    pub kv: u64,
    pub out: u64,
    pub lse: u64,
    pub q_nope_token_stride: u64,
    pub q_nope_head_stride: u64,
    pub q_pe_token_stride: u64,
    pub q_pe_head_stride: u64,
    pub kv_block_stride: u64,
    pub out_token_stride: u64,
    pub out_head_stride: u64,
    pub lse_token_stride: u64,
    pub lse_head_stride: u64,
    pub topk_length_stride: u64,
    pub logit_scale: f32,
    pub out_scale: f32,
    pub lse_scale: f32,
    pub num_heads: u32,
    pub max_queries: u32,
    pub query_dtype: u32,
    pub out_dtype: u32,
    pub copies: u32,
    pub clamp_pages: u32,
    pub page_size: u32,
    pub num_pages: u32,
    pub tile_pages: u32,
    pub tile_rest: u32,
    pub multiprocessors: u32,
    pub is_listed: u32,
    pub list_stride: u32,
    pub first_slot: u32,
    pub num_slots: u32,
    pub by_page_size: Divisor,
}

// SAFETY: plain data without padding, whose layout the kernels share.
unsafe impl DeviceRepr for Args {}

/// `enum Copying` of `shaders/cuda/kernels/decode/mla.cuh`: how a cache may be copied.
#[derive(Debug, Clone, Copy)]
pub(super) enum Copying {
    /// By cp.async of 8 bytes: tokens are aligned to 8 bytes.
    Chunks8 = 0,
    /// By cp.async of 16 bytes: tokens are aligned to 16.
    Chunks16 = 1,
    /// By TMA boxes.
    Boxes = 2,
}
