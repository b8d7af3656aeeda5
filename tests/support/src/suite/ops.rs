//! The small ops against the oracle: merges of attention states, appends, page copies.

use crate::reference::{Concat, State, concat_and_cache, copy_pages, merge_state};
use wgpu_mla::{
    Backend, Dtype, KvAppend, KvAppendArgs, KvCopyPages, KvSpec, MergeState, MergeStateArgs, MlaShape,
};

use super::Session;
use super::memory::{Pages, Strides, download, gather, page_dims, scatter, stored_elems, upload};
use super::run::{Layout, Output};
use crate::cache::{same_cache, shape_of_row};
use crate::case::{AppendCase, MergeCase};
use crate::close::{Tolerance, close};
use crate::paint::{POISON, Rng};

fn text(error: wgpu_mla::Error) -> String {
    error.to_string()
}

/// Head sizes of any parity, LSEs of any kind, dense and strided, with and without an output LSE.
pub fn merges<B: Backend>(session: &Session<'_, B>) {
    let shapes = [(33, 6, 96), (5, 16, 512), (1, 1, 1), (7, 3, 3), (4, 5, 127), (64, 2, 128)];
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        for (tokens, heads, head_size) in shapes {
            let case = random_merge(dtype, tokens, heads, head_size);
            for layout in [Layout::Dense, Layout::Gaps, Layout::HeadMajor] {
                for with_lse in [true, false] {
                    let result = check_merge(session.backend, &case, layout, with_lse);
                    let shape = (tokens, heads, head_size);
                    session.note(&format!("merge {dtype} {shape:?} {layout:?} lse {with_lse}"), result);
                }
            }
        }
    }
    session.finish("merges of attention states");
}

/// Runs a merge case in the layout of its file.
pub fn check_merge_case<B: Backend>(backend: &B, case: &MergeCase) -> Result<(), String> {
    check_merge(backend, case, Layout::Dense, true)
}

/// States with LSEs that are close, far apart, large or empty; empty sides hold NaN.
pub fn random_merge(dtype: Dtype, num_tokens: usize, num_heads: usize, head_size: usize) -> MergeCase {
    let mut rng = Rng((num_tokens * num_heads * head_size) as u64);
    let rows = num_tokens * num_heads;
    let mut side = |salt: usize| {
        let kinds = [f32::NEG_INFINITY, f32::INFINITY, f32::NAN, 300.0, -300.0, 90.0, 1000.0];
        let mut lse: Vec<f32> = (0..rows).map(|_| rng.randn() * 3.0).collect();
        // Cycles of two primes, so that every kind meets every other.
        let period = [11, 13][salt];
        lse.iter_mut().enumerate().for_each(|(i, x)| match kinds.get(i % period) {
            Some(kind) if rows > 1 => *x = if kind.is_finite() { kind + *x } else { *kind },
            _ => {}
        });
        let mut output = Vec::new();
        for row in 0..rows {
            let lse = lse[row % num_heads * num_tokens + row / num_heads];
            for _ in 0..head_size {
                let x = rng.randn() / 10.0;
                dtype.encode(if lse.is_finite() { x } else { f32::NAN }, &mut output);
            }
        }
        (output, lse)
    };
    let ((prefix_output, prefix_lse), (suffix_output, suffix_lse)) = (side(0), side(1));
    let [prefix, suffix] = [&prefix_output, &suffix_output].map(|bytes| dtype.decode_all(bytes));
    let (output, output_lse) = merge_state(
        State { output: &prefix, lse: &prefix_lse },
        State { output: &suffix, lse: &suffix_lse },
        num_heads,
        head_size,
    );
    let narrow = |xs: Vec<f64>| xs.into_iter().map(|x| x as f32).collect();
    MergeCase {
        spec: MergeState { dtype, head_size: head_size as u32 },
        num_tokens,
        num_heads,
        prefix_output,
        prefix_lse,
        suffix_output,
        suffix_lse,
        output: narrow(output),
        output_lse: narrow(output_lse),
    }
}

