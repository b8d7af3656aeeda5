//! The whole layer as a host records it, in passes of its own.

use mla_support::Outcome;
use mla_support::suite::layer_rig::{PREFIX_ROWS, Rig, Runs, spec};
use wgpu_mla::gpu::Gpu;
use wgpu_mla::{
    Binding, Capacity, Compiled, Device, Dtype, Error, Kernel, LayerBatch, LayerCapacity, LayerOptions, Op,
    PageTable, Result, RopeLayout, SplitPolicy, Step,
};

struct Recorded;

impl Runs<Gpu> for Recorded {
    fn run<O: Op>(&self, op: &Compiled<O, Gpu>, step: &Step<O, Gpu>, binding: &Binding<O, Gpu>) -> Result<()>
    where
        Gpu: Kernel<O>,
    {
        let gpu = op.device();
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        op.record(&mut encoder, step, binding)?;
        gpu.queue().submit([encoder.finish()]);
        Ok(())
    }
}

fn recorded_layers_equal_the_oracle() -> Outcome {
    let gpu = mla_support::gpu()?;
    for (dtype, cache, policy, rows) in [
        (Dtype::F32, Dtype::F16, SplitPolicy::Auto, 24),
        (Dtype::F32, Dtype::F16, SplitPolicy::FixedTokens(8), 41),
        (Dtype::F16, Dtype::E4m3, SplitPolicy::Auto, 64),
    ] {
        let spec = spec(dtype, cache, RopeLayout::Interleaved, rows);
        let steps = Rig::new(&gpu, spec, PREFIX_ROWS, Recorded, 9)
            .and_then(|mut rig| rig.life(policy))
            .expect("steps");
        for (index, step) in steps.iter().enumerate() {
            step.check()
                .unwrap_or_else(|error| panic!("{dtype} over {cache}, {policy:?}, step {index}: {error}"));
        }
    }
    Ok(())
}

fn recorded_decodes_attend_expanded_prefixes() -> Outcome {
    let gpu = mla_support::gpu()?;
    for (dtype, cache) in [(Dtype::F32, Dtype::F16), (Dtype::F16, Dtype::E4m3)] {
        let spec = spec(dtype, cache, RopeLayout::Interleaved, 64);
        let rig = Rig::new(&gpu, spec, PREFIX_ROWS, Recorded, 11);
        let steps = rig.and_then(|mut rig| rig.cascade()).expect("steps");
        for (name, step) in &steps {
            step.check().unwrap_or_else(|error| panic!("{dtype} over {cache}, {name}: {error}"));
        }
    }
    Ok(())
}

fn a_batch_beyond_the_capacity_is_an_error() -> Outcome {
    let gpu = mla_support::gpu()?;
    let spec = spec(Dtype::F32, Dtype::F16, RopeLayout::Interleaved, 64);
    let capacity = LayerCapacity { tokens: 20, decode_tokens: 2, ..LayerCapacity::default() };
    let options = LayerOptions { capacity, ..Default::default() };
    let layer = gpu.compile_with(spec, &options).expect("a layer");
    let mut step = layer.step(Capacity::default()).expect("a step");
    let mut prepare = |seq_lens: &[i32], query_start_loc: &[i32]| {
        let tokens = query_start_loc[seq_lens.len()] as usize;
        let block_table: Vec<i32> = (0..seq_lens.len() as i32 * 8).collect();
        let batch = LayerBatch {
            seq_lens,
            query_start_loc,
            slot_mapping: &vec![-1; tokens],
            pages: PageTable::Dense { block_table: &block_table, max_pages: 8 },
            shared_prefixes: &[],
            expanded: &[],
        };
        layer.prepare(&mut step, (&batch, SplitPolicy::Auto))
    };
    assert_eq!(prepare(&[30, 40], &[0, 1, 20]), Ok(()));
    let many = prepare(&[30, 40], &[0, 1, 21]);
    assert!(matches!(many, Err(Error::Capacity { need: 21, got: 20, .. })), "{many:?}");
    let text =
        "LayerCapacity::tokens is 20, 21 are needed: compile the layer with more LayerCapacity::tokens";
    assert!(many.is_err_and(|error| error.to_string() == text));
    let late = prepare(&[40, 30], &[0, 10, 11]);
    assert!(matches!(late, Err(Error::Capacity { need: 11, got: 2, .. })), "{late:?}");
    assert!(late.is_err_and(|error| error.to_string().contains("MlaLayer::decodes_first")));

    let other = gpu.compile_with(spec, &options).expect("a layer");
    let mut other = other.step(Capacity::default()).expect("a step");
    let batch = LayerBatch {
        seq_lens: &[],
        query_start_loc: &[0],
        slot_mapping: &[],
        pages: PageTable::Dense { block_table: &[], max_pages: 0 },
        shared_prefixes: &[],
        expanded: &[],
    };
    let other = layer.prepare(&mut other, (&batch, SplitPolicy::Auto));
    assert!(matches!(other, Err(Error::LayoutMismatch { .. })), "{other:?}");
    Ok(())
}

crate::tests![
    recorded_layers_equal_the_oracle,
    recorded_decodes_attend_expanded_prefixes,
    a_batch_beyond_the_capacity_is_an_error,
];
