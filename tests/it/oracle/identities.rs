//! What must hold of the oracle whatever the data.

use mla_support::paint::{Make, sequences};
use mla_support::ranks::cut;
use mla_support::reference::{
    Decode, Expanded, Projection, correct_attn_out, head_project, merge_states, merge_states_in, mla_decode,
    mla_prefill_row,
};
use wgpu_mla::{Dtype, LseBase, Mask, Shares, WeightOrder};

fn merging_splits_gives_the_whole() {
    // One head, L 2, R 0: keys are (logit, value) with q = (1, 0).
    let cache: Vec<f32> = (0..12).map(|i| (i * 7 % 5) as f32 - 2.0).collect();
    let part = |bound: u32, table: &[i32], len: i32| {
        mla_decode(&Decode {
            num_heads: 1,
            kv_lora_rank: 2,
            qk_rope_head_dim: 0,
            page_size: 1,
            q: &[1.0, 0.0],
            kv_cache: &cache,
            block_table: table,
            max_pages: table.len(),
            seq_lens: &[len],
            query_start_loc: &[0, 1],
            mask: Mask::Bounds(&[bound]),
            softmax_scale: 1.0,
            k_scale: 1.0,
            q_scale: 1.0,
        })
    };
    let whole = part(6, &[0, 1, 2, 3, 4, 5], 6);
    let (a, b) = (part(4, &[0, 1, 2, 3, i32::MAX], 4), part(2, &[4, 5], 2));
    let (out, lse) = merge_states(&[(&a.0, a.1[0]), (&[f64::NAN; 2], f64::INFINITY), (&b.0, b.1[0])]);
    assert!((lse - whole.1[0]).abs() < 1e-14);
    assert!(out.iter().zip(&whole.0).all(|(a, b)| (a - b).abs() < 1e-14));
    assert_eq!(part(0, &[i32::MIN], 1), (vec![0.0; 2], vec![f64::NEG_INFINITY]));
}

fn empty_sides_are_ignored() {
    let nan = [f64::NAN; 2];
    let one = [-0.0, 1.5];
    for empty in [f64::NEG_INFINITY, f64::INFINITY, f64::NAN] {
        let (out, lse) = merge_states(&[(&nan, empty), (&one, 3.0)]);
        assert_eq!((out[0].to_bits(), out[1], lse), ((-0f64).to_bits(), 1.5, 3.0));
        assert_eq!(merge_states(&[(&nan, empty), (&nan, empty)]), (vec![0.0; 2], f64::NEG_INFINITY));
    }
}

/// At 1e30 an LSE in f64 has lost the `ln` of the number of equal logits: weights that came from it would add up to their number.
fn weights_add_up_to_1_at_any_logit() {
    for logit in [0.0, 3001.7, 1e6, 1e10, 1e30] {
        for base in [LseBase::E, LseBase::Two] {
            let (ones, lses) = ([1.0; 3], [logit; 3]);
            let (out, lse) = merge_states_in(base, &lses.map(|lse| (&ones[..1], lse)));
            assert!((out[0] - 1.0).abs() < 1e-14 && lse >= logit, "{logit:e}: {out:?} {lse}");
            let corrected = (0..3).map(|rank| correct_attn_out(base, &ones[..1], &lses, rank).0[0]);
            assert!((corrected.sum::<f64>() - 1.0).abs() < 1e-14, "{logit:e}");
        }
        // Keys of `(logit, value)`: values of 1, 1 and -1 are 1/3 on average.
        let (x, q) = (logit as f32, [1.0f32, 0.0]);
        let (out, _) = mla_decode(&Decode {
            num_heads: 1,
            kv_lora_rank: 2,
            qk_rope_head_dim: 0,
            page_size: 1,
            q: &q,
            kv_cache: &[x, 1.0, x, 1.0, x, -1.0],
            block_table: &[0, 1, 2],
            max_pages: 3,
            seq_lens: &[3],
            query_start_loc: &[0, 1],
            mask: Mask::Full,
            softmax_scale: 1.0,
            k_scale: 1.0,
            q_scale: 1.0,
        });
        assert!((out[1] - 1.0 / 3.0).abs() < 1e-14, "{logit:e}: {out:?}");
        let expanded = Expanded {
            num_heads: 1,
            qk_nope_head_dim: 1,
            qk_rope_head_dim: 0,
            v_head_dim: 1,
            q_nope: &q[..1],
            q_pe: &[],
            k_nope: &[x; 3],
            k_pe: &[],
            v: &[1.0, 1.0, -1.0],
            softmax_scale: 1.0,
        };
        let (out, _) = mla_prefill_row(&expanded, 0, 0, 0..3);
        assert!((out[0] - 1.0 / 3.0).abs() < 1e-14, "{logit:e}: {out:?}");
    }
}

