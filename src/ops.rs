//! Arguments and checks of the small ops: merge of attention states, append, page copies, rotary embeddings.

mod rope;

pub use rope::{Rope, RopeAppend, RopeAppendSpec, RopeLayout, RopeSpec};

mod batch_tables;
mod kv_calibrate;
mod kv_gather;
mod merge_states;

pub use batch_tables::DeviceBatch;
pub(crate) use batch_tables::Sequences;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) use batch_tables::template;
pub(crate) use kv_calibrate::check_tokens;
pub use kv_calibrate::{Calibrate, CalibrateSpec, CalibrationStats};
pub use kv_gather::{Gather, GatherRange, GatherSpec};
pub use merge_states::StateSets;

mod project;

pub use project::{HeadDims, Project, ProjectSpec, WeightOrder, WeightView};

use crate::layer::{KvView, View, distinct, fits, no_aliases};
use crate::{Dtype, Error, KvSpec, MlaShape, MlaSpec, Result};

/// What a `merge_attn_states` is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MergeStatesSpec {
    /// Dtype of both inputs and of the output: f32, f16 or bf16.
    pub dtype: Dtype,
    /// Elements of a head: any.
    pub head_size: u32,
}

/// Two partial attention results of the same queries over different keys, and where their merge goes.
///
/// `lse = ln(sum exp(lse_i))`, `out = sum exp(lse_i - lse) * out_i`. An input whose LSE is -inf, +inf or NaN counts
/// as empty, and what it holds is ignored. Strides are never inferred from each other: outputs are
/// `[tokens, heads, head_size]` and LSEs f32 `[heads, tokens]` as users of vLLM know them, but any strides do.
/// LSEs are natural logarithms.
#[derive(Debug, Clone, Copy)]
pub struct MergeStates<B> {
    /// `prefix_output`.
    pub prefix_output: View<B>,
    /// `prefix_lse`.
    pub prefix_lse: View<B>,
    /// `suffix_output`.
    pub suffix_output: View<B>,
    /// `suffix_lse`.
    pub suffix_lse: View<B>,
    /// Where the merged output goes.
    pub output: View<B>,
    /// Where the merged LSE goes, if it is wanted.
    pub output_lse: Option<View<B>>,
    /// Query tokens.
    pub num_tokens: u32,
    /// Heads.
    pub num_heads: u32,
}

impl MergeStatesSpec {
    /// # Errors
    /// [`Error::DtypeUnsupported`] for e4m3, [`Error::Shape`] for an empty head.
    pub fn check(&self) -> Result<()> {
        if self.dtype == Dtype::E4m3 {
            let cure = "use f32, f16 or bf16";
            return Err(Error::DtypeUnsupported { what: "merge_attn_states", got: self.dtype, cure });
        }
        if self.head_size == 0 {
            return Err(Error::Shape { what: "head_size", got: 0, cure: "must be at least 1" });
        }
        Ok(())
    }
}

impl<B> MergeStates<&B> {
    /// # Errors
    /// [`Error::BufferTooSmall`], given each buffer's bytes, and [`Error::Shape`] where written rows overlap.
    pub(crate) fn check(&self, spec: &MergeStatesSpec, size: impl Fn(&B) -> u64) -> Result<()> {
        spec.check()?;
        let (tokens, heads) = (u64::from(self.num_tokens), u64::from(self.num_heads));
        if tokens == 0 || heads == 0 {
            return Ok(());
        }
        let dim = u64::from(spec.head_size);
        let bytes = spec.dtype.bytes() as u64;
        let outputs = [
            ("prefix_output", Some(self.prefix_output), dim, bytes),
            ("suffix_output", Some(self.suffix_output), dim, bytes),
            ("output", Some(self.output), dim, bytes),
            ("prefix_lse", Some(self.prefix_lse), 1, 4),
            ("suffix_lse", Some(self.suffix_lse), 1, 4),
            ("output_lse", self.output_lse, 1, 4),
        ];
        for (what, view, dim, bytes) in outputs {
            if let Some(view) = view {
                fits(what, view.end(tokens, heads, dim).saturating_mul(bytes), size(view.buffer))?;
            }
        }
        for (what, view, dim) in [("output", Some(self.output), dim), ("output_lse", self.output_lse, 1)] {
            if let Some(view) = view {
                distinct(what, &view, tokens, heads, dim)?;
            }
        }
        Ok(())
    }

