//! Caches whose tokens are records of bytes: `fp8_ds_mla`'s 656 bytes, and 528 without the rotary part.

use wgpu_mla::{
    Backend, Dtype, Error, GatherBatch, GatherRange, KvAppend, KvCopyPages, KvGather, KvGatherArgs, KvLayout,
    KvSpec, MlaDecode, MlaShape, PageTable, RopeAppend, RopeLayout, SplitPolicy, View,
};

use super::Session;
use super::memory::{Pages, download, page_dims, scatter, stored_elems, upload};
use super::ops::{check_append, check_page_copies};
use super::rope::{Place, check_rotated_append};
use super::run::{How, Layout, Slicing};
use crate::case::AppendCase;
use crate::close::{Tolerance, close};
use crate::paint::{Data, Make, Problem, Rng, sequences};
use crate::reference::{Concat, cache_values, concat_and_cache};

fn text(error: Error) -> String {
    error.to_string()
}

/// Each layout, and the rotary elements that it has.
const RECORDS: [(KvLayout, u32); 2] = [(KvLayout::Ds656, 64), (KvLayout::Ds528, 0)];

/// Whether the backend decodes records; where it does not, it says so and what to use. Every backend has all other ops.
fn decodes<B: Backend>(session: &Session<'_, B>) -> bool {
    let KvAppend { shape, kv, input, .. } = append_spec(RECORDS[0], Dtype::Bf16, 16);
    match session.backend.compile(MlaDecode { shape, kv, query: input, out: Dtype::F32 }) {
        Ok(_) => true,
        Err(error) => {
            let fine = matches!(error, Error::LayoutUnsupported { layout: "ds656", .. });
            session.note("a layout that is not served", if fine { Ok(()) } else { Err(error.to_string()) });
            false
        }
    }
}

/// Whether the backend appends to a cache of this layout, or says that it does not.
pub(super) fn serves_layout<B: Backend>(session: &Session<'_, B>, spec: KvAppend) -> bool {
    let error = session.backend.compile(spec).err();
    !matches!(error, Some(Error::LayoutUnsupported { layout, .. }) if layout == spec.kv.layout.name())
}

fn append_spec((layout, rope): (KvLayout, u32), input: Dtype, page_size: u32) -> KvAppend {
    let kv = KvSpec { layout, page_size, num_pages: 64u32.div_ceil(page_size) };
    KvAppend {
        shape: MlaShape { num_heads: 1, kv_lora_rank: 512, qk_rope_head_dim: rope },
        kv,
        input,
        guard: false,
    }
}

/// Tokens of all sizes into a pool of random bytes: groups of zeros, of one large element, at 448 times a power of two and next to it,
/// subnormals of f16 and of bf16.
fn append_case(spec: KvAppend) -> AppendCase {
    let KvAppend { shape, kv, input, .. } = spec;
    let (tokens, dims) = (29, [shape.kv_lora_rank as usize, shape.qk_rope_head_dim as usize]);
    let mut rng = Rng(kv.page_size.into());
    let mut slot_mapping: Vec<i64> = (0..kv.num_slots() as i64).collect();
    rng.shuffle(&mut slot_mapping);
    slot_mapping.truncate(tokens);
    (slot_mapping[3], slot_mapping[28]) = (-1, i64::MIN);
    let mut rows = |dim: usize| {
        let mut elements = Vec::new();
        for group in 0..tokens * dim.div_ceil(128) {
            let size = [1.0, 0.0, 448.0, 3e-4, 1e4, 6e-8, 1e-30, 56.0, 1e-39][group % 9];
            let width = dim.min(128);
            let mut drawn: Vec<f32> = (0..width).map(|_| (rng.unit() as f32 * 2.0 - 1.0) * size).collect();
            drawn[group * 37 % width] = if group % 18 < 9 { size } else { -size.next_up() };
            elements.extend(drawn);
        }
        elements.truncate(tokens * dim);
        input.encode_all(&elements)
    };
    let [kv_c, k_pe] = dims.map(&mut rows);
    expected(AppendCase {
        spec,
        k_scale: 1.0,
        kv_c,
        k_pe,
        slot_mapping,
        kv_cache_before: (0..kv.num_slots() * kv.token(&shape).bytes).map(|_| rng.next() as u8).collect(),
        kv_cache: Vec::new(),
    })
}

