//! The test problems themselves: distinct answers, finite results, and poison in everything unused.

use mla_support::paint::{Data, Make, sequences};
use wgpu_mla::Dtype;

fn painted_heads_tokens_and_sequences_have_answers_of_their_own() {
    for dims in [(512, 64), (256, 64), (256, 32), (512, 0)] {
        for dtype in Dtype::ALL {
            let sequences = sequences(&[(37, 2), (90, 2), (64, 1), (150, 1)]);
            let problem =
                Make { dims, cache: dtype, query: dtype, heads: 40, sequences, ..Make::default() }.build();
            let (out, _) = problem.expected();
            let rows: Vec<&[f64]> = out.chunks(dims.0 as usize).collect();
            for (i, a) in rows.iter().enumerate() {
                for (j, b) in rows.iter().enumerate().skip(i + 1) {
                    let apart = a.iter().zip(*b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                    assert!(apart > 0.02, "{dims:?} {dtype}: rows {i} and {j} differ by {apart}");
                }
            }
        }
    }
}

fn hard_data_is_finite_and_hard() {
    for data in Data::ALL {
        for dtype in Dtype::ALL.into_iter().filter(|&d| data != Data::Huge || d != Dtype::F16) {
            let problem = Make { data, cache: dtype, query: dtype, ..Make::default() }.build();
            let (out, lse) = problem.expected();
            assert!(out.iter().chain(&lse).all(|x| x.is_finite()), "{}", problem.name);
            let (low, high) = lse.iter().fold((f64::MAX, f64::MIN), |(a, b), &x| (a.min(x), b.max(x)));
            println!("{}: lse {low:.2}..{high:.2}, u {:.1}", problem.name, problem.largest_latent());
            match data {
                Data::Needle | Data::BigLogits => assert!(low > 30.0),
                _ => assert!(high < 12.0),
            }
        }
    }
}

fn a_problem_does_not_depend_on_its_pages() {
    let expected = |page_size, page_seed, spare_entries| {
        Make { page_size, page_seed, spare_entries, ..Make::default() }.build().expected()
    };
    let want = expected(16, 1, 0);
    for (page_size, page_seed) in [(1, 1), (3, 2), (64, 3), (256, 4)] {
        assert_eq!(expected(page_size, page_seed, 5), want);
    }
}

fn unused_rows_are_nan() {
    for cache in Dtype::ALL {
        let make = Make { cache, sequences: sequences(&[(5, 1)]), page_size: 4, ..Make::default() };
        let problem = make.build();
        let values = cache.decode_all(&problem.kv);
        let alive = values.chunks(576).filter(|row| row.iter().all(|x| x.is_finite())).count();
        let dead = values.chunks(576).filter(|row| row.iter().all(|x| x.is_nan())).count();
        assert_eq!((alive, alive + dead), (5, problem.spec.kv.num_slots() as usize));
        assert!(problem.block_table[2..].iter().all(|&page| page as u32 >= problem.spec.kv.num_pages));
    }
}

crate::tests![
    painted_heads_tokens_and_sequences_have_answers_of_their_own,
    hard_data_is_finite_and_hard,
    a_problem_does_not_depend_on_its_pages,
    unused_rows_are_nan,
];
