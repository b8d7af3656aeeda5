//! Lists of slots: plans of them, some with a number broken, and decodes of entries of all kinds.

use mla_support::close::{Tolerance, close};
use mla_support::reference::{Decode, Lists, attn_sink, cache_values, mla_decode_sparse};
use wgpu_mla::{
    Capacity, DecodeOptions, Device, Dtype, Error, Indices, KvView, Mask, MlaDecode, MlaDecodeArgs,
    PageTable, Plan, SparseBatch, SplitPolicy, View,
};

use super::batch::spec;
use super::{GUARD, UNTOUCHED, cpu, filled, spoil, tiling};
use crate::Verdict;
use crate::source::Source;

/// What is decoded.
#[derive(Debug)]
struct Drawn {
    tokens: u32,
    topk: u32,
    slots: Vec<i32>,
    lengths: Option<Vec<i32>>,
    sinks: Option<Vec<f32>>,
    slab_pages: Option<u32>,
    policy: SplitPolicy,
}

fn draw(source: &mut Source<'_>, spec: &MlaDecode) -> Drawn {
    let (tokens, topk) = (source.between(0, 6), source.pick(&[1, 2, 15, 33, 64, 90]));
    let num_slots = spec.kv.num_slots();
    let entry = |source: &mut Source<'_>| match source.below(6) {
        0 => source.hostile() as i32,
        1 => num_slots as i32 - 1 + source.between(0, 2) as i32,
        _ => source.below(num_slots) as i32,
    };
    let slots = (0..tokens * topk).map(|_| entry(source)).collect();
    let has_lengths = source.chance(128);
    // A length past the list counts all of it, a negative one nothing.
    let length = |source: &mut Source<'_>| match source.below(8) {
        0 => source.hostile() as i32,
        _ => source.between(0, topk) as i32,
    };
    let lengths = has_lengths.then(|| (0..tokens).map(|_| length(source)).collect());
    let sink = |source: &mut Source<'_>| source.pick(&[0.0, 1.5, f32::NEG_INFINITY, f32::INFINITY, -40.0]);
    let has_sinks = source.chance(96);
    let sinks = has_sinks.then(|| (0..spec.shape.num_heads).map(|_| sink(source)).collect());
    let pages = spec.kv.num_pages;
    Drawn {
        tokens,
        topk,
        slots,
        lengths,
        sinks,
        slab_pages: (pages > 1 && source.chance(64)).then(|| source.between(pages.div_ceil(64), pages)),
        policy: match source.below(3) {
            0 => SplitPolicy::OneSplit,
            1 => SplitPolicy::FixedTokens(source.between(1, 40)),
            _ => SplitPolicy::Auto,
        },
    }
}

/// Decodes lists, on a plan that is good or has a number broken.
pub fn run(source: &mut Source<'_>) -> Verdict {
    let spec = spec(source);
    let drawn = draw(source, &spec);
    let is_spoiled = source.chance(64);
    match decoded(source, &spec, &drawn, is_spoiled) {
        Ok(()) => Verdict::Ran,
        Err(error) => {
            assert!(is_spoiled, "good lists are refused: {error}: {spec:?} {drawn:?}");
            Verdict::Refused
        }
    }
}

