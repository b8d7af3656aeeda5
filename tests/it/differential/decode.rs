//! Decodes of any spec, batch and mask, and what the reference says of them.

use wgpu_mla::{Backend, Dtype, KvSpec, MlaDecode, MlaShape, SharedPrefix};

use super::Under;
use super::data::{Data, encoded};
use super::draw::{Draw, values};
use super::judge::{LSE, judge, largest, of_attention};
use super::lists::{self, Lists};
use super::place::poisoned;
use super::reference::{Sees, attend, sees};
use super::run::Answer;

pub const FLOATS: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];
pub const DIMS: [(u32, u32); 4] = [(512, 64), (256, 64), (256, 32), (512, 0)];
const PAGE_SIZES: [usize; 15] = [1, 2, 3, 4, 5, 7, 8, 16, 17, 32, 48, 64, 128, 255, 256];
/// Table entries that no kernel may follow.
pub const WILD: [i32; 5] = [2_147_480_000, -1, i32::MIN, i32::MAX, 1 << 20];

/// Tokens of one sequence.
#[derive(Debug, Clone)]
pub struct Sequence {
    pub len: usize,
    pub q_len: usize,
    /// The pages of its tokens.
    pub pages: Vec<usize>,
    /// Which of its keys its query tokens see.
    pub sees: Sees,
}

/// Outputs and LSEs by the reference, and the largest latent.
pub type Expected = (Vec<f64>, Vec<f64>, f64);

/// A batch over a cache: dense and encoded.
#[derive(Debug, Clone)]
pub struct Problem {
    pub spec: MlaDecode,
    pub data: Data,
    pub softmax_scale: f32,
    pub k_scale: f32,
    pub q_scale: f32,
    pub sequences: Vec<Sequence>,
    pub shared: Vec<SharedPrefix>,
    /// `[total_q, H, L + R]`.
    pub q: Vec<u8>,
    /// `[num_pages, page_size, L + R]`, or records; poison where no token is.
    pub pool: Vec<u8>,
    /// What query tokens attend in place of their sequences.
    pub lists: Option<Lists>,
    /// `[H]`.
    pub sinks: Option<Vec<f32>>,
}

/// A page size, often a usual one or the ends of what is served.
pub fn page_size(draw: &mut Draw) -> usize {
    if draw.once_in(4) { draw.within(1, 256) } else { draw.pick(&PAGE_SIZES) }
}

/// Dims, dtypes, heads and page size: what kernels depend on. `num_pages` is left for the batch.
pub fn spec(draw: &mut Draw) -> MlaDecode {
    let (kv_lora_rank, qk_rope_head_dim) = draw.pick(&DIMS);
    let num_heads = if draw.once_in(2) {
        draw.pick(&[1, 2, 3, 6, 8, 12, 16, 20, 32, 40, 64, 96, 128])
    } else {
        draw.within(1, 128) as u32
    };
    let (cache, query) = (draw.pick(&Dtype::ALL), draw.pick(&Dtype::ALL));
    // Models have one dtype for both, so that is drawn more often than by chance.
    let query = if draw.once_in(3) && cache != Dtype::E4m3 { cache } else { query };
    let out = if draw.once_in(2) { Dtype::F32 } else { draw.pick(&FLOATS) };
    let shape = MlaShape { num_heads, kv_lora_rank, qk_rope_head_dim };
    MlaDecode { shape, kv: KvSpec::new(cache, page_size(draw) as u32, 1), query, out }
}

/// Lengths at the edges of pages, at most `most`.
pub fn length(draw: &mut Draw, page_size: usize, most: usize) -> usize {
    let edge = page_size * draw.within(1, 3);
    let len = draw.pick(&[0, 1, edge - 1, edge, edge + 1, draw.clone().within(0, most), 77, 33]);
    if len > most { draw.within(0, most) } else { len }
}

/// A positive number within a few powers of two; often such a power.
pub fn factor(draw: &mut Draw, about: f64) -> f32 {
    let power = about.log2().ceil().exp2();
    if draw.once_in(2) { power as f32 } else { (about * (1.0 + draw.unit())) as f32 }
}

