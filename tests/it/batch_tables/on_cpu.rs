//! On host memory, where every verb runs at once.

use wgpu_mla::cpu::{BatchTables, Binding, Buffer, Cpu, Decode, Step};
use wgpu_mla::{Backend, Capacity, DeviceBatch, Error, KvSpec, MlaSpec, PageTable, Plan, Result, Tiling};

use super::serving::{Arrays, Serves, TOKENS, append_spec};
use mla_support::Ignored;

pub struct Made {
    tables: BatchTables,
    decode: Decode,
    tiling: Tiling,
    step: Step,
    binding: Binding,
    spec: MlaSpec,
    plan: Plan,
}

impl Serves for Cpu {
    const PLAIN: &'static str = "portable";
    type Made = Made;

    fn make(&self, variant: Option<&str>, spec: &MlaSpec, arrays: &Arrays<Buffer>) -> Made {
        let decode = self.decode(spec, variant).expect("a decode");
        Made {
            tables: BatchTables::new(spec.kv).expect("tables"),
            tiling: self.tiling(&decode),
            step: self.step(&decode, Capacity::default()).expect("a step"),
            binding: self.bind(&decode, TOKENS, &arrays.layer(spec)).expect("a binding"),
            decode,
            spec: *spec,
            plan: Plan::default(),
        }
    }

    fn tiling_of(made: &Made) -> Tiling {
        made.tiling
    }

    fn rounds_weights_of(_: &Made) -> bool {
        false
    }

    /// There is nothing to prepare before the batch is there; what is wrong with a plan shows on the first.
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
        self.prepare(&made.decode, &mut made.step, plan, pages)
    }

    fn serve(&self, made: &mut Made, arrays: &Arrays<Buffer>, seq_lens: &[i32], query_start_loc: &[i32]) {
        self.upload(&arrays.seq_lens, 0, bytemuck::cast_slice(seq_lens)).expect("uploaded");
        self.upload(&arrays.query_start_loc, 0, bytemuck::cast_slice(query_start_loc)).expect("uploaded");
        let batch = arrays.batch();
        let slots = made.tables.slot_mapping(&batch, TOKENS).expect("slots");
        let new_rows = arrays.new_rows(&made.spec);
        self.kv_append(&append_spec(&made.spec), &slots, &new_rows).expect("appended");
        made.tables.prepare(&made.decode, &mut made.step, &made.plan, &batch).expect("prepared");
        self.run(&made.decode, &made.step, &made.binding).expect("decoded");
    }

    fn run_stale(&self, made: &mut Made) {
        self.run(&made.decode, &made.step, &made.binding).expect("decoded");
    }

    fn bind_batch(&self, made: &Made, batch: &DeviceBatch<&Buffer>) -> Result<()> {
        made.tables.slot_mapping(batch, TOKENS).map(drop)
    }

    fn more_refusals(&self, made: &mut Made, arrays: &Arrays<Buffer>, plan: &Plan) {
        let five = DeviceBatch { batch: 5, ..arrays.batch() };
        let other = BatchTables::new(KvSpec { num_pages: 3, ..made.spec.kv }).expect("tables");
        for (tables, batch) in [(&made.tables, &five), (&other, &arrays.batch())] {
            let refused = tables.prepare(&made.decode, &mut made.step, plan, batch);
            assert!(matches!(refused, Err(Error::LayoutMismatch { .. })), "{refused:?}");
        }
    }
}

/// The CPU is always there.
fn cpu() -> Result<Cpu, Ignored> {
    Ok(Cpu::new())
}

super::serving_tests!(cpu);
