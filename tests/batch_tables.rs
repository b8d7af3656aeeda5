//! Tables made on the device: batches whose lengths the host does not know, padded to a fixed size.
#![cfg(feature = "wgpu")]

mod common;

use common::paint::{POISON, Problem, Sees};
use common::rig::{Loaded, Rig, small};
use wgpu_mla::gpu::ops::{BatchBinding, BatchTables, DecodeLists, DeviceSlots, KvAppend};
use wgpu_mla::gpu::{MlaDecode, Options, Step};
use wgpu_mla::reference::slot_mapping;
use wgpu_mla::{
    AppendLayer, AppendSpec, Backend, Batch, Capacity, DeviceBatch, Dtype, Error, KvView, Plan, Policy,
    SharedPrefix, View, Visibility, wgpu,
};

/// Sequences and query tokens that every batch is padded to. The last two have never more.
const PADDED: [(u32, u32); 6] = [(37, 1), (300, 2), (64, 2), (90, 1), (0, 1), (0, 1)];
/// What the host plans for: nothing longer.
const BOUNDS: [i32; 6] = [40, 333, 64, 96, 50, 1];

fn plan(mla: &MlaDecode, bounds: &[i32], visibility: Visibility<'_>, policy: Policy) -> Plan {
    let batch = Batch { visibility, ..Batch::new(bounds, &[0, 1, 3, 5, 6, 7, 8]) };
    Plan::new(mla.spec(), &mla.tiling(), &batch, policy).expect("a plan")
}

/// Everything on the device that serves batch after batch.
struct Serving {
    rig: Rig,
    loaded: Loaded,
    append: KvAppend,
    tables: BatchTables,
    lens: wgpu::Buffer,
    starts: wgpu::Buffer,
    block_table: wgpu::Buffer,
    batch: BatchBinding,
    slots: DeviceSlots,
    lists: DecodeLists,
    step: Step,
}

impl Serving {
    fn new(shared: &Rig, variant: Option<&str>, bounds: &[i32], policy: Policy) -> Self {
        let options =
            Options { device_page_list: true, variant: variant.map(Into::into), ..Options::default() };
        let problem = small(&PADDED);
        let mla = MlaDecode::new(&shared.gpu.pipelines, &problem.spec, &options).expect("a decode");
        let rig = Rig { gpu: shared.gpu.clone(), mla };
        let (device, queue) = (&rig.gpu.device, &rig.gpu.queue);
        let (kv, shape) = (problem.spec.kv, problem.spec.shape);
        let tables = BatchTables::new(&rig.gpu.pipelines, kv).expect("compiles");
        let spec = AppendSpec { shape, kv, input: Dtype::F16 };
        let append = KvAppend::new(&rig.gpu.pipelines, spec).expect("compiles");
        let slots = tables.slots(device, queue, &append, 8).expect("slots");

        let (lens, starts) = (rig.buffer(&[0; 6 * 4]), rig.buffer(&[0; 7 * 4]));
        let block_table = rig.buffer(bytemuck::cast_slice(&problem.block_table));
        let arrays = DeviceBatch {
            seq_lens: &lens,
            query_start_loc: &starts,
            block_table: &block_table,
            batch: 6,
            max_pages: problem.max_pages as u32,
        };
        let batch = tables.bind(device, &arrays).expect("binds");
        let (mut lists, mut step) =
            (DecodeLists::default(), rig.mla.step(Capacity::default()).expect("a step"));
        let plan = plan(&rig.mla, bounds, Visibility::Full, policy);
        tables.prepare(device, queue, &mut lists, &rig.mla, &mut step, &plan).expect("prepares");
        let loaded = rig.load(problem);
        Self { rig, loaded, append, tables, lens, starts, block_table, batch, slots, lists, step }
    }

