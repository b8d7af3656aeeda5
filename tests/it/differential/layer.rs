//! The layer over several steps: prompts in chunks of a small workspace, decodes, forks that diverge, sequences that are cut back or end,
//! prefixes that are kept expanded, and sequences that attend lists.

use wgpu_mla::{
    Backend, Capacity, Compiled, Dtype, ExpandBatch, Expanded, ExpandedPrefix, KvCopyPages, KvSpec, KvView,
    LayerBatch, LayerCapacity, LayerOptions, MlaExpand, MlaExpandArgs, MlaLayer, MlaLayerArgs, MlaShape,
    PagePool, RopeLayout, Selection, SeqId, SplitPolicy, Step, View,
};

use super::decode::{DIMS, FLOATS};
use super::draw::{Draw, bytes, values};
use super::judge::{judge, largest, of_layer};
use super::layer_lists::Lists;
use super::place::{Array, Cache, poisoned, upload};
use super::reference::{attend, dot, rotate};
use super::rotation::angles;
use super::{Under, text};

/// Query tokens of the largest step.
const MOST_TOKENS: u32 = 48;
/// Tokens of the longest sequence: the table of angles has as many positions.
const MOST_POSITIONS: u32 = 64;
const PREFIX_ROWS: u32 = 64;

/// A layer in use, and what the reference has to know of it.
struct Life<'a, B: Backend> {
    under: &'a Under<'a, B>,
    layer: Compiled<MlaLayer, B>,
    step: Step<MlaLayer, B>,
    pool: PagePool,
    place: Cache,
    slabs: Vec<B::Buffer>,
    k_scale: f32,
    /// `[H, P + V, L]`.
    weight: Vec<f64>,
    weight_buffer: B::Buffer,
    scales_buffer: Option<B::Buffer>,
    angles: Vec<f64>,
    angles_buffer: B::Buffer,
    /// What expanded prefixes are written to.
    expanded: Expanded<B::Buffer>,
    alive: Vec<SeqId>,
    /// Tokens of a list, which longer sequences attend; 0 for a dense layer.
    topk: u32,
}

fn spec(draw: &mut Draw) -> MlaLayer {
    let (kv_lora_rank, qk_rope_head_dim) = draw.pick(&DIMS[..3]);
    let (dtype, cache) = (draw.pick(&FLOATS), draw.pick(&Dtype::ALL));
    let shape = MlaShape { num_heads: draw.within(1, 5) as u32, kv_lora_rank, qk_rope_head_dim };
    let kv = KvSpec::new(cache, draw.pick(&[1, 2, 4, 8, 16]), 1);
    let spec = MlaLayer {
        shape,
        qk_nope_head_dim: 8 * draw.within(1, 4) as u32,
        v_head_dim: 8 * draw.within(1, 4) as u32,
        kv: KvSpec { num_pages: 480 / kv.page_size, ..kv },
        dtype,
        query: dtype,
        weight: draw.pick(&Dtype::ALL),
        out: dtype,
        rope: draw.pick(&[RopeLayout::Interleaved, RopeLayout::HalfSplit]),
        decode_threshold: draw.pick(&[1, 1, 2, 4]),
        workspace_bytes: 0,
    };
    MlaLayer { workspace_bytes: spec.workspace_row_bytes() * draw.pick(&[16, 24, 40, 100]), ..spec }
}

