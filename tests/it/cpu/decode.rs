//! Decodes of every kind, and which of their bits must be the same.

use super::*;

/// The variants that run here.
fn runnable(spec: &MlaDecode) -> Vec<&'static str> {
    let all = Cpu::with_threads(1).variants(spec);
    all.into_iter().filter(|variant| variant.lacks.is_none()).map(|variant| variant.name).collect()
}

fn every_dims_dtype_and_variant() {
    let spec = Case::new(shape(1, 512, 64), Dtype::F32, Dtype::F32, &[]).spec;
    let variants = runnable(&spec);
    assert_eq!(variants.last(), Some(&"portable"));
    for variant in variants {
        for (l, r) in [(512, 64), (256, 64), (256, 32), (512, 0)] {
            for kv in DTYPES {
                for query in DTYPES {
                    let seqs = [Seq(1, 150, 1), Seq(2, 31, 2)];
                    let mut case = Case::new(shape(5, l, r), kv, query, &seqs);
                    case.policy = SplitPolicy::FixedTokens(100);
                    case.variant = Some(variant);
                    case.check(&format!("{variant} {l}/{r} kv {kv} q {query}"));
                }
            }
        }
    }
}

fn heads_page_sizes_and_policies() {
    for heads in [1, 2, 6, 12, 16, 20, 33, 40, 96, 128] {
        let mut case =
            Case::new(shape(heads, 256, 32), Dtype::F16, Dtype::F32, &[Seq(1, 75, 2), Seq(2, 40, 1)]);
        case.spec.kv.page_size = heads.max(3);
        case.split_query = heads % 2 == 0;
        case.check(&format!("{heads} heads"));
    }
    let policies =
        [SplitPolicy::Auto, SplitPolicy::OneSplit, SplitPolicy::FixedTokens(1), SplitPolicy::FixedTokens(37)];
    for (policy, page_size) in policies.into_iter().zip([1, 256, 64, 7]) {
        let seqs = [Seq(1, 700, 1), Seq(2, 1200, 3), Seq(3, 5, 1)];
        let mut case = Case::new(shape(16, 512, 64), Dtype::F32, Dtype::F32, &seqs);
        (case.policy, case.spec.kv.page_size, case.threads) = (policy, page_size, 4);
        case.check(&format!("{policy:?}, page size {page_size}"));
    }
}

fn ragged_batches_and_empty_rows() {
    let seqs = [Seq(1, 0, 1), Seq(2, 3, 5), Seq(3, 90, 0), Seq(4, 66, 4), Seq(5, 0, 0), Seq(6, 1, 1)];
    for policy in [SplitPolicy::Auto, SplitPolicy::FixedTokens(32), SplitPolicy::OneSplit] {
        for heads in [3, 16] {
            let mut case = Case::new(shape(heads, 256, 64), Dtype::Bf16, Dtype::Bf16, &seqs);
            case.policy = policy;
            case.check(&format!("causal, {policy:?}"));
            case.mask = Mask::Full;
            case.lse_base = LseBase::Two;
            case.check(&format!("full, {policy:?}"));
            case.mask = Mask::Bounds(&[0, 3, 0, 1, 2, 3, 66, 0, 40, 9, 1]);
            case.check(&format!("bounds, {policy:?}"));
        }
    }
    for out in [Dtype::F16, Dtype::Bf16] {
        let mut case = Case::new(shape(3, 256, 64), Dtype::F16, Dtype::F32, &seqs);
        case.spec.out = out;
        case.check(&format!("{out} out"));
    }
}

fn hard_data() {
    let seqs = [Seq(1, 300, 1), Seq(200, 513, 2)];
    let spreads: [(&str, Data, f32); 4] = [
        ("logits past 100", |s, i| noise(s, i) * 2.0, 1.0),
        ("a needle", |s, i| if s < 999 && i / 576 == 177 { 3.0 } else { noise(s, i).abs() * 0.3 }, 2.0),
        ("300", |s, i| if s < 999 { noise(s, i) * 300.0 } else { noise(s, i) * 1e-3 }, 0.135),
        ("1e-4", |s, i| noise(s, i) * 1e-4, 0.135),
    ];
    for (what, data, softmax_scale) in spreads {
        for kv in [Dtype::F32, Dtype::F16] {
            let mut case = Case::new(shape(4, 512, 64), kv, kv, &seqs);
            (case.data, case.softmax_scale) = (data, softmax_scale);
            case.check(what);
            case.policy = SplitPolicy::FixedTokens(64);
            case.check(what);
        }
    }
    let mut case = Case::new(shape(4, 512, 64), Dtype::Bf16, Dtype::F32, &seqs);
    case.data = |s, i| if s < 999 { noise(s, i) * 1e5 } else { noise(s, i) * 1e-5 };
    case.check("bf16 beyond f16");
}

