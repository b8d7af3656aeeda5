//! The module, against the same block in plain operations of burn's.

mod common;

use burn::tensor::{DType, Tensor};
use common::{assert_close, cast, on, plain_attention, plain_rope, random};
use wgpu_mla_burn::wgpu_mla::{Dtype, KvSpec, LayerArrays, PagePool, RopeFrequencies};
use wgpu_mla_burn::{CacheOptions, MlaAttention, MlaAttentionConfig, PagedCache};

fn config(q_lora_rank: Option<usize>) -> MlaAttentionConfig {
    MlaAttentionConfig::new(64, 2, 256, 64, 32, 48).with_q_lora_rank(q_lora_rank)
}

fn options() -> CacheOptions {
    CacheOptions {
        page_size: 16,
        num_pages: 8,
        max_tokens: 32,
        max_decodes: 4,
        max_position: 64,
        workspace_bytes: 1 << 18,
        ..CacheOptions::default()
    }
}

/// The block on the hidden states of a sequence from its first token on, in f32; gives the rows of the last `last` tokens.
fn plain(config: &MlaAttentionConfig, module: &MlaAttention, x: Tensor<2>, last: usize) -> Tensor<2> {
    let module = cast(module.clone(), DType::F32);
    let x = x.cast(DType::F32);
    let [tokens, _] = x.dims();
    let (heads, latent) = (config.num_attention_heads, config.kv_lora_rank);
    let (nope, rope, value) = (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim);
    let kv_a = module.kv_a_proj_with_mqa.forward(x.clone());
    let kv_c = module.kv_a_layernorm.forward(kv_a.clone().narrow(1, 0, latent));
    let k_pe =
        plain_rope(kv_a.narrow(1, latent, rope).reshape([tokens, 1, rope]), 0, 1e4).repeat(&[1, heads, 1]);
    let kv = module.kv_b_proj.forward(kv_c).reshape([tokens, heads, nope + value]);
    let k = Tensor::cat(vec![kv.clone().narrow(2, 0, nope), k_pe], 2);
    let v = kv.narrow(2, nope, value);
    let q = match (&module.q_a_proj, &module.q_a_layernorm, &module.q_b_proj, &module.q_proj) {
        (Some(a), Some(norm), Some(b), _) => b.forward(norm.forward(a.forward(x))),
        (.., Some(proj)) => proj.forward(x),
        _ => panic!("no query"),
    };
    let q = q.reshape([tokens, heads, nope + rope]);
    let q = Tensor::cat(vec![q.clone().narrow(2, 0, nope), plain_rope(q.narrow(2, nope, rope), 0, 1e4)], 2);
    let scale = 1.0 / ((nope + rope) as f32).sqrt();
    let (out, _) = plain_attention(q, k, v, scale);
    module.o_proj.forward(out.reshape([tokens, heads * value])).narrow(0, tokens - last, last)
}

/// Two layers, two sequences: prompts, then a decode beside a prompt, then a decode of both, forked.
fn serves(q_lora_rank: Option<usize>, dtype: DType, options: &CacheOptions, tolerance: f32) {
    let (on, config) = (on(), config(q_lora_rank));
    let device = on.device();
    let layers = [(); 2].map(|()| cast(config.init(device), dtype));
    let mut cache = PagedCache::new(on, &config, &layers, options).expect("a cache");
    let [a, b] = [(); 2].map(|()| cache.pool().add());
    let mut seen: Vec<(wgpu_mla_burn::wgpu_mla::SeqId, Tensor<2>)> = Vec::new();
    for step in [vec![(a, 19)], vec![(b, 5), (a, 1)], vec![(a, 1), (b, 1)], vec![(b, 1), (a, 1)]] {
        let mut requests = step;
        cache.begin(&mut requests).expect("a step");
        let total: u32 = requests.iter().map(|(_, tokens)| tokens).sum();
        // Hidden states of both layers are the same ones: each layer is compared by itself.
        let x = random([total as usize, 64], dtype, device) * 0.5 + 0.125;
        let outs = [0, 1].map(|layer| layers[layer].forward(x.clone(), &cache, layer).expect("attended"));
        let mut begin = 0;
        for &(seq, tokens) in &requests {
            let tokens = tokens as usize;
            let new = x.clone().narrow(0, begin, tokens);
            match seen.iter_mut().find(|(it, _)| *it == seq) {
                Some((_, rows)) => *rows = Tensor::cat(vec![rows.clone(), new], 0),
                None => seen.push((seq, new)),
            }
            let (_, rows) = seen.iter().find(|(it, _)| *it == seq).expect("seen");
            for (layer, (module, out)) in layers.iter().zip(&outs).enumerate() {
                let want = plain(&config, module, rows.clone(), tokens);
                let name = format!("{dtype:?}, layer {layer}, {:?} of {requests:?}", (begin, tokens));
                assert_close(&name, out.clone().narrow(0, begin, tokens), want, tolerance);
            }
            begin += tokens;
        }
    }
}

