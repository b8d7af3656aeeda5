//! Batches that contradict themselves.

use super::*;

/// Plans a batch into a plan that holds another; expects an error and an empty plan.
fn refused(spec: &MlaDecode, batch: &Batch<'_>, policy: SplitPolicy) -> Error {
    let mut plan =
        Plan::new(spec, &TILING, &Batch::new(&[900], &[0, 2]), SplitPolicy::FixedTokens(64)).unwrap();
    let error = plan.update(spec, &TILING, batch, policy).unwrap_err();
    assert_eq!(plan.items, [], "after {error}");
    assert_eq!(
        (plan.queries.len(), plan.merges.len(), plan.merge_partials.len()),
        (0, 0, 0),
        "after {error}"
    );
    assert_eq!(
        (plan.num_partials, plan.num_queries, plan.page_list_len(), plan.work()),
        (0, 0, 0, 0),
        "after {error}"
    );
    assert_eq!((plan.seq_lens.len(), plan.shared.len()), (0, 0), "after {error}");
    error
}

const POLICIES: [SplitPolicy; 3] = [SplitPolicy::Auto, SplitPolicy::FixedTokens(32), SplitPolicy::OneSplit];

fn refuses_arrays_of_wrong_lengths() {
    for starts in [&[][..], &[0], &[0, 1], &[0, 1, 2, 3]] {
        for policy in POLICIES {
            let error = refused(&spec(16, 16), &Batch::new(&[5, 6], starts), policy);
            assert!(matches!(error, Error::Length { what: "query_start_loc", want: 3, .. }), "{error}");
        }
    }
    for bounds in [&[][..], &[1], &[1, 2, 3]] {
        let mask = Mask::Bounds(bounds);
        let batch = Batch { mask, ..Batch::new(&[5, 6], &[0, 1, 2]) };
        let error = refused(&spec(16, 16), &batch, SplitPolicy::Auto);
        assert!(matches!(error, Error::Length { what: "Mask::Bounds", want: 2, .. }), "{error}");
    }
}

fn refuses_query_start_loc_that_starts_elsewhere_or_goes_down() {
    for (starts, wrong) in
        [([1, 2, 3], 0), ([-1, 0, 1], 0), ([0, -1, 3], 1), ([0, 3, 2], 2), ([0, 0, i32::MIN], 2)]
    {
        let error = refused(&spec(16, 16), &Batch::new(&[5, 6], &starts), SplitPolicy::Auto);
        assert!(matches!(error, Error::QueryStartLoc { index, .. } if index == wrong), "{starts:?}: {error}");
    }
}

fn refuses_lengths_that_no_pool_holds() {
    for len in [-1, i32::MIN, 16_001, i32::MAX] {
        let error = refused(&spec(16, 16), &Batch::new(&[5, len], &[0, 1, 2]), SplitPolicy::Auto);
        assert!(
            matches!(error, Error::SeqLen { seq: 1, got, max: 16_000, .. } if got == i64::from(len)),
            "{error}"
        );
    }
}

fn refuses_bounds_past_the_sequence() {
    let batch = Batch { mask: Mask::Bounds(&[5, 7]), ..Batch::new(&[5, 6], &[0, 1, 2]) };
    for policy in POLICIES {
        let error = refused(&spec(16, 16), &batch, policy);
        assert!(
            matches!(error, Error::Shape { what: "visible keys of a query token", got: 7, .. }),
            "{error}"
        );
    }
}

fn refuses_splits_of_no_tokens() {
    let error = refused(&spec(16, 16), &Batch::new(&[5], &[0, 1]), SplitPolicy::FixedTokens(0));
    assert!(matches!(error, Error::Shape { what: "tokens per split", got: 0, .. }), "{error}");
}

/// A group is checked even where it cannot be used, so that a host finds its mistake on the first batch.
fn refuses_a_sequence_in_two_prefixes_or_in_none_of_the_batch() {
    let group = |sequences: &[u32], tokens| SharedPrefix { sequences: sequences.to_vec(), tokens };
    for (groups, got) in [
        (vec![group(&[0, 1], 64), group(&[1, 2], 64)], 1),
        (vec![group(&[0, 1], 5), group(&[1, 2], 64)], 1),
        (vec![group(&[0, 0], 64)], 0),
        (vec![group(&[0, 3], 64)], 3),
        (vec![group(&[u32::MAX], 64)], u32::MAX),
    ] {
        let batch = Batch { shared_prefixes: &groups, ..Batch::new(&[100, 100, 100], &[0, 1, 2, 3]) };
        for policy in POLICIES {
            let error = refused(&spec(16, 16), &batch, policy);
            let wrong = matches!(error, Error::Shape { what: "SharedPrefix sequence", got: g, .. } if g == u64::from(got));
            assert!(wrong, "{policy:?} {groups:?}: {error}");
        }
    }
}

/// Counts that pass 2^32 are errors, not wrapped ones.
fn refuses_what_32_bits_cannot_count() {
    let large = |num_pages| {
        let spec = spec(128, 1);
        MlaDecode { kv: KvSpec { num_pages, ..spec.kv }, ..spec }
    };
    let len = 1 << 30;
    let error = refused(&large(len as u32), &Batch::new(&[len; 4], &[0; 5]), SplitPolicy::OneSplit);
    assert!(matches!(error, Error::Limit { .. }), "pages: {error}");
    let error = refused(&large(16_000), &Batch::new(&[1], &[0, i32::MAX]), SplitPolicy::OneSplit);
    assert!(matches!(error, Error::Limit { .. }), "rows: {error}");
    let error = refused(&large(1 << 30), &Batch::new(&[1 << 30], &[0, 64]), SplitPolicy::FixedTokens(64));
    assert!(matches!(error, Error::Limit { .. }), "partials: {error}");
}

crate::tests![
    refuses_arrays_of_wrong_lengths,
    refuses_query_start_loc_that_starts_elsewhere_or_goes_down,
    refuses_lengths_that_no_pool_holds,
    refuses_bounds_past_the_sequence,
    refuses_splits_of_no_tokens,
    refuses_a_sequence_in_two_prefixes_or_in_none_of_the_batch,
    refuses_what_32_bits_cannot_count,
];
