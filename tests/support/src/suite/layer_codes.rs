//! Layers whose absorbed queries, or whose output, are e4m3 codes: byte for byte what the single ops give, with codes made apart.

use wgpu_mla::{
    Backend, Batch, DecodeOptions, Dtype, Error, GuardCounts, GuardView, HeadProject, HeadProjectArgs,
    KvAppendArgs, KvView, LayerCapacity, LayerGuard, LayerOptions, LseBase, MlaDecodeArgs, MlaLayer,
    MlaLayerArgs, PagePool, Plan, Query, Rope, RopeAppendBatch, RopeArgs, RopeLayout, SplitPolicy, View,
    WeightView,
};

use super::errors::refuses;
use super::layer_rig::spec;
use super::memory::{download, upload};
use super::mixed::{Arrays, Inputs, MAX_TOKENS};
use super::{Cases, Session};
use crate::reference::{Rounding, e4m3_codes, guard_counts};

/// The same splits in every batch, so that the bits of a token do not depend on the others.
const POLICY: SplitPolicy = SplitPolicy::FixedTokens(8);
/// Some queries saturate.
const Q_SCALE: f32 = 0.004;
const OUT_SCALE: f32 = 0.07;
const ROOM: LayerCapacity = LayerCapacity {
    tokens: MAX_TOKENS,
    decode_tokens: MAX_TOKENS,
    prefix_rows: 0,
    positions: 0,
    listed_tokens: 0,
};

/// Decodes alone, and beside a prefill, whose queries stay as they are.
pub fn layers_of_codes<B: Backend>(session: &Session<'_, B>) {
    let all = [(Dtype::Bf16, Dtype::E4m3), (Dtype::F32, Dtype::F16), (Dtype::F16, Dtype::E4m3)];
    // Kernels take seconds to compile where there is software only.
    let count = if session.cases == Cases::Full { all.len() } else { 1 };
    for (dtype, cache) in all.into_iter().take(count) {
        let result = check(session.backend, spec(dtype, cache, RopeLayout::Interleaved, 24));
        session.note(&format!("{dtype} over {cache}"), result.map_err(|error| error.to_string()).flatten());
    }
    session.finish("layers of codes");
}

fn check<B: Backend>(backend: &B, spec: MlaLayer) -> Result<Result<(), String>, Error> {
    let options = LayerOptions { capacity: ROOM, ..LayerOptions::default() };
    let coded = MlaLayer { query: Dtype::E4m3, ..spec };
    let of_codes = MlaLayer { out: Dtype::E4m3, workspace_bytes: 0, ..coded };
    let (plain, layer) = (backend.compile_with(spec, &options)?, backend.compile_with(coded, &options)?);
    let inputs = Inputs::new(&layer, 21)?;
    if spec.dtype == Dtype::F16
        && let Err(error) = check_overflows(backend, spec, &inputs)?
    {
        return Ok(Err(error));
    }
    let mut pool = PagePool::new(spec.kv)?;
    let row = spec.out_bytes(1) as usize;
    for sequences in [&[(19, 1), (30, 2)][..], &[(33, 1), (21, 7), (9, 1)]] {
        let arrays = Arrays::new(&mut pool, sequences)?;
        let tokens = arrays.batch().slot_mapping.len();
        let cache = inputs.cache(backend)?;
        let want = separate(backend, &coded, &inputs, &arrays)?;
        let wrote = inputs.take_cache(backend, &cache)?;
        let counters = upload(backend, &[0; 4 * GuardCounts::BYTES as usize])?;
        let guard = Some(GuardView { counters: &counters, row: 1 });
        let run = |layer: &wgpu_mla::Compiled<MlaLayer, B>, guard| {
            let bytes = layer.op().out_bytes(MAX_TOKENS) as usize;
            let out = upload(backend, &vec![0; bytes])?;
            let args = MlaLayerArgs { guard, ..args(&inputs, layer.op(), &out) };
            let mut step = layer.step(Default::default())?;
            layer.prepare(&mut step, (&arrays.batch(), POLICY))?;
            layer.run(&step, &layer.bind(&args, ROOM)?)?;
            Ok::<_, Error>((download(backend, &out, bytes)?, inputs.take_cache(backend, &cache)?))
        };
        let (got, cache_got) = run(&layer, None)?;
        if cache_got != wrote {
            return Ok(Err(format!("{sequences:?}: the cache")));
        }
        let decoded = |token: usize| arrays.is_decoded(token, spec.decode_threshold);
        for token in (0..tokens).filter(|&token| decoded(token)) {
            if got[token * row..][..row] != want.out[token * row..][..row] {
                return Ok(Err(format!("{sequences:?}: token {token} is not what the single ops give")));
            }
        }
        if (0..tokens).all(decoded) {
            // It counts what is lost too, which changes no byte.
            let counting = LayerOptions { guard: true, ..options.clone() };
            let (codes, _) = run(&backend.compile_with(of_codes, &counting)?, guard)?;
            if codes[..want.codes.len()] != want.codes {
                return Ok(Err(format!("{sequences:?}: the output's codes")));
            }
            let out = backend.buffer(of_codes.out_bytes(MAX_TOKENS))?;
            let args = MlaLayerArgs { guard, ..args(&inputs, &of_codes, &out) };
            let read = LayerGuard::read(5, &of_codes, &args, &download(backend, &counters, 4 * 16)?)?;
            let lost = [read.keys, read.query, read.output].map(|place| place.counts);
            if lost != want.lost {
                return Ok(Err(format!("{sequences:?}: {lost:?} was lost, not {:?}", want.lost)));
            }
            continue;
        }
        let (wide, _) = run(&plain, None)?;
        for token in (0..tokens).filter(|&token| !decoded(token)) {
            if got[token * row..][..row] != wide[token * row..][..row] {
                return Ok(Err(format!("{sequences:?}: token {token} is not that of a layer without codes")));
            }
        }
    }
    Ok(Ok(()))
}