    /// # Errors
    /// [`Error::Aliased`].
    pub(crate) fn check_aliases(&self, is_same: impl Fn(&B, &B) -> bool) -> Result<()> {
        let inputs = [
            ("prefix_output", self.prefix_output.buffer),
            ("prefix_lse", self.prefix_lse.buffer),
            ("suffix_output", self.suffix_output.buffer),
            ("suffix_lse", self.suffix_lse.buffer),
        ];
        let output = ("output", self.output.buffer);
        no_aliases(&inputs, &[output], &is_same)?;
        if let Some(lse) = self.output_lse {
            let lse = [("output_lse", lse.buffer)];
            no_aliases(&inputs, &lse, &is_same)?;
            no_aliases(&[output], &lse, &is_same)?;
        }
        Ok(())
    }
}

/// What a `kv_append` is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AppendSpec {
    /// `kv_lora_rank` and `qk_rope_head_dim`; the heads do not matter.
    pub shape: MlaShape,
    /// The cache.
    pub kv: KvSpec,
    /// Dtype of `kv_c` and `k_pe`: f32, f16 or bf16.
    pub input: Dtype,
}

/// One layer's new rows and the cache they go into.
#[derive(Debug, Clone, Copy)]
pub struct AppendLayer<B> {
    /// Latent rows `[tokens, L]`; `head_stride` is unread.
    pub kv_c: View<B>,
    /// Rotary rows `[tokens, R]`; `head_stride` is unread.
    pub k_pe: View<B>,
    /// The cache.
    pub kv: KvView<B>,
    /// An e4m3 cache holds `x / k_scale`; 1 for others.
    pub k_scale: f32,
}

impl AppendSpec {
    /// # Errors
    /// [`Error::Shape`] and [`Error::DtypeUnsupported`].
    pub fn check(&self) -> Result<()> {
        self.mla().check()?;
        if self.input == Dtype::E4m3 {
            let cure = "use f32, f16 or bf16";
            return Err(Error::DtypeUnsupported { what: "kv_c and k_pe", got: self.input, cure });
        }
        Ok(())
    }

    pub(crate) fn mla(&self) -> MlaSpec {
        MlaSpec { shape: self.shape, kv: self.kv, query: self.input, out: Dtype::F32 }
    }

    /// Checks a slot mapping and turns it into words: `u32::MAX` for a token that is skipped.
    ///
    /// # Errors
    /// [`Error::SlotOutOfRange`] and [`Error::SlotOverlap`]; [`Error::Length`] for more tokens than 32 bits count.
    pub fn slots(&self, slot_mapping: &[i64]) -> Result<Vec<u32>> {
        if u32::try_from(slot_mapping.len()).is_err() {
            let (got, want) = (slot_mapping.len() as u64, u64::from(u32::MAX));
            let cure = "append fewer tokens a call";
            return Err(Error::Length { what: "slot_mapping", got, want, cure });
        }
        let num_slots = self.kv.num_slots();
        let mut taken: Vec<(i64, usize)> = Vec::with_capacity(slot_mapping.len());
        let mut words = Vec::with_capacity(slot_mapping.len());
        for (index, &slot) in slot_mapping.iter().enumerate() {
            if slot >= 0 && slot as u64 >= num_slots {
                return Err(Error::SlotOutOfRange { index, slot, num_slots });
            }
            if slot >= 0 {
                taken.push((slot, index));
            }
            words.push(if slot < 0 { u32::MAX } else { slot as u32 });
        }
        taken.sort_unstable();
        if let Some(pair) = taken.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Err(Error::SlotOverlap { first: pair[0].1, second: pair[1].1, slot: pair[0].0 });
        }
        Ok(words)
    }
}

