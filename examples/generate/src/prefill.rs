//! Prefills prompts. A prefix that several share is computed and stored once.

use std::collections::HashMap;

use wgpu_mla::SeqId;

use crate::attention::Attention;
use crate::{Model, Result};

/// A prompt in the cache.
pub struct Prefilled {
    pub id: SeqId,
    /// The logits that follow its last token.
    pub logits: Vec<f32>,
}

/// Prompts in the cache, in their order, and how many tokens were computed for them.
pub fn prefill(
    model: &Model,
    attention: &mut dyn Attention,
    prompts: &[Vec<u32>],
) -> Result<(Vec<Prefilled>, usize)> {
    let (different, same_as) = different(prompts);
    let mut all = Prompts::new(different, attention.pages().spec().page_size as usize);
    let mut computed = 0;
    while let Some(step) = all.next_step(attention)? {
        attention.begin(&step.batch)?;
        let rows = model.step(&step.tokens, &step.wanted, attention)?;
        computed += step.tokens.len();
        for (index, row) in step.ends.into_iter().zip(rows.chunks_exact(model.config.vocab_size)) {
            all.0[index].logits = row.to_vec();
        }
    }
    let mut taken = vec![false; all.0.len()];
    let mut prefilled = Vec::new();
    for index in same_as {
        let prompt = &all.0[index];
        let Some(mut id) = prompt.id else { continue }; // All have one by now.
        if std::mem::replace(&mut taken[index], true) {
            id = attention.pages_mut().fork(id)?;
        }
        prefilled.push(Prefilled { id, logits: prompt.logits.clone() });
    }
    Ok((prefilled, computed))
}

/// The distinct prompts, and which of them each prompt is.
fn different(prompts: &[Vec<u32>]) -> (Vec<&[u32]>, Vec<usize>) {
    let (mut different, mut known) = (Vec::new(), HashMap::new());
    let mut index_of = |prompt| {
        *known.entry(prompt).or_insert_with(|| {
            different.push(prompt);
            different.len() - 1
        })
    };
    let same_as = prompts.iter().map(|prompt| index_of(prompt.as_slice())).collect();
    (different, same_as)
}

/// Distinct prompts that are being prefilled.
struct Prompts<'a>(Vec<Prompt<'a>>);

struct Prompt<'a> {
    tokens: &'a [u32],
    /// An earlier prompt, and how many tokens it begins with too.
    shares: Option<(usize, usize)>,
    /// Once it has begun.
    id: Option<SeqId>,
    /// Tokens in the cache.
    at: usize,
    logits: Vec<f32>,
}

/// A part of several prompts.
#[derive(Default)]
struct Step {
    batch: Vec<(SeqId, u32)>,
    tokens: Vec<u32>,
    /// Prompts that end here, and where.
    ends: Vec<usize>,
    wanted: Vec<u32>,
}

impl<'a> Prompts<'a> {
    fn new(prompts: Vec<&'a [u32]>, page_size: usize) -> Self {
        // Only whole pages are shared, so that no page is copied; and the last token is computed, for its logits.
        let shared = |a: &[u32], b: &[u32]| {
            let common = a.iter().zip(b).take_while(|(a, b)| a == b).count().min(b.len().saturating_sub(1));
            common / page_size * page_size
        };
        let origin = |index: usize| {
            let candidates = (0..index).map(|before| (before, shared(prompts[before], prompts[index])));
            // The first of equal ones: it is in the cache soonest.
            candidates.rev().max_by_key(|&(_, tokens)| tokens).filter(|&(_, tokens)| tokens > 0)
        };
        let prompt = |(index, &tokens): (usize, &&'a [u32])| Prompt {
            tokens,
            shares: origin(index),
            id: None,
            at: 0,
            logits: Vec::new(),
        };
        Self(prompts.iter().enumerate().map(prompt).collect())
    }

    /// A step of as many tokens as the attention takes; `None` once all are in the cache.
    fn next_step(&mut self, attention: &mut dyn Attention) -> Result<Option<Step>> {
        self.begin_sequences(attention)?;
        let mut step = Step::default();
        for (index, prompt) in self.0.iter_mut().enumerate() {
            let Some(id) = prompt.id else { continue };
            let piece =
                (prompt.tokens.len() - prompt.at).min(attention.pages().max_tokens() - step.tokens.len());
            if piece == 0 {
                continue;
            }
            step.tokens.extend_from_slice(&prompt.tokens[prompt.at..][..piece]);
            step.batch.push((id, piece as u32));
            prompt.at += piece;
            if prompt.at == prompt.tokens.len() {
                step.ends.push(index);
                step.wanted.push(step.tokens.len() as u32 - 1);
            }
        }
        Ok(if step.tokens.is_empty() { None } else { Some(step) })
    }

    /// Prompts without a shared prefix, and those whose shared prefix is in the cache.
    fn begin_sequences(&mut self, attention: &mut dyn Attention) -> Result<()> {
        for index in 0..self.0.len() {
            if self.0[index].id.is_some() {
                continue;
            }
            let (id, at) = match self.0[index].shares {
                None => (attention.pages_mut().add(), 0),
                Some((from, tokens)) => match self.0[from] {
                    Prompt { id: Some(id), at, .. } if at >= tokens => {
                        (attention.pages_mut().fork_prefix(id, tokens as u32)?, tokens)
                    }
                    _ => continue,
                },
            };
            (self.0[index].id, self.0[index].at) = (Some(id), at);
        }
        Ok(())
    }
}