    /// One submit: lengths arrive on the device, new rows go to the cache, the batch is decoded.
    fn run(&self, seq_lens: &[i32], query_start_loc: &[i32], rows: &wgpu::Buffer) {
        let problem = &self.loaded.problem;
        let latent = u64::from(problem.spec.shape.kv_lora_rank);
        let view = |offset| View { offset, ..View::dense(rows, 1, problem.spec.shape.row_elems()) };
        let layer = AppendLayer {
            kv_c: view(0),
            k_pe: view(latent),
            kv: KvView::dense(&self.loaded.kv, &problem.spec),
            k_scale: 1.0,
        };
        let append = self.append.bind(&self.rig.gpu.device, &layer, 8).expect("binds");
        let [lens, starts] = [seq_lens, query_start_loc].map(|x| self.rig.buffer(bytemuck::cast_slice(x)));
        let mut encoder = self.rig.encoder();
        encoder.copy_buffer_to_buffer(&lens, 0, &self.lens, 0, self.lens.size());
        encoder.copy_buffer_to_buffer(&starts, 0, &self.starts, 0, self.starts.size());
        {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            self.tables.record_slots_in(&mut pass, &self.slots, &self.batch);
            self.append.record_in(&mut pass, self.slots.step(), &append);
            self.tables.record_lists_in(&mut pass, &self.lists, &self.step, &self.batch);
            self.rig.mla.record_in(&mut pass, &self.step, &self.loaded.binding);
        }
        self.rig.submit(encoder);
    }

    /// A batch of these lengths. Before it the cache has no row of its new tokens, nor of any after them: poison.
    fn check(&self, seq_lens: &[i32], query_start_loc: &[i32]) {
        let problem = &self.loaded.problem;
        let (kv, row) = (problem.spec.kv, problem.spec.shape.row_elems() as usize * 2);
        let batch = Problem {
            seq_lens: seq_lens.to_vec(),
            query_start_loc: query_start_loc.to_vec(),
            ..problem.clone()
        };
        let slots = slot_mapping(seq_lens, query_start_loc, &batch.block_table, kv.page_size as i32, 8);
        let mut before = vec![POISON; problem.kv.len()];
        let mut after = before.clone();
        for (seq, &len) in seq_lens.iter().enumerate() {
            let new = query_start_loc[seq + 1] - query_start_loc[seq];
            for token in 0..len {
                let page = batch.block_table[seq * batch.max_pages + token as usize / kv.page_size as usize];
                let at = (page * kv.page_size as i32 + token % kv.page_size as i32) as usize * row;
                let there = if token < len - new { vec![&mut before, &mut after] } else { vec![&mut after] };
                there.into_iter().for_each(|kv| kv[at..at + row].copy_from_slice(&problem.kv[at..at + row]));
            }
        }
        let mut rows = vec![POISON; 8 * row];
        for (token, &slot) in slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
            rows[token * row..][..row].copy_from_slice(&problem.kv[slot as usize * row..][..row]);
        }
        self.rig.gpu.upload(&self.loaded.kv, 0, &before).expect("uploaded");
        self.rig.poison(&self.loaded);
        self.run(seq_lens, query_start_loc, &self.rig.buffer(&rows));
        let got = self.rig.gpu.download(&self.loaded.kv, after.len() as u64).expect("downloaded");
        let wrong = got.chunks(row).zip(after.chunks(row)).position(|(a, b)| a != b);
        assert_eq!(wrong, None, "a slot of the cache, lengths {seq_lens:?}");
        self.rig.check(&self.loaded, &batch);
    }
}

/// Lengths that rise and fall under one plan; padding; sequences with fewer query tokens than planned, or none.
#[test]
fn a_step_of_upper_bounds_decodes_the_true_lengths() {
    let Some(shared) = Rig::shared() else { return };
    for (variant, policy) in
        [(None, Policy::FixedTokens(32)), (Some("shared"), Policy::Auto), (None, Policy::OneSplit)]
    {
        let serving = Serving::new(shared, variant, &BOUNDS, policy);
        serving.check(&[30, 300, 17, 90, 0, 0], &[0, 1, 3, 5, 6, 6, 6]);
        serving.check(&[1, 150, 2, 0, 0, 0], &[0, 1, 3, 5, 6, 7, 8]);
        serving.check(&[37, 299, 64, 89, 0, 0], &[0, 1, 3, 5, 6, 6, 6]);
        // The third has one of its two query tokens, the rest is padding; a first token has nothing before it.
        serving.check(&[33, 1, 40, 0, 0, 0], &[0, 1, 3, 4, 4, 4, 4]);
        serving.check(&[0; 6], &[0; 7]);
    }
}

