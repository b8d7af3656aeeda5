//! Exchanges between ranks that are threads: what arrives, and that whatever goes wrong is an error on every rank, in time.

mod digests;
mod top_k;

use std::time::{Duration, Instant};

use wgpu_mla::communicator::{Communicator, Exchange, InProcess, StepDigest};
use wgpu_mla::cpu::Cpu;
use wgpu_mla::{CombineForm, ContextParallel, ContextParallelSpec, Device, Dtype, Error, LseBase, Result};

/// Longer than any exchange here takes, on a busy machine too.
const PATIENT: Duration = Duration::from_secs(60);
/// For a test that waits it out.
const SHORT: Duration = Duration::from_millis(300);

/// Runs each rank on a thread of its own. A rank that panics gives `None`.
fn ranks<T: Send>(world: u32, timeout: Duration, run: impl Fn(InProcess, u32) -> T + Sync) -> Vec<Option<T>> {
    let group = InProcess::group(world, timeout).expect("a group");
    std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> =
            (0..).zip(group).map(|(rank, end)| scope.spawn(move || run(end, rank))).collect();
        threads.into_iter().map(|thread| thread.join().ok()).collect()
    })
}

fn as_dyn(rank: &InProcess) -> &dyn Communicator<Cpu> {
    rank
}

fn buffer(cpu: &Cpu, bytes: &[u8]) -> wgpu_mla::cpu::Buffer {
    let buffer = cpu.buffer(bytes.len() as u64).expect("a buffer");
    cpu.upload(&buffer, 0, bytes).expect("uploaded");
    buffer
}

/// Byte `i` of what `rank` has for `to`.
fn byte(rank: u32, to: u32, i: usize) -> u8 {
    (rank * 50 + to * 10) as u8 + i as u8
}

fn every_exchange_gives_each_rank_its_bytes() {
    for world in 1..=4 {
        let all = ranks(world, PATIENT, |end, rank| -> Result<()> {
            let (end, cpu) = (as_dyn(&end), Cpu::with_threads(1));
            let part =
                |from: u32, to: u32, bytes| (0..bytes).map(move |i| byte(from, to, i)).collect::<Vec<_>>();
            let parts =
                |bytes| buffer(&cpu, &(0..world).flat_map(|to| part(rank, to, bytes)).collect::<Vec<_>>());
            let room = |bytes: u64| cpu.buffer(bytes * u64::from(world)).expect("a buffer");
            for _ in 0..3 {
                // Two arrays at once, of 4 and 8 bytes a rank.
                let (from, to) = ([parts(4), parts(8)], [room(4), room(8)]);
                let exchange = |i: usize, bytes| Exchange { from: &from[i], to: &to[i], bytes };
                end.all_to_all(&cpu, &[exchange(0, 4), exchange(1, 8)])?;
                for (to, bytes) in to.iter().zip([4, 8]) {
                    let want: Vec<u8> = (0..world).flat_map(|of| part(of, rank, bytes)).collect();
                    assert_eq!(cpu.download(to, want.len() as u64)?, want);
                }
                let from = [4, 8].map(|bytes| buffer(&cpu, &part(rank, 9, bytes)));
                let exchange = |i: usize, bytes| Exchange { from: &from[i], to: &to[i], bytes };
                end.all_gather(&cpu, &[exchange(0, 4), exchange(1, 8)])?;
                for (to, bytes) in to.iter().zip([4, 8]) {
                    let want: Vec<u8> = (0..world).flat_map(|of| part(of, 9, bytes)).collect();
                    assert_eq!(cpu.download(to, want.len() as u64)?, want);
                }
            }
            Ok(())
        });
        assert_eq!(all, vec![Some(Ok(())); world as usize]);
    }
}

