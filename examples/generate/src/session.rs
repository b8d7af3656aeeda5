//! A batch of prompts from its first token to its last: prefill in pieces, then all sequences a token at a time.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use wgpu_mla::SeqId;

use crate::attention::Attention;
use crate::{Error, Model, Result, Sampler, Sampling};

/// What is asked.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Tokens that each sequence gets at most.
    pub max_tokens: usize,
    pub sampling: Sampling,
}

/// What came of it.
#[derive(Debug, Clone, Default)]
pub struct Done {
    /// New tokens of each sequence.
    pub tokens: Vec<Vec<u32>>,
    pub stats: Stats,
}

/// Tokens and times.
#[derive(Debug, Clone, Copy, Default)]
pub struct Stats {
    /// Prompt tokens that were computed; equal prompts are computed once.
    pub prefill_tokens: usize,
    pub prefill: Duration,
    pub decode_tokens: usize,
    pub decode: Duration,
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
    check(model, prompts)?;
    let mut done = Done { tokens: vec![Vec::new(); prompts.len()], ..Done::default() };
    let begin = Instant::now();
    let mut sequences = prefill(model, attention, prompts, options, &mut done.stats)?;
    done.stats.prefill = begin.elapsed();

    let begin = Instant::now();
    let mut alive: Vec<usize> = (0..sequences.len()).collect();
    loop {
        let mut staying = Vec::new();
        for &at in &alive {
            let (id, token, room) = (sequences[at].id, sequences[at].next, &mut sequences[at].room);
            if *room > 0 && !model.config.eos.contains(&token) {
                *room -= 1;
                done.tokens[at].push(token);
                on_token(at, token)?;
                if *room > 0 {
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
    done.stats.decode = begin.elapsed();
    Ok(done)
}

fn check(model: &Model, prompts: &[Vec<u32>]) -> Result<()> {
    let most = model.config.max_position_embeddings;
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
    }
    Ok(())
}

/// Computes each different prompt once; equal ones are forks that share its pages.
fn prefill(
    model: &Model,
    attention: &mut dyn Attention,
    prompts: &[Vec<u32>],
    options: &Options,
    stats: &mut Stats,
) -> Result<Vec<Sequence>> {
    let mut firsts: Vec<usize> = Vec::new();
    let mut first_of: HashMap<&[u32], usize> = HashMap::new();
    for (index, prompt) in prompts.iter().enumerate() {
        first_of.entry(prompt).or_insert_with(|| {
            firsts.push(index);
            firsts.len() - 1
        });
    }
    let ids: Vec<SeqId> = firsts.iter().map(|_| attention.pages_mut().add()).collect();
    let unique: Vec<&[u32]> = firsts.iter().map(|&index| prompts[index].as_slice()).collect();
    let logits = last_logits(model, attention, &ids, &unique)?;
    stats.prefill_tokens = unique.iter().map(|prompt| prompt.len()).sum();

    let mut sequences = Vec::new();
    for (index, prompt) in prompts.iter().enumerate() {
        let first = first_of[prompt.as_slice()];
        let id = if firsts[first] == index { ids[first] } else { attention.pages_mut().fork(ids[first])? };
        let mut sampler = Sampler::new(options.sampling, index);
        let next = sampler.next(&logits[first]);
        let room = options.max_tokens.min(model.config.max_position_embeddings - prompt.len());
        sequences.push(Sequence { id, sampler, next, room });
    }
    Ok(sequences)
}

/// The logits that follow each prompt, all computed in steps of as many tokens as the attention takes.
fn last_logits(
    model: &Model,
    attention: &mut dyn Attention,
    ids: &[SeqId],
    prompts: &[&[u32]],
) -> Result<Vec<Vec<f32>>> {
    let mut logits = vec![Vec::new(); prompts.len()];
    let mut at = vec![0; prompts.len()];
    while at.iter().zip(prompts).any(|(&at, prompt)| at < prompt.len()) {
        let (mut batch, mut tokens, mut ends, mut wanted) = (vec![], vec![], vec![], vec![]);
        for (index, prompt) in prompts.iter().enumerate() {
            let piece = (prompt.len() - at[index]).min(attention.max_tokens() - tokens.len());
            if piece == 0 {
                continue;
            }
            tokens.extend_from_slice(&prompt[at[index]..][..piece]);
            batch.push((ids[index], piece as u32));
            at[index] += piece;
            if at[index] == prompt.len() {
                ends.push(index);
                wanted.push(tokens.len() as u32 - 1);
            }
        }
        attention.begin(&batch)?;
        let rows = model.step(&tokens, &wanted, attention)?;
        for (index, row) in ends.into_iter().zip(rows.chunks_exact(model.config.vocab_size)) {
            logits[index] = row.to_vec();
        }
    }
    Ok(logits)
}

/// One more token for each of these.
fn decode(
    model: &Model,
    attention: &mut dyn Attention,
    sequences: &mut [Sequence],
    alive: &[usize],
) -> Result<()> {
    for alive in alive.chunks(attention.max_tokens()) {
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
