//! `batch_tables`: slots and tables of a decode, made on the device, and the checks by what uses them.

use mla_support::reference::{Concat, concat_and_cache, slot_mapping};
use wgpu_mla::{
    Batch, Binding, Capacity, Compiled, DecodeOptions, DeviceBatch, Dtype, KvAppend, KvAppendArgs, KvSpec,
    KvView, Mask, MlaDecode, MlaDecodeArgs, MlaShape, PageTable, Plan, Slabs, SplitPolicy, Step, View,
};

use crate::support::Result;
use crate::support::device::Timed;
use crate::support::paint::Paint;

const PAGE_SIZE: u32 = 64;
const HEADS: u32 = 16;
const DTYPE: Dtype = Dtype::Bf16;
const SCALE: f32 = 0.072_168_78;
const K_SCALE: f32 = 0.25;

/// A decode of one new token a sequence.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub sequences: u32,
    /// Tokens that the plan has for each sequence.
    pub bound: u32,
}

impl Shape {
    pub fn name(&self) -> String {
        format!("batch_tables {} x {}", self.sequences, self.bound)
    }

    fn pages(&self) -> u32 {
        self.bound.div_ceil(PAGE_SIZE)
    }

    fn kv(&self, dtype: Dtype) -> KvSpec {
        KvSpec { layout: dtype.into(), page_size: PAGE_SIZE, num_pages: self.sequences * self.pages() }
    }

    fn decode(&self) -> MlaDecode {
        let shape = MlaShape { num_heads: HEADS, kv_lora_rank: 512, qk_rope_head_dim: 64 };
        MlaDecode { shape, kv: self.kv(DTYPE), query: DTYPE, out: Dtype::F32 }
    }

    /// To a cache of its own with the least rows, of as many pages.
    fn append(&self) -> KvAppend {
        let shape = MlaShape { num_heads: 1, kv_lora_rank: 256, qk_rope_head_dim: 32 };
        KvAppend { shape, kv: self.kv(Dtype::E4m3), input: DTYPE, guard: false }
    }

    /// Pages in a random order.
    fn block_table(&self) -> Vec<i32> {
        let pages = i64::from(self.sequences * self.pages());
        let stride = if pages % 7919 == 0 { 1 } else { 7919 };
        (0..pages).map(|i| ((i * stride + 3) % pages) as i32).collect()
    }

    fn starts(&self) -> Vec<i32> {
        (0..=self.sequences as i32).collect()
    }

    fn full(&self) -> Vec<i32> {
        vec![self.bound as i32; self.sequences as usize]
    }

    /// Lengths from the half up to the bound.
    fn shorter(&self) -> Vec<i32> {
        let cut = |sequence: u32| (sequence * 371 + 70) % (self.bound / 2);
        (0..self.sequences).map(|sequence| (self.bound - cut(sequence)) as i32).collect()
    }
}

/// The two halves of the op.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// The slots of the new tokens.
    Slots,
    /// The work items, query tokens and page list of the decode.
    Lists,
}

impl What {
    pub fn name(self) -> &'static str {
        match self {
            Self::Slots => "slots",
            Self::Lists => "lists",
        }
    }
}

/// A device with a `BatchTables`, of which each backend has its own type.
pub trait DeviceTables: Timed {
    type Made;

