//! The sequences of the batch, and their pages: a small version of a server's scheduler.

use wgpu_mla::{AppendBatch, Error, PagePool, SeqId};

use crate::Result;
use crate::model::{Model, Token, hash, uniform};

/// A sequence in the batch.
pub struct Sequence {
    pub id: SeqId,
    /// What is in the cache so far, for the oracle.
    pub tokens: Vec<Token>,
    /// Prompt that is still to be computed.
    prompt: Vec<Token>,
    /// Tokens that it will generate before it leaves.
    to_generate: u32,
    /// Query tokens of this step.
    pub q_len: u32,
}

/// The batch and the pool.
pub struct Traffic {
    pub pool: PagePool,
    pub batch: Vec<Sequence>,
    /// What the last [`Traffic::grow`] allocated.
    pub append: AppendBatch,
    pub counts: Counts,
    max_tokens: u32,
    random: u64,
    next_token: Token,
}

/// Counts of events.
#[derive(Default)]
pub struct Counts {
    pub joined: usize,
    pub forked: usize,
    pub left: usize,
    pub preempted: usize,
    pub copied_pages: usize,
}

/// Sequences at most.
const MAX_BATCH: usize = 8;
/// Tokens of the shared prompt: two full pages and a part of one.
const SYSTEM_PROMPT: usize = 40;
/// Prompt tokens of a sequence in one step.
const CHUNK: usize = 16;

impl Traffic {
    pub fn new(model: &Model, seed: u64) -> Result<Self> {
        let mut pool = PagePool::new(model.spec.kv)?;
        let id = pool.add();
        let mut traffic = Self {
            pool,
            batch: Vec::new(),
            append: AppendBatch::default(),
            counts: Counts::default(),
            max_tokens: model.max_tokens,
            random: seed,
            next_token: hash(seed, 1),
        };
        // Its prompt is shared by many users, so it stays as long as the server runs.
        let prompt = traffic.invent(SYSTEM_PROMPT);
        traffic.join(Sequence { id, tokens: Vec::new(), prompt, to_generate: u32::MAX, q_len: 0 });
        Ok(traffic)
    }

    /// Adds a sequence, if one arrives and there is room.
    pub fn admit(&mut self) -> Result<()> {
        let room = self.batch.len() < MAX_BATCH && self.pool.num_free_pages() as usize > 2 * MAX_BATCH;
        if !room || self.pick(3) > 0 {
            return Ok(());
        }
        let own = 1 + self.pick(40);
        let to_generate = 4 + self.pick(120) as u32;
        // A beam of another sequence, a user of the shared prompt, or a prompt of its own.
        let (id, tokens, prompt) = match self.pick(4) {
            0 => {
                let at = self.pick(self.batch.len());
                let other = &self.batch[at];
                (self.pool.fork(other.id)?, other.tokens.clone(), self.invent(1))
            }
            1 | 2 => {
                let shared = SYSTEM_PROMPT.min(self.batch[0].tokens.len());
                let id = self.pool.fork_prefix(self.batch[0].id, shared as u32)?;
                (id, self.batch[0].tokens[..shared].to_vec(), self.invent(own))
            }
            _ => (self.pool.add(), Vec::new(), self.invent(own)),
        };
        self.counts.forked += usize::from(!tokens.is_empty());
        self.join(Sequence { id, tokens, prompt, to_generate, q_len: 0 });
        Ok(())
    }

    fn join(&mut self, sequence: Sequence) {
        self.counts.joined += 1;
        self.batch.push(sequence);
    }

    /// Gives every sequence slots for its next tokens: a chunk of its prompt, or one token.
    pub fn grow(&mut self) -> Result<()> {
        loop {
            let mut room = self.max_tokens as usize - self.batch.len();
            let mut requests = Vec::new();
            for sequence in &mut self.batch {
                let more = sequence.prompt.len().clamp(1, CHUNK) - 1;
                let taken = more.min(room);
                room -= taken;
                sequence.q_len = 1 + taken as u32;
                requests.push((sequence.id, sequence.q_len));
            }
            match self.pool.append_batch_into(&requests, &mut self.append) {
                Ok(()) => break,
                // A failed append changes nothing: the youngest sequence is evicted and the others try again.
                Err(Error::OutOfPages { .. }) if self.batch.len() > 1 => self.preempt()?,
                Err(error) => return Err(error.into()),
            }
        }
        self.counts.copied_pages += self.append.copies.len();
        for at in 0..self.batch.len() {
            let q_len = self.batch[at].q_len as usize;
            let generated = self.batch[at].prompt.is_empty();
            // A real model samples the token; here it is invented.
            let new = if generated {
                self.batch[at].to_generate = self.batch[at].to_generate.saturating_sub(1);
                self.invent(1)
            } else {
                self.batch[at].prompt.drain(..q_len).collect()
            };
            self.batch[at].tokens.extend(new);
        }
        Ok(())
    }

    /// Ends the youngest sequence. A server would put it back into its queue.
    fn preempt(&mut self) -> Result<()> {
        if let Some(sequence) = self.batch.pop() {
            self.pool.free(sequence.id)?;
            self.counts.preempted += 1;
        }
        Ok(())
    }

    /// Indices in the batch of the sequences that are done.
    pub fn leaving(&self) -> Vec<usize> {
        (0..self.batch.len()).filter(|&at| self.batch[at].to_generate == 0).collect()
    }

    /// Ends sequences. Their pages are free at once, but for those that others share.
    pub fn leave(&mut self, places: &[usize]) -> Result<()> {
        for &at in places.iter().rev() {
            self.pool.free(self.batch.remove(at).id)?;
            self.counts.left += 1;
        }
        Ok(())
    }

    pub fn ids(&self) -> Vec<SeqId> {
        self.batch.iter().map(|sequence| sequence.id).collect()
    }

    pub fn query_start_loc(&self) -> Vec<i32> {
        let mut starts = vec![0];
        let mut at = 0;
        for sequence in &self.batch {
            at += sequence.q_len as i32;
            starts.push(at);
        }
        starts
    }

    /// This step's tokens, in the order of the batch.
    pub fn new_tokens(&self) -> Vec<Token> {
        let new = |sequence: &Sequence| {
            let first = sequence.tokens.len() - sequence.q_len as usize;
            sequence.tokens[first..].to_vec()
        };
        self.batch.iter().flat_map(new).collect()
    }

    fn invent(&mut self, count: usize) -> Vec<Token> {
        let first = self.next_token;
        self.next_token = first.wrapping_add(count as u64);
        (0..count as u64).map(|i| first.wrapping_add(i)).collect()
    }

    fn pick(&mut self, below: usize) -> usize {
        (uniform(&mut self.random) * below as f32) as usize % below.max(1)
    }
}