/// Runs a merge and compares: empty sides bit for bit, the rest within the tolerance.
pub fn check_merge<B: Backend>(
    backend: &B,
    case: &MergeCase,
    layout: Layout,
    with_lse: bool,
) -> Result<(), String> {
    let MergeCase { spec, num_tokens, num_heads, .. } = *case;
    let (head_size, elem) = (spec.head_size as usize, spec.dtype.bytes());
    let dims = [num_tokens, num_heads, head_size];
    // LSEs are [heads, tokens]; strides are in elements, and may be odd.
    let lse_dims = [num_tokens, num_heads, 1];
    let lse_strides = match layout {
        Layout::Dense => Strides { offset: 0, token: 1, head: num_tokens },
        Layout::Gaps => Strides { offset: 3, token: 1, head: num_tokens + 5 },
        Layout::HeadMajor => Strides { offset: 1, token: num_heads + 1, head: 1 },
    };
    let by_token = |lse: &[f32]| -> Vec<f32> {
        (0..num_tokens * num_heads).map(|row| lse[row % num_heads * num_tokens + row / num_heads]).collect()
    };
    let (prefix_lse, suffix_lse) = (by_token(&case.prefix_lse), by_token(&case.suffix_lse));
    let inputs = layout.strides(dims, 1);
    let state = |bytes: &[u8]| upload(backend, &scatter(bytes, dims, elem, inputs)).map_err(text);
    let logs = |lse: &[f32]| {
        upload(backend, &scatter(&Dtype::F32.encode_all(lse), lse_dims, 4, lse_strides)).map_err(text)
    };
    let (prefix, suffix) = (state(&case.prefix_output)?, state(&case.suffix_output)?);
    let (prefix_logs, suffix_logs) = (logs(&prefix_lse)?, logs(&suffix_lse)?);
    // Another layout than the inputs', since strides are never inferred from each other.
    let out_layout = if layout == Layout::Gaps { Layout::HeadMajor } else { layout };
    let out = Output::new(dims, spec.dtype, out_layout, 1);
    let out_buffer = upload(backend, &vec![POISON; out.len]).map_err(text)?;
    let log_bytes = lse_strides.end(lse_dims) * 4;
    let log_buffer = upload(backend, &vec![POISON; log_bytes]).map_err(text)?;
    let args = MergeStateArgs {
        prefix_output: inputs.view(&prefix),
        prefix_lse: lse_strides.view(&prefix_logs),
        suffix_output: inputs.view(&suffix),
        suffix_lse: lse_strides.view(&suffix_logs),
        output: out.strides.view(&out_buffer),
        output_lse: with_lse.then(|| lse_strides.view(&log_buffer)),
        num_tokens: num_tokens as u32,
        num_heads: num_heads as u32,
        output_scale: 1.0,
    };
    backend.once(spec, (), &args).map_err(text)?;

    let bytes = out.read(backend, &out_buffer).map_err(|error| format!("output: {error}"))?;
    let log_rest = download(backend, &log_buffer, log_bytes).map_err(text)?;
    let (log_out, log_rest) = gather(&log_rest, lse_dims, 4, lse_strides);
    log_rest.map_err(|error| format!("output_lse: {error}"))?;
    if !with_lse && log_out.iter().any(|&byte| byte != POISON) {
        return Err("output_lse was written though it is not wanted".to_owned());
    }
    for row in 0..num_tokens * num_heads {
        let part = row * head_size * elem..(row + 1) * head_size * elem;
        let copied = match (prefix_lse[row].is_finite(), suffix_lse[row].is_finite()) {
            (true, true) => continue,
            (true, false) => Some((&case.prefix_output, prefix_lse[row])),
            (false, true) => Some((&case.suffix_output, suffix_lse[row])),
            (false, false) => None,
        };
        let zeros = vec![0; bytes.len()];
        let (want, log) = copied.unwrap_or((&zeros, f32::NEG_INFINITY));
        if bytes[part.clone()] != want[part] {
            return Err(format!("row {row}: an empty side must leave the other bit for bit, two leave 0"));
        }
        if with_lse && log_out[row * 4..][..4] != log.to_le_bytes() {
            return Err(format!("row {row}: output_lse must be the bits of {log}"));
        }
    }
    let wide = |xs: &[f32]| xs.iter().map(|&x| x.into()).collect::<Vec<f64>>();
    let checked = |name, got: &[u8], dtype: Dtype, want: &[f32], tolerance| {
        close(name, &dtype.decode_all(got), &wide(want), &tolerance).into_result().map(drop)
    };
    checked("output", &bytes, spec.dtype, &case.output, Tolerance::merge(spec.dtype))?;
    if with_lse {
        let want = by_token(&case.output_lse);
        checked("output_lse", &log_out, Dtype::F32, &want, Tolerance::merge_lse())?;
    }
    Ok(())
}