    /// With a decode of `options`, prepared for the plan.
    fn make(
        &self,
        shape: &Shape,
        decode: Compiled<MlaDecode, Self>,
        batch: &DeviceBatch<&Self::Buffer>,
        plan: &Plan,
    ) -> Result<Self::Made>;
    fn decode(made: &Self::Made) -> (&Compiled<MlaDecode, Self>, &Step<MlaDecode, Self>);
    fn append(made: &Self::Made) -> (&Compiled<KvAppend, Self>, &Step<KvAppend, Self>);
    fn record(made: &Self::Made, what: What, recorder: &mut Self::Recorder<'_>) -> wgpu_mla::Result<()>;
}

/// `$pass` is the recorder's name, `$passed` what the backend's functions take of it.
macro_rules! device_tables {
    ($backend:ident, $device:ident, $pass:ident, [$($passed:tt)*]) => {
        pub mod $backend {
            use wgpu_mla::$backend::$device;
            use wgpu_mla::$backend::ops::{BatchBinding, BatchTables, DecodeLists, DeviceSlots};
            use wgpu_mla::Device;

            use super::*;

            pub struct Made {
                tables: BatchTables,
                batch: BatchBinding,
                append: Compiled<KvAppend, $device>,
                slots: DeviceSlots<KvAppend>,
                decode: Compiled<MlaDecode, $device>,
                step: Step<MlaDecode, $device>,
                lists: DecodeLists,
            }

            impl DeviceTables for $device {
                type Made = Made;

                fn make(
                    &self,
                    shape: &Shape,
                    decode: Compiled<MlaDecode, Self>,
                    batch: &DeviceBatch<&Self::Buffer>,
                    plan: &Plan,
                ) -> Result<Made> {
                    let append = self.compile(shape.append())?;
                    let tables = BatchTables::new(self, shape.kv(DTYPE))?;
                    let (mut step, mut lists) = (decode.step(Capacity::of(plan))?, DecodeLists::default());
                    tables.prepare(&mut lists, &decode, &mut step, plan)?;
                    let slots = tables.slots(&append, shape.sequences)?;
                    Ok(Made { batch: tables.bind(batch)?, slots, tables, append, decode, step, lists })
                }

                fn decode(made: &Made) -> (&Compiled<MlaDecode, Self>, &Step<MlaDecode, Self>) {
                    (&made.decode, &made.step)
                }

                fn append(made: &Made) -> (&Compiled<KvAppend, Self>, &Step<KvAppend, Self>) {
                    (&made.append, made.slots.step())
                }

                fn record(made: &Made, what: What, $pass: &mut Self::Recorder<'_>) -> wgpu_mla::Result<()> {
                    match what {
                        What::Slots => made.tables.record_slots($($passed)* &made.slots, &made.batch),
                        What::Lists => made.tables.record_lists($($passed)* &made.lists, &made.step, &made.batch),
                    }
                }
            }
        }
    };
}
device_tables!(gpu, Gpu, pass, [pass,]);
#[cfg(feature = "cuda")]
device_tables!(cuda, Cuda, _pass, []);

fn options() -> DecodeOptions {
    DecodeOptions { device_page_list: true, ..DecodeOptions::default() }
}

pub struct Problem<D: DeviceTables> {
    shape: Shape,
    made: D::Made,
    /// Rows of the appended tokens, all of each.
    rows: Paint,
    seq_lens: D::Buffer,
    cache: D::Buffer,
    appends: Binding<KvAppend, D>,
    out: D::Buffer,
    lse: D::Buffer,
    layer: Binding<MlaDecode, D>,
}

impl<D: DeviceTables> Problem<D> {
    pub fn new(device: &D, shape: &Shape) -> Result<Self> {
        let uploaded = |values: &[i32]| -> Result<D::Buffer> {
            let buffer = device.buffer(values.len() as u64 * 4)?;
            device.upload(&buffer, 0, bytemuck::cast_slice(values))?;
            Ok(buffer)
        };
        let tokens = shape.sequences;
        let seq_lens = uploaded(&shape.full())?;
        let batch = DeviceBatch {
            seq_lens: &seq_lens,
            query_start_loc: &uploaded(&shape.starts())?,
            block_table: &uploaded(&shape.block_table())?,
            batch: shape.sequences,
            max_pages: shape.pages(),
        };
        let spec = shape.decode();
        let decode = device.compile_with(spec, &options())?;
        let plan = plan(shape, &decode, &shape.full())?;

        let (query, rows) = (Paint::query(DTYPE), Paint::new(DTYPE));
        let q = device
            .painted(&query, u64::from(spec.shape.num_heads) * u64::from(tokens * spec.shape.row_elems()))?;
        let kv = device.painted(&rows, spec.kv.num_slots() * u64::from(spec.shape.row_elems()))?;
        let (out, lse) = (device.buffer(answer_bytes(shape)[0])?, device.buffer(answer_bytes(shape)[1])?);
        let args = MlaDecodeArgs::dense(&spec, &q, &kv, &out, &lse, SCALE);
        let layer = decode.bind(&args, tokens)?;
        let made = device.make(shape, decode, &batch, &plan)?;

        let append = shape.append();
        let row = append.shape.row_elems();
        let new = device.painted(&rows, u64::from(tokens * row))?;
        let view = |offset: u32| View { offset: offset.into(), ..View::dense(&new, 1, row) };
        let cache = device.buffer(append.kv.num_slots() * u64::from(row))?;
        let kv = KvView {
            buffer: &cache,
            offset: 0,
            layer_stride: 0,
            layer: 0,
            block_stride: u64::from(PAGE_SIZE * row),
            slabs: Slabs::ONE,
        };
        let args = KvAppendArgs {
            kv_c: view(0),
            k_pe: view(append.shape.kv_lora_rank),
            kv,
            k_scale: K_SCALE,
            guard: None,
        };
        let appends = D::append(&made).0.bind(&args, tokens)?;
        Ok(Self { shape: *shape, made, rows, seq_lens, cache, appends, out, lse, layer })
    }

