//! Property tests of the planner against a naive model: a set of keys for each query token and head.

mod cuts;
mod refusals;

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use wgpu_mla::plan::DIRECT;
use wgpu_mla::{
    Batch, Dtype, Error, KvSpec, Mask, MlaDecode, MlaShape, Plan, SharedPrefix, SplitPolicy, Tiling,
};

/// Which keys are seen, before the batch's lengths bound them.
#[derive(Debug, Clone)]
enum Sees {
    Causal,
    CausalFrom(i64),
    Full,
    /// A token's share of its sequence in 1/255, one after the other.
    Bounds(Vec<u8>),
}

/// A batch as proptest draws and shrinks it.
#[derive(Debug, Clone)]
struct Recipe {
    heads: u32,
    page_size: u32,
    tiling: Tiling,
    policy: SplitPolicy,
    sees: Sees,
    /// `(seq_len, q_len, group)`; group 0 shares nothing.
    sequences: Vec<(u32, u32, usize)>,
    /// Tokens that groups 1 and 2 share.
    prefix_tokens: [u32; 2],
}

/// A recipe's arrays.
struct Arrays {
    spec: MlaDecode,
    seq_lens: Vec<i32>,
    query_start_loc: Vec<i32>,
    bounds: Vec<u32>,
    /// The model: `(sequence, visible keys)` of each query token.
    tokens: Vec<(usize, u32)>,
    groups: Vec<SharedPrefix>,
}

impl Recipe {
    fn arrays(&self) -> Arrays {
        let mut query_start_loc = vec![0];
        let (mut bounds, mut tokens) = (Vec::new(), Vec::new());
        for (seq, &(len, q_len, _)) in self.sequences.iter().enumerate() {
            for i in 0..q_len {
                let visible = match &self.sees {
                    Sees::Causal => (i64::from(len) - i64::from(q_len) + i64::from(i) + 1).max(0) as u32,
                    Sees::CausalFrom(first) => (first + i64::from(i)).clamp(0, len.into()) as u32,
                    Sees::Full => len,
                    Sees::Bounds(shares) => len * u32::from(shares[tokens.len() % shares.len()]) / 255,
                };
                bounds.push(visible);
                tokens.push((seq, visible));
            }
            query_start_loc.push(tokens.len() as i32);
        }
        let group = |number: usize| {
            let of_group = |&(seq, s): &(usize, &(u32, u32, usize))| (s.2 == number).then_some(seq as u32);
            let sequences: Vec<u32> =
                self.sequences.iter().enumerate().filter_map(|s| of_group(&s)).collect();
            SharedPrefix { sequences, tokens: self.prefix_tokens[number - 1] }
        };
        Arrays {
            spec: spec(self.heads, self.page_size),
            seq_lens: self.sequences.iter().map(|s| s.0 as i32).collect(),
            query_start_loc,
            bounds,
            tokens,
            groups: vec![group(1), group(2)],
        }
    }

    fn update(&self, arrays: &Arrays, plan: &mut Plan) -> Result<(), Error> {
        plan.update(&arrays.spec, &self.tiling, &arrays.batch(&self.sees), self.policy)
    }

    /// What a group may share is a whole number of these.
    fn unit(&self) -> Option<u32> {
        match self.policy {
            SplitPolicy::Auto => Some(self.tiling.tokens_per_block),
            SplitPolicy::FixedTokens(n) => Some(n),
            SplitPolicy::OneSplit => None,
        }
    }
}

impl Arrays {
    fn batch(&self, sees: &Sees) -> Batch<'_> {
        Batch {
            seq_lens: &self.seq_lens,
            query_start_loc: &self.query_start_loc,
            mask: match sees {
                Sees::Causal => Mask::Causal,
                Sees::CausalFrom(first) => Mask::CausalFrom(*first),
                Sees::Full => Mask::Full,
                Sees::Bounds(_) => Mask::Bounds(&self.bounds),
            },
            shared_prefixes: &self.groups,
            slabs: None,
        }
    }
}

fn spec(num_heads: u32, page_size: u32) -> MlaDecode {
    MlaDecode {
        shape: MlaShape { num_heads, kv_lora_rank: 512, qk_rope_head_dim: 64 },
        kv: KvSpec { layout: Dtype::F16.into(), page_size, num_pages: 1000 },
        query: Dtype::F16,
        out: Dtype::F32,
    }
}

const TILING: Tiling = Tiling {
    rows_per_tile: 16,
    tokens_per_block: 32,
    target_items: 8,
    min_split_tokens: 64,
    single_sequence_items: 0,
    item_overhead_tokens: 0,
};

