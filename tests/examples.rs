//! Runs the examples as a user does: arguments in, rows and a status out.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use common::case::Case;
use safetensors::SafeTensors;

/// The built example. `cargo test` builds examples too; `cargo test --test examples` alone does not.
fn example(name: &'static str) -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let folder = BUILT.get_or_init(|| {
        let test = std::env::current_exe().expect("a path");
        let profile = test.parent().and_then(Path::parent).expect("target/PROFILE/deps/TEST");
        let folder = profile.join("examples");
        let exists = |name: &str| folder.join(name).with_extension(std::env::consts::EXE_EXTENSION).exists();
        if !(exists("decode") && exists("batch")) {
            let mut cargo = Command::new(env!("CARGO"));
            cargo.args(["build", "--quiet", "--example", "decode", "--example", "batch", "--target-dir"]);
            cargo.arg(profile.parent().expect("target")).current_dir(env!("CARGO_MANIFEST_DIR"));
            if profile.ends_with("release") {
                cargo.arg("--release");
            }
            if cfg!(not(feature = "wgpu")) {
                cargo.arg("--no-default-features");
            }
            assert!(cargo.status().expect("cargo runs").success());
        }
        folder
    });
    folder.join(name).with_extension(std::env::consts::EXE_EXTENSION)
}

struct Ran {
    status: i32,
    text: String,
}

fn run(name: &'static str, args: &[&str]) -> Ran {
    let Output { status, stdout, stderr } = Command::new(example(name)).args(args).output().expect("it runs");
    let text = String::from_utf8_lossy(&stdout).into_owned() + &String::from_utf8_lossy(&stderr);
    Ran { status: status.code().unwrap_or(-1), text }
}

impl Ran {
    fn must(&self, status: i32, texts: &[&str]) {
        assert_eq!(self.status, status, "{}", self.text);
        assert!(!self.text.contains("panicked"), "{}", self.text);
        for text in texts {
            assert!(self.text.contains(text), "{text:?} is missing in\n{}", self.text);
        }
    }
}

/// A folder of its own for a test, with these cases in it.
fn folder(name: &str, cases: &[&str]) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("examples-{name}"));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("a folder");
    for case in cases {
        std::fs::copy(case_file(case), folder.join(format!("{case}.safetensors"))).expect("a copy");
    }
    folder
}

fn case_file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("cases").join(format!("{name}.safetensors"))
}

/// Changes a tensor of a file in place.
fn alter(file: &Path, tensor: &str, change: impl FnOnce(&mut [u8])) {
    let mut bytes = std::fs::read(file).expect("readable");
    let range = {
        let tensors = SafeTensors::deserialize(&bytes).expect("a safetensors file");
        let data = tensors.tensor(tensor).expect("the tensor").data();
        let start = data.as_ptr() as usize - bytes.as_ptr() as usize;
        start..start + data.len()
    };
    change(&mut bytes[range]);
    std::fs::write(file, bytes).expect("writable");
}

const SMALL: &str = "decode_fp8_minicpm3_h40";

#[test]
fn the_repositorys_cases_pass_on_the_cpu() {
    run("decode", &["--backend", "cpu"]).must(0, &["adapter:  CPU", "variant:  row", "11 PASS, 0 FAIL"]);
}

#[cfg(feature = "wgpu")]
#[test]
fn the_repositorys_cases_pass_on_wgpu() {
    if let Some(gpu) = common::gpu_or_say_why() {
        run("decode", &["--backend=wgpu"]).must(0, &[&gpu.describe(), "variant:  row", "11 PASS, 0 FAIL"]);
        run("decode", &["--variant", "shared"]).must(0, &["row shared, forced", "11 PASS, 0 FAIL"]);
    }
}

