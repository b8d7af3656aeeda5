//! The oracle against the case files; the check against wrong answers; the reader against broken files.

mod identities;
mod lists;
mod top_k;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use mla_support::case::{
    AppendCase, Case, DcpCombineCase, DecodeCase, IndexAppendCase, IndexLogitsCase, IndexQueryCase,
    MergeCase, Saved, SparseCase, TopKCase, save,
};
use mla_support::close::{Tolerance, close};
use mla_support::paint::Problem;
use mla_support::reference::{
    Concat, Decode, IndexNorm, IndexRow, IndexRows, State, concat_and_cache, index_keys, index_queries,
    index_scale, indexer_logit, merge_state, merge_states_in, mla_decode, slots_of, top_k,
};
use mla_support::suite::indexer_logits::close_logits;
use wgpu_mla::{Dtype, Mask};

fn case_files() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases");
    let entries = std::fs::read_dir(&folder).expect("tests/cases is part of the repository");
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("readable").path()).collect();
    files.retain(|path| path.extension().is_some_and(|ext| ext == "safetensors"));
    files.sort();
    assert!(files.len() >= 10, "{files:?}");
    files
}

fn load(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases").join(name)).expect(name)
}

fn decode_oracle(case: &DecodeCase) -> (Vec<f64>, Vec<f64>) {
    let shape = case.spec.shape;
    mla_decode(&Decode {
        num_heads: shape.num_heads as usize,
        kv_lora_rank: shape.kv_lora_rank as usize,
        qk_rope_head_dim: shape.qk_rope_head_dim as usize,
        page_size: case.spec.kv.page_size as usize,
        q: &case.spec.query.decode_all(&case.q),
        kv_cache: &case.spec.kv.dtype().decode_all(&case.kv_cache),
        block_table: &case.block_table,
        max_pages: case.max_pages,
        seq_lens: &case.seq_lens,
        query_start_loc: &case.query_start_loc,
        mask: if case.causal { Mask::Causal } else { Mask::Full },
        softmax_scale: case.softmax_scale.into(),
        k_scale: case.k_scale.into(),
        q_scale: case.q_scale.into(),
    })
}

/// The file holds f64 results rounded to f32, so the tightest tolerance applies to every dtype.
fn exact(latent: usize) -> Tolerance {
    Tolerance::decode(Dtype::F32, Dtype::F32, Dtype::F32, false, 1.0, latent)
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| x.into()).collect()
}

fn the_oracle_agrees_with_every_case_file() {
    for path in case_files() {
        let what = path.file_name().expect("a file").to_string_lossy().into_owned();
        match Case::load(&path).expect(&what) {
            Case::Decode(case) => check_decode(&what, &case),
            Case::Merge(case) => check_merge(&what, &case),
            Case::Append(case) => check_append(&what, &case),
            Case::Sparse(case) => check_sparse(&what, &case),
            Case::TopK(case) => check_top_k(&what, &case),
            Case::DcpDecode(case) => check_decode(&what, &case.decode),
            Case::DcpCombine(case) => check_combine(&what, &case),
            Case::IndexAppend(case) => check_index_append(&what, &case),
            Case::IndexQuery(case) => check_index_query(&what, &case),
            Case::IndexLogits(case) => check_index_logits(&what, &case),
        }
    }
}

fn check_decode(what: &str, case: &DecodeCase) {
    let (out, lse) = decode_oracle(case);
    let latent = case.spec.shape.kv_lora_rank as usize;
    let report = close(what, &case.out, &out, &exact(latent));
    println!("{report}");
    assert!(report.ok(), "{report}");
    let report = close(&format!("{what} lse"), &case.lse, &lse, &Tolerance::lse());
    assert!(report.ok() && report.worst_abs < 1e-5, "{report}");
}