fn both_orders_are_one_matrix() {
    let (x, kn, nk) = ([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    for (order, weight) in [(WeightOrder::Kn, kn), (WeightOrder::Nk, nk)] {
        let args = Projection { num_heads: 1, k: 2, n: 3, order, x: &x, weight: &weight, scales: &[] };
        assert_eq!(head_project(&args), [9.0, 12.0, 15.0, 19.0, 26.0, 33.0]);
    }
}

/// vLLM's own test of its interleaved context parallelism, in f64: ranks that are combined are the whole, rows without keys too, and
/// all-gather and reduce-scatter give what an all-to-all does.
fn ranks_are_the_whole() {
    let lens = [(37, 1), (0, 2), (70, 4), (1, 3), (16, 0), (5, 1)];
    let make = Make {
        dims: (256, 32),
        heads: 2,
        cache: Dtype::F32,
        query: Dtype::F32,
        sequences: sequences(&lens),
        ..Make::default()
    };
    let whole = make.build();
    let (out, lse) = whole.expected();
    assert!(lse.contains(&f64::NEG_INFINITY), "some rows see no key");
    let mut all: Vec<Shares> =
        [1, 2, 4, 16].map(|interleave| Shares::even(3, interleave).expect("shares")).into();
    all.extend((1..=8).map(|world| Shares::even(world, 1).expect("shares")));
    all.push(Shares::weighted(&[7, 2, 1], 4).expect("shares"));
    for shares in all {
        let ranks: Vec<_> =
            (0..shares.world()).map(|rank| cut(&whole, &shares, rank).expect("a part").expected()).collect();
        for row in 0..lse.len() {
            let part = |of: &[f64]| of[row * 256..][..256].to_vec();
            let outs: Vec<_> = ranks.iter().map(|(out, _)| part(out)).collect();
            let lses: Vec<_> = ranks.iter().map(|(_, lse)| lse[row]).collect();
            let partials: Vec<_> = outs.iter().map(Vec::as_slice).zip(lses.iter().copied()).collect();
            let (combined, combined_lse) = merge_states(&partials);
            let mut summed = vec![0.0; 256];
            for (rank, out) in outs.iter().enumerate() {
                let (corrected, corrected_lse) = correct_attn_out(LseBase::E, out, &lses, rank);
                assert_eq!(corrected_lse, combined_lse);
                summed.iter_mut().zip(corrected).for_each(|(sum, x)| *sum += x);
            }
            let same = |a: f64, b: f64| a == b || (a - b).abs() < 1e-12;
            assert!(same(combined_lse, lse[row]), "{shares:?} row {row}: {combined_lse} {}", lse[row]);
            for (i, want) in part(&out).into_iter().enumerate() {
                assert!(same(combined[i], want) && same(summed[i], want), "{shares:?} row {row}");
            }
        }
    }
}

crate::tests![
    merging_splits_gives_the_whole,
    empty_sides_are_ignored,
    weights_add_up_to_1_at_any_logit,
    both_orders_are_one_matrix,
    ranks_are_the_whole
];
