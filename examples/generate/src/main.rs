//! ```text
//! cargo run --release -p generate -- [DIR] [--prompt TEXT] [--kv-dtype f16] [--help]
//! ```
//! Status 0: all right; 1: an error; 2: bad arguments.

mod args;
mod print;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use args::Args;
use generate::attention::Attention;
use generate::{Checkpoint, Error, Options, Result, Sampling, Setup, Stats};
use print::{Printer, say};

fn main() -> ExitCode {
    let args = match Args::parse(std::env::args().skip(1)) {
        Ok(Some(args)) => args,
        Ok(None) => {
            say(&format!("{}\n", args::HELP));
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("{error}\n{}", args::HELP);
            return ExitCode::from(2);
        }
    };
    let result = if args.evaluate.is_some() { evaluate(&args) } else { continue_text(&args) };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("generate: {error}");
            ExitCode::FAILURE
        }
    }
}

fn continue_text(args: &Args) -> Result<()> {
    let begin = Instant::now();
    let checkpoint = Checkpoint::open(&args.dir)?;
    let tokenizer = checkpoint.tokenizer()?;
    let texts = args.sequences();
    let prompts = texts.iter().map(|text| tokenizer.encode(text)).collect::<Result<Vec<_>>>()?;
    let context = checkpoint.model.config.max_position_embeddings;
    // Pages for the longest that each sequence may become.
    let tokens = prompts.iter().map(|prompt| prompt.len().saturating_add(args.max_tokens).min(context));
    let (tokens, sequences) = (tokens.sum::<usize>() as u32, texts.len() as u32);
    let setup = Setup { tokens, sequences, ..setup(args, &checkpoint) };
    let mut attention = generate::paged(&checkpoint.model, &setup)?;
    warm_up(&checkpoint, attention.as_mut())?;
    describe(args, &checkpoint, attention.as_ref(), begin.elapsed());

    let mut printer = Printer::new(&texts);
    let mut streams: Vec<_> = texts.iter().map(|_| tokenizer.stream()).collect();
    let options = Options {
        max_tokens: args.max_tokens,
        sampling: Sampling { temperature: args.temperature, seed: args.seed },
    };
    let mut on_token = |sequence: usize, token: u32| {
        printer.add(sequence, &streams[sequence](token)?);
        Ok(())
    };
    let done = generate::generate(&checkpoint.model, attention.as_mut(), &prompts, &options, &mut on_token)?;
    printer.finish();
    summarise(&done.stats, attention.as_ref());
    Ok(())
}

fn setup(args: &Args, checkpoint: &Checkpoint) -> Setup {
    Setup {
        backend: args.backend,
        kv: args.kv,
        page_size: args.page_size,
        exact: args.exact,
        k_scales: checkpoint.k_scales.clone(),
        ..Setup::default()
    }
}

/// One token for nothing: a backend compiles what it needs when it first runs.
fn warm_up(checkpoint: &Checkpoint, attention: &mut dyn Attention) -> Result<()> {
    let sequence = attention.pages_mut().add();
    attention.begin(&[(sequence, 1)])?;
    checkpoint.model.step(&[0], &[0], attention)?;
    attention.pages_mut().free(sequence)
}

fn describe(args: &Args, checkpoint: &Checkpoint, attention: &dyn Attention, ready: Duration) {
    let config = &checkpoint.model.config;
    let (layers, shape) = (config.num_layers, config.shape);
    let (heads, latent, rope) = (shape.num_heads, shape.kv_lora_rank, shape.qk_rope_head_dim);
    eprintln!("{}: {layers} layers, {heads} heads of {latent}+{rope}", args.dir.display());
    eprintln!(
        "attention: {}, {} cache; ready in {:.1} s\n",
        attention.describe(),
        args.kv,
        ready.as_secs_f64()
    );
}

fn summarise(stats: &Stats, attention: &dyn Attention) {
    let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64().max(1e-9);
    let (prefill, decode) = (stats.prefill_tokens, stats.decode_tokens);
    let (_, most, all) = attention.pages().used();
    eprintln!("\nprefill: {prefill} tokens, {:.0} tokens/s", rate(prefill, stats.prefill));
    eprintln!("decode: {decode} tokens, {:.0} tokens/s", rate(decode, stats.decode));
    eprintln!("cache: at most {most} of {all} pages of {} tokens in use", attention.pages().spec().page_size);
}

fn evaluate(args: &Args) -> Result<()> {
    let Some(path) = &args.evaluate else { return Ok(()) };
    let text = std::fs::read_to_string(path).map_err(|error| Error::file(path, error))?;
    let begin = Instant::now();
    let checkpoint = Checkpoint::open(&args.dir)?;
    let tokens = checkpoint.tokenizer()?.encode(&text)?;
    let setup = Setup { tokens: args.window.try_into().unwrap_or(u32::MAX), ..setup(args, &checkpoint) };
    let mut attention = generate::paged(&checkpoint.model, &setup)?;
    describe(args, &checkpoint, attention.as_ref(), begin.elapsed());
    let all = args.windows.min((tokens.len().saturating_sub(1)) / args.window);
    let mut progress = |window: usize| eprint!("\rwindow {} of {all}", window + 1);
    let score = generate::evaluate(
        &checkpoint.model,
        attention.as_mut(),
        &tokens,
        args.window,
        args.windows,
        &mut progress,
    )?;
    eprintln!();
    let (tokens, perplexity) = (score.loss.len() * score.window, score.perplexity());
    let accuracy = 100.0 * score.accuracy();
    say(&format!(
        "{}: {tokens} tokens, perplexity {perplexity:.4}, next token right {accuracy:.3} %\n",
        args.kv
    ));
    Ok(())
}
