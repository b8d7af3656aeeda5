//! Cases of index keys and index queries.

use mla_support::case::{IndexAppendCase, IndexQueryCase, Saved};
use mla_support::index_rows::Codes;
use wgpu_mla::any::AnyBackend;
use wgpu_mla::{
    Device, Dtype, IndexFormat, IndexerAppendArgs, IndexerQueryArgs, IndexerQueryBatch, Result,
    RopeAppendBatch, RopeLayout, View,
};

use crate::check::{Verdict, dtypes};
use crate::run::{Ran, download, poisoned, time, upload};

fn floats(backend: &AnyBackend, values: &[f32]) -> Result<wgpu_mla::any::Buffer> {
    upload(backend, &Dtype::F32.encode_all(values))
}

fn words(backend: &AnyBackend, words: &[i32]) -> Result<wgpu_mla::any::Buffer> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    upload(backend, &bytes)
}

fn verdict(compared: std::result::Result<Codes, String>) -> Verdict {
    match compared {
        Ok(Codes { all, neighbours }) => {
            Verdict { error: format!("{neighbours} of {all} codes by one"), failure: None }
        }
        Err(failure) => Verdict { error: "-".into(), failure: Some(failure) },
    }
}

pub fn run_append(backend: &AnyBackend, case: &IndexAppendCase) -> Result<Ran> {
    let index = case.spec.index;
    let (k, cache) = (upload(backend, &case.k)?, upload(backend, &case.index_cache_before)?);
    let (weight, bias) = (floats(backend, &case.norm_weight)?, floats(backend, &case.norm_bias)?);
    let (positions, cos_sin) = (words(backend, &case.positions)?, floats(backend, &case.cos_sin)?);
    let args = IndexerAppendArgs {
        k: View::dense(&k, 1, 128),
        norm_weight: &weight,
        norm_bias: &bias,
        norm_eps: case.norm_eps,
        positions: &positions,
        cos_sin: &cos_sin,
        max_position: (case.cos_sin.len() / 64) as u32,
        cache: index.view(&cache),
    };
    let append = backend.compile(case.spec)?;
    let mut step = append.step(0)?;
    append.prepare(&mut step, RopeAppendBatch::slots(&case.slot_mapping))?;
    // Another run writes the same bytes again.
    let binding = append.bind(&args, step.used())?;
    let seconds = time(backend, || append.run(&step, &binding))?;

    let bytes = download(backend, &cache, case.index_cache.len())?;
    let shape = [index.num_pages as usize, index.page_bytes() as usize];
    let verdict = verdict(case.compare(&bytes));
    Ok(Ran { seconds, variant: "-", verdict, computed: vec![Saved::bytes("index_cache", &shape, bytes)] })
}

pub fn run_query(backend: &AnyBackend, case: &IndexQueryCase) -> Result<Ran> {
    let heads = case.spec.num_heads;
    let tokens = case.weights.len() / heads as usize;
    let (q, weights) = (upload(backend, &case.q)?, floats(backend, &case.weights)?);
    let (positions, cos_sin) = (words(backend, &case.positions)?, floats(backend, &case.cos_sin)?);
    let (q_out, weights_out) =
        (poisoned(backend, case.q_codes.len())?, poisoned(backend, case.weights.len() * 4)?);
    let args = IndexerQueryArgs {
        q: View::dense(&q, heads, 128),
        weights: View::dense(&weights, heads, 1),
        q_out: View::dense(&q_out, heads, 128),
        weights_out: View::dense(&weights_out, heads, 1),
        positions: &positions,
        cos_sin: &cos_sin,
        max_position: (case.cos_sin.len() / 64) as u32,
        weight_scale: case.weight_scale,
    };
    let query = backend.compile(case.spec)?;
    let mut step = query.step(0)?;
    query.prepare(&mut step, IndexerQueryBatch::tokens(0..tokens as u32))?;
    let binding = query.bind(&args, step.used())?;
    let seconds = time(backend, || query.run(&step, &binding))?;

    let codes = download(backend, &q_out, case.q_codes.len())?;
    let weights = Dtype::F32.decode_all(&download(backend, &weights_out, case.weights.len() * 4)?);
    let verdict = verdict(case.compare(&codes, &weights));
    let shape = [tokens, heads as usize];
    let computed = vec![
        Saved::encoded("q_codes", Dtype::E4m3, &[shape[0], shape[1], 128], codes),
        Saved::f32s("q_weights", &shape, &weights),
    ];
    Ok(Ran { seconds, variant: "-", verdict, computed })
}

fn named(format: &IndexFormat) -> String {
    let rope = match format.rope {
        None => "no rope",
        Some(RopeLayout::Interleaved) => "interleaved",
        Some(RopeLayout::HalfSplit) => "half",
    };
    let flag = |is_set, name: &'static str| if is_set { name } else { "" };
    format!("{rope}{}{}", flag(format.hadamard, " hadamard"), flag(format.ue8m0, " ue8m0"))
}

pub fn append_shape(case: &IndexAppendCase) -> String {
    let (index, tokens) = (case.spec.index, case.slot_mapping.len());
    let types = dtypes(case.spec.input, index.format.dtype);
    format!("tokens {tokens} page {} {types} {}", index.page_size, named(&index.format))
}

/// Keys that are read, codes and scales that are written.
pub fn append_bytes(case: &IndexAppendCase) -> u64 {
    let written = case.slot_mapping.iter().filter(|&&slot| slot >= 0).count() as u64;
    written * (128 * case.spec.input.bytes() as u64 + 132)
}

pub fn query_shape(case: &IndexQueryCase) -> String {
    let IndexQueryCase { spec, weights, .. } = case;
    let tokens = weights.len() / spec.num_heads as usize;
    let types = dtypes(spec.input, spec.format.dtype);
    format!("q{tokens} Hi{} {types} {}", spec.num_heads, named(&spec.format))
}

/// Queries and weights that are read and written.
pub fn query_bytes(case: &IndexQueryCase) -> u64 {
    (case.q.len() + case.q_codes.len() + 8 * case.weights.len()) as u64
}
