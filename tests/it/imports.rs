//! No two files of `src` import each other, be it by way of others: a file can be read with what it imports, and nothing else. A module and
//! its own submodules are one thing here.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{read_dir, read_to_string};
use std::path::Path;

/// A module, or an item in one, by its names from the crate on.
type Names = Vec<String>;

struct Source {
    /// The files, by their modules.
    text: BTreeMap<Names, String>,
    /// What modules export by another path, such as `ops::Op` for `ops::op::Op`.
    exports: BTreeMap<Names, Names>,
}

fn names(text: &str) -> Names {
    text.split("::").map(|name| name.trim().to_owned()).collect()
}

fn read(folder: &Path, module: &Names, into: &mut BTreeMap<Names, String>) {
    for entry in read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("an entry").path();
        let name = path.file_stem().and_then(|stem| stem.to_str()).expect("a name").to_owned();
        if name == "tests" || name.ends_with("_test") {
            continue;
        }
        let child: Names = module.iter().cloned().chain([name]).collect();
        if path.is_dir() {
            read(&path, &child, into);
        } else if path.extension().is_some_and(|extension| extension == "rs") && child != ["lib"] {
            into.insert(child, without_tests_and_comments(&read_to_string(&path).expect("a source")));
        }
    }
}

/// Unit tests end a file, and may use anything.
fn without_tests_and_comments(text: &str) -> String {
    let is_tests = |at: &usize| {
        let (attribute, rest) = text[*at..].split_once('\n').unwrap_or_default();
        attribute.contains("test")
            && rest.split_once("mod ").is_some_and(|(before, _)| !before.contains('\n'))
    };
    let end = text.match_indices("#[cfg(").map(|(at, _)| at).find(is_tests).unwrap_or(text.len());
    text[..end].lines().flat_map(|line| [line.split("//").next().unwrap_or_default(), "\n"]).collect()
}

/// The paths of a tree such as `crate::{Error, ops::{Op, Device as D}}`, each with the name that it gets.
fn paths_of(tree: &str, prefix: &str) -> Vec<(String, String)> {
    if let Some((before, inside)) = tree.split_once('{') {
        let inside = inside.trim_end().strip_suffix('}').unwrap_or(inside);
        let (mut depth, mut begin, mut all) = (0, 0, Vec::new());
        for (at, c) in inside.char_indices().chain([(inside.len(), ',')]) {
            match c {
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' if depth == 0 => {
                    all.extend(paths_of(inside[begin..at].trim(), &format!("{prefix}{}", before.trim())));
                    begin = at + 1;
                }
                _ => {}
            }
        }
        return all;
    }
    let (path, name) = tree.split_once(" as ").map_or((tree, None), |(path, name)| (path, Some(name)));
    let path = path.trim().trim_end_matches("::self");
    if path.is_empty() {
        return Vec::new();
    }
    let name = name.unwrap_or_else(|| path.rsplit("::").next().unwrap_or(path));
    vec![(format!("{prefix}{path}"), name.trim().to_owned())]
}

impl Source {
    fn of(folder: &Path) -> Self {
        let mut text = BTreeMap::new();
        read(folder, &Vec::new(), &mut text);
        let mut source = Self { text, exports: BTreeMap::new() };
        let root = without_tests_and_comments(&read_to_string(folder.join("lib.rs")).expect("lib.rs"));
        let all: Vec<(Names, String)> = source.text.clone().into_iter().chain([(Vec::new(), root)]).collect();
        for (module, text) in &all {
            for (exported, tree) in uses(text) {
                for (path, name) in paths_of(&tree, "").into_iter().filter(|_| exported) {
                    if let Some(path) = source.absolute(&path, module) {
                        let alias = module.iter().cloned().chain([name]).collect();
                        source.exports.insert(alias, path);
                    }
                }
            }
        }
        source
    }

    /// A path from the crate on; `None` for one of another crate.
    fn absolute(&self, path: &str, module: &Names) -> Option<Names> {
        let path = names(path);
        let supers = path.iter().take_while(|name| *name == "super").count();
        let from = |base: &[String], path: &[String]| base.iter().chain(path).cloned().collect::<Names>();
        match path[0].as_str() {
            "crate" => Some(path[1..].to_vec()),
            "self" => Some(from(module, &path[1..])),
            "super" => Some(from(&module[..module.len().checked_sub(supers)?], &path[supers..])),
            _ => Some(from(module, &path)).filter(|path| self.text.contains_key(&path[..=module.len()])),
        }
    }

