//! `generate bench CONFIG.json`: how fast a model of that config runs, with weights that are noise, so that nothing is downloaded.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use generate::attention::Attention;
use generate::parts::Dtype;
use generate::{Checkpoint, Config, Error, Model, Result, Setup, Where};

use crate::engine::Burn;
use crate::times::Times;

const HELP: &str = "\
Measures a model whose weights are noise: nothing is downloaded.

generate bench CONFIG.json          such as burn/generate/configs/youtu-llm-2b.json
         [--prompt N]               tokens of the prompt; default: 2048
         [--tokens N]               that are generated; default: 64
         [--layers N]               only the first of the model; default: all
         [--weight-dtype f32|f16|bf16] [--kv-dtype f32|f16|bf16|e4m3]
         [--engine burn|cpu]        default: burn";

/// Times that a prompt is computed; the quickest counts.
const PROMPTS: usize = 3;

/// Steps whose parts are measured.
const MEASURED: u32 = 8;

/// The options.
struct Args {
    config: String,
    prompt: usize,
    tokens: usize,
    layers: Option<usize>,
    weight: Option<Dtype>,
    kv: Dtype,
    is_cpu: bool,
}

/// Runs it. The status is 0; 1 after an error; 2 after bad arguments.
pub fn bench(words: impl Iterator<Item = String>) -> ExitCode {
    let args = match parse(words) {
        Ok(Some(args)) => args,
        Ok(None) => {
            println!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(why) => {
            eprintln!("generate bench --help has all options\ngenerate: {why}");
            return ExitCode::from(2);
        }
    };
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("generate: {error}");
            ExitCode::FAILURE
        }
    }
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Option<Args>, String> {
    let mut args = Args {
        config: String::new(),
        prompt: 2048,
        tokens: 64,
        layers: None,
        weight: None,
        kv: Dtype::F16,
        is_cpu: false,
    };
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
        match word.as_str() {
            "--help" | "-h" => return Ok(None),
            "--prompt" => args.prompt = count(&word, &value()?)?,
            "--tokens" => args.tokens = count(&word, &value()?)?,
            "--layers" => args.layers = Some(count(&word, &value()?)?),
            "--weight-dtype" => args.weight = Some(dtype(&word, &value()?)?),
            "--kv-dtype" => args.kv = dtype(&word, &value()?)?,
            "--engine" => {
                args.is_cpu = match value()?.as_str() {
                    "burn" => false,
                    "cpu" => true,
                    other => return Err(format!("--engine {other}: must be burn or cpu")),
                }
            }
            other if other.starts_with('-') => return Err(format!("{other}: no such option")),
            config => args.config = config.into(),
        }
    }
    match args.config.is_empty() {
        true => Err("give the config.json of a model".into()),
        false => Ok(Some(args)),
    }
}

fn count(option: &str, text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| (1..=1 << 20).contains(number));
    number.ok_or_else(|| format!("{option} {text}: must be a number from 1 to {}", 1 << 20))
}

fn dtype(option: &str, text: &str) -> Result<Dtype, String> {
    let all = [("f32", Dtype::F32), ("f16", Dtype::F16), ("bf16", Dtype::Bf16), ("e4m3", Dtype::E4m3)];
    let known = all.into_iter().filter(|&(_, dtype)| dtype != Dtype::E4m3 || option == "--kv-dtype");
    let mut known = known.filter(|(name, _)| *name == text);
    known
        .next()
        .map(|(_, dtype)| dtype)
        .ok_or_else(|| format!("{option} {text}: must be one of those in --help"))
}

