#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod arrays;
mod attention;
mod cache;
mod config;
mod device;
mod error;
mod ops;

pub use arrays::{Array, Input, Made, Output, burn_dtype};
pub use attention::MlaAttention;
pub use cache::PagedCache;
pub use config::{CacheOptions, MlaAttentionConfig};
pub use device::MlaDevice;
pub use error::{Error, Result};
pub use ops::{Attended, Scales};
pub use wgpu_mla;
