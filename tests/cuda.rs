//! What only the CUDA backend promises: an error without a driver, and graphs that replay with new lengths.

mod common;

use common::close::{Tolerance, close};
use common::paint::{Make, sequences};
use common::suite::run::dense_table;
use wgpu_mla::cuda::Cuda;
use wgpu_mla::cuda::cudarc::driver::sys;
use wgpu_mla::{Backend, Batch, Capacity, Dtype, Error, Layer, Plan, Policy};

/// A card, or `None` once it has said why there is none here.
fn cuda() -> Option<Cuda> {
    match Cuda::new(0) {
        Ok(cuda) => Some(cuda),
        Err(error) => {
            assert!(std::env::var("MLA_REQUIRE_CUDA").is_err(), "{error}");
            eprintln!("NOT RUN: {error}");
            None
        }
    }
}

#[test]
fn no_card_is_an_error_that_names_the_cure() {
    // There is none of that number, with a driver or without.
    let error = Cuda::new(1_000).expect_err("no machine has so many cards");
    assert!(matches!(error, Error::NoCuda { .. }), "{error:?}");
    assert!(error.to_string().contains("install NVIDIA's driver"), "{error}");
}

/// The graph is captured with the first batch, and replayed with others that fit the step: longer and shorter sequences, more and fewer splits.
#[test]
fn a_captured_graph_replays_with_new_lengths() {
    let Some(cuda) = cuda() else { return };
    let batches: [&[(u32, u32)]; 4] =
        [&[(70, 1), (33, 1)], &[(150, 1), (90, 1)], &[(5, 1)], &[(0, 1), (149, 2)]];
    for cache in [Dtype::Bf16, Dtype::E4m3, Dtype::F32] {
        let problems =
            batches.map(|lens| Make { cache, sequences: sequences(lens), ..Make::default() }.build());
        let spec = problems[0].spec;
        let decode = cuda.decode(&spec, None).expect("a row");
        let plans = problems.each_ref().map(|problem| {
            let batch = Batch::new(&problem.seq_lens, &problem.query_start_loc);
            Plan::new(&spec, &cuda.tiling(&decode), &batch, Policy::FixedTokens(32)).expect("a plan")
        });
        let capacity = plans.iter().map(Capacity::of).fold(Capacity::default(), Capacity::max);
        let mut step = cuda.step(&decode, capacity).expect("a step");
        let (heads, latent) = (spec.shape.num_heads as usize, spec.shape.kv_lora_rank as usize);
        let most = |bytes: fn(&common::paint::Problem) -> usize| {
            problems.iter().map(bytes).max().unwrap_or(0) as u64
        };
        let q = cuda.buffer(most(|problem| problem.q.len())).expect("memory");
        let kv = cuda.buffer(most(|problem| problem.kv.len())).expect("memory");
        let out = cuda.buffer(3 * (heads * latent * 4) as u64).expect("memory");
        let lse = cuda.buffer(3 * (heads * 4) as u64).expect("memory");
        let layer = Layer {
            k_scale: problems[0].k_scale,
            ..Layer::dense(&spec, &q, &kv, &out, &lse, problems[0].softmax_scale)
        };
        let binding = cuda.bind(&decode, 3, &layer).expect("a binding");

        let prepare = |step: &mut _, i: usize| {
            cuda.upload(&q, 0, &problems[i].q).expect("uploaded");
            cuda.upload(&kv, 0, &problems[i].kv).expect("uploaded");
            cuda.prepare(&decode, step, &plans[i], dense_table(&problems[i])).expect("prepared");
        };
        prepare(&mut step, 0);
        let stream = cuda.stream();
        stream
            .begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            .expect("a capture");
        decode.record(&step, &binding).expect("recorded");
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = stream.end_capture(flags).expect("captured").expect("a graph");

        for turn in [0, 1, 2, 3, 0] {
            let problem = &problems[turn];
            prepare(&mut step, turn);
            assert_eq!(step.capacity(), capacity);
            graph.launch().expect("launched");
            let rows = problem.total_q() * heads;
            let got = |buffer, elems: usize| {
                Dtype::F32.decode_all(&cuda.download(buffer, elems as u64 * 4).expect("read"))
            };
            let (want_out, want_lse) = problem.expected();
            let tolerance = Tolerance::decode(
                cache,
                spec.query,
                spec.out,
                cuda.rounds_weights(&decode),
                problem.largest_latent(),
                latent,
            );
            close(&problem.name, &got(&out, rows * latent), &want_out, &tolerance)
                .into_result()
                .expect("right");
            close(&problem.name, &got(&lse, rows), &want_lse, &Tolerance::lse())
                .into_result()
                .expect("right");
        }
    }
}