/// An f16 output, with matrices so large that some of its values are infinite: as many are counted, on the way to it.
fn check_overflows<B: Backend>(
    backend: &B,
    spec: MlaLayer,
    inputs: &Inputs<B>,
) -> Result<Result<(), String>, Error> {
    let layer = backend
        .compile_with(spec, &LayerOptions { capacity: ROOM, guard: true, ..LayerOptions::default() })?;
    let out = backend.buffer(spec.out_bytes(MAX_TOKENS))?;
    let counters = upload(backend, &[0; 3 * GuardCounts::BYTES as usize])?;
    let plain = args(inputs, &spec, &out);
    let weights = spec.weight;
    let bytes = B::size(plain.kv_b_proj) as usize;
    let mut matrices = weights.decode_all(&read_back(backend, plain.kv_b_proj, bytes)?);
    let rows = (spec.qk_nope_head_dim + spec.v_head_dim) as usize;
    for (row, elements) in matrices.chunks_exact_mut(spec.shape.kv_lora_rank as usize).enumerate() {
        let is_value = row % rows >= spec.qk_nope_head_dim as usize;
        elements.iter_mut().for_each(|x| *x *= if is_value { 65_536.0 / 2.0 } else { 1.0 });
    }
    let kv_b_proj = upload(backend, &weights.encode_all(&matrices))?;
    let guard = Some(GuardView { counters: &counters, row: 0 });
    let args = MlaLayerArgs { guard, kv_b_proj: &kv_b_proj, k_scale: 8.0, ..plain };
    let arrays = Arrays::new(&mut PagePool::new(spec.kv)?, &[(19, 1), (30, 2)])?;
    let cache = inputs.cache(backend)?;
    let mut step = layer.step(Default::default())?;
    layer.prepare(&mut step, (&arrays.batch(), POLICY))?;
    layer.run(&step, &layer.bind(&args, ROOM)?)?;
    inputs.take_cache(backend, &cache)?;
    let values = spec.out.decode_all(&read_back(
        backend,
        &out,
        spec.out_bytes(arrays.batch().slot_mapping.len() as u32) as usize,
    )?);
    let infinite = values.iter().filter(|x| x.is_infinite()).count();
    let read =
        LayerGuard::read(1, &spec, &args, &download(backend, &counters, 3 * GuardCounts::BYTES as usize)?)?;
    let GuardCounts { saturated, nan, .. } = read.output.counts;
    Ok(if infinite > 0 && (saturated as usize, nan) == (infinite, 0) {
        Ok(())
    } else {
        Err(format!("{infinite} values are infinite, and {:?} is counted", read.output))
    })
}

