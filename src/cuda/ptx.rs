//! The PTX texts. The crate carries them deflated, as `scripts/ptx.sh` writes them: a sixth of the bytes.

use std::sync::OnceLock;

use miniz_oxide::inflate::decompress_to_vec_zlib;

/// A text, inflated when it is first asked for: some milliseconds.
pub(super) struct Ptx {
    /// Of its source.
    pub name: &'static str,
    deflated: &'static [u8],
    text: OnceLock<String>,
}

macro_rules! ptx {
    ($name:literal) => {
        Ptx {
            name: $name,
            deflated: include_bytes!(concat!("../../shaders/cuda/", $name, ".ptx.z")),
            text: OnceLock::new(),
        }
    };
}

pub(super) static BATCH_TABLES: Ptx = ptx!("batch_tables");
pub(super) static HEAD_PROJECT: Ptx = ptx!("head_project");
pub(super) static KV_APPEND: Ptx = ptx!("kv_append");
pub(super) static KV_CALIBRATE: Ptx = ptx!("kv_calibrate");
pub(super) static KV_COPY_PAGES: Ptx = ptx!("kv_copy_pages");
pub(super) static KV_GATHER: Ptx = ptx!("kv_gather");
pub(super) static MERGE_ATTN_STATES: Ptx = ptx!("merge_attn_states");
pub(super) static MERGE_STATES: Ptx = ptx!("merge_states");
pub(super) static MLA_DECODE_BF16: Ptx = ptx!("mla_decode_bf16");
pub(super) static MLA_DECODE_E4M3: Ptx = ptx!("mla_decode_e4m3");
pub(super) static MLA_DECODE_F16: Ptx = ptx!("mla_decode_f16");
pub(super) static MLA_DECODE_SIMPLE: Ptx = ptx!("mla_decode_simple");
pub(super) static MLA_DECODE_SWAP_BF16: Ptx = ptx!("mla_decode_swap_bf16");
pub(super) static MLA_DECODE_SWAP_F16: Ptx = ptx!("mla_decode_swap_f16");
pub(super) static MLA_DECODE_TMA_BF16: Ptx = ptx!("mla_decode_tma_bf16");
pub(super) static MLA_DECODE_TMA_E4M3: Ptx = ptx!("mla_decode_tma_e4m3");
pub(super) static MLA_DECODE_TMA_F16: Ptx = ptx!("mla_decode_tma_f16");
pub(super) static MLA_DECODE_WGMMA_BF16: Ptx = ptx!("mla_decode_wgmma_bf16");
pub(super) static MLA_DECODE_WGMMA_F16: Ptx = ptx!("mla_decode_wgmma_f16");
pub(super) static MLA_MERGE: Ptx = ptx!("mla_merge");
pub(super) static MLA_PREFILL: Ptx = ptx!("mla_prefill");
pub(super) static ROPE: Ptx = ptx!("rope");
pub(super) static ROPE_APPEND: Ptx = ptx!("rope_append");

impl Ptx {
    pub fn text(&self) -> &str {
        self.text.get_or_init(|| {
            let bytes = decompress_to_vec_zlib(self.deflated).ok();
            bytes.and_then(|bytes| String::from_utf8(bytes).ok()).expect("a test has inflated every text")
        })
    }
}

impl std::fmt::Debug for Ptx {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Ptx").field(&self.name).finish()
    }
}

#[cfg(test)]
pub(super) static ALL: &[&Ptx] = &[
    &BATCH_TABLES,
    &HEAD_PROJECT,
    &KV_APPEND,
    &KV_CALIBRATE,
    &KV_COPY_PAGES,
    &KV_GATHER,
    &MERGE_ATTN_STATES,
    &MERGE_STATES,
    &MLA_DECODE_BF16,
    &MLA_DECODE_E4M3,
    &MLA_DECODE_F16,
    &MLA_DECODE_SIMPLE,
    &MLA_DECODE_SWAP_BF16,
    &MLA_DECODE_SWAP_F16,
    &MLA_DECODE_TMA_BF16,
    &MLA_DECODE_TMA_E4M3,
    &MLA_DECODE_TMA_F16,
    &MLA_DECODE_WGMMA_BF16,
    &MLA_DECODE_WGMMA_F16,
    &MLA_MERGE,
    &MLA_PREFILL,
    &ROPE,
    &ROPE_APPEND,
];

#[cfg(test)]
mod tests {
    use super::*;

    /// The folder is read when the test runs: a published crate is without the plain texts.
    #[test]
    fn each_text_is_the_one_that_was_compiled() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/shaders/cuda");
        let files = std::fs::read_dir(folder).expect("the kernels").map(|file| file.expect("a file").path());
        let texts = files.filter(|path| path.extension().is_some_and(|ending| ending == "ptx"));
        let mut names: Vec<_> = texts.map(|path| path.file_stem().expect("a name").to_owned()).collect();
        names.sort_unstable();
        assert_eq!(names, ALL.iter().map(|ptx| ptx.name).collect::<Vec<_>>(), "ALL lists them in order");
        for ptx in ALL {
            let text = std::fs::read_to_string(format!("{folder}/{}.ptx", ptx.name)).expect("a text");
            let start = std::time::Instant::now();
            let inflated = ptx.text();
            println!("{}: {} bytes in {:?}", ptx.name, inflated.len(), start.elapsed());
            assert!(inflated == text, "{}.ptx.z is old: run scripts/ptx.sh", ptx.name);
        }
    }
}
