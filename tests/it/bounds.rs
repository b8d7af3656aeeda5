//! Each place that compiles or launches kernels without run-time checks names a proof of docs/bounds.md, and each proof is named.

use std::collections::BTreeSet;
use std::fs::{read_dir, read_to_string};
use std::path::Path;

const MARK: &str = "// bounds: ";

/// The names in comments of a backend's sources.
fn named(folder: &Path, names: &mut BTreeSet<String>) {
    for entry in read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            named(&path, names);
        } else {
            let text = read_to_string(&path).expect("a source");
            names.extend(
                text.lines().filter_map(|line| line.trim_start().strip_prefix(MARK)).map(str::to_owned),
            );
        }
    }
}

fn every_kernel_has_a_proof_of_its_bounds() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = read_to_string(root.join("docs/bounds.md")).expect("docs/bounds.md");
    let heading = |line: &str| Some(line.strip_prefix("### `")?.strip_suffix('`')?.to_owned());
    let proved: BTreeSet<String> = page.lines().filter_map(heading).collect();
    for backend in ["src/gpu", "src/cuda"] {
        let mut names = BTreeSet::new();
        named(&root.join(backend), &mut names);
        assert_eq!(names, proved, "`{MARK}NAME` in {backend} and headings of docs/bounds.md");
    }
    macro_rules! names {
        ($($op:ty),*) => { [$(<$op as wgpu_mla::Op>::NAME),*] };
    }
    for op in wgpu_mla::for_each_op!(names) {
        assert!(proved.contains(op), "docs/bounds.md has no proof for {op}");
    }
}

crate::tests![every_kernel_has_a_proof_of_its_bounds];
