//! How well a model foretells a text.

use crate::attention::Attention;
use crate::sample::likeliest;
use crate::{Error, Model, Result};

/// Sums over windows of a text, each begun with an empty cache.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Score {
    /// Natural logarithm of what each token was thought to be worth, negated and summed, a window.
    pub loss: Vec<f64>,
    /// Tokens that were thought the likeliest, a window.
    pub right: Vec<usize>,
    /// Tokens in a window.
    pub window: usize,
}

impl Score {
    /// e to the mean loss.
    pub fn perplexity(&self) -> f64 {
        (self.loss.iter().sum::<f64>() / self.tokens()).exp()
    }

    /// The part of the tokens that were thought the likeliest.
    pub fn accuracy(&self) -> f64 {
        self.right.iter().sum::<usize>() as f64 / self.tokens()
    }

    fn tokens(&self) -> f64 {
        (self.window * self.loss.len()) as f64
    }
}

/// Scores whole windows of `window` tokens each, at most `windows` of them; what is left at the end is not scored. `progress` is told of
/// each window.
///
/// # Errors
/// [`Error::Input`] where not even one window is full, or one is longer than the model's context; those of the attention.
pub fn evaluate(
    model: &Model,
    attention: &mut dyn Attention,
    tokens: &[u32],
    window: usize,
    windows: usize,
    progress: &mut dyn FnMut(usize),
) -> Result<Score> {
    let most = model.config.max_position_embeddings;
    if !(1..=most).contains(&window) {
        return Err(Error::Input(format!(
            "windows of {window} tokens: must be 1 to {most}, the model's positions"
        )));
    }
    if tokens.len() <= window {
        let have = tokens.len();
        return Err(Error::Input(format!(
            "the text has {have} tokens, a window {window} and one more: use a longer text"
        )));
    }
    let mut score = Score { window, ..Score::default() };
    for (index, from) in (0..tokens.len() - window).step_by(window).take(windows).enumerate() {
        progress(index);
        let (loss, right) = one(model, attention, &tokens[from..][..window + 1])?;
        score.loss.push(loss);
        score.right.push(right);
    }
    Ok(score)
}

fn one(model: &Model, attention: &mut dyn Attention, tokens: &[u32]) -> Result<(f64, usize)> {
    let sequence = attention.pages_mut().add();
    let (mut loss, mut right) = (0.0, 0);
    let inputs = &tokens[..tokens.len() - 1];
    for (index, piece) in inputs.chunks(attention.pages().max_tokens()).enumerate() {
        let targets = &tokens[index * attention.pages().max_tokens() + 1..];
        attention.begin(&[(sequence, piece.len() as u32)])?;
        let wanted: Vec<u32> = (0..piece.len() as u32).collect();
        let logits = model.step(piece, &wanted, attention)?;
        for (logits, &target) in logits.chunks_exact(model.config.vocab_size).zip(targets) {
            loss += surprise(logits, target as usize);
            right += usize::from(likeliest(logits) == target as usize);
        }
    }
    attention.pages_mut().free(sequence)?;
    Ok((loss, right))
}

fn surprise(logits: &[f32], target: usize) -> f64 {
    let max = f64::from(logits[likeliest(logits)]);
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - max).exp()).sum();
    max + sum.ln() - f64::from(logits[target])
}
