//! Ops that write, move and read a cache: each byte is the reference's, and nothing else is written.

use wgpu_mla::{
    Backend, Dtype, GatherBatch, GatherRange, KvAppend, KvAppendArgs, KvCopyPages, KvGather, KvGatherArgs,
    KvSpec, MlaDecode, MlaShape, PageTable, ReorgBatch, ReorgChunk, ReorgKvCache, ReorgKvCacheArgs, Shares,
};

use super::decode::{DIMS, FLOATS, WILD, factor, length, page_size};
use super::draw::{Draw, bytes, nearest, value, values};
use super::judge::same;
use super::place::{Array, Cache};
use super::reference::owner;
use super::{Under, text};

/// A cache of few heads and a pool of a few pages.
pub fn spec(spec_draw: &mut Draw, draw: &mut Draw) -> MlaDecode {
    let (kv_lora_rank, qk_rope_head_dim) = spec_draw.pick(&DIMS);
    let (cache, input) = (spec_draw.pick(&Dtype::ALL), spec_draw.pick(&FLOATS));
    let page_size = page_size(spec_draw);
    let pages = 1 + draw.below(600 / page_size + 2);
    let kv = KvSpec::new(cache, page_size as u32, pages as u32);
    let shape = MlaShape { num_heads: 1, kv_lora_rank, qk_rope_head_dim };
    MlaDecode { shape, kv, query: input, out: Dtype::F32 }
}

pub fn line(spec: &MlaDecode) -> String {
    let MlaDecode { shape: MlaShape { kv_lora_rank, qk_rope_head_dim, .. }, kv, query, .. } = spec;
    let (pages, page_size) = (kv.num_pages, kv.page_size);
    format!("{kv_lora_rank}/{qk_rope_head_dim} kv {} of {pages}x{page_size} input {query}", kv.dtype())
}

/// Any bits at all, or values that a dtype's end, its subnormals and ties of narrower dtypes are among.
pub fn anything(draw: &mut Draw, dtype: Dtype, count: usize) -> Vec<u8> {
    let amplitude = draw.pick(&[1.0, 300.0, 1e-4, 1e5, 1e-7]);
    let any = |draw: &mut Draw| match draw.below(24) {
        0 => draw.bits() as u32,
        1 => nearest(
            dtype,
            draw.pick(&[
                f64::INFINITY,
                f64::NEG_INFINITY,
                f64::NAN,
                0.0,
                -0.0,
                448.0,
                464.0,
                65520.0,
                65519.0,
            ]),
        ),
        // A tie of e4m3, f16 or bf16, or next to it.
        2 | 3 => nearest(dtype, (draw.below(512) as f64 + 0.5) * (draw.below(40) as f64 - 24.0).exp2()),
        4 => nearest(dtype, draw.normal() * (draw.below(80) as f64 - 60.0).exp2()),
        _ => nearest(dtype, draw.normal() * amplitude),
    };
    (0..count).flat_map(|_| any(draw).to_le_bytes()[..dtype.bytes()].to_vec()).collect()
}

/// What a cache element of an input element is: itself where the dtypes agree.
pub fn stored(input: Dtype, cache: Dtype, k_scale: f32, element: &[u8]) -> Vec<u8> {
    if input == cache {
        return element.to_vec();
    }
    bytes(cache, [values(input, element)[0] / f64::from(k_scale)])
}

/// Slots of the pool for tokens, some of them skipped.
pub fn slots(draw: &mut Draw, kv: &KvSpec, tokens: usize) -> Vec<i64> {
    let order = draw.shuffled(kv.num_slots() as usize);
    let slot = |i: usize, draw: &mut Draw| match order.get(i) {
        Some(&slot) if !draw.once_in(5) => slot as i64,
        _ => draw.pick(&[-1, -7, i64::MIN]),
    };
    (0..tokens).map(|i| slot(i, draw)).collect()
}