/// Every input dtype into every cache dtype, with any bit pattern there is.
pub fn appends<B: Backend>(session: &Session<'_, B>) {
    let mut turn = 0;
    for input in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        for cache in Dtype::ALL {
            let dims = [(512, 64), (256, 32), (512, 0), (256, 64)][turn % 4];
            let page_size = [16, 3, 1, 64][turn % 4];
            turn += 1;
            for k_scale in if cache == Dtype::E4m3 { &[0.25, 0.37, 300.0][..] } else { &[1.0] } {
                let case = random_append(dims, page_size, input, cache, *k_scale);
                for gaps in [false, true] {
                    let what = format!("append {input} to {cache} {dims:?} k_scale {k_scale} gaps {gaps}");
                    session.note(&what, check_append(session.backend, &case, gaps));
                }
            }
        }
    }
    session.finish("appends");
}

/// Runs an append case in the layout of its file.
pub fn check_append_case<B: Backend>(backend: &B, case: &AppendCase) -> Result<(), String> {
    check_append(backend, case, false)
}

/// 37 tokens, some skipped, into a cache of random bytes.
pub fn random_append(
    (latent, rope): (u32, u32),
    page_size: u32,
    input: Dtype,
    cache: Dtype,
    k_scale: f32,
) -> AppendCase {
    let mut rng = Rng(u64::from(page_size) << 8 | input.bytes() as u64);
    let tokens = 37;
    let kv = KvSpec { layout: cache.into(), page_size, num_pages: 64u32.div_ceil(page_size) };
    let shape = MlaShape { num_heads: 1, kv_lora_rank: latent, qk_rope_head_dim: rope };
    let mut slot_mapping: Vec<i64> = (0..kv.num_slots() as i64).collect();
    rng.shuffle(&mut slot_mapping);
    slot_mapping.truncate(tokens);
    for (i, skip) in [(0, -1), (11, i64::MIN), (36, -7)] {
        slot_mapping[i] = skip;
    }
    // Half of it ordinary values, half of it any bits: subnormals, infinities, NaN.
    let mut rows = |dim: u32| {
        let mut bytes = Vec::new();
        for i in 0..tokens * dim as usize {
            if i % 2 == 0 {
                input.encode(rng.randn() * k_scale * [1.0, 100.0, 1e-3][i % 3], &mut bytes);
            } else {
                bytes.extend_from_slice(&rng.next().to_le_bytes()[..input.bytes()]);
            }
        }
        bytes
    };
    let (kv_c, k_pe) = (rows(latent), rows(rope));
    let cache_bytes = kv.num_slots() as usize * (latent + rope) as usize * cache.bytes();
    let kv_cache_before: Vec<u8> = (0..cache_bytes).map(|_| rng.next() as u8).collect();
    let mut kv_cache = kv_cache_before.clone();
    let args = Concat {
        kv_c: &kv_c,
        k_pe: &k_pe,
        input,
        slot_mapping: &slot_mapping,
        kv_lora_rank: latent as usize,
        qk_rope_head_dim: rope as usize,
        k_scale,
    };
    concat_and_cache(&args, cache, &mut kv_cache);
    let spec = KvAppend { shape, kv, input, guard: false };
    AppendCase { spec, k_scale, kv_c, k_pe, slot_mapping, kv_cache_before, kv_cache }
}

