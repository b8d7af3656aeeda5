//! `kv_append`: new rows into the paged cache, the field's `concat_and_cache_mla`. Arguments and checks.

use super::guard::{GuardBounds, GuardView, check_guard, map_guard};
use super::op::{Op, Use};
use super::samples::{FLOATS, SHAPE, kv, pairs, records};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use super::step_table::{StepTable, TableOp};
use super::variants::OpOptions;
use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};
use crate::base::memory::room_for;
use crate::base::view::{View, wide};
use crate::cache::decode_spec::MlaDecode;
use crate::cache::{KvLayout, KvSpec, KvView, MlaShape, Scales};

/// Writes the rows of new tokens, `kv_c ++ k_pe`, to their slots of the paged cache: vLLM's `concat_and_cache_mla`.
///
/// Equal dtypes are copied bit for bit. Other pairs go through f32 and round to nearest even, NaN, infinities and subnormals included:
/// the same bytes as those of [`Dtype::encode`]. An e4m3 cache holds `x / k_scale`, saturated to +-448: the exact
/// quotient, rounded once. A cache of [`KvLayout::Ds656`] or `Ds528` is written with the scales that each token needs, powers of two, as by
/// vLLM's `concat_and_cache_ds_mla`.
///
/// Arguments of a layer: [`KvAppendArgs`]. Input of a step: a `slot_mapping`, `&[i64]`, as [`crate::PagePool::slot_mapping`] makes it:
/// the slot of each token, `page * page_size + offset`, or a negative number for a token that is skipped. A slot outside the pool is
/// [`Error::SlotOutOfRange`], and two tokens in one slot are [`Error::SlotOverlap`], before anything is written.
///
/// Room of a binding: `u32`, tokens, skipped ones included. Capacity of a step: `u32`, tokens.
///
/// ```
/// use wgpu_mla::{Device, Dtype, KvAppend, KvAppendArgs, KvSpec, KvView, View, cpu::Cpu, e4m3_decode};
/// # use wgpu_mla::{MlaDecode, MlaShape};
///
/// # fn main() -> wgpu_mla::Result<()> {
/// let shape = MlaShape { num_heads: 1, kv_lora_rank: 256, qk_rope_head_dim: 32 };
/// let kv = KvSpec { layout: Dtype::E4m3.into(), page_size: 4, num_pages: 2 };
/// let mla = MlaDecode { shape, kv, query: Dtype::F32, out: Dtype::F32 };
/// let cpu = Cpu::new();
/// let (kv_c, k_pe) = (cpu.buffer(2 * 256 * 4)?, cpu.buffer(2 * 32 * 4)?);
/// let cache = cpu.buffer(mla.cache_bytes())?;
/// cpu.upload(&kv_c, 0, &Dtype::F32.encode_all(&[3.0; 2 * 256]))?;
/// let (kv_c, k_pe) = (View::dense(&kv_c, 1, 256), View::dense(&k_pe, 1, 32));
/// let layer = KvAppendArgs { kv_c, k_pe, kv: KvView::dense(&cache, &mla), k_scale: 0.5, guard: None };
///
/// // The first of two tokens goes to slot 5; the second is skipped.
/// cpu.once(KvAppend { shape, kv, input: Dtype::F32, guard: false }, &[5, -1], &layer)?;
/// let row = &cpu.download(&cache, mla.cache_bytes())?[5 * 288..][..288];
/// assert!(row[..256].iter().all(|&code| e4m3_decode(code) == 3.0 / 0.5));
/// assert!(row[256..].iter().all(|&code| code == 0));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvAppend {
    /// `kv_lora_rank` and `qk_rope_head_dim`; the heads do not matter.
    pub shape: MlaShape,
    /// The cache.
    pub kv: KvSpec,
    /// Dtype of `kv_c` and `k_pe`: f32, f16 or bf16.
    pub input: Dtype,
    /// Whether it counts what rounding to the cache's dtype loses, in [`KvAppendArgs::guard`].
    pub guard: bool,
}

/// One layer of a [`KvAppend`]: new rows and the cache they go into. Offsets and the strides of `kv_c` and `k_pe` are multiples of 4
/// elements.
#[derive(Debug, Clone)]
pub struct KvAppendArgs<B> {
    /// Latent rows `[tokens, L]`; `head_stride` is unread.
    pub kv_c: View<B>,
    /// Rotary rows `[tokens, R]`; `head_stride` is unread. Unread where `R` is 0.
    pub k_pe: View<B>,
    /// The cache.
    pub kv: KvView<B>,
    /// An e4m3 cache holds `x / k_scale`: finite and at least 2^-126. It is 1 for other dtypes, and where a token has scales of its own.
    pub k_scale: f32,
    /// Counters of what is appended; `Some` where [`KvAppend::guard`] is set. Skipped tokens are not counted.
    pub guard: Option<GuardView<B>>,
}

