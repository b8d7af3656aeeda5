//! Ops that count what rounding loses: the counts of the oracle, and the bytes of the op without a guard.

use wgpu_mla::{
    Backend, Dtype, Error, GuardCounts, GuardView, HeadProject, HeadProjectArgs, KvAppend, KvAppendArgs,
    KvLayout, KvSpec, KvView, MlaDecode, MlaShape, OpOptions, RopeAppend, RopeAppendArgs, RopeAppendBatch,
    RopeFrequencies, RopeLayout, View, WeightOrder, WeightView,
};

use super::errors::refuses;
use super::memory::{download, upload};
use super::{Cases, Session, records};
use crate::paint::POISON;
use crate::reference::{Rounding, guard_counts};

/// Rows of counters; the last has a neighbour on both sides.
const ROWS: usize = 4;
const ROW: u32 = 1;
const BYTES: usize = GuardCounts::BYTES as usize;
const TOKENS: usize = 9;

/// Counters of an op: zeros, and poison in the rows that are not its own.
fn counters(rows: usize) -> Vec<u8> {
    let mut bytes = vec![POISON; ROWS * BYTES];
    bytes[ROW as usize * BYTES..][..rows * BYTES].fill(0);
    bytes
}

/// Whether the rows hold `times` what is wanted, and their neighbours what they did.
fn check_counters(bytes: &[u8], want: &[GuardCounts], times: u32) -> Result<(), String> {
    let own = ROW as usize..ROW as usize + want.len();
    let all = GuardCounts::decode_all(bytes);
    for (row, want) in own.clone().zip(want) {
        let &GuardCounts { saturated, nan, flushed, amax } = want;
        let [saturated, nan, flushed] = [saturated, nan, flushed].map(|count| count * times);
        let want = GuardCounts { saturated, nan, flushed, amax };
        if all[row] != want {
            return Err(format!("row {row} holds {:?}, not {want:?}", all[row]));
        }
    }
    let is_own = |at: usize| own.contains(&(at / BYTES));
    match (0..ROWS * BYTES).find(|&at| !is_own(at) && bytes[at] != POISON) {
        Some(at) => Err(format!("byte {at} of another row was written")),
        None => Ok(()),
    }
}

/// Ends of a rounding's range and their neighbours, of both signs, among ordinary numbers. With `all`, also what is not finite and what a
/// device may flush.
fn values(rounding: Rounding, count: usize, all: bool) -> Vec<f32> {
    let ends: &[f64] = match rounding {
        Rounding::OwnScales | Rounding::To(Dtype::F32, _) => &[1.0],
        Rounding::To(Dtype::F16, _) => &[2.980_232_238_769_531_3e-8, 65_520.0, 65_504.0],
        Rounding::To(Dtype::Bf16, _) => &[3.396e38],
        Rounding::To(Dtype::E4m3, scale) => &[448.0 * f64::from(scale), f64::from(scale) / 1024.0],
    };
    let mut some = vec![0.0, -0.0, 1.0, -0.75];
    for &end in ends {
        let near = end as f32;
        some.extend([near.next_down(), near, near.next_up()]);
    }
    if all {
        some.extend([f32::NAN, f32::INFINITY, 1e-45, f32::MAX, f32::from_bits(0x0000_8000)]);
    }
    // A prime stride, so that each lane of a vector meets each value.
    let value = |i: usize| some[i * 7 % some.len()] * if i.is_multiple_of(3) { -1.0 } else { 1.0 };
    (0..count).map(value).collect()
}

/// New rows into caches of each dtype, some of whose tokens are skipped.
pub fn counted_appends<B: Backend>(session: &Session<'_, B>) {
    use Dtype::{Bf16, E4m3, F16, F32};
    let plain = |input, cache: Dtype| (input, KvLayout::from(cache), 0.37);
    let few = [plain(F32, E4m3), (Bf16, KvLayout::Ds656, 1.0), plain(F16, F16)];
    let more = [plain(Bf16, E4m3), plain(F16, E4m3), plain(F32, F16), plain(F32, Bf16), plain(F32, F32)];
    let records = [(F32, KvLayout::Ds656, 1.0), (F16, KvLayout::Ds528, 1.0)];
    let all = few.iter().chain(more.iter().chain(&records).filter(|_| session.cases == Cases::Full));
    for &(input, layout, k_scale) in all {
        let k_scale = if layout == KvLayout::Plain(E4m3) { k_scale } else { 1.0 };
        let result = check_append(session, input, layout, k_scale);
        session.note(&format!("{input} into {layout}"), result);
    }
    session.finish("counted appends");
}

