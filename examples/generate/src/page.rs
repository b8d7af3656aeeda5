//! `--accuracy`: tables of each cache dtype's accuracy, as a page.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::{Accuracy, Checkpoint, Error, Result, Text};

use crate::args::Args;
use crate::print::{say, tell};

/// Windows that are scored unless `--windows` says how many: two minutes on two idle cores with a GPU in software, four on
/// busy ones.
const WINDOWS: usize = 24;

const HELD_OUT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/data/held_out.txt");

pub fn accuracy(args: &Args) -> Result<()> {
    let text = args.evaluate.as_deref().unwrap_or(Path::new(HELD_OUT));
    let text = std::fs::read_to_string(text).map_err(|error| Error::file(text, error))?;
    let config = crate::program::opened(args)?;
    let to = args.accuracy.as_deref().filter(|file| *file != Path::new("-"));
    if let Some(file) = to {
        // Checked before the run, which takes minutes. An existing file stays until its end.
        let opened = std::fs::OpenOptions::new().append(true).create(true).open(file);
        opened.map_err(|error| Error::file(file, error))?;
    }
    let tokens = Text::open_with(&args.dir, args.tokenizer.as_deref())?.encode(&text)?;
    crate::check_windows(&config, &tokens, args.window)?;
    let checkpoint = Checkpoint::open(&args.dir)?;
    let windows = args.windows.unwrap_or(WINDOWS);
    let all = windows.min(tokens.len().saturating_sub(1) / args.window);
    let setup = crate::program::setup(args, &checkpoint)?;
    let mut progress = |window: usize| tell(&format!("\rwindow {} of {all}", window + 1));
    let sizes = (args.window, windows);
    let measured = crate::accuracy(&checkpoint, &setup, &tokens, sizes, &mut progress)?;
    tell("\n");
    let page = page(args, &checkpoint, setup.step_tokens, &measured);
    match to {
        None => say(&page),
        Some(file) => std::fs::write(file, page).map_err(|error| Error::file(file, error)),
    }
}

fn page(args: &Args, checkpoint: &Checkpoint, step: u32, measured: &Accuracy) -> String {
    let command = std::env::args().skip(1).collect::<Vec<_>>().join(" ");
    let scored = measured.rows.first().map_or(0, |row| row.positions());
    let text = match &args.evaluate {
        Some(_) => "the text of `--evaluate`",
        None => "the held-out text of `examples/generate`",
    };
    let scales = match checkpoint.k_scales.as_slice() {
        [] => "The checkpoint has no `kv_cache_scales.json`, so `k_scale` is 1.".into(),
        [first, ..] => format!(
            "The checkpoint's `kv_cache_scales.json` has a `k_scale` a layer ({first} in the first); without one it is 1, as in vLLM."
        ),
    };
    let software = match measured.rows.iter().any(|row| row.device.contains("llvmpipe")) {
        true => {
            "\nllvmpipe is lavapipe, Mesa's Vulkan driver in software, which runs the shaders that a GPU runs.\n"
        }
        false => "",
    };
    let experts = match checkpoint.model.config.experts {
        Some(_) => {
            "\nA router's near tie may go the other way: then a token gets another expert, and its logits move far more than by rounding. The
largest differences may be such positions.\n"
        }
        None => "",
    };
    let rounded = match args.exact {
        true => "no variant rounds anything but the cache",
        false => "a variant on tensor cores may round softmax weights to f16",
    };
    format!(
        "\
# Accuracy by dtype of the KV cache

`cargo run --release -p generate -- {command}` wrote this page on {date}.

{positions} tokens of {text} are scored, in windows of {window}, each begun with an empty cache and
computed as prompts are: in steps of {step} tokens, whose attention reads all its keys from the cache. Weights and activations are f32;
{rounded}.

{scales}

The reference is an f32 cache on the CPU, whose perplexity and next-token accuracy the columns *against f32* compare with. *Likeliest
token the same* is the share of positions where the likeliest token is the reference's. *Logits apart* is the absolute difference to the
reference's logits, over all {elements} of them.
{experts}
{tables}{software}
For comparison: vLLM's pull request [34597](https://github.com/vllm-project/vllm/pull/34597), an FP8 cache for its Triton MLA backend,
tells of about 0.15 points of accuracy on GSM8K (lm_eval). That is another model and another task: the column *against f32, points* is
the nearest to it here. One position more or less is {point:.3} points.
",
        date = today(),
        window = args.window,
        positions = grouped(scored),
        elements = grouped(scored * measured.vocab_size),
        tables = measured.markdown(),
        point = 100.0 / scored.max(1) as f64,
    )
}

/// With a comma every three digits.
fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Today's date as YYYY-MM-DD, in UTC.
fn today() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let mut days = seconds / 86_400;
    let is_leap =
        |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut year = 1970;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let february = 28 + u64::from(is_leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    format!("{year}-{month:02}-{:02}", days + 1)
}
