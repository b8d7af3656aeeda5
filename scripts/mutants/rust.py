"""Mutants of Rust: one build of a copy of the tree, in which each is behind a switch that `MLA_MUTANT` sets when the tests run.

An expression becomes `(if is(7) { mutant } else { original })`, statements become `if is(7) { .. } else { .. }`. So a text is a whole
expression, or whole statements that bind nothing.
"""

import re
import subprocess

from table import ROOT, Wrong

SWITCH = """//! Which mutant is on: see scripts/mutants/rust.py.

/// Whether it is this one.
pub(crate) fn is(number: u32) -> bool {
    static ON: std::sync::OnceLock<Option<u32>> = std::sync::OnceLock::new();
    *ON.get_or_init(|| std::env::var("MLA_MUTANT").ok()?.parse().ok()) == Some(number)
}
"""
CRATES = ["examples/generate/src", "src"]


def switched(mutant, number):
    on = f"crate::mutant::is({number})"
    if mutant.text.rstrip().endswith(";"):
        return f"if {on} {{ {mutant.becomes} }} else {{ {mutant.text} }}"
    return f"(if {on} {{ {mutant.becomes} }} else {{ {mutant.text} }})"


def renamed(name, text):
    """Manifests and the lock file with versions of their own for the tree's packages: cargo would take the copy's for the tree's own,
    which have the same names, and build each after the other again."""
    if name.endswith("Cargo.toml"):
        return re.sub(r'^version = "([^"+]+)"$', r'version = "\1+mutants"', text, count=1, flags=re.M)
    own = re.compile(r'(\[\[package\]\]\nname = "[^"]+"\nversion = "[^"]+)("\n)(?!source)')
    return own.sub(r"\1+mutants\2", text)


def write(path, data):
    """Writes what has changed only, so that cargo builds no more than it has to."""
    if not path.exists() or path.read_bytes() != data:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def copy(folder, numbered):
    """Makes `folder` the tree with all mutants of Rust in it, which are numbered."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    names = [name for name in listed.decode().split("\0") if name and (ROOT / name).is_file()]
    texts = {}
    for number, mutant in numbered:
        text = texts.get(mutant.file) or (ROOT / mutant.file).read_text()
        if text.count(mutant.text) != 1:
            raise Wrong(f"{mutant.id}: it is of the same text as another mutant")
        texts[mutant.file] = text.replace(mutant.text, switched(mutant, number))
    for crate in CRATES:
        if any(name.startswith(crate + "/") for name in texts):
            lib = f"{crate}/lib.rs"
            texts[lib] = "#![allow(unused_parens)]\n" + (texts.get(lib) or (ROOT / lib).read_text()) + "\nmod mutant;\n"
            texts[f"{crate}/mutant.rs"] = SWITCH
    for name in names:
        if name.rsplit("/")[-1] in ("Cargo.toml", "Cargo.lock") and not name.startswith("examples/mpi"):
            texts[name] = renamed(name, (ROOT / name).read_text())
    for name in names:
        write(folder / name, texts[name].encode() if name in texts else (ROOT / name).read_bytes())
    for name in set(texts) - set(names):
        write(folder / name, texts[name].encode())
    wanted = {folder / name for name in [*names, *texts]}
    for path in folder.rglob("*"):
        if path.is_file() and path not in wanted:
            path.unlink()
