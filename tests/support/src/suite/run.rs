//! One decode through a backend: upload, plan, prepare, bind, run, download.

use wgpu_mla::{
    Backend, Batch, Capacity, Dtype, KvSpec, KvView, LseBase, MlaDecode, MlaDecodeArgs, PageTable, Plan,
    Query, Result, SharedPrefix, SlabTable, SparseBatch, SplitPolicy, Tiling, View,
};

use super::Session;
use super::lists::ListArrays;
use super::memory::{Pages, Strides, download, gather, page_dims, scatter, stored_elems, upload};
use crate::paint::{POISON, Problem};

/// How the arrays lie in their buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Layout {
    /// Dense, from the front.
    #[default]
    Dense,
    /// Tokens, then heads, with an offset and gaps; the cache is one layer of several.
    Gaps,
    /// Heads, then tokens, with an offset and gaps: an LSE of `[heads, tokens]`.
    HeadMajor,
}

/// How the query is handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Slicing {
    /// One array.
    #[default]
    Whole,
    /// `q_nope` and `q_pe`.
    Split,
}

/// Everything about a run that must not change what it computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct How {
    pub policy: SplitPolicy,
    pub slicing: Slicing,
    pub layout: Layout,
    pub lse_base: LseBase,
    /// Hands the pages over as CSR.
    pub csr: bool,
    /// Ignores the problem's shared prefixes.
    pub unshared: bool,
    /// Prepares the step for nothing first, so that it has to grow.
    pub grow: bool,
    /// Query tokens of a sequence that the decode is made for; 0 is 1.
    pub query_tokens: u32,
    /// Cuts the pool into slabs of so many pages; 0: one buffer.
    pub slab_pages: u32,
    /// Replaces the variant's tiling.
    pub tiling: Option<Tiling>,
    /// Compiles for lists that are so many entries longer than the plan's.
    pub spare_entries: u32,
}

/// What a decode wrote.
#[derive(Debug, Clone)]
pub struct Answer {
    /// `[total_q, H, L]`, decoded.
    pub out: Vec<f32>,
    /// `[total_q, H]`, natural whatever the base was.
    pub lse: Vec<f32>,
    /// The bytes of both, for comparisons bit for bit.
    pub bits: [Vec<u8>; 2],
}

impl Layout {
    /// Strides of `[tokens, heads, dim]`, multiples of `unit`.
    pub fn strides(self, [tokens, heads, dim]: [usize; 3], unit: usize) -> Strides {
        let row = dim.next_multiple_of(unit) + unit;
        match self {
            Self::Dense => Strides::dense(heads, dim),
            Self::Gaps => Strides { offset: 2 * unit, token: heads * row + 3 * unit, head: row },
            Self::HeadMajor => Strides { offset: unit, token: row, head: tokens.max(1) * row + unit },
        }
    }
}

