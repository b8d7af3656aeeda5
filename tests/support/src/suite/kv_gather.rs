//! `kv_gather` against the oracle: every pair of dtypes, every byte.

use crate::reference::{GatherPages, kv_gather};
use wgpu_mla::{
    Backend, Dtype, Error, GatherBatch, GatherRange, KvGather, KvGatherArgs, KvSpec, KvView, MlaShape, Op,
    PageTable, View,
};

use super::Session;
use super::memory::{Pages, Strides, download, gather, page_dims, scatter, upload};
use super::run::Layout;
use crate::paint::{POISON, Rng};

/// A cache of any bits, tables whose unused entries are wild, and ranges that begin and end anywhere.
struct Case {
    spec: KvGather,
    cache: Vec<u8>,
    block_table: Vec<i32>,
    max_pages: usize,
    seq_lens: Vec<i32>,
    ranges: Vec<GatherRange>,
    rows: usize,
}

/// Every cache dtype into every output dtype, with any bit pattern there is; e4m3 with scales that are no powers of two, that
/// overflow, and that make subnormals of every output.
pub fn gathers<B: Backend>(session: &Session<'_, B>) {
    let dims = [(512, 64), (256, 32), (512, 0), (256, 64)];
    let page_sizes = [16, 3, 1, 64];
    let mut turn = 0;
    for dtype in Dtype::ALL {
        for output in Dtype::ALL {
            let ((latent, rope), page_size) = (dims[turn % 4], page_sizes[turn % 4]);
            turn += if output == Dtype::Bf16 { 2 } else { 1 };
            let kv = KvSpec { layout: dtype.into(), page_size, num_pages: 260u32.div_ceil(page_size) };
            let shape = MlaShape { num_heads: 1, kv_lora_rank: latent, qk_rope_head_dim: rope };
            let spec = KvGather { shape, kv, output };
            if spec.check().is_err() {
                continue;
            }
            let case = Case::new(spec);
            let scales: &[f32] = match (dtype, output) {
                (Dtype::E4m3, Dtype::E4m3) => &[0.37],
                (Dtype::E4m3, _) => &[0.25, 0.37, 171.3, 1.3e-4, 2.7e-40, 3e38, 1e-45],
                _ => &[1.0],
            };
            for &k_scale in scales {
                for gaps in [false, true] {
                    let what =
                        format!("gather {dtype} to {output} page {page_size} k_scale {k_scale} gaps {gaps}");
                    session.note(&what, case.check(session.backend, k_scale, gaps));
                }
            }
        }
    }
    session.finish("gathers");
}

impl Case {
    fn new(spec: KvGather) -> Self {
        let KvGather { kv, shape, .. } = spec;
        let mut rng = Rng(u64::from(kv.page_size) << 8 | kv.dtype().bytes() as u64);
        // Half of it ordinary values, half of it any bits: subnormals, infinities, NaN.
        let mut cache = Vec::new();
        for i in 0..kv.num_slots() as usize * shape.row_elems() as usize {
            if i % 2 == 0 {
                kv.dtype().encode(rng.randn() * [1.0, 300.0, 1e-5][i % 3], &mut cache);
            } else {
                cache.extend_from_slice(&rng.next().to_le_bytes()[..kv.dtype().bytes()]);
            }
        }
        let seq_lens = vec![70, 0, 37, 5];
        let max_pages = kv.pages_for(70) as usize + 1;
        let mut free: Vec<i32> = (0..kv.num_pages as i32).collect();
        rng.shuffle(&mut free);
        let wild = [2_147_480_000, -1, i32::MIN, i32::MAX];
        let mut block_table: Vec<i32> = (0..4 * max_pages).map(|i| wild[i % 4]).collect();
        for (seq, &len) in seq_lens.iter().enumerate() {
            for block in 0..kv.pages_for(len as u32) as usize {
                block_table[seq * max_pages + block] = free.pop().expect("a page");
            }
        }
        // One range in the middle of pages, one of a whole sequence, two of one sequence that meet, one empty; rows 0, 40, 46 to 57 and 95
        // to 99 belong to none.
        let range = |sequence, begin, tokens, out_row| GatherRange { sequence, begin, tokens, out_row };
        let ranges = vec![
            range(0, 19, 39, 1),
            range(2, 0, 37, 58),
            range(3, 2, 3, 41),
            range(3, 0, 2, 44),
            range(1, 0, 0, 9),
        ];
        Self { spec, cache, block_table, max_pages, seq_lens, ranges, rows: 100 }
    }

