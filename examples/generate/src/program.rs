//! The command line's program. Another binary runs it with an engine of its own: `burn/generate`.

use std::io::ErrorKind;
use std::ops::ControlFlow;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use crate::args::{self, Args, Engine, Wish};
use crate::attention::Attention;
use crate::print::{Bar, Printer, say, tell};
use crate::{
    Checkpoint, Config, Error, Generation, Options, Result, Setup, Stats, Stops, Text, interrupts, losses,
    page, talk,
};

/// An engine that holds a model's weights on a device and computes all of its layers there. This package has none: burn's is a package of
/// its own, as burn brings 670 packages.
pub trait DeviceEngine {
    /// Whether it serves the model and the options, and, where nobody asked for it, whether there is a GPU. Otherwise what is missing.
    ///
    /// # Errors
    /// [`Error::Input`], and those of the device.
    fn serves(&self, config: &Config, setup: &Setup, is_asked: bool) -> Result<()>;

    /// Streams the weights to the device. `progress` is told of the bytes that are there.
    ///
    /// # Errors
    /// The errors of the device.
    fn load(
        &self,
        checkpoint: &Checkpoint,
        setup: &Setup,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Box<dyn Attention>>;
}

/// What a program has beside the CPU.
pub type Device<'a> = Option<&'a dyn DeviceEngine>;

/// Runs the command line. The status is 0; 1 after an error; 2 after bad arguments.
pub fn run(device: Device<'_>) -> ExitCode {
    name_threads();
    let wish = match Args::parse(std::env::args_os().skip(1)) {
        Ok(wish) => wish,
        Err(error) => {
            tell(&format!("generate --help has all options\ngenerate: {error}\n"));
            return ExitCode::from(2);
        }
    };
    let result = match &wish {
        Wish::Help => say(&format!("{}\n", args::HELP)),
        Wish::Version => say(concat!("generate of wgpu-mla ", env!("CARGO_PKG_VERSION"), "\n")),
        Wish::Devices => list_devices(),
        Wish::Run(args) if args.engine == Some(Engine::Burn) && device.is_none() => Err(no_burn()),
        Wish::Run(args) if args.accuracy.is_some() => page::accuracy(args),
        Wish::Run(args) if args.evaluate.is_some() => evaluate(args, device),
        Wish::Run(args) => match &args.chat {
            Some(chat) => talk::chat(args, chat, device),
            None => continue_text(args, device),
        },
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // The reader closed the pipe, such as `head`.
        Err(Error::Output(error)) if error.kind() == ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            tell(&format!("generate: {error}\n"));
            ExitCode::FAILURE
        }
    }
}

/// Without this variable candle queries the system's cores at every matrix product to count its threads: 60 times a token, which on 16
/// cores took longer than the model.
fn name_threads() {
    const THREADS: &str = "RAYON_NUM_THREADS";
    if std::env::var_os(THREADS).is_none() {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        // SAFETY: this comes first in `main`, before there is another thread.
        unsafe { std::env::set_var(THREADS, threads.to_string()) };
    }
}

fn no_burn() -> Error {
    let cure = "cargo run --release --manifest-path burn/generate/Cargo.toml -- --engine burn";
    Error::Input(format!("--engine burn: this program is built without burn; in the repository, run: {cure}"))
}