/// The case with the cache that its append leaves.
fn expected(mut case: AppendCase) -> AppendCase {
    let MlaShape { kv_lora_rank, qk_rope_head_dim, .. } = case.spec.shape;
    case.kv_cache = case.kv_cache_before.clone();
    let args = Concat {
        kv_c: &case.kv_c,
        k_pe: &case.k_pe,
        input: case.spec.input,
        slot_mapping: &case.slot_mapping,
        kv_lora_rank: kv_lora_rank as usize,
        qk_rope_head_dim: qk_rope_head_dim as usize,
        k_scale: 1.0,
    };
    concat_and_cache(&args, case.spec.kv.layout, &mut case.kv_cache);
    case
}

/// Infinities and NaNs in some groups of the latent: those groups have a scale of 2^120, so that an infinity is read as one.
fn with_non_finite(mut case: AppendCase) -> AppendCase {
    let input = case.spec.input;
    let elem = input.bytes();
    for (i, x) in
        [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN].into_iter().cycle().take(40).enumerate()
    {
        let at = i * 331 % (case.kv_c.len() / elem) * elem;
        case.kv_c[at..at + elem].copy_from_slice(&input.encode_all(&[x]));
    }
    expected(case)
}

/// Every byte of an append, from each dtype.
pub fn record_appends<B: Backend>(session: &Session<'_, B>) {
    for records in RECORDS {
        for (input, page_size) in [(Dtype::F32, 16), (Dtype::F16, 7), (Dtype::Bf16, 64), (Dtype::Bf16, 1)] {
            let case = append_case(append_spec(records, input, page_size));
            for gaps in [false, true] {
                let result = check_append(session.backend, &case, gaps);
                session.note(&format!("{:?}, gaps {gaps}", case.spec), result);
            }
            let result = check_append(session.backend, &with_non_finite(case), false);
            session.note(&format!("non-finite {input} into pages of {page_size}"), result);
        }
    }
    session.finish("appends of records");
}

/// Tokens as floats: a code times its scale, rounded once.
pub fn record_gathers<B: Backend>(session: &Session<'_, B>) {
    for (index, records) in RECORDS.into_iter().enumerate() {
        for output in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            let mut case = append_case(append_spec(records, Dtype::Bf16, 7));
            let result = check_gather(session.backend, &case, output);
            session.note(&format!("{:?} to {output}", case.spec), result);
            let KvSpec { layout, .. } = case.spec.kv;
            scale_any(&mut case.kv_cache, layout.token(512, records.1).bytes as usize, index);
            let result = check_gather(session.backend, &case, output);
            session.note(&format!("{layout} with any scales to {output}"), result);
        }
    }
    session.finish("gathers of records");
}

/// Pages are copied as bytes.
pub fn record_copies<B: Backend>(session: &Session<'_, B>) {
    for (records, page_size) in RECORDS.into_iter().zip([1, 48]) {
        let KvAppend { shape, kv, .. } = append_spec(records, Dtype::F32, page_size);
        let spec = KvCopyPages { shape, kv: KvSpec { num_pages: 12, ..kv } };
        for gaps in [false, true] {
            let result = check_page_copies(session.backend, &spec, &[(0, 11), (3, 7), (0, 2), (10, 1)], gaps);
            session.note(&format!("{spec:?}, gaps {gaps}"), result);
        }
    }
    session.finish("page copies of records");
}

/// The bits of the rotations and the append one after the other.
pub fn record_rotated_appends<B: Backend>(session: &Session<'_, B>) {
    for (input, page_size, layout, num_heads) in [
        (Dtype::F32, 16, RopeLayout::HalfSplit, 16),
        (Dtype::F16, 7, RopeLayout::Interleaved, 3),
        (Dtype::Bf16, 64, RopeLayout::Interleaved, 20),
        (Dtype::Bf16, 1, RopeLayout::HalfSplit, 1),
    ] {
        let case = append_case(append_spec(RECORDS[0], input, page_size));
        let spec =
            RopeAppend { append: case.spec, query: Dtype::Bf16, query_out: Dtype::Bf16, num_heads, layout };
        for gaps in [false, true] {
            let place = if gaps { Place::Apart } else { Place::Same };
            let result = check_rotated_append(session.backend, &spec, &case, place, gaps);
            session.note(&format!("{spec:?}, {place:?}, gaps {gaps}"), result);
        }
    }
    let without_rope = append_spec(RECORDS[1], Dtype::Bf16, 16);
    let spec = RopeAppend {
        append: without_rope,
        query: Dtype::Bf16,
        query_out: Dtype::Bf16,
        num_heads: 1,
        layout: RopeLayout::Interleaved,
    };
    let refused = match session.backend.compile(spec) {
        Err(Error::Shape { .. }) => Ok(()),
        other => Err(format!("{:?}", other.err())),
    };
    session.note("nothing to rotate", refused);
    session.finish("rotated appends of records");
}

