//! What ranks must have in common: a step, a layer, a form of combining and their numbers. What differs is an error on every rank that
//! names it, before anything is exchanged.

use wgpu_mla::communicator::StepDigest;
use wgpu_mla::cpu::Cpu;
use wgpu_mla::{
    Batch, CombineForm, ContextParallel, ContextParallelSpec, Dtype, Error, KvSpec, LseBase, Mask, MlaDecode,
    MlaDecodeArgs, MlaShape, Shares,
};

use super::{FORMS, PATIENT, SHORT, as_dyn, ranks, spec};

fn a_step_that_differs_is_an_error_on_every_rank_that_names_what() {
    let (lens, starts) = ([100, 7], [0, 1, 2]);
    let agree = |change: fn(StepDigest, &Batch<'_>) -> StepDigest| {
        ranks(3, PATIENT, move |end, rank| {
            let batch = Batch::new(&lens, &starts);
            let shares = Shares::weighted(&[200, 1, 1], 16).expect("shares");
            let same = StepDigest::new().step(5).batch(&batch).shares(&shares);
            let digest = if rank == 1 { change(same, &batch) } else { same };
            digest.agree(as_dyn(&end)).map_err(|error| error.to_string())
        })
    };
    assert_eq!(agree(|same, _| same), [Some(Ok(())), Some(Ok(())), Some(Ok(()))]);
    let must_say = |text: &str, change| {
        for result in agree(change) {
            let error = result.expect("no panic").expect_err("differs");
            assert!(error.contains(text), "{error}");
        }
    };
    must_say("the ranks differ in step: rank 0 has 5, rank 1 has 6", |same, _| same.step(6));
    must_say("the ranks differ in the shares of the context", |same, _| {
        same.shares(&Shares::weighted(&[200, 1, 1], 8).expect("shares"))
    });
    // The first blocks of both are rank 0's.
    must_say("the ranks differ in the shares of the context", |same, _| {
        same.shares(&Shares::weighted(&[201, 1, 1], 16).expect("shares"))
    });
    must_say("the ranks differ in seq_lens: ", |same, batch| {
        same.batch(&Batch { seq_lens: &[100, 8], ..*batch })
    });
    must_say("the ranks differ in seq_lens[0]: rank 0 has 100, rank 1 has 99", |same, batch| {
        same.batch(&Batch { seq_lens: &[99, 7], ..*batch })
    });
    must_say("the number of sequences: rank 0 has 2, rank 1 has 1", |same, _| {
        same.batch(&Batch::new(&[100], &[0, 1]))
    });
    must_say("the ranks differ in query_start_loc", |same, batch| {
        same.batch(&Batch { query_start_loc: &[0, 1, 3], ..*batch })
    });
    must_say("the ranks differ in the mask", |same, batch| {
        same.batch(&Batch { mask: Mask::CausalFrom(5), ..*batch })
    });
    let of = |mask| StepDigest::new().batch(&Batch { mask, ..Batch::new(&lens, &starts) });
    assert_ne!(of(Mask::CausalFrom(5)), of(Mask::CausalFrom(6)));
    assert_ne!(of(Mask::Bounds(&[5, 6])), of(Mask::Bounds(&[5, 7])));
    must_say("the ranks differ in num_heads: rank 0 has none, rank 1 has 4", |same, _| {
        same.spec(&decode(Dtype::F16))
    });
    must_say("the ranks differ in softmax_scale: rank 0 has none, rank 1 has 0.25", |same, _| {
        same.layer(&layer(0.25, LseBase::E))
    });
    // All of three ranks have shares of two.
    let all = ranks(3, PATIENT, |end, _| {
        StepDigest::new().shares(&Shares::even(2, 1).expect("shares")).agree(as_dyn(&end))
    });
    for result in all {
        let error = result.expect("no panic").expect_err("differs").to_string();
        assert!(
            error.contains("rank 0 has 2 and 3 as world (of its Shares, and of its communicator)"),
            "{error}"
        );
    }
}

fn decode(query: Dtype) -> MlaDecode {
    let shape = MlaShape { num_heads: 4, kv_lora_rank: 256, qk_rope_head_dim: 32 };
    MlaDecode {
        shape,
        kv: KvSpec { layout: Dtype::F32.into(), page_size: 4, num_pages: 2 },
        query,
        out: Dtype::F32,
    }
}

fn layer(softmax_scale: f32, lse_base: LseBase) -> MlaDecodeArgs<()> {
    MlaDecodeArgs { lse_base, ..MlaDecodeArgs::dense(&decode(Dtype::F32), (), (), (), (), softmax_scale) }
}

