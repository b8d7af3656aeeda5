//! The optional inputs of a decode: lists of slots, and attention sinks.

use super::{DecodeOptions, MlaDecodeArgs};
use crate::base::error::{Error, Result};
use crate::base::view::View;
use crate::cache::decode_spec::MlaDecode;
use crate::plan::Plan;
use crate::plan::tables::PageTable;

/// The slots that each query token attends, in a sparse decode. A slot is `page * page_size + offset`.
#[derive(Debug, Clone, Copy)]
pub struct Indices<B> {
    /// i32 `[total_q, topk]`, as `View::dense(buffer, topk, 1)`: `token_stride` is from a list to the next, `head_stride` must be 1.
    /// Entries that are negative or no slot of the pool are skipped; a slot that stands twice counts twice. The list is the only mask.
    pub slots: View<B>,
    /// i32 `[total_q]`, as `View::dense(buffer, 1, 1)`: entries of a list at or past its length are not read. `None`: all `topk` count.
    pub topk_length: Option<View<B>>,
}

impl<B> Indices<B> {
    /// Lists that follow each other at the front of a buffer, each of `topk` entries.
    pub fn dense(slots: B, topk: u32) -> Self {
        Self { slots: View::dense(slots, topk, 1), topk_length: None }
    }

    pub(super) fn map<'a, C>(
        &'a self,
        mut f: impl FnMut(&'static str, &'a B) -> Result<C>,
    ) -> Result<Indices<C>> {
        let topk_length = self.topk_length.as_ref();
        Ok(Indices {
            slots: self.slots.map(|buffer| f("indices", buffer))?,
            topk_length: topk_length.map(|view| view.map(|buffer| f("topk_length", buffer))).transpose()?,
        })
    }
}

/// The optional inputs that a decode was compiled with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Inputs {
    /// Entries of a list of slots; 0 for a dense decode.
    pub(crate) topk: u32,
    pub(crate) attn_sink: bool,
}

impl Inputs {
    /// # Errors
    /// [`Error::Shape`] for lists that are too long, and [`Error::LayoutMismatch`] for options that exclude each other.
    pub(crate) fn new(options: &DecodeOptions) -> Result<Self> {
        let (topk, limit) = (options.topk, i32::MAX as u32);
        if topk > limit {
            let cure = "must be below 2^31: the entries of a list of slots";
            return Err(Error::Shape { what: "DecodeOptions::topk", got: topk.into(), cure });
        }
        if topk > 0 && options.device_page_list {
            let detail =
                "a sparse decode has no page list: use DecodeOptions::topk or device_page_list, not both";
            return Err(Error::LayoutMismatch { detail });
        }
        Ok(Self { topk, attn_sink: options.attn_sink })
    }

    /// Whether a step may be prepared with a plan.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`], and [`Error::Shape`] for a plan of longer lists.
    pub(crate) fn check_plan(&self, plan: &Plan, pages: PageTable<'_>) -> Result<()> {
        let is_listed = matches!(pages, PageTable::Indices);
        let mismatch = |detail| Err(Error::LayoutMismatch { detail });
        match (self.topk, plan.topk()) {
            (0, 1..) => mismatch("a plan of Plan::sparse needs a decode compiled with DecodeOptions::topk"),
            (1.., 0) if plan.num_queries > 0 => {
                mismatch("a decode compiled with DecodeOptions::topk needs a plan of Plan::sparse")
            }
            (0, 0) if is_listed => mismatch(
                "PageTable::Indices is for a decode compiled with DecodeOptions::topk: give it page ids",
            ),
            (1.., _) if !is_listed => mismatch(
                "a decode compiled with DecodeOptions::topk takes PageTable::Indices: its tokens are listed by slots",
            ),
            (topk, planned) if planned > topk => {
                let cure =
                    "must be at most DecodeOptions::topk: plan for shorter lists, or compile for longer ones";
                Err(Error::Shape { what: "topk of the plan", got: planned.into(), cure })
            }
            _ => Ok(()),
        }
    }

    /// Whether a layer has the inputs that the decode was compiled for, and no others.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`]; [`Error::Length`] and [`Error::Scale`] for sinks; the errors of [`View::check`] for lists.
    pub(crate) fn check_args<B>(
        &self,
        spec: &MlaDecode,
        args: &MlaDecodeArgs<&B>,
        max_queries: u32,
        size: impl Fn(&B) -> u64,
    ) -> Result<()> {
        let mismatch = |detail| Err(Error::LayoutMismatch { detail });
        match (self.topk, &args.indices) {
            (0, Some(_)) => {
                return mismatch("MlaDecodeArgs::indices needs a decode compiled with DecodeOptions::topk");
            }
            (1.., None) => {
                return mismatch("a decode compiled with DecodeOptions::topk needs MlaDecodeArgs::indices");
            }
            (topk, Some(Indices { slots, topk_length })) => {
                if slots.head_stride != 1 {
                    let cure = "must be 1: the entries of a list follow each other";
                    return Err(Error::Shape { what: "indices head_stride", got: slots.head_stride, cure });
                }
                slots.check("indices", [max_queries, topk, 1], 4, 1, size(slots.buffer))?;
                if let Some(lengths) = topk_length {
                    lengths.check("topk_length", [max_queries, 1, 1], 4, 1, size(lengths.buffer))?;
                }
            }
            (0, None) => {}
        }
        match (self.attn_sink, &args.attn_sink) {
            (true, Some(sinks)) => check_sinks(spec.shape.num_heads, sinks),
            (false, Some(_)) => {
                mismatch("MlaDecodeArgs::attn_sink needs a decode compiled with DecodeOptions::attn_sink")
            }
            (true, None) => {
                mismatch("a decode compiled with DecodeOptions::attn_sink needs MlaDecodeArgs::attn_sink")
            }
            (false, None) => Ok(()),
        }
    }
}

fn check_sinks(num_heads: u32, sinks: &[f32]) -> Result<()> {
    let (got, want) = (sinks.len() as u64, num_heads.into());
    if got != want {
        return Err(Error::Length { what: "attn_sink", got, want, cure: "one sink a head" });
    }
    if let Some(sink) = sinks.iter().find(|sink| sink.is_nan()) {
        let cure = "must be a number: -inf is no sink";
        return Err(Error::Scale { what: "attn_sink", got: (*sink).into(), cure });
    }
    Ok(())
}
