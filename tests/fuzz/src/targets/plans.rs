//! Batches, block tables, plans and slabs, decoded on the CPU backend and compared with the oracle. Most batches are good, and are run;
//! in the others one number is broken, and they are refused or right.

mod batch;
mod coverage;
mod layers;
mod sparse;
mod spoil;

use std::sync::OnceLock;

use mla_support::close::{Tolerance, close};
use mla_support::reference::{Decode, mla_decode};
use wgpu_mla::cpu::{Buffer, Cpu};
use wgpu_mla::{
    Batch, Capacity, Compiled, Device, Dtype, Error, KvView, MlaDecode, MlaDecodeArgs, Plan, SlabTable, Step,
    Tiling, write_tables,
};

use crate::source::Source;
use crate::{Target, Verdict};
use batch::{Drawn, spec};
use spoil::{Spoiled, spoil};

/// The target.
pub const TARGET: Target = Target {
    name: "plans",
    about: "block tables with plans, slabs and shared prefixes, against the oracle",
    run,
    seeds: Vec::new,
    least_ran: 50,
    longest: 1024,
    memory: 512 << 20,
};

/// The device that all inputs share.
pub fn cpu() -> &'static Cpu {
    static CPU: OnceLock<Cpu> = OnceLock::new();
    CPU.get_or_init(|| Cpu::with_threads(2))
}

fn run(input: &[u8]) -> Verdict {
    let mut source = Source::new(input);
    if source.chance(24) {
        return coverage::large(&mut source);
    }
    if source.chance(48) {
        return layers::run(&mut source);
    }
    if source.chance(64) {
        return sparse::run(&mut source);
    }
    let spec = spec(&mut source);
    let decode = match cpu().compile(spec) {
        Ok(decode) => decode,
        Err(error) => panic!("{spec:?}: {error}"),
    };
    let mut rng = source.rng();
    // Any bits but NaN and infinity, about 1.
    let mut elements =
        |dtype: Dtype, count: u64| dtype.encode_all(&(0..count).map(|_| rng.randn()).collect::<Vec<_>>());
    let row = u64::from(spec.shape.row_elems());
    let kv = elements(spec.kv.dtype(), spec.kv.num_slots() * row);
    let (mut plan, mut words) = (Plan::default(), Vec::new());
    let mut step = decode.step(Capacity::default()).expect("a step");
    let mut ran = true;
    // A step and a plan serve one batch after the other.
    for _ in 0..source.between(1, 3) {
        let mut drawn = Drawn::draw(&mut source, &spec, &decode.tiling());
        let spoiled = spoil(&mut source, &mut drawn);
        let q = elements(spec.query, u64::from(drawn.tokens()) * u64::from(spec.shape.num_heads) * row);
        let made = (&mut plan, &mut words, &mut step);
        match decoded(&decode, &drawn, &spoiled, made, &q, &kv, &mut source) {
            Ok(()) => {}
            Err(error) => {
                assert!(spoiled != Spoiled::Nothing, "a good batch is refused: {error}: {spec:?} {drawn:?}");
                ran = false;
            }
        }
    }
    if ran { Verdict::Ran } else { Verdict::Refused }
}

/// Room behind outputs that nothing may write.
const GUARD: usize = 64;
const UNTOUCHED: u8 = 0xA5;