impl<'a, B> AppendLayer<&'a B> {
    /// # Errors
    /// [`Error::Scale`], [`Error::Alignment`], [`Error::BufferTooSmall`], given each buffer's bytes.
    pub(crate) fn check(&self, spec: &AppendSpec, tokens: u32, size: impl Fn(&B) -> u64) -> Result<()> {
        spec.check()?;
        if !(self.k_scale.is_finite() && self.k_scale > 0.0 && (1.0 / self.k_scale).is_finite()) {
            return Err(Error::Scale { what: "k_scale", got: self.k_scale });
        }
        self.kv.check(&spec.mla(), size(self.kv.buffer))?;
        let rows =
            [("kv_c", self.kv_c, spec.shape.kv_lora_rank), ("k_pe", self.k_pe, spec.shape.qk_rope_head_dim)];
        for (what, view, dim) in rows {
            if dim == 0 {
                continue;
            }
            for got in [view.offset, view.token_stride] {
                if got % 4 != 0 {
                    return Err(Error::Alignment { what, got, of: 4, unit: "elements" });
                }
            }
            let end = view.end(tokens.into(), 1, dim.into()).saturating_mul(spec.input.bytes() as u64);
            fits(what, end, size(view.buffer))?;
        }
        Ok(())
    }

    /// The rotary rows. Without a rotary part they are unread, whatever they are, and the latent ones stand in for them.
    pub(crate) fn rotary(&self, spec: &AppendSpec) -> View<&'a B> {
        if spec.shape.qk_rope_head_dim == 0 { self.kv_c } else { self.k_pe }
    }

    /// # Errors
    /// [`Error::Aliased`].
    pub(crate) fn check_aliases(&self, spec: &AppendSpec, is_same: impl Fn(&B, &B) -> bool) -> Result<()> {
        let inputs = [("kv_c", self.kv_c.buffer), ("k_pe", self.rotary(spec).buffer)];
        no_aliases(&inputs, &[("kv", self.kv.buffer)], is_same)
    }
}

/// What a `kv_copy_pages` is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CopySpec {
    /// The cache.
    pub kv: KvSpec,
    /// Elements of a row, `L + R`: a multiple of 4.
    pub row_elems: u32,
}

impl CopySpec {
    /// # Errors
    /// [`Error::Shape`].
    pub fn check(&self) -> Result<()> {
        self.kv.check()?;
        if !self.row_elems.is_multiple_of(4) || !(4..=65_536).contains(&self.row_elems) {
            let cure = "must be kv_lora_rank + qk_rope_head_dim, a multiple of 4 in 4..=65536";
            return Err(Error::Shape { what: "row_elems", got: self.row_elems.into(), cure });
        }
        Ok(())
    }

    /// Checks a layer's cache. Where in a row the latent ends does not matter.
    ///
    /// # Errors
    /// [`Error::Alignment`], [`Error::Shape`] where pages would overlap, [`Error::BufferTooSmall`] for a buffer of `size` bytes.
    pub(crate) fn check_view<B>(&self, view: &KvView<&B>, size: u64) -> Result<()> {
        view.check(&self.mla(), size)
    }

    pub(crate) fn mla(&self) -> MlaSpec {
        let shape = MlaShape { num_heads: 1, kv_lora_rank: self.row_elems, qk_rope_head_dim: 0 };
        MlaSpec { shape, kv: self.kv, query: Dtype::F32, out: Dtype::F32 }
    }

    pub(crate) fn page_bytes(&self) -> u64 {
        u64::from(self.kv.page_size) * u64::from(self.row_elems) * self.kv.dtype.bytes() as u64
    }
}

/// Checks page copies `(from, to)`: in the pool, and in an order that cannot matter.
///
/// # Errors
/// [`Error::CopyConflict`].
pub fn check_copies(kv: &KvSpec, copies: &[(u32, u32)]) -> Result<()> {
    let conflict = |index: usize, page: u32, why: &'static str| Err(Error::CopyConflict { index, page, why });
    let mut writes: Vec<u32> = copies.iter().map(|&(_, to)| to).collect();
    writes.sort_unstable();
    for (index, &(from, to)) in copies.iter().enumerate() {
        for page in [from, to] {
            if page >= kv.num_pages {
                return conflict(
                    index,
                    page,
                    "is not in the pool: take pages from the pool that owns the cache",
                );
            }
        }
        if writes.binary_search(&from).is_ok() {
            return conflict(index, from, "is read and written by one call: use two calls, in order");
        }
    }
    if let Some(pair) = writes.windows(2).find(|pair| pair[0] == pair[1]) {
        let index = copies.iter().rposition(|&(_, to)| to == pair[0]).unwrap_or(0);
        return conflict(index, pair[0], "is written twice: copy each page to a page of its own");
    }
    Ok(())
}