impl<'a, B: Backend> Life<'a, B> {
    fn begin(
        under: &'a Under<'a, B>,
        spec: MlaLayer,
        variant: &str,
        draw: &mut Draw,
    ) -> Result<Self, String> {
        let (backend, shape) = (under.backend, spec.shape);
        let (latent, rope) = (shape.kv_lora_rank as usize, shape.qk_rope_head_dim as usize);
        let row = latent + rope;
        let place = Cache::draw(draw, &spec.kv, row, draw.clone().once_in(4));
        // A slab holds at least a sequence's split.
        let slab_pages = place.slab_pages().unwrap_or(0);
        let capacity = LayerCapacity {
            tokens: MOST_TOKENS,
            decode_tokens: MOST_TOKENS,
            prefix_rows: PREFIX_ROWS,
            positions: 0,
            listed_tokens: 0,
        };
        let options = LayerOptions {
            variant: Some(variant.to_owned()),
            capacity,
            slab_pages,
            shared_sequences: if under.every_shape { draw.pick(&[0, 0, 4]) } else { 0 },
            topk: if under.every_shape { draw.pick(&[0, 0, 7, 16]) } else { 0 },
            indexer: None,
            guard: false,
        };
        let (layer, topk) = match backend.compile_with(spec, &options) {
            Ok(layer) => (layer, options.topk),
            // The variant serves no lists.
            Err(error) if options.topk > 0 && error.to_string().contains("lists of slots") => {
                let dense = LayerOptions { topk: 0, ..options };
                (backend.compile_with(spec, &dense).map_err(text)?, 0)
            }
            Err(error) => return Err(text(error)),
        };
        let rows = (spec.qk_nope_head_dim + spec.v_head_dim) * shape.num_heads;
        let scale = if spec.weight.is_fp8() { draw.pick(&[0.001, 0.000_976_562_5]) } else { 1.0 };
        let scales = bytes(Dtype::F32, (0..2 * shape.num_heads).map(|_| scale).collect::<Vec<_>>());
        let weight = bytes(
            spec.weight,
            (0..rows as usize * latent).map(|_| draw.normal() / 16.0 / scale).collect::<Vec<_>>(),
        );
        let nothing = poisoned(draw, spec.kv.num_slots() as usize * row * spec.kv.dtype().bytes());
        let pool = match place.slab_pages() {
            Some(pages) => PagePool::in_slabs(spec.kv, pages),
            None => PagePool::new(spec.kv),
        };
        let angles: Vec<f64> = angles(rope).into_iter().map(f64::from).collect();
        Ok(Self {
            under,
            step: layer.step(Capacity::default()).map_err(text)?,
            layer,
            pool: pool.map_err(text)?,
            slabs: place.upload(backend, &nothing)?,
            place,
            k_scale: if spec.kv.dtype() == Dtype::E4m3 {
                draw.pick(&[0.007_812_5, 0.015_625, 0.01])
            } else {
                1.0
            },
            weight_buffer: upload(backend, &weight)?,
            scales_buffer: if spec.weight.is_fp8() { Some(upload(backend, &scales)?) } else { None },
            weight: values(spec.weight, &weight)
                .into_iter()
                .map(|code| code * f64::from(scale as f32))
                .collect(),
            angles_buffer: upload(backend, &bytes(Dtype::F32, angles.iter().copied()))?,
            angles,
            expanded: Expanded::new(backend, &spec, PREFIX_ROWS).map_err(text)?,
            alive: Vec::new(),
            topk,
        })
    }

    /// Sequences come, grow, fork, are cut back and end; gives the step's requests.
    fn requests(&mut self, draw: &mut Draw) -> Result<Vec<(SeqId, u32)>, String> {
        for _ in 0..draw.below(3) {
            let Some(&any) = self.alive.get(draw.below(self.alive.len())) else { break };
            let len = self.pool.len(any).map_err(text)?;
            match draw.below(4) {
                0 | 1 if self.alive.len() < 7 => {
                    let kept = if draw.once_in(2) { len } else { draw.within(0, len as usize) as u32 };
                    let fork = self.pool.fork_prefix(any, kept).map_err(text)?;
                    self.alive.push(fork);
                }
                2 => self.pool.truncate(any, draw.within(0, len as usize) as u32).map_err(text)?,
                _ => {
                    self.pool.free(any).map_err(text)?;
                    self.alive.retain(|&seq| seq != any);
                }
            }
        }
        while self.alive.len() < 2 || self.alive.len() < 6 && draw.once_in(3) {
            self.alive.push(self.pool.add());
        }
        let (mut room, mut requests) = (MOST_TOKENS, Vec::new());
        for at in draw.shuffled(self.alive.len()) {
            let (seq, len) = (self.alive[at], self.pool.len(self.alive[at]).map_err(text)?);
            let wanted = if len == 0 { draw.within(1, 30) } else { draw.pick(&[0, 1, 1, 1, 2, 4, 9]) };
            let tokens = (wanted as u32).min(room).min(MOST_POSITIONS - len);
            if len + tokens > 0 && !draw.once_in(6) {
                room -= tokens;
                requests.push((seq, tokens));
            }
        }
        self.layer.op().decodes_first(&mut requests);
        Ok(requests)
    }

