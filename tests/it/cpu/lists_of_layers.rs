//! Layers that choose what they attend: which steps need another recording.

use mla_support::suite::layer_lists::sparse;
use mla_support::suite::selecting::{OneSubmit, RunsLayers, Selecting};
use wgpu_mla::cpu::Cpu;
use wgpu_mla::{Binding, Capacity, Compiled, Dtype, IndexFormat, MlaLayer, Result, Step};

/// The generation of each step that ran.
#[derive(Default)]
struct Generations(Vec<u64>);

impl RunsLayers<Cpu> for Generations {
    fn run(
        &mut self,
        layer: &Compiled<MlaLayer, Cpu>,
        step: &Step<MlaLayer, Cpu>,
        layers: &[Binding<MlaLayer, Cpu>],
    ) -> Result<()> {
        self.0.push(step.generation());
        OneSubmit.run(layer, step, layers)
    }
}

/// Sequences grow, so their scores and lists change, and what was recorded serves them; it does not where more attend lists.
fn a_generation_is_of_the_runs_that_attend_lists() {
    let sparse = sparse(Dtype::F32, Dtype::F16, IndexFormat::DEEPSEEK_V32, 40);
    let cpu = Cpu::with_threads(2);
    let mut model =
        Selecting::new(&cpu, sparse, Capacity::default(), Generations::default(), 6).expect("a model");
    for (step, result) in model.life().expect("steps") {
        result.unwrap_or_else(|error| panic!("{step}: {error}"));
    }
    // The second batch and the third have a run of tokens with lists and one without, whatever their order; then all have lists.
    assert_eq!(model.runs.0, [1, 2, 2, 3, 4, 4, 4]);
}

crate::tests![a_generation_is_of_the_runs_that_attend_lists];