fn args<'a, B: Backend>(
    inputs: &'a Inputs<B>,
    spec: &MlaLayer,
    out: &'a B::Buffer,
) -> MlaLayerArgs<&'a B::Buffer> {
    let scale = |dtype: Dtype, scale| if dtype.is_fp8() { scale } else { 1.0 };
    MlaLayerArgs {
        q_scale: scale(spec.query, Q_SCALE),
        k_scale: scale(spec.kv.dtype(), 0.25),
        out_scale: scale(spec.out, OUT_SCALE),
        ..inputs.args(spec, out)
    }
}

fn project<'a, T>(x: View<&'a T>, weight: WeightView<&'a T>, y: View<&'a T>) -> HeadProjectArgs<&'a T> {
    HeadProjectArgs { x, weight, y, scale: 1.0, out_scale: 1.0, saturates: false, guard: None }
}

/// The first bytes of a buffer.
fn read_back<B: Backend>(backend: &B, buffer: &B::Buffer, len: usize) -> Result<Vec<u8>, Error> {
    let mut bytes = backend.download(buffer, len.next_multiple_of(4) as u64)?;
    bytes.truncate(len);
    Ok(bytes)
}

/// What the single ops give.
struct Separate {
    out: Vec<u8>,
    codes: Vec<u8>,
    /// What keys, queries and outputs lose as codes.
    lost: [GuardCounts; 3],
}

