//! A rank that stops between two layers.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use wgpu_mla::communicator::{Communicator, InProcess};
use wgpu_mla::cpu::Cpu;
use wgpu_mla::{CombineForm, ContextParallel, ContextParallelSpec, Dtype, Error, LseBase, Result};

/// One of two ranks combines a layer, and stays away from the next without leaving the group: an error on the other in time, in every
/// form, and again for each later call. A new group works with the same buffers and ops.
fn a_rank_that_stops_between_layers() {
    let timeout = Duration::from_millis(200);
    for form in [CombineForm::AllToAll, CombineForm::AllGatherReduceScatter, CombineForm::AllGather] {
        let groups = [InProcess::group(2, timeout), InProcess::group(2, Duration::from_secs(60))];
        let [first, second] = groups.map(|group| group.expect("a group"));
        let done = Barrier::new(2);
        std::thread::scope(|scope| {
            for (rank, (end, next)) in (0..).zip(first.into_iter().zip(second)) {
                let done = &done;
                scope.spawn(move || {
                    let (mut cp, end) = (joined(rank, form).expect("made"), end);
                    cp.prepare(3).expect("prepared");
                    let combine = |cp: &ContextParallel<Cpu>, end: &InProcess| {
                        cp.combine(end as &dyn Communicator<Cpu>)
                    };
                    assert_eq!(combine(&cp, &end), Ok(()));
                    if rank == 0 {
                        for _ in 0..2 {
                            let begin = Instant::now();
                            let error = combine(&cp, &end).expect_err("rank 1 does not come");
                            assert!(matches!(error, Error::Exchange { .. }), "{error}");
                            assert!(error.to_string().contains("rank 1 did not come"), "{error}");
                            assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
                        }
                    }
                    done.wait();
                    if rank == 1 {
                        let error = combine(&cp, &end).expect_err("it is too late");
                        assert!(matches!(error, Error::Exchange { .. }), "{error}");
                    }
                    cp.prepare(2).expect("prepared");
                    assert_eq!(combine(&cp, &next), Ok(()));
                });
            }
        });
    }
}

fn joined(rank: u32, form: CombineForm) -> Result<ContextParallel<Cpu>> {
    let spec = ContextParallelSpec {
        num_heads: 4,
        kv_lora_rank: 256,
        out: Dtype::F32,
        lse_base: LseBase::E,
        rank,
        world: 2,
        max_tokens: 3,
        form,
    };
    ContextParallel::new(&Cpu::with_threads(1), spec)
}

crate::tests![a_rank_that_stops_between_layers];
