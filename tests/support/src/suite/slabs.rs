//! Pools that are larger than one binding: the same results from a cache in several slabs.

use wgpu_mla::{
    Backend, Batch, Dtype, GatherBatch, GatherRange, KvAppend, KvAppendArgs, KvCopyPages, KvGather,
    KvGatherArgs, KvLayout, KvSpec, KvView, MlaDecode, MlaDecodeArgs, MlaShape, PageTable, Plan, Result,
    RopeAppend, RopeAppendArgs, RopeAppendBatch, RopeFrequencies, RopeLayout, SlabTable, SplitPolicy, View,
};

use super::Session;
use super::layer_rig::{PREFIX_ROWS, Rig, Submitted, spec as layer_spec};
use super::memory::{download, upload};
use super::run::{How, Layout, Slicing, dense_table};
use crate::paint::{Make, POISON, Problem, Rng, Sees, sequences};

/// Decodes against the oracle: rows in one slab, in several and in none; each dtype, several query tokens, masks, shared prefixes.
pub fn slabs<B: Backend>(session: &Session<'_, B>) {
    let bounds = Sees::Bounds(vec![0, 37, 5, 16, 89, 90, 48]);
    let lens: &[(u32, u32)] = &[(37, 2), (0, 1), (150, 1), (64, 3), (16, 1), (90, 0)];
    let bounded: &[(u32, u32)] = &[(37, 2), (64, 2), (90, 3)];
    let prefixed: &[(u32, u32)] = &[(100, 1), (90, 2), (64, 1)];
    let all = [
        (Dtype::Bf16, Dtype::Bf16, 16, lens, 0, Sees::Causal),
        (Dtype::E4m3, Dtype::F16, 6, lens, 0, Sees::Causal),
        (Dtype::F32, Dtype::F32, 20, bounded, 0, bounds),
        (Dtype::F16, Dtype::F16, 16, prefixed, 64, Sees::Causal),
    ];
    for (cache, query, heads, lens, prefix, sees) in session.one_in(2, all) {
        let sequences = sequences(lens);
        let problem = Make { cache, query, heads, sequences, prefix, sees, ..Make::default() }.build();
        let pages = problem.spec.kv.num_pages;
        let hows = [
            How { slab_pages: pages.div_ceil(2), ..How::default() },
            How { slab_pages: pages.div_ceil(3), policy: SplitPolicy::FixedTokens(32), ..How::default() },
            How {
                slab_pages: 2,
                layout: Layout::Gaps,
                slicing: Slicing::Split,
                query_tokens: 2,
                ..How::default()
            },
            How { slab_pages: 1, policy: SplitPolicy::OneSplit, csr: true, grow: true, ..How::default() },
        ];
        for how in hows {
            session.check(&problem, &how);
        }
    }
    session.check(&repeated_page(), &How { slab_pages: 1, ..How::default() });
    session.finish("slabs");
}

/// A row that names a page twice: more of the sequence's tokens are in that page's slab than the slab has slots.
fn repeated_page() -> Problem {
    let mut problem = Make { sequences: sequences(&[(60, 1), (16, 1)]), ..Make::default() }.build();
    problem.block_table[2] = problem.block_table[0];
    problem
}

/// Layers whose pools are in slabs: prompts in chunks, decodes, forks whose copies cross slabs, expanded prefixes.
pub fn layers_in_slabs<B: Backend>(session: &Session<'_, B>) {
    let all = [(Dtype::F32, Dtype::F16), (Dtype::F16, Dtype::E4m3), (Dtype::Bf16, Dtype::Bf16)];
    for (dtype, cache) in session.one_in(3, all) {
        let spec = layer_spec(dtype, cache, RopeLayout::Interleaved, 24);
        for slab_pages in [3, 14] {
            let what = format!("{dtype} over {cache}, slabs of {slab_pages} pages");
            let rig = |rows| Rig::in_slabs(session.backend, (spec, slab_pages), rows, Submitted, 7);
            match rig(0).and_then(|mut rig| rig.life(SplitPolicy::Auto)) {
                Ok(steps) => {
                    for (index, step) in steps.iter().enumerate() {
                        session.note(&format!("{what}, step {index}"), step.check());
                    }
                }
                Err(error) => session.note(&what, Err(error.to_string())),
            }
            match rig(PREFIX_ROWS).and_then(|mut rig| rig.cascade()) {
                Ok(steps) => {
                    for (name, step) in &steps {
                        session.note(&format!("{what}, {name}"), step.check());
                    }
                }
                Err(error) => session.note(&format!("{what}, prefixes"), Err(error.to_string())),
            }
        }
    }
    session.finish("layers in slabs");
}

