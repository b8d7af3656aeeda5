//! What a run for a test ends with: one line, or what is wrong.

use generate::{Checkpoint, Options, Sampling, Setup, Where};

use crate::args::Args;
use crate::shown::{Check, ROUNDED_TOLERANCE, Shown, TOLERANCE};
use crate::times::{Times, quantile};

/// What the windows of a run did.
#[derive(Default)]
pub struct Report {
    frames: Vec<f32>,
    tokens: u64,
    layer_ms: f64,
    losses: usize,
    sequences: usize,
    /// New tokens of the first sequence, as it was last.
    written: Vec<u32>,
    prompt_tokens: usize,
    adapter: String,
    variant: String,
    rounds: bool,
    notice: Option<String>,
    check: Check,
}

impl Report {
    pub fn of(shown: &Shown, times: &Times, losses: usize) -> Self {
        let (about, first) = (shown.about.as_ref(), shown.sequences.first().filter(|it| it.forked.is_none()));
        Self {
            frames: times.decoding.clone(),
            tokens: shown.speed.tokens,
            layer_ms: shown.speed.layer_ms,
            losses,
            sequences: shown.sequences.len(),
            written: first.map_or(Vec::new(), |first| {
                first.tokens[first.prompt_tokens.min(first.tokens.len())..].to_vec()
            }),
            prompt_tokens: first.map_or(0, |first| first.prompt_tokens),
            adapter: about.map_or(String::new(), |about| about.adapter.clone()),
            variant: about.map_or(String::new(), |about| format!("{}, {} cache", about.variant, about.kv)),
            rounds: about.is_some_and(|about| about.rounds),
            notice: shown.notice.clone(),
            check: shown.check.clone(),
        }
    }

    /// A window that followed this one.
    pub fn add(&mut self, next: Self) {
        let mut frames = std::mem::take(&mut self.frames);
        frames.extend_from_slice(&next.frames);
        let (tokens, losses) = (self.tokens + next.tokens, self.losses + next.losses);
        *self = Self { frames, tokens, losses, ..next };
    }
}

/// The closing line, or what is wrong.
pub fn line(args: &Args, report: &Report) -> Result<String, String> {
    let Report { frames, tokens, losses, .. } = report;
    if *tokens == 0 && args.frames.is_some() {
        let why = report.notice.clone().unwrap_or("give it more --frames".into());
        return Err(format!("nothing was decoded: {why}"));
    }
    let (p50, p95) = (quantile(frames.iter().copied(), 0.5), quantile(frames.iter().copied(), 0.95));
    let seconds = frames.iter().sum::<f32>().max(1e-6) / 1000.0;
    let mut line = format!(
        "desktop: {} frames decoded {tokens} tokens of {} sequences, {:.1} tokens/s; frames p50 {p50:.1} ms, p95 {p95:.1} ms, of it {:.1} ms a layer's attention; {}, variant {}",
        frames.len(),
        report.sequences,
        *tokens as f32 / seconds,
        report.layer_ms,
        report.adapter,
        report.variant,
    );
    if *losses > 0 {
        line += &format!("; lost its device {losses} time, and started again");
    }
    if args.frames.is_none() {
        return Ok(line);
    }
    line += &checked(report)?;
    line += &compared(args, report)?;
    match args.p95_ms.filter(|&most| p95 > most) {
        Some(most) => {
            let why = "slices are too large for this device, the window is, or other programs took the cores";
            Err(format!("{line}\np95 of the frames is {p95:.1} ms, and may be {most:.1}: {why}"))
        }
        None => Ok(line),
    }
}

/// One decode against the oracle.
fn checked(report: &Report) -> Result<String, String> {
    let Check::Done { furthest, tokens } = &report.check else {
        return Err("no decode was checked against the oracle: give it more --frames".into());
    };
    let most = if report.rounds { ROUNDED_TOLERANCE } else { TOLERANCE };
    let (error, layer, head) = (furthest.error, furthest.layer, furthest.head);
    match furthest.elements > 0 && error <= most {
        true => Ok(format!("; a decode over {tokens} tokens checked, largest error {error:.1e}")),
        false => Err(format!(
            "wrong: a decode is {error:.1e} from the oracle in layer {layer}, head {head}; it may be {most:e}"
        )),
    }
}

/// The greedy text against the one that `generate` writes on the CPU.
fn compared(args: &Args, report: &Report) -> Result<String, String> {
    if args.wish.temperature > 0.0 {
        return Ok(String::new());
    }
    let want = on_the_cpu(args, report).map_err(|error| error.to_string())?;
    match report.written.iter().zip(&want).position(|(got, want)| got != want) {
        None if report.written.is_empty() => Err("the first sequence wrote nothing".into()),
        None => Ok(format!("; the first {} tokens are the CPU's", report.written.len())),
        Some(at) => Err(format!(
            "wrong: token {at} of the text is {}, and {} on the CPU",
            report.written[at], want[at]
        )),
    }
}

fn on_the_cpu(args: &Args, report: &Report) -> generate::Result<Vec<u32>> {
    let checkpoint = Checkpoint::open(&args.model)?;
    let prompt = checkpoint.tokenizer()?.encode(&args.wish.prompt)?;
    let setup = Setup {
        backend: Where::Cpu,
        kv: args.wish.kv.into(),
        tokens: (report.prompt_tokens + report.written.len()) as u32,
        k_scales: checkpoint.k_scales.clone(),
        ..Setup::default()
    };
    let mut attention = generate::paged(&checkpoint.model, &setup)?;
    let options = Options {
        max_tokens: report.written.len(),
        sampling: Sampling { temperature: 0.0, seed: 0, ..Sampling::default() },
    };
    let done =
        generate::generate(&checkpoint.model, attention.as_mut(), &[prompt], &options, &mut |_, _| Ok(()))?;
    Ok(done.tokens.into_iter().next().unwrap_or_default())
}