impl<B: Backend> Session<'_, B> {
    /// Runs a problem. The buffers' gaps, tails and results hold NaN before; all but the results must after.
    pub fn run_decode(&self, problem: &Problem, how: &How) -> Result<Answer, String> {
        let wrong = |error: wgpu_mla::Error| error.to_string();
        let (backend, spec) = (self.backend, &problem.spec);
        let decode = self.decode_of(problem, how).map_err(wrong)?;
        let plan = plan_of(problem, how, &decode.tiling()).map_err(wrong)?;
        let capacity = if how.grow { Capacity::default() } else { Capacity::of(&plan) };
        let mut step = decode.step(capacity).map_err(wrong)?;
        let csr = Csr::of(problem);
        let pages = match &problem.lists {
            Some(_) => PageTable::Indices,
            None if how.csr => csr.table(),
            None => dense_table(problem),
        };
        decode.prepare(&mut step, (&plan, pages)).map_err(wrong)?;

        let (heads, tokens) = (spec.shape.num_heads as usize, problem.total_q());
        let latent = spec.shape.kv_lora_rank as usize;
        let query = QueryArrays::of(problem, how);
        let [q0, q1] = [&query.parts[0], &query.parts[1]];
        let (q0_buffer, q1_buffer) =
            (upload(backend, &q0.bytes).map_err(wrong)?, upload(backend, &q1.bytes).map_err(wrong)?);
        let slabs = self.upload_slabs(problem, how).map_err(wrong)?;
        let lists = problem.lists.as_ref().map(|lists| ListArrays::new(backend, lists, how)).transpose();
        let lists = lists.map_err(wrong)?;
        let out = Output::new([tokens, heads, latent], spec.out, how.layout, 8);
        let lse = Output::new([tokens, heads, 1], Dtype::F32, how.layout, 1);
        let out_buffer = upload(backend, &vec![POISON; out.len]).map_err(wrong)?;
        let lse_buffer = upload(backend, &vec![POISON; lse.len]).map_err(wrong)?;

        let layer = MlaDecodeArgs {
            query: match how.slicing {
                Slicing::Whole => Query::Whole(q0.view(&q0_buffer)),
                Slicing::Split => Query::Split { q_nope: q0.view(&q0_buffer), q_pe: q1.view(&q1_buffer) },
            },
            kv: slabs.view(spec).map_err(wrong)?,
            out: out.strides.view(&out_buffer),
            lse: lse.strides.view(&lse_buffer),
            lse_base: how.lse_base,
            softmax_scale: problem.softmax_scale,
            k_scale: problem.k_scale,
            q_scale: problem.q_scale,
            indices: lists.as_ref().map(ListArrays::view),
            attn_sink: problem.attn_sink.clone(),
        };
        let binding = decode.bind(&layer, tokens as u32).map_err(wrong)?;
        decode.run(&step, &binding).map_err(wrong)?;
        let out_bits = out.read(backend, &out_buffer).map_err(|error| format!("out: {error}"))?;
        let lse_bits = lse.read(backend, &lse_buffer).map_err(|error| format!("lse: {error}"))?;
        lists.map_or(Ok(()), |lists| lists.unwritten(backend))?;

        let ln_base = match how.lse_base {
            LseBase::E => 1.0,
            LseBase::Two => std::f64::consts::LN_2,
        };
        let natural = |x: f32| (f64::from(x) * ln_base) as f32;
        Ok(Answer {
            out: spec.out.decode_all(&out_bits),
            lse: Dtype::F32.decode_all(&lse_bits).into_iter().map(natural).collect(),
            bits: [out_bits, lse_bits],
        })
    }
}

/// Plans a problem.
pub fn plan_of(problem: &Problem, how: &How, tiling: &Tiling) -> Result<Plan> {
    let spec = &problem.spec;
    if let Some(lists) = &problem.lists {
        let slab_pages = (how.slab_pages > 0).then_some(how.slab_pages);
        let batch =
            SparseBatch { slab_pages, ..SparseBatch::new(problem.total_q() as u32, lists.topk as u32) };
        return Plan::sparse(spec, tiling, &batch, how.policy);
    }
    let shared: &[SharedPrefix] = if how.unshared { &[] } else { &problem.shared_prefixes };
    let batch = Batch {
        seq_lens: &problem.seq_lens,
        query_start_loc: &problem.query_start_loc,
        mask: problem.mask(),
        shared_prefixes: shared,
        slabs: (how.slab_pages > 0)
            .then_some(SlabTable { pages: dense_table(problem), slab_pages: how.slab_pages }),
    };
    Plan::new(spec, tiling, &batch, how.policy)
}

/// A problem's cache, in one buffer or in several.
struct Cache<B: Backend> {
    buffers: Vec<B::Buffer>,
    pages: Pages,
    slab_pages: u32,
}

impl<B: Backend> Cache<B> {
    fn view(&self, spec: &MlaDecode) -> Result<KvView<&B::Buffer>> {
        let buffers: Vec<_> = self.buffers.iter().collect();
        let laid_out = self.pages.view(buffers[0]);
        let slabs = KvView::in_slabs(&buffers, spec, self.slab_pages, 0)?.slabs;
        Ok(KvView { slabs, ..laid_out })
    }
}