fn check_sparse(what: &str, case: &SparseCase) {
    let (out, lse) = Problem::of_sparse_case(what, case).expected();
    // A large sink leaves what f32 has few digits for: the file has them rounded.
    let out: Vec<f64> = out.into_iter().map(|x| f64::from(x as f32)).collect();
    let report = close(what, &case.out, &out, &exact(case.spec.shape.kv_lora_rank as usize));
    println!("{report}");
    assert!(report.ok(), "{report}");
    let report = close(&format!("{what} lse"), &case.lse, &lse, &Tolerance::lse());
    assert!(report.ok() && report.worst_abs < 1e-5, "{report}");
}

fn check_index_logits(what: &str, case: &IndexLogitsCase) {
    let rows = case.spec.query.decode_all(&case.q);
    let heads = case.spec.num_heads as usize;
    let mut logits = Vec::new();
    for (seq, loc) in case.query_start_loc.windows(2).enumerate() {
        for token in loc[0]..loc[1] {
            let row = IndexRow {
                cache: &case.index_cache,
                index: case.spec.index,
                pages: &case.block_table[seq * case.max_pages..][..case.max_pages],
                q: &rows[token as usize * heads * 128..][..heads * 128],
                weights: &case.weights[token as usize * heads..][..heads],
            };
            let seen = if case.causal { case.seq_lens[seq] - loc[1] + token + 1 } else { case.seq_lens[seq] };
            let logit = |key: usize| (key as i32) < seen;
            let logit = |key| if logit(key) { indexer_logit(&row, key)[0] } else { f64::NEG_INFINITY };
            logits.extend((0..case.columns).map(|key| logit(key) as f32));
        }
    }
    let worst = close_logits(case, &logits).expect(what);
    assert!(worst < 0.01, "{what}: {worst}");
}

fn check_top_k(what: &str, case: &TopKCase) {
    let logits = Dtype::F32.decode_all(&case.logits);
    for (row, want) in case.indices.chunks(case.spec.k as usize).enumerate() {
        let logits = &logits[row * case.columns..][..case.lengths[row] as usize];
        let mut got = top_k(logits, case.spec.k as usize);
        if let Some(slots) = case.spec.slots {
            let seq =
                case.query_start_loc[1..].iter().position(|&end| end as usize > row).expect("its sequence");
            let table = &case.block_table[seq * case.max_pages..][..case.max_pages];
            got = slots_of(&got, table, slots.page_size as usize);
        }
        assert_eq!(got, want, "{what}, row {row}");
    }
}

fn check_merge(what: &str, case: &MergeCase) {
    let prefix = case.spec.dtype.decode_all(&case.prefix_output);
    let suffix = case.spec.dtype.decode_all(&case.suffix_output);
    let (output, lse) = merge_state(
        State { output: &prefix, lse: &case.prefix_lse },
        State { output: &suffix, lse: &case.suffix_lse },
        case.num_heads,
        case.spec.head_size as usize,
    );
    for report in [
        close(what, &case.output, &output, &Tolerance::merge(Dtype::F32)),
        close(&format!("{what} lse"), &case.output_lse, &lse, &Tolerance::merge_lse()),
    ] {
        println!("{report}");
        assert!(report.ok(), "{report}");
    }
}

fn check_combine(what: &str, case: &DcpCombineCase) {
    let (rows, size) = (case.num_tokens * case.num_heads, case.spec.head_size as usize);
    let outs: Vec<f64> = wide(&case.spec.dtype.decode_all(&case.outs));
    let (mut out, mut lse) = (vec![], vec![]);
    for row in 0..rows {
        let at = |rank: usize| rank * rows + row;
        let part = |rank: usize| (&outs[at(rank) * size..][..size], f64::from(case.lses[at(rank)]));
        let (row_out, row_lse) =
            merge_states_in(case.lse_base, &(0..case.world).map(part).collect::<Vec<_>>());
        out.extend(row_out);
        lse.push(row_lse);
    }
    for report in [
        close(what, &case.out, &out, &Tolerance::merge(Dtype::F32)),
        close(&format!("{what} lse"), &case.lse, &lse, &Tolerance::merge_lse()),
    ] {
        println!("{report}");
        assert!(report.ok(), "{report}");
    }
}