fn sums_are_those_of_the_ranks_in_every_dtype() {
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        let all = ranks(3, PATIENT, |end, rank| -> Result<Vec<f32>> {
            let cpu = Cpu::with_threads(1);
            let values: Vec<f32> = (0..12).map(|i| (i as f32 + 1.0) * (rank as f32 + 1.0)).collect();
            let (from, to) = (buffer(&cpu, &dtype.encode_all(&values)), cpu.buffer(16)?);
            let bytes = 4 * dtype.bytes() as u64;
            as_dyn(&end).reduce_scatter(&cpu, &Exchange { from: &from, to: &to, bytes }, dtype)?;
            Ok(dtype.decode_all(&cpu.download(&to, bytes)?))
        });
        for (rank, got) in all.into_iter().enumerate() {
            let want: Vec<f32> = (0..4).map(|i| ((rank * 4 + i) as f32 + 1.0) * 6.0).collect();
            assert_eq!(got, Some(Ok(want)), "{dtype}");
        }
    }
    let all = ranks(1, PATIENT, |end, _| {
        let cpu = Cpu::with_threads(1);
        let [from, to] = [0; 2].map(|_| cpu.buffer(16).expect("a buffer"));
        as_dyn(&end).reduce_scatter(&cpu, &Exchange { from: &from, to: &to, bytes: 4 }, Dtype::E4m3)
    });
    assert!(matches!(&all[..], [Some(Err(Error::DtypeUnsupported { .. }))]), "{all:?}");
}

fn what_does_not_fit_is_refused_before_it_is_sent() {
    let all = ranks(1, SHORT, |end, _| {
        let (end, cpu) = (as_dyn(&end), Cpu::with_threads(1));
        let [a, b] = [0; 2].map(|_| cpu.buffer(16).expect("a buffer"));
        let gather = |from, to, bytes| end.all_gather(&cpu, &[Exchange { from, to, bytes }]);
        assert!(matches!(gather(&a, &b, 20), Err(Error::BufferTooSmall { end: 20, .. })));
        assert!(matches!(gather(&a, &b, 6), Err(Error::Alignment { got: 6, .. })));
        assert!(matches!(gather(&a, &a, 4), Err(Error::Aliased { .. })));
        assert!(end.all_to_all_host(&[]).is_ok_and(|bytes| bytes.is_empty()));
    });
    assert_eq!(all, [Some(())]);
    assert!(matches!(InProcess::group(0, SHORT), Err(Error::Shape { what: "world", .. })));
}

/// What each rank says, which must be an error on all that came back, soon.
fn must_fail(world: u32, timeout: Duration, why: &str, run: impl Fn(InProcess, u32) -> Result<()> + Sync) {
    let begin = Instant::now();
    let all = ranks(world, timeout, run);
    assert!(begin.elapsed() < PATIENT / 2, "an error, but late");
    let errors: Vec<String> =
        all.into_iter().flatten().map(|result| result.expect_err("an error").to_string()).collect();
    assert!(!errors.is_empty());
    for error in errors {
        assert!(error.contains(why) && error.contains("make a new group"), "{error}");
    }
}

const FORMS: [CombineForm; 3] =
    [CombineForm::AllToAll, CombineForm::AllGatherReduceScatter, CombineForm::AllGather];

fn spec(world: u32, form: CombineForm) -> ContextParallelSpec {
    ContextParallelSpec {
        num_heads: 4,
        kv_lora_rank: 256,
        out: Dtype::F32,
        lse_base: LseBase::E,
        rank: 0,
        world,
        max_tokens: 3,
        form,
    }
}

fn gather(end: &InProcess, bytes: usize) -> Result<()> {
    as_dyn(end).all_gather_host(&vec![1; bytes]).map(drop)
}

fn a_rank_that_panics_is_an_error_on_the_others() {
    must_fail(3, PATIENT, "rank 1 panicked before its all_gather", |end, rank| {
        gather(&end, 4)?;
        assert_ne!(rank, 1, "on purpose");
        gather(&end, 4)
    });
}