    /// Whole pages that sequences of the batch have in common before their new tokens: of one group, or none.
    fn prefixes(&self, requests: &[(SeqId, u32)], draw: &mut Draw) -> Result<Vec<ExpandedPrefix>, String> {
        if requests.is_empty() || draw.once_in(2) {
            return Ok(Vec::new());
        }
        let page_size = self.pool.spec().page_size;
        let first = draw.below(requests.len());
        let is_listed = |at: usize| {
            self.pool.len(requests[at].0).map(|len| self.topk > 0 && len > self.topk).map_err(text)
        };
        if is_listed(first)? {
            return Ok(Vec::new());
        }
        let old = |at: usize| self.pool.len(requests[at].0).map(|len| (len - requests[at].1) / page_size);
        let theirs = self.pool.pages(requests[first].0).map_err(text)?;
        let most = (old(first).map_err(text)? as usize).min((PREFIX_ROWS / page_size) as usize);
        if most == 0 {
            return Ok(Vec::new());
        }
        let pages = draw.within(1, most);
        let mut sequences = vec![first as u32];
        for (at, &(seq, _)) in requests.iter().enumerate().filter(|(at, _)| *at != first) {
            let own = self.pool.pages(seq).map_err(text)?;
            if !is_listed(at)? && old(at).map_err(text)? as usize >= pages && own[..pages] == theirs[..pages]
            {
                sequences.push(at as u32);
            }
        }
        let tokens = pages as u32 * page_size;
        let first_row = draw.within(0, (PREFIX_ROWS - tokens) as usize) as u32;
        Ok(vec![ExpandedPrefix { sequences, tokens, first_row }])
    }

    fn expand(
        &self,
        requests: &[(SeqId, u32)],
        prefix: &ExpandedPrefix,
        kv: KvView<&B::Buffer>,
    ) -> Result<(), String> {
        let pages = self.pool.pages(requests[prefix.sequences[0] as usize].0).map_err(text)?;
        let pages: Vec<i32> = pages.iter().map(|&page| page as i32).collect();
        let args = MlaExpandArgs {
            kv,
            k_scale: self.k_scale,
            kv_b_proj: &self.weight_buffer,
            kv_b_scales: self.scales_buffer.as_ref(),
            expanded: self.expanded.as_ref(),
        };
        let batch = ExpandBatch { pages: &pages, tokens: prefix.tokens, first_row: prefix.first_row };
        self.under.backend.once(MlaExpand(*self.layer.op()), batch, &args).map_err(text)
    }

    /// A step, compared with the reference; gives what it was, for a message.
    fn advance(&mut self, draw: &mut Draw) -> (String, Result<(), String>) {
        let requests = match self.requests(draw) {
            Ok(requests) => requests,
            Err(error) => return (String::new(), Err(error)),
        };
        let policy = match draw.below(3) {
            0 => SplitPolicy::Auto,
            1 => SplitPolicy::OneSplit,
            // A layer of bf16 rounds what each split of a prompt leaves: at most eight of them.
            _ => SplitPolicy::FixedTokens(draw.within(6, 16) as u32),
        };
        let before: Vec<u32> = requests.iter().map(|&(seq, _)| self.pool.len(seq).unwrap_or(0)).collect();
        let told: Vec<_> = requests.iter().zip(before).map(|(&(_, new), old)| (old + new, new)).collect();
        let mut told = format!("(len, q_len) {told:?} {policy:?}");
        let result = self.attend(&requests, policy, draw, &mut told);
        (told, result)
    }

