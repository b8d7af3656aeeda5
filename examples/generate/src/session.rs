//! Generates for a batch of prompts: prefill in pieces, then all sequences a token at a time.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use wgpu_mla::SeqId;

use crate::attention::{Attention, Timed};
use crate::prefill::{Prefilled, prefill};
use crate::{Config, Error, Model, Result, Sampler, Sampling};

/// The options of a run.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Tokens that each sequence gets at most.
    pub max_tokens: usize,
    pub sampling: Sampling,
}

/// The result of a run.
#[derive(Debug, Clone, Default)]
pub struct Done {
    /// New tokens of each sequence.
    pub tokens: Vec<Vec<u32>>,
    pub stats: Stats,
}

/// Tokens and times.
#[derive(Debug, Clone, Copy, Default)]
pub struct Stats {
    /// Tokens of all prompts.
    pub prompt_tokens: usize,
    /// Prompt tokens that were computed: a shared prefix is computed once.
    pub prefill_tokens: usize,
    /// Prompt tokens that a conversation had in the cache already.
    pub kept_tokens: usize,
    pub prefill: Duration,
    /// The part of it that the attention took.
    pub prefill_attention: Duration,
    pub decode_tokens: usize,
    pub decode: Duration,
    pub decode_attention: Duration,
}

struct Sequence {
    id: SeqId,
    sampler: Sampler,
    /// The token that comes next.
    next: u32,
    room: usize,
}

/// Continues each prompt. `on_token` is told of every new token: the sequence's index and the token.
///
/// # Errors
/// [`Error::Input`] for an empty prompt or one that is too long; those of the attention.
pub fn generate(
    model: &Model,
    attention: &mut dyn Attention,
    prompts: &[Vec<u32>],
    options: &Options,
    on_token: &mut dyn FnMut(usize, u32) -> Result<()>,
) -> Result<Done> {
    let mut on_token = |sequence, token| on_token(sequence, token).map(ControlFlow::Continue);
    generate_until(model, attention, prompts, options, &mut on_token)
}

/// Like [`generate`], but `on_token` also says whether the sequence goes on.
///
/// # Errors
/// The errors of [`generate`].
pub fn generate_until(
    model: &Model,
    attention: &mut dyn Attention,
    prompts: &[Vec<u32>],
    options: &Options,
    on_token: &mut dyn FnMut(usize, u32) -> Result<ControlFlow<()>>,
) -> Result<Done> {
    check_prompts(&model.config, prompts)?;
    let mut done = Done { tokens: vec![Vec::new(); prompts.len()], ..Done::default() };
    let attention = &mut Timed::new(attention);
    let start = Instant::now();
    let mut sequences = begin(model, attention, prompts, options, &mut done.stats)?;
    done.stats.prefill = start.elapsed();
    done.stats.prefill_attention = attention.take();

    let start = Instant::now();
    let mut alive: Vec<usize> = (0..sequences.len()).collect();
    loop {
        let mut staying = Vec::new();
        for &at in &alive {
            let (id, token, room) = (sequences[at].id, sequences[at].next, &mut sequences[at].room);
            if *room > 0 && !model.config.eos.contains(&token) {
                *room -= 1;
                done.tokens[at].push(token);
                if on_token(at, token)?.is_continue() && *room > 0 {
                    staying.push(at);
                    continue;
                }
            }
            attention.pages_mut().free(id)?;
        }
        alive = staying;
        if alive.is_empty() {
            break;
        }
        decode(model, attention, &mut sequences, &alive)?;
        done.stats.decode_tokens += alive.len();
    }
    done.stats.decode = start.elapsed();
    done.stats.decode_attention = attention.take();
    Ok(done)
}

/// What can be said of prompts before a model is loaded.
///
/// # Errors
/// [`Error::Input`] for an empty prompt, one that is too long, and one with a token that the model does not have.
pub fn check_prompts(config: &Config, prompts: &[Vec<u32>]) -> Result<()> {
    let most = config.max_position_embeddings;
    for (index, prompt) in prompts.iter().enumerate() {
        if prompt.is_empty() {
            return Err(Error::Input(format!(
                "prompt {} is empty: give it at least one character",
                index + 1
            )));
        }
        if prompt.len() >= most {
            let (number, tokens) = (index + 1, prompt.len());
            return Err(Error::Input(format!(
                "prompt {number} has {tokens} tokens, and the model {most} positions for it and what follows: shorten it"
            )));
        }
        config.check_tokens(prompt)?;
    }
    Ok(())
}

/// The prompts in the cache, and the first new token of each.
fn begin(
    model: &Model,
    attention: &mut dyn Attention,
    prompts: &[Vec<u32>],
    options: &Options,
    stats: &mut Stats,
) -> Result<Vec<Sequence>> {
    let (prefilled, computed) = prefill(model, attention, prompts)?;
    stats.prefill_tokens = computed;
    stats.prompt_tokens = prompts.iter().map(Vec::len).sum();
    let sequence = |(index, Prefilled { id, logits }): (usize, Prefilled)| {
        let mut sampler = Sampler::new(options.sampling, index);
        sampler.see(&prompts[index]);
        let next = sampler.next(&logits);
        let room = options.max_tokens.min(model.config.max_position_embeddings - prompts[index].len());
        Sequence { id, sampler, next, room }
    };
    Ok(prefilled.into_iter().enumerate().map(sequence).collect())
}

/// One more token for each sequence.
fn decode(
    model: &Model,
    attention: &mut dyn Attention,
    sequences: &mut [Sequence],
    alive: &[usize],
) -> Result<()> {
    for alive in alive.chunks(attention.pages().max_tokens()) {
        let batch: Vec<(SeqId, u32)> = alive.iter().map(|&at| (sequences[at].id, 1)).collect();
        let tokens: Vec<u32> = alive.iter().map(|&at| sequences[at].next).collect();
        let wanted: Vec<u32> = (0..tokens.len() as u32).collect();
        attention.begin(&batch)?;
        let logits = model.step(&tokens, &wanted, attention)?;
        for (&at, row) in alive.iter().zip(logits.chunks_exact(model.config.vocab_size)) {
            sequences[at].next = sequences[at].sampler.next(row);
        }
    }
    Ok(())
}
