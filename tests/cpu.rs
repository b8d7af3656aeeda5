//! The CPU backend against a short f64 check of its own, its bit-exact promises, and its errors.
#![allow(clippy::unwrap_used)]

use wgpu_mla::cpu::{Buffer, Cpu};
use wgpu_mla::{
    AppendLayer, AppendSpec, Backend, Batch, Capacity, Dtype, Error, KvSpec, KvView, Layer, LseBase,
    MergeStates, MergeStatesSpec, MlaShape, MlaSpec, PageTable, Plan, Policy, Query, SharedPrefix, View,
    Visibility, plan,
};

const DTYPES: [Dtype; 4] = Dtype::ALL;
const WILD: i32 = 2_147_480_000;

/// About normal, from a counter: the same element whatever the batch around it.
fn noise(stream: u64, index: u64) -> f32 {
    let mut x = stream.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ index.wrapping_mul(0xD6E8_FEB8_6659_FD93);
    let mut sum = 0.0;
    for _ in 0..4 {
        x = (x ^ x >> 32).wrapping_mul(0xD6E8_FEB8_6659_FD93);
        x ^= x >> 29;
        sum += (x >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
    }
    sum * 1.7
}

/// Element `index` of a stream.
type Data = fn(stream: u64, index: u64) -> f32;

/// A sequence: a name for its data, its tokens in the cache, its query tokens.
#[derive(Clone, Copy)]
struct Seq(u64, u32, u32);

struct Case {
    spec: MlaSpec,
    seqs: Vec<Seq>,
    data: Data,
    softmax_scale: f32,
    k_scale: f32,
    q_scale: f32,
    lse_base: LseBase,
    policy: Policy,
    visibility: Visibility<'static>,
    shared: Vec<SharedPrefix>,
    split_query: bool,
    variant: Option<&'static str>,
    threads: usize,
}

fn shape(num_heads: u32, kv_lora_rank: u32, qk_rope_head_dim: u32) -> MlaShape {
    MlaShape { num_heads, kv_lora_rank, qk_rope_head_dim }
}

impl Case {
    fn new(shape: MlaShape, kv: Dtype, query: Dtype, seqs: &[Seq]) -> Self {
        let kv = KvSpec { dtype: kv, page_size: 16, num_pages: 1 };
        Self {
            spec: MlaSpec { shape, kv, query, out: Dtype::F32 },
            seqs: seqs.to_vec(),
            data: |stream, index| noise(stream, index) / 10.0,
            softmax_scale: 0.8,
            k_scale: if kv.dtype == Dtype::E4m3 { 0.0078 } else { 1.0 },
            q_scale: if query == Dtype::E4m3 { 0.5 } else { 1.0 },
            lse_base: LseBase::E,
            policy: Policy::Auto,
            visibility: Visibility::Causal,
            shared: Vec::new(),
            split_query: false,
            variant: None,
            threads: 2,
        }
    }

    /// Row `token` of a sequence's cache, encoded. Streams below 100 share their first 64 rows.
    fn cache_row(&self, seq: Seq, token: u32) -> Vec<u8> {
        let n = u64::from(self.spec.shape.row_elems());
        let stream = if seq.0 < 100 && token < 64 { 0 } else { seq.0 };
        let row: Vec<f32> =
            (0..n).map(|i| (self.data)(stream, u64::from(token) * n + i) / self.k_scale).collect();
        self.spec.kv.dtype.encode_all(&row)
    }

    /// The query of token `i` of a sequence, all heads, encoded.
    fn query_rows(&self, seq: Seq, i: u32) -> Vec<u8> {
        let n = u64::from(self.spec.shape.row_elems() * self.spec.shape.num_heads);
        let row: Vec<f32> =
            (0..n).map(|k| (self.data)(seq.0 + 1000, u64::from(i) * n + k) / self.q_scale).collect();
        self.spec.query.encode_all(&row)
    }

    fn run(&self) -> (Vec<f32>, Vec<f32>) {
        let cpu = Cpu::with_threads(self.threads);
        let mut spec = self.spec;
        let (page_size, n) = (spec.kv.page_size, spec.shape.row_elems() as usize);
        let pages: Vec<u32> = self.seqs.iter().map(|seq| seq.1.div_ceil(page_size)).collect();
        let max_pages = *pages.iter().max().unwrap() as usize + 2;
        spec.kv.num_pages = pages.iter().sum::<u32>() + 3;

        // Every byte is 0xFF, NaN in each dtype, but for the rows in use. Pages are handed out backwards.
        let row_bytes = n * spec.kv.dtype.bytes();
        let mut cache = vec![0xFFu8; spec.kv.num_slots() as usize * row_bytes];
        let mut table = vec![WILD; self.seqs.len() * max_pages];
        let mut free = spec.kv.num_pages as i32 - 1;
        for (s, &seq) in self.seqs.iter().enumerate() {
            for block in 0..pages[s] as usize {
                table[s * max_pages + block] = free;
                free -= 1;
            }
            for group in &self.shared {
                if group.sequences.contains(&(s as u32)) {
                    let blocks = (group.tokens / page_size) as usize;
                    let first = group.sequences[0] as usize * max_pages;
                    table.copy_within(first..first + blocks, s * max_pages);
                }
            }
            for token in 0..seq.1 {
                let page = table[s * max_pages + (token / page_size) as usize] as usize;
                let slot = page * page_size as usize + (token % page_size) as usize;
                cache[slot * row_bytes..][..row_bytes].copy_from_slice(&self.cache_row(seq, token));
            }
        }
        let queries: Vec<u8> =
            self.seqs.iter().flat_map(|&seq| (0..seq.2).flat_map(move |i| self.query_rows(seq, i))).collect();
        let lens: Vec<i32> = self.seqs.iter().map(|seq| seq.1 as i32).collect();
        let mut starts = vec![0];
        self.seqs.iter().for_each(|seq| starts.push(starts[starts.len() - 1] + seq.2 as i32));
        let (total, heads, latent) =
            (starts[starts.len() - 1] as u32, spec.shape.num_heads, spec.shape.kv_lora_rank);

        let filled = |bytes: &[u8]| {
            let buffer = cpu.buffer(bytes.len() as u64).unwrap();
            let mut whole = bytes.to_vec();
            whole.resize(bytes.len().next_multiple_of(4), 0);
            cpu.upload(&buffer, 0, &whole).unwrap();
            buffer
        };
        let (q, kv) = (filled(&queries), filled(&cache));
        let rows = total as usize * heads as usize;
        let out_bytes = rows * latent as usize * spec.out.bytes();
        let (out, lse) = (filled(&vec![0xFF; out_bytes]), filled(&vec![0xFF; rows * 4]));

        let mla = cpu.decode(&spec, self.variant).unwrap();
        let batch = Batch {
            visibility: self.visibility,
            shared_prefixes: &self.shared,
            ..Batch::new(&lens, &starts)
        };
        let plan = Plan::new(&spec, &cpu.tiling(&mla), &batch, self.policy).unwrap();
        let mut step = cpu.step(&mla, Capacity::default()).unwrap();
        cpu.prepare(&mla, &mut step, &plan, PageTable::Dense { block_table: &table, max_pages }).unwrap();
        let mut layer = Layer {
            lse_base: self.lse_base,
            k_scale: self.k_scale,
            q_scale: self.q_scale,
            ..Layer::dense(&spec, &q, &kv, &out, &lse, self.softmax_scale)
        };
        if self.split_query {
            let whole = View::dense(&q, heads, n as u32);
            let q_pe = View { offset: latent.into(), ..whole };
            layer.query = Query::Split { q_nope: whole, q_pe };
        }
        let binding = cpu.bind(&mla, total, &layer).unwrap();
        cpu.run(&mla, &step, &binding).unwrap();
        let lse = cpu.download(&lse, rows as u64 * 4).unwrap();
        let out = cpu.download(&out, out_bytes as u64).unwrap();
        (spec.out.decode_all(&out), Dtype::F32.decode_all(&lse))
    }

    /// Out and natural LSE in f64.
    fn reference(&self) -> (Vec<f64>, Vec<f64>) {
        let MlaSpec { shape, kv, query, .. } = self.spec;
        let (n, latent, heads) =
            (shape.row_elems() as usize, shape.kv_lora_rank as usize, shape.num_heads as usize);
        let wide = |dtype: Dtype, bytes: &[u8], scale: f32| -> Vec<f64> {
            dtype.decode_all(bytes).iter().map(|&x| f64::from(x) * f64::from(scale)).collect()
        };
        let (mut outs, mut lses) = (Vec::new(), Vec::new());
        for &seq in &self.seqs {
            let cache: Vec<Vec<f64>> =
                (0..seq.1).map(|t| wide(kv.dtype, &self.cache_row(seq, t), self.k_scale)).collect();
            for i in 0..seq.2 {
                let q = wide(query, &self.query_rows(seq, i), self.q_scale);
                let visible = match self.visibility {
                    Visibility::Causal => (seq.1 + i + 1).saturating_sub(seq.2),
                    Visibility::Full => seq.1,
                    Visibility::Bounds(bounds) => bounds[lses.len() / heads],
                };
                for q in q.chunks(n) {
                    let dot = |k: &Vec<f64>| k.iter().zip(q).map(|(k, q)| k * q).sum::<f64>();
                    let logits: Vec<f64> = cache[..visible as usize]
                        .iter()
                        .map(|k| dot(k) * f64::from(self.softmax_scale))
                        .collect();
                    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let sum: f64 = logits.iter().map(|s| (s - max).exp()).sum();
                    let mut out = vec![0.0; latent];
                    for (s, k) in logits.iter().zip(&cache) {
                        let p = (s - max).exp() / sum;
                        out.iter_mut().zip(k).for_each(|(o, k)| *o += p * k);
                    }
                    outs.extend(out);
                    lses.push(max + sum.ln());
                }
            }
        }
        (outs, lses)
    }

    fn check(&self, what: &str) {
        let (got, got_lse) = self.run();
        let (want, want_lse) = self.reference();
        assert_eq!((got.len(), got_lse.len()), (want.len(), want_lse.len()), "{what}");
        let latent = self.spec.shape.kv_lora_rank as usize;
        let f32_only = [self.spec.kv.dtype, self.spec.query, self.spec.out] == [Dtype::F32; 3];
        let (mut dot, mut norms) = (0.0, [0.0; 2]);
        for (row, (got, want)) in got.chunks(latent).zip(want.chunks(latent)).enumerate() {
            let u = want.iter().fold(1f64, |u, x| u.max(x.abs()));
            let row_max = want.iter().fold(0f64, |m, x| m.max(x.abs()));
            for (&got, &want) in got.iter().zip(want) {
                let (got, error) = (f64::from(got), (f64::from(got) - want).abs());
                let fine = if f32_only {
                    error <= 1e-5 * row_max
                } else {
                    error <= 8e-4 * u || error <= want.abs() * 2.01 / 128.0
                };
                assert!(fine, "{what}: out of row {row}: {got} instead of {want}");
                dot += got * want;
                norms = [norms[0] + got * got, norms[1] + want * want];
            }
        }
        let distance = 1.0 - dot / (norms[0] * norms[1]).sqrt();
        let most = if f32_only { 1e-9 } else { 5e-6 };
        assert!(norms[1] == 0.0 || distance < most, "{what}: cosine distance {distance}");
        for (row, (&got, &want)) in got_lse.iter().zip(&want_lse).enumerate() {
            if want == f64::NEG_INFINITY {
                assert_eq!(got.to_bits(), 0xFF80_0000, "{what}: lse of empty row {row}");
                continue;
            }
            let got =
                f64::from(got) * if self.lse_base == LseBase::Two { std::f64::consts::LN_2 } else { 1.0 };
            let error = (got - want).abs();
            assert!(error <= 1e-5 || error <= want.abs() * 8.01 / 65536.0, "{what}: lse {got} for {want}");
        }
    }
}

fn bits(xs: &[f32]) -> Vec<u32> {
    xs.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn every_dims_dtype_and_variant() {
    let spec = Case::new(shape(1, 512, 64), Dtype::F32, Dtype::F32, &[]).spec;
    let variants = Cpu::with_threads(1).variants(&spec);
    assert_eq!(variants.last(), Some(&"portable"));
    for variant in variants {
        for (l, r) in [(512, 64), (256, 64), (256, 32), (512, 0)] {
            for kv in DTYPES {
                for query in DTYPES {
                    let seqs = [Seq(1, 150, 1), Seq(2, 31, 2)];
                    let mut case = Case::new(shape(5, l, r), kv, query, &seqs);
                    case.policy = Policy::FixedTokens(100);
                    case.variant = Some(variant);
                    case.check(&format!("{variant} {l}/{r} kv {kv} q {query}"));
                }
            }
        }
    }
}

#[test]
fn heads_page_sizes_and_policies() {
    for heads in [1, 2, 6, 12, 16, 20, 33, 40, 96, 128] {
        let mut case =
            Case::new(shape(heads, 256, 32), Dtype::F16, Dtype::F32, &[Seq(1, 75, 2), Seq(2, 40, 1)]);
        case.spec.kv.page_size = heads.max(3);
        case.split_query = heads % 2 == 0;
        case.check(&format!("{heads} heads"));
    }
    let policies = [Policy::Auto, Policy::OneSplit, Policy::FixedTokens(1), Policy::FixedTokens(37)];
    for (policy, page_size) in policies.into_iter().zip([1, 256, 64, 7]) {
        let seqs = [Seq(1, 700, 1), Seq(2, 1200, 3), Seq(3, 5, 1)];
        let mut case = Case::new(shape(16, 512, 64), Dtype::F32, Dtype::F32, &seqs);
        (case.policy, case.spec.kv.page_size, case.threads) = (policy, page_size, 4);
        case.check(&format!("{policy:?}, page size {page_size}"));
    }
}

#[test]
fn ragged_batches_and_empty_rows() {
    let seqs = [Seq(1, 0, 1), Seq(2, 3, 5), Seq(3, 90, 0), Seq(4, 66, 4), Seq(5, 0, 0), Seq(6, 1, 1)];
    for policy in [Policy::Auto, Policy::FixedTokens(32), Policy::OneSplit] {
        for heads in [3, 16] {
            let mut case = Case::new(shape(heads, 256, 64), Dtype::Bf16, Dtype::Bf16, &seqs);
            case.policy = policy;
            case.check(&format!("causal, {policy:?}"));
            case.visibility = Visibility::Full;
            case.lse_base = LseBase::Two;
            case.check(&format!("full, {policy:?}"));
            case.visibility = Visibility::Bounds(&[0, 3, 0, 1, 2, 3, 66, 0, 40, 9, 1]);
            case.check(&format!("bounds, {policy:?}"));
        }
    }
    for out in [Dtype::F16, Dtype::Bf16] {
        let mut case = Case::new(shape(3, 256, 64), Dtype::F16, Dtype::F32, &seqs);
        case.spec.out = out;
        case.check(&format!("{out} out"));
    }
}

#[test]
fn hard_data() {
    let seqs = [Seq(1, 300, 1), Seq(200, 513, 2)];
    let spreads: [(&str, Data, f32); 4] = [
        ("logits past 100", |s, i| noise(s, i) * 2.0, 1.0),
        ("a needle", |s, i| if s < 999 && i / 576 == 177 { 3.0 } else { noise(s, i).abs() * 0.3 }, 2.0),
        ("300", |s, i| if s < 999 { noise(s, i) * 300.0 } else { noise(s, i) * 1e-3 }, 0.135),
        ("1e-4", |s, i| noise(s, i) * 1e-4, 0.135),
    ];
    for (what, data, softmax_scale) in spreads {
        for kv in [Dtype::F32, Dtype::F16] {
            let mut case = Case::new(shape(4, 512, 64), kv, kv, &seqs);
            (case.data, case.softmax_scale) = (data, softmax_scale);
            case.check(what);
            case.policy = Policy::FixedTokens(64);
            case.check(what);
        }
    }
    let mut case = Case::new(shape(4, 512, 64), Dtype::Bf16, Dtype::F32, &seqs);
    case.data = |s, i| if s < 999 { noise(s, i) * 1e5 } else { noise(s, i) * 1e-5 };
    case.check("bf16 beyond f16");
}

#[test]
fn shared_prefixes() {
    for policy in [Policy::Auto, Policy::FixedTokens(32), Policy::OneSplit] {
        let seqs = [Seq(1, 100, 1), Seq(300, 50, 1), Seq(2, 64, 1), Seq(3, 333, 2)];
        let mut case = Case::new(shape(6, 256, 64), Dtype::F16, Dtype::F16, &seqs);
        case.policy = policy;
        case.shared = vec![SharedPrefix { sequences: vec![0, 2, 3], tokens: 64 }];
        case.check(&format!("shared prefix, {policy:?}"));
    }
}

/// With fixed splits a row's bits depend on the row alone.
#[test]
fn fixed_splits_are_bit_exact() {
    let probe = Seq(7, 203, 2);
    for variant in Cpu::new().variants(&Case::new(shape(1, 512, 64), Dtype::F16, Dtype::F16, &[]).spec) {
        for (heads, fixed) in [(6, 64), (16, 100), (5, 17)] {
            for kv in [Dtype::F16, Dtype::E4m3] {
                let mut case = Case::new(shape(heads, 256, 64), kv, Dtype::F32, &[probe]);
                (case.policy, case.variant) = (Policy::FixedTokens(fixed), Some(variant));
                let (out, lse) = case.run();
                let (rows, latent) = (lse.len(), 256);
                let same = |what: &str, case: &Case, first_row: usize| {
                    let (o, l) = case.run();
                    assert_eq!(bits(&l[first_row..][..rows]), bits(&lse), "{variant}: lse, {what}");
                    let o = &o[first_row * latent..][..rows * latent];
                    assert_eq!(bits(o), bits(&out), "{variant}: out, {what}");
                };
                for threads in [1, 3] {
                    case.threads = threads;
                    same("threads", &case, 0);
                }
                for page_size in [1, 64, 100] {
                    case.spec.kv.page_size = page_size;
                    same("page size", &case, 0);
                }
                case.split_query = true;
                case.seqs = vec![Seq(8, 411, 3), Seq(9, 0, 1), probe, Seq(10, 77, 1)];
                let first_row = 4 * heads as usize;
                same("batch", &case, first_row);
                case.spec.kv.page_size = 16;
                case.shared = vec![SharedPrefix { sequences: vec![0, 2, 3], tokens: 64 }];
                same("shared prefix", &case, first_row);
                // The same keys and query as the last token of a longer run: another place in another tile.
                case.shared.clear();
                let whole = Case { seqs: vec![Seq(7, 203, 2)], ..case };
                let one = whole.run();
                let bounded = Case { visibility: Visibility::Bounds(&[202, 203]), ..whole };
                assert_eq!(bits(&bounded.run().0), bits(&one.0), "bounds instead of causal");
            }
        }
    }
}

/// A row's bits do not depend on how many keys its tile-mates see.
#[test]
fn tile_mates_do_not_matter() {
    for policy in [Policy::OneSplit, Policy::FixedTokens(64)] {
        let bounds: [&'static [u32]; 3] = [&[45, 203, 1], &[45, 46, 203], &[45, 0, 45]];
        let rows = bounds.map(|bounds| {
            let mut case = Case::new(shape(5, 256, 32), Dtype::F32, Dtype::F32, &[Seq(7, 203, 3)]);
            (case.policy, case.visibility) = (policy, Visibility::Bounds(bounds));
            let (out, lse) = case.run();
            (bits(&out[..5 * 256]), bits(&lse[..5]))
        });
        assert!(rows[0] == rows[1] && rows[1] == rows[2], "{policy:?}");
    }
}

fn small_spec() -> MlaSpec {
    let kv = KvSpec { dtype: Dtype::F16, page_size: 16, num_pages: 4 };
    MlaSpec { shape: shape(2, 256, 32), kv, query: Dtype::F16, out: Dtype::F32 }
}

struct Small {
    cpu: Cpu,
    q: Buffer,
    kv: Buffer,
    out: Buffer,
    lse: Buffer,
}

fn small() -> Small {
    let cpu = Cpu::with_threads(2);
    let [q, kv, out, lse] = [1 << 12, 1 << 16, 1 << 13, 1 << 8].map(|bytes| cpu.buffer(bytes).unwrap());
    Small { cpu, q, kv, out, lse }
}

#[test]
fn errors_of_buffers() {
    let cpu = Cpu::with_threads(1);
    for bytes in [u64::MAX, u64::MAX / 4, 1 << 60] {
        assert!(matches!(cpu.buffer(bytes), Err(Error::OutOfMemory { .. })));
    }
    let buffer = cpu.buffer(10).unwrap();
    assert_eq!(buffer.bytes(), 12);
    assert_eq!(cpu.download(&buffer, 12).unwrap(), [0; 12]);
    cpu.upload(&buffer, 4, &[1, 2, 3, 4]).unwrap();
    assert_eq!(cpu.download(&buffer, 8).unwrap(), [0, 0, 0, 0, 1, 2, 3, 4]);
    assert!(matches!(cpu.upload(&buffer, 2, &[0; 4]), Err(Error::Alignment { .. })));
    assert!(matches!(cpu.upload(&buffer, 0, &[0; 3]), Err(Error::Alignment { .. })));
    assert!(matches!(cpu.upload(&buffer, 12, &[0; 4]), Err(Error::BufferTooSmall { end: 16, size: 12, .. })));
    assert!(matches!(cpu.upload(&buffer, u64::MAX - 3, &[0; 4]), Err(Error::BufferTooSmall { .. })));
    assert!(matches!(cpu.download(&buffer, 16), Err(Error::BufferTooSmall { .. })));
    assert!(matches!(cpu.download(&buffer, 6), Err(Error::Alignment { .. })));
}

#[test]
fn errors_of_decode_and_bind() {
    let Small { cpu, q, kv, out, lse } = small();
    let spec = small_spec();
    let forced = cpu.decode(&spec, Some("sse9"));
    assert!(matches!(forced, Err(Error::VariantUnavailable { name, .. }) if name == "sse9"));
    assert!(matches!(
        cpu.decode(&MlaSpec { out: Dtype::E4m3, ..spec }, None),
        Err(Error::DtypeUnsupported { .. })
    ));

    let mla = cpu.decode(&spec, None).unwrap();
    assert_eq!(mla.variant(), cpu.variants(&spec)[0]);
    let layer = Layer::dense(&spec, &q, &kv, &out, &lse, 0.1);
    let error = |layer: Layer<'_, Buffer>| cpu.bind(&mla, 2, &layer).unwrap_err();
    assert!(cpu.bind(&mla, 2, &layer).is_ok());
    assert!(matches!(error(Layer { k_scale: f32::NAN, ..layer }), Error::Scale { what: "k_scale", .. }));
    assert!(matches!(cpu.bind(&mla, 100, &layer), Err(Error::BufferTooSmall { .. })));
    let aliased = Layer { out: View { buffer: &q, ..layer.out }, ..layer };
    assert!(matches!(cpu.bind(&mla, 1, &aliased), Err(Error::Aliased { a: "q_nope", b: "out" })));
    let aliased = Layer { lse: View { buffer: &kv, ..layer.lse }, ..layer };
    assert!(matches!(error(aliased), Error::Aliased { a: "kv", b: "lse" }));
    let overlapping = Layer { lse: View { buffer: &out, ..layer.lse }, ..layer };
    assert!(matches!(error(overlapping), Error::Aliased { a: "out", b: "lse" }));
    let disjoint = Layer { lse: View { buffer: &out, offset: 2 * 2 * 256, ..layer.lse }, ..layer };
    assert!(cpu.bind(&mla, 2, &disjoint).is_ok());
    assert!(matches!(
        cpu.step(&mla, Capacity { slots: u32::MAX, ..Capacity::default() }),
        Err(Error::OutOfMemory { .. })
    ));
    let huge = Capacity { items: u32::MAX, ..Capacity::default() };
    assert!(matches!(cpu.step(&mla, huge), Err(Error::OutOfMemory { .. })));
}

#[test]
fn errors_of_prepare_and_run() {
    let Small { cpu, q, kv, out, lse } = small();
    let spec = small_spec();
    let mla = cpu.decode(&spec, None).unwrap();
    let layer = Layer::dense(&spec, &q, &kv, &out, &lse, 0.1);
    let one = cpu.bind(&mla, 1, &layer).unwrap();
    let tiling = cpu.tiling(&mla);
    let plan = Plan::new(&spec, &tiling, &Batch::new(&[20, 3], &[0, 1, 2]), Policy::Auto).unwrap();
    let mut step = cpu.step(&mla, Capacity::of(&plan)).unwrap();
    let mismatch = |done| assert!(matches!(done, Err(Error::LayoutMismatch { .. })));
    mismatch(cpu.run(&mla, &step, &one));
    let table = PageTable::Dense { block_table: &[0, 1, 2, WILD], max_pages: 2 };
    cpu.prepare(&mla, &mut step, &plan, table).unwrap();
    mismatch(cpu.run(&mla, &step, &one));
    let two = cpu.bind(&mla, 2, &layer).unwrap();
    cpu.run(&mla, &step, &two).unwrap();

    let other_spec = MlaSpec { query: Dtype::F32, ..spec };
    let other = cpu.decode(&other_spec, None).unwrap();
    mismatch(cpu.run(&other, &step, &two));
    mismatch(cpu.prepare(&other, &mut step, &plan, table));
    cpu.prepare(&mla, &mut step, &plan, table).unwrap();
    mismatch(Cpu::with_threads(3).run(&mla, &step, &two));

    assert!(matches!(cpu.prepare(&mla, &mut step, &plan, PageTable::Device), Err(Error::Shape { .. })));
    let wild = PageTable::Dense { block_table: &[0, 9, 2, 0], max_pages: 2 };
    let error = cpu.prepare(&mla, &mut step, &plan, wild);
    assert!(matches!(error, Err(Error::PageOutOfRange { seq: 0, block: 1, page: 9, .. })));
    mismatch(cpu.run(&mla, &step, &two));

    // A plan for more heads, another tiling or another page size, or one that someone has edited.
    let bad = |plan: &Plan, step: &mut wgpu_mla::cpu::Step| {
        assert!(matches!(cpu.prepare(&mla, step, plan, table), Err(Error::Shape { .. })));
    };
    let more_heads = MlaSpec { shape: shape(9, 256, 32), ..spec };
    bad(
        &Plan::new(&more_heads, &tiling, &Batch::new(&[20, 3], &[0, 1, 2]), Policy::Auto).unwrap(),
        &mut step,
    );
    let tall = plan::Tiling { rows_per_tile: 64, ..tiling };
    bad(&Plan::new(&spec, &tall, &Batch::new(&[40, 3], &[0, 40, 41]), Policy::Auto).unwrap(), &mut step);
    let mut edited = plan.clone();
    edited.queries[1].token = 2;
    bad(&edited, &mut step);
    let mut edited = plan.clone();
    edited.items[0].page_begin = 1000;
    bad(&edited, &mut step);
    let mut edited = plan.clone();
    edited.page_begin.pop();
    bad(&edited, &mut step);
}

#[test]
fn a_step_serves_many_batches_and_layers() {
    let Small { cpu, q, kv, out, lse } = small();
    let spec = small_spec();
    let mla = cpu.decode(&spec, None).unwrap();
    let binding = cpu.bind(&mla, 2, &Layer::dense(&spec, &q, &kv, &out, &lse, 0.1)).unwrap();
    let mut step = cpu.step(&mla, Capacity::default()).unwrap();
    for len in [1, 64, 3, 40, 0] {
        let policy = if len == 40 { Policy::FixedTokens(8) } else { Policy::Auto };
        let plan = Plan::new(&spec, &cpu.tiling(&mla), &Batch::new(&[len], &[0, 1]), policy).unwrap();
        let csr = PageTable::Csr {
            kv_indptr: &[0, spec.kv.pages_for(len as u32) as i32],
            kv_indices: &[3, 1, 0, 2],
        };
        cpu.prepare(&mla, &mut step, &plan, csr).unwrap();
        // Two layers at once from two threads, with outputs of their own.
        std::thread::scope(|scope| {
            scope.spawn(|| cpu.run(&mla, &step, &binding).unwrap());
            cpu.run(&mla, &step, &binding).unwrap();
        });
        let got = Dtype::F32.decode_all(&cpu.download(&lse, 8).unwrap());
        let want = (len as f32).ln();
        assert!(got.iter().all(|&x| x == want || (x - want).abs() < 1e-6), "{len}: {got:?} for {want}");
    }
}

/// Offsets and strides move rows, and change nothing else, in the output or around it.
#[test]
fn strides_move_rows_only() {
    let Small { cpu, q, kv, out, lse } = small();
    let spec = MlaSpec { out: Dtype::F16, ..small_spec() };
    let values =
        |stream, count: u64| Dtype::F16.encode_all(&(0..count).map(|i| noise(stream, i)).collect::<Vec<_>>());
    let (queries, pages) = (values(1, 2 * 2 * 288), values(2, 4 * 16 * 288));
    cpu.upload(&q, 0, &queries).unwrap();
    cpu.upload(&kv, 0, &pages).unwrap();
    let mla = cpu.decode(&spec, None).unwrap();
    let plan =
        Plan::new(&spec, &cpu.tiling(&mla), &Batch::new(&[33], &[0, 2]), Policy::FixedTokens(20)).unwrap();
    let mut step = cpu.step(&mla, Capacity::of(&plan)).unwrap();
    let table = PageTable::Dense { block_table: &[2, 0, 3], max_pages: 3 };
    cpu.prepare(&mla, &mut step, &plan, table).unwrap();
    let dense = Layer::dense(&spec, &q, &kv, &out, &lse, 0.1);
    cpu.run(&mla, &step, &cpu.bind(&mla, 2, &dense).unwrap()).unwrap();

    // Queries apart, pages 8 elements apart in the second layer of a buffer, rows of the output by head.
    let [q_nope, q_pe, kv2, out2, lse2] =
        [1 << 12, 1 << 12, 1 << 18, 1 << 13, 1 << 8].map(|n| cpu.buffer(n).unwrap());
    for (row, bytes) in queries.chunks(288 * 2).enumerate() {
        cpu.upload(&q_nope, 16 + row as u64 * 264 * 2, &bytes[..512]).unwrap();
        cpu.upload(&q_pe, row as u64 * 32 * 2, &bytes[512..]).unwrap();
    }
    let (page, block_stride) = (16 * 288, 16 * 288 + 8);
    for (i, bytes) in pages.chunks(page * 2).enumerate() {
        cpu.upload(&kv2, (8 + 20_000 + i as u64 * block_stride) * 2, bytes).unwrap();
    }
    cpu.upload(&out2, 0, &[0xA5; 1 << 13]).unwrap();
    let strided = Layer {
        query: Query::Split {
            q_nope: View { buffer: &q_nope, offset: 8, token_stride: 528, head_stride: 264 },
            q_pe: View::dense(&q_pe, 2, 32),
        },
        kv: KvView { buffer: &kv2, offset: 8, layer_stride: 20_000, layer: 1, block_stride },
        out: View { buffer: &out2, offset: 16, token_stride: 256, head_stride: 600 },
        lse: View { buffer: &lse2, offset: 3, token_stride: 1, head_stride: 5 },
        ..dense
    };
    cpu.run(&mla, &step, &cpu.bind(&mla, 2, &strided).unwrap()).unwrap();
    let (a, b) = (cpu.download(&out, 2048).unwrap(), cpu.download(&out2, 1 << 13).unwrap());
    let (c, d) = (cpu.download(&lse, 16).unwrap(), cpu.download(&lse2, 1 << 8).unwrap());
    let mut want = vec![0xA5; 1 << 13];
    for (token, head) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let (from, to) = (token * 2 + head, 16 + token * 256 + head * 600);
        want[to * 2..][..512].copy_from_slice(&a[from * 512..][..512]);
        assert_eq!(c[from * 4..][..4], d[(3 + token + head * 5) * 4..][..4]);
    }
    assert!(b == want && a.iter().any(|&x| x != 0));
}

#[test]
fn merge_attn_states_follows_the_spec() {
    let cpu = Cpu::with_threads(2);
    let (tokens, heads, head_size) = (5u32, 3u32, 7u32);
    let count = (tokens * heads * head_size) as usize;
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        let filled = |bytes: &[u8]| {
            let mut bytes = bytes.to_vec();
            bytes.resize(bytes.len().next_multiple_of(4), 0);
            let buffer = cpu.buffer(bytes.len() as u64).unwrap();
            cpu.upload(&buffer, 0, &bytes).unwrap();
            buffer
        };
        // By (token, head): every pairing of empty and not.
        let special = [f32::NEG_INFINITY, f32::INFINITY, f32::NAN, 2.5, -40.0];
        let lses: [Vec<f32>; 2] = [1, 2].map(|s| {
            (0..15).map(|i| if i < 10 { special[i * s % 5] } else { noise(s as u64, i as u64) }).collect()
        });
        let data: [Vec<u8>; 2] = [0, 1].map(|s| {
            let value = |i: usize| {
                let empty = !lses[s][i / 7 % 3 * 5 + i / 21].is_finite();
                if empty { f32::NAN } else { noise(s as u64 + 5, i as u64) }
            };
            dtype.encode_all(&(0..count).map(value).collect::<Vec<_>>())
        });
        let outs = data.each_ref().map(|bytes| filled(bytes));
        let lse_buffers = lses.each_ref().map(|lse| filled(&Dtype::F32.encode_all(lse)));
        // One element of offset, so that rows share words.
        let (output, output_lse) = (cpu.buffer(count as u64 * 4 + 8).unwrap(), cpu.buffer(64).unwrap());
        let rows = |buffer| View::dense(buffer, heads, head_size);
        let by_head = |buffer| View { buffer, offset: 0, token_stride: 1, head_stride: tokens.into() };
        let spec = MergeStatesSpec { dtype, head_size };
        let args = MergeStates {
            prefix_output: rows(&outs[0]),
            prefix_lse: by_head(&lse_buffers[0]),
            suffix_output: rows(&outs[1]),
            suffix_lse: by_head(&lse_buffers[1]),
            output: View { offset: 1, ..rows(&output) },
            output_lse: Some(by_head(&output_lse)),
            num_tokens: tokens,
            num_heads: heads,
        };
        cpu.merge_attn_states(&spec, &args).unwrap();
        let got = cpu.download(&output, count as u64 * 4 + 8).unwrap();
        let got_lse = Dtype::F32.decode_all(&cpu.download(&output_lse, 60).unwrap());
        assert_eq!(dtype.decode_at(&got, 0).to_bits(), 0);
        assert_eq!(dtype.decode_at(&got, count + 1).to_bits(), 0);
        let (abs, bytes) = (
            match dtype {
                Dtype::F32 => 2e-6,
                Dtype::F16 => 1e-3,
                _ => 2e-2,
            },
            dtype.bytes(),
        );
        for i in 0..count {
            let row = i / 7 % 3 * 5 + i / 21;
            let [a, b] = [lses[0][row], lses[1][row]];
            let got_bits = &got[(i + 1) * bytes..][..bytes];
            let (want_lse, copied) = match (a.is_finite(), b.is_finite()) {
                (true, true) => {
                    let [wa, wb] = [a, b].map(|x| f64::from(x).exp());
                    let [x, y] = [0, 1].map(|s| f64::from(dtype.decode_at(&data[s], i)));
                    let want = (wa * x + wb * y) / (wa + wb);
                    let error = (f64::from(dtype.decode_at(&got, i + 1)) - want).abs();
                    assert!(error <= abs || error <= abs * want.abs(), "{dtype} {i}: off by {error}");
                    let error = f64::from(got_lse[row]) - (wa + wb).ln();
                    assert!(error.abs() <= 2e-6 * (wa + wb).ln().abs().max(1.0));
                    continue;
                }
                (true, false) => (a, Some(0)),
                (false, true) => (b, Some(1)),
                (false, false) => (f32::NEG_INFINITY, None),
            };
            assert_eq!(got_lse[row].to_bits(), want_lse.to_bits());
            assert_eq!(got_bits, copied.map_or(&[0; 4][..bytes], |s| &data[s][i * bytes..][..bytes]));
        }
        // In place is an error, and so is one buffer for both outputs.
        let in_place = MergeStates { output: rows(&outs[0]), ..args };
        let aliased = cpu.merge_attn_states(&spec, &in_place);
        assert!(matches!(aliased, Err(Error::Aliased { a: "prefix_output", b: "output" })));
        let both = MergeStates { output_lse: Some(by_head(&output)), ..in_place };
        assert!(cpu.merge_attn_states(&spec, &both).is_err());
        let no_lse = MergeStates { output_lse: None, output: rows(&output), ..both };
        cpu.merge_attn_states(&spec, &no_lse).unwrap();
    }
}

#[test]
fn append_writes_the_bytes_that_the_encoder_gives() {
    let cpu = Cpu::with_threads(2);
    for (l, r) in [(256u32, 32u32), (512, 0)] {
        for kv_dtype in DTYPES {
            for input in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
                let kv = KvSpec { dtype: kv_dtype, page_size: 3, num_pages: 4 };
                let spec = AppendSpec { shape: shape(1, l, r), kv, input };
                let k_scale = if kv_dtype == Dtype::E4m3 { 0.013 } else { 1.0 };
                let slots = [5i64, -1, 0, 11];
                let n = (l + r) as usize;
                let value = |t: usize, i: usize| match (t, i) {
                    (0, 0) => f32::INFINITY,
                    (0, 1) => f32::NEG_INFINITY,
                    (0, 2) => f32::NAN,
                    (2, 3) => 1e4,
                    _ => noise(t as u64, i as u64) * 3.0,
                };
                let rows: Vec<Vec<u8>> = (0..4)
                    .map(|t| input.encode_all(&(0..n).map(|i| value(t, i)).collect::<Vec<_>>()))
                    .collect();
                let cut = l as usize * input.bytes();
                let part = |range: fn(&[u8], usize) -> &[u8]| {
                    let bytes: Vec<u8> = rows.iter().flat_map(|row| range(row, cut).to_vec()).collect();
                    let buffer = cpu.buffer(bytes.len() as u64).unwrap();
                    cpu.upload(&buffer, 0, &bytes).unwrap();
                    buffer
                };
                let (kv_c, k_pe) = (part(|row, cut| &row[..cut]), part(|row, cut| &row[cut..]));
                let row_bytes = n * kv_dtype.bytes();
                let mut want = vec![0xA5; 12 * row_bytes];
                let cache = cpu.buffer(want.len() as u64).unwrap();
                cpu.upload(&cache, 0, &want).unwrap();
                let layer = AppendLayer {
                    kv_c: View::dense(&kv_c, 1, l),
                    k_pe: View::dense(&k_pe, 1, r),
                    kv: KvView::dense(
                        &cache,
                        &MlaSpec { shape: spec.shape, kv, query: input, out: Dtype::F32 },
                    ),
                    k_scale,
                };
                cpu.kv_append(&spec, &slots, &layer).unwrap();
                for (row, &slot) in rows.iter().zip(&slots).filter(|(_, slot)| **slot >= 0) {
                    let encoded = if input == kv_dtype {
                        row.clone()
                    } else {
                        let scaled: Vec<f32> = input.decode_all(row).iter().map(|x| x / k_scale).collect();
                        kv_dtype.encode_all(&scaled)
                    };
                    want[slot as usize * row_bytes..][..row_bytes].copy_from_slice(&encoded);
                }
                assert!(
                    cpu.download(&cache, want.len() as u64).unwrap() == want,
                    "{l}/{r} {input} to {kv_dtype}"
                );

                let out_of_range = cpu.kv_append(&spec, &[12], &layer);
                assert!(matches!(out_of_range, Err(Error::SlotOutOfRange { .. })));
                assert!(matches!(cpu.kv_append(&spec, &[1, 1], &layer), Err(Error::SlotOverlap { .. })));
                let aliased = AppendLayer { kv_c: View { buffer: &cache, ..layer.kv_c }, ..layer };
                let aliased = cpu.kv_append(&spec, &[1], &aliased);
                assert!(matches!(aliased, Err(Error::Aliased { a: "kv_c", b: "kv" })), "{aliased:?}");
            }
        }
    }
}