/// The file holds what f64 gives: every code is the oracle's, as is every scale.
fn check_index_append(what: &str, case: &IndexAppendCase) {
    let (index, x) = (case.spec.index, case.spec.input.decode_all(&case.k));
    let rows = IndexRows {
        format: index.format,
        x: &x,
        num_heads: 1,
        positions: &case.positions,
        cos_sin: &case.cos_sin,
    };
    let norm = IndexNorm { weight: &case.norm_weight, bias: &case.norm_bias, eps: case.norm_eps.into() };
    let keys = index_keys(&rows, &norm);
    let (page_size, page_bytes) = (index.page_size as usize, index.page_bytes() as usize);
    let mut cache = case.index_cache_before.clone();
    for (token, &slot) in case.slot_mapping.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
        let key = &keys[token * 128..][..128];
        let scale = index_scale(&index.format, key);
        let codes: Vec<f32> = key.iter().map(|x| (x / scale) as f32).collect();
        let (page, offset) = (slot as usize / page_size * page_bytes, slot as usize % page_size);
        cache[page + offset * 128..][..128].copy_from_slice(&Dtype::E4m3.encode_all(&codes));
        let footer = page + page_size * 128 + 4 * offset;
        cache[footer..footer + 4].copy_from_slice(&(scale as f32).to_le_bytes());
    }
    let codes = case.compare(&cache).expect(what);
    println!("{what}: {codes:?}");
    assert!(codes.neighbours <= 1, "{what}: {codes:?}");
}

fn check_index_query(what: &str, case: &IndexQueryCase) {
    let (format, x) = (case.spec.format, case.spec.input.decode_all(&case.q));
    let num_heads = case.spec.num_heads as usize;
    let rows = IndexRows { format, x: &x, num_heads, positions: &case.positions, cos_sin: &case.cos_sin };
    let (mut codes, mut weights) = (Vec::new(), Vec::new());
    for (query, &weight) in index_queries(&rows).chunks(128).zip(&case.weights) {
        let scale = index_scale(&format, query);
        codes.extend(Dtype::E4m3.encode_all(&query.iter().map(|x| (x / scale) as f32).collect::<Vec<_>>()));
        weights.push((f64::from(weight) * scale * f64::from(case.weight_scale)) as f32);
    }
    let codes = case.compare(&codes, &weights).expect(what);
    println!("{what}: {codes:?}");
    assert!(codes.neighbours <= 1, "{what}: {codes:?}");
}

fn check_append(what: &str, case: &AppendCase) {
    let mut cache = case.kv_cache_before.clone();
    let args = Concat {
        kv_c: &case.kv_c,
        k_pe: &case.k_pe,
        input: case.spec.input,
        slot_mapping: &case.slot_mapping,
        kv_lora_rank: case.spec.shape.kv_lora_rank as usize,
        qk_rope_head_dim: case.spec.shape.qk_rope_head_dim as usize,
        k_scale: case.k_scale,
    };
    concat_and_cache(&args, case.spec.kv.layout, &mut cache);
    let wrong = cache.iter().zip(&case.kv_cache).position(|(a, b)| a != b);
    assert_eq!(wrong, None, "{what}: first wrong byte");
}