    /// The file that an absolute path leads to.
    fn file(&self, path: &[String], left: u32) -> Option<Names> {
        (1..=path.len()).rev().find_map(|length| {
            let (head, rest) = path.split_at(length);
            match self.exports.get(head).filter(|to| left > 0 && *to != head) {
                Some(to) => self.file(&[to, rest].concat(), left - 1),
                None => self.text.contains_key(head).then(|| head.to_vec()),
            }
        })
    }

    /// The files that a file imports, or names by a path.
    fn imports(&self, module: &Names) -> BTreeSet<Names> {
        let text = &self.text[module];
        let trees = uses(text).into_iter().flat_map(|(_, tree)| paths_of(&tree, ""));
        let paths: Vec<String> = trees.map(|(path, _)| path).chain(named(text)).collect();
        let files = paths.iter().filter_map(|path| self.file(&self.absolute(path, module)?, 8));
        files.filter(|file| !file.starts_with(module) && !module.starts_with(file)).collect()
    }
}

/// The trees of a file's `use`s, and whether others may use them too.
fn uses(text: &str) -> Vec<(bool, String)> {
    let statements = text.split(';').filter_map(|statement| {
        let at = statement.rfind("use ").filter(|&at| !statement[at..].contains('='))?;
        let before = statement[..at].rsplit('\n').next().unwrap_or_default().trim();
        let starts = before.is_empty() || before.starts_with("pub");
        starts.then(|| (before.starts_with("pub"), statement[at + 4..].trim().to_owned()))
    });
    statements.collect()
}

/// Paths from the crate on that stand in the text itself; `pub(in crate::..)` names none.
fn named(text: &str) -> Vec<String> {
    let found = text.match_indices("crate::").filter(|(at, _)| !text[..*at].ends_with("in "));
    let path = |at: usize| {
        let is_part = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
        text[at..].split(|c: char| !is_part(c)).next().unwrap_or_default().trim_end_matches(':').to_owned()
    };
    found.map(|(at, _)| path(at)).filter(|path| path.contains("::")).collect()
}

fn no_two_files_import_each_other() {
    let source = Source::of(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
    let imports: BTreeMap<&Names, BTreeSet<Names>> =
        source.text.keys().map(|module| (module, source.imports(module))).collect();
    assert!(imports.values().map(BTreeSet::len).sum::<usize>() > 500, "imports are found");
    for module in imports.keys() {
        let (mut reached, mut next) = (BTreeSet::new(), imports[*module].iter().collect::<Vec<_>>());
        while let Some(file) = next.pop() {
            if reached.insert(file) {
                next.extend(&imports[file]);
            }
        }
        assert!(
            !reached.contains(module),
            "{} imports itself by way of others: {reached:?}",
            module.join("/")
        );
    }
}

/// A name by way of `lib.rs`, which exports all for hosts, hides which module a file needs.
fn no_file_imports_through_lib_rs() {
    let source = Source::of(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
    // A macro that is exported has no other path.
    let is_macro =
        |name: &str| source.text.values().any(|text| text.contains(&format!("macro_rules! {name} ")));
    for (module, text) in &source.text {
        // A macro for other crates takes public paths.
        let own = text.replace("$crate::", "");
        let trees = uses(text).into_iter().flat_map(|(_, tree)| paths_of(&tree, ""));
        let paths = trees.map(|(path, _)| path).chain(named(&own)).filter(|path| path.starts_with("crate::"));
        for path in paths {
            let name = names(&path)[1].clone();
            let is_module = source.text.contains_key(&vec![name.clone()]);
            let real =
                source.exports.get(&vec![name.clone()]).map_or_else(|| "ops".into(), |to| to[0].clone());
            assert!(
                is_module || is_macro(&name),
                "{} imports crate::{name} through lib.rs: write crate::{real}::{name}, the path of its module",
                module.join("/")
            );
        }
    }
}

/// What a layer needs of a device is an op, or stands in `Composes`.
fn the_layer_knows_no_device() {
    let source = Source::of(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
    for module in source.text.keys().filter(|module| module[0] == "layer") {
        let device = |file: &Names| ["gpu", "cuda", "cpu", "any"].contains(&file[0].as_str());
        let found = source.imports(module).into_iter().find(device);
        assert!(
            found.is_none(),
            "{} imports {found:?}: add what it needs to `Composes` in src/ops/composes.rs instead",
            module.join("/")
        );
    }
}

crate::tests![no_two_files_import_each_other, no_file_imports_through_lib_rs, the_layer_knows_no_device];