fn append_spec(input: Dtype, layout: KvLayout) -> KvAppend {
    let rope = if layout == KvLayout::Ds528 { 0 } else { 64 };
    let shape = MlaShape { num_heads: 1, kv_lora_rank: 512, qk_rope_head_dim: rope };
    KvAppend { shape, kv: KvSpec { layout, page_size: 4, num_pages: 4 }, input, guard: true }
}

/// How the latent and the rotary part are rounded.
fn roundings(layout: KvLayout, k_scale: f32) -> [Rounding; 2] {
    match layout {
        KvLayout::Plain(dtype) | KvLayout::Index(dtype) => [Rounding::To(dtype, k_scale); 2],
        KvLayout::Ds656 | KvLayout::Ds528 => [Rounding::OwnScales, Rounding::To(Dtype::Bf16, 1.0)],
    }
}

fn sum(of: [GuardCounts; 2]) -> GuardCounts {
    let [a, b] = of;
    GuardCounts {
        saturated: a.saturated + b.saturated,
        nan: a.nan + b.nan,
        flushed: a.flushed + b.flushed,
        amax: a.amax.max(b.amax),
    }
}

fn check_append<B: Backend>(
    session: &Session<'_, B>,
    input: Dtype,
    layout: KvLayout,
    k_scale: f32,
) -> Result<(), String> {
    let (backend, text) = (session.backend, |error: Error| error.to_string());
    let spec = append_spec(input, layout);
    if !records::serves_layout(session, spec) {
        return Ok(());
    }
    let (latent, rope) = (spec.shape.kv_lora_rank as usize, spec.shape.qk_rope_head_dim as usize);
    let mla = MlaDecode { shape: spec.shape, kv: spec.kv, query: Dtype::F32, out: Dtype::F32 };
    let [of_latent, of_rope] = roundings(layout, k_scale);
    let rows = |rounding, dim| input.encode_all(&values(rounding, TOKENS * dim, true));
    let (kv_c_bytes, k_pe_bytes) = (rows(of_latent, latent), rows(of_rope, rope.max(1)));
    let (kv_c, k_pe) =
        (upload(backend, &kv_c_bytes).map_err(text)?, upload(backend, &k_pe_bytes).map_err(text)?);
    // Skipped tokens are not counted.
    let slots = [3, -1, 0, 7, 15, -1, 9, 2, 11];
    let run = |guard: bool| {
        let cache = upload(backend, &vec![POISON; mla.cache_bytes() as usize])?;
        let buffer = upload(backend, &counters(1))?;
        let args = KvAppendArgs {
            kv_c: View::dense(&kv_c, 1, latent as u32),
            k_pe: View::dense(&k_pe, 1, rope as u32),
            kv: KvView::dense(&cache, &mla),
            k_scale,
            guard: guard.then_some(GuardView { counters: &buffer, row: ROW }),
        };
        for _ in 0..2 {
            backend.once(KvAppend { guard, ..spec }, &slots, &args)?;
        }
        let cache = download(backend, &cache, mla.cache_bytes() as usize)?;
        Ok((cache, download(backend, &buffer, ROWS * BYTES)?))
    };
    let (guarded, counted) = run(true).map_err(text)?;
    if guarded != run(false).map_err(text)?.0 {
        return Err("the cache is not that of an append without a guard".into());
    }
    let of = |bytes: &[u8], dim: usize, rounding| {
        let all = input.decode_all(bytes);
        let appended = (0..TOKENS).filter(|&token| slots[token] >= 0);
        let values = appended.flat_map(|token| all[token * dim..][..dim].to_vec());
        guard_counts(values, rounding)
    };
    let want = sum([of(&kv_c_bytes, latent, of_latent), of(&k_pe_bytes, rope, of_rope)]);
    check_counters(&counted, &[want], 2)
}

/// Queries in codes, and keys, at position 0, where the rotation changes no number.
pub fn counted_rotations<B: Backend>(session: &Session<'_, B>) {
    use Dtype::{Bf16, E4m3, F16, F32};
    let few = [(Bf16, E4m3, KvLayout::from(E4m3), RopeLayout::Interleaved)];
    let more = [
        (F32, E4m3, KvLayout::from(E4m3), RopeLayout::HalfSplit),
        (F16, F16, KvLayout::from(E4m3), RopeLayout::Interleaved),
        (F32, E4m3, KvLayout::from(F32), RopeLayout::Interleaved),
        (Bf16, E4m3, KvLayout::Ds656, RopeLayout::HalfSplit),
    ];
    for (query, out, layout, rope) in
        few.into_iter().chain(more.into_iter().filter(|_| session.cases == Cases::Full))
    {
        let result = check_rotation(session, [query, out], layout, rope);
        session.note(&format!("{query} to {out}, cache {layout}, {rope:?}"), result);
    }
    session.finish("counted rotations");
}