fn continue_text(args: &Args, device: Device<'_>) -> Result<()> {
    let begin = Instant::now();
    let config = opened(args)?;
    let tokenizer = Text::open_with(&args.dir, args.tokenizer.as_deref())?;
    let sequences = args.sequences();
    let prompts = sequences.iter().map(|text| tokenizer.encode(text)).collect::<Result<Vec<_>>>()?;
    crate::check_prompts(&config, &prompts)?;
    // Pages for the longest that each sequence may become.
    let (context, max_tokens) = (config.max_position_embeddings, args.max_tokens.unwrap_or(200));
    let tokens = prompts.iter().map(|prompt| prompt.len().saturating_add(max_tokens).min(context));
    let positions = tokens.clone().max().unwrap_or(1) as u32;
    let count = |tokens: usize| u32::try_from(tokens).unwrap_or(u32::MAX);
    let (tokens, prompt_tokens) = (count(tokens.sum()), count(prompts.iter().map(Vec::len).sum()));
    let checkpoint = Checkpoint::open(&args.dir)?;
    let sequences_at_once = sequences.len() as u32;
    let setup =
        Setup { tokens, prompt_tokens, positions, sequences: sequences_at_once, ..setup(args, &checkpoint)? };
    let mut attention = loaded(args, device, &checkpoint, &setup)?;
    ready(&checkpoint, &setup, attention.as_mut(), begin)?;

    let mut printer = Printer::new(&sequences)?;
    let mut streams: Vec<_> = sequences.iter().map(|_| tokenizer.stream()).collect();
    let mut stops = vec![Stops::new(&args.stops); sequences.len()];
    let options = Options { max_tokens, sampling: args.sampling(&Generation::open(&args.dir)?) };
    // One Ctrl-C ends generation, and a second the program.
    interrupts::catch(2, || ());
    interrupts::begin();
    let mut on_token = |sequence: usize, token: u32| {
        let (text, is_stopped) = stops[sequence].push(&streams[sequence](token)?);
        printer.add(sequence, &text)?;
        let is_over = is_stopped || interrupts::count() > 0;
        Ok(if is_over { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    };
    let (model, attention) = (&checkpoint.model, attention.as_mut());
    let done = crate::generate_until(model, attention, &prompts, &options, &mut on_token)?;
    for (sequence, stops) in stops.iter_mut().enumerate() {
        printer.add(sequence, &stops.rest())?;
    }
    printer.finish()?;
    summarise(&done.stats, 1, attention);
    losses::print(attention)
}

/// Runs a token before timing, which does not count, and says what runs.
pub fn ready(
    checkpoint: &Checkpoint,
    setup: &Setup,
    attention: &mut dyn Attention,
    begin: Instant,
) -> Result<()> {
    warm_up(checkpoint, attention)?;
    attention.losses()?;
    describe(checkpoint, setup, attention, begin.elapsed());
    Ok(())
}

fn list_devices() -> Result<()> {
    for (backend, found) in crate::devices() {
        match found {
            Ok(name) => say(&format!("{}: {name}\n", backend.name()))?,
            Err(error) => say(&format!("{}: none: {error}\n", backend.name()))?,
        }
    }
    Ok(())
}

/// The config, and a first word of it.
pub fn opened(args: &Args) -> Result<Config> {
    let config = Config::open(&args.dir)?;
    let (layers, shape) = (config.num_layers, config.shape);
    let (heads, latent, rope) = (shape.num_heads, shape.kv_lora_rank, shape.qk_rope_head_dim);
    tell(&format!("{}: {layers} layers, {heads} heads of {latent}+{rope}\n", args.dir.display()));
    let from = if args.dir.is_dir() { "config.json" } else { "metadata" };
    config.notices.iter().for_each(|notice| tell(&format!("{from}: {notice}\n")));
    Ok(config)
}

/// The engine that runs: the one that was asked for, or the device's, where it serves the model.
fn chosen<'a>(args: &Args, device: Device<'a>, config: &Config, setup: &Setup) -> Result<Device<'a>> {
    let Some(engine) = device.filter(|_| args.engine != Some(Engine::Cpu)) else { return Ok(None) };
    match engine.serves(config, setup, args.engine.is_some()) {
        Ok(()) => Ok(Some(engine)),
        Err(why) if args.engine.is_some() => Err(why),
        Err(why) => {
            tell(&format!("engine cpu, as burn is not used: {why}\n"));
            Ok(None)
        }
    }
}

/// The attention, which is made first, as it may find that something is not served; then the weights are read. Or an engine that has both.
pub fn loaded(
    args: &Args,
    device: Device<'_>,
    checkpoint: &Checkpoint,
    setup: &Setup,
) -> Result<Box<dyn Attention>> {
    let all = checkpoint.model.bytes();
    if let Some(engine) = chosen(args, device, &checkpoint.model.config, setup)? {
        let mut bar = Bar::new(all);
        let loaded = engine.load(checkpoint, setup, &mut |done| bar.at(done))?;
        bar.finish();
        return Ok(loaded);
    }
    if let Some(dtype) = args.weight_dtype {
        let cure = "the engine cpu multiplies with weights as the file has them; leave it out";
        return Err(Error::Input(format!("--weight-dtype {dtype}: {cure}")));
    }
    if let Some(free) = crate::free().filter(|&free| free < all) {
        let (all, free) = (crate::bytes(all), crate::bytes(free));
        tell(&format!(
            "weights: {all}, and {free} of memory are free: parts will be read from the disk again and again\n"
        ));
    }
    let attention = crate::paged(&checkpoint.model, setup)?;
    let is_on_host = attention.describe().starts_with("CPU");
    if let Some(notice) = crate::notice(&checkpoint.model, setup, crate::free()).filter(|_| is_on_host) {
        tell(&format!("{notice}\n"));
    }
    let mut bar = Bar::new(all);
    checkpoint.model.read(&mut |done| bar.at(done));
    bar.finish();
    Ok(attention)
}

