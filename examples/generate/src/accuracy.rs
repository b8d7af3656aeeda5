//! The accuracy of each dtype and layout of the cache, and of each dtype of queries, weights and output: perplexity, accuracy and logits on
//! each backend, compared with f32 on the CPU.

use std::fmt::Write;

use wgpu_mla::{Dtype, KvLayout};

use crate::attention::Attention;
use crate::distances::Distances;
use crate::evaluate::{check_windows, surprise, windows_of};
use crate::sample::likeliest;
use crate::{Checkpoint, Result, Score, Setup, backend, evaluate, paged};

/// All formats on every backend, the reference first.
#[derive(Debug, Clone)]
pub struct Accuracy {
    pub rows: Vec<AccuracyRow>,
    /// Elements of a row of logits.
    pub vocab_size: usize,
}

/// What a layer's attention keeps and computes with.
#[derive(Debug, Clone)]
pub struct Formats {
    pub cache: KvLayout,
    /// The scales of an e4m3 cache, as text, and of each layer; no layer's where they are 1.
    k_scales: Option<(&'static str, Vec<f32>)>,
    pub query: Dtype,
    pub weight: Dtype,
    pub out: Dtype,
}

/// Formats on a backend.
#[derive(Debug, Clone)]
pub struct AccuracyRow {
    pub backend: &'static str,
    /// The device, its driver and the variant of the decode.
    pub device: String,
    pub formats: Formats,
    pub score: Score,
    /// Positions where the likeliest token is the reference's.
    pub same: usize,
    /// Differences of all logits to the reference's.
    pub apart: Distances,
}

impl AccuracyRow {
    /// Positions that were scored.
    pub fn positions(&self) -> usize {
        self.score.window * self.score.loss.len()
    }

