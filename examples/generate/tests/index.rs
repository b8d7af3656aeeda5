//! Which file a tensor comes from: where there is an index, it decides.

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use common::changed::{Stored, changed, must_refuse, with_tensors};
use generate::Checkpoint;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

const INDEX: &str = "model.safetensors.index.json";
const UP: &str = "model.layers.1.mlp.up_proj.weight";
const NORM: &str = "model.norm.weight";

/// A tiny model in one file.
fn one_file(name: &str) -> PathBuf {
    changed(name, "v3-dense", "config.json", |text| text)
}

fn tensors(dir: &Path) -> BTreeMap<String, Stored> {
    let mut all = BTreeMap::new();
    with_tensors(dir, |stored| all = stored.clone());
    all
}

fn write(at: &Path, tensors: &BTreeMap<String, Stored>) {
    let views: Vec<_> = tensors
        .iter()
        .map(|(name, it)| (name, TensorView::new(it.dtype, it.shape.clone(), &it.bytes).expect("a tensor")))
        .collect();
    std::fs::write(at, safetensors::serialize(views, None).expect("safetensors")).expect("a file");
}

/// An index of so many names, `of` giving the file of each.
fn write_index<'a>(dir: &Path, names: impl Iterator<Item = &'a String>, of: impl Fn(&str) -> &'static str) {
    let map: BTreeMap<&String, &str> = names.map(|name| (name, of(name))).collect();
    std::fs::write(dir.join(INDEX), json!({"weight_map": map}).to_string()).expect("a file");
}

fn logits(dir: &Path) -> Vec<f32> {
    let checkpoint = Checkpoint::open(dir).expect("a checkpoint");
    let setup = generate::Setup { backend: generate::Where::Cpu, tokens: 16, ..Default::default() };
    let mut attention = generate::paged(&checkpoint.model, &setup).expect("an attention");
    let sequence = attention.pages_mut().add();
    attention.begin(&[(sequence, 4)]).expect("pages");
    checkpoint.model.step(&[1, 2, 3, 4], &[3], attention.as_mut()).expect("a step")
}

/// A tensor of other values.
fn other(stored: &Stored) -> Stored {
    Stored { bytes: stored.bytes.iter().map(|byte| byte & 0x3e).collect(), ..stored.clone() }
}

/// The older file still holds a copy, of another dtype too; by name it comes before the newer or after it.
#[test]
fn a_newer_file_takes_the_place_of_an_older_ones_tensor() {
    for newer in ["a-newer.safetensors", "overlay.safetensors"] {
        let dir = one_file("overlay");
        let (before, all) = (logits(&dir), tensors(&dir));
        let new = BTreeMap::from([(UP.to_owned(), other(&all[UP]))]);
        write(&dir.join(newer), &new);
        write_index(&dir, all.keys(), |name| if name == UP { newer } else { "model.safetensors" });
        let overlaid = logits(&dir);
        assert_ne!(overlaid, before);
        // The same values as when the new tensor stands in one file.
        let alone = one_file("alone");
        with_tensors(&alone, |all| drop(all.insert(UP.into(), new[UP].clone())));
        assert_eq!(overlaid, logits(&alone));
        // The other way around, the index maps it to the older file, and the newer one is not read.
        write_index(&dir, all.keys(), |_| "model.safetensors");
        assert_eq!(logits(&dir), before);
        // The copy's dtype and shape do not matter.
        let odd = Stored { dtype: safetensors::tensor::Dtype::F8_E4M3, shape: vec![3], bytes: vec![0; 3] };
        with_tensors(&dir, |all| drop(all.insert(UP.into(), odd)));
        write_index(&dir, all.keys(), |name| if name == UP { newer } else { "model.safetensors" });
        assert_eq!(logits(&dir), overlaid);
    }
}

