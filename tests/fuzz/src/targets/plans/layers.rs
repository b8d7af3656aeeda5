//! Batches of a layer, which are planned and not run.

use std::collections::BTreeSet;

use wgpu_mla::layer::LayerPlan;
use wgpu_mla::{Dtype, ExpandedPrefix, LayerBatch, MlaLayer, RopeLayout, SplitPolicy};

use super::batch::{Drawn, spec};
use super::spoil::{Spoiled, spoil};
use super::{cpu, tiling_of};
use crate::Verdict;
use crate::source::Source;

/// Plans a batch for a layer: a good one is accepted, and its decodes attend every key once.
pub fn run(source: &mut Source<'_>) -> Verdict {
    let decode = spec(source);
    let kv = decode.kv;
    let mut layer = MlaLayer {
        shape: decode.shape,
        qk_nope_head_dim: 8 * source.between(1, 4),
        v_head_dim: 8 * source.between(1, 4),
        kv,
        dtype: decode.out,
        query: decode.out,
        weight: Dtype::F32,
        out: decode.out,
        rope: RopeLayout::Interleaved,
        decode_threshold: source.between(0, 4),
        workspace_bytes: 0,
    };
    let rows = u64::from(source.between(64 + kv.page_size, 400));
    layer.workspace_bytes = rows * layer.workspace_row_bytes();
    let mut drawn = Drawn::draw(source, &decode, &tiling_of(cpu(), &decode));
    drawn.policy =
        if source.chance(64) { SplitPolicy::FixedTokens(source.between(1, 40)) } else { SplitPolicy::Auto };
    // No sequence has more query tokens than tokens.
    for seq in 0..drawn.lens.len() {
        let queries = drawn.starts[seq + 1] - drawn.starts[seq];
        let less = (queries - drawn.lens[seq]).max(0);
        drawn.starts[seq + 1..].iter_mut().for_each(|start| *start -= less);
    }
    let mut is_good = true;
    let mut slots = slots(source, &drawn, kv.page_size);
    let expanded = expanded(source, &drawn, kv.page_size);
    // A layer may refuse prefixes that it cannot keep.
    is_good &= expanded.is_empty();
    is_good &= drawn.slab_pages == 0 || drawn.slab_pages * kv.page_size >= 64;
    is_good &= spoil(source, &mut drawn) == Spoiled::Nothing;
    if source.chance(24) && !slots.is_empty() {
        let at = source.index(slots.len());
        slots[at] = source.hostile_u64() as i64;
        is_good = false;
    }
    if source.chance(8) {
        layer.workspace_bytes = source.hostile_u64();
        is_good = false;
    }
    let csr = drawn.csr();
    let batch = LayerBatch {
        seq_lens: &drawn.lens,
        query_start_loc: &drawn.starts,
        slot_mapping: &slots,
        pages: drawn.pages(&csr),
        shared_prefixes: &drawn.prefixes,
        expanded: &expanded,
    };
    match LayerPlan::in_slabs(&layer, &drawn.tiling, &batch, drawn.policy, drawn.slab_pages) {
        Ok(plan) => {
            // Whatever the workspace was made.
            let rows = layer.workspace_bytes / layer.workspace_row_bytes();
            let decoded: u32 = plan.decoded.iter().map(|run| run.end - run.start).sum();
            assert_eq!(plan.positions.len(), slots.len(), "{layer:?} {drawn:?}");
            assert!(decoded as usize <= slots.len(), "{layer:?} {drawn:?}");
            for chunk in &plan.chunks {
                let ends = chunk.ranges.iter().map(|range| range.out_row + range.tokens);
                assert!(
                    ends.max().unwrap_or(0) <= chunk.rows && u64::from(chunk.rows) <= rows.max(1),
                    "{layer:?} {drawn:?}"
                );
            }
            Verdict::Ran
        }
        Err(error) => {
            assert!(!is_good, "a good batch is refused: {error}: {layer:?} {drawn:?} {slots:?}");
            Verdict::Refused
        }
    }
}

/// Where the query tokens' rows go: nowhere, or where the table says if no page is in it twice.
fn slots(source: &mut Source<'_>, drawn: &Drawn, page_size: u32) -> Vec<i64> {
    let (_, pages) = drawn.csr();
    let are_new = pages.iter().collect::<BTreeSet<_>>().len() == pages.len() && source.chance(128);
    let mut slots = Vec::new();
    for (seq, &len) in drawn.lens.iter().enumerate() {
        let queries = drawn.starts[seq + 1] - drawn.starts[seq];
        for position in (len - queries..len).map(|position| position as u32) {
            let page = drawn.table[seq * drawn.max_pages as usize + (position / page_size) as usize];
            let slot = i64::from(page) * i64::from(page_size) + i64::from(position % page_size);
            slots.push(if are_new { slot } else { -1 });
        }
    }
    slots
}

/// Some of the shared prefixes, in whole pages, as expanded ones.
fn expanded(source: &mut Source<'_>, drawn: &Drawn, page_size: u32) -> Vec<ExpandedPrefix> {
    if !source.chance(96) {
        return Vec::new();
    }
    let mut first_row = 0;
    let of = |group: &wgpu_mla::SharedPrefix| {
        let tokens = group.tokens / page_size * page_size;
        first_row += tokens;
        ExpandedPrefix { sequences: group.sequences.clone(), tokens, first_row: first_row - tokens }
    };
    let mut all: Vec<_> = drawn.prefixes.iter().map(of).collect();
    if source.chance(32) && !all.is_empty() {
        let at = source.index(all.len());
        match source.below(3) {
            0 => all[at].tokens = source.hostile(),
            1 => all[at].first_row = source.hostile(),
            _ => all[at].sequences.push(source.hostile()),
        }
    }
    all
}