#[test]
fn f32_weights() {
    serves(None, DType::F32, &options(), 2e-5);
}

#[test]
fn f16_weights() {
    serves(Some(40), DType::F16, &options(), 6e-3);
}

/// One line of the options.
#[test]
fn an_e4m3_cache() {
    serves(None, DType::F32, &CacheOptions { kv: Some(Dtype::E4m3), ..options() }, 6e-2);
}

/// A host that has a pool, weights, factors and a table of RoPE of its own gets the same bits.
#[test]
fn a_pool_of_the_hosts_own() {
    let (on, config) = (on(), config(None));
    let layer = config.init(on.device());
    let options = CacheOptions { kv: Some(Dtype::E4m3), k_scale: 0.5, ..options() };
    let mut cache = PagedCache::new(on, &config, [&layer], &options).expect("a cache");
    let table = RopeFrequencies::plain(32, config.rope_theta).expect("frequencies");
    let table = table.cos_sin(options.max_position).expect("a table");
    let kv = KvSpec { layout: Dtype::E4m3.into(), page_size: 16, num_pages: 8 };
    let given = CacheOptions { cos_sin: Some(table), k_scale: 1.0, k_scales: vec![0.5], ..options.clone() };
    let weight = || [layer.kv_b_proj.weight.val()];
    let mut other = PagedCache::with_weights(on, &config, weight(), &given).expect("a cache");
    let mut pool = PagePool::new(kv).expect("a pool");
    let (mut arrays, [a, b]) = (LayerArrays::default(), [cache.pool().add(), pool.add()]);
    for tokens in [19, 1] {
        cache.begin(&mut [(a, tokens)]).expect("a step");
        let copies = pool.layer_step_into(&[(b, tokens)], &mut arrays).expect("pages");
        other.begin_batch(&arrays.batch(), &copies).expect("a step");
        let x = random([tokens as usize, 64], DType::F32, on.device());
        let outs = [&cache, &other].map(|cache| layer.forward(x.clone(), cache, 0).expect("attended"));
        let [want, got] = outs.map(common::values);
        assert_eq!(want, got);
    }
    let short = CacheOptions { cos_sin: Some(vec![0.0; 64]), ..options };
    PagedCache::with_weights(on, &config, weight(), &short).expect_err("a table of one position");
}

/// A checkpoint's names and orientation of weights, in a file of several layers.
#[test]
fn weights_of_a_checkpoint() {
    use safetensors::tensor::{Dtype as Stored, TensorView, serialize_to_file};
    let (on, config) = (on(), config(None));
    let names = [
        ("q_proj", [2 * 96, 64]),
        ("kv_a_proj_with_mqa", [288, 64]),
        ("kv_b_proj", [2 * 112, 256]),
        ("o_proj", [64, 2 * 48]),
    ];
    let number = |i: usize| ((i * 37 % 101) as f32 - 50.0) / 512.0;
    let bytes = |count: usize| (0..count).flat_map(|i| number(i).to_le_bytes()).collect::<Vec<u8>>();
    let mut stored = Vec::new();
    for layer in [1, 12] {
        for (name, [rows, columns]) in names {
            let name = format!("model.layers.{layer}.self_attn.{name}.weight");
            stored.push((name, vec![rows, columns], bytes(rows * columns)));
        }
    }
    stored.push(("model.layers.1.self_attn.kv_a_layernorm.weight".into(), vec![256], bytes(256)));
    let views = stored.iter().map(|(name, shape, bytes)| {
        (name.clone(), TensorView::new(Stored::F32, shape.clone(), bytes).expect("a tensor"))
    });
    let file = std::env::temp_dir().join(format!("wgpu-mla-burn-{}.safetensors", std::process::id()));
    serialize_to_file(views, None, &file).expect("written");
    let mut module = config.init(on.device());
    let missing = module.load_safetensors(&file, "model.layers.1.self_attn.", DType::F32).expect("loaded");
    assert!(missing.is_empty(), "{missing:?}");
    let missing = module.load_safetensors(&file, "model.layers.12.self_attn.", DType::F32).expect("loaded");
    assert_eq!(missing.len(), 1, "{missing:?}");
    std::fs::remove_file(&file).expect("removed");
    let weights = common::values(module.kv_b_proj.weight.val().transpose());
    assert!(weights.iter().enumerate().all(|(i, &x)| x == number(i)), "another orientation");
    assert_eq!(common::values(module.kv_a_layernorm.gamma.val())[7], number(7));
}
