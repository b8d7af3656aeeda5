//! The CUDA kernels of `wgpu-mla` as PTX, and what a host has to know of each: [`ENTRIES`].
//!
//! `kernels/` has their sources, `ptx/` what nvcc made of them, and `src/manifest.rs` what is said here, written with the PTX by the
//! repository's `scripts/ptx.sh`. Each entry's PTX is carried deflated, so that a build needs no compiler but Rust's.
//!
//! ```
//! let entry = wgpu_mla_ptx::find("kv_append", "kv_append_bf16_e4m3").expect("a kernel");
//! assert_eq!((entry.threads, entry.args.bytes), (256, 136));
//! assert!(entry.text().contains(".visible .entry kv_append_bf16_e4m3("));
//! ```

/// What `build.rs` made of an entry.
macro_rules! deflated {
    ($module:literal, $name:literal) => {
        include_bytes!(concat!(env!("OUT_DIR"), "/", $module, ".", $name, ".z"))
    };
}

#[rustfmt::skip]
mod manifest;

pub use manifest::ENTRIES;

/// An entry point, which is a module of its own for the driver.
pub struct Entry {
    /// The source that it is of, `kernels/**/MODULE.cu`. Entries of two modules may have one name.
    pub module: &'static str,
    /// Its name in the PTX.
    pub name: &'static str,
    /// Compute capability that it was compiled for: 80 for 8.0.
    pub capability: u32,
    /// Whether cards of a later compute capability take it too. None does that has instructions of one card alone (`sm_90a`).
    pub later_cards: bool,
    /// Threads of a block, at most where a launch may have fewer.
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// Tokens of the cache that a block takes at a time, where an entry says so.
    pub tokens: Option<u32>,
    /// Registers of a thread: the most that any of the assemblers gave it for any card.
    pub registers: u32,
    /// Whether it waits itself for the kernel before it, on cards since compute capability 90, where the text has the instructions
    /// behind `// sm_90: `: it may then begin before that has ended.
    pub waits: bool,
    /// Tensor maps (`CUtensorMap`, 128 bytes each) of its second parameter, which it has none of where this is 0.
    pub tensor_maps: u32,
    /// Blocks of a cluster: a grid is a multiple of it. 1 where the entry asks for none.
    pub cluster: u32,
    /// Its first parameter.
    pub args: &'static Layout,
    deflated: &'static [u8],
}

/// A struct that kernels are given.
#[derive(Debug, PartialEq, Eq)]
pub struct Layout {
    /// Where it is declared, from `kernels/` on.
    pub file: &'static str,
    /// Its name there.
    pub name: &'static str,
    /// Bytes of it, with what fills its end.
    pub bytes: u32,
    /// All its numbers, in order.
    pub fields: &'static [Field],
}

/// A number in a struct.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Field {
    /// Its name; in a struct inside, `name.name`.
    pub name: &'static str,
    /// Where it begins, in bytes.
    pub offset: u32,
    /// What it is.
    pub kind: Kind,
}

/// The kinds of numbers in structs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// 4 bytes.
    U32,
    /// 8 bytes: a stride, or an address.
    U64,
    /// 4 bytes.
    F32,
}

impl Entry {
    /// The PTX of this entry alone, inflated: some milliseconds.
    pub fn text(&self) -> String {
        let bytes =
            miniz_oxide::inflate::decompress_to_vec_zlib(self.deflated).expect("build.rs deflated it");
        String::from_utf8(bytes).expect("build.rs read a text")
    }
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.module, self.name)
    }
}

/// An entry of a module.
pub fn find(module: &str, name: &str) -> Option<&'static Entry> {
    ENTRIES.iter().find(|entry| entry.module == module && entry.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `MLA_PTX_OUT` is a folder to write them to, for a look with ptxas.
    #[test]
    fn each_text_is_an_entry_as_it_was_compiled() {
        const HEAD: &str = ".visible .entry ";
        let mut found = 0;
        for file in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/ptx")).expect("the kernels") {
            let path = file.expect("a file").path();
            let module = path.file_stem().expect("a name").to_string_lossy();
            let whole = std::fs::read_to_string(&path).expect("a text");
            let mut parts = whole.split(HEAD);
            let head = parts.next().expect("what is before the first");
            for part in parts {
                let name = part.split('(').next().expect("a name");
                let entry =
                    find(&module, name).unwrap_or_else(|| panic!("the manifest lacks {module}:{name}"));
                let text = entry.text();
                assert!(text.starts_with(head) && text.contains(part), "{entry:?}");
                assert_eq!(text.matches(HEAD).count(), 1, "{entry:?}");
                assert_eq!(text.matches('{').count(), text.matches('}').count(), "{entry:?}");
                assert_eq!(text.contains("// sm_90: "), entry.waits, "{entry:?}");
                assert!(text.contains(&format!(" args0[{}]", entry.args.bytes)), "{entry:?}");
                let maps = format!(" args1[{}]", entry.tensor_maps * 128);
                assert_eq!(text.contains(" args1["), entry.tensor_maps > 0, "{entry:?}");
                assert!(entry.tensor_maps == 0 || text.contains(&maps), "{entry:?}");
                let cluster = format!(".reqnctapercluster {},1,1", entry.cluster);
                assert_eq!(text.contains(&cluster), entry.cluster > 1, "{entry:?}");
                assert!(text.contains(&format!(".target sm_{}", entry.capability)), "{entry:?}");
                if let Ok(folder) = std::env::var("MLA_PTX_OUT") {
                    std::fs::write(format!("{folder}/{module}.{name}.ptx"), text).expect("written");
                }
                found += 1;
            }
        }
        assert_eq!(found, ENTRIES.len());
    }
}