fn check_gather<B: Backend>(backend: &B, case: &AppendCase, output: Dtype) -> Result<(), String> {
    let (kv, shape) = (case.spec.kv, case.spec.shape);
    let row = stored_elems(&kv, &shape);
    // Tokens that were appended: other slots hold any bytes.
    let slots: Vec<i64> = case.slot_mapping.iter().copied().filter(|&slot| slot >= 0).collect();
    let pages = Pages::gaps(&kv, row);
    let cache =
        upload(backend, &scatter(&case.kv_cache, page_dims(&kv, row), 1, pages.strides())).map_err(text)?;
    let dim = shape.row_elems() as usize;
    let out_bytes = slots.len() * dim * output.bytes();
    let out = upload(backend, &vec![0; out_bytes]).map_err(text)?;
    // Each a sequence, whose last token is the slot.
    let table: Vec<i32> = slots.iter().map(|&slot| (slot / i64::from(kv.page_size)) as i32).collect();
    let lens: Vec<i32> = slots.iter().map(|&slot| (slot % i64::from(kv.page_size)) as i32 + 1).collect();
    let ranges: Vec<_> = (0..slots.len() as u32)
        .map(|i| GatherRange { sequence: i, begin: lens[i as usize] as u32 - 1, tokens: 1, out_row: i })
        .collect();
    let args = KvGatherArgs {
        kv: pages.view(&cache),
        k_scale: 1.0,
        out: View { buffer: &out, offset: 0, token_stride: dim as u64, head_stride: 0 },
    };
    let batch = GatherBatch {
        pages: PageTable::Dense { block_table: &table, max_pages: 1 },
        seq_lens: &lens,
        ranges: &ranges,
    };
    backend.once(KvGather { shape, kv, output }, batch, &args).map_err(text)?;
    let got = download(backend, &out, out_bytes).map_err(text)?;
    let values = cache_values(&kv, &shape, &case.kv_cache);
    let want = slots
        .iter()
        .flat_map(|&slot| output.encode_all(&values[slot as usize * dim..][..dim]))
        .collect::<Vec<u8>>();
    match got.iter().zip(&want).position(|(a, b)| a != b) {
        Some(at) => {
            Err(format!("row {} byte {} is wrong", at / (dim * output.bytes()), at % (dim * output.bytes())))
        }
        None => Ok(()),
    }
}

/// Decodes of records that this crate writes, and of others whose scales are no powers of two, as vLLM writes them.
pub fn record_decodes<B: Backend>(session: &Session<'_, B>) {
    if decodes(session) {
        for (index, (layout, rope)) in RECORDS.into_iter().enumerate() {
            for (query, heads, data) in [
                (Dtype::Bf16, 16, Data::Randn),
                (Dtype::F32, 6, Data::Needle),
                (Dtype::E4m3, 40, Data::Extremes),
            ] {
                let lens: &[(u32, u32)] = &[(37, 2), (0, 1), (150, 1), (64, 3), (16, 1)];
                let make = Make {
                    dims: (512, rope),
                    heads,
                    query,
                    data,
                    records: Some(layout),
                    sequences: sequences(lens),
                    ..Make::default()
                };
                let mut problem = make.build();
                let pages = problem.spec.kv.num_pages;
                let hows = [
                    How::default(),
                    How {
                        layout: Layout::Gaps,
                        slicing: Slicing::Split,
                        policy: SplitPolicy::FixedTokens(32),
                        ..How::default()
                    },
                    How { slab_pages: pages.div_ceil(3), ..How::default() },
                ];
                for how in &hows {
                    session.check(&problem, how);
                }
                if query == Dtype::Bf16 && session.serves(&problem.spec) {
                    odd_records(session, &problem);
                }
                scale_any(&mut problem.kv, layout.token(512, rope).bytes as usize, index);
                problem.name += ", scales that are no powers of two";
                session.check(&problem, &How::default());
                for (name, scale_of) in
                    [("rising", rising as fn(_, _, _) -> _), ("of all sizes", of_all_sizes)]
                {
                    let mut problem = scaled(&problem, scale_of);
                    problem.name += &format!(": {name}");
                    session.check(&problem, &How::default());
                }
            }
        }
    }
    session.finish("decodes of records");
}