const SHAPE: MlaShape = MlaShape { num_heads: 1, kv_lora_rank: 256, qk_rope_head_dim: 32 };

/// Appends, copies and gathers: the bytes are those of a pool in one buffer.
pub fn ops_in_slabs<B: Backend>(session: &Session<'_, B>) {
    for layout in Dtype::ALL.map(KvLayout::from).into_iter().chain([KvLayout::Ds656]) {
        let kv = KvSpec { layout, page_size: 4, num_pages: 11 };
        let mut all = [11, 5, 1].map(|slab_pages| run_ops(session.backend, kv, slab_pages));
        let whole = std::mem::replace(&mut all[0], Ok([Vec::new(), Vec::new()]));
        for (slab_pages, got) in [5, 1].into_iter().zip(&all[1..]) {
            let what = match (&whole, got) {
                (Ok(whole), Ok(got)) if whole == got => Ok(()),
                (Ok(whole), Ok(got)) => {
                    let is_cache = whole[0] != got[0];
                    Err(if is_cache { "the cache differs" } else { "gathered rows or queries differ" }
                        .to_owned())
                }
                (Err(error), _) | (_, Err(error)) => Err(error.to_string()),
            };
            session.note(&format!("{layout}, slabs of {slab_pages} pages"), what);
        }
    }
    session.finish("ops in slabs");
}

