//! Decodes of lists of slots, with sinks, and of tokens that are records, made from the batch of another case.

use wgpu_mla::{Backend, Dtype, KvLayout};

use super::Under;
use super::data::Data;
use super::decode::{Expected, Problem};
use super::draw::{Draw, bytes, values};
use super::judge::largest;
use super::place::poisoned;
use super::reference::attend;

/// The slots that each query token attends, `[total_q, topk]`.
#[derive(Debug, Clone)]
pub struct Lists {
    pub topk: usize,
    pub slots: Vec<i32>,
    /// `[total_q]`
    pub lengths: Option<Vec<i32>>,
}

impl Lists {
    /// Slots of all sequences' tokens, others that have none as no slot of the pool; past a length anything.
    fn draw(draw: &mut Draw, problem: &Problem, topk: usize) -> Self {
        let (tokens, num_slots) = (problem.total_q(), problem.spec.kv.num_slots() as i32);
        let used = problem.used_slots();
        let invalid = [-1, i32::MIN, num_slots, i32::MAX, -num_slots];
        let entry = |draw: &mut Draw| match used.len() {
            0 => draw.pick(&invalid),
            _ if draw.once_in(5) => draw.pick(&invalid),
            count => used[draw.below(count)] as i32,
        };
        let mut slots: Vec<i32> = (0..tokens * topk).map(|_| entry(draw)).collect();
        let has_lengths = draw.once_in(2);
        let lengths: Option<Vec<i32>> =
            has_lengths.then(|| (0..tokens).map(|_| draw.within(0, topk) as i32).collect());
        for (list, &length) in slots.chunks_mut(topk).zip(lengths.iter().flatten()) {
            list[length as usize..].iter_mut().for_each(|slot| *slot = draw.below(num_slots as usize) as i32);
        }
        Self { topk, slots, lengths }
    }

    /// The slots of the pool that a query token attends.
    fn of(&self, token: usize, num_slots: usize) -> impl Iterator<Item = usize> {
        let length = self.lengths.as_ref().map_or(self.topk, |lengths| lengths[token] as usize);
        let list = &self.slots[token * self.topk..][..length];
        list.iter()
            .map(|&slot| i64::from(slot))
            .filter(move |slot| (0..num_slots as i64).contains(slot))
            .map(|slot| slot as usize)
    }
}

/// The codes of a record.
const CODES: usize = 512;
/// Codes that have a scale in common.
const GROUP: usize = 128;

/// 512 e4m3 codes, four f32 scales, and bf16 rotary elements; a scale is any that leaves no code past 448.
fn record(key: &[f64], draw: &mut Draw) -> Vec<u8> {
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for group in key[..CODES].chunks(GROUP) {
        let most = group.iter().fold(1e-6f64, |most, x| most.max(x.abs()));
        let scale = (most / 448.0 * (1.0 + draw.unit())) as f32;
        codes.extend(bytes(Dtype::E4m3, group.iter().map(|x| x / f64::from(scale)).collect::<Vec<f64>>()));
        scales.extend(scale.to_le_bytes());
    }
    [codes, scales, bytes(Dtype::Bf16, key[CODES..].to_vec())].concat()
}

fn record_values(token: &[u8]) -> Vec<f64> {
    let scales = values(Dtype::F32, &token[CODES..CODES + 16]);
    let codes = values(Dtype::E4m3, &token[..CODES]).into_iter().enumerate();
    // Kernels multiply in f32.
    let latent = codes.map(|(i, code)| f64::from((code * scales[i / GROUP]) as f32));
    latent.chain(values(Dtype::Bf16, &token[CODES + 16..])).collect()
}

impl Problem {
    pub fn token_bytes(&self) -> usize {
        let row = self.spec.shape.row_elems() as usize;
        match self.spec.kv.layout {
            KvLayout::Plain(dtype) => row * dtype.bytes(),
            _ => row + 16 + self.spec.shape.qk_rope_head_dim as usize,
        }
    }

    /// The key in a slot.
    pub fn key_values(&self, slot: usize) -> Vec<f64> {
        let token = &self.pool[slot * self.token_bytes()..][..self.token_bytes()];
        match self.spec.kv.layout {
            KvLayout::Plain(dtype) => {
                values(dtype, token).into_iter().map(|x| x * f64::from(self.k_scale)).collect()
            }
            _ => record_values(token),
        }
    }

    fn used_slots(&self) -> Vec<usize> {
        let all = self.sequences.iter().flat_map(|seq| (0..seq.len).map(|token| self.slot(seq, token)));
        let mut used: Vec<usize> = all.collect();
        used.sort_unstable();
        used.dedup();
        used
    }

    /// The same tokens as records, where there are records of their dims.
    fn as_records(&self, draw: &mut Draw) -> Option<Self> {
        let layout = match (self.spec.shape.kv_lora_rank, self.spec.shape.qk_rope_head_dim) {
            (512, 64) => KvLayout::Ds656,
            (512, 0) => KvLayout::Ds528,
            _ => return None,
        };
        let mut records = self.clone();
        records.spec.kv.layout = layout;
        records.k_scale = 1.0;
        let token = records.token_bytes();
        records.pool = poisoned(draw, self.spec.kv.num_slots() as usize * token);
        for slot in self.used_slots() {
            let record = record(&self.key_values(slot), draw);
            records.pool[slot * token..][..token].copy_from_slice(&record);
        }
        Some(records)
    }

