//! Runs the cases `top_k` and `top_k_slots`.

use mla_support::case::{Saved, TopKCase};
use wgpu_mla::{AnyBackend, Device, PageTable, Result, TopK, TopKArgs, TopKBatch, TopKPages, View};

use crate::check;
use crate::run::{Ran, download, poisoned, time, upload};

pub fn run(backend: &AnyBackend, case: &TopKCase) -> Result<Ran> {
    let TopK { k, .. } = case.spec;
    let rows = case.lengths.len();
    let logits = upload(backend, &case.logits)?;
    // The step has the lengths: what is bound here is unread.
    let lengths = poisoned(backend, rows * 4)?;
    let indices = poisoned(backend, rows * k as usize * 4)?;
    let columns = case.columns as u32;
    let args = TopKArgs {
        logits: View::dense(&logits, 1, columns),
        columns,
        lengths: &lengths,
        indices: View::dense(&indices, 1, k),
        values: None,
    };
    let pages = PageTable::Dense { block_table: &case.block_table, max_pages: case.max_pages as u32 };
    let pages = TopKPages { pages, query_start_loc: &case.query_start_loc, first_token: 0 };
    let batch = TopKBatch { pages: case.spec.slots.map(|_| pages), ..TopKBatch::of(&case.lengths) };
    let top_k = backend.compile(case.spec)?;
    let mut step = top_k.step(Default::default())?;
    top_k.prepare(&mut step, batch)?;
    let binding = top_k.bind(&args, step.used())?;
    let seconds = time(backend, || top_k.run(&step, &binding))?;

    let bytes = download(backend, &indices, rows * k as usize * 4)?;
    let entry = |word: &[u8]| i32::from_le_bytes([word[0], word[1], word[2], word[3]]);
    let entries: Vec<i32> = bytes.chunks_exact(4).map(entry).collect();
    let verdict = check::top_k(case, &entries);
    let computed = vec![Saved::i32s("indices", &[rows, k as usize], &entries)];
    Ok(Ran { seconds, variant: top_k.variant(), verdict, computed })
}

pub fn shape(case: &TopKCase) -> String {
    let (rows, longest) = (case.lengths.len(), case.lengths.iter().max().unwrap_or(&0));
    let slots = case.spec.slots.map_or(String::new(), |slots| format!(" page {}", slots.page_size));
    format!("rows {rows} top {} of {longest}{slots}", case.spec.k)
}

/// Logits that count, and what is chosen.
pub fn bytes(case: &TopKCase) -> u64 {
    let read: u64 = case.lengths.iter().map(|&length| u64::from(length.unsigned_abs())).sum();
    4 * (read + case.indices.len() as u64)
}
