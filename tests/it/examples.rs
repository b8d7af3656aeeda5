//! Runs the examples as a user does: by arguments, output and exit status.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

#[cfg(feature = "wgpu")]
use mla_support::Outcome;
use mla_support::case::Case;
use mla_support::paint::{Data, Make, Sees, sequences};
use mla_support::reference::merge_states_in;
use mla_support::suite::merge_states::Case as SetsCase;
use mla_support::suite::ops::{random_append, random_merge};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype as FileDtype, TensorView};
#[cfg(feature = "cuda")]
use wgpu_mla::Device;
use wgpu_mla::any::{AnyBackend, Chosen};
use wgpu_mla::cpu::Cpu;
use wgpu_mla::{Candidate, Dtype, Kernel, LseBase, MlaDecode, Shares};

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
            // The profile of the tests, so that dependencies are not built twice.
            cargo.args(["--profile", if profile.ends_with("release") { "release" } else { "test" }]);
            if cfg!(not(feature = "wgpu")) {
                cargo.arg("--no-default-features");
            }
            if cfg!(feature = "cuda") {
                cargo.args(["--features", "cuda"]);
            }
            assert!(cargo.status().expect("cargo runs").success());
        }
        folder
    });
    folder.join(name).with_extension(std::env::consts::EXE_EXTENSION)
}

