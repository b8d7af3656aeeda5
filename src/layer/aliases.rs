//! Which arrays of a layer may overlap. Pure.
//!
//! Each op of a layer refuses one buffer for an array that it reads and another that it writes. This is about arrays of different ops,
//! which may be parts of one buffer, but must not overlap.

use std::ops::Range;

use super::{LayerCapacity, MlaLayer, MlaLayerArgs};
use crate::base::error::{Error, Result};
use crate::base::view::View;

/// An array of a layer: its bytes, counted from the front of its buffer.
struct Array<'a, B> {
    name: &'static str,
    buffer: &'a B,
    bytes: Range<i64>,
}

impl<'a, B> Array<'a, B> {
    fn new(name: &'static str, buffer: &'a B, elems: Range<u64>, bytes: usize) -> Self {
        let at = |elem: u64| i64::try_from(elem.saturating_mul(bytes as u64)).unwrap_or(i64::MAX);
        Self { name, buffer, bytes: at(elems.start)..at(elems.end) }
    }

    /// `[tokens, heads, dim]` elements.
    fn of(name: &'static str, view: View<&'a B>, dims: [u32; 3], bytes: usize) -> Self {
        let [tokens, heads, dim] = dims.map(u64::from);
        Self::new(name, view.buffer, view.offset..view.end(tokens, heads, dim), bytes)
    }

    fn overlaps(&self, other: &Self, offset: impl Fn(&B, &B) -> Option<i64>) -> bool {
        // In bytes after the front of this array's buffer.
        offset(self.buffer, other.buffer).is_some_and(|from| {
            let [begin, end] = [other.bytes.start, other.bytes.end].map(|at| at.saturating_add(from));
            begin < end && !self.bytes.is_empty() && begin < self.bytes.end && self.bytes.start < end
        })
    }
}

/// The cache and the output, which a layer writes, overlap neither each other nor what it reads. `offset` is that of
/// [`Op::check_aliases`](crate::Op::check_aliases).
///
/// # Errors
/// [`Error::Aliased`].
pub(super) fn check_aliases<B>(
    spec: &MlaLayer,
    args: &MlaLayerArgs<&B>,
    room: LayerCapacity,
    offset: impl Fn(&B, &B) -> Option<i64> + Copy,
) -> Result<()> {
    args.kv.check_slabs_apart(|a, b| offset(a, b))?;
    let MlaLayer { qk_nope_head_dim: nope, v_head_dim: value, .. } = *spec;
    let (heads, latent, rope) = (spec.shape.num_heads, spec.shape.kv_lora_rank, spec.shape.qk_rope_head_dim);
    let (tokens, dtype, row_elems) = (room.tokens, spec.dtype.bytes(), spec.shape.row_elems());
    let table = u64::from(args.max_position) * u64::from(rope);
    let mut read = vec![
        Array::of("q_nope", args.q_nope, [tokens, heads, nope], dtype),
        Array::of("q_pe", args.q_pe, [tokens, heads, rope], dtype),
        Array::of("kv_c", args.kv_c, [tokens, 1, latent], dtype),
        Array::of("k_pe", args.k_pe, [tokens, 1, rope], dtype),
        Array::new("kv_b_proj", args.kv_b_proj, 0..spec.dims().elements(), spec.weight.bytes()),
        Array::new("cos_sin", args.cos_sin, 0..table, 4),
    ];
    if let Some(expanded) = &args.expanded {
        let rows = room.prefix_rows;
        read.extend([
            Array::of("expanded.rows", expanded.rows, [rows, 1, row_elems], dtype),
            Array::of("expanded.k_nope", expanded.k_nope, [rows, heads, nope], dtype),
            Array::of("expanded.v", expanded.v, [rows, heads, value], dtype),
        ]);
    }
    let out = Array::of("out", args.out, [tokens, heads, value], dtype);
    let cache = args
        .kv
        .each_slab()
        .map(|slab| Array::new("kv", slab.buffer, slab.base()..slab.end(&spec.kv, &spec.shape), 1));
    let mut written: Vec<_> = cache.collect();
    if written.iter().any(|slab| slab.overlaps(&out, offset)) {
        return Err(Error::Aliased { a: "kv", b: "out" });
    }
    written.push(out);
    for b in &written {
        if let Some(a) = read.iter().find(|a| a.overlaps(b, offset)) {
            return Err(Error::Aliased { a: a.name, b: b.name });
        }
    }
    Ok(())
}
