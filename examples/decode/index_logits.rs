//! Cases of index logits.

use mla_support::case::{IndexLogitsCase, Saved};
use wgpu_mla::any::AnyBackend;
use wgpu_mla::{Device, Dtype, IndexerLogitsArgs, IndexerLogitsBatch, Mask, PageTable, Result, View};

use crate::check;
use crate::run::{Ran, poisoned, time, upload};

pub fn run(backend: &AnyBackend, case: &IndexLogitsCase) -> Result<Ran> {
    let (spec, columns) = (case.spec, case.columns as u32);
    let op = backend.compile(spec)?;
    let mut step = op.step(Default::default())?;
    let tokens = case.query_start_loc.last().map_or(0, |&end| end as u32);
    let batch = IndexerLogitsBatch {
        pages: PageTable::Dense { block_table: &case.block_table, max_pages: case.max_pages as u32 },
        seq_lens: &case.seq_lens,
        query_start_loc: &case.query_start_loc,
        mask: if case.causal { Mask::Causal } else { Mask::Full },
        tokens: 0..tokens,
        fill: columns,
    };
    op.prepare(&mut step, batch)?;
    let weights = upload(backend, &Dtype::F32.encode_all(&case.weights))?;
    let (q, cache) = (upload(backend, &case.q)?, upload(backend, &case.index_cache)?);
    let logits = poisoned(backend, case.logits.len() * 4)?;
    let layer = IndexerLogitsArgs {
        q: View::dense(&q, spec.num_heads, 128),
        weights: View::dense(&weights, spec.num_heads, 1),
        cache: spec.index.view(&cache),
        logits: View::dense(&logits, 1, columns),
    };
    let binding = op.bind(&layer, step.used())?;
    let seconds = time(backend, || op.run(&step, &binding))?;

    let logits = Dtype::F32.decode_all(&backend.download(&logits, case.logits.len() as u64 * 4)?);
    let verdict = check::index_logits(case, &logits);
    let computed = vec![Saved::f32s("logits", &[tokens as usize, case.columns], &logits)];
    Ok(Ran { seconds, variant: op.variant(), verdict, computed })
}

pub fn shape(case: &IndexLogitsCase) -> String {
    let (spec, tokens) = (case.spec, case.query_start_loc.last().copied().unwrap_or(0));
    let (batch, columns) = (case.seq_lens.len(), case.columns);
    let (page_size, query) = (spec.index.page_size, spec.query);
    format!("B{batch} q{tokens} H{} 128 len {columns} page {page_size} {query}/e4m3", spec.num_heads)
}

/// Keys and their scales, for each query token.
pub fn bytes(case: &IndexLogitsCase) -> u64 {
    let keys = case.logits.iter().filter(|logit| **logit != f32::NEG_INFINITY).count() as u64;
    keys * (128 + 4)
}