fn recipes() -> impl Strategy<Value = Recipe> {
    let min_tokens = prop_oneof![1 => Just(0u32), 1 => 0..=40u32, 2 => 0..=200u32];
    let single = prop_oneof![1 => Just(0u32), 1 => 0..=60u32];
    let tiling = (1..=40u32, 1..=64u32, 1..=60u32, min_tokens, single, 0..=100u32).prop_map(
        |(rows, block, items, min_split_tokens, single_sequence_items, item_overhead_tokens)| Tiling {
            rows_per_tile: rows,
            tokens_per_block: block,
            target_items: items,
            min_split_tokens,
            single_sequence_items,
            item_overhead_tokens,
        },
    );
    let policy = prop_oneof![
        2 => Just(SplitPolicy::Auto),
        2 => (1..=300u32).prop_map(SplitPolicy::FixedTokens),
        1 => Just(SplitPolicy::OneSplit),
    ];
    let sees = prop_oneof![
        Just(Sees::Causal),
        Just(Sees::Full),
        (-40i64..200).prop_map(Sees::CausalFrom),
        proptest::collection::vec(any::<u8>(), 1..6).prop_map(Sees::Bounds),
    ];
    let len = prop_oneof![1 => Just(0u32), 2 => 1..=20u32, 4 => 1..=500u32];
    let q_len = prop_oneof![1 => Just(0u32), 4 => Just(1u32), 2 => 1..=12u32];
    let sequences = proptest::collection::vec((len, q_len, 0..=2usize), 0..8);
    let heads = prop_oneof![Just(1u32), Just(6), Just(16), Just(128), 1..=128u32];
    (heads, 1..=256u32, tiling, policy, sees, sequences, [0..=400u32, 0..=400u32]).prop_map(
        |(heads, page_size, tiling, policy, sees, sequences, prefix_tokens)| Recipe {
            heads,
            page_size,
            tiling,
            policy,
            sees,
            sequences,
            prefix_tokens,
        },
    )
}

/// Long enough, and cut finely enough, that equal shares are often not the best.
fn ragged_recipes() -> impl Strategy<Value = Recipe> {
    recipes().prop_map(|mut recipe| {
        recipe.policy = SplitPolicy::Auto;
        recipe.page_size = recipe.page_size.max(16);
        recipe.tiling.tokens_per_block = recipe.tiling.tokens_per_block.div_ceil(4);
        recipe.tiling.min_split_tokens /= 4;
        recipe.tiling.item_overhead_tokens /= 4;
        recipe.sequences.iter_mut().for_each(|(len, _, _)| *len = *len * *len / 20);
        recipe.prefix_tokens = recipe.prefix_tokens.map(|tokens| tokens * 4);
        recipe
    })
}

/// An item as one row of it sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Part {
    kv_begin: u32,
    kv_end: u32,
    partial: Option<u32>,
}

/// Tokens of each sequence that its group attends for it, and the sequence that lends its pages.
fn check_shared(recipe: &Recipe, arrays: &Arrays, plan: &Plan) -> Vec<(u32, usize)> {
    let mut shared: Vec<_> = (0..arrays.seq_lens.len()).map(|seq| (0, seq)).collect();
    let mut listed = Vec::new();
    for group in &arrays.groups {
        let shortest = group.sequences.iter().map(|&seq| arrays.seq_lens[seq as usize] as u32).min();
        let most = group.tokens.min(shortest.unwrap_or(0));
        let tokens = recipe.unit().map_or(0, |unit| most / unit * unit);
        // Attended together only by fewer tiles than apart.
        let q_len =
            |seq: u32| arrays.query_start_loc[seq as usize + 1] - arrays.query_start_loc[seq as usize];
        let rows: Vec<u32> = group.sequences.iter().map(|&seq| recipe.heads * q_len(seq) as u32).collect();
        let tiles = |rows: u32| rows.div_ceil(recipe.tiling.rows_per_tile);
        let fewer = tiles(rows.iter().sum()) < rows.iter().map(|&rows| tiles(rows)).sum();
        if tokens > 0 && fewer {
            for &seq in &group.sequences {
                shared[seq as usize] = (tokens, group.sequences[0] as usize);
                listed.push((group.sequences[0], seq, tokens));
            }
        }
    }
    assert_eq!(plan.shared, listed);
    shared
}

