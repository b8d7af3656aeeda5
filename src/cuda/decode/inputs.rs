//! The optional inputs of a decode, as the kernels take them: lists of slots, and attention sinks.

use std::f32::consts::LOG2_E;

use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};
use crate::base::view::View;
use crate::cuda::kernels::address;
use crate::cuda::{Buffer, Cuda};
use crate::ops::{Device, Indices};

/// Where the lists of a layer are; addresses of 0 where there are none.
#[derive(Debug, Default)]
pub(super) struct Lists {
    pub is_listed: bool,
    pub slots: u64,
    pub stride: u32,
    pub lengths: u64,
    pub length_stride: u64,
    pub buffers: Vec<Buffer>,
}

impl Lists {
    /// # Errors
    /// [`Error::Limit`] where entries are too far apart for the kernels, which number them in 32 bits.
    pub(super) fn new(indices: Option<&Indices<&Buffer>>, max_queries: u32, topk: u32) -> Result<Self> {
        let Some(Indices { slots, topk_length }) = indices else { return Ok(Self::default()) };
        let at = |view: &View<&Buffer>| address(view.buffer, view.offset, Dtype::F32.bytes());
        Ok(Self {
            is_listed: true,
            slots: at(slots),
            stride: list_stride(slots.token_stride, max_queries, topk)?,
            lengths: topk_length.as_ref().map_or(0, at),
            length_stride: topk_length.as_ref().map_or(0, |view| view.token_stride),
            buffers: [Some(slots), topk_length.as_ref()]
                .into_iter()
                .flatten()
                .map(|view| view.buffer.clone())
                .collect(),
        })
    }
}

/// The stride of lists, 0 where there is at most one.
fn list_stride(stride: u64, lists: u32, topk: u32) -> Result<u32> {
    let more = u64::from(lists.saturating_sub(1));
    let (need, limit) = (more.saturating_mul(stride).saturating_add(topk.into()), u64::from(u32::MAX));
    if need > limit {
        let cure = "bind fewer query tokens, or put the lists closer together";
        return Err(Error::Limit {
            what: "entries up to the end of the last list of slots",
            need,
            limit,
            cure,
        });
    }
    Ok(if more == 0 { 0 } else { stride as u32 })
}

/// Sinks as base-2 logits on the card.
pub(super) fn upload_sinks(cuda: &Cuda, sinks: &[f32]) -> Result<Buffer> {
    let base_2: Vec<f32> = sinks.iter().map(|sink| sink * LOG2_E).collect();
    let bytes: &[u8] = bytemuck::cast_slice(&base_2);
    let buffer = Buffer::zeroed(cuda.stream(), bytes.len() as u64)?;
    cuda.upload(&buffer, 0, bytes)?;
    Ok(buffer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_numbered_in_32_bits() {
        assert_eq!(list_stride(2048, 4096, 2048), Ok(2048));
        assert_eq!(list_stride(u64::MAX, 1, 64), Ok(0), "a single list needs no stride");
        assert_eq!(list_stride(u64::MAX, 0, 64), Ok(0));
        assert_eq!(list_stride((1 << 31) - 1, 3, 1), Ok((1 << 31) - 1), "the last entry is number 2^32 - 2");
        let error = list_stride(1 << 31, 3, 1).expect_err("its number has 33 bits").to_string();
        assert!(
            error.starts_with("entries up to the end of the last list of slots: 4294967297 needed"),
            "{error}"
        );
    }
}
