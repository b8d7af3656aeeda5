//! How a kernel's text counts what rounding loses. Pure.

use super::compose::Source;
use super::where_marked;

/// Composes files with their lines that end in `// guarded` if the kernel `counts`, and without them if not; and so of other marks. The
/// counters are the binding behind `buffers` others and the uniform.
pub(crate) fn guarded(
    files: &[&str],
    buffers: usize,
    counts: bool,
    marks: &[(&str, bool)],
    name: &str,
    compose: impl FnOnce(&[&str], &str) -> Source,
) -> Source {
    let mut all = vec![("guarded", counts), ("guarded queries", false)];
    all.retain(|(mark, _)| marks.iter().all(|(other, _)| other != mark));
    all.extend(marks);
    let mut texts: Vec<String> = files.iter().map(|file| where_marked(file, &all)).collect();
    if !counts {
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        return compose(&texts, name);
    }
    let binding = buffers + 1;
    texts.push(format!(
        "@group(1) @binding({binding}) var<storage, read_write> guard: array<atomic<u32>>; // [rows, 4]\n"
    ));
    texts.push(include_str!("../../../shaders/lib/guard.wgsl").to_owned());
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    compose(&texts, &format!("{name}.guarded"))
}
