//! The slots of a step's new tokens, from the arrays of a batch.

/// The slot of each of `num_tokens` new tokens, `page * page_size + offset`; -1 for a token of no sequence.
///
/// Query token `i` of `q_len` is token `seq_len - q_len + i` of its sequence.
///
/// # Panics
/// Where the arrays are shorter than the batch.
pub fn slot_mapping(
    seq_lens: &[i32],
    query_start_loc: &[i32],
    block_table: &[i32],
    page_size: i32,
    num_tokens: usize,
) -> Vec<i64> {
    let max_pages = block_table.len() / seq_lens.len();
    let mut slots = vec![-1; num_tokens];
    for (seq, &len) in seq_lens.iter().enumerate() {
        let (first, last) = (query_start_loc[seq], query_start_loc[seq + 1]);
        for token in first..last {
            let position = len - (last - token);
            if position >= 0 {
                let page = block_table[seq * max_pages + (position / page_size) as usize];
                slots[token as usize] =
                    i64::from(page) * i64::from(page_size) + i64::from(position % page_size);
            }
        }
    }
    slots
}