fn a_rank_that_returns_early_is_an_error_on_the_others() {
    let all = ranks(3, PATIENT, |end, rank| {
        gather(&end, 4)?;
        if rank == 2 { Ok(()) } else { gather(&end, 4) }
    });
    assert_eq!(all[2], Some(Ok(())));
    for error in all[..2].iter().flatten() {
        let text = error.as_ref().expect_err("an error").to_string();
        assert!(text.contains("rank 2 left before its all_gather"), "{text}");
    }
    // One that leaves after the last exchange, as all do, is none.
    assert!(ranks(4, PATIENT, |end, _| gather(&end, 4)).iter().all(|result| *result == Some(Ok(()))));
}

fn other_sizes_and_other_calls_are_an_error_on_every_rank() {
    must_fail(
        3,
        PATIENT,
        "rank 0 calls all_gather with 4 bytes, rank 2 calls all_gather with 8 bytes",
        |end, rank| gather(&end, if rank == 2 { 8 } else { 4 }),
    );
    must_fail(
        2,
        PATIENT,
        "rank 0 calls all_gather with 4 bytes, rank 1 calls all_to_all with 4 bytes",
        |end, rank| {
            if rank == 0 { gather(&end, 4) } else { as_dyn(&end).all_to_all_host(&[1; 4]).map(drop) }
        },
    );
    // The group then stays broken.
    must_fail(2, PATIENT, "with 8 bytes", |end, rank| {
        let first = gather(&end, if rank == 1 { 8 } else { 4 });
        gather(&end, 4).and(first)
    });
}

fn a_rank_that_does_not_come_is_an_error_in_time() {
    must_fail(3, SHORT, "rank 1 did not come to all_gather within 300ms", |end, rank| {
        if rank == 1 {
            std::thread::sleep(3 * SHORT);
        }
        gather(&end, 4)
    });
}

/// An engine of a host's own that says what it likes.
struct Says {
    rank: u32,
    world: u32,
}

impl Communicator<Cpu> for Says {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn world(&self) -> u32 {
        self.world
    }

    fn all_gather_host(&self, mine: &[u8]) -> Result<Vec<u8>> {
        Ok(mine.repeat(self.world as usize))
    }
}

/// Gives other bytes than were asked for.
struct Short;

impl Communicator<Cpu> for Short {
    fn rank(&self) -> u32 {
        0
    }

    fn world(&self) -> u32 {
        2
    }

    fn all_gather_host(&self, mine: &[u8]) -> Result<Vec<u8>> {
        Ok(mine.to_vec())
    }

    fn all_to_all_host(&self, parts: &[u8]) -> Result<Vec<u8>> {
        Ok(parts[..parts.len() / 2].to_vec())
    }
}