fn the_check_fails_on_wrong_answers() {
    let Ok(Case::Decode(case)) = Case::parse(&load("decode_bf16_h16_page32_ragged.safetensors")) else {
        panic!("a decode case");
    };
    let latent = case.spec.shape.kv_lora_rank as usize;
    let want = wide(&case.out);
    let loose = Tolerance::decode(Dtype::Bf16, Dtype::Bf16, Dtype::F32, true, 1.0, latent);
    for tolerance in [exact(latent), loose] {
        assert!(close("the same", &case.out, &want, &tolerance).ok());

        let mut swapped = case.out.clone();
        swapped.rotate_left(latent * case.spec.shape.num_heads as usize);
        assert!(!close("swapped tokens", &swapped, &want, &tolerance).ok());

        for (poison, place) in [(f32::NAN, 0), (f32::INFINITY, latent), (f32::NEG_INFINITY, want.len() - 1)] {
            let mut got = case.out.clone();
            got[place] = poison;
            let report = close("poison in the result", &got, &want, &tolerance);
            assert!(report.failure.is_some_and(|why| why.contains(&format!("[{place}]"))));
            let mut want = want.clone();
            want[place] = poison.into();
            assert!(!close("poison missing", &case.out, &want, &tolerance).ok());
            assert!(close("poison in both", &got, &want, &tolerance).ok());
            want[place] = -want[place];
            assert_eq!(close("sign", &got, &want, &tolerance).ok(), poison.is_nan());
        }

        let zeros = vec![0.0; want.len()];
        assert!(!close("all zero", &zeros, &want, &tolerance).ok());
        assert!(!close("one short", &case.out[1..], &want, &tolerance).ok());
    }
    // A small rotation of everything stays within abs or rel but not within the cosine.
    let small: Vec<f32> =
        case.out.iter().enumerate().map(|(i, x)| x + if i % 2 == 0 { 7e-4 } else { -7e-4 }).collect();
    let report = close("rotated", &small, &want, &loose);
    assert!(report.worst_ratio < 1.0 && !report.ok(), "{report}");
}

fn the_check_of_an_lse_is_tight_and_knows_infinity() {
    let want = [1.0, f64::NEG_INFINITY, 300.0];
    let tolerance = Tolerance::lse();
    assert!(close("lse", &[1.000_1, f32::NEG_INFINITY, 300.03], &want, &tolerance).ok());
    assert!(!close("lse off", &[1.000_2, f32::NEG_INFINITY, 300.0], &want, &tolerance).ok());
    assert!(!close("lse off", &[1.0, f32::NEG_INFINITY, 300.05], &want, &tolerance).ok());
    for not_empty in [f32::MIN, f32::INFINITY, f32::NAN, 0.0] {
        assert!(!close("empty row", &[1.0, not_empty, 300.0], &want, &tolerance).ok());
    }
    let row = Tolerance::decode(Dtype::F32, Dtype::F32, Dtype::F32, false, 1.0, 2);
    assert!(!close("beside an exact 0", &[1e-30, 0.0], &[0.0, 0.0], &row).ok());
}

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
struct Parts {
    meta: HashMap<String, String>,
    tensors: Vec<(&'static str, safetensors::Dtype, Vec<usize>, Vec<u8>)>,
}

impl Parts {
    fn new() -> Self {
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

    fn meta(mut self, key: &str, value: &str) -> Self {
        self.meta.insert(key.to_owned(), value.to_owned());
        self
    }

    fn tensor(mut self, name: &'static str, shape: &[usize], words: &[u32]) -> Self {
        let tensor = self.tensors.iter_mut().find(|tensor| tensor.0 == name).expect(name);
        tensor.2 = shape.to_vec();
        tensor.3 = words.iter().flat_map(|x| x.to_le_bytes()).collect();
        self
    }

    fn typed(mut self, name: &'static str, dtype: safetensors::Dtype) -> Self {
        self.tensors.iter_mut().find(|tensor| tensor.0 == name).expect(name).1 = dtype;
        self
    }

    fn without(mut self, name: &str) -> Self {
        self.tensors.retain(|tensor| tensor.0 != name);
        self
    }

    fn error(self) -> String {
        Case::parse(&self.bytes()).expect_err("a broken case")
    }

    fn bytes(self) -> Vec<u8> {
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
    (in identities, lists, top_k)
    the_oracle_agrees_with_every_case_file,
    the_check_fails_on_wrong_answers,
    the_check_of_an_lse_is_tight_and_knows_infinity,
    a_truncated_file_is_an_error,
    flipped_header_bytes_never_panic,
    hostile_files_are_errors_that_name_what_is_wrong,
    every_field_of_a_decode_case_is_checked,
    every_field_of_ranks_is_checked,
    saved_tensors_are_read_back,
];