impl Problem {
    pub fn draw(draw: &mut Draw, spec: MlaDecode, work: usize) -> Self {
        let data = Data::draw(draw, &spec);
        Self::of(draw, spec, data, work)
    }

    /// Finite data, as results of ranks have to be.
    pub fn finite(draw: &mut Draw, spec: MlaDecode, work: usize) -> Self {
        let data = match Data::draw(draw, &spec) {
            // An LSE of a thousand is off by more than what is allowed of what it weighs: `docs/numbers.md`.
            Data::NotFinite | Data::Steep => Data::Small,
            data => data,
        };
        Self::of(draw, spec, data, work)
    }

    /// At most so many pairs of a query row and a key.
    fn of(draw: &mut Draw, mut spec: MlaDecode, data: Data, work: usize) -> Self {
        let (page_size, heads) = (spec.kv.page_size as usize, spec.shape.num_heads as usize);
        let work = if draw.once_in(12) { 5 * work } else { work };
        let mut room = work / heads;
        let mut sequences: Vec<Sequence> = Vec::new();
        let (mut num_pages, mut shared) = (0, Vec::new());
        for index in 0..if draw.once_in(30) { 0 } else { draw.within(1, 6) } {
            let q_len = if draw.once_in(16) { draw.within(5, 20) } else { draw.pick(&[0, 1, 1, 1, 2, 3, 4]) };
            let q_len = q_len.min(room / 4 + 1);
            let len = length(draw, page_size, (room / q_len.max(1)).min(400));
            room = room.saturating_sub(q_len * len);
            let used = len.div_ceil(page_size);
            let parent = draw.below(index.max(1));
            let mut pages = Vec::new();
            if index > 0 && draw.once_in(3) {
                // A fork: full pages in common, and its last one too where it has no token of its own.
                let Sequence { len: parent_len, pages: theirs, .. } = &sequences[parent];
                let common = draw.within(0, (*parent_len).min(len));
                let common = if len <= common { used } else { common / page_size };
                pages.extend_from_slice(&theirs[..common]);
                let tokens = (common * page_size).min(len) as u32;
                let is_free = |seq: usize| {
                    shared.iter().all(|group: &SharedPrefix| !group.sequences.contains(&(seq as u32)))
                };
                if tokens > 0 && is_free(parent) && draw.once_in(2) {
                    let tokens =
                        if draw.once_in(3) { draw.within(1, tokens as usize) as u32 } else { tokens };
                    shared.push(SharedPrefix { sequences: vec![parent as u32, index as u32], tokens });
                } else if let Some(group) =
                    shared.iter_mut().find(|group| group.sequences[0] == parent as u32)
                    && tokens > 0
                {
                    group.tokens = group.tokens.min(tokens);
                    group.sequences.push(index as u32);
                }
            }
            while pages.len() < used {
                pages.push(num_pages);
                num_pages += 1;
            }
            sequences.push(Sequence { len, q_len, pages, sees: Sees::All });
        }
        mask(draw, &mut sequences);
        // Some pages more than are used, in an order of their own.
        let order = draw.shuffled(num_pages + draw.clone().within(1, 5));
        sequences.iter_mut().flat_map(|sequence| &mut sequence.pages).for_each(|page| *page = order[*page]);
        spec.kv.num_pages = order.len() as u32;

        let row = spec.shape.row_elems() as usize;
        let big = (spec.shape.kv_lora_rank as usize).min(row - 1);
        let scale = draw.pick(&[0.114_721f32, 0.072_169, 0.135_234, 0.0625]);
        let [k_scale, q_scale] = [(spec.kv.dtype(), 0), (spec.query, 1)].map(|(dtype, i)| match dtype {
            Dtype::E4m3 => factor(draw, data.largest()[i] / 448.0),
            _ => 1.0,
        });
        let mut problem = Self {
            pool: poisoned(draw, order.len() * page_size * row * spec.kv.dtype().bytes()),
            q: Vec::new(),
            spec,
            data,
            softmax_scale: scale,
            k_scale,
            q_scale,
            sequences,
            shared,
            lists: None,
            sinks: None,
        };
        let mut slots: Vec<usize> =
            problem.sequences.iter().flat_map(|seq| (0..seq.len).map(|t| problem.slot(seq, t))).collect();
        slots.sort_unstable();
        slots.dedup();
        for (count, slot) in slots.into_iter().enumerate() {
            let key = data.key(draw, row, big, scale.into(), count);
            problem.put_key(slot, &encoded(spec.kv.dtype(), key, k_scale, data, draw));
        }
        for _ in 0..problem.total_q() {
            for head in 0..heads {
                let query = data.query(draw, row, big, head);
                problem.q.extend(encoded(spec.query, query, q_scale, data, draw));
            }
        }
        problem
    }

