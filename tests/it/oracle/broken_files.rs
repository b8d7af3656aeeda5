//! The reader of case files against broken ones: an error that names what is wrong, never a panic.

use std::collections::HashMap;

use mla_support::case::{Case, Saved, save};
use wgpu_mla::Dtype;

use super::{case_files, load};

/// A safetensors file with a header of our own making.
fn file(header: &str, data_len: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + data_len, 0);
    bytes
}

fn header_len(bytes: &[u8]) -> usize {
    u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize
}

fn a_truncated_file_is_an_error() {
    for path in case_files() {
        let bytes = std::fs::read(&path).expect("readable");
        let end = 8 + header_len(&bytes);
        let places =
            (0..end + 40).chain((end..bytes.len()).step_by(bytes.len() / 97)).chain([bytes.len() - 1]);
        for len in places {
            assert!(Case::parse(&bytes[..len]).is_err(), "{} cut to {len} bytes", path.display());
        }
        assert!(Case::parse(&[&bytes[..], &[0]].concat()).is_err(), "{} with a byte more", path.display());
    }
}

fn flipped_header_bytes_never_panic() {
    let bytes = load("append_fp8_pow2.safetensors");
    for name in ["decode_fp8_minicpm3_h40.safetensors", "merge_bf16_d96.safetensors"] {
        flip_all(&load(name));
    }
    flip_all(&bytes);
}

fn flip_all(bytes: &[u8]) {
    let mut bytes = bytes.to_vec();
    for at in 0..8 + header_len(&bytes) {
        let kept = bytes[at];
        for flipped in [kept ^ 1, kept ^ 0x80, kept ^ 0x08, b'9', b'0', b'-', b'"', b'}', 0] {
            bytes[at] = flipped;
            let _ = Case::parse(&bytes);
        }
        bytes[at] = kept;
    }
}