/// What the decodes have in common, with each other and with what combines them.
fn layers_that_differ_are_an_error_on_every_rank() {
    let says = |of: fn(StepDigest, u32) -> StepDigest, text: &str| {
        let all = ranks(2, PATIENT, |end, rank| {
            let spec = ContextParallelSpec { rank, ..spec(2, CombineForm::AllToAll) };
            let cp = ContextParallel::new(&Cpu::with_threads(1), spec).expect("made");
            of(cp.digest(), rank).agree(as_dyn(&end)).map_err(|error| error.to_string())
        });
        for result in all {
            let said = result.expect("no panic").err().unwrap_or_default();
            assert!(said.contains(text) && said.is_empty() == text.is_empty(), "{said}, not {text}");
        }
    };
    let same = |all: StepDigest, _| all.spec(&decode(Dtype::F32)).layer(&layer(0.1, LseBase::E));
    says(same, "");
    says(
        |all, rank| all.layer(&layer(if rank == 0 { 0.1 } else { 0.11 }, LseBase::E)),
        "the ranks differ in softmax_scale: rank 0 has 0.1, rank 1 has 0.11",
    );
    says(
        |all, rank| {
            let one = layer(0.1, LseBase::E);
            all.layer(&MlaDecodeArgs { q_scale: if rank == 0 { 2.0 } else { 0.5 }, ..one })
        },
        "the ranks differ in q_scale: rank 0 has 2.0, rank 1 has 0.5",
    );
    // A rank's cache has a scale of its own.
    says(|all, rank| all.layer(&MlaDecodeArgs { k_scale: rank as f32 + 1.0, ..layer(0.1, LseBase::E) }), "");
    says(
        |all, rank| all.layer(&layer(0.1, if rank == 0 { LseBase::E } else { LseBase::Two })),
        "the ranks differ in lse_base of the decode: rank 0 has E, rank 1 has Two",
    );
    says(
        |all, _| all.layer(&layer(0.1, LseBase::Two)),
        "rank 0 has E and Two as lse_base (of its ContextParallelSpec, and of its decode)",
    );
    says(
        |all, rank| {
            let second = if rank == 0 { 0.1 } else { 0.11 };
            [0.2, second].into_iter().fold(all, |all, scale| all.layer(&layer(scale, LseBase::E)))
        },
        "the scales of the layers after the first",
    );
    says(
        |all, _| {
            let one = decode(Dtype::F32);
            all.spec(&MlaDecode { shape: MlaShape { num_heads: 8, ..one.shape }, ..one })
        },
        "rank 0 has 4 and 8 as num_heads (of its ContextParallelSpec, and of its decode)",
    );
}

fn another_world_or_form_is_an_error_on_every_rank() {
    // A group of two, of which one rank was set up for four.
    let all = ranks(2, PATIENT, |end, rank| {
        let cpu = Cpu::with_threads(1);
        let world = if rank == 0 { 2 } else { 4 };
        let cp = ContextParallel::new(&cpu, spec(world, CombineForm::AllToAll)).expect("made");
        cp.digest().agree(as_dyn(&end))
    });
    for result in all {
        let error = result.expect("no panic").expect_err("differs").to_string();
        assert!(error.contains("the ranks differ in world: rank 0 has 2, rank 1 has 4"), "{error}");
    }
    // All were set up for another world than the group's.
    let all = ranks(2, PATIENT, |end, _| {
        let cpu = Cpu::with_threads(1);
        let mut cp = ContextParallel::new(&cpu, spec(4, CombineForm::AllToAll)).expect("made");
        cp.prepare(1).expect("prepared");
        let combined = cp.combine(as_dyn(&end));
        let says = |error: &Error| error.to_string().contains("has 4 and 2 as world (of its ContextParallel");
        assert!(combined.as_ref().is_err_and(says), "{combined:?}");
        cp.digest().agree(as_dyn(&end))
    });
    assert!(all.iter().all(|result| matches!(result, Some(Err(Error::RanksDiffer { .. })))), "{all:?}");
    let all = ranks(2, PATIENT, |end, rank| {
        let form = if rank == 0 { CombineForm::AllToAll } else { CombineForm::AllGather };
        let cp = ContextParallel::new(&Cpu::with_threads(1), ContextParallelSpec { rank, ..spec(2, form) })
            .expect("made");
        cp.digest().agree(as_dyn(&end))
    });
    for result in all {
        let error = result.expect("no panic").expect_err("differs").to_string();
        assert!(
            error.contains("form of the ContextParallelSpec: rank 0 has AllToAll, rank 1 has AllGather"),
            "{error}"
        );
    }
}

/// Both were set up as rank 0: rank 1 would merge the heads of the other, or weigh its output by the other's LSEs.
fn another_rank_than_the_communicators_is_an_error_before_anything_is_exchanged() {
    for (form, max_tokens) in FORMS.into_iter().flat_map(|form| [(form, 3), (form, 200)]) {
        let all = ranks(2, SHORT, |end, rank| {
            let spec = ContextParallelSpec { max_tokens, ..spec(2, form) };
            let mut cp = ContextParallel::new(&Cpu::with_threads(1), spec).expect("made");
            cp.prepare(1).expect("prepared");
            // Every rank is told.
            let agreed = cp.digest().agree(as_dyn(&end)).expect_err("differs").to_string();
            let text = "rank 1 has 0 and 1 as rank (of its ContextParallelSpec, and of its communicator): \
                        make each with the rank and world of its communicator";
            assert!(agreed.contains(text), "{agreed}");
            // Rank 0 says nothing of its own: nothing comes of rank 1.
            (rank == 1).then(|| cp.combine(as_dyn(&end)))
        });
        let error =
            all[1].as_ref().and_then(Option::as_ref).expect("no panic").as_ref().expect_err("differs");
        assert!(matches!(error, Error::RanksDiffer { first: 1, other: 1, .. }), "{form:?}: {error}");
        let text = "rank 1 has 0 and 1 as rank (of its ContextParallel, and of its communicator): make the ContextParallel";
        assert!(error.to_string().contains(text), "{error}");
    }
}

crate::tests![
    a_step_that_differs_is_an_error_on_every_rank_that_names_what,
    layers_that_differ_are_an_error_on_every_rank,
    another_world_or_form_is_an_error_on_every_rank,
    another_rank_than_the_communicators_is_an_error_before_anything_is_exchanged,
];
