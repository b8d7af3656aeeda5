//! No kernel selects between float literals alone. naga writes an f32 literal to HLSL without a suffix, so that DXC selects between
//! doubles. Optimised they become floats again; as wgpu compiles in debug builds the pipeline needs a device with doubles, and the others
//! refuse it. A constant with a type (`const X: f32 = ..`) is written by its name, and so are integers and vectors with their types.

/// A selection between float literals alone, from its `?` on.
pub(super) fn selection_of_literals(hlsl: &str) -> Option<&str> {
    let is_one = |&(at, _): &(usize, &str)| alternatives(&hlsl[at..]).is_some_and(are_literals);
    hlsl.match_indices(" ? ").find(is_one).map(|(at, _)| hlsl[at..].lines().next().unwrap_or_default())
}

/// Both sides of ` ? accept : reject)`, as naga writes it.
fn alternatives(text: &str) -> Option<[&str; 2]> {
    let text = text.strip_prefix(" ? ")?;
    let accept = end_of_operand(text);
    let rest = text[accept..].strip_prefix(" : ")?;
    Some([&text[..accept], &rest[..end_of_operand(rest)]])
}

/// Where an expression ends: at ` : `, `)`, `,` or `;` that is not in parentheses of its own.
fn end_of_operand(text: &str) -> usize {
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        match c {
            '(' | '[' => depth += 1,
            ')' | ']' if depth > 0 => depth -= 1,
            ')' | ']' | ',' | ';' if depth == 0 => return at,
            ' ' if depth == 0 && text[at..].starts_with(" : ") => return at,
            _ => {}
        }
    }
    text.len()
}

fn are_literals(both: [&str; 2]) -> bool {
    both.into_iter().all(is_literal)
}

/// A float literal, a vector of it by a swizzle, or a selection between such.
fn is_literal(text: &str) -> bool {
    let text = text.trim_end_matches(".xxxx").trim_end_matches(".xxx").trim_end_matches(".xx");
    if let Some(inner) = text.strip_prefix('(').and_then(|text| text.strip_suffix(')')) {
        return match inner.find(" ? ") {
            Some(at) => alternatives(&inner[at..]).is_some_and(are_literals),
            None => is_literal(inner),
        };
    }
    text.starts_with(|c: char| c == '-' || c.is_ascii_digit()) && text.parse::<f32>().is_ok()
}

#[test]
fn a_selection_of_literals_is_found() {
    for found in [
        "return (_e1 ? 1.0 : -1.0);",
        "float4(x, (flag ? 0.0 : 1e38), 0.0)",
        "((sum < 0.0) ? 1e38 : (sees ? -9.5e37 : -1e38))",
        "(flags ? (0.0).xxxx : (1.0).xxxx)",
    ] {
        assert!(selection_of_literals(found).is_some(), "{found}");
    }
    for fine in [
        "(_e1 ? 1.0 : value)",
        "(_e1 ? EMPTY : WEIGHTLESS)",
        "(_e1 ? 1u : 0u)",
        "((sum < 0.0) ? 1e38 : (sees ? EMPTY : -1e38))",
        "(flags ? (0.0).xxxx : other.xxxx)",
        "asfloat((_e1 ? 1065353216u : 3212836864u))",
    ] {
        assert_eq!(selection_of_literals(fine), None, "{fine}");
    }
}
