//! Cases of the kind `decode_sparse`.

use wgpu_mla::{Dtype, KvLayout, KvSpec, MlaDecode, MlaShape};

use super::SparseCase;
use super::file::{File, Tensor, narrow};
use crate::paint::Lists;
use safetensors::tensor::Dtype as FileDtype;

pub fn read(file: &File<'_>) -> Result<SparseCase, String> {
    let (latent, rope) = (file.number("kv_lora_rank")?, file.number("qk_rope_head_dim")?);
    let page_size = file.number("page_size")?;
    if file.text("causal")? != "false" {
        return Err("causal must be false: a list is the only mask".to_owned());
    }
    let q = file.floats("q")?;
    let [total_q, heads, _] = q.shape(["total_q", "num_heads", "L + R"])?;
    let (layout, kv) = cache(file)?;
    let [num_pages, _, _] = kv.shape(["num_pages", "page_size", "L + R, or bytes"])?;
    let shape =
        MlaShape { num_heads: narrow("num_heads", heads)?, kv_lora_rank: latent, qk_rope_head_dim: rope };
    let kv_spec = KvSpec { layout, page_size, num_pages: narrow("num_pages", num_pages)? };
    let spec = MlaDecode { shape, kv: kv_spec, query: q.dtype, out: Dtype::F32 };
    spec.check().map_err(|error| error.to_string())?;
    narrow("total_q", total_q)?;
    q.expect(&[total_q, heads, u64::from(latent) + u64::from(rope)])?;
    let token =
        kv_spec.token(&shape).bytes / if layout.is_plain() { layout.dtype().bytes() as u64 } else { 1 };
    kv.expect(&[num_pages, page_size.into(), token])?;

    let lists = lists(file, total_q)?;
    let attn_sink = file.has("attn_sink").then(|| file.f32s("attn_sink", &[heads])).transpose()?;
    if let Some(sink) = attn_sink.iter().flatten().find(|sink| sink.is_nan()) {
        return Err(format!("attn_sink has {sink}: must be numbers"));
    }
    let k_scale = file.scale("k_scale")?;
    if !layout.is_plain() && k_scale != 1.0 {
        return Err(format!("k_scale is {k_scale}: must be 1 where tokens have scales of their own"));
    }
    Ok(SparseCase {
        spec,
        softmax_scale: file.softmax_scale()?,
        k_scale,
        q_scale: file.scale("q_scale")?,
        q: q.bytes(),
        kv_cache: kv.bytes(),
        lists,
        attn_sink,
        out: file.f32s("out", &[total_q, heads, latent.into()])?,
        lse: file.f32s("lse", &[total_q, heads])?,
    })
}

fn cache<'a>(file: &File<'a>) -> Result<(KvLayout, Tensor<'a>), String> {
    match file.text("kv_layout")? {
        "dense" => {
            let kv = file.floats("kv_cache")?;
            Ok((kv.dtype.into(), kv.tensor()))
        }
        "fp8_ds_mla_656" => Ok((KvLayout::Ds656, file.codes("kv_cache")?)),
        "fp8_ds_mla_528" => Ok((KvLayout::Ds528, file.codes("kv_cache")?)),
        other => Err(format!("kv_layout is {other:?}: must be dense, fp8_ds_mla_656 or fp8_ds_mla_528")),
    }
}

fn lists(file: &File<'_>, total_q: u64) -> Result<Lists, String> {
    let indices = file.typed("indices", FileDtype::I32)?;
    let [_, topk] = indices.shape(["total_q", "topk"])?;
    if topk == 0 {
        return Err("indices have lists of no entry: topk must be at least 1".to_owned());
    }
    narrow("topk", topk)?;
    indices.expect(&[total_q, topk])?;
    let mut lists =
        Lists { topk: topk as usize, slots: indices.elements(i32::from_le_bytes), topk_length: None };
    if file.has("topk_length") {
        let lengths = file.typed("topk_length", FileDtype::I32)?;
        lengths.expect(&[total_q])?;
        let lengths = lengths.elements(i32::from_le_bytes);
        for (token, &length) in lengths.iter().enumerate() {
            if !(0..=topk as i64).contains(&length.into()) {
                return Err(format!("topk_length[{token}] is {length}: must be 0 to topk {topk}"));
            }
        }
        lists.topk_length = Some(lengths);
    }
    Ok(lists)
}