impl<B: Backend> Session<'_, B> {
    fn upload_slabs(&self, problem: &Problem, how: &How) -> Result<Cache<B>> {
        let kv = problem.spec.kv;
        let row = stored_elems(&kv, &problem.spec.shape);
        let slab_pages = if how.slab_pages > 0 { how.slab_pages } else { kv.num_pages };
        // A slab has room for as many pages as any other; of the last one perhaps some are missing.
        let slab = KvSpec { num_pages: slab_pages, ..kv };
        let pages = match how.layout {
            Layout::Dense => Pages::dense(&slab, row),
            Layout::Gaps | Layout::HeadMajor => Pages::gaps(&slab, row),
        };
        let page_bytes = kv.page_size as usize * row * kv.dtype().bytes();
        let upload_slab = |codes: &[u8]| {
            let slab = KvSpec { num_pages: (codes.len() / page_bytes) as u32, ..kv };
            let bytes = scatter(codes, page_dims(&slab, row), kv.dtype().bytes(), pages.strides());
            upload(self.backend, &bytes)
        };
        let buffers = problem.kv.chunks(page_bytes * slab_pages as usize).map(upload_slab);
        Ok(Cache { buffers: buffers.collect::<Result<_>>()?, pages, slab_pages })
    }
}

/// The `block_table` of a problem.
pub fn dense_table(problem: &Problem) -> PageTable<'_> {
    PageTable::Dense { block_table: &problem.block_table, max_pages: problem.max_pages as u32 }
}

/// The pages of a problem as compressed rows.
pub struct Csr {
    kv_indptr: Vec<i32>,
    kv_indices: Vec<i32>,
}

impl Csr {
    pub fn of(problem: &Problem) -> Self {
        let mut csr = Self { kv_indptr: vec![0], kv_indices: Vec::new() };
        for (seq, &len) in problem.seq_lens.iter().enumerate() {
            let used = problem.spec.kv.pages_for(len as u32) as usize;
            csr.kv_indices.extend(&problem.block_table[seq * problem.max_pages..][..used]);
            csr.kv_indptr.push(csr.kv_indices.len() as i32);
        }
        csr
    }

    pub fn table(&self) -> PageTable<'_> {
        PageTable::Csr { kv_indptr: &self.kv_indptr, kv_indices: &self.kv_indices }
    }
}

/// The query in one array, or in two; the second is empty where it is not used.
struct QueryArrays {
    parts: [QueryArray; 2],
}

struct QueryArray {
    bytes: Vec<u8>,
    strides: Strides,
}

impl QueryArray {
    fn view<'a, T>(&self, buffer: &'a T) -> View<&'a T> {
        self.strides.view(buffer)
    }
}

impl QueryArrays {
    fn of(problem: &Problem, how: &How) -> Self {
        let (shape, elem) = (problem.spec.shape, problem.spec.query.bytes());
        let (latent, row) = (shape.kv_lora_rank as usize, shape.row_elems() as usize);
        let (tokens, heads) = (problem.total_q(), shape.num_heads as usize);
        let part = |range: std::ops::Range<usize>, layout: Layout| {
            let dims = [tokens, heads, range.len()];
            let strides = layout.strides(dims, 8);
            let columns = range.start * elem..range.end * elem;
            let dense: Vec<u8> =
                problem.q.chunks_exact(row * elem).flat_map(|row| &row[columns.clone()]).copied().collect();
            QueryArray { bytes: scatter(&dense, dims, elem, strides), strides }
        };
        // Parts of different layouts, so that a kernel that mixes up their strides is found.
        let second = if how.layout == Layout::HeadMajor { Layout::Gaps } else { how.layout };
        match how.slicing {
            Slicing::Whole => Self { parts: [part(0..row, how.layout), part(0..0, Layout::Dense)] },
            Slicing::Split => Self { parts: [part(0..latent, how.layout), part(latent..row, second)] },
        }
    }
}

/// An array that a kernel writes.
pub struct Output {
    pub dims: [usize; 3],
    pub elem: usize,
    pub strides: Strides,
    /// Bytes up to its last element.
    pub len: usize,
}

impl Output {
    pub fn new(dims: [usize; 3], dtype: Dtype, layout: Layout, unit: usize) -> Self {
        let (elem, strides) = (dtype.bytes(), layout.strides(dims, unit));
        Self { dims, elem, strides, len: strides.end(dims) * elem }
    }

    /// Its dense bytes, if nothing around it was written.
    pub fn read<B: Backend>(&self, backend: &B, buffer: &B::Buffer) -> Result<Vec<u8>, String> {
        let bytes = download(backend, buffer, self.len).map_err(|error| error.to_string())?;
        let (dense, intact) = gather(&bytes, self.dims, self.elem, self.strides);
        intact.map(|()| dense)
    }
}
