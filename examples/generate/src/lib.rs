//! Generates text with checkpoints in Hugging Face's format, or GGUF files, of models with DeepSeek's attention. candle does what is not
//! attention, on the CPU in f32; attention runs through wgpu-mla over a paged cache, on any of its backends.
//!
//! ```no_run
//! use generate::{Checkpoint, Options, Setup, Sampling};
//!
//! # fn main() -> generate::Result<()> {
//! let checkpoint = Checkpoint::open("examples/generate/model".as_ref())?;
//! let mut attention = generate::paged(&checkpoint.model, &Setup::default())?;
//! let prompts = [checkpoint.tokenizer()?.encode("ROMEO:")?];
//! let options = Options { max_tokens: 50, sampling: Sampling { temperature: 0.8, seed: 1, ..Sampling::default() } };
//! let done = generate::generate(&checkpoint.model, attention.as_mut(), &prompts, &options, &mut |_, _| Ok(()))?;
//! # Ok(()) }
//! ```
//!
//! [`attention::Attention`] is the interface between both: before it are the projections, after it `o_proj`.

#[cfg(not(target_arch = "wasm32"))]
mod accuracy;
#[cfg(not(target_arch = "wasm32"))]
mod args;
mod arrays;
pub mod attention;
mod backend;
#[cfg(target_arch = "x86_64")]
mod block_dots;
#[cfg(not(target_arch = "wasm32"))]
mod blocks;
#[cfg(target_arch = "wasm32")]
#[path = "no_blocks.rs"]
mod blocks;
mod bytes;
#[cfg(not(target_arch = "wasm32"))]
mod chat;
mod check;
mod checkpoint;
mod config;
mod conversation;
mod defaults;
#[cfg(not(target_arch = "wasm32"))]
mod distances;
mod dot;
mod encoding;
mod error;
mod evaluate;
mod experts;
mod fields;
mod files;
mod generation;
#[cfg(not(target_arch = "wasm32"))]
mod gguf;
mod guard;
mod index;
mod index_arrays;
mod index_projections;
mod indexer;
#[cfg(not(target_arch = "wasm32"))]
mod interrupts;
mod kv_b;
mod layer;
mod long_rope;
pub mod look;
#[cfg(not(target_arch = "wasm32"))]
mod losses;
mod matrix;
#[cfg(not(target_arch = "wasm32"))]
mod memory;
mod model;
mod models;
mod names;
#[cfg(not(target_arch = "wasm32"))]
mod page;
mod paged;
mod pages;
pub mod parts;
mod prefill;
#[cfg(not(target_arch = "wasm32"))]
mod print;
#[cfg(not(target_arch = "wasm32"))]
pub mod program;
#[cfg(not(target_arch = "wasm32"))]
mod python;
mod quantization;
mod rope;
mod rope_keys;
mod sample;
mod sentencepiece;
mod session;
mod setup;
mod softmax_weights;
mod stops;
mod stored;
#[cfg(not(target_arch = "wasm32"))]
mod talk;
#[cfg(not(target_arch = "wasm32"))]
mod template;
mod text;
mod thinking;
mod tiktoken;
mod tokenizer_config;
mod weights;

#[cfg(not(target_arch = "wasm32"))]
pub use accuracy::{Accuracy, AccuracyRow, Formats, accuracy};
pub use backend::Where;
#[cfg(not(target_arch = "wasm32"))]
pub use backend::devices;
#[cfg(not(target_arch = "wasm32"))]
pub use chat::Chat;
pub use check::Furthest;
pub use checkpoint::Checkpoint;
pub use config::Config;
pub use conversation::Conversation;
pub use error::{Error, Result};
pub use evaluate::{Score, check_windows, evaluate};
pub use generation::Generation;
pub use indexer::IndexerConfig;
#[cfg(not(target_arch = "wasm32"))]
pub use memory::{bytes, free, notice};
pub use model::{Model, Pass};
pub use paged::Paged;
#[cfg(not(target_arch = "wasm32"))]
pub use paged::paged;
pub use pages::Pages;
pub use rope::{QueryScaling, RopeConfig};
pub use sample::{Sampler, Sampling};
pub use session::{Done, Options, Stats, check_prompts, generate, generate_until};
pub use setup::Setup;
pub use softmax_weights::softmax_weights;
pub use stops::Stops;
pub use stored::Stored;
#[cfg(not(target_arch = "wasm32"))]
pub use template::{ChatTemplate, Message};
pub use text::Text;
pub use thinking::Thinking;