/// Every row of every item: in its run, with partials of its own. Returns each row's parts.
fn parts_of_rows(
    recipe: &Recipe,
    arrays: &Arrays,
    plan: &Plan,
    shared: &[(u32, usize)],
) -> BTreeMap<(u32, u32), Vec<Part>> {
    let mut parts: BTreeMap<(u32, u32), Vec<Part>> = BTreeMap::new();
    let mut partials = BTreeSet::new();
    for item in &plan.items {
        assert!((1..=recipe.tiling.rows_per_tile).contains(&item.num_rows), "{item:?}");
        assert!(item.kv_begin <= item.kv_end, "{item:?}");
        assert_eq!((item.pool, item.reserved), (0, 0));
        let owner = plan.page_begin.binary_search(&item.page_begin).expect("the pages of a sequence");
        let is_prefix = item.kv_begin < shared[owner].0;
        let mut most_visible = 0;
        for row in 0..item.num_rows {
            let at = item.first_row + row;
            let query = plan.queries[(at / recipe.heads) as usize];
            let (seq, visible) = arrays.tokens[query.token as usize];
            assert_eq!(query.visible, visible, "token {}", query.token);
            most_visible = most_visible.max(visible);
            // One run an item: a group over its prefix, or one sequence past it.
            if is_prefix {
                assert_eq!(shared[seq].1, owner, "{item:?} row {row}: another group's prefix");
                assert!(shared[seq].0 > 0 && item.kv_end <= shared[seq].0, "{item:?} past its prefix");
            } else {
                assert_eq!(seq, owner, "{item:?} row {row}: another sequence's pages");
                assert!(item.kv_end <= arrays.seq_lens[seq] as u32, "{item:?} past its sequence");
            }
            let partial = (item.partial != DIRECT).then(|| item.partial + row);
            if let Some(partial) = partial {
                assert!(
                    partial < plan.num_partials && partials.insert(partial),
                    "{item:?}: partial {partial}"
                );
            }
            let part = Part { kv_begin: item.kv_begin, kv_end: item.kv_end, partial };
            parts.entry((query.token, at % recipe.heads)).or_default().push(part);
        }
        assert!(item.kv_end <= most_visible.max(item.kv_begin), "{item:?} attends what none of it sees");
    }
    assert_eq!(partials.len(), plan.num_partials as usize, "partials that nothing writes");
    parts
}

/// Each row attends each visible key exactly once, and each result is stored exactly once.
fn check_rows(recipe: &Recipe, arrays: &Arrays, plan: &Plan, parts: &mut BTreeMap<(u32, u32), Vec<Part>>) {
    assert_eq!(parts.len(), arrays.tokens.len() * recipe.heads as usize, "rows with an output");
    let merge_of: BTreeMap<u32, _> = plan.merges.iter().map(|merge| (merge.token, merge)).collect();
    assert_eq!(merge_of.len(), plan.merges.len(), "a token is merged once");
    let listed: u32 = plan.merges.iter().map(|merge| merge.end - merge.begin).sum();
    assert_eq!(listed as usize, plan.merge_partials.len());
    for (&(token, head), parts) in parts {
        let visible = arrays.tokens[token as usize].1;
        parts.sort();
        let mut at = 0;
        for part in parts.iter().filter(|part| part.kv_begin < part.kv_end.min(visible)) {
            assert_eq!(part.kv_begin, at, "token {token} head {head}: {parts:?}");
            at = part.kv_end.min(visible);
        }
        assert_eq!(at, visible, "token {token} head {head}: {parts:?}");

        match merge_of.get(&token) {
            None => {
                assert!(
                    parts.len() == 1 && parts[0].partial.is_none(),
                    "token {token} head {head}: {parts:?}"
                );
            }
            Some(merge) => {
                let listed = &plan.merge_partials[merge.begin as usize..merge.end as usize];
                let of_head: Vec<_> = listed.iter().map(|partial| Some(partial + head)).collect();
                let in_order: Vec<_> = parts.iter().map(|part| part.partial).collect();
                assert_eq!(of_head, in_order, "token {token} head {head}");
            }
        }
    }
}

/// One past the last token that any of a sequence's query tokens sees.
fn visible_end(arrays: &Arrays, seq: usize) -> Option<u32> {
    arrays.tokens.iter().filter(|token| token.0 == seq).map(|token| token.1).max()
}

/// Runs of tokens that can be cut: prefixes, then the rest of each sequence.
fn runs(recipe: &Recipe, arrays: &Arrays, shared: &[(u32, usize)]) -> Vec<cuts::Run> {
    let tiles = |queries: usize| (queries as u32 * recipe.heads).div_ceil(recipe.tiling.rows_per_tile);
    let queries_of = |seq: usize| arrays.tokens.iter().filter(|token| token.0 == seq).count();
    let mut runs = Vec::new();
    for first in arrays.groups.iter().filter_map(|group| group.sequences.first()) {
        let members =
            || (0..shared.len()).filter(|&seq| shared[seq].1 == *first as usize && shared[seq].0 > 0);
        if let Some(end) = members().map(|seq| shared[seq].0).max() {
            let tiles = tiles(members().map(queries_of).sum());
            runs.push(cuts::Run { tiles, begin: 0, end, partial: true });
        }
    }
    for (seq, &(begin, _)) in shared.iter().enumerate() {
        if let Some(end) = visible_end(arrays, seq) {
            let (tiles, end) = (tiles(queries_of(seq)), end.max(begin));
            runs.push(cuts::Run { tiles, begin, end, partial: begin > 0 });
        }
    }
    runs
}

