//! The checks of `BatchTables` for every backend.

use mla_support::ranks::cut;
use mla_support::reference::slot_mapping;
use wgpu_mla::{
    Backend, Batch, Compiled, DeviceBatch, Dtype, Error, KvAppend, KvAppendArgs, KvView, Mask, MlaDecode,
    MlaDecodeArgs, PageTable, Plan, Result, SharedPrefix, Shares, SplitPolicy, Tiling, View,
};

use mla_support::close::{Tolerance, close};
use mla_support::paint::{Make, POISON, Problem, Sees, sequences};

/// Sequences and query tokens that every batch is padded to. The last two sequences never have more.
const PADDED: [(u32, u32); 6] = [(37, 1), (300, 2), (64, 2), (90, 1), (0, 1), (0, 1)];
/// What the host plans for: nothing longer.
const BOUNDS: [i32; 6] = [40, 333, 64, 96, 50, 1];
/// Query tokens of all.
pub const TOKENS: u32 = 8;

/// A backend's types for recorded steps.
pub trait Serves: Backend + Sized {
    /// The decode variant that runs everywhere.
    const PLAIN: &'static str;
    /// A decode and an append, the tables of both, and everything bound.
    type Made;

    fn make(&self, variant: Option<&str>, spec: &MlaDecode, arrays: &Arrays<Self::Buffer>) -> Self::Made;
    fn decode_of(made: &Self::Made) -> &Compiled<MlaDecode, Self>;
    /// Prepares the step for whatever the arrays will hold, up to the plan's bounds.
    fn prepare_bounds(&self, made: &mut Self::Made, plan: &Plan) -> Result<()>;
    /// Prepares the step with tables of the host.
    fn prepare_of_host(&self, made: &mut Self::Made, plan: &Plan, pages: PageTable<'_>) -> Result<()>;
    /// Uploads the lengths, appends the new tokens and decodes the batch.
    fn serve(
        &self,
        made: &mut Self::Made,
        arrays: &Arrays<Self::Buffer>,
        seq_lens: &[i32],
        query_start_loc: &[i32],
    );
    /// The decode alone. What would write the tables of another `prepare` is refused.
    fn run_stale(&self, made: &mut Self::Made);
    fn bind_batch(&self, made: &Self::Made, batch: &DeviceBatch<&Self::Buffer>) -> Result<()>;
    /// What only this backend refuses, of a step that is prepared for the full batch.
    fn more_refusals(&self, made: &mut Self::Made, arrays: &Arrays<Self::Buffer>, plan: &Plan);
}

/// Memory of a backend.
pub struct Arrays<B> {
    pub seq_lens: B,
    pub query_start_loc: B,
    pub block_table: B,
    /// `[TOKENS, L + R]`: what is appended.
    pub rows: B,
    pub q: B,
    pub kv: B,
    pub out: B,
    pub lse: B,
    pub max_pages: u32,
    pub softmax_scale: f32,
    /// Whose each token is, and which rank this device is; `None`: it has all.
    pub share: Option<(Shares, u32)>,
}

impl<B> Arrays<B> {
    pub fn batch(&self) -> DeviceBatch<&B> {
        DeviceBatch {
            seq_lens: &self.seq_lens,
            query_start_loc: &self.query_start_loc,
            block_table: &self.block_table,
            batch: PADDED.len() as u32,
            max_pages: self.max_pages,
        }
    }

    pub fn layer(&self, spec: &MlaDecode) -> MlaDecodeArgs<&B> {
        MlaDecodeArgs::dense(spec, &self.q, &self.kv, &self.out, &self.lse, self.softmax_scale)
    }

    pub fn new_rows(&self, spec: &MlaDecode) -> KvAppendArgs<&B> {
        let view = |offset| View { offset, ..View::dense(&self.rows, 1, spec.shape.row_elems()) };
        KvAppendArgs {
            kv_c: view(0),
            k_pe: view(spec.shape.kv_lora_rank.into()),
            kv: KvView::dense(&self.kv, spec),
            k_scale: 1.0,
            guard: None,
        }
    }
}

pub fn append_spec(spec: &MlaDecode) -> KvAppend {
    KvAppend { shape: spec.shape, kv: spec.kv, input: Dtype::F16, guard: false }
}

/// Everything that serves batch after batch.
struct Serving<'a, D: Serves> {
    backend: &'a D,
    problem: Problem,
    arrays: Arrays<D::Buffer>,
    made: D::Made,
}

