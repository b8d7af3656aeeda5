//! On wgpu, where a whole step is one pass of the host's encoder.

use wgpu_mla::gpu::ops::{BatchBinding, BatchTables, DecodeLists, DeviceSlots};
use wgpu_mla::gpu::{Gpu, wanted};
use wgpu_mla::{
    Binding, Capacity, Compiled, DecodeOptions, Device, DeviceBatch, Error, KvAppend, KvSpec, MlaDecode,
    PageTable, Plan, Result, Shares, Step, wgpu,
};

use super::serving::{Arrays, Serves, TOKENS, append_spec};

pub struct Made {
    tables: BatchTables,
    batch: BatchBinding,
    append: Compiled<KvAppend, Gpu>,
    appends: Binding<KvAppend, Gpu>,
    slots: DeviceSlots<KvAppend>,
    decode: Compiled<MlaDecode, Gpu>,
    step: Step<MlaDecode, Gpu>,
    lists: DecodeLists,
    binding: Binding<MlaDecode, Gpu>,
}

impl Serves for Gpu {
    const PLAIN: &'static str = "shared";
    type Made = Made;

    fn make(&self, variant: Option<&str>, spec: &MlaDecode, arrays: &Arrays<wgpu::Buffer>) -> Made {
        let variant = variant.map(str::to_owned);
        let options = DecodeOptions { variant, device_page_list: true, ..DecodeOptions::default() };
        let decode = self.compile_with(*spec, &options).expect("a decode");
        let append = self.compile(append_spec(spec)).expect("compiles");
        let tables = match &arrays.share {
            None => BatchTables::new(self, spec.kv),
            Some((shares, rank)) => BatchTables::sharded(self, spec.kv, shares, *rank),
        }
        .expect("compiles");
        Made {
            batch: tables.bind(&arrays.batch()).expect("binds"),
            appends: append.bind(&arrays.new_rows(spec), TOKENS).expect("binds"),
            slots: tables.slots(&append, TOKENS).expect("slots"),
            step: decode.step(Capacity::default()).expect("a step"),
            lists: DecodeLists::default(),
            binding: decode.bind(&arrays.layer(spec), TOKENS).expect("a binding"),
            tables,
            append,
            decode,
        }
    }

    fn decode_of(made: &Made) -> &Compiled<MlaDecode, Self> {
        &made.decode
    }

    fn prepare_bounds(&self, made: &mut Made, plan: &Plan) -> Result<()> {
        made.tables.prepare(&mut made.lists, &made.decode, &mut made.step, plan)
    }

    fn prepare_of_host(&self, made: &mut Made, plan: &Plan, pages: PageTable<'_>) -> Result<()> {
        made.decode.prepare(&mut made.step, (plan, pages))
    }

    /// One submit, in which lengths arrive on the device.
    fn serve(
        &self,
        made: &mut Made,
        arrays: &Arrays<wgpu::Buffer>,
        seq_lens: &[i32],
        query_start_loc: &[i32],
    ) {
        let scope = self.device().push_error_scope(wgpu::ErrorFilter::Validation);
        let mut encoder = self.device().create_command_encoder(&Default::default());
        let arrive = [(seq_lens, &arrays.seq_lens), (query_start_loc, &arrays.query_start_loc)];
        let sent = arrive.map(|(values, to)| {
            let bytes: &[u8] = bytemuck::cast_slice(values);
            let sent = self.buffer(bytes.len() as u64).expect("a buffer");
            self.upload(&sent, 0, bytes).expect("uploaded");
            encoder.copy_buffer_to_buffer(&sent, 0, to, 0, bytes.len() as u64);
            sent
        });
        {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            made.tables.record_slots(&mut pass, &made.slots, &made.batch).expect("recorded");
            made.append.record_on(&mut pass, made.slots.step(), &made.appends).expect("recorded");
            made.tables.record_lists(&mut pass, &made.lists, &made.step, &made.batch).expect("recorded");
            made.decode.record_on(&mut pass, &made.step, &made.binding).expect("recorded");
        }
        self.queue().submit([encoder.finish()]);
        drop(sent);
        assert_eq!(pollster::block_on(scope.pop()).map(|error| error.to_string()), None);
    }

    fn run_stale(&self, made: &mut Made) {
        let refused = made.tables.check(&made.lists, &made.step, &made.batch);
        assert!(matches!(refused, Err(Error::LayoutMismatch { .. })), "{refused:?}");
        let mut encoder = self.device().create_command_encoder(&Default::default());
        {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            let refused = made.tables.record_lists(&mut pass, &made.lists, &made.step, &made.batch);
            assert!(matches!(refused, Err(Error::LayoutMismatch { .. })), "{refused:?}");
            made.decode.record_on(&mut pass, &made.step, &made.binding).expect("recorded");
        }
        self.queue().submit([encoder.finish()]);
    }

    fn bind_batch(&self, made: &Made, batch: &DeviceBatch<&wgpu::Buffer>) -> Result<()> {
        made.tables.bind(batch).map(drop)
    }