/// Each tile's splits in order, from where to where, before any was shortened to what its rows see. A tile is known by its first row.
fn whole_parts(
    recipe: &Recipe,
    arrays: &Arrays,
    plan: &Plan,
    shared: &[(u32, usize)],
) -> BTreeMap<u32, Vec<(u32, u32)>> {
    let mut begins: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for item in &plan.items {
        begins.entry(item.first_row).or_default().push(item.kv_begin);
    }
    let ends = |(first_row, mut begins): (u32, Vec<u32>)| {
        begins.sort_unstable();
        let query = plan.queries[(first_row / recipe.heads) as usize];
        let seq = arrays.tokens[query.token as usize].0;
        let end = match shared[seq].0 {
            prefix if begins[0] < prefix => prefix,
            _ => visible_end(arrays, seq).unwrap_or(0).max(begins[0]),
        };
        let ends = begins[1..].iter().copied().chain([end]);
        (first_row, begins.iter().copied().zip(ends).collect())
    };
    begins.into_iter().map(ends).collect()
}

fn check_policy(recipe: &Recipe, arrays: &Arrays, plan: &Plan, shared: &[(u32, usize)]) {
    match recipe.policy {
        SplitPolicy::OneSplit => assert_eq!((plan.merges.len(), plan.num_partials), (0, 0)),
        SplitPolicy::FixedTokens(n) => {
            for item in &plan.items {
                assert_eq!(item.kv_begin % n, 0, "{item:?}");
                assert!(item.kv_end - item.kv_begin <= n, "{item:?}");
            }
        }
        SplitPolicy::Auto => {
            cuts::check(
                &runs(recipe, arrays, shared),
                &recipe.tiling,
                &whole_parts(recipe, arrays, plan, shared),
            );
        }
    }
}

fn check(recipe: &Recipe, arrays: &Arrays, plan: &Plan) {
    assert_eq!(plan.num_queries as usize, arrays.tokens.len());
    assert_eq!(plan.page_begin.len(), arrays.seq_lens.len() + 1);
    assert_eq!(plan.page_begin.last(), Some(&plan.page_list_len()));
    for (seq, pages) in plan.page_begin.windows(2).enumerate() {
        let len = arrays.seq_lens[seq] as u32;
        assert_eq!(plan.seq_lens[seq], len);
        assert!(pages[1] - pages[0] >= arrays.spec.kv.pages_for(len), "sequence {seq}: {pages:?}");
    }
    let lengths: Vec<_> = plan.items.iter().map(|item| item.kv_end - item.kv_begin).collect();
    let range = lengths.iter().max().unwrap_or(&0) - lengths.iter().min().unwrap_or(&0);
    let alike = range <= recipe.tiling.tokens_per_block;
    assert!(alike || lengths.is_sorted_by(|a, b| a >= b), "longest first: {lengths:?}");
    assert!(plan.items.iter().all(|item| item.reserved == 0));

    let shared = check_shared(recipe, arrays, plan);
    let mut parts = parts_of_rows(recipe, arrays, plan, &shared);
    check_rows(recipe, arrays, plan, &mut parts);
    check_policy(recipe, arrays, plan, &shared);
}

/// A fixed seed: the same draws in every run.
fn config() -> ProptestConfig {
    ProptestConfig {
        cases: 2000,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(1),
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config())]

    fn every_key_is_attended_once_and_every_row_is_written_once(recipe in recipes()) {
        let arrays = recipe.arrays();
        let mut plan = Plan::default();
        recipe.update(&arrays, &mut plan).unwrap();
        check(&recipe, &arrays, &plan);
    }

    fn ragged_batches_are_attended_too(recipe in ragged_recipes()) {
        let arrays = recipe.arrays();
        let mut plan = Plan::default();
        recipe.update(&arrays, &mut plan).unwrap();
        check(&recipe, &arrays, &plan);
    }

    fn a_plan_that_is_used_again_equals_a_new_one(before in recipes(), recipe in recipes()) {
        let mut plan = Plan::default();
        before.update(&before.arrays(), &mut plan).unwrap();
        let arrays = recipe.arrays();
        recipe.update(&arrays, &mut plan).unwrap();
        let new = Plan::new(&arrays.spec, &recipe.tiling, &arrays.batch(&recipe.sees), recipe.policy).unwrap();
        prop_assert_eq!(plan, new);
    }
}

crate::tests![
    (in cuts, refusals)
    every_key_is_attended_once_and_every_row_is_written_once,
    ragged_batches_are_attended_too,
    a_plan_that_is_used_again_equals_a_new_one,
];
