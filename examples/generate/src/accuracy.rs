//! The accuracy of each cache dtype: perplexity, accuracy and logits on each backend, compared with an f32 cache on the CPU.

use std::fmt::Write;

use wgpu_mla::Dtype;

use crate::attention::Attention;
use crate::evaluate::{check_windows, surprise, windows_of};
use crate::sample::likeliest;
use crate::{Checkpoint, Result, Score, Setup, backend, evaluate, paged};

/// Every dtype on every backend, the reference first.
#[derive(Debug, Clone)]
pub struct Accuracy {
    pub rows: Vec<AccuracyRow>,
    /// Elements of a row of logits.
    pub vocab_size: usize,
}

/// A dtype on a backend.
#[derive(Debug, Clone)]
pub struct AccuracyRow {
    pub backend: &'static str,
    /// The device, its driver and the variant of the decode.
    pub device: String,
    pub dtype: Dtype,
    /// The e4m3 cache's scales, as text.
    pub k_scale: Option<&'static str>,
    pub score: Score,
    /// Positions where the likeliest token is the reference's.
    pub same: usize,
    /// Sum of the absolute differences of all logits to the reference's, and the largest.
    pub sum_apart: f64,
    pub max_apart: f32,
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

/// Measures windows of a text: `setup` has the backend ([`crate::Where::Auto`]: all that are here), the page size and `exact`; its dtype
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

fn rows(checkpoint: &Checkpoint, setup: &Setup, window: usize) -> Result<Vec<Measured>> {
    let plain = |dtype| (dtype, None, Vec::new());
    let mut caches = vec![plain(Dtype::F32), plain(Dtype::F16), plain(Dtype::Bf16)];
    if !checkpoint.k_scales.is_empty() {
        caches.push((Dtype::E4m3, Some("of the checkpoint"), checkpoint.k_scales.clone()));
    }
    caches.push((Dtype::E4m3, Some("1"), Vec::new()));
    let mut rows = Vec::new();
    for backend in backend::with_cpu(setup.backend)? {
        for (dtype, k_scale, k_scales) in &caches {
            let setup = Setup { backend, kv: *dtype, k_scales: k_scales.clone(), ..setup.clone() };
            let attention = paged(&checkpoint.model, &setup)?;
            let row = AccuracyRow {
                backend: backend.name(),
                device: attention.describe(),
                dtype: *dtype,
                k_scale: *k_scale,
                score: Score { window, ..Score::default() },
                same: 0,
                sum_apart: 0.0,
                max_apart: 0.0,
            };
            rows.push((row, attention));
        }
    }
    Ok(rows)
}

impl AccuracyRow {
    fn compare(&mut self, best: usize, logits: &[f32], reference: &[f32]) {
        self.same += usize::from(best == likeliest(reference));
        for (got, want) in logits.iter().zip(reference) {
            let apart = (got - want).abs();
            // A NaN is as far as can be.
            let apart = if apart.is_finite() { apart } else { f32::INFINITY };
            self.sum_apart += f64::from(apart);
            self.max_apart = self.max_apart.max(apart);
        }
    }

    fn cache(&self) -> String {
        match self.k_scale {
            Some(scale) => format!("{}, `k_scale` {scale}", self.dtype),
            None => self.dtype.to_string(),
        }
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
            "\n| attention on | cache | perplexity | against f32 | next token right | against f32, points | likeliest token the same | logits apart, mean | at most |\n|---|---|---|---|---|---|---|---|---|\n",
        );
        let Some(reference) = self.rows.first() else { return page };
        for row in &self.rows {
            let (perplexity, right) = (row.score.perplexity(), 100.0 * row.score.accuracy());
            let more = signed(100.0 * (perplexity / reference.score.perplexity() - 1.0));
            let points = signed(right - 100.0 * reference.score.accuracy());
            let mean = row.sum_apart / (row.positions() * self.vocab_size) as f64;
            let _ = writeln!(
                page,
                "| {} | {} | {perplexity:.4} | {more} % | {right:.3} % | {points} | {:.3} % | {mean:.1e} | {:.1e} |",
                row.backend,
                row.cache(),
                100.0 * row.agreement(),
                row.max_apart,
            );
        }
        page
    }
}

/// With its sign; 0 has none.
fn signed(x: f64) -> String {
    if x.abs() < 5e-4 { "0".into() } else { format!("{x:+.3}") }
}
