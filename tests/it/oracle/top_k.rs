//! Case files of `top_k`, and what is wrong with broken ones.

use mla_support::case::Case;
use wgpu_mla::TopKSlots;

use super::broken_files::Parts;

fn every_field_of_a_case_of_top_k_is_checked() {
    use safetensors::Dtype::{F32, I32};
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    // Two rows of three logits, of one sequence, whose page 5 is the last that is used.
    let new = || {
        let mut parts = Parts::new().meta("kind", "top_k_slots").meta("k", "2");
        parts.tensors.push(("logits", F32, vec![2, 3], words(&[0; 6])));
        parts.tensors.push(("lengths", I32, vec![2], words(&[3, 0])));
        parts.tensors.push(("indices", I32, vec![2, 2], words(&[u32::MAX; 4])));
        parts.tensor("block_table", &[1, 3], &[1, 5, 1 << 31]).tensor("query_start_loc", &[2], &[0, 2])
    };
    let read = |parts: Parts| match Case::parse(&parts.bytes()) {
        Ok(Case::TopK(case)) => case,
        other => panic!("{other:?}"),
    };
    let case = read(new());
    assert_eq!((case.spec.k, case.columns, &case.lengths[..]), (2, 3, &[3, 0][..]));
    assert_eq!(case.spec.slots, Some(TopKSlots { page_size: 2, num_pages: 6 }));
    assert_eq!(read(new().meta("kind", "top_k").without("block_table")).spec.slots, None);
    for (parts, why) in [
        (new().meta("k", "0"), "indices"),
        (new().meta("k", "9000").tensor("indices", &[2, 9000], &[0; 18_000]), "k"),
        (new().without("logits"), "logits"),
        (new().typed("logits", I32), "logits"),
        (new().tensor("logits", &[6], &[0; 6]), "logits"),
        (new().tensor("lengths", &[1], &[3]), "lengths"),
        (new().tensor("lengths", &[2], &[4, 0]), "lengths[0] is 4"),
        (new().tensor("lengths", &[2], &[0, u32::MAX]), "lengths[1] is -1"),
        (new().tensor("indices", &[2, 3], &[0; 6]), "indices"),
        (new().typed("indices", F32), "indices"),
        (new().meta("page_size", "0"), "page_size"),
        (new().tensor("query_start_loc", &[2], &[0, 1]), "query_start_loc"),
        (new().tensor("query_start_loc", &[0], &[]), "query_start_loc"),
        (new().tensor("block_table", &[1, 1], &[1]), "too short"),
        (new().tensor("block_table", &[1, 3], &[1, 1 << 31, 0]), "block_table[0][1]"),
        (new().without("block_table"), "block_table"),
    ] {
        let error = parts.error();
        assert!(error.contains(why), "{why}: {error}");
    }
}

crate::tests![every_field_of_a_case_of_top_k_is_checked];