fn shared_prefixes() {
    for policy in [SplitPolicy::Auto, SplitPolicy::FixedTokens(32), SplitPolicy::OneSplit] {
        let seqs = [Seq(1, 100, 1), Seq(300, 50, 1), Seq(2, 64, 1), Seq(3, 333, 2)];
        let mut case = Case::new(shape(6, 256, 64), Dtype::F16, Dtype::F16, &seqs);
        case.policy = policy;
        case.shared = vec![SharedPrefix { sequences: vec![0, 2, 3], tokens: 64 }];
        case.check(&format!("shared prefix, {policy:?}"));
    }
}

/// With fixed splits a row's bits depend on the row alone.
fn fixed_splits_are_bit_exact() {
    let probe = Seq(7, 203, 2);
    for variant in runnable(&Case::new(shape(1, 512, 64), Dtype::F16, Dtype::F16, &[]).spec) {
        for (heads, fixed) in [(6, 64), (16, 100), (5, 17)] {
            for kv in [Dtype::F16, Dtype::E4m3] {
                let mut case = Case::new(shape(heads, 256, 64), kv, Dtype::F32, &[probe]);
                (case.policy, case.variant) = (SplitPolicy::FixedTokens(fixed), Some(variant));
                let (out, lse) = case.run();
                let (rows, latent) = (lse.len(), 256);
                let same = |what: &str, case: &Case, first_row: usize| {
                    let (o, l) = case.run();
                    assert_eq!(bits(&l[first_row..][..rows]), bits(&lse), "{variant}: lse, {what}");
                    let o = &o[first_row * latent..][..rows * latent];
                    assert_eq!(bits(o), bits(&out), "{variant}: out, {what}");
                };
                for threads in [1, 3] {
                    case.threads = threads;
                    same("threads", &case, 0);
                }
                for page_size in [1, 64, 100] {
                    case.spec.kv.page_size = page_size;
                    same("page size", &case, 0);
                }
                case.split_query = true;
                case.seqs = vec![Seq(8, 411, 3), Seq(9, 0, 1), probe, Seq(10, 77, 1)];
                let first_row = 4 * heads as usize;
                same("batch", &case, first_row);
                case.spec.kv.page_size = 16;
                case.shared = vec![SharedPrefix { sequences: vec![0, 2, 3], tokens: 64 }];
                same("shared prefix", &case, first_row);
                // The same keys and query as the last token of a longer run, in another tile.
                case.shared.clear();
                let whole = Case { seqs: vec![Seq(7, 203, 2)], ..case };
                let one = whole.run();
                let bounded = Case { mask: Mask::Bounds(&[202, 203]), ..whole };
                assert_eq!(bits(&bounded.run().0), bits(&one.0), "bounds instead of causal");
            }
        }
    }
}

/// A row's bits do not depend on how many keys the other rows of its tile see.
fn tile_mates_do_not_matter() {
    for policy in [SplitPolicy::OneSplit, SplitPolicy::FixedTokens(64)] {
        let bounds: [&'static [u32]; 3] = [&[45, 203, 1], &[45, 46, 203], &[45, 0, 45]];
        let rows = bounds.map(|bounds| {
            let mut case = Case::new(shape(5, 256, 32), Dtype::F32, Dtype::F32, &[Seq(7, 203, 3)]);
            (case.policy, case.mask) = (policy, Mask::Bounds(bounds));
            let (out, lse) = case.run();
            (bits(&out[..5 * 256]), bits(&lse[..5]))
        });
        assert!(rows[0] == rows[1] && rows[1] == rows[2], "{policy:?}");
    }
}

crate::tests![
    every_dims_dtype_and_variant,
    heads_page_sizes_and_policies,
    ragged_batches_and_empty_rows,
    hard_data,
    shared_prefixes,
    fixed_splits_are_bit_exact,
    tile_mates_do_not_matter,
];
