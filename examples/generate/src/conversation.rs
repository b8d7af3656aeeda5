//! Answers one after the other over one sequence of the cache.

use std::ops::ControlFlow;
use std::time::Instant;

use wgpu_mla::SeqId;

use crate::attention::{Attention, Timed};
use crate::session::check_prompts;
use crate::{Model, Options, Result, Sampler, Sampling, Stats};

/// A sequence that grows by questions and answers. What a question begins with as the conversation so far does stays in the cache.
#[derive(Debug, Clone, Default)]
pub struct Conversation {
    id: Option<SeqId>,
    /// The tokens in the cache.
    tokens: Vec<u32>,
    answers: u64,
    /// The figures of all answers.
    pub stats: Stats,
}

impl Conversation {
    /// Answers `prompt`, all tokens of the conversation up to the answer. It ends before a token of the config's `eos` and of `ends`.
    /// `on` is asked before each part of the prompt whether to go on, and told of every token of the answer.
    ///
    /// # Errors
    /// [`crate::Error::Input`] for a prompt that is empty or too long; those of the attention and of `on`, after which the conversation
    /// is over.
    pub fn answer(
        &mut self,
        model: &Model,
        attention: &mut dyn Attention,
        prompt: &[u32],
        (options, ends): (&Options, &[u32]),
        on: &mut dyn FnMut(Option<u32>) -> Result<ControlFlow<()>>,
    ) -> Result<Vec<u32>> {
        check_prompts(&model.config, std::slice::from_ref(&prompt.to_vec()))?;
        let attention = &mut Timed::new(attention);
        let start = Instant::now();
        let mut logits = self.prefill(model, attention, prompt, on)?;
        self.stats.prefill += start.elapsed();
        self.stats.prefill_attention += attention.take();

        let start = Instant::now();
        let sampling =
            Sampling { seed: options.sampling.seed.wrapping_add(self.answers), ..options.sampling };
        self.answers += 1;
        let mut sampler = Sampler::new(sampling, 0);
        sampler.see(prompt);
        let room = options.max_tokens.min(model.config.max_position_embeddings - prompt.len());
        let mut answer = Vec::new();
        while let Some(row) = logits.take() {
            let token = sampler.next(&row);
            if model.config.eos.contains(&token) || ends.contains(&token) {
                break;
            }
            answer.push(token);
            if on(Some(token))?.is_break() || answer.len() >= room {
                break;
            }
            logits = Some(self.step(model, attention, &[token], true)?);
            self.stats.decode_tokens += 1;
        }
        self.stats.decode += start.elapsed();
        self.stats.decode_attention += attention.take();
        Ok(answer)
    }

    /// Questions that were answered.
    #[must_use]
    pub fn answers(&self) -> u64 {
        self.answers
    }

    /// Tokens of the conversation that are in the cache.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The logits after the prompt; `None` where it was stopped before its end.
    fn prefill(
        &mut self,
        model: &Model,
        attention: &mut dyn Attention,
        prompt: &[u32],
        on: &mut dyn FnMut(Option<u32>) -> Result<ControlFlow<()>>,
    ) -> Result<Option<Vec<f32>>> {
        // The last token is computed, for its logits.
        let common = self.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let kept = common.min(prompt.len() - 1);
        if let Some(id) = self.id {
            attention.pages_mut().truncate(id, kept as u32)?;
        }
        self.tokens.truncate(kept);
        self.stats.prompt_tokens += kept;
        self.stats.kept_tokens += kept;
        let mut logits = None;
        let mut left = &prompt[kept..];
        while !left.is_empty() {
            if on(None)?.is_break() {
                return Ok(None);
            }
            let (piece, rest) = left.split_at(left.len().min(attention.pages().max_tokens()));
            logits = Some(self.step(model, attention, piece, rest.is_empty())?);
            self.stats.prefill_tokens += piece.len();
            self.stats.prompt_tokens += piece.len();
            left = rest;
        }
        Ok(logits)
    }

    /// New tokens, and the logits after the last, where they are wanted.
    fn step(
        &mut self,
        model: &Model,
        attention: &mut dyn Attention,
        tokens: &[u32],
        is_wanted: bool,
    ) -> Result<Vec<f32>> {
        let id = *self.id.get_or_insert_with(|| attention.pages_mut().add());
        attention.begin(&[(id, tokens.len() as u32)])?;
        self.tokens.extend(tokens);
        let last = [tokens.len() as u32 - 1];
        model.step(tokens, if is_wanted { &last } else { &[] }, attention)
    }
}
