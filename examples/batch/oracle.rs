//! Checks a step's outputs against the f64 oracle, from the tokens alone: it knows nothing of pages.

use mla_support::reference::{self, Decode};
use wgpu_mla::{Backend, Dtype, Mask};

use crate::Result;
use crate::model::Model;
use crate::step::Runner;
use crate::traffic::{Sequence, Traffic};
use mla_support::close::{Tolerance, close};

pub struct Oracle<'a> {
    model: &'a Model,
    /// Sequences that were checked, each in every layer.
    pub checked: usize,
    /// The largest error, as a share of what is allowed.
    pub worst: f64,
}

impl<'a> Oracle<'a> {
    pub fn new(model: &'a Model) -> Self {
        Self { model, checked: 0, worst: 0.0 }
    }

    /// Compares the last step's outputs of the sequences at these places of the batch.
    pub fn check(
        &mut self,
        runner: &Runner<'_, impl Backend>,
        traffic: &Traffic,
        places: &[usize],
    ) -> Result<()> {
        if places.is_empty() {
            return Ok(());
        }
        let starts = traffic.query_start_loc();
        let shape = self.model.spec.shape;
        let (heads, latent) = (shape.num_heads as usize, shape.kv_lora_rank as usize);
        for layer in 0..self.model.layers {
            let tokens = *starts.last().unwrap_or(&0) as usize;
            let [out, lse] = runner.read(layer, tokens)?;
            let (out, lse) = (self.model.spec.out.decode_all(&out), Dtype::F32.decode_all(&lse));
            for &at in places {
                let (first, last) = (starts[at] as usize * heads, starts[at + 1] as usize * heads);
                let sequence = &traffic.batch[at];
                let (out, lse) = (&out[first * latent..last * latent], &lse[first..last]);
                let result = self.compare(sequence, layer, runner.rounds_weights(), out, lse);
                result.map_err(|error| {
                    format!("sequence {} of {} tokens: {error}", sequence.id.number(), sequence.tokens.len())
                })?;
            }
        }
        self.checked += places.len();
        Ok(())
    }

    fn compare(
        &mut self,
        sequence: &Sequence,
        layer: usize,
        rounds_p: bool,
        out: &[f32],
        lse: &[f32],
    ) -> Result<()> {
        let (model, spec) = (self.model, &self.model.spec);
        let row = spec.shape.row_elems() as usize;
        let round = |values: Vec<f32>| spec.query.decode_all(&spec.query.encode_all(&values));
        let store =
            |values: Vec<f32>| spec.kv.dtype().decode_all(&spec.kv.dtype().encode_all(&round(values)));
        let len = sequence.tokens.len();
        let new = &sequence.tokens[len - sequence.q_len as usize..];
        let q: Vec<f32> = new.iter().flat_map(|&token| round(model.query(token, layer))).collect();
        let cache: Vec<f32> =
            sequence.tokens.iter().flat_map(|&token| store(model.key(token, layer))).collect();
        let largest = cache.iter().fold(0f32, |max, x| max.max(x.abs()));
        let (want_out, want_lse) = reference::mla_decode(&Decode {
            num_heads: spec.shape.num_heads as usize,
            kv_lora_rank: spec.shape.kv_lora_rank as usize,
            qk_rope_head_dim: spec.shape.qk_rope_head_dim as usize,
            // The whole sequence in one page.
            page_size: len,
            q: &q,
            kv_cache: &cache,
            block_table: &[0],
            max_pages: 1,
            seq_lens: &[len as i32],
            query_start_loc: &[0, (q.len() / row / spec.shape.num_heads as usize) as i32],
            mask: Mask::Causal,
            softmax_scale: model.softmax_scale.into(),
            k_scale: 1.0,
            q_scale: 1.0,
        });
        let latent = spec.shape.kv_lora_rank as usize;
        let tolerance =
            Tolerance::decode(spec.kv.dtype(), spec.query, spec.out, rounds_p, largest.into(), latent);
        let out = close("out", out, &want_out, &tolerance).into_result()?;
        let lse = close("lse", lse, &want_lse, &Tolerance::lse()).into_result()?;
        self.worst = self.worst.max(out.worst_ratio).max(lse.worst_ratio);
        Ok(())
    }
}