impl KvAppend {
    /// Checks a slot mapping and turns it into words: `u32::MAX` for a token that is skipped.
    ///
    /// # Errors
    /// [`Error::SlotOutOfRange`] and [`Error::SlotOverlap`]; [`Error::Length`] for more tokens than 32 bits count;
    /// [`Error::OutOfMemory`].
    pub fn slots(&self, slot_mapping: &[i64]) -> Result<Vec<u32>> {
        if u32::try_from(slot_mapping.len()).is_err() {
            let (got, want) = (slot_mapping.len() as u64, u64::from(u32::MAX));
            let cure = "append fewer tokens a call";
            return Err(Error::Length { what: "slot_mapping", got, want, cure });
        }
        let num_slots = self.kv.num_slots();
        let mut taken: Vec<(i64, usize)> = room_for(slot_mapping.len(), "a slot_mapping")?;
        let mut words = room_for(slot_mapping.len(), "a slot_mapping")?;
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

impl KvAppend {
    /// What is lost of a token's latent and of its rotary part.
    pub(crate) fn guard_bounds(&self, k_scale: f32) -> [GuardBounds; 2] {
        let token = self.kv.token(&self.shape);
        [token.latent.dtype, token.rope.dtype].map(|dtype| match token.scales {
            Scales::Groups { .. } if dtype.is_fp8() => GuardBounds::of_own_scales(),
            _ => GuardBounds::of(dtype, k_scale),
        })
    }
}

impl<B: Copy> KvAppendArgs<B> {
    /// The rotary rows. Without a rotary part they are unread, whatever they are, and the latent ones stand in for them.
    pub(crate) fn rotary(&self, spec: &KvAppend) -> View<B> {
        if spec.shape.qk_rope_head_dim == 0 { self.kv_c } else { self.k_pe }
    }
}

impl Op for KvAppend {
    const NAME: &'static str = "kv_append";
    type Options = OpOptions;
    type Facts = ();
    /// `slot_mapping`, `page * page_size + offset` a token; negative: it is skipped.
    type Input<'a> = &'a [i64];
    type Args<B> = KvAppendArgs<B>;
    /// Tokens, skipped ones included.
    type Extent = u32;
    /// Tokens.
    type Capacity = u32;

    fn samples() -> Vec<Self> {
        let plain = pairs(&FLOATS, &Dtype::ALL, |input, cache| KvAppend {
            shape: SHAPE,
            kv: kv(cache),
            input,
            guard: false,
        });
        let records =
            pairs(&FLOATS, &records(), |input, (shape, kv)| KvAppend { shape, kv, input, guard: false });
        let mut all = [plain, records].concat();
        // Counters of elements that are divided, copied, and of a record.
        let is_counted = |spec: &&KvAppend| {
            spec.input == Dtype::Bf16 && (spec.kv.layout == Dtype::E4m3.into() || !spec.kv.layout.is_plain())
                || spec.input == Dtype::F16 && spec.kv.layout == Dtype::F16.into()
        };
        let guarded: Vec<_> =
            all.iter().filter(is_counted).map(|&spec| KvAppend { guard: true, ..spec }).collect();
        all.extend(guarded);
        all
    }

    fn check(&self) -> Result<()> {
        MlaDecode { shape: self.shape, kv: self.kv, query: self.input, out: Dtype::F32 }.check()?;
        wide("kv_c and k_pe", self.input)
    }

    fn kv_layout(&self) -> Option<KvLayout> {
        Some(self.kv.layout)
    }

    fn map<'a, B: 'a, C>(
        &self,
        args: &'a KvAppendArgs<B>,
        mut f: impl FnMut(Use, &'a B) -> Result<C>,
    ) -> Result<KvAppendArgs<C>> {
        let rotary = if self.shape.qk_rope_head_dim > 0 { Use::Read("k_pe") } else { Use::Unread("k_pe") };
        Ok(KvAppendArgs {
            kv_c: args.kv_c.map(|buffer| f(Use::Read("kv_c"), buffer))?,
            k_pe: args.k_pe.map(|buffer| f(rotary, buffer))?,
            kv: args.kv.map(|buffer| f(Use::Write("kv"), buffer))?,
            k_scale: args.k_scale,
            guard: map_guard(&args.guard, f)?,
        })
    }

    fn check_args<B>(
        &self,
        args: &KvAppendArgs<&B>,
        max_tokens: u32,
        size: impl Fn(&B) -> u64 + Copy,
    ) -> Result<()> {
        self.kv.layout.check_scale(args.k_scale)?;
        check_guard(self.guard, args.guard.as_ref(), 1, size)?;
        args.kv.check(&self.kv, &self.shape, size)?;
        let MlaShape { kv_lora_rank, qk_rope_head_dim, .. } = self.shape;
        for (what, view, dim) in [("kv_c", args.kv_c, kv_lora_rank), ("k_pe", args.k_pe, qk_rope_head_dim)] {
            view.check(what, [max_tokens, 1, dim], self.input.bytes(), 4, size(view.buffer))?;
        }
        Ok(())
    }

    fn each_slab<B: Copy>(&self, args: &KvAppendArgs<B>) -> Vec<KvAppendArgs<B>> {
        args.kv.each_slab().map(|kv| KvAppendArgs { kv, ..*args }).collect()
    }

    fn fits(tokens: u32, max_tokens: u32) -> Result<(), &'static str> {
        if tokens > max_tokens {
            Err("the step appends more tokens than the binding's max_tokens")
        } else {
            Ok(())
        }
    }
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
impl TableOp for KvAppend {
    fn table(&self, slot_mapping: &[i64], check: impl FnOnce(u64) -> Result<()>) -> Result<StepTable<u32>> {
        check(slot_mapping.len() as u64)?;
        let words = self.slots(slot_mapping)?;
        let count = words.len() as u32;
        Ok(StepTable { count, words, extent: count })
    }
}
