//! The checkpoint of `examples/generate` in a page. candle does what is not attention, in wasm; attention runs through wgpu-mla on the
//! page's WebGPU, or on the CPU. `page.js` is what a visitor sees of it.
#![cfg(target_arch = "wasm32")]

mod engine;
mod on;

use wasm_bindgen::prelude::*;

use engine::Writer;

#[wasm_bindgen]
extern "C" {
    #[wasm_bindgen(js_namespace = performance)]
    fn now() -> f64;
    #[wasm_bindgen(js_namespace = console)]
    fn error(text: &str);
}

/// The model, its tokenizer and its attention. A call that fails says why, and the next one may be made.
#[wasm_bindgen]
pub struct Engine(Writer);

#[wasm_bindgen]
impl Engine {
    /// An engine from the contents of the checkpoint's files.
    #[wasm_bindgen(constructor)]
    pub fn new(config: &str, weights: Vec<u8>, tokenizer: &str, scales: &str) -> Result<Engine, JsError> {
        std::panic::set_hook(Box::new(|panic| error(&panic.to_string())));
        Ok(Self(Writer::new(config, weights, tokenizer, scales)?))
    }

    /// Opens a device unless it is open, and compiles the attention for a cache of this dtype. Gives who attends, as JSON.
    pub async fn open(&mut self, kv: String, on_gpu: bool) -> Result<String, JsError> {
        self.0.open(&kv, on_gpu).await?;
        Ok(self.0.describe().to_string())
    }

    /// Why the GPU is gone, where it is.
    pub fn lost(&self) -> Option<String> {
        self.0.lost()
    }

    /// Computes the prompt in an empty cache; gives the first token that follows.
    pub async fn begin(&mut self, prompt: String, temperature: f32, seed: u32) -> Result<u32, JsError> {
        Ok(self.0.begin(&prompt, temperature, seed).await?)
    }

    /// Computes the last token; gives the one that follows, or nothing where the text or the cache ends.
    pub async fn next(&mut self) -> Result<Option<u32>, JsError> {
        Ok(self.0.next().await?)
    }

    /// All tokens, the prompt's first. The last is not in the cache yet.
    pub fn tokens(&self) -> Vec<u32> {
        self.0.tokens.clone()
    }

    /// Tokens of the prompt.
    pub fn prompt_tokens(&self) -> usize {
        self.0.prompt_tokens
    }

    /// The text of tokens.
    pub fn text(&self, tokens: Vec<u32>) -> Result<String, JsError> {
        Ok(self.0.text.decode(&tokens)?)
    }

    /// The text of each token by itself.
    pub fn vocabulary(&self) -> Result<Vec<String>, JsError> {
        Ok(self.0.vocabulary()?)
    }

    /// Milliseconds that the decodes since [`Engine::begin`] waited for their attention, and bytes of the cache that it read.
    pub fn traffic(&self) -> Vec<f64> {
        vec![self.0.attention_ms, self.0.cache_bytes]
    }

    /// Pages of the sequence, in its order.
    pub fn pages(&self) -> Vec<i32> {
        self.0.pages()
    }

    /// The attention of the cache's last token, computed on the host from its query and the rows that the cache holds:
    /// `[layers, heads, tokens]`.
    pub async fn weights(&mut self) -> Result<Vec<f32>, JsError> {
        Ok(self.0.weights().await?)
    }

    /// Compares what the attention of the cache's last token gave with the f64 oracle, all layers and heads. Gives the result as JSON.
    pub async fn check(&mut self) -> Result<String, JsError> {
        Ok(self.0.check().await?.to_string())
    }
}