fn hostile_files_are_errors_that_name_what_is_wrong() {
    let offsets_overflow: String = (0..9u64)
        .map(|i| {
            let len = (1u64 << 61) - 1;
            let (dim, from) = if i < 8 { (len, i * len) } else { (7, 8 * len) };
            let to = from + dim;
            format!(r#""t{i}":{{"dtype":"U8","shape":[{dim}],"data_offsets":[{from},{to}]}}"#)
        })
        .collect::<Vec<_>>()
        .join(",");
    let huge_header = [&u64::MAX.to_le_bytes()[..], b"{}"].concat();
    let shape = |shape: &str| {
        let meta = r#""__metadata__":{"format":"mla-case/1","kind":"merge_attn_states"}"#;
        file(
            &format!(r#"{{{meta},"prefix_output":{{"dtype":"F32","shape":{shape},"data_offsets":[0,0]}}}}"#),
            0,
        )
    };
    let text = |meta: &str| file(&format!(r#"{{"__metadata__":{{{meta}}}}}"#), 0);
    let cases = [
        (Vec::new(), "safetensors"),
        (huge_header, "safetensors"),
        (file("{", 0), "safetensors"),
        (file("{}", 0), "format is missing"),
        (file(&format!("{{{offsets_overflow}}}"), 0), "absurdly large"),
        (shape("[4294967296,4294967296,1]"), "safetensors"),
        (shape("[0,4294967296,1]"), "suffix_output is missing"),
        (shape("[0,1]"), "prefix_output"),
        (text(r#""format":"mla-case/2","kind":"decode""#), "format is \"mla-case/2\""),
        (text(r#""format":"mla-case/1""#), "kind is missing"),
        (text(r#""format":"mla-case/1","kind":"prefill""#), "kind is \"prefill\""),
        (text(r#""format":"mla-case/1","kind":"decode""#), "kv_lora_rank is missing"),
        (text(r#""format":"mla-case/1","kind":"decode","kv_lora_rank":"-1""#), "kv_lora_rank is \"-1\""),
    ];
    for (bytes, why) in cases {
        let error = Case::parse(&bytes).expect_err(why);
        assert!(error.contains(why), "{error:?} does not say {why:?}");
    }
}

/// A small decode case as text and tensors, to be broken one field at a time.
pub(super) struct Parts {
    meta: HashMap<String, String>,
    pub(super) tensors: Vec<(&'static str, safetensors::Dtype, Vec<usize>, Vec<u8>)>,
}

impl Parts {
    pub(super) fn new() -> Self {
        use safetensors::Dtype::{F32, I32};
        let meta = [
            ("format", "mla-case/1"),
            ("kind", "decode"),
            ("softmax_scale", "0.1"),
            ("kv_lora_rank", "256"),
            ("qk_rope_head_dim", "32"),
            ("page_size", "2"),
            ("causal", "true"),
        ];
        let i32s = |xs: &[i32]| xs.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let tensors = vec![
            ("q", F32, vec![1, 1, 288], vec![0; 288 * 4]),
            ("kv_cache", F32, vec![2, 2, 288], vec![0; 4 * 288 * 4]),
            ("block_table", I32, vec![1, 2], i32s(&[1, i32::MAX])),
            ("seq_lens", I32, vec![1], i32s(&[2])),
            ("query_start_loc", I32, vec![2], i32s(&[0, 1])),
            ("k_scale", F32, vec![1], 1f32.to_le_bytes().to_vec()),
            ("out", F32, vec![1, 1, 256], vec![0; 1024]),
            ("lse", F32, vec![1, 1], vec![0; 4]),
        ];
        Self { meta: meta.map(|(k, v)| (k.to_owned(), v.to_owned())).into(), tensors }
    }

    pub(super) fn meta(mut self, key: &str, value: &str) -> Self {
        self.meta.insert(key.to_owned(), value.to_owned());
        self
    }

    pub(super) fn tensor(mut self, name: &'static str, shape: &[usize], words: &[u32]) -> Self {
        let tensor = self.tensors.iter_mut().find(|tensor| tensor.0 == name).expect(name);
        tensor.2 = shape.to_vec();
        tensor.3 = words.iter().flat_map(|x| x.to_le_bytes()).collect();
        self
    }

    pub(super) fn typed(mut self, name: &'static str, dtype: safetensors::Dtype) -> Self {
        self.tensors.iter_mut().find(|tensor| tensor.0 == name).expect(name).1 = dtype;
        self
    }

    pub(super) fn without(mut self, name: &str) -> Self {
        self.tensors.retain(|tensor| tensor.0 != name);
        self
    }

    pub(super) fn error(self) -> String {
        Case::parse(&self.bytes()).expect_err("a broken case")
    }

    pub(super) fn bytes(self) -> Vec<u8> {
        let view = |dtype, shape: &[usize], data| {
            safetensors::tensor::TensorView::new(dtype, shape.to_vec(), data).expect("bytes fit the shape")
        };
        let views: Vec<_> =
            self.tensors.iter().map(|(name, d, s, bytes)| (*name, view(*d, s, bytes))).collect();
        safetensors::serialize(views, Some(self.meta)).expect("serialises")
    }
}

fn every_field_of_a_decode_case_is_checked() {
    let new = Parts::new;
    assert!(matches!(Case::parse(&new().bytes()), Ok(Case::Decode(case)) if case.max_pages == 2));
    let one = |x: f32| [x.to_bits()];
    let minus = |x: i32| x as u32;
    for (parts, why) in [
        (new().meta("page_size", "0"), "page_size"),
        (new().meta("page_size", "3"), "kv_cache"),
        (new().meta("kv_lora_rank", "128"), "kv_lora_rank"),
        (new().meta("kv_lora_rank", "4294967295"), "kv_lora_rank"),
        (new().meta("qk_rope_head_dim", "64"), "tensor q"),
        (new().meta("softmax_scale", "nan"), "softmax_scale"),
        (new().meta("softmax_scale", "1e-99"), "softmax_scale"),
        (new().meta("softmax_scale", "-0.1"), "softmax_scale"),
        (new().meta("softmax_scale", "big"), "softmax_scale"),
        (new().meta("causal", "yes"), "causal"),
        (new().tensor("q", &[1, 0, 288], &[]), "num_heads"),
        (new().tensor("q", &[1, 129, 288], &vec![0; 129 * 288]), "num_heads"),
        (new().tensor("q", &[2, 1, 288], &[0; 576]), "query_start_loc"),
        (new().tensor("q", &[288], &[0; 288]), "tensor q"),
        (new().tensor("kv_cache", &[0, 2, 288], &[]), "num_pages"),
        (new().tensor("kv_cache", &[0, 1 << 40, 288], &[]), "num_pages"),
        (new().tensor("kv_cache", &[1, 2, 288], &[0; 576]), "block_table[0][0]"),
        (new().tensor("block_table", &[2, 1], &[1, 1]), "block_table"),
        (new().tensor("block_table", &[1, 0], &[]), "seq_lens[0]"),
        (new().tensor("block_table", &[1, 2], &[2, 0]), "block_table[0][0]"),
        (new().tensor("block_table", &[1, 2], &[minus(-1), 0]), "block_table[0][0]"),
        (new().tensor("seq_lens", &[1], &[5]), "seq_lens[0]"),
        (new().tensor("seq_lens", &[1], &[minus(-1)]), "seq_lens[0]"),
        (new().tensor("seq_lens", &[1], &[i32::MAX as u32]), "seq_lens[0]"),
        (new().tensor("seq_lens", &[1, 1], &[2]), "seq_lens"),
        (new().tensor("query_start_loc", &[1], &[0]), "query_start_loc"),
        (new().tensor("query_start_loc", &[2], &[1, 1]), "query_start_loc[0]"),
        (new().tensor("query_start_loc", &[2], &[0, minus(-1)]), "query_start_loc[1]"),
        (new().tensor("query_start_loc", &[2], &[0, 2]), "query_start_loc"),
        (new().tensor("k_scale", &[1], &one(0.0)), "k_scale"),
        (new().tensor("k_scale", &[1], &one(f32::INFINITY)), "k_scale"),
        (new().tensor("k_scale", &[2], &[0; 2]), "k_scale"),
        (new().tensor("out", &[1, 1, 255], &[0; 255]), "out"),
        (new().tensor("lse", &[1], &[0]), "lse"),
        (new().typed("q", safetensors::Dtype::I32), "tensor q"),
        (new().typed("seq_lens", safetensors::Dtype::F32), "seq_lens"),
        (new().typed("out", safetensors::Dtype::I32), "out"),
    ] {
        let error = parts.error();
        assert!(error.contains(why), "{error:?} does not name {why:?}");
    }
    for name in ["q", "kv_cache", "block_table", "seq_lens", "query_start_loc", "out", "lse"] {
        let error = new().without(name).error();
        assert!(error.contains(name) && error.contains("missing"), "{error:?} does not name {name:?}");
    }
    assert!(Case::parse(&new().without("k_scale").bytes()).is_ok());
}

fn every_field_of_ranks_is_checked() {
    use safetensors::Dtype::{F32, I32};
    let new = || {
        let mut parts = Parts::new().meta("kind", "dcp_decode").meta("world", "2").meta("interleave", "1");
        parts.tensors.push(("local_seq_lens", I32, vec![2, 1], vec![0; 8]));
        parts
    };
    assert!(matches!(Case::parse(&new().bytes()), Ok(Case::DcpDecode(case)) if case.shares.world() == 2));
    for (parts, why) in [
        (new().meta("world", "0"), "world"),
        (new().meta("world", "4000000000"), "world"),
        (new().meta("interleave", "0"), "interleave"),
        (new().meta("interleave", "x"), "interleave"),
        (new().meta("world", "3"), "local_seq_lens"),
        (new().tensor("local_seq_lens", &[2], &[0; 2]), "local_seq_lens"),
        (new().typed("local_seq_lens", F32), "local_seq_lens"),
        (new().without("local_seq_lens"), "local_seq_lens"),
        (new().tensor("seq_lens", &[1], &[5]), "seq_lens[0]"),
    ] {
        let error = parts.error();
        assert!(error.contains(why), "{error:?} does not name {why:?}");
    }

    let new = || {
        let mut parts = Parts::new().meta("kind", "dcp_combine").meta("lse_base", "2");
        parts.tensors = vec![
            ("outs", F32, vec![2, 1, 1, 3], vec![0; 24]),
            ("lses", F32, vec![2, 1, 1], vec![0; 8]),
            ("out", F32, vec![1, 1, 3], vec![0; 12]),
            ("lse", F32, vec![1, 1], vec![0; 4]),
        ];
        parts
    };
    assert!(matches!(Case::parse(&new().bytes()), Ok(Case::DcpCombine(case)) if case.world == 2));
    for (parts, why) in [
        (new().meta("lse_base", "10"), "lse_base"),
        (new().tensor("outs", &[2, 1, 1, 0], &[]), "head_size"),
        (new().tensor("outs", &[0, 1, 1, 3], &[]), "outs"),
        (new().tensor("outs", &[1, 1, 3], &[0; 3]), "outs"),
        (new().typed("outs", I32), "outs"),
        (new().tensor("lses", &[1, 1, 1], &[0]), "lses"),
        (new().tensor("out", &[1, 1, 2], &[0; 2]), "out"),
        (new().tensor("lse", &[1], &[0]), "lse"),
        (new().without("lses"), "lses"),
    ] {
        let error = parts.error();
        assert!(error.contains(why), "{error:?} does not name {why:?}");
    }
}

fn saved_tensors_are_read_back() {
    let path = std::env::temp_dir().join(format!("wgpu-mla-saved-{}.safetensors", std::process::id()));
    let values = [1.5, f32::NEG_INFINITY];
    save(&path, &[Saved::f32s("lse", &[2, 1], &values)]).expect("saved");
    let bytes = std::fs::read(&path).expect("written");
    std::fs::remove_file(&path).expect("removed");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let lse = file.tensor("lse").expect("lse");
    assert_eq!((lse.shape(), lse.data()), (&[2, 1][..], &Dtype::F32.encode_all(&values)[..]));
    let wrong = Saved::encoded("lse", Dtype::F32, &[2], vec![0; 3]);
    assert!(save(&path, &[wrong]).is_err_and(|error| error.contains("lse")));
}

crate::tests![
    a_truncated_file_is_an_error,
    flipped_header_bytes_never_panic,
    hostile_files_are_errors_that_name_what_is_wrong,
    every_field_of_a_decode_case_is_checked,
    every_field_of_ranks_is_checked,
    saved_tensors_are_read_back,
];