    fn more_refusals(&self, made: &mut Made, arrays: &Arrays<wgpu::Buffer>, plan: &Plan) {
        let spec = *made.decode.op();
        let other = BatchTables::new(self, KvSpec { num_pages: 3, ..spec.kv }).expect("compiles");
        let refused = other.slots(&made.append, TOKENS).map(drop).expect_err("refused");
        assert!(matches!(refused, Error::LayoutMismatch { .. }), "{refused}");
        let trusting = self.compile(spec).expect("a decode");
        let mut step = trusting.step(Capacity::default()).expect("a step");
        let Made { tables, lists, decode, .. } = made;
        let refused = tables.prepare(lists, &trusting, &mut step, plan).expect_err("refused");
        assert!(matches!(refused, Error::LayoutMismatch { .. }), "{refused}");

        let uniform = self.device().create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: 4096,
            usage: wgpu::BufferUsages::UNIFORM,
            mapped_at_creation: false,
        });
        let batch = DeviceBatch { seq_lens: &uniform, ..arrays.batch() };
        let refused = tables.bind(&batch).map(drop).expect_err("refused").to_string();
        assert!(refused.contains("seq_lens"), "{refused}");
        let five = tables.bind(&DeviceBatch { batch: 5, ..arrays.batch() }).expect("binds");
        tables.prepare(lists, decode, &mut made.step, plan).expect("prepares");
        let refused = made.tables.check(&made.lists, &made.step, &five);
        assert!(matches!(refused, Err(Error::LayoutMismatch { .. })), "{refused:?}");
        let refused = made.tables.slots(&made.append, u32::MAX).map(drop).expect_err("refused");
        assert!(matches!(refused, Error::Limit { what: "max_tokens of BatchTables", .. }), "{refused}");
        self.refuses_other_shares(made, arrays);
        self.refuses_other_devices(made, plan);
    }
}

/// Batches of other ranks and shares, and what another device made.
trait RefusesOthers {
    fn refuses_other_shares(&self, made: &Made, arrays: &Arrays<wgpu::Buffer>);
    fn refuses_other_devices(&self, made: &Made, plan: &Plan);
}

/// What recording says, and that nothing was recorded which the device refuses.
fn recorded(
    gpu: &Gpu,
    tables: &BatchTables,
    (slots, batch): (&DeviceSlots<KvAppend>, &BatchBinding),
    (lists, step): (&DecodeLists, &Step<MlaDecode, Gpu>),
) -> [Result<()>; 3] {
    let scope = gpu.device().push_error_scope(wgpu::ErrorFilter::Validation);
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let results = {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        [
            tables.record_slots(&mut pass, slots, batch),
            tables.record_lists(&mut pass, lists, step, batch),
            tables.check(lists, step, batch),
        ]
    };
    gpu.queue().submit([encoder.finish()]);
    assert_eq!(pollster::block_on(scope.pop()).map(|error| error.to_string()), None);
    results
}

impl RefusesOthers for Gpu {
    fn refuses_other_shares(&self, made: &Made, arrays: &Arrays<wgpu::Buffer>) {
        let kv = made.decode.op().kv;
        let (even, uneven) = (Shares::even(2, 4).expect("shares"), Shares::even(2, 3).expect("shares"));
        let of = |shares, rank| BatchTables::sharded(self, kv, shares, rank).expect("tables");
        let whole = BatchTables::new(self, kv).expect("tables");
        let ranks = [of(&even, 0), of(&even, 1), of(&uneven, 0)];
        let same = of(&even, 0).bind(&arrays.batch()).expect("binds");
        for (tables, binds) in
            [(&whole, &ranks[0]), (&ranks[0], &whole), (&ranks[0], &ranks[1]), (&ranks[0], &ranks[2])]
        {
            let batch = binds.bind(&arrays.batch()).expect("binds");
            for refused in recorded(self, tables, (&made.slots, &batch), (&made.lists, &made.step)) {
                assert!(matches!(refused, Err(Error::LayoutMismatch { .. })), "{refused:?}");
            }
        }
        let taken = recorded(self, &ranks[0], (&made.slots, &same), (&made.lists, &made.step));
        assert_eq!(taken, [const { Ok(()) }; 3], "an equal share");
    }

    fn refuses_other_devices(&self, made: &Made, plan: &Plan) {
        let adapter = self.adapter().expect("ours").clone();
        // SAFETY: as `Gpu::new`, whose tiles it has to have.
        let wanted = wanted(&adapter, unsafe { wgpu::ExperimentalFeatures::enabled() });
        let other = pollster::block_on(Gpu::from_adapter(adapter, &wanted)).expect("a second device");
        let spec = *made.decode.op();
        let options = DecodeOptions { device_page_list: true, ..DecodeOptions::default() };
        let decode = other.compile_with(spec, &options).expect("a decode");
        let append = other.compile(append_spec(&spec)).expect("an append");
        let tables = BatchTables::new(&other, spec.kv).expect("tables");
        let (mut lists, mut step) =
            (DecodeLists::default(), decode.step(Capacity::default()).expect("a step"));
        tables.prepare(&mut lists, &decode, &mut step, plan).expect("prepares");
        let slots = tables.slots(&append, TOKENS).expect("slots");
        let words = other.buffer(4096).expect("a buffer");
        let batch = DeviceBatch {
            seq_lens: &words,
            query_start_loc: &words,
            block_table: &words,
            batch: plan.seq_lens.len() as u32,
            max_pages: 1,
        };
        let foreign = tables.bind(&batch).expect("binds");
        let refused = made.tables.bind(&batch).map(drop).expect_err("buffers of another device");
        assert!(matches!(refused, Error::ForeignResource { .. }), "{refused}");
        let own = (&made.lists, &made.step);
        for (slots, batch, lists) in
            [(&made.slots, &foreign, own), (&slots, &foreign, (&lists, &step)), (&slots, &foreign, own)]
        {
            for refused in recorded(self, &made.tables, (slots, batch), lists) {
                assert!(matches!(refused, Err(Error::ForeignResource { .. })), "{refused:?}");
            }
        }
        let [of_slots, of_lists, checked] =
            recorded(self, &made.tables, (&slots, &made.batch), (&lists, &step));
        for refused in [of_slots, of_lists, checked] {
            assert!(matches!(refused, Err(Error::ForeignResource { .. })), "{refused:?}");
        }
    }
}

super::serving_tests!(mla_support::gpu);