fn decoded(source: &mut Source<'_>, spec: &MlaDecode, drawn: &Drawn, is_spoiled: bool) -> Result<(), Error> {
    let Drawn { tokens, topk, ref slots, ref lengths, ref sinks, slab_pages, policy } = *drawn;
    let options = DecodeOptions { topk, attn_sink: sinks.is_some(), ..DecodeOptions::default() };
    let decode = cpu().compile_with(*spec, &options)?;
    let tiling = tiling(source, &decode.tiling());
    let mut batch = SparseBatch { slab_pages, ..SparseBatch::new(tokens, topk) };
    if is_spoiled && source.chance(128) {
        match source.below(3) {
            0 => batch.topk = source.hostile(),
            1 => batch.num_queries = source.hostile() % 100_000,
            _ => batch.slab_pages = Some(source.hostile()),
        }
    }
    let mut plan = Plan::sparse(spec, &tiling, &batch, policy)?;
    if is_spoiled {
        spoil::plan(source, &mut plan);
    }
    let mut step = decode.step(Capacity::default())?;
    decode.prepare(&mut step, (&plan, PageTable::Indices))?;
    if step.used() > tokens {
        return Ok(());
    }

    let mut rng = source.rng();
    let mut elements =
        |dtype: Dtype, count: usize| dtype.encode_all(&(0..count).map(|_| rng.randn()).collect::<Vec<f32>>());
    let (heads, row) = (spec.shape.num_heads as usize, spec.shape.row_elems() as usize);
    let rows = tokens as usize * heads;
    let q = elements(spec.query, rows * row);
    let kv = elements(spec.kv.dtype(), spec.kv.num_slots() as usize * row);
    let (out_bytes, lse_bytes) = (spec.out_bytes(tokens) as usize, rows * 4);
    let [out, lse] =
        [out_bytes, lse_bytes].map(|bytes| filled(&vec![UNTOUCHED; bytes.next_multiple_of(4) + GUARD]));
    let words = |words: &[i32]| filled(&words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>());
    let (q_buffer, listed) = (filled(&q), words(slots));
    let lengths_buffer = lengths.as_ref().map(|lengths| words(lengths));
    let slab_bytes = slab_pages.map_or(kv.len(), |pages| spec.slab_bytes(pages) as usize);
    let slabs: Vec<_> = kv.chunks(slab_bytes.max(1)).map(filled).collect();
    let dense = MlaDecodeArgs::dense(spec, &q_buffer, &slabs[0], &out, &lse, 0.1147);
    let handles: Vec<_> = slabs.iter().collect();
    let args = MlaDecodeArgs {
        kv: slab_pages.map_or(Ok(dense.kv.clone()), |pages| KvView::in_slabs(&handles, spec, pages, 0))?,
        indices: Some(Indices {
            topk_length: lengths_buffer.as_ref().map(|buffer| View::dense(buffer, 1, 1)),
            ..Indices::dense(&listed, topk)
        }),
        attn_sink: sinks.clone(),
        ..dense
    };
    let binding = decode.bind(&args, tokens)?;
    decode.run(&step, &binding)?;
    let read = |buffer: &_, bytes: usize| {
        let all = cpu().download(buffer, (bytes.next_multiple_of(4) + GUARD) as u64).expect("downloaded");
        assert!(
            all[bytes..].iter().all(|&byte| byte == UNTOUCHED),
            "written past the end: {spec:?} {drawn:?}"
        );
        all[..bytes].to_vec()
    };
    let (got_out, got_lse) = (read(&out, out_bytes), read(&lse, lse_bytes));
    if is_spoiled {
        return Ok(());
    }

    let cache = cache_values(&spec.kv, &spec.shape, &kv);
    let args = Decode {
        num_heads: heads,
        kv_lora_rank: spec.shape.kv_lora_rank as usize,
        qk_rope_head_dim: spec.shape.qk_rope_head_dim as usize,
        page_size: spec.kv.page_size as usize,
        q: &spec.query.decode_all(&q),
        kv_cache: &cache,
        block_table: &[],
        max_pages: 0,
        seq_lens: &[],
        query_start_loc: &[0],
        mask: Mask::Full,
        softmax_scale: 0.1147f32.into(),
        k_scale: 1.0,
        q_scale: 1.0,
    };
    let clamped: Option<Vec<i32>> =
        lengths.as_ref().map(|all| all.iter().map(|&length| length.clamp(0, topk as i32)).collect());
    let lists = Lists { slots, topk: topk as usize, topk_length: clamped.as_deref() };
    let (mut want_out, want_lse) = mla_decode_sparse(&args, &lists);
    if let Some(sinks) = sinks {
        attn_sink(&mut want_out, &want_lse, sinks);
    }
    let largest = cache.iter().fold(1f64, |most, x| most.max(f64::from(x.abs())));
    let latent = spec.shape.kv_lora_rank as usize;
    let tolerance = Tolerance::decode(spec.kv.dtype(), spec.query, spec.out, false, largest, latent);
    for report in [
        close("out", &spec.out.decode_all(&got_out), &want_out, &tolerance),
        close("lse", &Dtype::F32.decode_all(&got_lse), &want_lse, &Tolerance::lse()),
    ] {
        assert!(report.ok(), "{report}: {spec:?} {drawn:?}");
    }
    Ok(())
}
