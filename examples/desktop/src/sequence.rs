//! A sequence: its tokens, and how it chooses the next.

use std::sync::Arc;

use generate::{Result, Sampler, Sampling, Text};
use wgpu_mla::SeqId;

use crate::shown::SequenceShown;

/// A text that is read or written.
pub struct Sequence {
    /// From 1; sequences of one text never have the same.
    pub number: usize,
    /// Its pages.
    pub id: SeqId,
    sampler: Sampler,
    /// The prompt's and the new ones. Once the prompt is read, the last is not in the cache yet.
    pub tokens: Vec<u32>,
    /// How many are in the cache.
    pub cached: usize,
    /// Tokens that it was given, which it did not write itself.
    given: usize,
    prompt_tokens: usize,
    forked: Option<(usize, usize)>,
    /// The most tokens that it may have.
    most: usize,
    /// What the last token was chosen by.
    logits: Vec<f32>,
    pub ended: Option<&'static str>,
    given_text: String,
    written_text: String,
}

impl Sequence {
    /// A prompt, not read yet.
    pub fn new(id: SeqId, prompt: Vec<u32>, text: &Text, sampling: Sampling, most: usize) -> Result<Self> {
        Ok(Self {
            number: 1,
            id,
            sampler: Sampler::new(sampling, 0),
            cached: 0,
            given: prompt.len(),
            prompt_tokens: prompt.len(),
            forked: None,
            most: most.saturating_add(prompt.len()),
            logits: Vec::new(),
            ended: None,
            given_text: text.decode(&prompt)?,
            written_text: String::new(),
            tokens: prompt,
        })
    }

    /// A fork, whose pages are `id`. It begins with another token than this one took, by the same logits: otherwise greedy sampling
    /// would give both the same tokens.
    pub fn fork(
        &self,
        id: SeqId,
        number: usize,
        text: &Text,
        sampling: Sampling,
        most: usize,
    ) -> Result<Self> {
        let mut fork = Self {
            number,
            id,
            sampler: Sampler::new(sampling, number),
            tokens: self.tokens[..self.cached].to_vec(),
            cached: self.cached,
            given: self.cached,
            prompt_tokens: self.prompt_tokens,
            forked: Some((self.number, self.cached)),
            most: most.saturating_add(self.cached),
            logits: self.logits.clone(),
            ended: None,
            given_text: text.decode(&self.tokens[..self.cached])?,
            written_text: String::new(),
        };
        let mut others = self.logits.clone();
        if let Some(taken) = self.tokens.get(self.cached).and_then(|&token| others.get_mut(token as usize)) {
            *taken = f32::NEG_INFINITY;
        }
        let next = fork.sampler.next(&others);
        fork.tokens.push(next);
        fork.written_text = text.decode(&fork.tokens[fork.given..])?;
        Ok(fork)
    }

    /// Whether its prompt is not in the cache yet.
    pub fn is_reading(&self) -> bool {
        self.cached < self.given
    }

    /// Tokens that it was given.
    pub fn given(&self) -> usize {
        self.given
    }

    /// Tokens that it wrote.
    pub fn written(&self) -> &[u32] {
        &self.tokens[self.given.min(self.tokens.len())..]
    }

    /// Whether it can be forked: its prompt is read.
    pub fn can_fork(&self) -> bool {
        !self.is_reading() && !self.logits.is_empty()
    }

    /// Takes what follows its tokens in the cache. True if it chose a token.
    pub fn choose(&mut self, logits: &[f32], text: &Text, eos: &[u32], positions: usize) -> Result<bool> {
        if self.is_reading() {
            return Ok(false);
        }
        self.logits = logits.to_vec();
        let next = self.sampler.next(logits);
        if eos.contains(&next) {
            self.ended = Some("the model ended it");
            return Ok(false);
        }
        self.tokens.push(next);
        self.written_text = text.decode(self.written())?;
        if self.tokens.len() >= positions {
            self.ended = Some("at the model's last position");
        } else if self.tokens.len() >= self.most {
            self.ended = Some("as long as asked for");
        }
        Ok(true)
    }

    /// What the window shows of it.
    pub fn shown(&self) -> SequenceShown {
        SequenceShown {
            number: self.number,
            forked: self.forked,
            tokens: Arc::new(self.tokens.clone()),
            prompt_tokens: self.prompt_tokens,
            given: self.given_text.clone(),
            written: self.written_text.clone(),
            ended: self.ended,
        }
    }
}
