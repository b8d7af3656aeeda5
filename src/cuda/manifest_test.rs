//! Compares what the host launches with the manifest of the crate `wgpu-mla-ptx`: the entries, and every field of their argument structs.

use std::fmt::Debug;

use cudarc::driver::DeviceRepr;
use wgpu_mla_ptx::{ENTRIES, Entry, Kind};

use super::kernels::ptx;
use super::{decode, ops};

/// The entry of a name, whose struct the host's is.
pub(super) fn takes<T: DeviceRepr + Debug>(name: &str) -> &'static Entry {
    let entry = ptx::named(name).unwrap_or_else(|| panic!("{name} is not one entry"));
    compare::<T>(entry);
    entry
}

pub(super) fn compare<T: DeviceRepr + Debug>(entry: &Entry) {
    let of = entry.args;
    let fields: Vec<_> =
        of.fields.iter().map(|field| (field.name.to_owned(), field.offset, field.kind)).collect();
    assert_eq!(fields_of::<T>(), fields, "{entry:?}: {} of {} (right)", of.name, of.file);
    assert_eq!(size_of::<T>(), of.bytes as usize, "{entry:?}: bytes");
}

/// All numbers of a struct, as the manifest has them, without a second list of its fields: its words are filled with 1, 2, 3 and so on,
/// and Debug prints each field by its name and what its words hold. `offset_of!` does not see other modules' private fields.
fn fields_of<T: DeviceRepr + Debug>() -> Vec<(String, u32, Kind)> {
    let words: Vec<u32> = (1..).take(size_of::<T>() / 4).collect();
    // SAFETY: as many bytes as are read; arguments of kernels are numbers, which any bits are.
    let value: T = unsafe { words.as_ptr().cast::<T>().read_unaligned() };
    let (mut names, mut fields) = (Vec::new(), Vec::new());
    for part in format!("{value:?}").split_whitespace() {
        if let Some(name) = part.strip_suffix(':') {
            names.push(name);
        } else if part.starts_with('}') {
            names.pop();
        } else if let Some((word, kind)) = number(part.trim_end_matches(',')) {
            fields.push((names.join("."), (word - 1) * 4, kind));
            names.pop();
        }
    }
    fields
}

/// The first word of a printed number, and its kind: one of 8 bytes has a second word, above the first.
fn number(printed: &str) -> Option<(u32, Kind)> {
    match printed.parse::<u64>() {
        Ok(bits) if bits >> 32 == 0 => Some((bits as u32, Kind::U32)),
        Ok(bits) => Some((bits as u32, Kind::U64)),
        Err(_) => Some((printed.parse::<f32>().ok()?.to_bits(), Kind::F32)),
    }
}

#[test]
fn every_entry_is_launched_and_takes_the_struct_of_the_host() {
    let mut launched: Vec<_> = [decode::tests::entries(), ops::tests::entries()]
        .concat()
        .iter()
        .map(|e| (e.module, e.name))
        .collect();
    launched.sort_unstable();
    launched.dedup();
    let mut all: Vec<_> = ENTRIES.iter().map(|entry| (entry.module, entry.name)).collect();
    all.sort_unstable();
    assert_eq!(launched, all);
}