    pub fn record(&self, what: What, recorder: &mut D::Recorder<'_>) -> wgpu_mla::Result<()> {
        D::record(&self.made, what, recorder)
    }

    /// Serves a batch of shorter sequences, then the full one: what was checked of the slots and of the lists.
    pub fn check(&self, device: &D) -> Result<(String, String)> {
        let shape = &self.shape;
        let shorter = shape.shorter();
        let got = self.serve(device, &shorter)?;
        self.check_slots(device, &[&shorter])?;
        let want = self.of_host(device, &shorter)?;
        // Another plan, so that sums are rounded otherwise. LSEs are compared absolutely.
        let largest = want[0].iter().fold(0f32, |max, x| max.max(x.abs()));
        for ((what, allowed), (got, want)) in
            [("out", 0.01 * largest), ("LSE", 3e-4)].into_iter().zip(got.iter().zip(&want))
        {
            let near = |(got, want): (&f32, &f32)| (got - want).abs() <= allowed;
            if let Some(at) = got.iter().zip(want).position(|pair| !near(pair)) {
                let (got, want) = (got[at], want[at]);
                return Err(format!(
                    "{what} {at} of the shorter batch is {got}, by the host's tables {want}"
                )
                .into());
            }
        }
        // The same plan: the same tables, so the same bits.
        let full = shape.full();
        let got = self.serve(device, &full)?;
        self.check_slots(device, &[&shorter, &full])?;
        let want = self.of_host(device, &full)?;
        let bits = |answer: &[Vec<f32>; 2]| answer.concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        match bits(&got).iter().zip(bits(&want)).position(|(got, want)| *got != want) {
            Some(at) => {
                Err(format!("element {at} of the full batch is not that of the host's tables").into())
            }
            None => {
                Ok((format!("{} slots", 2 * shape.sequences), format!("{} elements equal", got[0].len())))
            }
        }
    }

    /// Tables, append and decode of a batch that the device is told by its lengths only: out and LSE.
    fn serve(&self, device: &D, seq_lens: &[i32]) -> Result<[Vec<f32>; 2]> {
        device.upload(&self.seq_lens, 0, bytemuck::cast_slice(seq_lens))?;
        let ((append, slots), (decode, step)) = (D::append(&self.made), D::decode(&self.made));
        self.decoded(device, |recorder| {
            self.record(What::Slots, recorder)?;
            append.record_on(recorder, slots, &self.appends)?;
            self.record(What::Lists, recorder)?;
            decode.record_on(recorder, step, &self.layer)
        })
    }