    /// The same queries over other keys, with no prefix shared.
    pub fn over(&self, spec: MlaDecode, sequences: Vec<Sequence>, pool: Vec<u8>) -> Self {
        Self { spec, sequences, pool, shared: Vec::new(), ..self.clone() }
    }

    pub fn total_q(&self) -> usize {
        self.sequences.iter().map(|sequence| sequence.q_len).sum()
    }

    pub fn slot(&self, sequence: &Sequence, token: usize) -> usize {
        let page_size = self.spec.kv.page_size as usize;
        sequence.pages[token / page_size] * page_size + token % page_size
    }

    fn put_key(&mut self, slot: usize, key: &[u8]) {
        self.pool[slot * key.len()..][..key.len()].copy_from_slice(key);
    }

    /// The bytes of a token's key.
    pub fn key(&self, sequence: &Sequence, token: usize) -> &[u8] {
        let len = self.token_bytes();
        &self.pool[self.slot(sequence, token) * len..][..len]
    }

    /// What it is, in a line for a message.
    pub fn line(&self) -> String {
        let MlaDecode { shape, kv, query, out } = &self.spec;
        let lens: Vec<_> = self.sequences.iter().map(|seq| (seq.len, seq.q_len)).collect();
        let sees: Vec<_> = self.sequences.iter().map(|seq| format!("{:?}", seq.sees)).collect();
        let same = sees.iter().all(|one| *one == sees[0]);
        let sees = if same { sees.first().cloned().unwrap_or_default() } else { sees.join(" ") };
        let shared: Vec<_> = self.shared.iter().map(|group| (&group.sequences, group.tokens)).collect();
        let lists = self
            .lists
            .as_ref()
            .map_or(String::new(), |lists| format!("; lists of {}, lengths {:?}", lists.topk, lists.lengths));
        let lists = self.sinks.as_ref().map_or(lists.clone(), |sinks| format!("{lists}; sinks {sinks:?}"));
        format!(
            "{}/{} heads {} kv {} of {}x{} q {query} out {out}; {:?}, scales {} {} {}; (len, q_len) {lens:?} sees {sees} shared {shared:?}{lists}",
            shape.kv_lora_rank,
            shape.qk_rope_head_dim,
            shape.num_heads,
            kv.layout,
            kv.num_pages,
            kv.page_size,
            self.data,
            self.softmax_scale,
            self.k_scale,
            self.q_scale,
        )
    }

    /// `out [total_q, H, L]` and `lse [total_q, H]` by the reference, and the largest latent.
    pub fn expected(&self, drops_key: bool) -> Expected {
        let MlaDecode { shape, query, .. } = self.spec;
        let (heads, latent) = (shape.num_heads as usize, shape.kv_lora_rank as usize);
        let row = shape.row_elems() as usize;
        let q: Vec<f64> = values(query, &self.q).into_iter().map(|x| x * f64::from(self.q_scale)).collect();
        if let Some(lists) = &self.lists {
            let mut expected = self.expected_of_lists(lists, &q);
            self.sink(&mut expected);
            return expected;
        }
        let (mut out, mut lse, mut u, mut token) = (Vec::new(), Vec::new(), 1.0f64, 0);
        for sequence in &self.sequences {
            let keys: Vec<Vec<f64>> =
                (0..sequence.len).map(|t| self.key_values(self.slot(sequence, t))).collect();
            u = keys.iter().fold(u, |u, key| u.max(largest(key[..latent].iter().copied())));
            for i in 0..sequence.q_len {
                let seen = sees(&sequence.sees, i, sequence.q_len, sequence.len);
                let seen = seen.saturating_sub(usize::from(drops_key));
                let keys: Vec<&[f64]> = keys[..seen].iter().map(Vec::as_slice).collect();
                for head in 0..heads {
                    let q = &q[(token * heads + head) * row..][..row];
                    let (row_out, row_lse) = attend(q, &keys, &keys, latent, self.softmax_scale.into());
                    out.extend(row_out);
                    lse.push(row_lse);
                }
                token += 1;
            }
        }
        let mut expected = (out, lse, u);
        self.sink(&mut expected);
        expected
    }
}

