//! Which arrays of a layer may overlap. Pure.
//!
//! Each op of a layer refuses one buffer for an array that it reads and another that it writes. This is about arrays of different ops,
//! which may be parts of one buffer, but must not overlap.

use std::ops::Range;

use super::selects::Lists;
use super::{LayerCapacity, LayerGuard, LayerIndexer, MlaLayer, MlaLayerArgs, Selection};
use crate::base::error::{Error, Result};
use crate::base::view::View;
use crate::cache::{INDEX_DIM, KvSpec, KvView, MlaShape};
use crate::ops::composes::Composes;
use crate::ops::{INDEX_ROPE_DIM, INDEX_SHAPE};

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
    let written = written(spec, args, room);
    // Behind the cache are the output and perhaps counters.
    let (cache, others) = written.split_at(written.len() - if args.guard.is_some() { 2 } else { 1 });
    apart(cache, others, offset)?;
    apart(&others[..1], &others[1..], offset)?;
    apart(&read(spec, args, room), &written, offset)
}

/// The same for a selection: the index cache and a list of the layer's own are written too.
///
/// # Errors
/// [`Error::Aliased`].
pub(super) fn check_selection<D: Composes>(
    spec: &MlaLayer,
    args: &MlaLayerArgs<&D::Buffer>,
    room: LayerCapacity,
    lists: &Lists<D>,
) -> Result<()> {
    let LayerCapacity { tokens, decode_tokens, .. } = room;
    let list = |view| Array::of("selection.indices", view, [decode_tokens, 1, lists.topk], 4);
    let (mut also_read, mut also_written) = (Vec::new(), Vec::new());
    match (&args.selection, &lists.indexer) {
        (Selection::Own(own), Some(indexer)) => {
            let LayerIndexer { num_heads, input, .. } = indexer.options;
            let index = indexer.options.index(spec);
            let table = u64::from(own.max_position) * u64::from(INDEX_ROPE_DIM);
            let norm = u64::from(INDEX_DIM);
            also_read.extend([
                Array::of("selection.k", own.k, [tokens, 1, INDEX_DIM], input.bytes()),
                Array::of("selection.q", own.q, [decode_tokens, num_heads, INDEX_DIM], input.bytes()),
                Array::of("selection.weights", own.weights, [decode_tokens, num_heads, 1], 4),
                Array::new("selection.norm_weight", own.norm_weight, 0..norm, 4),
                Array::new("selection.norm_bias", own.norm_bias, 0..norm, 4),
                Array::new("selection.cos_sin", own.cos_sin, 0..table, 4),
            ]);
            also_written.extend(slabs("selection.cache", &own.cache, &index.kv(), &INDEX_SHAPE));
            also_written.push(list(own.indices));
        }
        (Selection::Shared(view), _) => also_read.push(list(*view)),
        _ => {}
    }
    let (read, written) = (read(spec, args, room), written(spec, args, room));
    apart(&also_read, &written, D::offset)?;
    for others in [&read, &written, &also_read] {
        apart(others, &also_written, D::offset)?;
    }
    // The last is the list.
    let (cache, list) = also_written.split_at(also_written.len().saturating_sub(1));
    apart(cache, list, D::offset)
}

/// What every layer reads.
fn read<'a, B>(spec: &MlaLayer, args: &MlaLayerArgs<&'a B>, room: LayerCapacity) -> Vec<Array<'a, B>> {
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
    if let Some(scales) = args.kv_b_scales {
        read.push(Array::new("kv_b_scales", scales, 0..2 * u64::from(heads), 4));
    }
    if let Some(expanded) = &args.expanded {
        let rows = room.prefix_rows;
        read.extend([
            Array::of("expanded.rows", expanded.rows, [rows, 1, row_elems], dtype),
            Array::of("expanded.k_nope", expanded.k_nope, [rows, heads, nope], dtype),
            Array::of("expanded.v", expanded.v, [rows, heads, value], dtype),
        ]);
    }
    read
}

/// What every layer writes: the cache, then the output, then counters, if it has them.
fn written<'a, B>(spec: &MlaLayer, args: &MlaLayerArgs<&'a B>, room: LayerCapacity) -> Vec<Array<'a, B>> {
    let dims = [room.tokens, spec.shape.num_heads, spec.v_head_dim];
    let mut written: Vec<_> = slabs("kv", &args.kv, &spec.kv, &spec.shape).collect();
    written.push(Array::of("out", args.out, dims, spec.out.bytes()));
    if let Some(guard) = &args.guard {
        written.push(Array::new("guard", guard.counters, guard.bytes(LayerGuard::ROWS), 1));
    }
    written
}

/// The arrays of a cache.
fn slabs<'a, B>(
    name: &'static str,
    cache: &KvView<&'a B>,
    kv: &KvSpec,
    shape: &MlaShape,
) -> impl Iterator<Item = Array<'a, B>> {
    cache.each_slab().map(move |slab| Array::new(name, slab.buffer, slab.base()..slab.end(kv, shape), 1))
}

/// # Errors
/// [`Error::Aliased`] for one of the first that overlaps one of the others.
fn apart<B>(
    all: &[Array<'_, B>],
    others: &[Array<'_, B>],
    offset: impl Fn(&B, &B) -> Option<i64> + Copy,
) -> Result<()> {
    for b in others {
        if let Some(a) = all.iter().find(|a| a.overlaps(b, offset)) {
            return Err(Error::Aliased { a: a.name, b: b.name });
        }
    }
    Ok(())
}
