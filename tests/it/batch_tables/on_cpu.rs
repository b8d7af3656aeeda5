//! On host memory, where everything runs at once.

use wgpu_mla::cpu::{BatchTables, Buffer, Cpu};
use wgpu_mla::{
    Binding, Capacity, Compiled, DecodeOptions, Device, DeviceBatch, Error, KvSpec, MlaDecode, PageTable,
    Plan, Result, Step,
};

use super::serving::{Arrays, Serves, TOKENS, append_spec};
use mla_support::Ignored;

pub struct Made {
    tables: BatchTables,
    decode: Compiled<MlaDecode, Cpu>,
    step: Step<MlaDecode, Cpu>,
    binding: Binding<MlaDecode, Cpu>,
    plan: Plan,
}

impl Serves for Cpu {
    const PLAIN: &'static str = "portable";
    type Made = Made;

    fn make(&self, variant: Option<&str>, spec: &MlaDecode, arrays: &Arrays<Buffer>) -> Made {
        let options = DecodeOptions { variant: variant.map(str::to_owned), ..DecodeOptions::default() };
        let decode = self.compile_with(*spec, &options).expect("a decode");
        Made {
            tables: match &arrays.share {
                None => BatchTables::new(spec.kv),
                Some((shares, rank)) => BatchTables::sharded(spec.kv, shares, *rank),
            }
            .expect("tables"),
            step: decode.step(Capacity::default()).expect("a step"),
            binding: decode.bind(&arrays.layer(spec), TOKENS).expect("a binding"),
            decode,
            plan: Plan::default(),
        }
    }

    fn decode_of(made: &Made) -> &Compiled<MlaDecode, Self> {
        &made.decode
    }

    /// Nothing is prepared before the batch is known, so the first batch refuses a wrong plan.
    fn prepare_bounds(&self, made: &mut Made, plan: &Plan) -> Result<()> {
        made.plan = plan.clone();
        let zeros = self.buffer(7 * 4)?;
        let batch = plan.seq_lens.len() as u32;
        let none = DeviceBatch {
            seq_lens: &zeros,
            query_start_loc: &zeros,
            block_table: &zeros,
            batch,
            max_pages: 1,
        };
        made.tables.prepare(&made.decode, &mut made.step, plan, &none)
    }

    fn prepare_of_host(&self, made: &mut Made, plan: &Plan, pages: PageTable<'_>) -> Result<()> {
        made.decode.prepare(&mut made.step, (plan, pages))
    }

    fn serve(&self, made: &mut Made, arrays: &Arrays<Buffer>, seq_lens: &[i32], query_start_loc: &[i32]) {
        self.upload(&arrays.seq_lens, 0, bytemuck::cast_slice(seq_lens)).expect("uploaded");
        self.upload(&arrays.query_start_loc, 0, bytemuck::cast_slice(query_start_loc)).expect("uploaded");
        let batch = arrays.batch();
        let slots = made.tables.slot_mapping(&batch, TOKENS).expect("slots");
        let spec = made.decode.op();
        self.once(append_spec(spec), &slots, &arrays.new_rows(spec)).expect("appended");
        made.tables.prepare(&made.decode, &mut made.step, &made.plan, &batch).expect("prepared");
        made.decode.run(&made.step, &made.binding).expect("decoded");
    }

    fn run_stale(&self, made: &mut Made) {
        made.decode.run(&made.step, &made.binding).expect("decoded");
    }

    fn bind_batch(&self, made: &Made, batch: &DeviceBatch<&Buffer>) -> Result<()> {
        made.tables.slot_mapping(batch, TOKENS).map(drop)
    }

    fn more_refusals(&self, made: &mut Made, arrays: &Arrays<Buffer>, plan: &Plan) {
        let five = DeviceBatch { batch: 5, ..arrays.batch() };
        let other = BatchTables::new(KvSpec { num_pages: 3, ..made.decode.op().kv }).expect("tables");
        for (tables, batch) in [(&made.tables, &five), (&other, &arrays.batch())] {
            let refused = tables.prepare(&made.decode, &mut made.step, plan, batch);
            assert!(matches!(refused, Err(Error::LayoutMismatch { .. })), "{refused:?}");
        }
        let refused = made.tables.slot_mapping(&arrays.batch(), u32::MAX).expect_err("refused");
        assert!(matches!(refused, Error::Limit { what: "max_tokens of BatchTables", .. }), "{refused}");
    }
}

/// The CPU is always there.
fn cpu() -> Result<Cpu, Ignored> {
    Ok(Cpu::new())
}

super::serving_tests!(cpu);
