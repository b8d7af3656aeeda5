//! On CUDA, where a whole step is one graph. Only the card's memory changes between replays.

use wgpu_mla::cuda::ops::{BatchBinding, BatchTables, DecodeLists, DeviceSlots};
use wgpu_mla::cuda::{Buffer, Cuda, Graph};
use wgpu_mla::{
    Binding, Capacity, Compiled, DecodeOptions, Device, DeviceBatch, Error, KvAppend, KvSpec, MlaDecode,
    PageTable, Plan, Result, Shares, Step,
};

use super::serving::{Arrays, Serves, TOKENS, append_spec};
use mla_support::graph::{captured, cuda};

pub struct Made {
    tables: BatchTables,
    batch: BatchBinding,
    append: Compiled<KvAppend, Cuda>,
    appends: Binding<KvAppend, Cuda>,
    slots: DeviceSlots<KvAppend>,
    decode: Compiled<MlaDecode, Cuda>,
    step: Step<MlaDecode, Cuda>,
    lists: DecodeLists,
    binding: Binding<MlaDecode, Cuda>,
    /// For a capacity.
    graph: Option<(Graph, Capacity)>,
}

impl Made {
    fn record(&self) -> Result<()> {
        self.tables.record_slots(&self.slots, &self.batch)?;
        self.append.record(self.slots.step(), &self.appends)?;
        self.tables.record_lists(&self.lists, &self.step, &self.batch)?;
        self.decode.record(&self.step, &self.binding)
    }
}

impl Serves for Cuda {
    const PLAIN: &'static str = "simple";
    type Made = Made;

    fn make(&self, variant: Option<&str>, spec: &MlaDecode, arrays: &Arrays<Buffer>) -> Made {
        let variant = variant.map(str::to_owned);
        let options = DecodeOptions { variant, device_page_list: true, ..DecodeOptions::default() };
        let decode = self.compile_with(*spec, &options).expect("a decode");
        let append = self.compile(append_spec(spec)).expect("an append");
        let tables = match &arrays.share {
            None => BatchTables::new(self, spec.kv),
            Some((shares, rank)) => BatchTables::sharded(self, spec.kv, shares, *rank),
        }
        .expect("tables");
        Made {
            batch: tables.bind(&arrays.batch()).expect("binds"),
            appends: append.bind(&arrays.new_rows(spec), TOKENS).expect("binds"),
            slots: tables.slots(&append, TOKENS).expect("slots"),
            step: decode.step(Capacity::default()).expect("a step"),
            lists: DecodeLists::default(),
            binding: decode.bind(&arrays.layer(spec), TOKENS).expect("a binding"),
            graph: None,
            tables,
            append,
            decode,
        }
    }

    fn decode_of(made: &Made) -> &Compiled<MlaDecode, Self> {
        &made.decode
    }

    fn prepare_bounds(&self, made: &mut Made, plan: &Plan) -> Result<()> {
        made.tables.prepare(&mut made.lists, &made.decode, &mut made.step, plan)?;
        let capacity = made.step.capacity();
        if made.graph.as_ref().is_none_or(|(_, of)| *of != capacity) {
            made.graph = Some((captured(self, || made.record()), capacity));
        }
        Ok(())
    }

    fn prepare_of_host(&self, made: &mut Made, plan: &Plan, pages: PageTable<'_>) -> Result<()> {
        made.decode.prepare(&mut made.step, (plan, pages))
    }

    fn serve(&self, made: &mut Made, arrays: &Arrays<Buffer>, seq_lens: &[i32], query_start_loc: &[i32]) {
        self.upload(&arrays.seq_lens, 0, bytemuck::cast_slice(seq_lens)).expect("uploaded");
        self.upload(&arrays.query_start_loc, 0, bytemuck::cast_slice(query_start_loc)).expect("uploaded");
        made.graph.as_ref().expect("captured").0.launch().expect("launched");
    }

    fn run_stale(&self, made: &mut Made) {
        let refused = made.tables.record_lists(&made.lists, &made.step, &made.batch);
        assert!(matches!(refused, Err(Error::LayoutMismatch { .. })), "{refused:?}");
        let refused = made.graph.as_ref().expect("captured").0.launch();
        assert!(matches!(refused, Err(Error::LayoutMismatch { .. })), "{refused:?}");
        made.decode.record(&made.step, &made.binding).expect("launched");
    }

    fn bind_batch(&self, made: &Made, batch: &DeviceBatch<&Buffer>) -> Result<()> {
        made.tables.bind(batch).map(drop)
    }

    fn more_refusals(&self, made: &mut Made, arrays: &Arrays<Buffer>, plan: &Plan) {
        let kv = KvSpec { num_pages: 3, ..made.decode.op().kv };
        let other = BatchTables::new(self, kv).expect("tables");
        let refused = other.slots(&made.append, TOKENS).map(drop).expect_err("refused");
        assert!(matches!(refused, Error::LayoutMismatch { .. }), "{refused}");
        let refused = other.record_slots(&made.slots, &made.batch).expect_err("refused");
        assert!(matches!(refused, Error::LayoutMismatch { .. }), "{refused}");
        let trusting = self.compile(*made.decode.op()).expect("a decode");
        let mut step = trusting.step(Capacity::default()).expect("a step");
        let refused = made.tables.prepare(&mut made.lists, &trusting, &mut step, plan).expect_err("refused");
        assert!(matches!(refused, Error::LayoutMismatch { .. }), "{refused}");

        let five = made.tables.bind(&DeviceBatch { batch: 5, ..arrays.batch() }).expect("binds");
        made.tables.prepare(&mut made.lists, &made.decode, &mut made.step, plan).expect("prepares");
        let refused = made.tables.check(&made.lists, &made.step, &five);
        assert!(matches!(refused, Err(Error::LayoutMismatch { .. })), "{refused:?}");
        let refused = made.tables.slots(&made.append, u32::MAX).map(drop).expect_err("refused");
        assert!(matches!(refused, Error::Limit { what: "max_tokens of BatchTables", .. }), "{refused}");

        let kv = made.decode.op().kv;
        let (even, uneven) = (Shares::even(2, 4).expect("shares"), Shares::even(2, 3).expect("shares"));
        let of = |shares, rank| BatchTables::sharded(self, kv, shares, rank).expect("tables");
        let whole = BatchTables::new(self, kv).expect("tables");
        let ranks = [of(&even, 0), of(&even, 1), of(&uneven, 0)];
        for (tables, binds) in
            [(&whole, &ranks[0]), (&ranks[0], &whole), (&ranks[0], &ranks[1]), (&ranks[0], &ranks[2])]
        {
            let batch = binds.bind(&arrays.batch()).expect("binds");
            for refused in [
                tables.record_slots(&made.slots, &batch),
                tables.record_lists(&made.lists, &made.step, &batch),
            ] {
                assert!(matches!(refused, Err(Error::LayoutMismatch { .. })), "{refused:?}");
            }
        }
        let same = of(&even, 0).bind(&arrays.batch()).expect("binds");
        ranks[0].record_slots(&made.slots, &same).expect("an equal share");

        // The same card, as another device: its streams' order is not this one's.
        let other = Cuda::new(0).expect("a card");
        let tables = BatchTables::new(&other, kv).expect("tables");
        for refused in [
            tables.record_slots(&made.slots, &made.batch),
            tables.record_lists(&made.lists, &made.step, &made.batch),
        ] {
            assert!(matches!(refused, Err(Error::LayoutMismatch { .. })), "{refused:?}");
        }
    }
}

super::serving_tests!(cuda);
