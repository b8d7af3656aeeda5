//! The whole layer as a host records it: bound once, its steps prepared and recorded one after the other.

use mla_support::Outcome;
use mla_support::suite::layer::{MAX_TOKENS, PREFIX_ROWS, Rig, Runs, spec};
use wgpu_mla::gpu::{Gpu, LayerCapacity, MlaLayer, MlaLayerStep, PrefixStep};
use wgpu_mla::ops::RopeLayout;
use wgpu_mla::{
    Dtype, Error, ExpandedPrefix, LayerArgs, LayerBatch, MlaLayerSpec, PagePool, PageTable, Policy, Result,
    SeqId, wgpu,
};

const CAPACITY: LayerCapacity =
    LayerCapacity { tokens: MAX_TOKENS, decode_tokens: MAX_TOKENS, prefix_rows: PREFIX_ROWS };

struct Recorded {
    layer: MlaLayer,
    step: MlaLayerStep,
}

impl Recorded {
    fn new(gpu: &Gpu, spec: &MlaLayerSpec) -> Result<Self> {
        let layer = MlaLayer::new(&gpu.pipelines, spec, CAPACITY)?;
        let step = layer.step()?;
        Ok(Self { layer, step })
    }
}

impl Runs<Gpu> for Recorded {
    fn run(
        &mut self,
        gpu: &Gpu,
        batch: &LayerBatch<'_>,
        policy: Policy,
        args: &LayerArgs<&wgpu::Buffer>,
    ) -> Result<()> {
        self.layer.prepare(&gpu.queue, &mut self.step, batch, policy)?;
        let binding = self.layer.bind(args)?;
        self.layer.check(&self.step, &binding)?;
        let mut encoder = gpu.device.create_command_encoder(&Default::default());
        self.layer.record(&mut encoder, &self.step, &binding);
        gpu.queue.submit([encoder.finish()]);
        Ok(())
    }

    fn expand(
        &self,
        gpu: &Gpu,
        pool: &PagePool,
        seqs: &[SeqId],
        prefixes: &[ExpandedPrefix],
        args: &LayerArgs<&wgpu::Buffer>,
    ) -> Result<()> {
        let binding = self.layer.bind(args)?;
        for prefix in prefixes {
            // One that is not in the batch is for the layer to refuse.
            let Some(&first) = seqs.get(prefix.sequences[0] as usize) else { continue };
            let pages: Vec<i32> = pool.pages(first)?.iter().map(|&page| page as i32).collect();
            let mut step = PrefixStep::default();
            self.layer.prepare_prefix(&gpu.queue, &mut step, &pages, prefix.tokens, prefix.first_row)?;
            let mut encoder = gpu.device.create_command_encoder(&Default::default());
            self.layer.record_prefix(&mut encoder, &step, &binding);
            gpu.queue.submit([encoder.finish()]);
        }
        Ok(())
    }

    fn workspace_bytes(&self) -> u64 {
        self.layer.workspace_bytes()
    }

    fn rounds_weights(&self, _: &Gpu) -> bool {
        self.layer.decode().rounds_weights()
    }
}

fn recorded_layers_equal_the_oracle() -> Outcome {
    let gpu = mla_support::gpu()?;
    for (dtype, cache, policy, rows) in [
        (Dtype::F32, Dtype::F16, Policy::Auto, 24),
        (Dtype::F32, Dtype::F16, Policy::FixedTokens(8), 41),
        (Dtype::F16, Dtype::E4m3, Policy::Auto, 64),
    ] {
        let spec = spec(dtype, cache, RopeLayout::Interleaved, rows);
        let mut layer = Recorded::new(&gpu, &spec).expect("a layer");
        let steps = Rig::new(&gpu, spec, 9).and_then(|mut rig| rig.life(&mut layer, policy)).expect("steps");
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
        let mut layer = Recorded::new(&gpu, &spec).expect("a layer");
        let steps = Rig::new(&gpu, spec, 11).and_then(|mut rig| rig.cascade(&mut layer)).expect("steps");
        for (name, step) in &steps {
            step.check().unwrap_or_else(|error| panic!("{dtype} over {cache}, {name}: {error}"));
        }
    }
    Ok(())
}

fn a_batch_beyond_the_capacity_is_an_error() -> Outcome {
    let gpu = mla_support::gpu()?;
    let spec = spec(Dtype::F32, Dtype::F16, RopeLayout::Interleaved, 64);
    let capacity = LayerCapacity { tokens: 20, decode_tokens: 2, prefix_rows: 0 };
    let layer = MlaLayer::new(&gpu.pipelines, &spec, capacity).expect("a layer");
    let mut step = layer.step().expect("a step");
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
        layer.prepare(&gpu.queue, &mut step, &batch, Policy::Auto)
    };
    assert_eq!(prepare(&[30, 40], &[0, 1, 20]), Ok(()));
    let many = prepare(&[30, 40], &[0, 1, 21]);
    assert!(matches!(many, Err(Error::Limit { need: 21, limit: 20, .. })), "{many:?}");
    let late = prepare(&[40, 30], &[0, 10, 11]);
    assert!(matches!(late, Err(Error::Limit { need: 11, limit: 2, .. })), "{late:?}");
    assert!(late.is_err_and(|error| error.to_string().contains("put decodes first")));

    let other = MlaLayer::new(&gpu.pipelines, &spec, capacity).expect("a layer").step().expect("a step");
    let mut other = other;
    let batch = LayerBatch {
        seq_lens: &[],
        query_start_loc: &[0],
        slot_mapping: &[],
        pages: PageTable::Dense { block_table: &[], max_pages: 0 },
        shared_prefixes: &[],
        expanded: &[],
    };
    let other = layer.prepare(&gpu.queue, &mut other, &batch, Policy::Auto);
    assert!(matches!(other, Err(Error::LayoutMismatch { .. })), "{other:?}");
    Ok(())
}

crate::tests![
    recorded_layers_equal_the_oracle,
    recorded_decodes_attend_expanded_prefixes,
    a_batch_beyond_the_capacity_is_an_error,
];
