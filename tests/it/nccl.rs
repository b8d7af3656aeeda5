//! NCCL on one card: a group of one rank, whose exchanges are in the stream and in captured graphs. Two cards: examples/context_parallel.

use std::time::Duration;

use mla_support::graph::cuda;
use mla_support::{Ignored, Outcome, ignored_unless_required};
use wgpu_mla::communicator::{Communicator, Exchange, Nccl, NcclId, StepDigest};
use wgpu_mla::cuda::{Buffer, Cuda};
use wgpu_mla::{CombineForm, ContextParallel, ContextParallelSpec, Device, Dtype, Error, LseBase};

const PATIENT: Duration = Duration::from_secs(60);

/// A card and a group of it alone. With `MLA_REQUIRE_NCCL=1` the lack of the library is a failure.
fn alone() -> Result<(Cuda, Nccl), Ignored> {
    let cuda = cuda()?;
    let id = NcclId::new().map_err(|error| ignored_unless_required("MLA_REQUIRE_NCCL", error))?;
    let nccl = Nccl::new(&cuda, id, 0, 1, PATIENT).expect("a group of one");
    Ok((cuda, nccl))
}

fn holds(cuda: &Cuda, buffer: &Buffer, want: &[f32]) {
    let got = cuda.download(buffer, want.len() as u64 * 4).expect("read");
    assert_eq!(Dtype::F32.decode_all(&got), want);
}

fn exchanges_are_part_of_a_graph() -> Outcome {
    let (cuda, nccl) = alone()?;
    assert!(Communicator::in_stream_order(&nccl));
    let buffers: [Buffer; 4] = [0; 4].map(|_| cuda.buffer(64).expect("a buffer"));
    let [a, b, c, d] = &buffers;
    let exchange = |from, to| Exchange { from, to, bytes: 64 };
    let record = || {
        nccl.all_to_all(&cuda, &[exchange(a, b)])?;
        nccl.all_gather(&cuda, &[exchange(b, c)])?;
        nccl.reduce_scatter(&cuda, &exchange(c, d), Dtype::F32)
    };
    record().expect("put on the stream");
    nccl.wait(&cuda).expect("done");
    let graph = cuda.capture(record).expect("captured");
    for round in 0..1000 {
        let values: Vec<f32> = (0..16).map(|i| (i * 1000 + round) as f32).collect();
        cuda.upload(a, 0, &Dtype::F32.encode_all(&values)).expect("uploaded");
        graph.launch().expect("launched");
        nccl.wait(&cuda).expect("done");
        if round % 100 == 0 {
            holds(&cuda, d, &values);
        }
    }
    // The graph keeps the communicator and the memory.
    drop((nccl, buffers));
    graph.launch().expect("launched");
    cuda.stream().synchronize().expect("done");
    Ok(())
}

fn host_bytes_of_any_length_come_back() -> Outcome {
    let (cuda, nccl) = alone()?;
    for bytes in [0, 1, 3, 4, 1000, 7, 100_001] {
        let mine: Vec<u8> = (0..bytes).map(|i| i as u8).collect();
        assert_eq!(nccl.all_gather_host(&mine).expect("gathered"), mine);
        assert_eq!(nccl.all_to_all_host(&mine).expect("exchanged"), mine);
    }
    StepDigest::new().agree(&nccl as &dyn Communicator<Cuda>).expect("of one mind");
    // A host's exchange, and a wait, are of no use in a capture, and do not break it.
    let (a, b) = (cuda.buffer(16).expect("a buffer"), cuda.buffer(16).expect("a buffer"));
    let graph = cuda.capture(|| {
        assert!(matches!(nccl.all_gather_host(&[1]), Err(Error::LayoutMismatch { .. })));
        assert!(matches!(nccl.wait(&cuda), Err(Error::LayoutMismatch { .. })));
        nccl.all_gather(&cuda, &[Exchange { from: &a, to: &b, bytes: 16 }])
    });
    graph.expect("captured").launch().expect("launched");
    nccl.wait(&cuda).expect("done");
    Ok(())
}

fn what_cannot_be_is_refused() -> Outcome {
    let (cuda, nccl) = alone()?;
    let id = NcclId::new().expect("an id");
    assert!(matches!(Nccl::new(&cuda, id, 2, 2, PATIENT), Err(Error::Shape { what: "rank", .. })));
    // The other rank never comes.
    let error = Nccl::new(&cuda, id, 0, 2, Duration::from_secs(2)).expect_err("nobody came");
    assert!(matches!(&error, Error::Exchange { what: "joining the group", .. }), "{error}");
    let other = self::cuda()?;
    let (a, b) = (other.buffer(16).expect("a buffer"), other.buffer(16).expect("a buffer"));
    let foreign = nccl.all_gather(&other, &[Exchange { from: &a, to: &b, bytes: 16 }]);
    assert!(matches!(foreign, Err(Error::LayoutMismatch { .. })), "{foreign:?}");
    Ok(())
}

/// In a group of one: two cards are `examples/context_parallel`'s.
fn another_rank_than_the_communicators_is_refused() -> Outcome {
    let (cuda, nccl) = alone()?;
    for form in [CombineForm::AllToAll, CombineForm::AllGatherReduceScatter, CombineForm::AllGather] {
        let spec = ContextParallelSpec {
            num_heads: 4,
            kv_lora_rank: 256,
            out: Dtype::F32,
            lse_base: LseBase::E,
            rank: 1,
            world: 2,
            max_tokens: 200,
            form,
        };
        let mut cp = ContextParallel::new(&cuda, spec).expect("made");
        cp.prepare(1).expect("prepared");
        for refused in [cp.combine(&nccl), cp.digest().agree(&nccl as &dyn Communicator<Cuda>)] {
            assert!(matches!(refused, Err(Error::RanksDiffer { .. })), "{form:?}: {refused:?}");
        }
    }
    nccl.wait(&cuda).expect("nothing is on the stream");
    Ok(())
}

crate::tests![
    exchanges_are_part_of_a_graph,
    host_bytes_of_any_length_come_back,
    what_cannot_be_is_refused,
    another_rank_than_the_communicators_is_refused
];