/// An append to a pool that holds anything, then a gather of sequences that lie in it.
pub fn append_and_gather<B: Backend>(
    under: &Under<'_, B>,
    spec_draw: &mut Draw,
    draw: &mut Draw,
) -> Result<(), String> {
    let mla = spec(spec_draw, draw);
    let MlaDecode { shape, kv, query: input, .. } = mla;
    let output =
        if kv.dtype() == Dtype::E4m3 { spec_draw.pick(&Dtype::ALL) } else { spec_draw.pick(&FLOATS) };
    let (backend, cache) = (under.backend, kv.dtype());
    let (latent, row) = (shape.kv_lora_rank as usize, shape.row_elems() as usize);
    let k_scale = if cache == Dtype::E4m3 { factor(draw, draw.clone().pick(&[1.0, 0.01, 3.0])) } else { 1.0 };
    let tokens = draw.within(0, 24);
    let slots = slots(draw, &kv, tokens);
    let mut want = anything(draw, cache, kv.num_slots() as usize * row);
    let dense = anything(draw, input, tokens * row);
    let place = Cache::draw(draw, &kv, row, draw.clone().once_in(3));
    let buffers = place.upload(backend, &want)?;
    let elem = input.bytes();
    let part = |range: std::ops::Range<usize>| -> Vec<u8> {
        dense.chunks(row * elem).flat_map(|row| &row[range.start * elem..range.end * elem]).copied().collect()
    };
    let at = [latent, row - latent].map(|dim| Array::draw(draw, [tokens, 1, dim], elem, 4));
    let [kv_c, k_pe] = [at[0].upload(backend, &part(0..latent))?, at[1].upload(backend, &part(latent..row))?];
    let args = KvAppendArgs {
        kv_c: at[0].view(&kv_c),
        k_pe: at[1].view(&k_pe),
        kv: place.view(&mla, &buffers)?,
        k_scale,
        guard: None,
    };
    let told = format!("{} k_scale {k_scale} {tokens} tokens slabs {:?}", line(&mla), place.slab_pages());
    let wrong = |error| format!("kv_append {told}: {error}");
    backend.once(KvAppend { shape, kv, input, guard: false }, &slots, &args).map_err(text).map_err(wrong)?;
    for (token, &slot) in slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
        for i in 0..row {
            let element = stored(input, cache, k_scale, &dense[(token * row + i) * elem..][..elem]);
            want[(slot as usize * row + i) * cache.bytes()..][..cache.bytes()].copy_from_slice(&element);
        }
    }
    let pool = place.read(backend, &buffers).map_err(wrong)?;
    same("cache", cache, row, &pool, &want).map_err(wrong)?;
    under.count("kv_append");

    gather(under, (&mla, output, k_scale), (&place, &buffers, &pool), draw)
        .map_err(|error| format!("kv_gather to {output} of {told}: {error}"))
}