/// Files in tests/cases.
const CASES: usize = 35;

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
    fn must(&self, status: i32, parts: &[&str]) {
        assert_eq!(self.status, status, "{}", self.text);
        assert!(!self.text.contains("panicked"), "{}", self.text);
        for part in parts {
            assert!(self.text.contains(part), "{part:?} is missing in\n{}", self.text);
        }
    }

    /// The number before a word of the last line.
    fn tally(&self, what: &str) -> usize {
        let line = self.text.lines().rfind(|line| line.contains(" cases: ")).expect("a tally");
        let parts = line.split([':', ',']).map(str::trim);
        let part = parts.map(|part| part.split_once(' ').unwrap_or_default());
        let found = part.filter(|(_, words)| words.starts_with(what)).map(|(number, _)| number.parse().ok());
        found.flatten().next().unwrap_or(0)
    }

    /// Every case that is served passed, on a decode variant that runs on the device.
    fn must_pass_on(&self, device: &impl Kernel<MlaDecode>) {
        self.must(0, &[&format!("adapter:  {}", device.name()), "0 FAIL"]);
        assert_eq!(self.tally("PASS") + self.tally("NOT SERVED"), CASES, "{}", self.text);
        let variants = device.variants(&Make::default().build().spec);
        let line = self.text.lines().find(|line| line.starts_with("variant: ")).unwrap_or_default();
        let is_named = |variant: &Candidate| line.contains(variant.name);
        assert!(variants.iter().any(is_named), "no variant is named in\n{}", self.text);
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
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases").join(format!("{name}.safetensors"))
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

fn the_repositorys_cases_pass_on_the_cpu() {
    let ran = run("decode", &["--backend", "cpu"]);
    ran.must_pass_on(&Cpu::new());
    assert_eq!(ran.tally("PASS"), CASES, "{}", ran.text);
}

#[cfg(feature = "wgpu")]
fn the_repositorys_cases_pass_on_wgpu() -> Outcome {
    let gpu = mla_support::gpu()?;
    run("decode", &["--backend=wgpu"]).must_pass_on(&gpu);
    let forced = run("decode", &["--backend", "wgpu", "--variant", "shared"]);
    forced.must(0, &["shared, forced"]);
    forced.must_pass_on(&gpu);
    Ok(())
}

#[cfg(feature = "cuda")]
fn the_repositorys_cases_pass_on_cuda_or_it_says_that_there_is_none() {
    let ran = run("decode", &["--backend", "cuda"]);
    match mla_support::cuda() {
        Ok(cuda) => ran.must_pass_on(&cuda),
        Err(_) => ran.must(
            1,
            &["error: no CUDA device: ", "install NVIDIA's driver (520 or later), or use the wgpu backend"],
        ),
    }
}

#[cfg(not(feature = "cuda"))]
fn cuda_that_was_not_built_in_says_how_to() {
    run("decode", &["--backend", "cuda"]).must(1, &["without the feature `cuda`", "`--features cuda`"]);
    run("batch", &["--backend", "cuda"]).must(1, &["without the feature `cuda`", "`--features cuda`"]);
}

fn without_a_wish_the_best_backend_runs_the_cases() {
    let best = AnyBackend::best(&Make::default().build().spec);
    let ran = run("decode", &[]);
    ran.must(0, &["backend:  "]);
    ran.must_pass_on(&best);
    if matches!(best.chosen(), Chosen::Cpu(_)) {
        ran.must(0, &["not CUDA: ", "not wgpu: ", "notice:   running on the CPU path instead"]);
    }
}

fn what_is_saved_can_be_read_and_passes_as_expected() {
    let cases = [
        SMALL,
        "merge_bf16_d96",
        "append_fp8_pow2",
        "dcp_decode_bf16_w2_i1",
        "dcp_combine_w4_base2",
        "ds656_f32",
        "sparse_656_h12_length_sink",
    ];
    let from = folder("save-from", &cases);
    let to = folder("save-to", &[]).join("made/here");
    let (from_text, to_text) = (from.to_str().expect("text"), to.to_str().expect("text"));
    run("decode", &["--backend", "cpu", "--save", to_text, from_text]).must(0, &["7 PASS, 0 FAIL"]);
    let decoded: &[&str] = &["out", "lse"];
    let names: [&[&str]; 7] = [
        decoded,
        &["output", "output_lse"],
        &["kv_cache"],
        &["out", "lse", "local_seq_lens"],
        decoded,
        &["kv_cache"],
        decoded,
    ];
    for (case, names) in cases.iter().zip(names) {
        let read = |folder: &Path| std::fs::read(folder.join(format!("{case}.safetensors"))).expect("a file");
        let (expected, saved) = (read(&from), read(&to));
        let expected = SafeTensors::deserialize(&expected).expect("safetensors");
        let saved = SafeTensors::deserialize(&saved).expect("safetensors");
        assert_eq!(saved.len(), names.len());
        for name in names {
            let [want, got] = [&expected, &saved].map(|file| file.tensor(name).expect(name));
            assert_eq!((want.shape(), want.dtype()), (got.shape(), got.dtype()), "{case} {name}");
            if ["kv_cache", "local_seq_lens"].contains(name) {
                assert_eq!(want.data(), got.data());
                continue;
            }
            let floats = |bytes: &[u8]| Dtype::F32.decode_all(bytes);
            for (want, got) in floats(want.data()).into_iter().zip(floats(got.data())) {
                assert!(want == got || (want - got).abs() <= 2e-2 * want.abs().max(1.0), "{want} {got}");
            }
        }
    }
    // Never over the cases themselves.
    let again = run("decode", &["--backend", "cpu", "--save", from_text, from_text]);
    again.must(1, &["is the case itself", "0 PASS, 7 FAIL"]);
    assert!(Case::load(&from.join(format!("{SMALL}.safetensors"))).is_ok());
}

fn wrong_values_fail() {
    let cases = [
        SMALL,
        "merge_f32",
        "append_bf16",
        "dcp_decode_fp8_w3_i16",
        "dcp_combine_w3_e",
        "sparse_f32_h6_page16",
    ];
    let from = folder("wrong", &cases);
    let file = |name: &str| from.join(format!("{name}.safetensors"));
    alter(&file(SMALL), "out", |bytes| bytes[..4].copy_from_slice(&9f32.to_le_bytes()));
    alter(&file("merge_f32"), "output_lse", |bytes| bytes[..4].copy_from_slice(&9f32.to_le_bytes()));
    alter(&file("append_bf16"), "kv_cache", |bytes| bytes[7] ^= 1);
    alter(&file("dcp_decode_fp8_w3_i16"), "local_seq_lens", |bytes| bytes[0] ^= 1);
    alter(&file("dcp_combine_w3_e"), "lse", |bytes| bytes[..4].copy_from_slice(&9f32.to_le_bytes()));
    // Another token, in a list that is not to be ignored.
    alter(&file("sparse_f32_h6_page16"), "indices", |bytes| bytes.copy_within(4..8, 0));
    let ran = run("decode", &["--backend", "cpu", from.to_str().expect("text")]);
    ran.must(1, &["expected 9", "slot 0 column 3", "local_seq_lens are [36", "6 cases: 0 PASS, 6 FAIL"]);
}

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

fn lists_what_there_is() {
    run("decode", &["--list"]).must(
        0,
        &[
            "backend cuda: ",
            "backend wgpu: ",
            "backend cpu: ",
            "portable: runs",
            &format!("case files: {CASES}"),
        ],
    );
}

fn bad_arguments_are_named() {
    let bad = |args: &[&str], text: &str| run("decode", args).must(2, &[text, "--help"]);
    bad(&["--frobnicate"], "--frobnicate: no such option");
    bad(&["--backend", "tpu"], "--backend tpu: must be cuda, wgpu or cpu");
    bad(&["--backend"], "--backend needs cuda, wgpu or cpu");
    bad(&["--variant", "fastest", "--backend", "cpu"], "portable");
    let file = case_file(SMALL);
    bad(&["--backend", "cpu", "--save", file.to_str().expect("text")], "--save");
    run("decode", &["--help"]).must(0, &["--variant NAME"]);
    run("batch", &["--steps", "none"]).must(2, &["--steps none: must be a whole number"]);
    run("batch", &["--backend", "tpu"]).must(2, &["--backend tpu: must be cuda, wgpu or cpu"]);
    run("batch", &["--help"]).must(0, &["--seed"]);
}

fn the_batch_is_right_on_the_cpu() {
    for seed in ["1", "2"] {
        let ran = run("batch", &["--backend", "cpu", "--steps", "60", "--seed", seed]);
        ran.must(0, &["60 steps", "against the f64 oracle", "PASS"]);
    }
}

#[cfg(feature = "wgpu")]
fn the_batch_is_right_on_wgpu() -> Outcome {
    let gpu = mla_support::gpu()?;
    let ran = run("batch", &["--backend", "wgpu", "--steps", "20"]);
    ran.must(0, &[&gpu.describe(), "20 steps", "PASS"]);
    Ok(())
}

#[cfg(feature = "cuda")]
fn the_batch_is_right_on_cuda_or_it_says_that_there_is_none() {
    let ran = run("batch", &["--backend", "cuda", "--steps", "60"]);
    match mla_support::cuda() {
        Ok(cuda) => ran.must(0, &[&cuda.name(), "60 steps", "PASS"]),
        Err(_) => ran.must(1, &["no CUDA device: ", "install NVIDIA's driver"]),
    }
}

/// Cases that the repository has no file of: other page sizes, heads, dims, dtypes, lengths and scales.
fn more_cases(to: &Path) -> usize {
    let page = |page_size| Make { page_size, ..Make::default() };
    let dtypes = |cache, query| Make { cache, query, heads: 6, ..Make::default() };
    let lens = |lens: &[(u32, u32)]| Make { sequences: sequences(lens), heads: 12, ..Make::default() };
    let makes = [
        page(1),
        page(3),
        page(256),
        Make { heads: 1, ..page(7) },
        Make { heads: 128, dims: (256, 32), ..page(16) },
        Make { dims: (512, 0), ..page(100) },
        Make { dims: (256, 64), ..dtypes(Dtype::F16, Dtype::F32) },
        dtypes(Dtype::E4m3, Dtype::E4m3),
        dtypes(Dtype::Bf16, Dtype::E4m3),
        dtypes(Dtype::F32, Dtype::Bf16),
        lens(&[(5, 9), (0, 1), (70, 0), (33, 3), (0, 0)]),
        lens(&[]),
        Make { sees: Sees::Full, ..lens(&[(40, 3), (0, 2)]) },
        Make { data: Data::Huge, ..dtypes(Dtype::Bf16, Dtype::F32) },
        Make { data: Data::BigLogits, ..dtypes(Dtype::F32, Dtype::F32) },
    ];
    let mut written = 0;
    let mut write = |kind: &str, metadata: &[(&str, String)], tensors: Vec<(&str, TensorView<'_>)>| {
        let mut entries = HashMap::from([("format".to_owned(), "mla-case/1".to_owned())]);
        entries.insert("kind".into(), kind.into());
        entries.extend(metadata.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
        let file = to.join(format!("{written:02}_{kind}.safetensors"));
        safetensors::serialize_to_file(tensors, Some(entries), &file).expect("writable");
        written += 1;
    };
    // Each as it is, and cut into ranks.
    let worlds = [(1, 1), (2, 1), (8, 3), (3, 16), (4, 64), (5, 1)];
    for (turn, make) in makes.into_iter().enumerate() {
        let p = make.build();
        let (shape, kv) = (p.spec.shape, p.spec.kv);
        let [row, latent, heads] =
            [shape.row_elems(), shape.kv_lora_rank, shape.num_heads].map(|dim| dim as usize);
        let (pages, page_size) = (kv.num_pages as usize, kv.page_size as usize);
        let (out, lse) = p.expected();
        let narrow =
            |xs: Vec<f64>| -> Vec<u8> { xs.iter().flat_map(|&x| (x as f32).to_le_bytes()).collect() };
        let (out, lse) = (narrow(out), narrow(lse));
        let [k_scale, q_scale] = [p.k_scale, p.q_scale].map(f32::to_le_bytes);
        let ints = |xs: &[i32]| -> Vec<u8> { xs.iter().flat_map(|x| x.to_le_bytes()).collect() };
        let (table, lens, starts) = (ints(&p.block_table), ints(&p.seq_lens), ints(&p.query_start_loc));
        let batch = p.seq_lens.len();
        let (world, interleave) = worlds[turn % worlds.len()];
        let shares = Shares::even(world, interleave).expect("shares");
        let local = |rank| shares.local_seq_lens(rank, &p.seq_lens).expect("lengths");
        let local = ints(&(0..world).flat_map(local).collect::<Vec<_>>());
        let metadata = [
            ("world", world.to_string()),
            ("interleave", interleave.to_string()),
            ("softmax_scale", p.softmax_scale.to_string()),
            ("kv_lora_rank", latent.to_string()),
            ("qk_rope_head_dim", shape.qk_rope_head_dim.to_string()),
            ("page_size", page_size.to_string()),
            ("causal", (make.sees == Sees::Causal).to_string()),
        ];
        let mut tensors = vec![
            ("q", view(of(p.spec.query), &[p.total_q(), heads, row], &p.q)),
            ("kv_cache", view(of(kv.dtype()), &[pages, page_size, row], &p.kv)),
            ("block_table", view(FileDtype::I32, &[batch, p.max_pages], &table)),
            ("seq_lens", view(FileDtype::I32, &[batch], &lens)),
            ("query_start_loc", view(FileDtype::I32, &[batch + 1], &starts)),
            ("k_scale", view(FileDtype::F32, &[1], &k_scale)),
            ("q_scale", view(FileDtype::F32, &[1], &q_scale)),
            ("out", view(FileDtype::F32, &[p.total_q(), heads, latent], &out)),
            ("lse", view(FileDtype::F32, &[p.total_q(), heads], &lse)),
        ];
        write("decode", &metadata, tensors.clone());
        tensors.push(("local_seq_lens", view(FileDtype::I32, &[world as usize, batch], &local)));
        write("dcp_decode", &metadata, tensors);
    }
    for (dtype, lse_base, [world, tokens, heads, size]) in [
        (Dtype::F32, LseBase::Two, [8, 7, 3, 37]),
        (Dtype::Bf16, LseBase::E, [4, 1, 1, 1]),
        (Dtype::F16, LseBase::Two, [3, 4, 5, 127]),
        (Dtype::F32, LseBase::E, [33, 2, 3, 264]),
        (Dtype::F32, LseBase::E, [1, 5, 2, 100]),
    ] {
        let case = SetsCase::new(dtype, lse_base, world, tokens, heads, size);
        let values: Vec<f64> = dtype.decode_all(&case.states).into_iter().map(f64::from).collect();
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        for row in 0..tokens * heads {
            let at = |rank: usize| rank * tokens * heads + row;
            let part = |rank: usize| (&values[at(rank) * size..][..size], f64::from(case.lse[at(rank)]));
            let partials: Vec<_> = (0..world).map(part).collect();
            let (row_out, row_lse) = merge_states_in(lse_base, &partials);
            out.extend(row_out.into_iter().flat_map(|x| (x as f32).to_le_bytes()));
            lse.extend((row_lse as f32).to_le_bytes());
        }
        let lses = Dtype::F32.encode_all(&case.lse);
        let tensors = vec![
            ("outs", view(of(dtype), &[world, tokens, heads, size], &case.states)),
            ("lses", view(FileDtype::F32, &[world, tokens, heads], &lses)),
            ("out", view(FileDtype::F32, &[tokens, heads, size], &out)),
            ("lse", view(FileDtype::F32, &[tokens, heads], &lse)),
        ];
        let base = if lse_base == LseBase::Two { "2" } else { "e" };
        write("dcp_combine", &[("lse_base", base.to_owned())], tensors);
    }
    for (dtype, tokens, heads, size) in
        [(Dtype::F16, 7, 3, 3), (Dtype::Bf16, 1, 1, 1), (Dtype::F32, 4, 5, 127)]
    {
        let case = random_merge(dtype, tokens, heads, size);
        let floats = |xs: &[f32]| Dtype::F32.encode_all(xs);
        let [prefix_lse, suffix_lse, output_lse] =
            [&case.prefix_lse, &case.suffix_lse, &case.output_lse].map(|xs| floats(xs));
        let output = floats(&case.output);
        let dims = [tokens, heads, size];
        let tensors = vec![
            ("prefix_output", view(of(dtype), &dims, &case.prefix_output)),
            ("suffix_output", view(of(dtype), &dims, &case.suffix_output)),
            ("prefix_lse", view(FileDtype::F32, &[heads, tokens], &prefix_lse)),
            ("suffix_lse", view(FileDtype::F32, &[heads, tokens], &suffix_lse)),
            ("output", view(FileDtype::F32, &dims, &output)),
            ("output_lse", view(FileDtype::F32, &[heads, tokens], &output_lse)),
        ];
        write("merge_attn_states", &[], tensors);
    }
    for (input, cache, k_scale) in [
        (Dtype::F32, Dtype::E4m3, 0.37f32),
        (Dtype::F16, Dtype::E4m3, 2.0),
        (Dtype::Bf16, Dtype::F16, 1.0),
        (Dtype::F16, Dtype::F32, 1.0),
    ] {
        let case = random_append((256, 32), 3, input, cache, k_scale);
        let (tokens, pages) = (case.slot_mapping.len(), case.spec.kv.num_pages as usize);
        let slots: Vec<u8> = case.slot_mapping.iter().flat_map(|slot| slot.to_le_bytes()).collect();
        let metadata = [("page_size", "3"), ("kv_lora_rank", "256"), ("qk_rope_head_dim", "32")];
        let k_scale = k_scale.to_le_bytes();
        let tensors = vec![
            ("kv_c", view(of(input), &[tokens, 256], &case.kv_c)),
            ("k_pe", view(of(input), &[tokens, 32], &case.k_pe)),
            ("slot_mapping", view(FileDtype::I64, &[tokens], &slots)),
            ("kv_cache_before", view(of(cache), &[pages, 3, 288], &case.kv_cache_before)),
            ("k_scale", view(FileDtype::F32, &[1], &k_scale)),
            ("kv_cache", view(of(cache), &[pages, 3, 288], &case.kv_cache)),
        ];
        write("concat_and_cache_mla", &metadata.map(|(key, value)| (key, value.to_owned())), tensors);
    }
    written
}

fn of(dtype: Dtype) -> FileDtype {
    match dtype {
        Dtype::F32 => FileDtype::F32,
        Dtype::F16 => FileDtype::F16,
        Dtype::Bf16 => FileDtype::BF16,
        Dtype::E4m3 => FileDtype::F8_E4M3,
    }
}

fn view<'a>(dtype: FileDtype, shape: &[usize], bytes: &'a [u8]) -> TensorView<'a> {
    TensorView::new(dtype, shape.to_vec(), bytes).expect("as many bytes as the shape says")
}