/// Whatever the arrays hold, reads and writes stay in the pool, and the next batch is right.
#[test]
fn wild_batches_stay_in_the_pool() {
    let Some(shared) = Rig::shared() else { return };
    let serving = Serving::new(shared, None, &BOUNDS, Policy::FixedTokens(32));
    let (rig, loaded) = (&serving.rig, &serving.loaded);
    let zeros = rig.buffer(&vec![0; 8 * 288 * 2]);
    let wild = [i32::MAX, i32::MIN, -1, 2_147_480_000, 1 << 30, 77];
    let table: Vec<i32> = (0..loaded.problem.block_table.len()).map(|i| wild[i % 5]).collect();
    for turn in 0..6 {
        rig.gpu.upload(&loaded.kv, 0, &vec![0; loaded.problem.kv.len()]).expect("uploaded");
        rig.gpu.upload(&serving.block_table, 0, bytemuck::cast_slice(&table)).expect("uploaded");
        let lens: Vec<i32> = (0..6).map(|i| wild[(i + turn) % 6]).collect();
        let starts: Vec<i32> = (0..7).map(|i| [wild[(i * 5 + turn) % 6], i as i32][turn % 2]).collect();
        let scope = rig.gpu.device.push_error_scope(wgpu::ErrorFilter::Validation);
        serving.run(&lens, &starts, &zeros);
        assert_eq!(pollster::block_on(scope.pop()).map(|error| error.to_string()), None);
        for bytes in rig.bits(loaded) {
            assert!(!Dtype::F32.decode_all(&bytes).iter().any(|x| x.is_nan()), "{lens:?} {starts:?}");
        }
    }
    let good = bytemuck::cast_slice(&loaded.problem.block_table);
    rig.gpu.upload(&serving.block_table, 0, good).expect("uploaded");
    serving.check(&[30, 300, 17, 90, 0, 0], &[0, 1, 3, 5, 6, 6, 6]);
}

/// A step goes back and forth between tables of the host and tables of the device.
#[test]
fn host_tables_after_device_tables() {
    let Some(shared) = Rig::shared() else { return };
    let lens = PADDED.map(|(len, _)| len as i32);
    let mut serving = Serving::new(shared, None, &lens, Policy::FixedTokens(32));
    serving.check(&[1, 150, 2, 0, 0, 0], &[0, 1, 3, 5, 6, 7, 8]);
    let problem = serving.loaded.problem.clone();
    // The same plan as the device's: nothing of it would be uploaded if it were not known that the device has changed it.
    let host = Problem { sees: Sees::Full, ..problem.clone() };
    let rig = &serving.rig;
    rig.gpu.upload(&serving.loaded.kv, 0, &problem.kv).expect("uploaded");
    rig.prepare(&mut serving.step, &host, Policy::FixedTokens(32));
    rig.poison(&serving.loaded);
    rig.run(&serving.step, &serving.loaded);
    rig.check(&serving.loaded, &host);

    // The lists are of another prepare: they record nothing, and the step decodes what it has.
    let refused = serving.tables.check(&serving.lists, &serving.step, &serving.batch);
    assert!(matches!(refused, Err(Error::LayoutMismatch { .. })), "{refused:?}");
    let mut encoder = rig.encoder();
    {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        serving.tables.record_lists_in(&mut pass, &serving.lists, &serving.step, &serving.batch);
        rig.mla.record_in(&mut pass, &serving.step, &serving.loaded.binding);
    }
    rig.poison(&serving.loaded);
    rig.submit(encoder);
    rig.check(&serving.loaded, &host);

    let plan = plan(&rig.mla, &BOUNDS, Visibility::Full, Policy::Auto);
    let Serving { rig, tables, lists, step, .. } = &mut serving;
    let (device, queue) = (&rig.gpu.device, &rig.gpu.queue);
    tables.prepare(device, queue, lists, &rig.mla, step, &plan).expect("prepares");
    serving.check(&[30, 300, 17, 90, 0, 0], &[0, 1, 3, 5, 6, 6, 6]);
}

