//! What a host uses that awaits its attention, such as a page: a checkpoint from memory, steps layer by layer, a look into the cache.

mod common;

use common::{checkpoint, path};
use generate::attention::Attention;
use generate::{Checkpoint, Model, Paged, Setup, Stored, Text};
use wgpu_mla::cpu::Cpu;
use wgpu_mla::gpu::Gpu;
use wgpu_mla::{Backend, Dtype};

const TOKENS: [u32; 37] = {
    let mut tokens = [0; 37];
    let mut at = 0;
    while at < 37 {
        tokens[at] = at as u32 * 5 % 96;
        at += 1;
    }
    tokens
};

/// In steps, layer by layer; and all that was stored, taken out in pieces, is what the projections gave.
fn written_and_looked_at<D: Backend>(device: &D, model: &Model) {
    let setup = Setup { kv: Dtype::F32.into(), page_size: 16, ..Setup::default() };
    let mut paged = Paged::new(device, model, &setup).expect("an attention");
    let mut stored = Stored::new(device, &paged, 20).expect("a look into the cache");
    let (layers, latent) = (model.config.num_layers, model.config.shape.kv_lora_rank as usize);
    let mut latents = vec![Vec::new(); layers];
    // Another sequence, so that pages and tokens are not numbered alike.
    let [other, sequence] = [(); 2].map(|()| paged.pages_mut().add());
    paged.begin(&[(other, 3)]).expect("pages");
    model.step(&TOKENS[..3], &[2], &mut paged).expect("a step");
    let mut logits = Vec::new();
    for tokens in [&TOKENS[..30], &TOKENS[30..36], &TOKENS[36..]] {
        paged.begin(&[(sequence, tokens.len() as u32)]).expect("pages");
        let mut pass = model.pass(tokens, &paged.pages().positions).expect("a pass");
        while let Some(rows) = pass.rows().expect("rows") {
            paged.submit(pass.layer, &rows).expect("submits");
            let (out, bytes) = paged.out();
            latents[pass.layer].extend(rows.kv_c);
            pass.attended(Dtype::F32.decode_all(&device.download(out, bytes).expect("an output")))
                .expect("a layer");
        }
        logits = pass.logits(&[tokens.len() as u32 - 1]).expect("logits");
    }
    let mut at_once = Paged::new(device, model, &setup).expect("an attention");
    let sequence = at_once.pages_mut().add();
    at_once.begin(&[(sequence, 37)]).expect("pages");
    let want = model.step(&TOKENS, &[36], &mut at_once).expect("a step");
    assert!(common::furthest(&logits, &want) < 2e-3);

    let mut rows = Vec::new();
    for (begin, tokens) in [(0, 20), (20, 17)] {
        let (buffer, bytes) = stored.submit(&paged, begin, tokens).expect("gathers");
        rows.extend(Dtype::F32.decode_all(&device.download(buffer, bytes).expect("rows")));
    }
    let row = model.config.shape.row_elems() as usize;
    assert_eq!(rows.len(), 37 * layers * row);
    for (layer, latents) in latents.iter().enumerate() {
        let got: Vec<f32> = rows
            .chunks_exact(row)
            .skip(layer)
            .step_by(layers)
            .flat_map(|row| &row[..latent])
            .copied()
            .collect();
        assert!(got == *latents, "{}, layer {layer}", device.name());
    }
    assert!(stored.submit(&paged, 37, 1).is_err(), "there is no such token");
}

#[test]
fn layer_by_layer() {
    let tiny = checkpoint("tests/tiny/v2-lite");
    written_and_looked_at(&Cpu::new(), &tiny.model);
    match Gpu::new() {
        Ok(gpu) => written_and_looked_at(&gpu, &tiny.model),
        Err(error) => {
            assert!(std::env::var("MLA_REQUIRE_GPU").as_deref() != Ok("1"), "{error}");
            eprintln!("NOT TESTED: wgpu: {error}");
        }
    }
}

#[test]
fn a_checkpoint_from_memory_is_that_of_the_files() {
    let text = |name: &str| std::fs::read_to_string(path(&format!("model/{name}"))).expect("a file");
    let weights = std::fs::read(path("model/model.safetensors")).expect("a file");
    let parse = |config: &str, weights| Checkpoint::parse(config, weights, &text("kv_cache_scales.json"));
    let (parsed, opened) =
        (parse(&text("config.json"), weights.clone()).expect("a checkpoint"), checkpoint("model"));
    assert_eq!(parsed.k_scales, opened.k_scales);
    for layer in 0..opened.model.config.num_layers {
        let [a, b] = [&parsed, &opened].map(|it| it.model.kv_b_proj(layer).expect("weights"));
        assert!(a == b, "layer {layer}");
    }
    let say = "Good morrow, neighbour.";
    let tokenizer = Text::parse(&text("tokenizer.json")).expect("a tokenizer");
    assert_eq!(
        tokenizer.encode(say).expect("tokens"),
        opened.tokenizer().expect("one").encode(say).expect("tokens")
    );

    let refused = |result: generate::Result<Checkpoint>, why: &str| {
        let said = result.err().expect("must be refused").to_string();
        assert!(said.contains(why), "{said}");
    };
    refused(parse("{", weights.clone()), "config.json: ");
    refused(parse(&text("config.json"), weights[..1000].to_vec()), "model.safetensors: ");
    refused(parse(&text("config.json"), Vec::new()), "download it again");
}