/// One mask for the batch.
fn mask(draw: &mut Draw, sequences: &mut [Sequence]) {
    let kind = draw.below(6);
    let first = draw.within(0, 90) as i64 - 10;
    for sequence in sequences {
        let bound = |draw: &mut Draw| draw.within(0, sequence.len);
        sequence.sees = match kind {
            0..=2 => Sees::BottomRight,
            3 => Sees::From(first),
            4 => Sees::All,
            _ => Sees::Bounds((0..sequence.q_len).map(|_| bound(draw)).collect()),
        };
    }
}

impl Problem {
    /// Compares what a decode gave; rows that see nothing are exactly 0.
    pub fn judge(&self, answer: &Answer, (out, lse, u): &Expected) -> Result<(), String> {
        let MlaDecode { shape, kv, query, out: dtype } = self.spec;
        let (heads, latent) = (shape.num_heads as usize, shape.kv_lora_rank as usize);
        let limits = of_attention([kv.dtype(), query, dtype], answer.rounds_weights, *u);
        judge("lse", [self.total_q(), heads, 1], &answer.lse, lse, &LSE)?;
        judge("out", [self.total_q(), heads, latent], &answer.out, out, &limits)?;
        let empty = |row: &usize| lse[*row] == f64::NEG_INFINITY;
        match (0..lse.len())
            .filter(empty)
            .find(|row| answer.out[row * latent..][..latent].iter().any(|x| *x != 0.0))
        {
            Some(row) => Err(format!("out[{}, {}] sees no key: expected 0", row / heads, row % heads)),
            None => Ok(()),
        }
    }
}

impl Problem {
    /// Without one of its sequences, and without groups that it is in.
    fn without(&self, index: usize) -> Self {
        let mut less = self.clone();
        let token_bytes = self.q.len() / self.total_q().max(1);
        let first: usize = self.sequences[..index].iter().map(|sequence| sequence.q_len).sum();
        less.q.drain(first * token_bytes..(first + self.sequences[index].q_len) * token_bytes);
        less.sequences.remove(index);
        let index = index as u32;
        less.shared.retain(|group| !group.sequences.contains(&index));
        for sequence in less.shared.iter_mut().flat_map(|group| &mut group.sequences) {
            *sequence -= u32::from(*sequence > index);
        }
        less
    }

    /// A part of a batch that fails too, and how it does.
    fn shrunk(self, error: String, fails: impl Fn(&Self) -> Option<String>) -> (Self, String) {
        let all = (0..self.sequences.len()).map(|index| self.without(index));
        match all.filter_map(|less| fails(&less).map(|error| (less, error))).next() {
            Some((less, error)) => less.shrunk(error, fails),
            None => (self, error),
        }
    }
}

/// A decode on each of its variants.
pub fn decodes<B: Backend>(
    under: &Under<'_, B>,
    spec_draw: &mut Draw,
    draw: &mut Draw,
) -> Result<(), String> {
    let problem = Problem::draw(draw, spec(spec_draw), under.work);
    let expected = problem.expected(under.drops_key);
    for variant in under.variants(&problem.spec, draw) {
        // The same layout on all of them.
        let judged = |problem: &Problem, expected: &Expected| {
            problem
                .run(under, variant, &mut draw.clone())
                .and_then(|answer| problem.judge(&answer, expected))
                .err()
        };
        if let Some(error) = judged(&problem, &expected) {
            let again = |less: &Problem| judged(less, &less.expected(under.drops_key));
            let (less, error) = problem.shrunk(error, again);
            return Err(format!("{variant}: {}: {error}", less.line()));
        }
        under.count(&format!("mla_decode {variant}"));
    }
    if under.drops_key { Ok(()) } else { lists::decodes(under, &problem, draw) }
}
