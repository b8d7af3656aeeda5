//! Lists of slots, drawn or in order; what no list names is poison.

use super::{POISON, Problem, Rng, Sees, WILD};
use crate::case::SparseCase;
use crate::reference;

/// The slots that each query token attends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lists {
    /// Entries of a list.
    pub topk: usize,
    /// `[total_q, topk]`.
    pub slots: Vec<i32>,
    /// `[total_q]`: entries at or past it count for nothing.
    pub topk_length: Option<Vec<i32>>,
}

/// How many entries of a drawn list count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lengths {
    /// All, and no lengths are given.
    All,
    /// None, one, some or all, in turn.
    Some,
}

impl Lists {
    /// Tokens of the whole batch, drawn with replacement, so that some stand twice; every fifth entry is no slot of the pool. Slot 0 is in
    /// no list. Entries past a list's length name it, and slots that are none.
    pub fn drawn(problem: &Problem, topk: usize, lengths: Lengths, seed: u64) -> Self {
        let tokens: Vec<i32> = (0..problem.seq_lens.len()).flat_map(|seq| problem.slots(seq)).collect();
        let tokens: Vec<i32> = tokens.into_iter().filter(|slot| *slot != 0).collect();
        let num_slots = problem.spec.kv.num_slots() as i32;
        let invalid = [-1, i32::MIN, num_slots, i32::MAX];
        let mut rng = Rng(seed);
        let mut entry = |at: usize| match (rng.below(5), tokens.len()) {
            (0, _) | (_, 0) => invalid[at % invalid.len()],
            (_, count) => tokens[rng.below(count)],
        };
        let mut slots: Vec<i32> = (0..problem.total_q() * topk).map(&mut entry).collect();
        let length = |token: usize| [0, 1, topk.div_ceil(2), topk][token % 4] as i32;
        let topk_length = match lengths {
            Lengths::All => None,
            Lengths::Some => Some((0..problem.total_q()).map(length).collect::<Vec<_>>()),
        };
        for (list, length) in slots.chunks_mut(topk.max(1)).zip(topk_length.iter().flatten()) {
            let past = list[*length as usize..].iter_mut().enumerate();
            past.for_each(|(at, slot)| *slot = [0, WILD[at % WILD.len()]][at % 2]);
        }
        Self { topk, slots, topk_length }
    }

    /// Each query token lists all tokens of its sequence in their order, then -1.
    pub fn ascending(problem: &Problem) -> Self {
        let topk = problem.seq_lens.iter().max().map_or(1, |&len| len.max(1) as usize);
        let mut slots = Vec::new();
        for seq in 0..problem.seq_lens.len() {
            let mut list = problem.slots(seq);
            list.resize(topk, -1);
            for _ in problem.query_start_loc[seq]..problem.query_start_loc[seq + 1] {
                slots.extend_from_slice(&list);
            }
        }
        Self { topk, slots, topk_length: None }
    }

    /// The lists, as the oracle takes them.
    pub fn view(&self) -> reference::Lists<'_> {
        let Self { topk, slots, topk_length } = self;
        reference::Lists { topk: *topk, slots, topk_length: topk_length.as_deref() }
    }

    /// The entries of each list that count.
    pub fn rows(&self) -> impl Iterator<Item = &[i32]> {
        let length = |token: usize| self.topk_length.as_ref().map_or(self.topk, |all| all[token] as usize);
        self.slots.chunks(self.topk.max(1)).enumerate().map(move |(token, list)| &list[..length(token)])
    }

    /// The slots of a pool that lists name, as often as they do.
    pub fn named(&self, num_slots: usize) -> impl Iterator<Item = usize> {
        let in_pool = move |&slot: &i32| usize::try_from(slot).ok().filter(|slot| *slot < num_slots);
        self.rows().flatten().filter_map(in_pool)
    }
}

impl Problem {
    /// The problem of a case file of lists.
    pub fn of_sparse_case(name: &str, case: &SparseCase) -> Self {
        let tokens = case.lists.slots.len() / case.lists.topk.max(1);
        Self {
            name: name.to_owned(),
            spec: case.spec,
            softmax_scale: case.softmax_scale,
            k_scale: case.k_scale,
            q_scale: case.q_scale,
            // No sequence is named: the lists alone say what is attended.
            seq_lens: vec![0],
            query_start_loc: vec![0, tokens as i32],
            block_table: Vec::new(),
            max_pages: 0,
            sees: Sees::Full,
            shared_prefixes: Vec::new(),
            q: case.q.clone(),
            kv: case.kv_cache.clone(),
            lists: Some(case.lists.clone()),
            attn_sink: case.attn_sink.clone(),
        }
    }

    /// The same query tokens over lists; tokens that no list names become poison.
    #[must_use]
    pub fn listed(&self, lists: Lists) -> Self {
        let token = self.spec.kv.token(&self.spec.shape).bytes as usize;
        let mut named = vec![false; self.spec.kv.num_slots() as usize];
        lists.named(named.len()).for_each(|slot| named[slot] = true);
        let mut problem = self.clone();
        for (bytes, named) in problem.kv.chunks_mut(token).zip(named) {
            if !named {
                bytes.fill(POISON);
            }
        }
        problem.name += &format!(", lists of {}", lists.topk);
        if let Some(lengths) = &lists.topk_length {
            problem.name += &format!(" with lengths {:?}..", &lengths[..lengths.len().min(4)]);
        }
        problem.lists = Some(lists);
        problem
    }

    /// The same with sinks from -inf to +inf, over the heads in turn, small ones among them.
    #[must_use]
    pub fn with_sinks(&self) -> Self {
        let turns = [0.5, f32::NEG_INFINITY, -3.0, f32::INFINITY, 2.25, 300.0, -300.0, f32::MAX, f32::MIN];
        let sinks = (0..self.spec.shape.num_heads as usize).map(|head| turns[head % turns.len()]).collect();
        Self { attn_sink: Some(sinks), name: format!("{}, sinks", self.name), ..self.clone() }
    }

    /// One query token of a problem with lists, alone.
    #[must_use]
    pub fn token(&self, token: usize) -> Self {
        let mut problem = self.clone();
        let bytes = self.q.len() / self.total_q();
        problem.q = self.q[token * bytes..][..bytes].to_vec();
        if let Some(lists) = &mut problem.lists {
            lists.slots = lists.slots[token * lists.topk..][..lists.topk].to_vec();
            lists.topk_length.iter_mut().for_each(|all| *all = vec![all[token]]);
        }
        (problem.seq_lens, problem.query_start_loc) = (vec![0], vec![0, 1]);
        problem
    }
}
