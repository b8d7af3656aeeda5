//! Sparse decodes as graphs: other lists of slots.

use super::decodes::check_decode;
use super::uploaded;
use mla_support::graph::{captured, cuda};
use mla_support::paint::{Lengths, Lists, Make, Problem, sequences};
use mla_support::suite::Session;
use mla_support::suite::run::{How, plan_of};
use mla_support::{Ignored, Outcome};
use wgpu_mla::{Capacity, Device, Dtype, Indices, KvLayout, MlaDecodeArgs, PageTable, SplitPolicy, View};

/// The graph is captured with lists of nothing, and replayed with what is written over them: a plan knows nothing of the lists.
fn a_captured_graph_replays_with_other_lists() -> Outcome {
    let cuda = cuda()?;
    let mut served = 0;
    for (cache, records, heads) in
        [(Dtype::Bf16, None, 16), (Dtype::E4m3, None, 6), (Dtype::E4m3, Some(KvLayout::Ds656), 128)]
    {
        let sequences = sequences(&[(150, 2), (90, 1)]);
        let dense = Make { cache, records, heads, sequences, ..Make::default() }.build();
        let drawn = |seed| dense.listed(Lists::drawn(&dense, 129, Lengths::Some, seed));
        let problems = [1, 2, 3].map(|seed| Problem { kv: dense.kv.clone(), ..drawn(seed) });
        let (session, how) =
            (Session::new(&cuda), How { policy: SplitPolicy::FixedTokens(32), ..How::default() });
        if !session.takes_inputs(&problems[0], &how) {
            session.finish("replayed lists");
            continue;
        }
        served += 1;
        let (spec, tokens) = (dense.spec, dense.total_q() as u32);
        let decode = session.decode_of(&problems[0], &how).expect("a decode");
        let plan = plan_of(&problems[0], &how, &decode.tiling()).expect("a plan");
        let mut step = decode.step(Capacity::of(&plan)).expect("a step");
        decode.prepare(&mut step, (&plan, PageTable::Indices)).expect("prepared");
        let (q, kv) = (uploaded(&cuda, &dense.q), uploaded(&cuda, &dense.kv));
        let out = cuda.buffer(spec.out_bytes(tokens)).expect("memory");
        let lse = cuda.buffer(spec.lse_bytes(tokens)).expect("memory");
        let slots = uploaded(&cuda, &vec![0xFF; tokens as usize * 129 * 4]);
        let lengths = uploaded(&cuda, &vec![0; tokens as usize * 4]);
        let topk_length = Some(View::dense(&lengths, 1, 1));
        let layer = MlaDecodeArgs {
            k_scale: dense.k_scale,
            indices: Some(Indices { topk_length, ..Indices::dense(&slots, 129) }),
            ..MlaDecodeArgs::dense(&spec, &q, &kv, &out, &lse, dense.softmax_scale)
        };
        let binding = decode.bind(&layer, tokens).expect("a binding");
        let graph = captured(&cuda, || decode.record(&step, &binding));
        for turn in [0, 1, 2, 0] {
            let lists = problems[turn].lists.as_ref().expect("lists");
            cuda.upload(&slots, 0, bytemuck::cast_slice(&lists.slots)).expect("uploaded");
            let counts = lists.topk_length.as_ref().expect("lengths");
            cuda.upload(&lengths, 0, bytemuck::cast_slice(counts)).expect("uploaded");
            graph.launch().expect("launched");
            check_decode(&cuda, &problems[turn], decode.rounds_weights(), [&out, &lse]);
        }
    }
    if served > 0 { Ok(()) } else { Err(Ignored("lists of slots are not served here".to_owned())) }
}

crate::tests![a_captured_graph_replays_with_other_lists];