#[test]
fn every_refusal_of_device_tables() {
    let Some(shared) = Rig::shared() else { return };
    let mut serving = Serving::new(shared, None, &BOUNDS, Policy::OneSplit);
    let Serving { rig, loaded, append, tables, lens, starts, block_table, lists, step, .. } = &mut serving;
    let (device, queue, mla) = (&rig.gpu.device, &rig.gpu.queue, &rig.mla);
    let starts_planned = &loaded.problem.query_start_loc;

    let causal = plan(mla, &BOUNDS, Visibility::Causal, Policy::Auto);
    let refused = tables.prepare(device, queue, lists, mla, step, &causal).expect_err("refused");
    assert!(matches!(refused, Error::Shape { what: "visible keys of a query token", .. }), "{refused}");
    let prefixes = [SharedPrefix { sequences: vec![0, 1], tokens: 32 }];
    let batch = Batch {
        visibility: Visibility::Full,
        shared_prefixes: &prefixes,
        ..Batch::new(&BOUNDS, starts_planned)
    };
    let prefixed = Plan::new(mla.spec(), &mla.tiling(), &batch, Policy::FixedTokens(16)).expect("a plan");
    let refused = tables.prepare(device, queue, lists, mla, step, &prefixed).expect_err("refused");
    assert!(matches!(refused, Error::Shape { what: "shared prefixes of the plan", .. }), "{refused}");
    let full = plan(mla, &BOUNDS, Visibility::Full, Policy::Auto);
    let mut other = shared.mla.step(Capacity::default()).expect("a step");
    let refused = tables.prepare(device, queue, lists, &shared.mla, &mut other, &full).expect_err("refused");
    assert!(matches!(refused, Error::LayoutMismatch { .. }), "{refused}");
    let mut wild = full.clone();
    wild.items[0].page_begin = 7;
    let refused = tables.prepare(device, queue, lists, mla, step, &wild).expect_err("refused");
    assert!(matches!(refused, Error::Shape { .. }), "{refused}");

    let kv = wgpu_mla::KvSpec { num_pages: 3, ..mla.spec().kv };
    let small = BatchTables::new(&rig.gpu.pipelines, kv).expect("compiles");
    let refused = small.slots(device, queue, append, 8).map(|_| ()).expect_err("refused");
    assert!(matches!(refused, Error::LayoutMismatch { .. }), "{refused}");

    let max_pages = loaded.problem.max_pages as u32;
    let arrays = DeviceBatch {
        seq_lens: &*lens,
        query_start_loc: &*starts,
        block_table: &*block_table,
        batch: 6,
        max_pages,
    };
    let uniform = device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 4096,
        usage: wgpu::BufferUsages::UNIFORM,
        mapped_at_creation: false,
    });
    for (arrays, what) in [
        (DeviceBatch { batch: 7, ..arrays }, "seq_lens"),
        (DeviceBatch { query_start_loc: lens, ..arrays }, "query_start_loc"),
        (DeviceBatch { max_pages: 1 << 20, ..arrays }, "block_table"),
        (DeviceBatch { batch: 0, ..arrays }, "batch"),
        (DeviceBatch { max_pages: 0, ..arrays }, "max_pages"),
        (DeviceBatch { seq_lens: &uniform, ..arrays }, "seq_lens"),
    ] {
        let refused = tables.bind(device, &arrays).map(|_| ()).expect_err("refused").to_string();
        assert!(refused.contains(what), "{refused}");
    }
    let five = tables.bind(device, &DeviceBatch { batch: 5, ..arrays }).expect("binds");
    tables.prepare(device, queue, lists, mla, step, &full).expect("prepares");
    let refused = tables.check(lists, step, &five);
    assert!(matches!(refused, Err(Error::LayoutMismatch { .. })), "{refused:?}");
}
