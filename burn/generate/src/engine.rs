//! All of a model on burn's wgpu device.

use std::sync::OnceLock;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use generate::attention::{Attention, Rows};
use generate::parts::Matrix;
use generate::program::DeviceEngine;
use generate::{Checkpoint, Config, Error, Pages, Result, Setup, Where};
use wgpu_mla_burn::wgpu_mla::{KvLayout, SeqId, wgpu};
use wgpu_mla_burn::{CacheOptions, MlaAttentionConfig, MlaDevice, PagedCache, burn_dtype};

use crate::experts::values;
use crate::layer::{Layer, Step, of_burn};
use crate::linear::{Linear, Norm};
use crate::times::{Part, Times};
use crate::upload::Upload;

/// Tokens of a step of a prompt.
const STEP_TOKENS: u32 = 2048;

/// burn's device, made when it is first asked for: burn makes it once a process.
#[derive(Debug, Default)]
pub struct Burn {
    on: OnceLock<Result<MlaDevice, String>>,
}

impl Burn {
    /// The device.
    ///
    /// # Errors
    /// [`Error::Engine`] where burn finds no adapter.
    pub fn on(&self) -> Result<&MlaDevice> {
        let made = self.on.get_or_init(|| MlaDevice::new().map_err(|error| error.to_string()));
        made.as_ref().map_err(|why| Error::Engine(why.clone()))
    }

    /// The model on the device. Weights go there one after the other, from the file that is mapped.
    ///
    /// # Errors
    /// [`Error::Input`] for what is not served; the errors of the device.
    pub fn open(
        &self,
        checkpoint: &Checkpoint,
        setup: &Setup,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Engine> {
        check(&checkpoint.model.config, setup)?;
        Engine::new(self.on()?, checkpoint, setup, progress)
    }
}

impl DeviceEngine for Burn {
    fn serves(&self, config: &Config, setup: &Setup, is_asked: bool) -> Result<()> {
        check(config, setup)?;
        let on = self.on()?;
        let info = on.gpu().device().adapter_info();
        if !is_asked && info.device_type == wgpu::DeviceType::Cpu {
            let why = "is no GPU but a driver in software; --engine burn takes it all the same";
            return Err(Error::Engine(format!("{} {why}", info.name)));
        }
        weight_dtype(on.device(), setup).map(drop)
    }

    fn load(
        &self,
        checkpoint: &Checkpoint,
        setup: &Setup,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Box<dyn Attention>> {
        Ok(Box::new(self.open(checkpoint, setup, progress)?))
    }
}

/// What this engine does not do.
fn check(config: &Config, setup: &Setup) -> Result<()> {
    let not =
        |what: &str| Err(Error::Input(format!("{what} is not served by the engine burn: use --engine cpu")));
    if config.indexer.is_some() {
        return not("an indexer");
    }
    if !matches!(setup.backend, Where::Auto | Where::Wgpu) {
        return not("a backend other than wgpu");
    }
    if setup.guard {
        return not("--guard");
    }
    if setup.exact {
        return not("--exact");
    }
    match setup.kv {
        KvLayout::Plain(_) => Ok(()),
        _ => not("a cache of records"),
    }
}

/// The dtype of weights: the one that was asked for, or the best one.
fn weight_dtype(device: &Device, setup: &Setup) -> Result<DType> {
    let Some(dtype) = setup.device_weight else {
        return Ok(if device.supports_dtype(DType::F16) { DType::F16 } else { DType::F32 });
    };
    match burn_dtype(dtype).filter(|&dtype| device.supports_dtype(dtype)) {
        Some(dtype) => Ok(dtype),
        None => {
            let cure = "another dtype, or for bf16 build with --features vulkan";
            Err(Error::Input(format!(
                "--weight-dtype {dtype}: burn does not have it on this device; use {cure}"
            )))
        }
    }
}

/// A model on the device, its cache, and its pages.
pub struct Engine {
    on: MlaDevice,
    config: Config,
    /// On the host: a token needs one row of it.
    embed: Matrix,
    layers: Vec<Layer>,
    norm: Norm,
    head: Linear,
    cache: PagedCache,
    /// All layers have it from the start.
    cache_bytes: u64,
    pages: Pages,
    /// To measure a step's parts.
    pub times: Times,
}

impl Engine {
    fn new(
        on: &MlaDevice,
        checkpoint: &Checkpoint,
        setup: &Setup,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Self> {
        let (model, config) = (&checkpoint.model, &checkpoint.model.config);
        let dtype = weight_dtype(on.device(), setup)?;
        let limits = on.gpu().device().limits();
        let limit = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size);
        let mut upload = Upload::new(on.device(), dtype, limit, progress);
        let max_tokens = STEP_TOKENS.max(setup.step_tokens).max(setup.sequences);
        let spec = setup.spec(model);
        let max_position = setup.max_position(model);
        let dims = MlaAttentionConfig::new(
            config.hidden_size,
            config.shape.num_heads as usize,
            config.shape.kv_lora_rank as usize,
            config.qk_nope_head_dim,
            config.shape.qk_rope_head_dim as usize,
            config.v_head_dim,
        );
        let KvLayout::Plain(kv) = setup.kv else { return Err(Error::Input("a cache of records".into())) };
        let options = CacheOptions {
            kv: Some(kv),
            k_scales: (0..config.num_layers).map(|layer| setup.k_scale(layer)).collect(),
            page_size: spec.kv.page_size,
            num_pages: spec.kv.num_pages,
            max_tokens,
            // A prompt's last piece may be one token, which is decoded, anywhere in a batch.
            max_decodes: max_tokens,
            max_position,
            workspace_bytes: spec.workspace_bytes,
            cos_sin: Some(config.rope.cos_sin(max_position)?),
            rope_layout: spec.rope,
            softmax_scale: Some(config.softmax_scale()?),
            ..CacheOptions::default()
        };
        let kv_b = model.kv_b.iter().map(|kv_b| upload.kv_b(kv_b));
        let cache = PagedCache::with_weights(on, &dims, kv_b, &options).map_err(of_burn)?;
        let layers = model.layers.iter().map(|layer| Layer::of(&mut upload, layer, config));
        Ok(Self {
            layers: layers.collect::<Result<_>>()?,
            norm: Norm::of(&upload, &model.norm)?,
            head: Linear::matrix(&mut upload, &model.head)?,
            embed: model.embed.clone(),
            pages: Pages::new(spec.kv, spec.kv.num_pages, max_position as usize, max_tokens)?,
            cache_bytes: setup.cache_bytes(model),
            on: on.clone(),
            config: config.clone(),
            cache,
            times: Times::default(),
        })
    }