    /// The same query tokens over lists. What no list names is poison.
    fn listed(&self, lists: Lists, draw: &mut Draw) -> Self {
        let num_slots = self.spec.kv.num_slots() as usize;
        let mut named = vec![false; num_slots];
        (0..self.total_q()).for_each(|token| lists.of(token, num_slots).for_each(|slot| named[slot] = true));
        let mut problem = self.clone();
        let token = self.token_bytes();
        let poison = poisoned(draw, token);
        for (bytes, _) in problem.pool.chunks_mut(token).zip(named).filter(|(_, named)| !named) {
            bytes.copy_from_slice(&poison);
        }
        problem.lists = Some(lists);
        problem
    }

    /// What each query token gives over its list, and the largest latent.
    pub fn expected_of_lists(&self, lists: &Lists, q: &[f64]) -> Expected {
        let shape = self.spec.shape;
        let (heads, latent, row) =
            (shape.num_heads as usize, shape.kv_lora_rank as usize, shape.row_elems() as usize);
        let (mut out, mut lse, mut u) = (Vec::new(), Vec::new(), 1.0f64);
        for token in 0..self.total_q() {
            let slots = lists.of(token, self.spec.kv.num_slots() as usize);
            let keys: Vec<Vec<f64>> = slots.map(|slot| self.key_values(slot)).collect();
            u = keys.iter().fold(u, |u, key| u.max(largest(key[..latent].iter().copied())));
            let keys: Vec<&[f64]> = keys.iter().map(Vec::as_slice).collect();
            for head in 0..heads {
                let q = &q[(token * heads + head) * row..][..row];
                let (row_out, row_lse) = attend(q, &keys, &keys, latent, self.softmax_scale.into());
                out.extend(row_out);
                lse.push(row_lse);
            }
        }
        (out, lse, u)
    }

    /// A sink is one more logit of a row that attends something, without a value.
    pub fn sink(&self, (out, lse, _): &mut Expected) {
        let (heads, latent) = (self.spec.shape.num_heads as usize, self.spec.shape.kv_lora_rank as usize);
        let Some(sinks) = &self.sinks else { return };
        for (row, &lse) in lse.iter().enumerate().filter(|(_, lse)| **lse > f64::NEG_INFINITY) {
            let keys = 1.0 / (1.0 + (f64::from(sinks[row % heads]) - lse).exp());
            out[row * latent..][..latent].iter_mut().for_each(|x| *x *= keys);
        }
    }
}

/// A batch once more: as records or not, over lists or not, with sinks or not, on the variants that serve it.
pub fn decodes<B: Backend>(under: &Under<'_, B>, problem: &Problem, draw: &mut Draw) -> Result<(), String> {
    let variants = under.variants(&problem.spec, draw);
    let mut problem = problem.clone();
    let is_finite = problem.data != Data::NotFinite;
    if is_finite && draw.once_in(2) {
        problem = problem.as_records(draw).unwrap_or(problem);
    }
    let rows = problem.total_q() * problem.spec.shape.num_heads as usize;
    if !draw.once_in(4) {
        let most = (under.work / rows.max(1)).clamp(1, 300);
        let topk = if draw.once_in(3) { most } else { draw.within(1, most) };
        let lists = Lists::draw(draw, &problem, topk);
        problem = problem.listed(lists, draw);
    }
    if is_finite && draw.once_in(2) {
        let sink = |draw: &mut Draw| {
            let normal = draw.normal() as f32;
            draw.pick(&[f32::NEG_INFINITY, f32::INFINITY, 0.0, 1e4, -1e4, normal])
        };
        problem.sinks = Some((0..problem.spec.shape.num_heads).map(|_| sink(draw)).collect());
    }
    let expected = problem.expected(false);
    for variant in variants {
        let answer = match problem.run(under, variant, &mut draw.clone()) {
            Ok(answer) => answer,
            Err(error) if problem.is_refused(&error) => continue,
            Err(error) => return Err(format!("of lists, {variant}: {}: {error}", problem.line())),
        };
        if let Err(error) = problem.judge(&answer, &expected) {
            return Err(format!("of lists, {variant}: {}: {error}", problem.line()));
        }
        let layout = if problem.spec.kv.layout.is_plain() { "" } else { " of records" };
        let lists = if problem.lists.is_some() { " of lists" } else { "" };
        under.count(&format!("mla_decode{layout}{lists} {variant}"));
    }
    Ok(())
}

impl Problem {
    /// Whether a backend says that it has no kernel for the optional inputs or the layout.
    fn is_refused(&self, error: &str) -> bool {
        let layout = self.spec.kv.layout;
        let asks = self.lists.is_some() || self.sinks.is_some();
        asks && error.contains("it does not serve") || !layout.is_plain() && error.contains(layout.name())
    }
}
