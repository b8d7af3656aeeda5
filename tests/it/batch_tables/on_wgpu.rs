//! On wgpu, where all of a step is one pass of the host's encoder.

use wgpu_mla::gpu::ops::{AppendBinding, BatchBinding, BatchTables, DecodeLists, DeviceSlots, KvAppend};
use wgpu_mla::gpu::{Gpu, LayerBinding, MlaDecode, Options, Step};
use wgpu_mla::{
    Backend, Capacity, DeviceBatch, Error, KvSpec, MlaSpec, PageTable, Plan, Result, Tiling, wgpu,
};

use super::serving::{Arrays, Serves, TOKENS, append_spec};

pub struct Made {
    tables: BatchTables,
    batch: BatchBinding,
    append: KvAppend,
    appends: AppendBinding,
    slots: DeviceSlots,
    decode: MlaDecode,
    step: Step,
    lists: DecodeLists,
    binding: LayerBinding,
}

impl Serves for Gpu {
    const PLAIN: &'static str = "shared";
    type Made = Made;

    fn make(&self, variant: Option<&str>, spec: &MlaSpec, arrays: &Arrays<wgpu::Buffer>) -> Made {
        let options =
            Options { device_page_list: true, variant: variant.map(Into::into), ..Options::default() };
        let decode = MlaDecode::new(&self.pipelines, spec, &options).expect("a decode");
        let append = KvAppend::new(&self.pipelines, append_spec(spec)).expect("compiles");
        let tables = BatchTables::new(&self.pipelines, spec.kv).expect("compiles");
        Made {
            batch: tables.bind(&self.device, &arrays.batch()).expect("binds"),
            appends: append.bind(&self.device, &arrays.new_rows(spec), TOKENS).expect("binds"),
            slots: tables.slots(&self.device, &self.queue, &append, TOKENS).expect("slots"),
            step: decode.step(Capacity::default()).expect("a step"),
            lists: DecodeLists::default(),
            binding: decode.bind(TOKENS, &arrays.layer(spec)).expect("a binding"),
            tables,
            append,
            decode,
        }
    }

    fn tiling_of(made: &Made) -> Tiling {
        made.decode.tiling()
    }

    fn rounds_weights_of(made: &Made) -> bool {
        made.decode.rounds_weights()
    }

    fn prepare_bounds(&self, made: &mut Made, plan: &Plan) -> Result<()> {
        let Made { tables, lists, decode, step, .. } = made;
        tables.prepare(&self.device, &self.queue, lists, decode, step, plan)
    }

    fn prepare_of_host(&self, made: &mut Made, plan: &Plan, pages: PageTable<'_>) -> Result<()> {
        made.decode.prepare(&self.queue, &mut made.step, plan, pages)
    }

    /// One submit, in which lengths arrive on the device.
    fn serve(
        &self,
        made: &mut Made,
        arrays: &Arrays<wgpu::Buffer>,
        seq_lens: &[i32],
        query_start_loc: &[i32],
    ) {
        let scope = self.device.push_error_scope(wgpu::ErrorFilter::Validation);
        let mut encoder = self.device.create_command_encoder(&Default::default());
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
            made.tables.record_slots_in(&mut pass, &made.slots, &made.batch);
            made.append.record_in(&mut pass, made.slots.step(), &made.appends);
            made.tables.record_lists_in(&mut pass, &made.lists, &made.step, &made.batch);
            made.decode.record_in(&mut pass, &made.step, &made.binding);
        }
        self.queue.submit([encoder.finish()]);
        drop(sent);
        assert_eq!(pollster::block_on(scope.pop()).map(|error| error.to_string()), None);
    }

    fn run_stale(&self, made: &mut Made) {
        let refused = made.tables.check(&made.lists, &made.step, &made.batch);
        assert!(matches!(refused, Err(Error::LayoutMismatch { .. })), "{refused:?}");
        let mut encoder = self.device.create_command_encoder(&Default::default());
        {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            made.tables.record_lists_in(&mut pass, &made.lists, &made.step, &made.batch);
            made.decode.record_in(&mut pass, &made.step, &made.binding);
        }
        self.queue.submit([encoder.finish()]);
    }

    fn bind_batch(&self, made: &Made, batch: &DeviceBatch<&wgpu::Buffer>) -> Result<()> {
        made.tables.bind(&self.device, batch).map(drop)
    }

    fn more_refusals(&self, made: &mut Made, arrays: &Arrays<wgpu::Buffer>, plan: &Plan) {
        let (device, queue, spec) = (&self.device, &self.queue, *made.decode.spec());
        let other = BatchTables::new(&self.pipelines, KvSpec { num_pages: 3, ..spec.kv }).expect("compiles");
        let refused = other.slots(device, queue, &made.append, TOKENS).map(drop).expect_err("refused");
        assert!(matches!(refused, Error::LayoutMismatch { .. }), "{refused}");
        let trusting = MlaDecode::new(&self.pipelines, &spec, &Options::default()).expect("a decode");
        let mut step = trusting.step(Capacity::default()).expect("a step");
        let Made { tables, lists, decode, .. } = made;
        let refused = tables.prepare(device, queue, lists, &trusting, &mut step, plan).expect_err("refused");
        assert!(matches!(refused, Error::LayoutMismatch { .. }), "{refused}");

        let uniform = device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: 4096,
            usage: wgpu::BufferUsages::UNIFORM,
            mapped_at_creation: false,
        });
        let batch = DeviceBatch { seq_lens: &uniform, ..arrays.batch() };
        let refused = tables.bind(device, &batch).map(drop).expect_err("refused").to_string();
        assert!(refused.contains("seq_lens"), "{refused}");
        let five = tables.bind(device, &DeviceBatch { batch: 5, ..arrays.batch() }).expect("binds");
        tables.prepare(device, queue, lists, decode, &mut made.step, plan).expect("prepares");
        let refused = made.tables.check(&made.lists, &made.step, &five);
        assert!(matches!(refused, Err(Error::LayoutMismatch { .. })), "{refused:?}");
    }
}

super::serving_tests!(mla_support::gpu);