/// The cache after appends and copies, and rows that were gathered from it before the last, with the queries that this turned.
fn run_ops<B: Backend>(backend: &B, kv: KvSpec, slab_pages: u32) -> Result<[Vec<u8>; 2]> {
    let records = MlaShape { kv_lora_rank: 512, qk_rope_head_dim: 64, ..SHAPE };
    let shape = if kv.layout.is_plain() { SHAPE } else { records };
    let (latent, rope) = (u64::from(shape.kv_lora_rank), shape.qk_rope_head_dim);
    let row = shape.row_elems() as usize;
    let mla = MlaDecode { shape, kv, query: Dtype::F32, out: Dtype::F32 };
    let page_bytes = mla.slab_bytes(1) as usize;
    let slab_pages_of = |slab: u32| slab_pages.min(kv.num_pages - slab * slab_pages) as usize;
    let slabs = (0..kv.num_slabs(slab_pages)?).map(|slab| {
        let before = vec![POISON; (slab_pages as usize + slab_pages_of(slab)) * page_bytes];
        upload(backend, &before)
    });
    let slabs = slabs.collect::<Result<Vec<_>>>()?;
    // The second of two layers: a page of another slab would be a place in the first.
    let view = KvView::in_slabs(&slabs.iter().collect::<Vec<_>>(), &mla, slab_pages, 1)?;

    let tokens = 40u32;
    let mut rng = Rng(3);
    let rows: Vec<f32> = (0..tokens as usize * row).map(|_| rng.randn()).collect();
    let input = upload(backend, &Dtype::F32.encode_all(&rows))?;
    // Every fifth token is skipped; the others go to slots of every slab.
    let slot = |token: i64| if token % 5 == 3 { -1 } else { (token * 17 + 5) % 44 };
    let slots: Vec<i64> = (0..i64::from(tokens)).map(slot).collect();
    let whole = View::dense(&input, 1, row as u32);
    let k_scale = if kv.layout == Dtype::E4m3.into() { 0.125 } else { 1.0 };
    let args = KvAppendArgs {
        kv_c: whole,
        k_pe: View { offset: latent, ..whole },
        kv: view.clone(),
        k_scale,
        guard: None,
    };
    backend.once(KvAppend { shape, kv, input: Dtype::F32, guard: false }, &slots, &args)?;
    // Inside of a slab, and between two in both directions.
    let copies = [(0, 1), (2, 9), (10, 4), (7, 6), (2, 3)];
    backend.once(KvCopyPages { shape, kv }, &copies, &view)?;

    let output = if kv.layout.is_plain() { kv.dtype() } else { Dtype::Bf16 };
    let out = upload(backend, &vec![POISON; 30 * row * output.bytes()])?;
    let range = |sequence, begin, tokens, out_row| GatherRange { sequence, begin, tokens, out_row };
    let batch = GatherBatch {
        pages: PageTable::Dense { block_table: &[9, 0, 5, 10, 3, 1, 6, 2], max_pages: 4 },
        seq_lens: &[15, 16],
        ranges: &[range(0, 2, 12, 3), range(1, 0, 15, 15)],
    };
    let args = KvGatherArgs { kv: view.clone(), k_scale, out: View::dense(&out, 1, row as u32) };
    backend.once(KvGather { shape, kv, output }, batch, &args)?;

    // Tokens of every slab, whose queries are turned in place: once, and not once a slab.
    let q_pe = upload(backend, &Dtype::F32.encode_all(&rows[..4 * rope as usize]))?;
    let positions = upload(backend, &[3i32, 1, 2, 7].map(i32::to_le_bytes).concat())?;
    let cos_sin =
        upload(backend, &Dtype::F32.encode_all(&RopeFrequencies::plain(rope, 10_000.0)?.cos_sin(8)?))?;
    let args = RopeAppendArgs {
        q_pe: View::dense(&q_pe, 1, rope),
        q_pe_out: View::dense(&q_pe, 1, rope),
        layer: KvAppendArgs {
            kv_c: whole,
            k_pe: View { offset: latent, ..whole },
            kv: view,
            k_scale,
            guard: None,
        },
        positions: &positions,
        cos_sin: &cos_sin,
        max_position: 8,
        q_pe_scale: 1.0,
        q_scale: 1.0,
    };
    let append = KvAppend { shape, kv, input: Dtype::F32, guard: false };
    let op = RopeAppend {
        append,
        query: Dtype::F32,
        query_out: Dtype::F32,
        num_heads: 1,
        layout: RopeLayout::HalfSplit,
    };
    backend.once(op, RopeAppendBatch::slots(&[41, 22, 8, 1]), &args)?;

    let mut cache = Vec::new();
    for (slab, buffer) in (0..).zip(&slabs) {
        let [first_layer, layer] = [slab_pages as usize, slab_pages_of(slab)].map(|pages| pages * page_bytes);
        let mut got = download(backend, buffer, first_layer + layer)?;
        let past = got.split_off(first_layer + layer);
        assert!(past.iter().all(|&byte| byte == POISON), "a slab was written past its end");
        let own = got.split_off(first_layer);
        assert!(got.iter().all(|&byte| byte == POISON), "another layer was written");
        cache.extend(own);
    }
    let mut read = download(backend, &out, 30 * row * output.bytes())?;
    read.extend(download(backend, &q_pe, 4 * rope as usize * 4)?);
    Ok([cache, read])
}

/// Wrong slabs are errors before anything is recorded.
pub fn refuses_slabs<B: Backend>(session: &Session<'_, B>) {
    // Whichever the forced variant serves.
    let specs = [(Dtype::F32, (256, 32)), (Dtype::Bf16, (512, 64))];
    let problems =
        specs.map(|(dtype, dims)| Make { cache: dtype, query: dtype, dims, ..Make::default() }.build());
    match problems.iter().find(|problem| session.serves(&problem.spec)) {
        Some(problem) => {
            let what = refusals(session, problem).map_err(|error| error.to_string());
            session.note("refusals", what.and_then(|all| all));
        }
        None => session.leave_out(),
    }
    session.finish("refusals of slabs");
}