#[test]
fn pages_are_copied_whole_and_alone() {
    let cpu = Cpu::with_threads(2);
    let kv = KvSpec { dtype: Dtype::E4m3, page_size: 3, num_pages: 4 };
    let spec = MlaSpec { kv, ..small_spec() };
    let page = 3 * spec.shape.row_elems() as usize;
    let stride = page + 8;
    let before: Vec<u8> = (0..stride * 8).map(|i| (i % 251) as u8).collect();
    let buffer = cpu.buffer(before.len() as u64).unwrap();
    cpu.upload(&buffer, 0, &before).unwrap();
    let view = KvView {
        buffer: &buffer,
        offset: 8,
        layer_stride: 4 * stride as u64 - 8,
        layer: 1,
        block_stride: stride as u64,
    };
    cpu.kv_copy_pages(&kv, spec.shape.row_elems(), &[(0, 3), (1, 2)], &view).unwrap();
    let mut want = before;
    for (from, to) in [(0, 3), (1, 2)] {
        let at = |p: usize| 4 * stride + p * stride;
        want.copy_within(at(from)..at(from) + page, at(to));
    }
    assert!(cpu.download(&buffer, want.len() as u64).unwrap() == want);
    let row = spec.shape.row_elems();
    for copies in [&[(0, 4)][..], &[(0, 1), (1, 2)], &[(0, 2), (1, 2)]] {
        assert!(matches!(cpu.kv_copy_pages(&kv, row, copies, &view), Err(Error::CopyConflict { .. })));
    }
    assert!(matches!(cpu.kv_copy_pages(&kv, 5, &[], &view), Err(Error::Shape { .. })));
    let long = KvView { layer: 9, ..view };
    assert!(matches!(cpu.kv_copy_pages(&kv, row, &[(0, 1)], &long), Err(Error::BufferTooSmall { .. })));
}