/// One token with a NaN code, or with a scale that is subnormal, below all others.
fn odd_records<B: Backend>(session: &Session<'_, B>, clean: &Problem) {
    let token = clean.spec.kv.token(&clean.spec.shape).bytes as usize;
    let record = clean.slots(2)[77] as usize * token;
    let least = 1e-40f32.to_le_bytes();
    for (name, at, bytes) in
        [("a code of NaN", 300, &[0x7F][..]), ("of -NaN", 511, &[0xFF]), ("a subnormal scale", 512, &least)]
    {
        let mut problem = clean.clone();
        problem.kv[record + at..][..bytes.len()].copy_from_slice(bytes);
        let result = session.run_decode(&problem, &How::default()).and_then(|answer| {
            let (out, lse) = problem.expected();
            close("lse", &answer.lse, &lse, &Tolerance::lse()).into_result()?;
            close("out", &answer.out, &out, &session.tolerance(clean, 1)).into_result()?;
            Ok(())
        });
        session.note(&format!("{}, {name}", clean.name), result);
    }
}

/// The problem with other scales, by a token's place in its sequence, that sequence's length, and the group. Logits are of the rotary part
/// alone, so that tokens of all sizes have weight.
pub(super) fn scaled(problem: &Problem, scale_of: impl Fn(usize, usize, usize) -> f32) -> Problem {
    let mut problem = problem.clone();
    let spec = problem.spec;
    let (elem, token) = (spec.query.bytes(), spec.kv.token(&spec.shape).bytes as usize);
    let rows = problem.q.chunks_mut(spec.shape.row_elems() as usize * elem);
    rows.for_each(|row| row[..512 * elem].fill(0));
    for sequence in 0..problem.seq_lens.len() {
        let slots = problem.slots(sequence);
        for (place, &slot) in slots.iter().enumerate() {
            for (group, scale) in problem.kv[slot as usize * token + 512..][..16].chunks_mut(4).enumerate() {
                scale.copy_from_slice(&scale_of(place, slots.len(), group).to_le_bytes());
            }
        }
    }
    problem
}

/// Scales of a sequence that grow by 2^20, some groups sooner than others.
fn rising(place: usize, count: usize, group: usize) -> f32 {
    let exponent = (place * 20 + group * 7) as f32 / count as f32 - 16.0;
    exponent.exp2() * (1.0 + (place * 29 % 64) as f32 / 97.0)
}

/// The least that there are first, then ever larger ones, and small ones again.
pub(super) fn of_all_sizes(place: usize, count: usize, group: usize) -> f32 {
    const SIZES: [f32; 8] = [f32::MIN_POSITIVE, 1.3e-30, 3e-9, 0.7, 5.5, 3e11, 1.7e30, 2e-3];
    let size = SIZES[place * SIZES.len() / count];
    if group == place % 4 { size * 0.3 + f32::MIN_POSITIVE } else { size }
}

/// Multiplies every scale by a number of its own; those of poison stay NaN.
pub(super) fn scale_any(cache: &mut [u8], token: usize, seed: usize) {
    for (slot, bytes) in cache.chunks_mut(token).enumerate() {
        for (group, scale) in bytes[512..528].chunks_mut(4).enumerate() {
            let factor = 0.75 + ((slot * 4 + group + seed) * 29 % 64) as f32 / 97.0;
            let value = Dtype::F32.decode_at(scale, 0) * factor;
            scale.copy_from_slice(&value.to_le_bytes());
        }
    }
}