    fn attend(
        &mut self,
        requests: &[(SeqId, u32)],
        policy: SplitPolicy,
        draw: &mut Draw,
        told: &mut String,
    ) -> Result<(), String> {
        let (backend, spec) = (self.under.backend, *self.layer.op());
        let (heads, latent) = (spec.shape.num_heads as usize, spec.shape.kv_lora_rank as usize);
        let (rope, nope) = (spec.shape.qk_rope_head_dim as usize, spec.qk_nope_head_dim as usize);
        let (value, elem) = (spec.v_head_dim as usize, spec.dtype.bytes());
        let (arrays, copies) = self.pool.layer_step(requests).map_err(text)?;
        let slabs = self.slabs.clone();
        let kv = self.place.view(&spec.mla(), &slabs)?;
        backend.once(KvCopyPages { shape: spec.shape, kv: spec.kv }, &copies, &kv).map_err(text)?;
        let prefixes = self.prefixes(requests, draw)?;
        for prefix in &prefixes {
            told.push_str(&format!(" {prefix:?}"));
            self.expand(requests, prefix, kv.clone())?;
        }
        let tokens = arrays.num_tokens();
        let encoded = |draw: &mut Draw, count: usize, by: f64| {
            bytes(spec.dtype, (0..count).map(|_| by * draw.normal()).collect::<Vec<_>>())
        };
        let q = encoded(draw, tokens * heads * (nope + rope), 0.7);
        let (kv_c, k_pe) = (encoded(draw, tokens * latent, 0.3), encoded(draw, tokens * rope, 0.5));
        // Bindings have room for the largest step.
        let most = MOST_TOKENS as usize;
        let places = [(heads, nope + rope), (1, latent), (1, rope), (heads, value)]
            .map(|(heads, dim)| Array::draw(draw, [most, heads, dim], elem, 8));
        let padded = |dense: &[u8], row: usize, draw: &mut Draw| {
            let rest = poisoned(draw, most * row * elem - dense.len());
            [dense, &rest].concat()
        };
        let q_buffer = places[0].upload(backend, &padded(&q, heads * (nope + rope), draw))?;
        let kv_c_buffer = places[1].upload(backend, &padded(&kv_c, latent, draw))?;
        let k_pe_buffer = places[2].upload(backend, &padded(&k_pe, rope, draw))?;
        let out = places[3].nothing(backend)?;
        let q_nope = places[0].view(&q_buffer);
        let lists = Lists::draw(draw, &self.pool, &arrays, self.topk)?;
        let lists_buffer = upload(backend, &lists.bytes(draw, most, self.topk))?;
        let softmax_scale = draw.pick(&[0.144f32, 0.2, 0.25]);
        let args = MlaLayerArgs {
            q_nope,
            q_pe: View { offset: q_nope.offset + nope as u64, ..q_nope },
            kv_c: places[1].view(&kv_c_buffer),
            k_pe: places[2].view(&k_pe_buffer),
            kv,
            kv_b_proj: &self.weight_buffer,
            kv_b_scales: self.scales_buffer.as_ref(),
            cos_sin: &self.angles_buffer,
            max_position: MOST_POSITIONS,
            out: places[3].view(&out),
            softmax_scale,
            q_scale: 1.0,
            k_scale: self.k_scale,
            out_scale: 1.0,
            expanded: Some(self.expanded.as_ref()),
            selection: match self.topk {
                0 => Selection::All,
                topk => Selection::Shared(View::dense(&lists_buffer, topk, 1)),
            },
            guard: None,
        };
        let batch = LayerBatch { expanded: &prefixes, ..arrays.batch() };
        self.layer.prepare(&mut self.step, (&batch, policy)).map_err(text)?;
        let room = self.layer.facts().capacity;
        let binding = self.layer.bind(&args, room).map_err(text)?;
        self.layer.run(&self.step, &binding).map_err(text)?;

        let pool = values(spec.kv.dtype(), &self.place.read(backend, &self.slabs)?);
        let got = places[3].read("out", backend, &out)?;
        // Rows past the batch, up to the binding's room, may hold anything: a merge covers all of them.
        let out_bytes = tokens * heads * value * elem;
        let (q, kv_c, k_pe) = (values(spec.dtype, &q), values(spec.dtype, &kv_c), values(spec.dtype, &k_pe));
        let (mut want, mut first, mut u) = (Vec::new(), 0, 1.0f64);
        for (seq, positions) in arrays.tokens() {
            let len = self.pool.len(*seq).map_err(text)? as usize;
            let rows = self.rows(*seq, len, &pool)?;
            for (i, position) in positions.clone().enumerate() {
                let token = first + i;
                let angles = &self.angles[position as usize * rope..][..rope];
                let turned =
                    rotate(&k_pe[token * rope..][..rope], angles, spec.rope == RopeLayout::Interleaved);
                self.judge_row(&rows[position as usize], &kv_c[token * latent..][..latent], &turned)
                    .map_err(|error| format!("cache of token {position}: {error}"))?;
            }
            let expanded = self.expanded_rows(&rows);
            for (_, value) in expanded.iter().flatten() {
                u = u.max(largest(value.iter().copied()));
            }
            for (i, position) in positions.clone().enumerate() {
                let angles = &self.angles[position as usize * rope..][..rope];
                for head in 0..heads {
                    let q = &q[((first + i) * heads + head) * (nope + rope)..][..nope + rope];
                    let turned = rotate(&q[nope..], angles, spec.rope == RopeLayout::Interleaved);
                    let q = [&q[..nope], &turned].concat();
                    let seen = &expanded[head][..position as usize + 1];
                    let seen = lists.of(first + i, seen, self.under.drops_key);
                    let keys: Vec<&[f64]> = seen.iter().map(|(key, _)| &key[..]).collect();
                    let values: Vec<&[f64]> = seen.iter().map(|(_, value)| &value[..]).collect();
                    want.extend(attend(&q, &keys, &values, value, softmax_scale.into()).0);
                }
            }
            first += positions.len();
        }
        let got = values(spec.dtype, &got[..out_bytes]);
        judge(
            "out",
            [tokens, heads, value],
            &got,
            &want,
            &of_layer(spec.dtype, self.layer.rounds_weights(), u),
        )
    }