impl<'a, D: Serves> Serving<'a, D> {
    fn new(backend: &'a D, variant: Option<&str>, bounds: &[i32], policy: SplitPolicy) -> Self {
        Self::of_rank(backend, variant, bounds, policy, None)
    }

    /// `bounds` are those of whole sequences.
    fn of_rank(
        backend: &'a D,
        variant: Option<&str>,
        bounds: &[i32],
        policy: SplitPolicy,
        share: Option<(Shares, u32)>,
    ) -> Self {
        let whole = Make {
            dims: (256, 32),
            heads: 6,
            cache: Dtype::F16,
            query: Dtype::F16,
            sequences: sequences(&PADDED),
            ..Make::default()
        }
        .build();
        let (problem, bounds) = match &share {
            None => (whole, bounds.to_vec()),
            Some((shares, rank)) => {
                let bounds = shares.local_seq_lens(*rank, bounds).expect("bounds");
                (cut(&whole, shares, *rank).expect("a part"), bounds)
            }
        };
        let spec = problem.spec;
        let rows = (TOKENS * spec.shape.num_heads) as usize;
        let buffer = |bytes: &[u8]| {
            let buffer = backend.buffer(bytes.len() as u64).expect("a buffer");
            backend.upload(&buffer, 0, bytes).expect("uploaded");
            buffer
        };
        let arrays = Arrays {
            seq_lens: buffer(&[0; 6 * 4]),
            query_start_loc: buffer(&[0; 7 * 4]),
            block_table: buffer(bytemuck::cast_slice(&problem.block_table)),
            rows: buffer(&vec![POISON; TOKENS as usize * spec.shape.row_elems() as usize * 2]),
            q: buffer(&problem.q),
            kv: buffer(&problem.kv),
            out: buffer(&vec![POISON; rows * spec.shape.kv_lora_rank as usize * 4]),
            lse: buffer(&vec![POISON; rows * 4]),
            max_pages: problem.max_pages as u32,
            softmax_scale: problem.softmax_scale,
            share,
        };
        let made = backend.make(variant, &spec, &arrays);
        let mut serving = Self { backend, problem, arrays, made };
        let plan = serving.plan(&bounds, Mask::Full, policy);
        backend.prepare_bounds(&mut serving.made, &plan).expect("prepares");
        serving
    }

    fn plan(&self, bounds: &[i32], mask: Mask<'_>, policy: SplitPolicy) -> Plan {
        let decode = D::decode_of(&self.made);
        let batch = Batch { mask, ..Batch::new(bounds, &[0, 1, 3, 5, 6, 7, 8]) };
        Plan::new(decode.op(), &decode.tiling(), &batch, policy).expect("a plan")
    }

    fn upload(&self, buffer: &D::Buffer, bytes: &[u8]) {
        self.backend.upload(buffer, 0, bytes).expect("uploaded");
    }

    fn poison(&self) {
        let rows = (TOKENS * self.problem.spec.shape.num_heads) as usize;
        self.upload(
            &self.arrays.out,
            &vec![POISON; rows * self.problem.spec.shape.kv_lora_rank as usize * 4],
        );
        self.upload(&self.arrays.lse, &vec![POISON; rows * 4]);
    }

    /// Out and LSE.
    fn answer(&self) -> [Vec<f32>; 2] {
        let rows = u64::from(TOKENS * self.problem.spec.shape.num_heads);
        let latent = u64::from(self.problem.spec.shape.kv_lora_rank);
        [(&self.arrays.out, latent), (&self.arrays.lse, 1)].map(|(buffer, dim)| {
            Dtype::F32.decode_all(&self.backend.download(buffer, rows * dim * 4).expect("downloaded"))
        })
    }

    /// Compares what is in the outputs with the oracle's answer.
    fn check_answer(&self, problem: &Problem) {
        let [out, lse] = self.answer();
        let (want_out, want_lse) = problem.expected();
        let (spec, latent) = (problem.spec, problem.spec.shape.kv_lora_rank as usize);
        let (rounds_p, largest) = (D::decode_of(&self.made).rounds_weights(), problem.largest_latent());
        let tolerance = Tolerance::decode(spec.kv.dtype(), spec.query, spec.out, rounds_p, largest, latent);
        for report in
            [close("lse", &lse, &want_lse, &Tolerance::lse()), close("out", &out, &want_out, &tolerance)]
        {
            assert!(report.ok(), "{}: {report}", problem.name);
        }
    }

