//! WGSL modules: a generated prelude of constants, then whole files, concatenated.

use std::fmt::Write;

/// A WGSL module, ready to compile.
#[derive(Debug, Clone)]
pub struct Source {
    /// `mla.<op>.<variant>.<dtype>`.
    pub label: String,
    /// The entry point: the op's name.
    pub entry: &'static str,
    /// The text.
    pub text: String,
}

impl Source {
    /// Invocations of a workgroup: `@workgroup_size` names a constant of the prelude.
    pub(crate) fn threads(&self) -> u32 {
        let between = |begin: &str, end: &str| {
            let (_, rest) = self.text.split_once(begin)?;
            Some(rest.split_once(end)?.0)
        };
        let value = |name| between(&format!("const {name} = "), "u;")?.parse().ok();
        between("@workgroup_size(", ")").and_then(value).unwrap_or(0)
    }
}

/// The value of a name in the prelude.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Const {
    /// `const NAME = 4u;`
    U32(u32),
    /// `alias Name = vec4<u32>;`
    Alias(&'static str),
}

/// One line a name.
pub(crate) fn prelude(consts: &[(&str, Const)]) -> String {
    let mut text = String::new();
    for (name, value) in consts {
        // writing to a String cannot fail
        let _ = match value {
            Const::U32(x) => writeln!(text, "const {name} = {x}u;"),
            Const::Alias(x) => writeln!(text, "alias {name} = {x};"),
        };
    }
    text
}

/// A module of a prelude and files. The label's second part is the entry point.
pub(crate) fn compose(
    entry: &'static str,
    variant: &str,
    consts: &[(&str, Const)],
    files: &[&str],
) -> Source {
    let mut text = prelude(consts);
    for file in files {
        text.push('\n');
        text.push_str(file);
    }
    Source { label: format!("mla.{entry}.{variant}"), entry, text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_is_a_prelude_and_files() {
        let consts = [("GROUP", Const::U32(256)), ("Unit", Const::Alias("vec4<u32>"))];
        let source = compose("op", "words.f16", &consts, &["fn a() {}\n", "fn b() {}\n"]);
        assert_eq!(source.label, "mla.op.words.f16");
        assert_eq!(source.text, "const GROUP = 256u;\nalias Unit = vec4<u32>;\n\nfn a() {}\n\nfn b() {}\n");
        assert_eq!(source.threads(), 0);
        let files = ["@compute @workgroup_size(GROUP)\nfn op() {}\n"];
        assert_eq!(compose("op", "words.f16", &consts, &files).threads(), 256);
    }
}