fn an_engine_is_not_trusted_with_its_numbers() {
    let cpu = Cpu::with_threads(1);
    let [from, to] = [0; 2].map(|_| cpu.buffer(64).expect("a buffer"));
    let every = |end: &dyn Communicator<Cpu>| {
        let exchange = Exchange { from: &from, to: &to, bytes: 4 };
        let combined = |form| {
            let mut cp = ContextParallel::new(&cpu, spec(2, form)).expect("made");
            cp.prepare(1).and_then(|()| cp.combine(end))
        };
        let mut all = vec![
            ("all_gather", end.all_gather(&cpu, &[exchange])),
            ("all_to_all", end.all_to_all(&cpu, &[exchange])),
            ("reduce_scatter", end.reduce_scatter(&cpu, &exchange, Dtype::F32)),
            ("agree", StepDigest::new().agree(end)),
        ];
        all.extend(FORMS.map(|form| ("combine", combined(form))));
        all
    };
    for (rank, world) in [(7, 2), (2, 2), (u32::MAX, 4), (0, 0), (1, 0), (0, u32::MAX)] {
        let end = Says { rank, world };
        for (what, result) in every(&end) {
            let error = result.expect_err(what);
            let is_place =
                matches!(&error, Error::Shape { what, .. } if what.contains("rank") || *what == "world");
            assert!(
                is_place || matches!(error, Error::RanksDiffer { .. }),
                "{what}, {rank} of {world}: {error}"
            );
        }
        let parts = Communicator::<Cpu>::all_to_all_host(&end, &[1; 8]);
        assert!(matches!(parts, Err(Error::Shape { .. })), "{rank} of {world}: {parts:?}");
    }
    for (what, result) in every(&Short) {
        let error = result.expect_err(what);
        assert!(matches!(error, Error::Exchange { .. }), "{what}: {error}");
    }
    // A place that is not the one in which its bytes come.
    let error =
        StepDigest::new().agree(&Says { rank: 1, world: 2 } as &dyn Communicator<Cpu>).expect_err("both 1");
    let text = "rank 0 has 1 and 0 as rank (of its communicator, and by the order";
    assert!(error.to_string().contains(text), "{error}");
    // All of one place.
    let error =
        StepDigest::new().agree(&Says { rank: 7, world: 8 } as &dyn Communicator<Cpu>).expect_err("all 7");
    assert!(error.to_string().contains("rank 0 has 7 and 0 as rank"), "{error}");
}

fn no_deadline_is_none() {
    let all = ranks(3, Duration::MAX, |end, rank| -> Result<()> {
        for round in 0..3 {
            if rank == round {
                std::thread::sleep(SHORT / 3);
            }
            let got = as_dyn(&end).all_gather_host(&[rank as u8])?;
            assert_eq!(got, [0, 1, 2]);
        }
        as_dyn(&end).all_to_all_host(&[0; 6]).map(drop)
    });
    assert_eq!(all, vec![Some(Ok(())); 3]);
    // One that leaves is still an error.
    must_fail(2, Duration::MAX, "rank 1 panicked before its all_gather", |end, rank| {
        assert_eq!(rank, 0, "on purpose");
        gather(&end, 4)
    });
}

/// Each rank has a constant output for each token, weighted by an LSE of its own.
fn every_form_joins_what_the_ranks_have() {
    let partial = |rank: u32, head: u32, token: u32| {
        let out = f64::from(rank * 7 + head * 3 + token % 11);
        (out, f64::from((rank * 5 + head + token) % 9) * 0.5)
    };
    // For 3 tokens an all-to-all is made as an all-gather, for 200 it is not.
    for (world, form, max_tokens) in [2, 4]
        .into_iter()
        .flat_map(|world| FORMS.map(|form| [3, 200].map(|tokens| (world, form, tokens))))
        .flatten()
    {
        let spec = ContextParallelSpec { max_tokens, ..spec(world, form) };
        let pairs = u64::from(max_tokens) * 4 * (256 * 4 + 4);
        let others = u64::from(world) - 1;
        match (form, max_tokens) {
            (CombineForm::AllToAll, 200) => assert_eq!(spec.bytes_sent(), others * pairs / u64::from(world)),
            (CombineForm::AllToAll | CombineForm::AllGather, _) => {
                assert_eq!(spec.bytes_sent(), others * pairs)
            }
            (CombineForm::AllGatherReduceScatter, _) => assert!(spec.bytes_sent() < others * pairs),
        }
        let all = ranks(world, PATIENT, |end, rank| {
            let cpu = Cpu::with_threads(1);
            let mut cp = ContextParallel::new(&cpu, ContextParallelSpec { rank, ..spec })?;
            let rows =
                || (0..4).flat_map(|head| (0..max_tokens).map(move |token| partial(rank, head, token)));
            let outs: Vec<f32> = rows().flat_map(|(out, _)| [out as f32; 256]).collect();
            let lses: Vec<f32> = rows().map(|(_, lse)| lse as f32).collect();
            cpu.upload(cp.partial().0.buffer, 0, &Dtype::F32.encode_all(&outs))?;
            cpu.upload(cp.partial().1.buffer, 0, &Dtype::F32.encode_all(&lses))?;
            cp.prepare(max_tokens)?;
            cp.combine(as_dyn(&end))?;
            let heads = cp.spec().local_heads();
            let first = if heads == 4 { 0 } else { rank * heads };
            let (out, lse) = (cp.out(), cp.lse());
            let rows = u64::from(heads * max_tokens);
            let outs = Dtype::F32.decode_all(&cpu.download(out.buffer, rows * 256 * 4)?);
            let lses = Dtype::F32.decode_all(&cpu.download(lse.buffer, (lse.offset + rows) * 4)?);
            for (head, token) in (0..heads).flat_map(|head| (0..max_tokens).map(move |token| (head, token))) {
                let parts = || (0..world).map(|rank| partial(rank, first + head, token));
                let sum: f64 = parts().map(|(_, lse)| lse.exp()).sum();
                let want = parts().map(|(out, lse)| out * lse.exp() / sum).sum::<f64>();
                let row = (head * max_tokens + token) as usize;
                for &got in &outs[row * 256..][..256] {
                    assert!(
                        (f64::from(got) - want).abs() < 1e-5 * want.max(1.0),
                        "{spec:?}: {got}, not {want}"
                    );
                }
                let got = f64::from(lses[lse.offset as usize + row]);
                assert!((got - sum.ln()).abs() < 1e-5, "{spec:?}: {got}, not {}", sum.ln());
            }
            Ok::<_, Error>(())
        });
        assert!(all.iter().all(|result| *result == Some(Ok(()))), "{spec:?}: {all:?}");
    }
}

