//! A graph of a layer that is launched while another thread runs the same layer: both use its workspace, each as a whole.

use mla_support::Outcome;
use mla_support::graph::{captured, cuda};
use mla_support::paint::Rng;
use wgpu_mla::cuda::Buffer;
use wgpu_mla::{Capacity, Device, Dtype, LayerBatch, PagePool, SplitPolicy};

use super::layers::{Inputs, Model, draw, input_elems, spec_of, weights};

fn a_graph_and_another_thread_take_turns() -> Outcome {
    let cuda = &cuda()?;
    let spec = spec_of(Dtype::F32, Dtype::F16);
    let mut rng = Rng(21);
    let (weights, k_scale) = weights(&mut rng, &spec);
    let mut model = Model::new(cuda, &spec, &weights, k_scale, Capacity::default());
    let mut pool = PagePool::new(spec.kv).expect("a pool");
    // Two prompts in several chunks of the workspace, and a sequence that is decoded.
    let requests = [(pool.add(), 1), (pool.add(), 40), (pool.add(), 23)];
    let (arrays, copies) = pool.layer_step(&requests).expect("pages");
    let inputs: Vec<Inputs> = (0..weights.len())
        .map(|_| input_elems(&spec).map(|elems| draw(&mut rng, spec.dtype, arrays.num_tokens() * elems, 0.4)))
        .collect();
    let batch = LayerBatch { shared_prefixes: &[], ..arrays.batch() };
    model.prepare(&inputs, &copies, (&batch, SplitPolicy::FixedTokens(8)), &[]);

    let read = |out: &Buffer| cuda.download(out, out.bytes()).expect("read");
    let [first, second, ..] = &model.layers[..] else { panic!("two layers") };
    let (layer, step) = (&model.layer, &model.step);
    let graph = captured(cuda, || layer.record(step, &first.binding));
    graph.launch().expect("launched");
    layer.run(step, &second.binding).expect("runs");
    let alone = [read(&first.out), read(&second.out)];
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            (0..300)
                .filter(|_| {
                    layer.run(step, &second.binding).expect("runs");
                    read(&second.out) != alone[1]
                })
                .count()
        });
        let wrong = (0..300).filter(|_| {
            graph.launch().expect("launched");
            read(&first.out) != alone[0]
        });
        assert_eq!(
            (wrong.count(), other.join().expect("no panic")),
            (0, 0),
            "runs with other bits than alone"
        );
    });
    Ok(())
}

crate::tests![a_graph_and_another_thread_take_turns];
