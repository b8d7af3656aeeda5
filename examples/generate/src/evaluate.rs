//! How well a model predicts a text.

use crate::attention::Attention;
use crate::sample::likeliest;
use crate::{Config, Error, Model, Result};

/// Sums over windows of a text, each begun with an empty cache.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Score {
    /// For each window, the sum of its tokens' losses: negated natural logarithms of their probabilities.
    pub loss: Vec<f64>,
    /// For each window, how many of its tokens were the likeliest.
    pub right: Vec<usize>,
    /// Tokens in a window.
    pub window: usize,
}

impl Score {
    /// e to the mean loss.
    pub fn perplexity(&self) -> f64 {
        (self.loss.iter().sum::<f64>() / self.tokens()).exp()
    }

    /// The share of tokens that were the likeliest.
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
    check_windows(&model.config, tokens, window)?;
    let mut score = Score { window, ..Score::default() };
    for (index, tokens) in windows_of(tokens, window).take(windows).enumerate() {
        progress(index);
        let (mut loss, mut right) = (0.0, 0);
        each_position(model, attention, tokens, &mut |position, logits| {
            let target = tokens[position + 1] as usize;
            loss += surprise(logits, target);
            right += usize::from(likeliest(logits) == target);
        })?;
        score.loss.push(loss);
        score.right.push(right);
    }
    Ok(score)
}

/// What can be said of a text before a model is loaded: at least one window is full, and the model has positions for it.
///
/// # Errors
/// [`Error::Input`].
pub fn check_windows(config: &Config, tokens: &[u32], window: usize) -> Result<()> {
    let most = config.max_position_embeddings;
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
    // A target is an index into the logits.
    config.check_tokens(tokens)
}

/// The windows of a text, each with the token that follows it.
pub(crate) fn windows_of(tokens: &[u32], window: usize) -> impl Iterator<Item = &[u32]> {
    let begins = (0..tokens.len().saturating_sub(window)).step_by(window);
    begins.map(move |from| &tokens[from..][..window + 1])
}

/// `each` is told of each position of a window, and of the logits that follow it.
pub(crate) fn each_position(
    model: &Model,
    attention: &mut dyn Attention,
    tokens: &[u32],
    each: &mut dyn FnMut(usize, &[f32]),
) -> Result<()> {
    let sequence = attention.pages_mut().add();
    let inputs = &tokens[..tokens.len() - 1];
    let mut position = 0;
    for piece in inputs.chunks(attention.pages().max_tokens()) {
        attention.begin(&[(sequence, piece.len() as u32)])?;
        let wanted: Vec<u32> = (0..piece.len() as u32).collect();
        let logits = model.step(piece, &wanted, attention)?;
        for logits in logits.chunks_exact(model.config.vocab_size) {
            each(position, logits);
            position += 1;
        }
    }
    attention.pages_mut().free(sequence)
}

/// A token's loss: the negated natural logarithm of its probability.
pub(crate) fn surprise(logits: &[f32], target: usize) -> f64 {
    let max = f64::from(logits[likeliest(logits)]);
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - max).exp()).sum();
    max + sum.ln() - f64::from(logits[target])
}