fn one_rank_exchanges_nothing_and_reads_where_the_decode_wrote() {
    let all = ranks(1, PATIENT, |end, _| {
        let cpu = Cpu::with_threads(1);
        let mut cp = ContextParallel::new(&cpu, spec(1, CombineForm::AllToAll)).expect("made");
        cp.prepare(3).expect("prepared");
        let values: Vec<f32> = (0..4 * 3 * 256).map(|i| i as f32).collect();
        cpu.upload(cp.partial().0.buffer, 0, &Dtype::F32.encode_all(&values)).expect("uploaded");
        cp.combine(as_dyn(&end)).expect("combined");
        let out = cp.out();
        assert_eq!(out.head_stride, 3 * 256);
        assert_eq!(cp.partial().0.head_stride, out.head_stride);
        assert_eq!(Dtype::F32.decode_all(&cpu.download(out.buffer, 4 * 3 * 256 * 4).expect("read")), values);
        assert!(matches!(cp.prepare(4), Err(Error::Shape { what: "query tokens", .. })));
    });
    assert_eq!(all, [Some(())]);
    for (world, form, what) in [
        (3, CombineForm::AllToAll, "use CombineForm::AllGather"),
        (3, CombineForm::AllGatherReduceScatter, "use CombineForm::AllGather"),
        (0, CombineForm::AllGather, "world 0"),
    ] {
        let error = ContextParallel::new(&Cpu::with_threads(1), spec(world, form)).expect_err("refused");
        assert!(error.to_string().contains(what), "{error}");
    }
}

crate::tests![
    (in digests, top_k)
    every_exchange_gives_each_rank_its_bytes,
    sums_are_those_of_the_ranks_in_every_dtype,
    what_does_not_fit_is_refused_before_it_is_sent,
    a_rank_that_panics_is_an_error_on_the_others,
    a_rank_that_returns_early_is_an_error_on_the_others,
    other_sizes_and_other_calls_are_an_error_on_every_rank,
    a_rank_that_does_not_come_is_an_error_in_time,
    an_engine_is_not_trusted_with_its_numbers,
    no_deadline_is_none,
    every_form_joins_what_the_ranks_have,
    one_rank_exchanges_nothing_and_reads_where_the_decode_wrote,
];