pub fn setup(args: &Args, checkpoint: &Checkpoint) -> Result<Setup> {
    if args.index.is_some() && checkpoint.model.config.indexer.is_none() {
        let why = "--index-dtype: the model has no indexer, and attends all tokens; leave it out";
        return Err(Error::Input(why.into()));
    }
    Ok(Setup {
        backend: args.backend,
        kv: args.kv,
        index: args.index.unwrap_or(Setup::default().index),
        page_size: args.page_size,
        exact: args.exact,
        guard: args.guard,
        device_weight: args.weight_dtype,
        k_scales: checkpoint.k_scales.clone(),
        ..Setup::default()
    })
}

/// Runs one token before timing, since a backend compiles its kernels at its first run.
fn warm_up(checkpoint: &Checkpoint, attention: &mut dyn Attention) -> Result<()> {
    let sequence = attention.pages_mut().add();
    attention.begin(&[(sequence, 1)])?;
    checkpoint.model.step(&[0], &[0], attention)?;
    attention.pages_mut().free(sequence)
}

fn describe(checkpoint: &Checkpoint, setup: &Setup, attention: &dyn Attention, ready: Duration) {
    let (who, seconds) = (attention.describe(), ready.as_secs_f64());
    let (now, most) = (attention.cache_bytes(), setup.cache_bytes(&checkpoint.model));
    let grows = if now < most { format!(", which grows to {}", crate::bytes(most)) } else { String::new() };
    let cache = crate::bytes(now);
    tell(&format!("attention: {who}, {} cache of {cache}{grows}; ready in {seconds:.1} s\n", setup.kv));
    if let Some(notice) = checkpoint.scales_notice(setup.kv) {
        tell(&format!("{} cache: {notice}\n", setup.kv));
    }
    tell("\n");
}

/// The figures of so many answers.
pub fn summarise(stats: &Stats, answers: u64, attention: &dyn Attention) {
    let speed = |tokens: usize, time: Duration, attention: Duration| {
        let seconds = time.as_secs_f64().max(1e-9);
        let (rate, share) = (tokens as f64 / seconds, 100.0 * attention.as_secs_f64() / seconds);
        match attention.is_zero() {
            // An engine on a device runs ahead of the host.
            true => format!("{rate:.0} tokens/s"),
            false => format!("{rate:.0} tokens/s, {share:.0} % of the time attention"),
        }
    };
    let shared = match (stats.kept_tokens, stats.prompt_tokens - stats.prefill_tokens) {
        (0, 0) => String::new(),
        (0, shared) => format!(" and {shared} shared with another prompt"),
        (kept, _) => format!(" and {kept} kept from earlier turns"),
    };
    let (computed, decoded) = (stats.prefill_tokens, stats.decode_tokens);
    let (prefill, decode) = (
        speed(computed, stats.prefill, stats.prefill_attention),
        speed(decoded, stats.decode, stats.decode_attention),
    );
    let first = stats.prefill.as_secs_f64() / answers.max(1) as f64;
    tell(&format!("\nprefill: {computed} tokens{shared}, {prefill}; first token after {first:.2} s\n"));
    tell(&format!("decode: {decoded} tokens, {decode}\n"));
    let ((_, most, all), page) = (attention.pages().used(), attention.pages().spec().page_size);
    let bytes = crate::bytes(attention.cache_bytes());
    tell(&format!("cache: at most {most} of {all} pages of {page} tokens in use, {bytes}\n"));
}

fn evaluate(args: &Args, device: Device<'_>) -> Result<()> {
    let Some(path) = &args.evaluate else { return Ok(()) };
    let text = std::fs::read_to_string(path).map_err(|error| Error::file(path, error))?;
    let begin = Instant::now();
    let config = opened(args)?;
    let tokens = Text::open_with(&args.dir, args.tokenizer.as_deref())?.encode(&text)?;
    crate::check_windows(&config, &tokens, args.window)?;
    let checkpoint = Checkpoint::open(&args.dir)?;
    let setup = Setup { tokens: args.window as u32, ..setup(args, &checkpoint)? };
    let mut attention = loaded(args, device, &checkpoint, &setup)?;
    describe(&checkpoint, &setup, attention.as_ref(), begin.elapsed());
    let all = args.windows.unwrap_or(usize::MAX).min((tokens.len().saturating_sub(1)) / args.window);
    let mut progress = |window: usize| tell(&format!("\rwindow {} of {all}", window + 1));
    let score = crate::evaluate(
        &checkpoint.model,
        attention.as_mut(),
        &tokens,
        args.window,
        all.max(1),
        &mut progress,
    )?;
    tell("\n");
    let (tokens, perplexity) = (score.loss.len() * score.window, score.perplexity());
    let accuracy = 100.0 * score.accuracy();
    say(&format!(
        "{}: {tokens} tokens, perplexity {perplexity:.4}, next token right {accuracy:.3} %\n",
        args.kv
    ))?;
    losses::print(attention.as_mut())
}