/// Every sequence decoded in absorbed form, by queries that are projected and rotated in f32, and then made codes.
fn separate<B: Backend>(
    backend: &B,
    layer: &MlaLayer,
    inputs: &Inputs<B>,
    arrays: &Arrays,
) -> Result<Separate, Error> {
    let (dims, dtype, mla) = (layer.dims(), layer.dtype, layer.mla());
    let batch = arrays.batch();
    let tokens = batch.slot_mapping.len() as u32;
    let (heads, latent) = (layer.shape.num_heads, layer.shape.kv_lora_rank);
    let (nope, rope, value) = (layer.qk_nope_head_dim, layer.shape.qk_rope_head_dim, layer.v_head_dim);
    let unused = backend.buffer(layer.out_bytes(MAX_TOKENS))?;
    let args = args(inputs, layer, &unused);
    let elements = |columns: u32| (tokens * heads * columns) as usize;
    let f32s = |columns: u32| backend.buffer(elements(columns) as u64 * 4);
    let read = |buffer: &B::Buffer, columns: u32| {
        Ok::<_, Error>(Dtype::F32.decode_all(&read_back(backend, buffer, elements(columns) * 4)?))
    };
    let absorbed = f32s(latent)?;
    let w_uk = WeightView::w_uk(&dims, args.kv_b_proj);
    let absorb = HeadProject::absorb(&dims, dtype, layer.weight, Dtype::F32);
    backend.once(absorb, 0..tokens, &project(args.q_nope, w_uk, View::dense(&absorbed, heads, latent)))?;
    let absorbed = read(&absorbed, latent)?;
    let ql_nope = upload(backend, &e4m3_codes(&absorbed, Q_SCALE))?;

    let q = dtype.decode_all(&read_back(backend, args.q_pe.buffer, elements(nope + rope) * dtype.bytes())?);
    let q = upload(backend, &Dtype::F32.encode_all(&q))?;
    let positions: Vec<u8> = arrays.positions().iter().flat_map(|position| position.to_le_bytes()).collect();
    let (positions, turned) = (upload(backend, &positions)?, f32s(rope)?);
    let rotation = RopeArgs {
        x: View { buffer: &q, ..args.q_pe },
        y: View::dense(&turned, heads, rope),
        positions: &positions,
        cos_sin: args.cos_sin,
        max_position: args.max_position,
        scale: 1.0,
    };
    let of = Rope { dtype: Dtype::F32, num_heads: heads, rope_dim: rope, layout: layer.rope };
    backend.once(of, 0..tokens, &rotation)?;
    let turned = read(&turned, rope)?;
    let q_pe = upload(backend, &e4m3_codes(&turned, Q_SCALE))?;
    let turned_key = backend.buffer(u64::from(tokens * rope) * dtype.bytes() as u64)?;
    let of_key = Rope { dtype, num_heads: 1, ..of };
    let y = View::dense(&turned_key, 1, rope);
    backend.once(of_key, 0..tokens, &RopeArgs { x: args.k_pe, y, ..rotation })?;
    let rows = |buffer: &B::Buffer, columns: u32| {
        Ok::<_, Error>(dtype.decode_all(&read_back(
            backend,
            buffer,
            (tokens * columns) as usize * dtype.bytes(),
        )?))
    };
    let keys = [rows(args.kv_c.buffer, latent)?, rows(&turned_key, rope)?].concat();

    let append = wgpu_mla::KvAppend { shape: layer.shape, kv: layer.kv, input: dtype, guard: false };
    let rows = KvAppendArgs {
        kv_c: args.kv_c,
        k_pe: args.k_pe,
        kv: args.kv.clone(),
        k_scale: args.k_scale,
        guard: None,
    };
    let wide = backend.buffer(elements(rope) as u64 * dtype.bytes() as u64)?;
    let rope_append =
        wgpu_mla::RopeAppend { append, query: dtype, query_out: dtype, num_heads: heads, layout: layer.rope };
    let rotated = wgpu_mla::RopeAppendArgs {
        q_pe: args.q_pe,
        q_pe_out: View::dense(&wide, heads, rope),
        layer: rows,
        positions: &positions,
        cos_sin: args.cos_sin,
        max_position: args.max_position,
        q_pe_scale: 1.0,
        q_scale: 1.0,
    };
    backend.once(rope_append, RopeAppendBatch::slots(batch.slot_mapping), &rotated)?;

    let options = DecodeOptions { query_tokens: layer.decode_threshold, ..DecodeOptions::default() };
    let decode = backend.compile_with(mla, &options)?;
    let plan = Plan::new(&mla, &decode.tiling(), &Batch::new(batch.seq_lens, batch.query_start_loc), POLICY)?;
    let (latents, lse) = (backend.buffer(mla.out_bytes(tokens))?, backend.buffer(mla.lse_bytes(tokens))?);
    let kv: KvView<_> = args.kv.clone();
    let decoded = MlaDecodeArgs {
        query: Query::Split {
            q_nope: View::dense(&ql_nope, heads, latent),
            q_pe: View::dense(&q_pe, heads, rope),
        },
        kv,
        out: View::dense(&latents, heads, latent),
        lse: View::dense(&lse, heads, 1),
        lse_base: LseBase::E,
        softmax_scale: args.softmax_scale,
        k_scale: args.k_scale,
        q_scale: Q_SCALE,
        indices: None,
        attn_sink: None,
    };
    let mut step = decode.step(Default::default())?;
    decode.prepare(&mut step, (&plan, batch.pages))?;
    decode.run(&step, &decode.bind(&decoded, tokens)?)?;

    let w_uv = WeightView::w_uv(&dims, args.kv_b_proj);
    let up = |output: Dtype| {
        let out = backend.buffer(elements(value) as u64 * output.bytes() as u64)?;
        let args = project(View::dense(&latents, heads, latent), w_uv, View::dense(&out, heads, value));
        backend.once(HeadProject::v_up(&dims, dtype, layer.weight, output), 0..tokens, &args)?;
        read_back(backend, &out, elements(value) * output.bytes())
    };
    let values = Dtype::F32.decode_all(&up(Dtype::F32)?);
    let codes = e4m3_codes(&values, OUT_SCALE);
    let lost = [
        guard_counts(keys, Rounding::To(layer.kv.dtype(), args.k_scale)),
        guard_counts([absorbed, turned].concat(), Rounding::To(Dtype::E4m3, Q_SCALE)),
        guard_counts(values, Rounding::To(Dtype::E4m3, OUT_SCALE)),
    ];
    Ok(Separate { out: up(dtype)?, codes, lost })
}