fn gather<B: Backend>(
    under: &Under<'_, B>,
    (mla, output, k_scale): (&MlaDecode, Dtype, f32),
    (place, buffers, pool): (&Cache, &[B::Buffer], &[u8]),
    draw: &mut Draw,
) -> Result<(), String> {
    let MlaDecode { shape, kv, .. } = *mla;
    let (row, cache, page_size) = (shape.row_elems() as usize, kv.dtype(), kv.page_size as usize);
    let batch = draw.within(1, 3);
    let max_pages = (kv.num_pages as usize).min(40) + draw.below(3);
    let (mut table, mut seq_lens, mut ranges, mut want) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut rows = draw.below(3);
    want.push(rows);
    let mut sources: Vec<Option<usize>> = vec![None; rows];
    for sequence in 0..batch {
        let len = length(draw, page_size, 60.min(max_pages * page_size));
        let pages: Vec<usize> =
            (0..len.div_ceil(page_size)).map(|_| draw.below(kv.num_pages as usize)).collect();
        // Ranges need the pages of their own tokens only.
        let begin = draw.within(0, len);
        let tokens = draw.within(0, len - begin);
        ranges.push(GatherRange {
            sequence: sequence as u32,
            begin: begin as u32,
            tokens: tokens as u32,
            out_row: rows as u32,
        });
        let slot = |token: usize| pages[token / page_size] * page_size + token % page_size;
        sources.extend((begin..begin + tokens).map(|token| Some(slot(token))));
        let gap = draw.below(3);
        sources.extend(vec![None; gap]);
        rows += tokens + gap;
        for block in 0..max_pages {
            let is_read =
                block < pages.len() && block >= begin / page_size && block * page_size < begin + tokens;
            table.push(if is_read { pages[block] as i32 } else { draw.pick(&WILD) });
        }
        seq_lens.push(len as i32);
    }
    let out_at = Array::draw(draw, [rows, 1, row], output.bytes(), 4);
    let out = out_at.nothing(under.backend)?;
    let args = KvGatherArgs { kv: place.view(mla, buffers)?, k_scale, out: out_at.view(&out) };
    let before = out_at.read("out", under.backend, &out)?;
    let pages = PageTable::Dense { block_table: &table, max_pages: max_pages as u32 };
    let order = draw.shuffled(ranges.len());
    let ranges: Vec<GatherRange> = order.into_iter().map(|at| ranges[at]).collect();
    let batch = GatherBatch { pages, seq_lens: &seq_lens, ranges: &ranges };
    under.backend.once(KvGather { shape, kv, output }, batch, &args).map_err(text)?;
    let got = out_at.read("out", under.backend, &out)?;
    let (from, to) = (cache.bytes(), output.bytes());
    for (at, source) in sources.iter().enumerate() {
        let want: Vec<u8> = match source {
            None => before[at * row * to..][..row * to].to_vec(),
            Some(slot) => {
                let elements = pool[slot * row * from..][..row * from].chunks(from);
                elements.flat_map(|element| widened(cache, output, k_scale, element)).collect()
            }
        };
        same(&format!("out row {at}"), output, row, &got[at * row * to..][..row * to], &want)?;
    }
    under.count("kv_gather");
    Ok(())
}

/// An e4m3 code becomes an f32 product, then an element of the output.
fn widened(cache: Dtype, output: Dtype, k_scale: f32, element: &[u8]) -> Vec<u8> {
    if cache == output {
        return element.to_vec();
    }
    let x = values(cache, element)[0];
    if cache != Dtype::E4m3 {
        return bytes(output, [x]);
    }
    let product = value(Dtype::F32, nearest(Dtype::F32, x * f64::from(k_scale)));
    bytes(output, [product])
}

/// Page copies inside a pool, across slabs too.
pub fn copies<B: Backend>(under: &Under<'_, B>, spec_draw: &mut Draw, draw: &mut Draw) -> Result<(), String> {
    let mla = spec(spec_draw, draw);
    let MlaDecode { shape, kv, .. } = mla;
    let (row, elem) = (shape.row_elems() as usize, kv.dtype().bytes());
    let mut want: Vec<u8> = (0..kv.num_slots() as usize * row * elem).map(|_| draw.bits() as u8).collect();
    let place = Cache::draw(draw, &kv, row, draw.clone().once_in(2));
    let buffers = place.upload(under.backend, &want)?;
    let order = draw.shuffled(kv.num_pages as usize);
    let written = draw.below(order.len());
    let (to, from) = order.split_at(written);
    let list: Vec<(u32, u32)> = to.iter().map(|&to| (draw.pick(from) as u32, to as u32)).collect();
    let told = format!("{} slabs {:?} copies {list:?}", line(&mla), place.slab_pages());
    let page = kv.page_size as usize * row * elem;
    for &(from, to) in &list {
        want.copy_within(from as usize * page..(from as usize + 1) * page, to as usize * page);
    }
    let view = place.view(&mla, &buffers)?;
    let copied = under.backend.once(KvCopyPages { shape, kv }, &list, &view).map_err(text);
    let read = copied.and_then(|()| place.read(under.backend, &buffers));
    read.and_then(|pool| same("cache", Dtype::E4m3, page, &pool, &want))
        .map_err(|error| format!("{told}: {error}"))?;
    under.count("kv_copy_pages");
    Ok(())
}

