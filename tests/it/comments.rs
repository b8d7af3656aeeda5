//! Comments are sentences: none begins as the rest of one, and none is wider than a line.

use std::fs::{read_dir, read_to_string};
use std::path::Path;

/// Characters of a line that is a comment, its indentation included. Code is as wide as rustfmt makes it.
const WIDTH: usize = 140;

/// Beginnings of a comment that has no subject: "Of the kernel.", "As `new`.", "Those of the device."
const FRAGMENTS: [&str; 6] = ["Of ", "As ", "That of ", "Those of ", "Those ", "And "];

const FOLDERS: [&str; 7] = ["src", "shaders", "tests", "benches", "examples", "scripts", "burn"];

/// The text of a line that is a comment, and what marks it as one.
fn comment(line: &str, is_script: bool) -> Option<(&str, &str)> {
    let line = line.trim_start();
    let marks: &[&str] = if is_script { &["#"] } else { &["///", "//!", "//"] };
    let mark = marks.iter().find(|mark| line.starts_with(**mark))?;
    Some((mark, line[mark.len()..].trim()))
}

/// What is wrong with the comments of a file, by line.
fn faults(text: &str, is_script: bool) -> Vec<(usize, &'static str)> {
    let mut found = Vec::new();
    let mut before: Option<(&str, &str)> = None;
    for (number, line) in text.lines().enumerate() {
        let this = comment(line, is_script);
        if let Some((mark, text)) = this {
            if !is_script && line.chars().count() > WIDTH {
                found.push((number + 1, "is wider than a comment may be"));
            }
            // A line goes on from the one above it, unless that is empty, a heading or the end of a code block.
            let begins = |above: &str| above.is_empty() || above.starts_with(['#', '`']);
            let begins = before.is_none_or(|(above, text)| above != mark || begins(text));
            if begins && FRAGMENTS.iter().any(|fragment| text.starts_with(fragment)) {
                found.push((number + 1, "begins as a part of a sentence"));
            }
        }
        before = this;
    }
    found
}

fn check(path: &Path, files: &mut usize, found: &mut Vec<String>) {
    for entry in read_dir(path).expect("a folder") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().and_then(|name| name.to_str()).expect("a name");
        if path.is_dir() {
            let is_generated =
                ["target", "results", "pkg", "node_modules"].contains(&name) || name.starts_with('.');
            if !is_generated {
                check(&path, files, found);
            }
            continue;
        }
        let is_script = match path.extension().and_then(|extension| extension.to_str()) {
            Some("py" | "sh") => true,
            Some("rs" | "wgsl" | "cu" | "cuh") => false,
            _ => continue,
        };
        *files += 1;
        let text = read_to_string(&path).expect("a source");
        found.extend(
            faults(&text, is_script)
                .into_iter()
                .map(|(line, what)| format!("{}:{line} {what}", path.display())),
        );
    }
}

fn comments_have_a_subject_and_fit_the_line() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (mut files, mut found) = (0, Vec::new());
    for folder in FOLDERS {
        check(&root.join(folder), &mut files, &mut found);
    }
    assert!(files > 600, "sources are found: {files}");
    assert!(found.is_empty(), "comments need a subject, and lines of at most {WIDTH}:\n{}", found.join("\n"));
}

fn a_fragment_is_found() {
    let wide = format!("    // {}", "x".repeat(WIDTH));
    let text = format!(
        "/// Of the kernel.\nlet x = 1;\n/// A sum\n/// Of nothing.\n///\n/// Those of it.\n{wide}\n"
    );
    let lines: Vec<usize> = faults(&text, false).into_iter().map(|(line, _)| line).collect();
    assert_eq!(lines, [1, 6, 7]);
    assert_eq!(faults("# As it was.\n", true).len(), 1);
    assert!(faults("/// Offsets of it.\n# As text of Markdown.\n", false).is_empty());
}

crate::tests![comments_have_a_subject_and_fit_the_line, a_fragment_is_found];