/// Runs an append and compares every byte of the cache and around it.
pub fn check_append<B: Backend>(backend: &B, case: &AppendCase, gaps: bool) -> Result<(), String> {
    let KvAppend { shape, kv, input, .. } = case.spec;
    let row = stored_elems(&kv, &shape);
    let layout = if gaps { Layout::Gaps } else { Layout::Dense };
    let rows = |bytes: &[u8], dim: u32| -> Result<_, String> {
        let dims = [case.slot_mapping.len(), 1, dim as usize];
        let strides = layout.strides(dims, 4);
        Ok((upload(backend, &scatter(bytes, dims, input.bytes(), strides)).map_err(text)?, strides))
    };
    let (kv_c, kv_c_strides) = rows(&case.kv_c, shape.kv_lora_rank)?;
    let (k_pe, k_pe_strides) = rows(&case.k_pe, shape.qk_rope_head_dim)?;
    let pages = if gaps { Pages::gaps(&kv, row) } else { Pages::dense(&kv, row) };
    let (dims, elem) = (page_dims(&kv, row), kv.dtype().bytes());
    let before = scatter(&case.kv_cache_before, dims, elem, pages.strides());
    let cache = upload(backend, &before).map_err(text)?;
    let layer = KvAppendArgs {
        kv_c: kv_c_strides.view(&kv_c),
        k_pe: k_pe_strides.view(&k_pe),
        kv: pages.view(&cache),
        k_scale: case.k_scale,
        guard: None,
    };
    backend.once(case.spec, &case.slot_mapping, &layer).map_err(text)?;
    let bytes = download(backend, &cache, before.len()).map_err(text)?;
    let (got, intact) = gather(&bytes, dims, elem, pages.strides());
    intact?;
    same_cache(case, &got).map(drop)
}

/// Pages copied inside a pool of every element width.
pub fn page_copies<B: Backend>(session: &Session<'_, B>) {
    for (dtype, page_size, row) in
        [(Dtype::F32, 16, 576), (Dtype::Bf16, 3, 288), (Dtype::F16, 64, 576), (Dtype::E4m3, 1, 288)]
    {
        let spec = KvCopyPages {
            shape: shape_of_row(row),
            kv: KvSpec { layout: dtype.into(), page_size, num_pages: 12 },
        };
        for copies in [&[(0, 11), (3, 7), (0, 2), (10, 1)][..], &[(5, 4)], &[]] {
            for gaps in [false, true] {
                let result = check_page_copies(session.backend, &spec, copies, gaps);
                session.note(&format!("{dtype} page {page_size} {copies:?} gaps {gaps}"), result);
            }
        }
    }
    session.finish("page copies");
}

/// Copies pages of a cache of random bytes and compares every byte.
pub fn check_page_copies<B: Backend>(
    backend: &B,
    spec: &KvCopyPages,
    copies: &[(u32, u32)],
    gaps: bool,
) -> Result<(), String> {
    let (kv, row) = (&spec.kv, stored_elems(&spec.kv, &spec.shape));
    let pages = if gaps { Pages::gaps(kv, row) } else { Pages::dense(kv, row) };
    let (dims, elem) = (page_dims(kv, row), kv.dtype().bytes());
    let page_bytes = dims[2] * elem;
    let mut rng = Rng(page_bytes as u64);
    let mut cache: Vec<u8> = (0..dims[0] * page_bytes).map(|_| rng.next() as u8).collect();
    let before = scatter(&cache, dims, elem, pages.strides());
    let buffer = upload(backend, &before).map_err(text)?;
    backend.once(*spec, copies, &pages.view(&buffer)).map_err(text)?;
    copy_pages(&mut cache, page_bytes, copies);
    let bytes = download(backend, &buffer, before.len()).map_err(text)?;
    let (got, intact) = gather(&bytes, dims, elem, pages.strides());
    intact?;
    match got.iter().zip(&cache).position(|(a, b)| a != b) {
        Some(at) => Err(format!("page {} byte {} is wrong", at / page_bytes, at % page_bytes)),
        None => Ok(()),
    }
}