    /// burn's device.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.on.device()
    }

    /// Rows of a tensor that the host made.
    fn rows(&self, values: Vec<f32>, columns: usize) -> Tensor<2> {
        let shape = [values.len() / columns.max(1), columns];
        Tensor::from_data(TensorData::new(values, shape), (self.on.device(), DType::F32))
    }

    fn compute(&mut self, tokens: &[u32], wanted: &[u32]) -> Result<Vec<f32>> {
        let rows = |&token: &u32| self.embed.part(token as usize..token as usize + 1).values();
        let mut embedded: Vec<f32> = tokens.iter().flat_map(rows).collect();
        let scales = self.config.scales;
        embedded.iter_mut().for_each(|x| *x *= scales.embeddings);
        let scaling = self.config.rope.query_scaling;
        let factors = scaling.map(|scaling| self.pages.positions.iter().map(|&at| scaling.of(at)).collect());
        let factors = factors.map(|factors| self.rows(factors, 1));
        let mut x = self.rows(embedded, self.config.hidden_size);
        let on = self.on.clone();
        let mut step = Step {
            cache: &self.cache,
            device: on.device(),
            factors,
            residuals: scales.residuals,
            times: &mut self.times,
        };
        step.times.end(Part::Host, on.device());
        for (index, layer) in self.layers.iter().enumerate() {
            x = layer.forward(x, index, &mut step)?;
        }
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        if !wanted.iter().copied().eq(0..tokens.len() as u32) {
            let wanted: Vec<i32> = wanted.iter().map(|&row| row as i32).collect();
            let shape = [wanted.len()];
            let wanted = TensorData::new(wanted, shape);
            x = x.select(0, Tensor::<1, Int>::from_data(wanted, (on.device(), DType::I32)));
        }
        let normed = self.norm.forward(x) * scales.head;
        let logits = self.head.forward(normed.cast(self.head.dtype())).cast(DType::F32);
        self.times.end(Part::Burn, on.device());
        let logits = values(logits)?;
        self.times.end(Part::Host, on.device());
        Ok(logits)
    }
}

impl Attention for Engine {
    fn describe(&self) -> String {
        let (gpu, dtype) = (self.on.gpu().describe(), self.head.dtype());
        let memory = self.on.device().memory_pool_usage();
        let memory = memory
            .map_or_else(String::new, |memory| format!(" in {}", generate::bytes(memory.bytes_reserved)));
        let variant = self.cache.mla().variant();
        format!("{gpu}, all of the model by burn, {dtype:?} weights{memory}, variant {variant}")
    }

    fn pages(&self) -> &Pages {
        &self.pages
    }

    fn pages_mut(&mut self) -> &mut Pages {
        &mut self.pages
    }

    fn begin(&mut self, batch: &[(SeqId, u32)]) -> Result<()> {
        self.pages.begin(batch)?;
        self.cache.begin_batch(&self.pages.batch(), &self.pages.copies).map_err(of_burn)
    }

    fn attend(&mut self, _: usize, _: &Rows) -> Result<Vec<f32>> {
        Err(Error::Engine("this engine computes whole steps".into()))
    }

    fn cache_bytes(&self) -> u64 {
        self.cache_bytes
    }

    fn step(&mut self, tokens: &[u32], wanted: &[u32]) -> Result<Option<Vec<f32>>> {
        self.compute(tokens, wanted).map(Some)
    }
}
