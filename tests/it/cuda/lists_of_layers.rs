//! Layers that choose what they attend, as one graph of all layers: captured once, and replayed while the step's generation is the same.

use mla_support::Outcome;
use mla_support::graph::{captured, cuda};
use mla_support::suite::layer_lists::sparse;
use mla_support::suite::selecting::{RunsLayers, Selecting, Sparse};
use wgpu_mla::cuda::{Cuda, Graph};
use wgpu_mla::{Binding, Capacity, Compiled, Dtype, IndexFormat, MlaLayer, Result, SplitPolicy, Step};

/// More than the decodes of any batch here, so that their tables never grow.
const DECODES: Capacity =
    Capacity { items: 1024, queries: 1024, pages: 1024, merges: 1024, merge_partials: 1024, partials: 1024 };

/// The last graph with its generation, and whether each step replayed one.
#[derive(Default)]
struct Graphs {
    graph: Option<(u64, Graph)>,
    replayed: Vec<bool>,
}

impl RunsLayers<Cuda> for Graphs {
    fn run(
        &mut self,
        layer: &Compiled<MlaLayer, Cuda>,
        step: &Step<MlaLayer, Cuda>,
        layers: &[Binding<MlaLayer, Cuda>],
    ) -> Result<()> {
        let generation = step.generation();
        let serves = self.graph.as_ref().is_some_and(|(captured_in, _)| *captured_in == generation);
        if !serves {
            if let Some((_, stale)) = &self.graph {
                let refused = stale.launch().expect_err("a graph of another generation");
                assert!(refused.to_string().contains("capture the graph again"), "{refused}");
            }
            let graph = captured(layer.device(), || {
                layers.iter().try_for_each(|binding| layer.record(step, binding))
            });
            self.graph = Some((generation, graph));
        }
        self.replayed.push(serves);
        self.graph.as_ref().expect("captured").1.launch()
    }
}

fn captured_layers_replay_with_new_lists() -> Outcome {
    let cuda = cuda()?;
    let (v32, glm) = (IndexFormat::DEEPSEEK_V32, IndexFormat::GLM_5);
    for sparse in [
        sparse(Dtype::F32, Dtype::F16, v32, 8),
        Sparse { policy: SplitPolicy::Auto, ..sparse(Dtype::Bf16, Dtype::Bf16, glm, 40) },
    ] {
        let mut model = Selecting::new(&cuda, sparse, DECODES, Graphs::default(), 6).expect("a model");
        for (step, result) in model.life().expect("steps") {
            result.unwrap_or_else(|error| panic!("{}, {step}: {error}", sparse.layer.dtype));
        }
        let replayed = &model.runs.replayed;
        assert!(replayed.ends_with(&[true, true]), "steps of one shape: {replayed:?}");
        assert!(!replayed[1], "other runs need another graph");
    }
    Ok(())
}

crate::tests![captured_layers_replay_with_new_lists];