    /// The decode of the same lengths with tables that the host makes.
    fn of_host(&self, device: &D, seq_lens: &[i32]) -> Result<[Vec<f32>; 2]> {
        let (decode, _) = D::decode(&self.made);
        let (shape, table) = (&self.shape, self.shape.block_table());
        let plan = plan(shape, decode, seq_lens)?;
        let mut step = decode.step(Capacity::of(&plan))?;
        let pages = PageTable::Dense { block_table: &table, max_pages: shape.pages() };
        decode.prepare(&mut step, (&plan, pages))?;
        self.decoded(device, |recorder| decode.record_on(recorder, &step, &self.layer))
    }

    /// Out and LSE of what is recorded, which were NaN before.
    fn decoded(
        &self,
        device: &D,
        record: impl FnOnce(&mut D::Recorder<'_>) -> wgpu_mla::Result<()>,
    ) -> Result<[Vec<f32>; 2]> {
        let buffers = [&self.out, &self.lse];
        for (buffer, bytes) in buffers.into_iter().zip(answer_bytes(&self.shape)) {
            device.upload(buffer, 0, &vec![0xFF; bytes as usize])?;
        }
        device.submit(|mut recorder| record(&mut recorder))?;
        let [out, lse] = answer_bytes(&self.shape);
        let values =
            |buffer, bytes| device.download(buffer, bytes).map(|bytes| Dtype::F32.decode_all(&bytes));
        Ok([values(&self.out, out)?, values(&self.lse, lse)?])
    }

    /// Compares the whole cache of the append, after the batches so far.
    fn check_slots(&self, device: &D, batches: &[&Vec<i32>]) -> Result<()> {
        let (shape, append) = (&self.shape, self.shape.append());
        let (row, latent) = (append.shape.row_elems() as usize, append.shape.kv_lora_rank as usize);
        let codes = self.rows.codes(0..u64::from(shape.sequences) * row as u64);
        let part = |columns: std::ops::Range<usize>| -> Vec<u8> {
            let columns = columns.start * DTYPE.bytes()..columns.end * DTYPE.bytes();
            codes.chunks(row * DTYPE.bytes()).flat_map(|codes| &codes[columns.clone()]).copied().collect()
        };
        let mut want = vec![0; append.kv.num_slots() as usize * row];
        for seq_lens in batches {
            let tokens = shape.sequences as usize;
            let slots =
                slot_mapping(seq_lens, &shape.starts(), &shape.block_table(), PAGE_SIZE as i32, tokens);
            let concat = Concat {
                kv_c: &part(0..latent),
                k_pe: &part(latent..row),
                input: DTYPE,
                slot_mapping: &slots,
                kv_lora_rank: latent,
                qk_rope_head_dim: row - latent,
                k_scale: K_SCALE,
            };
            concat_and_cache(&concat, Dtype::E4m3, &mut want);
        }
        let got = device.download(&self.cache, want.len() as u64)?;
        match got.chunks(row).zip(want.chunks(row)).position(|(got, want)| got != want) {
            Some(slot) => Err(format!("slot {slot} of the cache does not hold the oracle's bytes").into()),
            None => Ok(()),
        }
    }
}

/// Bytes of out and LSE.
fn answer_bytes(shape: &Shape) -> [u64; 2] {
    let spec = shape.decode();
    let rows = u64::from(shape.sequences * spec.shape.num_heads) * 4;
    [rows * u64::from(spec.shape.kv_lora_rank), rows]
}

/// The plan of a step with one new token a sequence, which sees all tokens before it.
fn plan<D: Timed>(shape: &Shape, decode: &Compiled<MlaDecode, D>, seq_lens: &[i32]) -> Result<Plan> {
    let starts = shape.starts();
    let batch = Batch { mask: Mask::Full, ..Batch::new(seq_lens, &starts) };
    Ok(Plan::new(decode.op(), &decode.tiling(), &batch, SplitPolicy::Auto)?)
}
