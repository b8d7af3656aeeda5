//! Single ops on tensors.

use burn::tensor::Tensor;
use wgpu_mla::gpu::Gpu;
use wgpu_mla::{
    Compiled, KvAppend, KvAppendArgs, KvView, LseBase, MlaDecode, MlaDecodeArgs, MlaPrefill, MlaPrefillArgs,
    Query, Step, wgpu,
};

use crate::arrays::{Input, Output};
use crate::device::MlaDevice;
use crate::error::Result;

/// What an attention gives: for each query token and head a row, and the log-sum-exp of its logits.
#[derive(Debug)]
pub struct Attended {
    /// `[T, H, L]` of a decode, in the latent space; `[T, H, V]` of a prefill.
    pub out: Tensor<3>,
    /// f32 `[T, H]`, in natural units.
    pub lse: Tensor<2>,
}

/// The factors of a layer's decode.
#[derive(Debug, Clone, Copy)]
pub struct Scales {
    /// Factor of the logits: [`wgpu_mla::softmax_scale`].
    pub softmax_scale: f32,
    /// Factor of every element of an e4m3 cache; 1 for others.
    pub k_scale: f32,
}

impl MlaDevice {
    /// Attends the cache in absorbed form: `q`, `[T, H, L + R]` of the decode's query dtype, against the sequences that `step` was prepared
    /// with.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) and [`Error::Dtype`](crate::Error::Dtype) of `q`; the errors of `bind` and `run`.
    pub fn mla_decode(
        &self,
        mla: &Compiled<MlaDecode, Gpu>,
        step: &Step<MlaDecode, Gpu>,
        q: Tensor<3>,
        kv: &KvView<&wgpu::Buffer>,
        scales: Scales,
    ) -> Result<Attended> {
        let spec = *mla.op();
        let (tokens, shape) = (step.used(), spec.shape);
        let [t, h, latent] = [tokens, shape.num_heads, shape.kv_lora_rank].map(|dim| dim as usize);
        let q = Input::new("q", q)?.checked(spec.query, &[t, h, shape.row_elems() as usize])?;
        let outputs = [Output::new([t, h, latent], spec.out), Output::new([t, h], wgpu_mla::Dtype::F32)];
        let [out, lse] = self.on_buffers([q], outputs, |[q], [out, lse]| {
            let args = MlaDecodeArgs {
                query: Query::Whole(q.view(shape.row_elems())),
                kv: kv.clone(),
                out: out.view(shape.kv_lora_rank),
                lse: lse.view(1),
                lse_base: LseBase::E,
                softmax_scale: scales.softmax_scale,
                k_scale: scales.k_scale,
                q_scale: 1.0,
                indices: None,
                attn_sink: None,
            };
            Ok(mla.run(step, &mla.bind(&args, tokens)?)?)
        })?;
        Ok(Attended { out: out.tensor(), lse: lse.tensor() })
    }

    /// Writes the rows of new tokens to the slots that `step` was prepared with: `kv_c`, `[T, L]`, normed, and `k_pe`, `[T, R]`, rotated.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) and [`Error::Dtype`](crate::Error::Dtype) of a tensor; the errors of `bind` and `run`.
    pub fn kv_append(
        &self,
        append: &Compiled<KvAppend, Gpu>,
        step: &Step<KvAppend, Gpu>,
        kv_c: Tensor<2>,
        k_pe: Tensor<2>,
        kv: &KvView<&wgpu::Buffer>,
        k_scale: f32,
    ) -> Result<()> {
        let spec = *append.op();
        let tokens = step.used();
        let (latent, rope) = (spec.shape.kv_lora_rank, spec.shape.qk_rope_head_dim);
        let kv_c = Input::new("kv_c", kv_c)?.checked(spec.input, &[tokens as usize, latent as usize])?;
        let k_pe = Input::new("k_pe", k_pe)?.checked(spec.input, &[tokens as usize, rope as usize])?;
        let [] = self.on_buffers([kv_c, k_pe], [], |[kv_c, k_pe], []| {
            let (kv_c, k_pe) = (kv_c.view(latent), k_pe.view(rope));
            let args = KvAppendArgs { kv_c, k_pe, kv: kv.clone(), k_scale, guard: None };
            Ok(append.run(step, &append.bind(&args, tokens)?)?)
        })?;
        Ok(())
    }

    /// Attends keys and values of each head: `q`, `[T, H, P + R]`, `k`, `[K, H, P + R]`, and `v`, `[K, H, V]`, of the prefill's dtype.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) and [`Error::Dtype`](crate::Error::Dtype) of a tensor; the errors of `bind` and `run`.
    pub fn mla_prefill(
        &self,
        prefill: &Compiled<MlaPrefill, Gpu>,
        step: &Step<MlaPrefill, Gpu>,
        [q, k, v]: [Tensor<3>; 3],
        softmax_scale: f32,
    ) -> Result<Attended> {
        let spec = *prefill.op();
        let room = step.used();
        let (nope, key) = (spec.qk_nope_head_dim, spec.qk_nope_head_dim + spec.qk_rope_head_dim);
        let shape = |rows: u32, dim: u32| [rows, spec.num_heads, dim].map(|dim| dim as usize);
        let q = Input::new("q", q)?.checked(spec.dtype, &shape(room.tokens, key))?;
        let k = Input::new("k", k)?.checked(spec.dtype, &shape(room.keys, key))?;
        let v = Input::new("v", v)?.checked(spec.dtype, &shape(room.keys, spec.v_head_dim))?;
        let [rows, heads, dim] = shape(room.rows, spec.v_head_dim);
        let outputs =
            [Output::new([rows, heads, dim], spec.out), Output::new([rows, heads], wgpu_mla::Dtype::F32)];
        let [out, lse] = self.on_buffers([q, k, v], outputs, |[q, k, v], [out, lse]| {
            let [q_nope, q_pe] = [q.view(key).columns(0..nope)?, q.view(key).columns(nope..key)?];
            let [k_nope, k_pe] = [k.view(key).columns(0..nope)?, k.view(key).columns(nope..key)?];
            let args = MlaPrefillArgs {
                q_nope,
                q_pe,
                k_nope,
                k_pe,
                v: v.view(spec.v_head_dim),
                out: out.view(spec.v_head_dim),
                lse: lse.view(1),
                softmax_scale,
                v_scale: 1.0,
            };
            Ok(prefill.run(step, &prefill.bind(&args, room)?)?)
        })?;
        Ok(Attended { out: out.tensor(), lse: lse.tensor() })
    }
}