/// Shares of ranks: their number, and weights as the reference takes them.
pub fn shares(draw: &mut Draw, most: usize) -> Result<(Shares, Vec<usize>, usize), String> {
    let (world, interleave) = (draw.within(1, most), draw.pick(&[1, 2, 3, 7, 16, 64]));
    let weights: Vec<usize> =
        if draw.once_in(2) { vec![1; world] } else { (0..world).map(|_| draw.within(1, 4)).collect() };
    let words: Vec<u32> = weights.iter().map(|&weight| weight as u32).collect();
    Ok((Shares::weighted(&words, interleave as u32).map_err(text)?, weights, interleave))
}

/// Gathered parts of ranks, back in the order of their tokens.
pub fn reorg<B: Backend>(under: &Under<'_, B>, spec_draw: &mut Draw, draw: &mut Draw) -> Result<(), String> {
    let (dtype, row) = (spec_draw.pick(&Dtype::ALL), 4 * spec_draw.within(1, 80));
    let (shares, weights, interleave) = shares(draw, 5)?;
    let (world, elem) = (weights.len(), dtype.bytes());
    let (mut chunks, mut local_row, mut out_row) = (Vec::new(), draw.below(3), draw.below(3));
    for _ in 0..draw.within(0, 3) {
        let (begin, tokens) = (draw.below(200), draw.below(50));
        let place = |x: usize| x as u32;
        chunks.push(ReorgChunk {
            begin: place(begin),
            tokens: place(tokens),
            local_row: place(local_row),
            out_row: place(out_row),
        });
        let held = |rank| (begin..begin + tokens).filter(|&t| owner(&weights, interleave, t) == rank).count();
        let most = (0..world).map(held).max().unwrap_or(0);
        let padded = shares.padded_len(begin as u32, tokens as u32) as usize;
        if padded != most {
            return Err(format!("padded_len({begin}, {tokens}) expected {most} got {padded}"));
        }
        local_row += padded + draw.below(3);
        out_row += tokens + draw.below(3);
    }
    let told = format!("{dtype} of {row}, weights {weights:?} by {interleave}, {chunks:?}");
    let part = Array::draw(draw, [local_row * world, 1, row], elem, 4);
    let rows: Vec<u8> = (0..local_row * world * row * elem).map(|_| draw.bits() as u8).collect();
    let gathered = part.upload(under.backend, &rows)?;
    let view = part.view(&gathered);
    let token_stride = if local_row * world > 1 { view.token_stride } else { 0 };
    let out_at = Array::draw(draw, [out_row, 1, row], elem, 4);
    let out = out_at.nothing(under.backend)?;
    let mut want = out_at.read("out", under.backend, &out)?;
    for chunk in &chunks {
        let mut next = vec![chunk.local_row as usize; world];
        for i in 0..chunk.tokens as usize {
            let rank = owner(&weights, interleave, chunk.begin as usize + i);
            let from = (rank * local_row + next[rank]) * row * elem;
            let to = (chunk.out_row as usize + i) * row * elem;
            next[rank] += 1;
            want[to..to + row * elem].copy_from_slice(&rows[from..from + row * elem]);
        }
    }
    let args = ReorgKvCacheArgs {
        gathered: view,
        rank_stride: local_row as u64 * token_stride,
        out: out_at.view(&out),
    };
    let batch = ReorgBatch { shares: &shares, chunks: &chunks };
    let ran = under.backend.once(ReorgKvCache { dtype, row_elems: row as u32 }, batch, &args).map_err(text);
    ran.and_then(|()| out_at.read("out", under.backend, &out))
        .and_then(|got| same("out", Dtype::E4m3, row * elem, &got, &want))
        .map_err(|error| format!("{told}: {error}"))?;
    under.count("reorg_kvcache");
    Ok(())
}