    /// Runs the gather and compares every byte of the workspace and around it.
    fn check<B: Backend>(&self, backend: &B, k_scale: f32, gaps: bool) -> Result<(), String> {
        let text = |error: Error| error.to_string();
        let KvGather { kv, shape, output } = self.spec;
        let row = shape.row_elems() as usize;
        let pages = if gaps { Pages::gaps(&kv, row) } else { Pages::dense(&kv, row) };
        let cache = scatter(&self.cache, page_dims(&kv, row), kv.dtype().bytes(), pages.strides());
        let cache_buffer = upload(backend, &cache).map_err(text)?;
        let layout = if gaps { Layout::Gaps } else { Layout::Dense };
        let dims = [self.rows, 1, row];
        let strides = layout.strides(dims, 4);
        let before = vec![POISON; strides.end(dims) * output.bytes()];
        let out_buffer = upload(backend, &before).map_err(text)?;
        let args = KvGatherArgs { kv: pages.view(&cache_buffer), k_scale, out: strides.view(&out_buffer) };
        // Both forms of one table.
        let (indptr, indices) = self.csr();
        let pages = if gaps {
            PageTable::Csr { kv_indptr: &indptr, kv_indices: &indices }
        } else {
            PageTable::Dense { block_table: &self.block_table, max_pages: self.max_pages as u32 }
        };
        let batch = GatherBatch { pages, seq_lens: &self.seq_lens, ranges: &self.ranges };
        backend.once(self.spec, batch, &args).map_err(text)?;

        let bytes = download(backend, &out_buffer, before.len()).map_err(text)?;
        let (got, intact) = gather(&bytes, dims, output.bytes(), strides);
        intact?;
        let mut want = vec![POISON; got.len()];
        let oracle = GatherPages {
            kv_cache: &self.cache,
            dtype: kv.dtype(),
            page_size: kv.page_size as usize,
            row_elems: row,
            block_table: &self.block_table,
            max_pages: self.max_pages,
            k_scale,
        };
        kv_gather(&oracle, &self.ranges, output, &mut want);
        let size = output.bytes();
        match got.chunks(size).zip(want.chunks(size)).position(|(a, b)| a != b) {
            Some(at) => {
                let (got, want) = (&got[at * size..][..size], &want[at * size..][..size]);
                Err(format!("row {} element {}: {got:x?} instead of {want:x?}", at / row, at % row))
            }
            None => Ok(()),
        }
    }

    fn csr(&self) -> (Vec<i32>, Vec<i32>) {
        let (mut indptr, mut indices) = (vec![0], Vec::new());
        for (row, &len) in self.block_table.chunks(self.max_pages).zip(&self.seq_lens) {
            indices.extend_from_slice(&row[..self.spec.kv.pages_for(len as u32) as usize]);
            indptr.push(indices.len() as i32);
        }
        (indptr, indices)
    }
}

