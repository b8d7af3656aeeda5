//! Case files, as `mla_support::case` reads them: a header that is drawn or mutated, and data behind it.

mod drawn;

use wgpu_mla::{Batch, IndexFormat, Mask, Op, Plan, SparseBatch, SplitPolicy, Tiling};

use mla_support::case::{Case, DecodeCase};

use crate::source::Source;
use crate::{Target, Verdict};

/// The target. Few mutated headers are those of a case.
pub const TARGET: Target = Target {
    name: "cases",
    about: "case files: broken headers, shapes and numbers",
    run,
    seeds,
    least_ran: 20,
    longest: 4096,
    memory: 64 << 20,
};

/// The most bytes of data behind a header.
const MOST_DATA: u32 = 1 << 17;

/// The first byte of an input that is the text of a header.
const MUTATED: u8 = 255;

/// An input is what a file is drawn from, or what its data are and its header's text.
fn run(input: &[u8]) -> Verdict {
    let mut source = Source::new(input);
    let file = if source.chance(64) { mutated(source) } else { drawn::file(&mut source) };
    match Case::parse(&file) {
        Ok(case) => {
            check(&case);
            Verdict::Ran
        }
        Err(why) => {
            assert!(!why.is_empty(), "an error without a word");
            Verdict::Refused
        }
    }
}

/// A header's text, a length that is mostly its own, and data.
fn mutated(mut source: Source<'_>) -> Vec<u8> {
    let blocks = source.between(0, MOST_DATA / 4 - 1);
    let (fill, kind) = (source.byte(), source.byte());
    let header = source.rest();
    let length = match kind {
        255 => u64::MAX,
        254 => header.len() as u64 + 1,
        253 => (header.len() as u64).saturating_sub(1),
        252 => 1 << 63,
        _ => header.len() as u64,
    };
    let mut file = length.to_le_bytes().to_vec();
    file.extend_from_slice(header);
    // Small numbers of any type, and sometimes larger ones.
    for block in 0..blocks {
        let number = if fill > 127 { block % (u32::from(fill) - 126) } else { u32::from(fill & 3) };
        file.extend_from_slice(&number.to_le_bytes());
    }
    file
}

const TILING: Tiling = Tiling {
    rows_per_tile: 16,
    tokens_per_block: 16,
    target_items: 8,
    min_split_tokens: 16,
    single_sequence_items: 0,
    item_overhead_tokens: 0,
};

