//! Cases of the kinds `top_k` and `top_k_slots`.

use wgpu_mla::{KvSpec, Op, TopK, TopKSlots};

use super::file::{File, narrow};
use super::{check_pages, check_starts};
use safetensors::tensor::Dtype as FileDtype;

/// The best `k` logits of each row.
#[derive(Debug, Clone)]
pub struct TopKCase {
    /// `k`, and the pool where slots are written.
    pub spec: TopK,
    /// Logits of a row.
    pub columns: usize,
    /// f32 `[rows, columns]`, whose bits count.
    pub logits: Vec<u8>,
    /// `[rows]`: how many of each row count.
    pub lengths: Vec<i32>,
    /// `[sequences, max_pages]`, with slots.
    pub block_table: Vec<i32>,
    /// Entries in a row of `block_table`.
    pub max_pages: usize,
    /// `[sequences + 1]`: the rows of each sequence, with slots.
    pub query_start_loc: Vec<i32>,
    /// Expected `[rows, k]`: indices or slots, then -1.
    pub indices: Vec<i32>,
}

pub fn read(file: &File<'_>, has_slots: bool) -> Result<TopKCase, String> {
    let k = file.number("k")?;
    let logits = file.typed("logits", FileDtype::F32)?;
    let [rows, columns] = logits.shape(["rows", "n"])?;
    narrow("rows", rows)?;
    if narrow("n", columns)? > 1 << 20 {
        return Err(format!("logits have rows of {columns}: must be at most 2^20"));
    }
    let lengths = file.i32s("lengths", ["rows"])?;
    if lengths.len() as u64 != rows {
        return Err(format!("lengths has {} entries: must be one a row, {rows}", lengths.len()));
    }
    if let Some(row) = lengths.iter().position(|length| !(0..=columns as i64).contains(&i64::from(*length))) {
        return Err(format!("lengths[{row}] is {}: must be 0 to n {columns}", lengths[row]));
    }
    let indices = file.typed("indices", FileDtype::I32)?;
    indices.expect(&[rows, k.into()])?;
    let mut case = TopKCase {
        spec: TopK { k, slots: None },
        columns: columns as usize,
        logits: logits.bytes(),
        lengths,
        block_table: Vec::new(),
        max_pages: 0,
        query_start_loc: Vec::new(),
        indices: indices.elements(i32::from_le_bytes),
    };
    if has_slots {
        add_pages(file, &mut case)?;
    }
    case.spec.check().map_err(|error| error.to_string())?;
    Ok(case)
}

/// The file has no pool: it is as large as the pages that are used.
fn add_pages(file: &File<'_>, case: &mut TopKCase) -> Result<(), String> {
    let page_size = file.number("page_size")?;
    case.query_start_loc = file.i32s("query_start_loc", ["sequences + 1"])?;
    let sequences = case.query_start_loc.len().saturating_sub(1);
    check_starts(&case.query_start_loc, sequences as u64, case.lengths.len() as u64)?;
    let table = file.typed("block_table", FileDtype::I32)?;
    let [_, max_pages] = table.shape(["sequences", "max_pages"])?;
    narrow("max_pages", max_pages)?;
    table.expect(&[sequences as u64, max_pages])?;
    (case.block_table, case.max_pages) = (table.elements(i32::from_le_bytes), max_pages as usize);
    let rows = case.query_start_loc.windows(2).map(|ends| ends[0] as usize..ends[1] as usize);
    let longest: Vec<i32> = rows.map(|rows| case.lengths[rows].iter().copied().max().unwrap_or(0)).collect();
    let any =
        KvSpec::new(wgpu_mla::Dtype::F32, page_size, (i32::MAX as u32).checked_div(page_size).unwrap_or(0));
    any.check().map_err(|error| error.to_string())?;
    check_pages(&any, &longest, &case.block_table, case.max_pages)?;
    let used = longest.iter().enumerate().flat_map(|(seq, &longest)| {
        &case.block_table[seq * case.max_pages..][..any.pages_for(longest as u32) as usize]
    });
    let num_pages = used.max().map_or(1, |&page| page as u32 + 1);
    case.spec.slots = Some(TopKSlots { page_size, num_pages });
    Ok(())
}