    /// The share of positions where the likeliest token is the reference's.
    pub fn agreement(&self) -> f64 {
        self.same as f64 / self.positions() as f64
    }
}

/// Measures windows of a text: `setup` has the backend ([`crate::Where::Auto`]: all that are here), the page size and `exact`; its formats
/// and its `k_scales` are not looked at. Whole windows of `window` tokens are scored, at most `windows` of them, each begun with an empty
/// cache and computed as a prompt is, in steps of [`Setup::step_tokens`]. `progress` is told of each window.
///
/// # Errors
/// [`crate::Error::Input`] for a text that is shorter than a window; those of the backends.
pub fn accuracy(
    checkpoint: &Checkpoint,
    setup: &Setup,
    tokens: &[u32],
    (window, windows): (usize, usize),
    progress: &mut dyn FnMut(usize),
) -> Result<Accuracy> {
    let model = &checkpoint.model;
    check_windows(&model.config, tokens, window)?;
    let setup = Setup { tokens: window as u32, positions: window as u32, ..setup.clone() };
    let mut rows = rows(checkpoint, &setup, window)?;
    let vocab = model.config.vocab_size;
    for (index, tokens) in windows_of(tokens, window).take(windows).enumerate() {
        progress(index);
        let mut reference: Vec<f32> = Vec::new();
        for (at, (row, attention)) in rows.iter_mut().enumerate() {
            let (mut loss, mut right) = (0.0, 0);
            evaluate::each_position(model, attention.as_mut(), tokens, &mut |position, logits| {
                let best = likeliest(logits);
                let target = tokens[position + 1] as usize;
                loss += surprise(logits, target);
                right += usize::from(best == target);
                if at == 0 {
                    reference.extend_from_slice(logits);
                }
                row.compare(best, logits, &reference[position * vocab..][..vocab]);
            })?;
            row.score.loss.push(loss);
            row.score.right.push(right);
        }
    }
    let rows = rows.into_iter().map(|(row, _)| row).collect();
    Ok(Accuracy { rows, vocab_size: vocab })
}

type Measured = (AccuracyRow, Box<dyn Attention>);

/// One format after the other differs from f32; then all that can be e4m3 is.
fn formats(checkpoint: &Checkpoint) -> Vec<Formats> {
    let f32s = Dtype::F32;
    let plain = Formats { cache: f32s.into(), k_scales: None, query: f32s, weight: f32s, out: f32s };
    let cache = |dtype: Dtype| Formats { cache: dtype.into(), ..plain.clone() };
    let codes = |k_scales| Formats { k_scales: Some(k_scales), ..cache(Dtype::E4m3) };
    let mut all = vec![plain.clone(), cache(Dtype::F16), cache(Dtype::Bf16)];
    let scaled = match checkpoint.k_scales.as_slice() {
        [] => codes(("1", Vec::new())),
        scales => {
            all.push(codes(("of the checkpoint", scales.to_vec())));
            codes(("of the checkpoint", scales.to_vec()))
        }
    };
    all.push(codes(("1", Vec::new())));
    let shape = checkpoint.model.config.shape;
    if (shape.kv_lora_rank, shape.qk_rope_head_dim) == (512, 64) {
        all.push(Formats { cache: KvLayout::Ds656, ..plain.clone() });
    }
    let weight = |weight| Formats { weight, ..plain.clone() };
    all.extend([Dtype::F16, Dtype::Bf16, Dtype::E4m3].map(weight));
    all.push(Formats { query: Dtype::E4m3, ..plain.clone() });
    all.push(Formats { out: Dtype::E4m3, ..plain });
    all.push(Formats { query: Dtype::E4m3, weight: Dtype::E4m3, ..scaled.clone() });
    all.push(Formats { query: Dtype::E4m3, weight: Dtype::E4m3, out: Dtype::E4m3, ..scaled });
    all
}

/// Query tokens of a step that is decoded in absorbed form, where queries or output are e4m3.
const DECODED: u32 = 32;

fn rows(checkpoint: &Checkpoint, setup: &Setup, window: usize) -> Result<Vec<Measured>> {
    let mut rows = Vec::new();
    for backend in backend::with_cpu(setup.backend)? {
        for formats in formats(checkpoint) {
            let Formats { cache: kv, query, weight, out, .. } = formats;
            let k_scales = formats.k_scales.as_ref().map_or(Vec::new(), |(_, scales)| scales.clone());
            let setup = Setup { backend, kv, query, weight, out, k_scales, ..setup.clone() };
            // Prefills have neither.
            let setup = match query.is_fp8() || out.is_fp8() {
                true => Setup { step_tokens: DECODED, decode_threshold: DECODED, ..setup },
                false => setup,
            };
            let attention = paged(&checkpoint.model, &setup)?;
            let row = AccuracyRow {
                backend: backend.name(),
                device: attention.describe(),
                formats,
                score: Score { window, ..Score::default() },
                same: 0,
                apart: Distances::default(),
            };
            rows.push((row, attention));
        }
    }
    Ok(rows)
}

impl AccuracyRow {
    fn compare(&mut self, best: usize, logits: &[f32], reference: &[f32]) {
        self.same += usize::from(best == likeliest(reference));
        logits.iter().zip(reference).for_each(|(got, want)| self.apart.add(got - want));
    }
}

impl Formats {
    /// Names of what is not f32, the cache's first.
    pub fn names(&self) -> String {
        let mut names = self.cache.to_string();
        if let Some((scale, _)) = &self.k_scales {
            let _ = write!(names, ", `k_scale` {scale}");
        }
        for (what, dtype) in [("query", self.query), ("weights", self.weight), ("output", self.out)] {
            if dtype != Dtype::F32 {
                let _ = write!(names, "; {dtype} {what}");
            }
        }
        names
    }
}

impl Accuracy {
    /// Tables for a page.
    pub fn markdown(&self) -> String {
        let mut page = String::from("| attention on | device |\n|---|---|\n");
        let mut before = "";
        for row in self.rows.iter().filter(|row| std::mem::replace(&mut before, row.backend) != row.backend) {
            let _ = writeln!(page, "| {} | {} |", row.backend, row.device);
        }
        page.push_str(
            "\n| attention on | cache; other formats than f32 | perplexity | against f32 | next token right | against f32, points | likeliest token the same | logits apart, mean | 99.9 % within | at most |\n|---|---|---|---|---|---|---|---|---|---|\n",
        );
        let Some(reference) = self.rows.first() else { return page };
        for row in &self.rows {
            let (perplexity, right) = (row.score.perplexity(), 100.0 * row.score.accuracy());
            let more = signed(100.0 * (perplexity / reference.score.perplexity() - 1.0));
            let points = signed(right - 100.0 * reference.score.accuracy());
            let _ = writeln!(
                page,
                "| {} | {} | {perplexity:.4} | {more} % | {right:.3} % | {points} | {:.3} % | {:.1e} | {:.1e} | {:.1e} |",
                row.backend,
                row.formats.names(),
                100.0 * row.agreement(),
                row.apart.mean(),
                row.apart.percentile(0.999),
                row.apart.max(),
            );
        }
        page
    }
}

/// With its sign; 0 has none.
fn signed(x: f64) -> String {
    if x.abs() < 5e-4 { "0".into() } else { format!("{x:+.3}") }
}