    /// A batch of these lengths. Before it the cache has no row of its new tokens, nor of any after them: poison.
    fn check(&mut self, seq_lens: &[i32], query_start_loc: &[i32]) {
        let problem = &self.problem;
        let (kv, row) = (problem.spec.kv, problem.spec.shape.row_elems() as usize * 2);
        let mut batch = Problem {
            seq_lens: seq_lens.to_vec(),
            query_start_loc: query_start_loc.to_vec(),
            ..problem.clone()
        };
        if let Some((shares, rank)) = &self.arrays.share {
            batch.seq_lens = shares.local_seq_lens(*rank, seq_lens).expect("lengths");
            batch.sees = Sees::Bounds(shares.local_bounds(*rank, seq_lens, query_start_loc).expect("bounds"));
        }
        // Where a token of a whole sequence is here, if it is.
        let place = |token: i32| match &self.arrays.share {
            None => Some(token),
            Some((shares, rank)) => {
                let here = shares.owner(token as u32) == *rank;
                here.then(|| shares.local_index(token as u32) as i32)
            }
        };
        // Slots are those of the positions, at which a table of the whole has the pages of what is here.
        let slots: Vec<i64> = if self.arrays.share.is_none() {
            slot_mapping(seq_lens, query_start_loc, &batch.block_table, kv.page_size as i32, 8)
        } else {
            let of_token = |token: i32| {
                let seq = (0..seq_lens.len()).find(|&seq| token < query_start_loc[seq + 1])?;
                let position = seq_lens[seq] - (query_start_loc[seq + 1] - token);
                let at = if position < 0 { None } else { place(position) }?;
                let page = batch.block_table[seq * batch.max_pages + (at as u32 / kv.page_size) as usize];
                Some(i64::from(page) * i64::from(kv.page_size) + i64::from(at as u32 % kv.page_size))
            };
            (0..8).map(|token| of_token(token).unwrap_or(-1)).collect()
        };
        let mut before = vec![POISON; problem.kv.len()];
        let mut after = before.clone();
        for (seq, &len) in seq_lens.iter().enumerate() {
            let new = query_start_loc[seq + 1] - query_start_loc[seq];
            for (token, here) in (0..len).filter_map(|token| Some((token, place(token)?))) {
                let page = batch.block_table[seq * batch.max_pages + here as usize / kv.page_size as usize];
                let at = (page * kv.page_size as i32 + here % kv.page_size as i32) as usize * row;
                let there = if token < len - new { vec![&mut before, &mut after] } else { vec![&mut after] };
                there.into_iter().for_each(|kv| kv[at..at + row].copy_from_slice(&problem.kv[at..at + row]));
            }
        }
        let mut rows = vec![POISON; 8 * row];
        for (token, &slot) in slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
            rows[token * row..][..row].copy_from_slice(&problem.kv[slot as usize * row..][..row]);
        }
        self.upload(&self.arrays.kv, &before);
        self.upload(&self.arrays.rows, &rows);
        self.poison();
        self.backend.serve(&mut self.made, &self.arrays, seq_lens, query_start_loc);
        let got = self.backend.download(&self.arrays.kv, after.len() as u64).expect("downloaded");
        let wrong = got.chunks(row).zip(after.chunks(row)).position(|(a, b)| a != b);
        assert_eq!(wrong, None, "a slot of the cache, lengths {seq_lens:?}");
        self.check_answer(&batch);
    }
}

impl<D: Serves> Serving<'_, D> {
    /// Pages that no pool has are its last one: the cache holds 1 there, and 0 elsewhere.
    fn wild_pages_read_the_last(&mut self, table: &[i32]) {
        let (pages, bytes) = (self.problem.spec.kv.num_pages as usize, self.problem.kv.len());
        let mut cache = vec![0; bytes];
        let ones = 0x3C00u16.to_le_bytes().repeat(bytes / pages / 2);
        cache[bytes - ones.len()..].copy_from_slice(&ones);
        for past in [0, 1, 5] {
            let mut table = table.to_vec();
            table.iter_mut().step_by(2).for_each(|page| *page = (pages + past) as i32);
            self.upload(&self.arrays.kv, &cache);
            self.upload(&self.arrays.block_table, bytemuck::cast_slice(&table));
            self.poison();
            self.backend.serve(
                &mut self.made,
                &self.arrays,
                &[30, 300, 17, 90, 0, 0],
                &[0, 1, 3, 5, 6, 6, 6],
            );
            let [out, _] = self.answer();
            let latent = self.problem.spec.shape.kv_lora_rank * self.problem.spec.shape.num_heads;
            let written = out[..5 * latent as usize].iter().position(|x| (x - 1.0).abs() > 1e-3);
            assert_eq!(written, None, "{past} pages past the last");
        }
    }
}

