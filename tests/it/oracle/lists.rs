//! Case files of lists of slots, and what is wrong with broken ones.

use mla_support::case::Case;
use wgpu_mla::{Dtype, KvLayout};

use super::broken_files::Parts;

fn every_field_of_a_case_of_lists_is_checked() {
    use safetensors::Dtype::{BF16, F32, I32, U8};
    let new = || {
        let mut parts =
            Parts::new().meta("kind", "decode_sparse").meta("causal", "false").meta("kv_layout", "dense");
        parts.tensors.push(("indices", I32, vec![1, 3], [-1i32, 3, i32::MAX].map(i32::to_le_bytes).concat()));
        parts.tensors.push(("topk_length", I32, vec![1], vec![2, 0, 0, 0]));
        parts.tensors.push(("attn_sink", F32, vec![1], f32::INFINITY.to_le_bytes().to_vec()));
        parts
    };
    let read = |parts: Parts| match Case::parse(&parts.bytes()) {
        Ok(Case::Sparse(case)) => case,
        other => panic!("{other:?}"),
    };
    let case = read(new());
    assert_eq!((case.lists.topk, &case.lists.slots[..]), (3, &[-1, 3, i32::MAX][..]));
    assert_eq!((case.lists.topk_length, case.attn_sink), (Some(vec![2]), Some(vec![f32::INFINITY])));
    let plain = read(new().without("topk_length").without("attn_sink").without("k_scale"));
    assert_eq!((plain.lists.topk_length, plain.attn_sink), (None, None));
    let records = || {
        let dims = new().meta("kv_lora_rank", "512").meta("qk_rope_head_dim", "0");
        let mut parts = dims.meta("kv_layout", "fp8_ds_mla_528").tensor("q", &[1, 1, 512], &[0; 512]);
        parts = parts.tensor("kv_cache", &[2, 2, 528], &[0; 528]).typed("kv_cache", U8);
        parts.tensor("out", &[1, 1, 512], &[0; 512])
    };
    assert_eq!(read(records()).spec.kv.layout, KvLayout::Ds528);
    let minus = |x: i32| x as u32;
    for (parts, why) in [
        (new().meta("causal", "true"), "causal"),
        (new().meta("kv_layout", "fp8_ds_mla_584"), "kv_layout"),
        (new().meta("kv_layout", "fp8_ds_mla_656"), "kv_cache"),
        (records().meta("kv_layout", "fp8_ds_mla_656"), "qk_rope_head_dim"),
        (records().tensor("k_scale", &[1], &[0.5f32.to_bits()]), "k_scale"),
        (records().tensor("kv_cache", &[1, 2, 656], &[0; 328]).typed("kv_cache", U8), "kv_cache"),
        (new().tensor("indices", &[1, 0], &[]), "indices"),
        (new().tensor("indices", &[2, 1], &[0; 2]), "indices"),
        (new().tensor("indices", &[3], &[0; 3]), "indices"),
        (new().typed("indices", F32), "indices"),
        (new().tensor("topk_length", &[1], &[4]), "topk_length[0] is 4"),
        (new().tensor("topk_length", &[1], &[minus(-1)]), "topk_length[0] is -1"),
        (new().tensor("topk_length", &[2], &[0; 2]), "topk_length"),
        (new().typed("topk_length", F32), "topk_length"),
        (new().tensor("attn_sink", &[2], &[0; 2]), "attn_sink"),
        (new().tensor("attn_sink", &[1], &[f32::NAN.to_bits()]), "attn_sink"),
        (new().typed("attn_sink", I32), "attn_sink"),
        (new().tensor("lse", &[1, 2], &[0; 2]), "lse"),
        (new().tensor("out", &[1, 1, 255], &[0; 255]), "out"),
    ] {
        let error = parts.error();
        assert!(error.contains(why), "{error:?} does not name {why:?}");
    }
    for name in ["q", "kv_cache", "indices", "out", "lse"] {
        let error = new().without(name).error();
        assert!(error.contains(name) && error.contains("missing"), "{error:?} does not name {name:?}");
    }
    let halves = new().tensor("q", &[1, 1, 288], &[0; 144]).typed("q", BF16);
    assert_eq!(read(halves).spec.query, Dtype::Bf16);
}

crate::tests![every_field_of_a_case_of_lists_is_checked];
