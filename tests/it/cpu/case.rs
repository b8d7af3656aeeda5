//! A case: its arrays, and their result by an oracle of its own.

use super::*;

/// A sequence: a name for its data, its tokens in the cache, its query tokens.
#[derive(Clone, Copy)]
pub struct Seq(pub u64, pub u32, pub u32);

pub struct Case {
    pub spec: MlaDecode,
    pub seqs: Vec<Seq>,
    pub data: Data,
    pub softmax_scale: f32,
    pub k_scale: f32,
    pub q_scale: f32,
    pub lse_base: LseBase,
    pub policy: SplitPolicy,
    pub mask: Mask<'static>,
    pub shared: Vec<SharedPrefix>,
    pub split_query: bool,
    pub variant: Option<&'static str>,
    pub threads: usize,
}

pub fn shape(num_heads: u32, kv_lora_rank: u32, qk_rope_head_dim: u32) -> MlaShape {
    MlaShape { num_heads, kv_lora_rank, qk_rope_head_dim }
}

impl Case {
    pub fn new(shape: MlaShape, kv: Dtype, query: Dtype, seqs: &[Seq]) -> Self {
        let kv = KvSpec { layout: kv.into(), page_size: 16, num_pages: 1 };
        Self {
            spec: MlaDecode { shape, kv, query, out: Dtype::F32 },
            seqs: seqs.to_vec(),
            data: |stream, index| noise(stream, index) / 10.0,
            softmax_scale: 0.8,
            k_scale: if kv.dtype() == Dtype::E4m3 { 0.0078 } else { 1.0 },
            q_scale: if query == Dtype::E4m3 { 0.5 } else { 1.0 },
            lse_base: LseBase::E,
            policy: SplitPolicy::Auto,
            mask: Mask::Causal,
            shared: Vec::new(),
            split_query: false,
            variant: None,
            threads: 2,
        }
    }

    /// Token `token` of a sequence's cache, encoded. Streams below 100 share their first 64 tokens.
    fn cache_row(&self, seq: Seq, token: u32) -> Vec<u8> {
        let n = u64::from(self.spec.shape.row_elems());
        let stream = if seq.0 < 100 && token < 64 { 0 } else { seq.0 };
        let row: Vec<f32> =
            (0..n).map(|i| (self.data)(stream, u64::from(token) * n + i) / self.k_scale).collect();
        self.spec.kv.dtype().encode_all(&row)
    }

    /// The query of token `i` of a sequence, all heads, encoded.
    fn query_rows(&self, seq: Seq, i: u32) -> Vec<u8> {
        let n = u64::from(self.spec.shape.row_elems() * self.spec.shape.num_heads);
        let row: Vec<f32> =
            (0..n).map(|k| (self.data)(seq.0 + 1000, u64::from(i) * n + k) / self.q_scale).collect();
        self.spec.query.encode_all(&row)
    }

    pub fn run(&self) -> (Vec<f32>, Vec<f32>) {
        let cpu = Cpu::with_threads(self.threads);
        let mut spec = self.spec;
        let (page_size, n) = (spec.kv.page_size, spec.shape.row_elems() as usize);
        let pages: Vec<u32> = self.seqs.iter().map(|seq| seq.1.div_ceil(page_size)).collect();
        let max_pages = *pages.iter().max().unwrap() as usize + 2;
        spec.kv.num_pages = pages.iter().sum::<u32>() + 3;

        // Every byte is 0xFF, NaN in each dtype, but for the rows in use. Pages are handed out backwards.
        let row_bytes = n * spec.kv.dtype().bytes();
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

        let mla = cpu.compile_with(spec, &self.variant.map(forced).unwrap_or_default()).unwrap();
        let batch = Batch { mask: self.mask, shared_prefixes: &self.shared, ..Batch::new(&lens, &starts) };
        let plan = Plan::new(&spec, &mla.tiling(), &batch, self.policy).unwrap();
        let mut step = mla.step(Capacity::default()).unwrap();
        mla.prepare(
            &mut step,
            (&plan, PageTable::Dense { block_table: &table, max_pages: max_pages as u32 }),
        )
        .unwrap();
        let mut layer = MlaDecodeArgs {
            lse_base: self.lse_base,
            k_scale: self.k_scale,
            q_scale: self.q_scale,
            ..MlaDecodeArgs::dense(&spec, &q, &kv, &out, &lse, self.softmax_scale)
        };
        if self.split_query {
            let whole = View::dense(&q, heads, n as u32);
            let q_pe = View { offset: latent.into(), ..whole };
            layer.query = Query::Split { q_nope: whole, q_pe };
        }
        mla.run(&step, &mla.bind(&layer, total).unwrap()).unwrap();
        let lse = cpu.download(&lse, rows as u64 * 4).unwrap();
        let out = cpu.download(&out, out_bytes as u64).unwrap();
        (spec.out.decode_all(&out), Dtype::F32.decode_all(&lse))
    }

    /// Out and natural LSE in f64.
    fn reference(&self) -> (Vec<f64>, Vec<f64>) {
        let MlaDecode { shape, kv, query, .. } = self.spec;
        let (n, latent, heads) =
            (shape.row_elems() as usize, shape.kv_lora_rank as usize, shape.num_heads as usize);
        let wide = |dtype: Dtype, bytes: &[u8], scale: f32| -> Vec<f64> {
            dtype.decode_all(bytes).iter().map(|&x| f64::from(x) * f64::from(scale)).collect()
        };
        let (mut outs, mut lses) = (Vec::new(), Vec::new());
        for &seq in &self.seqs {
            let cache: Vec<Vec<f64>> =
                (0..seq.1).map(|t| wide(kv.dtype(), &self.cache_row(seq, t), self.k_scale)).collect();
            for i in 0..seq.2 {
                let q = wide(query, &self.query_rows(seq, i), self.q_scale);
                let visible = match self.mask {
                    Mask::Causal => (seq.1 + i + 1).saturating_sub(seq.2),
                    Mask::CausalFrom(first) => (first + i64::from(i)).clamp(0, seq.1.into()) as u32,
                    Mask::Full => seq.1,
                    Mask::Bounds(bounds) => bounds[lses.len() / heads],
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

    pub fn check(&self, what: &str) {
        let (got, got_lse) = self.run();
        let (want, want_lse) = self.reference();
        assert_eq!((got.len(), got_lse.len()), (want.len(), want_lse.len()), "{what}");
        let latent = self.spec.shape.kv_lora_rank as usize;
        let f32_only = [self.spec.kv.dtype(), self.spec.query, self.spec.out] == [Dtype::F32; 3];
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

pub fn bits(xs: &[f32]) -> Vec<u32> {
    xs.iter().map(|x| x.to_bits()).collect()
}