fn every_kind_of_case_passes() {
    let from = folder("more", &[]);
    let passed = format!("{} PASS, 0 FAIL", more_cases(&from));
    let from = from.to_str().expect("text");
    run("decode", &["--backend", "cpu", from]).must(0, &[&passed]);
    #[cfg(feature = "cuda")]
    if mla_support::cuda().is_ok() {
        run("decode", &["--backend", "cuda", from]).must(0, &[&passed]);
    }
    #[cfg(feature = "wgpu")]
    if mla_support::gpu().is_ok() {
        run("decode", &["--backend", "wgpu", from]).must(0, &[&passed]);
    }
}

crate::tests![
    the_repositorys_cases_pass_on_the_cpu,
    #[cfg(feature = "wgpu")]
    the_repositorys_cases_pass_on_wgpu,
    #[cfg(feature = "cuda")]
    the_repositorys_cases_pass_on_cuda_or_it_says_that_there_is_none,
    #[cfg(not(feature = "cuda"))]
    cuda_that_was_not_built_in_says_how_to,
    without_a_wish_the_best_backend_runs_the_cases,
    what_is_saved_can_be_read_and_passes_as_expected,
    wrong_values_fail,
    a_broken_file_does_not_stop_the_others,
    lists_what_there_is,
    bad_arguments_are_named,
    the_batch_is_right_on_the_cpu,
    #[cfg(feature = "wgpu")]
    the_batch_is_right_on_wgpu,
    #[cfg(feature = "cuda")]
    the_batch_is_right_on_cuda_or_it_says_that_there_is_none,
    every_kind_of_case_passes,
];