/// Lengths that rise and fall under one plan; padding; sequences with fewer query tokens than planned, or none.
pub fn a_step_of_upper_bounds_decodes_the_true_lengths<D: Serves>(backend: &D) {
    for (variant, policy) in [
        (None, SplitPolicy::FixedTokens(32)),
        (Some(D::PLAIN), SplitPolicy::Auto),
        (None, SplitPolicy::OneSplit),
    ] {
        let mut serving = Serving::new(backend, variant, &BOUNDS, policy);
        serving.check(&[30, 300, 17, 90, 0, 0], &[0, 1, 3, 5, 6, 6, 6]);
        serving.check(&[1, 150, 2, 0, 0, 0], &[0, 1, 3, 5, 6, 7, 8]);
        serving.check(&[37, 299, 64, 89, 0, 0], &[0, 1, 3, 5, 6, 6, 6]);
        // The third has one of its two query tokens, the rest is padding; a first token has nothing before it.
        serving.check(&[33, 1, 40, 0, 0, 0], &[0, 1, 3, 4, 4, 4, 4]);
        serving.check(&[0; 6], &[0; 7]);
    }
}

/// Each rank of several shares: global lengths arrive, local ones are decoded.
pub fn ranks_of_a_batch_decode_their_shares<D: Serves>(backend: &D) {
    for (shares, policy) in [
        (Shares::even(2, 1), SplitPolicy::FixedTokens(32)),
        (Shares::even(3, 16), SplitPolicy::Auto),
        (Shares::weighted(&[3, 0, 2], 5), SplitPolicy::OneSplit),
    ] {
        let shares = shares.expect("shares");
        for rank in 0..shares.world() {
            let share = Some((shares.clone(), rank));
            let mut serving = Serving::of_rank(backend, Some(D::PLAIN), &BOUNDS, policy, share);
            serving.check(&[30, 300, 17, 90, 0, 0], &[0, 1, 3, 5, 6, 6, 6]);
            serving.check(&[1, 150, 2, 0, 0, 0], &[0, 1, 3, 5, 6, 7, 8]);
            serving.check(&[33, 1, 40, 0, 0, 0], &[0, 1, 3, 4, 4, 4, 4]);
        }
    }
}

/// Whatever the arrays hold, reads and writes stay in the pool, and the next batch is right.
pub fn wild_batches_stay_in_the_pool<D: Serves>(backend: &D) {
    let shares = Shares::weighted(&[2, 3], 1).expect("shares");
    for share in [None, Some((shares, 1))] {
        wild_batches(Serving::of_rank(backend, None, &BOUNDS, SplitPolicy::FixedTokens(32), share));
    }
}

fn wild_batches<D: Serves>(mut serving: Serving<'_, D>) {
    // Halves of 1, of which none may get into the cache.
    serving.upload(&serving.arrays.rows, &0x3C00u16.to_le_bytes().repeat(8 * 288));
    let wild = [i32::MAX, i32::MIN, -1, 2_147_480_000, 1 << 30, 77];
    let table: Vec<i32> = (0..serving.problem.block_table.len()).map(|i| wild[i % 5]).collect();
    for turn in 0..6 {
        serving.upload(&serving.arrays.kv, &vec![0; serving.problem.kv.len()]);
        serving.upload(&serving.arrays.block_table, bytemuck::cast_slice(&table));
        let lens: Vec<i32> = (0..6).map(|i| wild[(i + turn) % 6]).collect();
        let starts: Vec<i32> = (0..7).map(|i| [wild[(i * 5 + turn) % 6], i as i32][turn % 2]).collect();
        serving.backend.serve(&mut serving.made, &serving.arrays, &lens, &starts);
        for values in serving.answer() {
            assert!(!values.iter().any(|x| x.is_nan()), "{lens:?} {starts:?}");
        }
        let cache = serving.backend.download(&serving.arrays.kv, serving.problem.kv.len() as u64);
        let written = cache.expect("downloaded").iter().position(|&byte| byte != 0);
        assert_eq!(written, None, "a page id past the pool wrapped into it, {lens:?} {starts:?}");
    }
    serving.wild_pages_read_the_last(&table);
    serving.upload(&serving.arrays.block_table, bytemuck::cast_slice(&serving.problem.block_table));
    serving.check(&[30, 300, 17, 90, 0, 0], &[0, 1, 3, 5, 6, 6, 6]);
}