/// A row whose pairs are NaN where one of them is not a number.
fn rotated(row: &[f32], layout: RopeLayout) -> Vec<f32> {
    let half = row.len() / 2;
    let other = |i: usize| match layout {
        RopeLayout::Interleaved => i ^ 1,
        RopeLayout::HalfSplit => (i + half) % row.len(),
    };
    let is_number = |i: usize| row[i].is_finite() && row[other(i)].is_finite();
    (0..row.len()).map(|i| if is_number(i) { row[i] } else { f32::NAN }).collect()
}

fn check_rotation<B: Backend>(
    session: &Session<'_, B>,
    [query, query_out]: [Dtype; 2],
    layout: KvLayout,
    rope: RopeLayout,
) -> Result<(), String> {
    const HEADS: usize = 3;
    const ROPE: usize = 64;
    let (backend, text) = (session.backend, |error: Error| error.to_string());
    let append = append_spec(query, layout);
    if !records::serves_layout(session, append) {
        return Ok(());
    }
    let k_scale = if layout == KvLayout::Plain(Dtype::E4m3) { 0.37 } else { 1.0 };
    let q_scale = if query_out.is_fp8() { 1.5 } else { 1.0 };
    let latent = append.shape.kv_lora_rank as usize;
    let mla = MlaDecode { shape: append.shape, kv: append.kv, query: Dtype::F32, out: Dtype::F32 };
    let [of_latent, of_rope] = roundings(layout, k_scale);
    let of_query = Rounding::To(query_out, q_scale);
    let mut q = values(of_query, TOKENS * HEADS * ROPE, false);
    (q[5], q[70]) = (f32::NAN, f32::INFINITY);
    let mut k = values(of_rope, TOKENS * ROPE, false);
    (k[7], k[2 * ROPE]) = (f32::INFINITY, f32::NAN);
    let q = query.encode_all(&q);
    let (k, kv_c) = (query.encode_all(&k), query.encode_all(&values(of_latent, TOKENS * latent, true)));
    let slots: [i64; TOKENS] = [3, -1, 0, 7, 15, -1, 9, 2, 11];
    let table = RopeFrequencies::plain(ROPE as u32, 1e4).and_then(|of| of.cos_sin(1)).map_err(text)?;
    let run = |guard: bool| {
        let arrays = [&q, &kv_c, &k].map(|bytes| upload(backend, bytes));
        let [q_pe, kv_c, k_pe] = arrays;
        let (q_pe, kv_c, k_pe) = (q_pe?, kv_c?, k_pe?);
        let out_bytes = TOKENS * HEADS * ROPE * query_out.bytes();
        let (out, buffer) = (upload(backend, &vec![POISON; out_bytes])?, upload(backend, &counters(2))?);
        let cache = upload(backend, &vec![POISON; mla.cache_bytes() as usize])?;
        let cos_sin = upload(backend, &Dtype::F32.encode_all(&table))?;
        let positions = upload(backend, &[0; 4 * TOKENS])?;
        let layer = KvAppendArgs {
            kv_c: View::dense(&kv_c, 1, latent as u32),
            k_pe: View::dense(&k_pe, 1, ROPE as u32),
            kv: KvView::dense(&cache, &mla),
            k_scale,
            guard: guard.then_some(GuardView { counters: &buffer, row: ROW }),
        };
        let args = RopeAppendArgs {
            q_pe: View::dense(&q_pe, HEADS as u32, ROPE as u32),
            q_pe_out: View::dense(&out, HEADS as u32, ROPE as u32),
            layer,
            positions: &positions,
            cos_sin: &cos_sin,
            max_position: 1,
            q_pe_scale: 1.0,
            q_scale,
        };
        let append = KvAppend { guard, ..append };
        let op = RopeAppend { append, query, query_out, num_heads: HEADS as u32, layout: rope };
        backend.once(op, RopeAppendBatch::slots(&slots), &args)?;
        let cache = download(backend, &cache, mla.cache_bytes() as usize)?;
        let out = download(backend, &out, out_bytes)?;
        Ok((cache, out, download(backend, &buffer, ROWS * BYTES)?))
    };
    let (cache, out, counted) = run(true).map_err(text)?;
    let (plain_cache, plain_out, _) = run(false).map_err(text)?;
    if (cache, out) != (plain_cache, plain_out) {
        return Err("the bytes are not those of the op without a guard".into());
    }
    let appended = |bytes: &[u8], dim: usize, rotates: bool| -> Vec<f32> {
        let all = query.decode_all(bytes);
        let rows = (0..TOKENS).filter(|&token| slots[token] >= 0).map(|token| &all[token * dim..][..dim]);
        rows.flat_map(|row| if rotates { rotated(row, rope) } else { row.to_vec() }).collect()
    };
    let keys = sum([
        guard_counts(appended(&kv_c, latent, false), of_latent),
        guard_counts(appended(&k, ROPE, true), of_rope),
    ]);
    // Queries of skipped tokens are rotated too.
    let queries = query.decode_all(&q).chunks(ROPE).flat_map(|row| rotated(row, rope)).collect::<Vec<_>>();
    let is_coded = query_out != query;
    let queries = if is_coded { guard_counts(queries, of_query) } else { GuardCounts::default() };
    check_counters(&counted, &[keys, queries], 1)
}

