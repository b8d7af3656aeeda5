//! WGSL kernels: how each is concatenated for a spec and a device, and the variants of each op in dispatch order. Pure.
//!
//! A module is a prelude of constants followed by whole files: WGSL's module scope has no order, so nothing needs a preprocessor.

pub(crate) mod compose;
pub(crate) mod decode;
pub(crate) mod formats;
pub(crate) mod guard;
pub(crate) mod indexer;
pub(crate) mod prefill;
pub(crate) mod project;
pub(crate) mod top_k;
mod unroll;

use super::caps::Caps;
use compose::{Const, Source, compose};
use unroll::unroll;

/// Invocations in a workgroup of most kernels: WebGPU's default limit.
pub(crate) const GROUP: u32 = 256;

/// Directives of modules on cooperative matrices (tensor cores). Matrix operations under an `if` need the diagnostic off; each such
/// condition is uniform in a subgroup, and in the workgroup where there are barriers under it.
const MATRIX_DIRECTIVES: &str = "enable f16;\nenable wgpu_int16;\nenable wgpu_cooperative_matrix;\ndiagnostic(off, derivative_uniformity);\n";

/// # Errors
/// Why there are no cooperative matrices here.
fn matrices(caps: &Caps) -> Result<u32, String> {
    match caps.cooperative_tile {
        0 if caps.matrices_unknown => {
            Err("the adapter was not given, which alone tells of cooperative matrices: use `Gpu::on`".into())
        }
        0 => Err("no cooperative matrices f16 x f16 + f32 of 16x16 or 8x8".into()),
        side => Ok(side),
    }
}

/// The types of cooperative matrices of a side: f16 x f16 + f32.
const fn matrix_aliases(side: u32) -> [(&'static str, Const); 3] {
    if side == 8 {
        [
            ("MatrixA", Const::Alias("coop_mat8x8<f16, A>")),
            ("MatrixB", Const::Alias("coop_mat8x8<f16, B>")),
            ("MatrixC", Const::Alias("coop_mat8x8<f32, C>")),
        ]
    } else {
        [
            ("MatrixA", Const::Alias("coop_mat16x16<f16, A>")),
            ("MatrixB", Const::Alias("coop_mat16x16<f16, B>")),
            ("MatrixC", Const::Alias("coop_mat16x16<f32, C>")),
        ]
    }
}

/// A file with its lines that end in `// all f32`, or without them; of lines between `// if all f32`, `// else` and `// end`, with one
/// part. They are what sums in f32 take to keep the accuracy that is promised where all elements are f32; without them nothing of it is
/// left in the text of other kernels, not even for a compiler to remove.
pub(crate) fn where_all_f32(text: &str, is_all_f32: bool) -> String {
    let mut kept = String::with_capacity(text.len());
    let mut keeps = true;
    for line in text.lines() {
        let (line, marked) =
            line.strip_suffix("// all f32").map_or((line, false), |line| (line.trim_end(), true));
        match line.trim() {
            "// if all f32" => keeps = is_all_f32,
            "// else" => keeps = !is_all_f32,
            "// end" => keeps = true,
            _ if keeps && (is_all_f32 || !marked) => {
                kept.push_str(line);
                kept.push('\n');
            }
            _ => {}
        }
    }
    kept
}

/// A file with its lines that end in `// MARK` of a mark that holds, and without those of others.
pub(crate) fn where_marked(text: &str, marks: &[(&str, bool)]) -> String {
    let mut kept = String::with_capacity(text.len());
    for line in text.lines() {
        let marked = marks.iter().find_map(|(mark, holds)| {
            let line = line.strip_suffix(mark)?.strip_suffix("// ")?;
            Some((line.trim_end(), *holds))
        });
        let (line, keeps) = marked.unwrap_or((line, true));
        if keeps {
            kept.push_str(line);
            kept.push('\n');
        }
    }
    kept
}

/// A module of constants, types and files whose marked loops are unrolled.
pub(crate) fn unrolled(
    entry: &'static str,
    variant: &str,
    consts: &[(&str, u32)],
    types: &[(&str, Const)],
    files: &[&str],
) -> Source {
    let mut prelude: Vec<_> = consts.iter().map(|&(name, value)| (name, Const::U32(value))).collect();
    prelude.extend(types);
    let value = |name: &str| consts.iter().find(|(known, _)| *known == name).map(|&(_, value)| value);
    let mut source = compose(entry, variant, &prelude, files);
    // A marked loop with an unknown bound would be left rolled, which is right and slow; a test walks all kernels.
    if let Ok(text) = unroll(&source.text, &value) {
        source.text = text;
    }
    source
}

#[cfg(test)]
pub(super) mod tests;