/// What is read fits together: whoever runs the case looks at nothing again.
fn check(case: &Case) {
    match case {
        Case::Decode(case) => check_decode(case),
        Case::Sparse(case) => {
            let (spec, tokens) = (case.spec, (case.lse.len() / case.spec.shape.num_heads as usize) as u32);
            let arrays = [case.q.len(), case.kv_cache.len(), case.out.len() * 4, case.lse.len() * 4];
            let bytes = [
                spec.query_bytes(tokens),
                spec.cache_bytes(),
                spec.out_bytes(tokens),
                spec.lse_bytes(tokens),
            ];
            assert_eq!(arrays.map(|len| len as u64), bytes);
            let lists = &case.lists;
            assert_eq!(lists.slots.len(), tokens as usize * lists.topk);
            if let Some(lengths) = &lists.topk_length {
                assert_eq!(lengths.len(), tokens as usize);
            }
            assert!(lists.rows().all(|list| list.len() <= lists.topk));
            assert!(case.attn_sink.as_ref().is_none_or(|sinks| sinks.len() == spec.shape.num_heads as usize));
            let batch = SparseBatch::new(tokens, lists.topk as u32);
            Plan::sparse(&spec, &TILING, &batch, SplitPolicy::Auto).expect("lists that are checked");
        }
        Case::TopK(case) => {
            let (rows, k) = (case.lengths.len(), case.spec.k as usize);
            assert_eq!([case.logits.len(), case.indices.len()], [rows * case.columns * 4, rows * k]);
            case.spec.check().expect("a spec that is checked");
            assert!(case.lengths.iter().all(|&length| (0..=case.columns as i32).contains(&length)));
        }
        Case::DcpDecode(case) => {
            check_decode(&case.decode);
            let want = case.shares.world() as usize * case.decode.seq_lens.len();
            assert_eq!(case.local_seq_lens.len(), want);
        }
        Case::Merge(case) => {
            let rows = case.num_tokens * case.num_heads;
            let bytes = rows * case.spec.head_size as usize * case.spec.dtype.bytes();
            assert_eq!([case.prefix_output.len(), case.suffix_output.len()], [bytes; 2]);
            assert_eq!([case.prefix_lse.len(), case.suffix_lse.len(), case.output_lse.len()], [rows; 3]);
            assert_eq!(case.output.len(), rows * case.spec.head_size as usize);
            case.spec.check().expect("a spec that is served");
        }
        Case::Append(case) => {
            let (shape, tokens) = (case.spec.shape, case.slot_mapping.len());
            let bytes = |dim: u32| tokens * dim as usize * case.spec.input.bytes();
            assert_eq!(case.kv_c.len(), bytes(shape.kv_lora_rank));
            assert_eq!(case.k_pe.len(), bytes(shape.qk_rope_head_dim));
            let pool = case.spec.kv.page_bytes(&shape) * u64::from(case.spec.kv.num_pages);
            assert_eq!([case.kv_cache.len() as u64, case.kv_cache_before.len() as u64], [pool; 2]);
            case.spec.slots(&case.slot_mapping).expect("slots of the pool");
        }
        Case::IndexAppend(case) => {
            let (spec, tokens) = (case.spec, case.slot_mapping.len());
            assert_eq!(case.k.len(), tokens * 128 * spec.input.bytes());
            assert_eq!([case.norm_weight.len(), case.norm_bias.len()], [128; 2]);
            let caches = [&case.index_cache, &case.index_cache_before].map(|cache| cache.len() as u64);
            assert_eq!(caches, [spec.index.cache_bytes(); 2]);
            check_angles(&spec.index.format, &case.positions, &case.cos_sin, tokens);
            spec.slots(&case.slot_mapping).expect("slots of the pool");
        }
        Case::IndexQuery(case) => {
            let (spec, rows) = (case.spec, case.weights.len());
            assert_eq!(case.q.len(), rows * 128 * spec.input.bytes());
            assert_eq!((case.q_codes.len(), case.q_weights.len()), (rows * 128, rows));
            check_angles(&spec.format, &case.positions, &case.cos_sin, rows / spec.num_heads as usize);
            spec.check().expect("a spec that is served");
        }
        Case::IndexLogits(case) => {
            let (spec, tokens) = (case.spec, *case.query_start_loc.last().expect("an end") as usize);
            let rows = tokens * spec.num_heads as usize;
            assert_eq!((case.q.len(), case.weights.len()), (rows * 128 * spec.query.bytes(), rows));
            assert_eq!(case.index_cache.len() as u64, spec.index.cache_bytes());
            assert_eq!(case.block_table.len(), case.seq_lens.len() * case.max_pages);
            assert_eq!(case.logits.len(), tokens * case.columns);
            spec.check().expect("a spec that is served");
        }
        Case::DcpCombine(case) => {
            let rows = case.num_tokens * case.num_heads;
            let bytes = rows * case.spec.head_size as usize * case.spec.dtype.bytes();
            assert_eq!(
                [case.outs.len(), case.lses.len() * bytes],
                [case.world * bytes, case.world * rows * bytes]
            );
            assert_eq!((case.out.len(), case.lse.len()), (rows * case.spec.head_size as usize, rows));
            case.spec.check().expect("a spec that is served");
        }
    }
}

fn check_angles(format: &IndexFormat, positions: &[i32], cos_sin: &[f32], tokens: usize) {
    if format.rope.is_some() {
        assert!(positions.len() == tokens && !cos_sin.is_empty() && cos_sin.len().is_multiple_of(64));
    }
}

fn check_decode(case: &DecodeCase) {
    let (spec, tokens) = (case.spec, *case.query_start_loc.last().expect("an end") as u32);
    assert_eq!(
        (case.q.len() as u64, case.kv_cache.len() as u64),
        (spec.query_bytes(tokens), spec.cache_bytes())
    );
    assert_eq!(case.out.len() as u64 * 4, spec.out_bytes(tokens));
    assert_eq!(
        (case.lse.len() as u64 * 4, case.block_table.len()),
        (spec.lse_bytes(tokens), case.seq_lens.len() * case.max_pages)
    );
    let mask = if case.causal { Mask::Causal } else { Mask::Full };
    let batch = Batch { mask, ..Batch::new(&case.seq_lens, &case.query_start_loc) };
    // A sequence may have more tokens than the pool only where its pages repeat.
    if case.seq_lens.iter().all(|&len| len as u64 <= spec.kv.num_slots()) {
        Plan::new(&spec, &TILING, &batch, SplitPolicy::Auto).expect("a batch that is checked");
    }
}

/// A good header of each kind.
fn seeds() -> Vec<Vec<u8>> {
    drawn::KINDS
        .iter()
        .zip(0u8..)
        .map(|(_, kind)| {
            let file = drawn::file(&mut Source::new(&[kind]));
            let (length, rest) = file.split_first_chunk::<8>().expect("a length");
            let header = &rest[..u64::from_le_bytes(*length) as usize];
            // What `run` takes: the number of blocks, and what they hold.
            let blocks = (rest.len() - header.len()) as u16 / 4;
            [&[MUTATED], &blocks.to_le_bytes()[..], &[0, 0], header].concat()
        })
        .collect()
}
