//! Unrolls marked WGSL loops in the text.
//!
//! naga passes no unroll hint on, and a rolled loop over a private array keeps it in memory: on NVIDIA that made an
//! inner loop 6 times slower. A shader marks such a loop and stays valid, readable WGSL without this step:
//!
//! ```wgsl
//! for (var r = 0u; r < ROWS; r++) { // unroll
//!     acc[r] *= rescale[r];
//! }
//! ```

/// Replaces each loop marked `// unroll` by one block an iteration, with the loop variable replaced by its value.
///
/// The bound is a literal `4u` or a constant for which `value` knows a number. Loops may nest.
///
/// # Errors
/// A sentence about the first marked loop that is not of the form above.
pub fn unroll(source: &str, value: &dyn Fn(&str) -> Option<u32>) -> Result<String, String> {
    let lines: Vec<&str> = source.lines().collect();
    let mut out = String::with_capacity(source.len() * 2);
    let mut at = 0;
    while at < lines.len() {
        let line = lines[at];
        let Some(head) = line.trim_end().strip_suffix("// unroll") else {
            out.push_str(line);
            out.push('\n');
            at += 1;
            continue;
        };
        let (variable, count) = parse_head(head, value).ok_or_else(|| {
            format!("line {}: not `for (var i = 0u; i < COUNT; i++) {{ // unroll` with a known COUNT", at + 1)
        })?;
        let indent = &line[..line.len() - line.trim_start().len()];
        let close = format!("{indent}}}");
        let length = lines[at + 1..]
            .iter()
            .position(|&line| line == close)
            .ok_or_else(|| format!("line {}: no closing brace in the column of its `for`", at + 1))?;
        let body = unroll(&lines[at + 1..][..length].join("\n"), value)?;
        for i in 0..count {
            out.push_str(&format!("{indent}{{ // {variable} = {i}\n"));
            out.push_str(&replace_word(&body, variable, &format!("{i}u")));
            out.push_str(&format!("{indent}}}\n"));
        }
        at += length + 2;
    }
    Ok(out)
}

/// `for (var NAME = 0u; NAME < COUNT; NAME++) {` as `(NAME, COUNT)`.
fn parse_head<'a>(head: &'a str, value: &dyn Fn(&str) -> Option<u32>) -> Option<(&'a str, u32)> {
    let inner = head.trim().strip_prefix("for (var ")?.strip_suffix("++) {")?;
    let (variable, rest) = inner.split_once(" = 0u; ")?;
    let (bound, step) = rest.strip_prefix(variable)?.strip_prefix(" < ")?.split_once("; ")?;
    let literal = bound.strip_suffix('u').and_then(|digits| digits.parse().ok());
    (step == variable).then_some((variable, literal.or_else(|| value(bound))?))
}

fn replace_word(text: &str, word: &str, by: &str) -> String {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut out = String::with_capacity(text.len());
    let mut done = 0;
    for (at, _) in text.match_indices(word) {
        // `.r` is a member or a swizzle, not the variable.
        let joined = text[..at].ends_with(|c: char| is_word(c) || c == '.');
        if !joined && !text[at + word.len()..].starts_with(is_word) {
            out.push_str(&text[done..at]);
            out.push_str(by);
            done = at + word.len();
        }
    }
    out.push_str(&text[done..]);
    out
}

#[cfg(test)]
mod tests {
    use super::unroll;

    fn rows(name: &str) -> Option<u32> {
        (name == "ROWS").then_some(2)
    }

    #[test]
    fn a_loop_becomes_blocks() {
        let source = "a\n  for (var r = 0u; r < ROWS; r++) { // unroll\n    x[r] = row + v.r;\n  }\nb\n";
        let want =
            "a\n  { // r = 0\n    x[0u] = row + v.r;\n  }\n  { // r = 1\n    x[1u] = row + v.r;\n  }\nb\n";
        assert_eq!(unroll(source, &rows).unwrap(), want);
    }

    #[test]
    fn a_name_that_ends_like_the_variable_stays() {
        let text = unroll("for (var c = 0u; c < 1u; c++) { // unroll\nacc[c] = cc + c;\n}\n", &rows).unwrap();
        assert_eq!(text, "{ // c = 0\nacc[0u] = cc + 0u;\n}\n");
    }

    #[test]
    fn loops_nest() {
        let source = "for (var r = 0u; r < 2u; r++) { // unroll\n  for (var c = 0u; c < ROWS; c++) { // unroll\n    x(r, c);\n  }\n}\n";
        let text = unroll(source, &rows).unwrap();
        for call in ["x(0u, 0u)", "x(0u, 1u)", "x(1u, 0u)", "x(1u, 1u)"] {
            assert_eq!(text.matches(call).count(), 1, "{call} in {text}");
        }
    }

    #[test]
    fn a_loop_without_the_mark_stays() {
        let source = "for (var i = 0u; i < n; i++) {\n}\n";
        assert_eq!(unroll(source, &rows).unwrap(), source);
    }

    #[test]
    fn a_wrong_mark_is_named() {
        for head in ["for (var i = 1u; i < ROWS; i++) {", "for (var i = 0u; i < n; i++) {", "while (true) {"]
        {
            let error = unroll(&format!("\n{head} // unroll\n}}\n"), &rows).unwrap_err();
            assert!(error.starts_with("line 2"), "{error}");
        }
        assert!(unroll("  for (var i = 0u; i < 2u; i++) { // unroll\n}\n", &rows).is_err());
    }
}