/// Products that are exact: each token's row has one 1, so that its products are a row of weights.
pub fn counted_projections<B: Backend>(session: &Session<'_, B>) {
    use Dtype::{Bf16, E4m3, F16, F32};
    use WeightOrder::{Kn, Nk};
    let few = [([Bf16, Bf16, E4m3], Kn, false), ([F32, F32, E4m3], Nk, false), ([F16, F16, F16], Nk, true)];
    let more = [
        ([F16, F16, E4m3], Nk, false),
        ([F16, F16, F16], Kn, false),
        ([F32, F32, F16], Nk, false),
        ([Bf16, Bf16, Bf16], Kn, false),
        ([F32, F32, F32], Kn, false),
    ];
    for (dtypes, order, saturates) in
        few.into_iter().chain(more.into_iter().filter(|_| session.cases == Cases::Full))
    {
        let [input, _, output] = dtypes;
        let op = |(input, output)| HeadProject {
            input,
            weight: dtypes[1].into(),
            output,
            num_heads: 2,
            k: 64,
            n: 64,
            order,
            guard: true,
        };
        let variants = session.backend.variants(&op((input, output)));
        let runs = variants.iter().filter(|one| one.lacks.is_none()).map(|one| Some(one.name));
        let runs: Vec<_> = if session.cases == Cases::Full { runs.collect() } else { vec![None] };
        for variant in runs {
            for tokens in [5, 70] {
                let result =
                    check_projection(session.backend, op((input, output)), tokens, saturates, variant);
                let what = format!("{input} to {output}, {order:?}, {tokens} tokens, variant {variant:?}");
                session.note(&what, result);
            }
        }
    }
    session.finish("counted projections");
}

fn check_projection<B: Backend>(
    backend: &B,
    spec: HeadProject,
    tokens: usize,
    saturates: bool,
    variant: Option<&str>,
) -> Result<(), String> {
    const DIM: usize = 64;
    let text = |error: Error| error.to_string();
    let (heads, input, output) = (spec.num_heads as usize, spec.input, spec.output);
    let (scale, out_scale) = (2.0, if output.is_fp8() { 0.25 } else { 1.0 });
    // Numbers on both sides of the ends of the range that every input dtype holds; half of what becomes of them. None saturates in the
    // first head, and none becomes 0 in the other.
    let some: [&[f32]; 2] = match output {
        Dtype::E4m3 => [
            &[56.0, -56.0, 0.000_122_070_31, -0.000_122_070_31, 0.000_123, 0.0, 3.0, 0.01],
            &[56.0, 56.5, -57.0, 500.0, 0.000_123, 0.0, 3.0],
        ],
        _ => [&[1.0, -2.5, 0.0, 500.0, 0.5], &[1.0, -2.5, 0.0, 500.0, -32_752.0, 32_768.0, 60_000.0, 0.5]],
    };
    let of_head = |i: usize| some[i / (DIM * DIM) % 2];
    let matrix: Vec<f32> = (0..heads * DIM * DIM).map(|i| of_head(i)[i * 3 % of_head(i).len()]).collect();
    let bytes = input.encode_all(&matrix);
    let matrix = input.decode_all(&bytes);
    // One of the last rows has a NaN.
    let mut x = vec![0.0; tokens * heads * DIM];
    for (row, x) in x.chunks_exact_mut(DIM).enumerate() {
        x[row * 5 % DIM] = if row == tokens * heads - 2 { f32::NAN } else { 1.0 };
    }
    let run = |guard: bool| {
        let (x_buffer, weight) = (upload(backend, &input.encode_all(&x))?, upload(backend, &bytes)?);
        let y_bytes = tokens * heads * DIM * output.bytes();
        let (y, buffer) = (upload(backend, &vec![POISON; y_bytes])?, upload(backend, &counters(1))?);
        let args = HeadProjectArgs {
            x: View::dense(&x_buffer, heads as u32, DIM as u32),
            weight: WeightView {
                buffer: &weight,
                offset: 0,
                head_stride: (DIM * DIM) as u64,
                row_stride: DIM as u64,
                scales: None,
            },
            y: View::dense(&y, heads as u32, DIM as u32),
            scale,
            out_scale,
            saturates,
            guard: guard.then_some(GuardView { counters: &buffer, row: ROW }),
        };
        let options = OpOptions { variant: variant.map(str::to_owned) };
        backend.once_with(HeadProject { guard, ..spec }, &options, 0..tokens as u32, &args)?;
        Ok((download(backend, &y, y_bytes)?, download(backend, &buffer, ROWS * BYTES)?))
    };
    let (y, counted) = run(true).map_err(text)?;
    if y != run(false).map_err(text)?.0 {
        return Err("the bytes are not those of the op without a guard".into());
    }
    let mut products = Vec::new();
    for row in 0..tokens * heads {
        let (head, at) = (row % heads, row * 5 % DIM);
        let element = |column: usize| match spec.order {
            WeightOrder::Kn => matrix[head * DIM * DIM + at * DIM + column],
            WeightOrder::Nk => matrix[head * DIM * DIM + column * DIM + at],
        };
        let is_nan = row == tokens * heads - 2;
        products.extend((0..DIM).map(|column| if is_nan { f32::NAN } else { element(column) * scale }));
    }
    check_counters(&counted, &[guard_counts(products, Rounding::To(output, out_scale))], 1)
}