fn decoded(
    decode: &Compiled<MlaDecode, Cpu>,
    drawn: &Drawn,
    spoiled: &Spoiled,
    (plan, words, step): (&mut Plan, &mut Vec<u32>, &mut Step<MlaDecode, Cpu>),
    q: &[u8],
    kv: &[u8],
    source: &mut Source<'_>,
) -> Result<(), Error> {
    let spec = decode.op();
    let csr = drawn.csr();
    let pages = drawn.pages(&csr);
    let slabs = (drawn.slab_pages > 0).then_some(SlabTable { pages, slab_pages: drawn.slab_pages });
    let batch = Batch {
        seq_lens: &drawn.lens,
        query_start_loc: &drawn.starts,
        mask: drawn.sees.mask(),
        shared_prefixes: &drawn.prefixes,
        slabs,
    };
    plan.update(spec, &drawn.tiling, &batch, drawn.policy)?;
    coverage::check(plan, spec, &batch);
    // A number that was broken may give a batch that is good, and larger than the arrays.
    if plan.num_queries > drawn.tokens() {
        return Ok(());
    }
    if *spoiled == Spoiled::Plan {
        spoil::plan(source, plan);
    }
    // What a host does that uploads tables itself.
    if plan.slabs().is_empty() {
        write_tables(words, &Capacity::of(plan), plan, pages, &spec.kv)?;
    }
    let prepared_pages = match spoiled {
        Spoiled::OtherTable(entry) => {
            let mut other = drawn.clone();
            if let Some(page) = other.table.get_mut(*entry) {
                *page = page.wrapping_add(1) % spec.kv.num_pages as i32;
            }
            let csr = other.csr();
            return decode.prepare(step, (plan, other.pages(&csr)));
        }
        _ => pages,
    };
    decode.prepare(step, (plan, prepared_pages))?;
    let tokens = step.used();
    if tokens > 512 {
        // A changed plan asks for a binding of more query tokens than any array here has.
        return Ok(());
    }
    let heads = spec.shape.num_heads as usize;
    let rows = tokens as usize * heads;
    let (out_bytes, lse_bytes) = (rows * spec.shape.kv_lora_rank as usize * spec.out.bytes(), rows * 4);
    let [out, lse] =
        [out_bytes, lse_bytes].map(|bytes| filled(&vec![UNTOUCHED; bytes.next_multiple_of(4) + GUARD]));
    let slab_bytes = match drawn.slab_pages {
        0 => kv.len(),
        pages => spec.slab_bytes(pages) as usize,
    };
    let slabs: Vec<_> = kv.chunks(slab_bytes.max(1)).map(filled).collect();
    // A mutated plan may name more query tokens.
    let mut q_padded = q.to_vec();
    q_padded.resize(spec.query_bytes(tokens).next_multiple_of(4) as usize + q.len(), 0);
    let q_buffer = filled(&q_padded);
    let dense = MlaDecodeArgs::dense(spec, &q_buffer, &slabs[0], &out, &lse, drawn.softmax_scale);
    let kv_view = match drawn.slab_pages {
        0 => dense.kv.clone(),
        pages => KvView::in_slabs(&slabs.iter().collect::<Vec<_>>(), spec, pages, 0)?,
    };
    let args = MlaDecodeArgs { kv: kv_view, ..dense };
    let binding = decode.bind(&args, tokens)?;
    decode.run(step, &binding)?;
    let got = [(&out, out_bytes), (&lse, lse_bytes)].map(|(buffer, bytes)| {
        let mut all = cpu().download(buffer, buffer.bytes()).expect("downloaded");
        assert!(
            all[bytes..].iter().all(|&byte| byte == UNTOUCHED),
            "written past the end: {spec:?} {drawn:?}"
        );
        all.truncate(bytes);
        all
    });
    if *spoiled == Spoiled::Plan {
        return Ok(());
    }
    compare(spec, drawn, q, kv, &got);
    Ok(())
}

fn filled(bytes: &[u8]) -> Buffer {
    let mut padded = bytes.to_vec();
    padded.resize(bytes.len().next_multiple_of(4).max(4), 0);
    let buffer = cpu().buffer(padded.len() as u64).expect("a small buffer");
    cpu().upload(&buffer, 0, &padded).expect("uploaded");
    buffer
}

fn compare(spec: &MlaDecode, drawn: &Drawn, q: &[u8], kv: &[u8], [out, lse]: &[Vec<u8>; 2]) {
    let (heads, latent) = (spec.shape.num_heads as usize, spec.shape.kv_lora_rank as usize);
    let (block_table, max_pages) = drawn.dense();
    let cache = spec.kv.dtype().decode_all(kv);
    let (want_out, want_lse) = mla_decode(&Decode {
        num_heads: heads,
        kv_lora_rank: latent,
        qk_rope_head_dim: spec.shape.qk_rope_head_dim as usize,
        page_size: spec.kv.page_size as usize,
        q: &spec.query.decode_all(q),
        kv_cache: &cache,
        block_table: &block_table,
        max_pages,
        seq_lens: &drawn.lens,
        query_start_loc: &drawn.starts,
        mask: drawn.sees.mask(),
        softmax_scale: drawn.softmax_scale.into(),
        k_scale: 1.0,
        q_scale: 1.0,
    });
    let largest = cache.iter().fold(1f64, |most, x| most.max(f64::from(x.abs())));
    let tolerance = Tolerance::decode(spec.kv.dtype(), spec.query, spec.out, false, largest, latent);
    for report in [
        close("out", &spec.out.decode_all(out), &want_out, &tolerance),
        close("lse", &Dtype::F32.decode_all(lse), &want_lse, &Tolerance::lse()),
    ] {
        assert!(report.ok(), "{report}: {spec:?} {drawn:?}");
    }
}

/// The tiling of a decode's kernel.
fn tiling_of(cpu: &Cpu, spec: &MlaDecode) -> Tiling {
    cpu.compile(*spec).expect("a spec that is served").tiling()
}

/// A tiling that a plan for the CPU may have.
fn tiling(source: &mut Source<'_>, of: &Tiling) -> Tiling {
    let number = |source: &mut Source<'_>, usual: u32| match source.below(4) {
        0 | 1 => usual,
        2 => source.between(0, 40),
        _ => source.hostile(),
    };
    Tiling {
        rows_per_tile: if source.chance(64) { source.between(1, of.rows_per_tile) } else { of.rows_per_tile },
        tokens_per_block: number(source, of.tokens_per_block),
        target_items: number(source, of.target_items),
        min_split_tokens: number(source, of.min_split_tokens),
        single_sequence_items: number(source, of.single_sequence_items),
        item_overhead_tokens: number(source, of.item_overhead_tokens),
    }
}