/// Scales without codes, codes where no op writes them, and dtypes that are neither the layer's nor e4m3.
pub fn refuses_layers_of_codes<B: Backend>(session: &Session<'_, B>) {
    let result = || -> Result<(), Error> {
        let backend = session.backend;
        let options = LayerOptions { capacity: ROOM, ..LayerOptions::default() };
        let good = spec(Dtype::F32, Dtype::F16, RopeLayout::Interleaved, 24);
        for (what, bad, why) in [
            ("a query of another dtype", MlaLayer { query: Dtype::F16, ..good }, "MlaLayer::query"),
            ("an output of another dtype", MlaLayer { out: Dtype::Bf16, ..good }, "MlaLayer::out"),
            ("prefills into codes", MlaLayer { out: Dtype::E4m3, ..good }, "workspace_bytes"),
        ] {
            refuses(session, what, backend.compile_with(bad, &options), why);
        }
        let codes = MlaLayer { query: Dtype::E4m3, out: Dtype::E4m3, workspace_bytes: 0, ..good };
        let prefixes =
            LayerOptions { capacity: LayerCapacity { prefix_rows: 8, ..ROOM }, ..LayerOptions::default() };
        refuses(session, "prefixes into codes", backend.compile_with(codes, &prefixes), "prefix_rows");
        let layer = backend.compile_with(codes, &options)?;
        let inputs = Inputs::new(&layer, 3)?;
        let out = backend.buffer(codes.out_bytes(MAX_TOKENS))?;
        let good = || args(&inputs, &codes, &out);
        layer.bind(&good(), ROOM)?;
        let scales = backend.buffer(8 * u64::from(codes.shape.num_heads))?;
        let bad = MlaLayerArgs { kv_b_scales: Some(&scales), ..good() };
        refuses(session, "scales without codes", layer.bind(&bad, ROOM), "kv_b_scales");
        let weights = backend.compile_with(MlaLayer { weight: Dtype::E4m3, ..codes }, &options)?;
        refuses(session, "codes without scales", weights.bind(&good(), ROOM), "kv_b_scales");
        weights.bind(&MlaLayerArgs { kv_b_scales: Some(&scales), ..good() }, ROOM)?;
        // Backends may round a size up.
        let short = backend.buffer(4)?;
        let bad = MlaLayerArgs { kv_b_scales: Some(&short), ..good() };
        refuses(session, "too few scales", weights.bind(&bad, ROOM), "kv_b_scales");
        for scale in [0.0, -1.0, 1e-39, f32::NAN, f32::INFINITY] {
            let bad = MlaLayerArgs { q_scale: scale, ..good() };
            refuses(session, "a query's scale", layer.bind(&bad, ROOM), "q_scale");
            let bad = MlaLayerArgs { out_scale: scale, ..good() };
            refuses(session, "an output's scale", layer.bind(&bad, ROOM), "out_scale");
        }
        let counters = backend.buffer(4 * GuardCounts::BYTES)?;
        let guard = |counters, row| Some(GuardView { counters, row });
        let counted = |guard| MlaLayerArgs { guard, ..good() };
        let off = layer.bind(&counted(guard(&counters, 0)), ROOM);
        refuses(session, "counters of a layer that counts nothing", off, "guard: true");
        let layer = backend.compile_with(codes, &LayerOptions { guard: true, ..options })?;
        layer.bind(&counted(guard(&counters, 1)), ROOM)?;
        refuses(session, "a layer without counters", layer.bind(&good(), ROOM), "need counters");
        for row in [2, u32::MAX] {
            let bound = layer.bind(&counted(guard(&counters, row)), ROOM);
            refuses(session, "rows past the counters", bound, "guard");
        }
        refuses(session, "counters in the output", layer.bind(&counted(guard(&out, 0)), ROOM), "guard");
        let read = LayerGuard::read(0, &codes, &counted(guard(&counters, 1)), &[0; 63]);
        refuses(session, "counters that were not downloaded", read, "counters");
        refuses(
            session,
            "a report without counters",
            LayerGuard::read(0, &codes, &good(), &[0; 64]),
            "guard",
        );
        Ok(())
    }();
    session.note("layers of codes", result.map_err(|error| error.to_string()));
    session.finish("refuses layers of codes");
}