/// Ranges, pages, scales and sizes.
pub fn refuses_gathers<B: Backend>(session: &Session<'_, B>) {
    let refuses = |what: &str, result: Result<(), Error>, why: &str| {
        let checked = match result {
            Ok(()) => Err("was accepted".to_owned()),
            Err(error) if error.to_string().contains(why) => Ok(()),
            Err(error) => Err(format!("{error:?} does not name {why:?}")),
        };
        session.note(what, checked);
    };
    let result = || -> Result<(), Error> {
        let backend = session.backend;
        let kv = KvSpec { layout: Dtype::E4m3.into(), page_size: 4, num_pages: 3 };
        let shape = MlaShape { num_heads: 1, kv_lora_rank: 256, qk_rope_head_dim: 32 };
        let spec = KvGather { shape, kv, output: Dtype::Bf16 };
        let (cache, rows) = (backend.buffer(12 * 288)?, backend.buffer(8 * 288 * 2)?);
        let good = KvGatherArgs {
            kv: Pages::dense(&kv, 288).view(&cache),
            k_scale: 0.5,
            out: Strides::dense(1, 288).view(&rows),
        };
        let pages = PageTable::Dense { block_table: &[2, 0, 1, 3], max_pages: 2 };
        let range = |sequence, begin, tokens, out_row| GatherRange { sequence, begin, tokens, out_row };
        let run = |spec: &KvGather, ranges: &[GatherRange], args: &KvGatherArgs<&B::Buffer>| {
            backend.once(*spec, GatherBatch { pages, seq_lens: &[8, 5], ranges }, args)
        };
        session.note("a good gather", run(&spec, &[range(0, 0, 8, 0)], &good).map_err(|e| e.to_string()));
        session.note("none", run(&spec, &[], &good).map_err(|e| e.to_string()));
        let one = KvGatherArgs { out: View { token_stride: 290, ..good.out }, ..good.clone() };
        let one = run(&spec, &[range(0, 0, 1, 0)], &one).map_err(|error| error.to_string());
        session.note("the stride of one row is unread", one);
        refuses("sequence 2 of 2", run(&spec, &[range(2, 0, 1, 0)], &good), "sequence 2");
        refuses("past seq_len", run(&spec, &[range(1, 3, 3, 0)], &good), "the limit is 5");
        refuses("overflow", run(&spec, &[range(1, u32::MAX, 2, 0)], &good), "gather range 0");
        refuses("a wild page", run(&spec, &[range(0, 0, 1, 0), range(1, 4, 1, 1)], &good), "page 3");
        let overlap = [range(0, 0, 4, 0), range(1, 0, 2, 3)];
        refuses("a row twice", run(&spec, &overlap, &good), "both write row 3");
        refuses("rows past the buffer", run(&spec, &[range(0, 0, 1, 8)], &good), "out");
        let device = GatherBatch { pages: PageTable::Device, seq_lens: &[8], ranges: &[] };
        refuses("a device table", backend.once(spec, device, &good), "Dense");
        for k_scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            let args = KvGatherArgs { k_scale, ..good.clone() };
            refuses(&format!("k_scale {k_scale}"), run(&spec, &[range(0, 0, 1, 0)], &args), "k_scale");
        }
        for (what, args, why) in [
            (
                "a stride of 2",
                KvGatherArgs { out: View { token_stride: 290, ..good.out }, ..good.clone() },
                "multiple of 4",
            ),
            (
                "rows that overlap",
                KvGatherArgs { out: View { token_stride: 284, ..good.out }, ..good.clone() },
                "overlap",
            ),
            (
                "out in the cache",
                KvGatherArgs { out: View { buffer: &cache, ..good.out }, ..good.clone() },
                "same buffer",
            ),
            (
                "a layer past the cache",
                KvGatherArgs { kv: KvView { offset: 8, ..good.kv.clone() }, ..good },
                "kv",
            ),
        ] {
            refuses(what, run(&spec, &[range(0, 0, 2, 0)], &args), why);
        }
        let narrow = KvGather { kv: KvSpec { layout: Dtype::F16.into(), ..kv }, output: Dtype::E4m3, ..spec };
        refuses("f16 to e4m3", run(&narrow, &[], &good), "e4m3");
        Ok(())
    }();
    session.note("gathers", result.map_err(|error| error.to_string()));
    session.finish("refuses gathers");
}