    /// A sequence's rows of the cache, dequantised.
    fn rows(&self, seq: SeqId, len: usize, pool: &[f64]) -> Result<Vec<Vec<f64>>, String> {
        let (page_size, row) =
            (self.pool.spec().page_size as usize, self.layer.op().shape.row_elems() as usize);
        let pages = self.pool.pages(seq).map_err(text)?;
        let slot = |token: usize| pages[token / page_size] as usize * page_size + token % page_size;
        let scaled =
            |token: usize| pool[slot(token) * row..][..row].iter().map(|x| x * f64::from(self.k_scale));
        Ok((0..len).map(|token| scaled(token).collect()).collect())
    }

    /// A new row of the cache is the input, its rotary part rotated, both rounded.
    fn judge_row(&self, got: &[f64], latent: &[f64], turned: &[f64]) -> Result<(), String> {
        let spec = self.layer.op();
        let step = |dtype| match dtype {
            Dtype::F32 => (-23f64).exp2(),
            Dtype::F16 => (-11f64).exp2(),
            Dtype::Bf16 => (-8f64).exp2(),
            Dtype::E4m3 => (-4f64).exp2(),
        };
        let rel = step(spec.kv.dtype()) * 1.01 + step(spec.dtype);
        // Half of a subnormal's last place.
        let abs = match spec.kv.dtype() {
            Dtype::E4m3 => f64::from(self.k_scale) / 1024.0,
            Dtype::F16 => 3e-8,
            _ => 0.0,
        };
        for (i, (got, want)) in got.iter().zip(latent.iter().chain(turned)).enumerate() {
            let allowed = rel * want.abs() + abs + 1e-6;
            if (got - want).abs() > allowed || got.is_nan() {
                return Err(format!("[{i}] expected {want:e} got {got:e} tolerance {allowed:.1e}"));
            }
        }
        Ok(())
    }

    /// Keys and values of each head, by token.
    fn expanded_rows(&self, rows: &[Vec<f64>]) -> Vec<Vec<(Vec<f64>, Vec<f64>)>> {
        let spec = self.layer.op();
        let (latent, nope) = (spec.shape.kv_lora_rank as usize, spec.qk_nope_head_dim as usize);
        let per_head = nope + spec.v_head_dim as usize;
        let times = |row: &[f64], weights: &[f64]| -> Vec<f64> {
            weights.chunks(latent).map(|weight| dot(&row[..latent], weight)).collect()
        };
        let of_head = |head: usize| {
            let weight = &self.weight[head * per_head * latent..][..per_head * latent];
            let expand = |row: &Vec<f64>| {
                let both = times(row, weight);
                ([&both[..nope], &row[latent..]].concat(), both[nope..].to_vec())
            };
            rows.iter().map(expand).collect()
        };
        (0..spec.shape.num_heads as usize).map(of_head).collect()
    }
}

pub fn lives<B: Backend>(under: &Under<'_, B>, spec_draw: &mut Draw, draw: &mut Draw) -> Result<(), String> {
    let spec = spec(spec_draw);
    for variant in under.variants(&spec.mla(), draw) {
        let mut draw = draw.clone();
        let begun = Life::begin(under, spec, variant, &mut draw);
        let mut life = begun.map_err(|error| format!("{variant}: {spec:?}: {error}"))?;
        for step in 0..draw.within(2, 5) {
            let (told, result) = life.advance(&mut draw);
            let slabs = life.place.slab_pages();
            result.map_err(|error| {
                format!(
                    "{variant}: {spec:?} topk {} k_scale {} slabs {slabs:?} step {step} {told}: {error}",
                    life.topk, life.k_scale
                )
            })?;
        }
        under.count(&format!("mla_layer {variant}"));
    }
    Ok(())
}