/// Counters that are not asked for, or missing, or past their buffer, or shared with an array.
pub fn refuses_guards<B: Backend>(session: &Session<'_, B>) {
    let result = || -> Result<(), Error> {
        let backend = session.backend;
        let on = append_spec(Dtype::F32, Dtype::F16.into());
        let off = KvAppend { guard: false, ..on };
        let mla = MlaDecode { shape: on.shape, kv: on.kv, query: Dtype::F32, out: Dtype::F32 };
        let (rows, cache) = (backend.buffer(576 * 4)?, backend.buffer(mla.cache_bytes())?);
        let (counters, codes) = (backend.buffer(2 * GuardCounts::BYTES)?, backend.buffer(64)?);
        let args = |guard| KvAppendArgs {
            kv_c: View::dense(&rows, 1, 512),
            k_pe: View::dense(&rows, 1, 64),
            kv: KvView::dense(&cache, &mla),
            k_scale: 1.0,
            guard,
        };
        let row = |counters, row| Some(GuardView { counters, row });
        for (what, spec, guard, why) in [
            ("no counters", on, None, "need counters"),
            ("counters of an op that counts nothing", off, row(&counters, 0), "guard: true"),
            ("a row past the counters", on, row(&counters, 2), "guard"),
            ("the last row of all", on, row(&counters, u32::MAX), "guard"),
            ("counters in the cache", on, row(&cache, 0), "guard"),
            ("counters in the new rows", on, row(&rows, 0), "guard"),
        ] {
            refuses(session, what, backend.once(spec, &[0i64][..], &args(guard)), why);
        }
        for (what, append, guard, why) in [
            ("a rotation without counters", on, None, "need counters"),
            ("counters of a rotation that counts nothing", off, row(&counters, 0), "guard: true"),
            ("queries past the counters", on, row(&counters, 1), "guard"),
            ("counters in the codes", on, row(&codes, 0), "guard"),
            ("counters in the table", on, row(&rows, 0), "guard"),
            ("counters in a rotation's cache", on, row(&cache, 0), "guard"),
        ] {
            let args = RopeAppendArgs {
                q_pe: View::dense(&rows, 1, 64),
                q_pe_out: View::dense(&codes, 1, 64),
                layer: args(guard),
                positions: &rows,
                cos_sin: &rows,
                max_position: 1,
                q_pe_scale: 1.0,
                q_scale: 1.0,
            };
            let (query, query_out, layout) = (Dtype::F32, Dtype::E4m3, RopeLayout::Interleaved);
            let op = RopeAppend { append, query, query_out, num_heads: 1, layout };
            refuses(session, what, backend.once(op, RopeAppendBatch::slots(&[0]), &args), why);
        }
        Ok(())
    };
    session.note("refused guards", result().map_err(|error| error.to_string()));
    session.finish("refused guards");
}
