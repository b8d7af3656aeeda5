//! The oracle against the case files; the check against wrong answers.

mod broken_files;
mod identities;
mod lists;
mod top_k;

use std::path::{Path, PathBuf};

use mla_support::case::{
    AppendCase, Case, DcpCombineCase, DecodeCase, IndexAppendCase, IndexLogitsCase, IndexQueryCase,
    MergeCase, SparseCase, TopKCase,
};
use mla_support::close::{Tolerance, close};
use mla_support::paint::Problem;
use mla_support::reference::{
    Concat, Decode, IndexNorm, IndexRow, IndexRows, State, concat_and_cache, index_keys, index_queries,
    index_scale, indexer_logit, merge_state, merge_states_in, mla_decode, slots_of, top_k,
};
use mla_support::suite::index_problem::close_logits;
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

crate::tests![
    (in broken_files, identities, lists, top_k)
    the_oracle_agrees_with_every_case_file,
    the_check_fails_on_wrong_answers,
    the_check_of_an_lse_is_tight_and_knows_infinity,
];
