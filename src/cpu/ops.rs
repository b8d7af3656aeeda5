//! The ops besides the decode on host memory, a file each; and [`BatchTables`], which makes the tables of a decode from a batch in buffers.

mod batch_tables;
mod correct_attn_out;
mod head_project;
mod index_row;
mod indexer_append;
mod indexer_logits;
mod indexer_query;
mod kv_append;
mod kv_calibrate;
mod kv_copy_pages;
mod kv_gather;
mod merge_state;
mod merge_states;
mod mla_prefill;
mod reorg_kvcache;
mod rope;
mod rope_append;
mod top_k;

pub use batch_tables::BatchTables;

/// The element at `index` as it stands, in the low end of a word.
fn raw(bytes: &[u8], element_bytes: usize, index: usize) -> u32 {
    let mut word = [0; 4];
    word[..element_bytes].copy_from_slice(&bytes[index * element_bytes..][..element_bytes]);
    u32::from_le_bytes(word)
}