#[test]
fn a_tensor_that_is_not_where_the_index_says_is_named_with_the_file() {
    let dir = one_file("elsewhere");
    let all = tensors(&dir);
    write(&dir.join("overlay.safetensors"), &BTreeMap::from([(NORM.to_owned(), all[NORM].clone())]));
    // Another file has it: that may be an old copy.
    write_index(
        &dir,
        all.keys(),
        |name| if name == UP { "overlay.safetensors" } else { "model.safetensors" },
    );
    let cure = format!(
        "overlay.safetensors: no tensor {UP}, but the index says that it is here; download it and the index again"
    );
    must_refuse(Checkpoint::open(&dir), &cure);
    // A layer of multi-token prediction, which is not used, may be anywhere or nowhere.
    let more = ["model.layers.2.eh_proj.weight".to_owned()];
    let nowhere = |name: &str| if name == more[0] { "mtp.safetensors" } else { "model.safetensors" };
    write_index(&dir, all.keys().chain(&more), nowhere);
    Checkpoint::open(&dir).expect("a checkpoint");
}

/// Such as `consolidated.safetensors`, and a shard of an older download, cut off or not.
#[test]
fn files_that_the_index_does_not_name_are_not_read() {
    let dir = changed("unnamed", "v3-halves", INDEX, |text| text);
    let before = logits(&dir);
    std::fs::write(dir.join("model-00007-of-00007.safetensors"), "cut off").expect("a file");
    let only = BTreeMap::from([(NORM.to_owned(), other(&tensors(&one_file("others"))[NORM]))]);
    write(&dir.join("consolidated.safetensors"), &only);
    write(&dir.join("model.safetensors"), &only);
    assert_eq!(logits(&dir), before);
}

/// An index that is cut off, or by hand: what it leaves out is not in the checkpoint, and is not silently there or away either.
#[test]
fn a_tensor_that_the_index_lacks_is_an_error_where_the_model_uses_it() {
    let dir = one_file("unlisted");
    let mut all = tensors(&dir);
    write_index(&dir, all.keys().filter(|name| *name != UP), |_| "model.safetensors");
    let cure =
        format!("model.safetensors: {UP} is here, but the index does not have it; download the index again");
    must_refuse(Checkpoint::open(&dir), &cure);
    // One that the model has no use for is an old copy.
    write_index(&dir, all.keys(), |_| "model.safetensors");
    let scale = format!("{UP}_scale_inv");
    with_tensors(&dir, |all| drop(all.insert(scale.clone(), all[NORM].clone())));
    Checkpoint::open(&dir).expect("a checkpoint");
    all.insert(scale.clone(), all[NORM].clone());
    write_index(&dir, all.keys(), |_| "model.safetensors");
    must_refuse(Checkpoint::open(&dir), &scale);
    for empty in [json!({"weight_map": {}}), json!({"weight_map": {UP: Value::Null}}), json!({})] {
        std::fs::write(dir.join(INDEX), empty.to_string()).expect("a file");
        must_refuse(Checkpoint::open(&dir), "download it again");
    }
}

#[test]
fn without_an_index_there_is_one_file() {
    let shards = changed("shards", "v3-halves", INDEX, |text| text);
    std::fs::remove_file(shards.join(INDEX)).expect("a file");
    must_refuse(
        Checkpoint::open(&shards),
        "which says what model-00001-of-00006.safetensors is for, neither; download the index",
    );
    let none = one_file("nothing");
    std::fs::remove_file(none.join("model.safetensors")).expect("a file");
    must_refuse(Checkpoint::open(&none), "not there; download the checkpoint's weights as safetensors");
    // A header that has a tensor twice: the bytes of one would be left over.
    let twice = one_file("twice");
    let info =
        |begin: usize| format!(r#"{{"dtype":"F32","shape":[1],"data_offsets":[{begin},{}]}}"#, begin + 4);
    let header = format!(r#"{{"{NORM}":{},"{NORM}":{}}}"#, info(0), info(4));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(&[0; 8]);
    std::fs::write(twice.join("model.safetensors"), bytes).expect("a file");
    must_refuse(Checkpoint::open(&twice), "download it again");
}
