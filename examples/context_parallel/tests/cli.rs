//! Runs the program: that every form is right over devices of any kinds, and that a rank that dies is an error in time.

use std::process::{Command, Output};
use std::time::{Duration, Instant};

fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_context_parallel")).args(args).output().expect("it starts")
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

fn must(args: &[&str], status: i32, want: &[&str]) {
    let output = run(args);
    let text = text(&output);
    assert_eq!(output.status.code(), Some(status), "{args:?}\n{text}");
    for want in want {
        assert!(text.contains(want), "{args:?}: no {want:?}\n{text}");
    }
}

/// The cases of two ranks, and of others by two; five batches of its own.
#[test]
fn two_and_four_ranks_on_the_cpu() {
    let of_two =
        ["7 cases and batches, 42 results of ranks: PASS", "dcp_decode_bf16_w2_i1 (ag_rs)", "e4m3 (a2a)"];
    must(&["--devices", "cpu,cpu", "--timeout", "60"], 0, &of_two);
    let of_four = ["8 cases and batches, 80 results of ranks: PASS", "dcp_combine_w4_base2 (ag)"];
    must(&["--devices=cpu,cpu,cpu,cpu", "--timeout", "60"], 0, &of_four);
}

#[test]
fn uneven_shares_of_every_interleave() {
    for interleave in ["1", "5", "64"] {
        let args =
            ["--devices", "cpu,cpu,cpu", "--shares", "7,2,1", "--interleave", interleave, "--timeout", "60"];
        must(&args, 0, &["8 cases and batches, 66 results of ranks: PASS", "dcp_combine_w3_e (a2a)"]);
    }
}

#[test]
#[cfg(feature = "wgpu")]
fn unlike_devices_together() {
    let output = run(&["--devices", "cpu,wgpu", "--shares", "1,3", "--timeout", "120"]);
    let text = text(&output);
    if text.contains("no GPU adapter") {
        assert!(std::env::var("MLA_REQUIRE_GPU").as_deref() != Ok("1"), "{text}");
        return eprintln!("not run: no GPU adapter");
    }
    assert!(output.status.success() && text.contains("42 results of ranks: PASS"), "{text}");
}

#[test]
fn a_rank_that_dies_is_an_error_on_the_others_in_time() {
    let begin = Instant::now();
    let args = ["--devices", "cpu,cpu,cpu", "--kill-after", "2", "--timeout", "30"];
    must(
        &args,
        1,
        &[
            "rank 0: all_gather between the ranks failed: rank 2 panicked",
            "rank 1: all_gather between the ranks failed: rank 2 panicked",
            "rank 2: it panicked",
            "FAIL",
        ],
    );
    assert!(begin.elapsed() < Duration::from_secs(25), "sooner than the time-out");
}

#[test]
fn a_device_that_is_not_here_is_an_error_on_every_rank() {
    must(
        &["--devices", "cpu,tpu", "--timeout", "20"],
        1,
        &["must be cpu, wgpu, cuda", "rank 1 left", "FAIL"],
    );
}

#[test]
fn bad_arguments_are_named() {
    for (args, want) in [
        (&["--frobnicate"][..], "no such option"),
        (&["--devices"], "--devices needs a value"),
        (&["--form", "ring"], "must be a2a, ag_rs or ag"),
        (&["--shares", "1,2,3", "--devices", "cpu,cpu"], "--shares names 3 ranks, there are 2"),
        (&["--shares", "0,0"], "give at least one rank a weight above 0"),
        (&["--interleave", "0"], "--interleave 0: must be a whole number from 1 to"),
        (&["--timeout", "0"], "must be seconds above 0"),
        (&["--rank", "0"], "go together"),
        (&["--rank", "0", "--world", "2", "--id-file", "x"], "--engine nccl"),
        (&["--rank", "2", "--world", "2", "--id-file", "x"], "the rank is below the world"),
        (&["--steps", "0"], "--steps 0: must be a whole number from 1 to"),
        (&["--steps=-1"], "--steps -1: must be a whole number from 1 to"),
        (&["--steps", "4294967296"], "--steps 4294967296: must be a whole number from 1 to 4294967295"),
        (&["--steps", "2.5"], "--steps 2.5: must be a whole number"),
        (&["--steps="], "--steps needs a value"),
        (&["--devices", ","], "--devices ,: a name is empty; separate names by one comma each"),
        (&["--devices", "cpu,,cpu"], "a name is empty"),
        (&["--devices", "cpu,"], "a name is empty"),
        (&["--devices", " "], "a name is empty"),
        (&["--devices="], "--devices needs a value"),
        (&["--shares", ",", "--devices", "cpu,cpu"], "--shares ,: a name is empty"),
        (&["--shares", "1,-1"], "--shares -1: must be a whole number from 0 to"),
        (&["--shares", "1,4294967295"], "must be at most 65,536 without a common factor"),
        (&["--interleave", "-16"], "--interleave -16: must be a whole number from 1 to"),
        (&["--timeout", "-1"], "must be seconds above 0, below 1000000"),
        (&["--timeout", "nan"], "must be seconds above 0"),
        (&["--timeout", "1e30"], "must be seconds above 0, below 1000000"),
        (&["--kill-after", "0"], "--kill-after 0: must be a whole number from 1 to"),
        (&["--kill-after", "4"], "--kill-after 4 of 3 steps: must be 1 to --steps"),
        (&["--kill-after", "1", "--bench"], "is not of --bench"),
        (&["--bench", "--tokens", "0"], "--tokens 0: must be a whole number from 1 to 1073741824"),
        (
            &["--bench", "--tokens", "4294967295"],
            "--tokens 4294967295: must be a whole number from 1 to 1073741824",
        ),
        (&["--tokens", "64"], "--tokens is of the bench: give --bench too"),
        (&["--bench", "--parts", "long,short"], "--parts short: must be of long, exchange, replays, plain"),
        (&["--bench", "--parts", ","], "--parts ,: a name is empty"),
        (&["--parts", "long"], "--parts is of the bench: give --bench too"),
        (&["--bench=yes"], "--bench has no value"),
        (&["--blocking"], "--blocking is of NCCL: give --engine nccl too"),
    ] {
        must(args, 2, &[want, "see --help"]);
    }
    for (device, want) in [
        ("wgpu:1", "only cuda has a number"),
        ("cpu:0", "only cuda has a number"),
        ("cuda:x", "\"x\" must be a card's number, as in cuda:1"),
        ("cuda:-1", "\"-1\" must be a card's number, as in cuda:1"),
    ] {
        must(&["--devices", &format!("cpu,{device}"), "--timeout", "20"], 1, &[want, "FAIL"]);
    }
    must(&["--help"], 0, &["--devices LIST", "Status 0"]);
    must(&["nowhere.safetensors"], 1, &["nowhere.safetensors"]);
}

#[cfg(unix)]
#[test]
fn words_that_are_not_utf8_are_refused() {
    use std::os::unix::ffi::OsStrExt;
    let mut command = Command::new(env!("CARGO_BIN_EXE_context_parallel"));
    let output = command.arg(std::ffi::OsStr::from_bytes(b"\xff")).output().expect("it starts");
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output).contains("must be UTF-8"), "{}", text(&output));
}

#[test]
#[cfg(not(feature = "nccl"))]
fn nccl_that_was_not_built_in_says_how_to() {
    must(&["--engine", "nccl"], 1, &["--features nccl"]);
}