fn run(args: &Args) -> Result<()> {
    let path = std::path::Path::new(&args.config);
    let text = std::fs::read_to_string(path).map_err(|error| Error::file(path, error))?;
    let mut config = Config::from_json(&text)?;
    config.num_layers = args.layers.unwrap_or(config.num_layers).min(config.num_layers);
    let room = (args.prompt + args.tokens + MEASURED as usize + 1) as u32;
    let positions = room.min(config.max_position_embeddings as u32);
    if positions < room {
        return Err(Error::Input(format!("{room} tokens: the model has {positions} positions")));
    }
    let checkpoint = Checkpoint { dir: path.into(), model: Model::noise(config)?, k_scales: Vec::new() };
    let model = &checkpoint.model;
    let bytes = model.bytes();
    println!("{}: {} layers, {} in bf16", args.config, model.config.num_layers, generate::bytes(bytes));
    let setup = Setup {
        kv: args.kv.into(),
        device_weight: args.weight,
        tokens: room,
        positions,
        backend: if args.is_cpu { Where::Cpu } else { Where::Auto },
        ..Setup::default()
    };
    if args.is_cpu {
        let mut engine = generate::paged(model, &setup)?;
        println!("{}", engine.describe());
        return measured(args, model, engine.as_mut()).map(drop);
    }
    let begin = Instant::now();
    let burn = Burn::default();
    burn.on()?;
    let (device_made, begin) = (begin.elapsed(), Instant::now());
    let mut engine = burn.open(&checkpoint, &setup, &mut |_| ())?;
    engine.device().sync().map_err(|error| Error::Engine(format!("{error:?}")))?;
    let (loading, copying) = (begin.elapsed(), copy(bytes));
    println!("{}", engine.describe());
    println!(
        "device made in {:.2} s; weights loaded in {:.2} s, {:.2} x of a copy of them in memory, {:.2} s",
        device_made.as_secs_f64(),
        loading.as_secs_f64(),
        loading.as_secs_f64() / copying.as_secs_f64().max(1e-9),
        copying.as_secs_f64()
    );
    if let Some(memory) = engine.device().memory_pool_usage() {
        let (reserved, share) = (memory.bytes_reserved, memory.bytes_reserved as f64 / bytes.max(1) as f64);
        println!(
            "burn's memory: {}, {share:.2} x of the file's; cache {}",
            generate::bytes(reserved),
            generate::bytes(setup.cache_bytes(model))
        );
    }
    let (sequence, mut token) = measured(args, model, &mut engine)?;
    engine.times.begin();
    for _ in 0..MEASURED {
        engine.begin(&[(sequence, 1)])?;
        token = likeliest(&model.step(&[token], &[0], &mut engine)?);
    }
    let times: Times = engine.times.take();
    print!("a step with a wait after each part:\n{}", times.report(MEASURED));
    if let Some(memory) = engine.device().memory_pool_usage() {
        println!("burn's memory at the end: {}", generate::bytes(memory.bytes_reserved));
    }
    Ok(())
}

/// The prompt and the tokens. Gives the sequence and its next token.
fn measured(
    args: &Args,
    model: &Model,
    engine: &mut dyn Attention,
) -> Result<(wgpu_mla_burn::wgpu_mla::SeqId, u32)> {
    let vocab = model.config.vocab_size as u32;
    let prompt: Vec<u32> = (0..args.prompt as u32).map(|at| at.wrapping_mul(2_654_435_761) % vocab).collect();
    let (mut best, mut first) = (Duration::MAX, Duration::ZERO);
    let (mut sequence, mut token) = (engine.pages_mut().add(), 0);
    for round in 0..PROMPTS {
        engine.pages_mut().free(sequence)?;
        sequence = engine.pages_mut().add();
        let begin = Instant::now();
        for piece in prompt.chunks(engine.pages().max_tokens()) {
            engine.begin(&[(sequence, piece.len() as u32)])?;
            token = likeliest(&model.step(piece, &[piece.len() as u32 - 1], engine)?);
        }
        best = best.min(begin.elapsed());
        if round == 0 {
            first = begin.elapsed();
        }
    }
    let rate = args.prompt as f64 / best.as_secs_f64().max(1e-9);
    println!(
        "prompt: {} tokens, {rate:.0} tokens/s; the first time {:.2} s",
        args.prompt,
        first.as_secs_f64()
    );
    let mut steps = Vec::new();
    for _ in 0..args.tokens {
        let begin = Instant::now();
        engine.begin(&[(sequence, 1)])?;
        token = likeliest(&model.step(&[token], &[0], engine)?);
        steps.push(begin.elapsed());
    }
    // The first ones compile kernels.
    let counted = &steps[steps.len() / 4..];
    let seconds = counted.iter().sum::<Duration>().as_secs_f64().max(1e-9);
    println!("decode: {:.1} tokens/s, the quickest step {:.2} ms", counted.len() as f64 / seconds, {
        let least = counted.iter().min().copied().unwrap_or_default();
        least.as_secs_f64() * 1e3
    });
    Ok((sequence, token))
}

/// The first token of the largest logit.
fn likeliest(logits: &[f32]) -> u32 {
    let better = |best: (usize, f32), (at, &x): (usize, &f32)| if x > best.1 { (at, x) } else { best };
    logits.iter().enumerate().fold((0, f32::NEG_INFINITY), better).0 as u32
}

/// The time of a copy of so many bytes in memory.
fn copy(bytes: u64) -> Duration {
    const AT_ONCE: u64 = 256 << 20;
    let from = vec![1u8; AT_ONCE.min(bytes) as usize];
    let mut to = vec![0u8; from.len()];
    let begin = Instant::now();
    for _ in 0..bytes.div_ceil(AT_ONCE) {
        to.copy_from_slice(std::hint::black_box(&from));
        std::hint::black_box(&to);
    }
    begin.elapsed()
}