fn refusals<B: Backend>(session: &Session<'_, B>, problem: &Problem) -> Result<Result<(), String>> {
    let (backend, spec) = (session.backend, &problem.spec);
    let decode = session.decode(spec)?;
    let pages = dense_table(problem);
    let planned = |slab_pages| {
        let slabs = Some(SlabTable { pages, slab_pages });
        let batch = Batch { slabs, ..Batch::new(&problem.seq_lens, &problem.query_start_loc) };
        Plan::new(spec, &decode.tiling(), &batch, SplitPolicy::Auto)
    };
    let half = spec.kv.num_pages.div_ceil(2);
    let tokens = problem.total_q() as u32;
    let [q, out, lse] = [spec.query_bytes(tokens), spec.out_bytes(tokens), spec.lse_bytes(tokens)]
        .map(|bytes| backend.buffer(bytes));
    let (q, out, lse) = (q?, out?, lse?);
    let buffers = [backend.buffer(spec.slab_bytes(half))?, backend.buffer(spec.slab_bytes(half))?];
    let two = KvView::in_slabs(&[&buffers[0], &buffers[1]], spec, half, 0)?;
    let args = |kv| MlaDecodeArgs { kv, ..MlaDecodeArgs::dense(spec, &q, &buffers[0], &out, &lse, 0.1) };
    let bound = decode.bind(&args(two), tokens)?;
    let plan = planned(half)?;
    let mut step = decode.step(Default::default())?;
    decode.prepare(&mut step, (&plan, pages))?;
    decode.run(&step, &bound)?;

    let other_pages: Vec<i32> =
        problem.block_table.iter().map(|&page| if page == 0 { 1 } else { page }).collect();
    let other_table = PageTable::Dense { block_table: &other_pages, max_pages: problem.max_pages as u32 };
    let mut third = decode.step(Default::default())?;
    decode.prepare(&mut third, (&planned(spec.kv.num_pages.div_ceil(3))?, pages))?;
    let mut whole = decode.step(Default::default())?;
    let batch = Batch::new(&problem.seq_lens, &problem.query_start_loc);
    let plan_of_one = Plan::new(spec, &decode.tiling(), &batch, SplitPolicy::Auto)?;
    decode.prepare(&mut whole, (&plan_of_one, pages))?;
    let copy = KvCopyPages { shape: spec.shape, kv: spec.kv };
    let twice = KvView::in_slabs(&[&buffers[0], &buffers[0]], spec, half, 0)?;
    let small = backend.buffer(spec.slab_bytes(1))?;
    let short = KvView::in_slabs(&[&buffers[0], &small], spec, half, 0)?;
    let gather = KvGather { shape: spec.shape, kv: spec.kv, output: Dtype::F32 };
    let gathered =
        KvGatherArgs { kv: twice.clone(), k_scale: 1.0, out: View::dense(&q, 1, spec.shape.row_elems()) };
    let gathered_twice = backend.compile(gather)?.bind(&gathered, 1).map(drop);
    let wrong = [
        ("other slabs", decode.run(&third, &bound), "other slabs"),
        ("one buffer's plan", decode.run(&whole, &bound), "other slabs"),
        ("another table", decode.prepare(&mut step, (&plan, other_table)), "not the one that was planned"),
        ("a table of the device", planned_on_device(spec, &decode.tiling(), problem), "use one buffer"),
        ("no pages", planned(0).map(drop), "slab_pages"),
        ("one buffer for two", KvView::in_slabs(&[&buffers[0]], spec, half, 0).map(drop), "slabs"),
        ("a slab that is too small", decode.bind(&args(short), tokens).map(drop), "kv"),
        (
            "one buffer twice",
            backend.once(copy, &[(0, 1)], &twice),
            "slab 0 of kv and slab 1 of kv are the same buffer",
        ),
        (
            "read twice",
            decode.bind(&args(twice), tokens).map(drop),
            "slab 0 of kv and slab 1 of kv are the same buffer",
        ),
        ("gathered twice", gathered_twice, "slab 0 of kv and slab 1 of kv are the same buffer"),
    ];
    for (what, result, cure) in wrong {
        match result {
            Err(error) if error.to_string().contains(cure) => {}
            Err(error) => return Ok(Err(format!("{what}: {error}, which does not say {cure:?}"))),
            Ok(()) => return Ok(Err(format!("{what} was accepted"))),
        }
    }
    Ok(Ok(()))
}

fn planned_on_device(spec: &MlaDecode, tiling: &wgpu_mla::Tiling, problem: &Problem) -> Result<()> {
    let slabs = Some(SlabTable { pages: PageTable::Device, slab_pages: 1 });
    let batch = Batch { slabs, ..Batch::new(&problem.seq_lens, &problem.query_start_loc) };
    Plan::new(spec, tiling, &batch, SplitPolicy::Auto).map(drop)
}
