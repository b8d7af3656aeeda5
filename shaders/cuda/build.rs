//! Deflates each entry of `ptx/*.ptx` as a text of its own, for `include_bytes`: a driver translates all that it is given, for some tenths
//! of a second an entry.

use std::path::Path;
use std::{env, fs};

use miniz_oxide::deflate::compress_to_vec_zlib;

/// 0.7 s for all kernels in a build script that is not optimised, and 4 % more bytes than the best, which takes 3.7 s.
const LEVEL: u8 = 4;

const HEAD: &str = ".visible .entry ";

fn main() {
    println!("cargo::rerun-if-changed=ptx");
    let out = env::var_os("OUT_DIR").expect("cargo sets it");
    for file in fs::read_dir("ptx").expect("the folder of the kernels") {
        let path = file.expect("a file of it").path();
        let text = fs::read_to_string(&path).expect("a PTX text");
        let module = path.file_stem().expect("a name").to_string_lossy();
        let (rest, entries) = split(&text);
        for (at, entry) in entries {
            let name = entry[HEAD.len()..].split('(').next().expect("text before a bracket");
            let alone = [&rest[..at], entry, &rest[at..]].concat();
            let deflated = compress_to_vec_zlib(alone.as_bytes(), LEVEL);
            fs::write(Path::new(&out).join(format!("{module}.{name}.z")), deflated).expect("written");
        }
    }
}

/// What a text has outside of its entries, and the entries, each with its place there.
fn split(text: &str) -> (String, Vec<(usize, &str)>) {
    let (mut rest, mut entries, mut left) = (String::new(), Vec::new(), text);
    while let Some((before, _)) = left.split_once(HEAD) {
        rest.push_str(before);
        let found = &left[before.len()..];
        let (entry, after) = found.split_at(end_of_block(found));
        entries.push((rest.len(), entry));
        left = after;
    }
    (rest + left, entries)
}

/// Where the first block in braces ends.
fn end_of_block(text: &str) -> usize {
    let mut depth = 0;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'{' => depth += 1,
            b'}' if depth == 1 => return at + 1,
            b'}' => depth -= 1,
            _ => {}
        }
    }
    panic!("an entry without an end: {:.60}", text);
}
