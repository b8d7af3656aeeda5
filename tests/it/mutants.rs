//! The mutants of scripts/mutants: what each changes is still there, exactly once. scripts/mutants.sh runs them.

use std::collections::BTreeMap;
use std::path::Path;

type Fields = BTreeMap<String, String>;

/// The tables of a .toml file that has nothing but literal strings (`'..'` and `'''..'''`) and `true`.
fn tables(text: &str) -> BTreeMap<String, Fields> {
    let mut tables = BTreeMap::new();
    let (mut id, mut rest) = (String::new(), text);
    while !rest.is_empty() {
        let (line, after) = rest.split_once('\n').unwrap_or((rest, ""));
        let value = line.split_once(" = ").map(|(key, _)| (key, &rest[key.len() + 3..]));
        rest = after;
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            name.clone_into(&mut id);
            assert!(tables.insert(id.clone(), Fields::new()).is_none(), "{id} is there twice");
        } else if let Some((key, value)) = value {
            let quote =
                ["'''", "'", ""].into_iter().find(|quote| value.starts_with(quote)).unwrap_or_default();
            let end = if quote.is_empty() { "\n" } else { quote };
            let (value, after) =
                value[quote.len()..].split_once(end).unwrap_or_else(|| panic!("{id}: {key} has no end"));
            rest = after.strip_prefix('\n').unwrap_or(after);
            let value = value.strip_prefix('\n').unwrap_or(value).to_owned();
            tables.get_mut(&id).expect("a table").insert(key.to_owned(), value);
        } else {
            assert!(line.is_empty() || line.starts_with('#'), "{id}: {line:?} is not understood");
        }
    }
    tables
}

fn every_mutant_is_of_what_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read =
        |name: &str| std::fs::read_to_string(root.join(name)).unwrap_or_else(|why| panic!("{name}: {why}"));
    let mut files = BTreeMap::new();
    let mut count = 0;
    for entry in std::fs::read_dir(root.join("scripts/mutants")).expect("the tables") {
        let path = entry.expect("a name").path();
        if path.extension().is_none_or(|extension| extension != "toml") {
            continue;
        }
        for (id, fields) in
            tables(&read(&format!("scripts/mutants/{}", path.file_name().expect("a name").display())))
        {
            let field = |name: &str| fields.get(name).unwrap_or_else(|| panic!("{id} has no `{name}`"));
            let (file, text) = (field("file"), field("text"));
            let found =
                files.entry(file.clone()).or_insert_with(|| read(file)).matches(text.as_str()).count();
            assert_eq!(found, 1, "{id}: its text in {file}; change it, or take the mutant out: {text}");
            assert_ne!(text, field("becomes"), "{id}");
            assert!(field("caught_by").contains(' ') && !field("why").is_empty(), "{id}");
            count += 1;
        }
    }
    assert!(count > 100, "{count} mutants were read");
}

crate::tests![every_mutant_is_of_what_is_there];