#[test]
fn what_is_saved_can_be_read_and_passes_as_expected() {
    let cases = [SMALL, "merge_bf16_d96", "append_fp8_pow2"];
    let from = folder("save-from", &cases);
    let to = folder("save-to", &[]).join("made/here");
    let (from_text, to_text) = (from.to_str().expect("text"), to.to_str().expect("text"));
    run("decode", &["--backend", "cpu", "--save", to_text, from_text]).must(0, &["3 PASS, 0 FAIL"]);
    let names: [&[&str]; 3] = [&["out", "lse"], &["output", "output_lse"], &["kv_cache"]];
    for (case, names) in cases.iter().zip(names) {
        let read = |folder: &Path| std::fs::read(folder.join(format!("{case}.safetensors"))).expect("a file");
        let (expected, saved) = (read(&from), read(&to));
        let expected = SafeTensors::deserialize(&expected).expect("safetensors");
        let saved = SafeTensors::deserialize(&saved).expect("safetensors");
        assert_eq!(saved.len(), names.len());
        for name in names {
            let [want, got] = [&expected, &saved].map(|file| file.tensor(name).expect(name));
            assert_eq!((want.shape(), want.dtype()), (got.shape(), got.dtype()), "{case} {name}");
            if *case == "append_fp8_pow2" {
                assert_eq!(want.data(), got.data());
                continue;
            }
            let floats = |bytes: &[u8]| wgpu_mla::Dtype::F32.decode_all(bytes);
            for (want, got) in floats(want.data()).into_iter().zip(floats(got.data())) {
                assert!(want == got || (want - got).abs() <= 2e-2 * want.abs().max(1.0), "{want} {got}");
            }
        }
    }
    // Never over the cases themselves.
    let again = run("decode", &["--backend", "cpu", "--save", from_text, from_text]);
    again.must(1, &["is the case itself", "0 PASS, 3 FAIL"]);
    assert!(Case::load(&from.join(format!("{SMALL}.safetensors"))).is_ok());
}

#[test]
fn wrong_values_fail() {
    let from = folder("wrong", &[SMALL, "merge_f32", "append_bf16"]);
    let file = |name: &str| from.join(format!("{name}.safetensors"));
    alter(&file(SMALL), "out", |bytes| bytes[..4].copy_from_slice(&9f32.to_le_bytes()));
    alter(&file("merge_f32"), "output_lse", |bytes| bytes[..4].copy_from_slice(&9f32.to_le_bytes()));
    alter(&file("append_bf16"), "kv_cache", |bytes| bytes[7] ^= 1);
    let ran = run("decode", &["--backend", "cpu", from.to_str().expect("text")]);
    ran.must(1, &["expected 9", "slot 0 column 3", "3 cases: 0 PASS, 3 FAIL"]);
}

#[test]
fn a_broken_file_does_not_stop_the_others() {
    let from = folder("broken", &["append_bf16", SMALL, "merge_f32"]);
    let broken = from.join(format!("{SMALL}.safetensors"));
    let bytes = std::fs::read(&broken).expect("readable");
    std::fs::write(&broken, &bytes[..bytes.len() / 2]).expect("writable");
    std::fs::write(from.join("hostile.safetensors"), [0xFF; 64]).expect("writable");
    std::fs::write(from.join("empty.safetensors"), []).expect("writable");
    let missing = from.join("missing.safetensors");
    let args = ["--backend", "cpu", from.to_str().expect("text"), missing.to_str().expect("text")];
    let ran = run("decode", &args);
    ran.must(1, &["not a safetensors file", "No such file", "2 PASS, 0 FAIL, 4 could not be read"]);
}

#[test]
fn lists_what_there_is() {
    run("decode", &["--list"])
        .must(0, &["backend wgpu: ", "backend cpu: ", "portable: runs", "case files: 11"]);
}

#[test]
fn bad_arguments_are_named() {
    let bad = |args: &[&str], text: &str| run("decode", args).must(2, &[text, "--help"]);
    bad(&["--frobnicate"], "--frobnicate: no such option");
    bad(&["--backend", "tpu"], "--backend tpu: must be wgpu or cpu");
    bad(&["--backend"], "--backend needs wgpu or cpu");
    bad(&["--variant", "fastest", "--backend", "cpu"], "portable");
    let file = case_file(SMALL);
    bad(&["--backend", "cpu", "--save", file.to_str().expect("text")], "--save");
    run("decode", &["--help"]).must(0, &["--variant NAME"]);
    run("batch", &["--steps", "none"]).must(2, &["--steps none: must be a whole number"]);
    run("batch", &["--help"]).must(0, &["--seed"]);
}

#[test]
fn the_batch_is_right_on_the_cpu() {
    for seed in ["1", "2"] {
        let ran = run("batch", &["--backend", "cpu", "--steps", "60", "--seed", seed]);
        ran.must(0, &["60 steps", "against the f64 oracle", "PASS"]);
    }
}

#[cfg(feature = "wgpu")]
#[test]
fn the_batch_is_right_on_wgpu() {
    if let Some(gpu) = common::gpu_or_say_why() {
        let ran = run("batch", &["--backend", "wgpu", "--steps", "20"]);
        ran.must(0, &[&gpu.describe(), "20 steps", "PASS"]);
    }
}