/// A step goes back and forth between tables of the host and tables of the device.
pub fn host_tables_after_device_tables<D: Serves>(backend: &D) {
    let lens = PADDED.map(|(len, _)| len as i32);
    let mut serving = Serving::new(backend, None, &lens, SplitPolicy::FixedTokens(32));
    serving.check(&[1, 150, 2, 0, 0, 0], &[0, 1, 3, 5, 6, 7, 8]);
    // The same plan again: it is uploaded only because the step knows that the device has changed its tables.
    let host = Problem { sees: Sees::Full, ..serving.problem.clone() };
    serving.upload(&serving.arrays.kv, &host.kv);
    let plan = serving.plan(&lens, Mask::Full, SplitPolicy::FixedTokens(32));
    let pages = PageTable::Dense { block_table: &host.block_table, max_pages: host.max_pages as u32 };
    backend.prepare_of_host(&mut serving.made, &plan, pages).expect("prepares");
    // The lists belong to another prepare: they are refused, and the step decodes its own tables.
    for _ in 0..2 {
        serving.poison();
        backend.run_stale(&mut serving.made);
        serving.check_answer(&host);
    }
    let plan = serving.plan(&BOUNDS, Mask::Full, SplitPolicy::Auto);
    backend.prepare_bounds(&mut serving.made, &plan).expect("prepares");
    serving.check(&[30, 300, 17, 90, 0, 0], &[0, 1, 3, 5, 6, 6, 6]);
}

pub fn every_refusal_of_device_tables<D: Serves>(backend: &D) {
    let mut serving = Serving::new(backend, None, &BOUNDS, SplitPolicy::OneSplit);
    let (spec, tiling) = (serving.problem.spec, D::decode_of(&serving.made).tiling());
    let causal = serving.plan(&BOUNDS, Mask::Causal, SplitPolicy::Auto);
    let refused = backend.prepare_bounds(&mut serving.made, &causal).expect_err("refused");
    assert!(matches!(refused, Error::Shape { what: "visible keys of a query token", .. }), "{refused}");
    let prefixes = [SharedPrefix { sequences: vec![0, 1], tokens: 32 }];
    let batch = Batch {
        mask: Mask::Full,
        shared_prefixes: &prefixes,
        ..Batch::new(&BOUNDS, &serving.problem.query_start_loc)
    };
    // A prefix is shared where one tile has rows of several sequences.
    let wide = Tiling { rows_per_tile: 1024, ..tiling };
    let prefixed = Plan::new(&spec, &wide, &batch, SplitPolicy::FixedTokens(16)).expect("a plan");
    let refused = backend.prepare_bounds(&mut serving.made, &prefixed).expect_err("refused");
    assert!(matches!(refused, Error::Shape { what: "shared prefixes of the plan", .. }), "{refused}");
    let full = serving.plan(&BOUNDS, Mask::Full, SplitPolicy::Auto);
    let mut wild = full.clone();
    wild.items[0].page_begin = 7;
    let refused = backend.prepare_bounds(&mut serving.made, &wild).expect_err("refused");
    assert!(matches!(refused, Error::Shape { .. }), "{refused}");

    let batch = serving.arrays.batch();
    // A backend's buffers may be larger than what was asked for, by less than 16 bytes.
    let small = backend.buffer(16).expect("a buffer");
    for (batch, what) in [
        (DeviceBatch { batch: 9, ..batch }, "seq_lens"),
        (DeviceBatch { query_start_loc: &small, ..batch }, "query_start_loc"),
        (DeviceBatch { max_pages: 1 << 20, ..batch }, "block_table"),
        (DeviceBatch { batch: 0, ..batch }, "batch"),
        (DeviceBatch { max_pages: 0, ..batch }, "max_pages"),
    ] {
        let refused = backend.bind_batch(&serving.made, &batch).expect_err("refused").to_string();
        assert!(refused.contains(what), "{refused}");
    }
    backend.more_refusals(&mut serving.made, &serving.arrays, &full);
}
