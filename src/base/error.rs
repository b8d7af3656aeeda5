//! Every way a call can fail. Each message names the cure.

use crate::base::dtype::Dtype;

/// The result of a fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What was wrong with a call, and what to do about it: the message of each names the cure.
///
/// Everything a caller hands over is checked before a command is recorded, so an error leaves the caller's buffers, encoder and pool as
/// they were. Sizes are in the unit that the field names: bytes, elements, tokens or pages.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A number that the op does not serve or that contradicts another: a dim, a count, a stride, a range, an index. Pass what `cure` says.
    #[error("{what} {got}: {cure}")]
    Shape {
        /// The field at fault.
        what: &'static str,
        /// Its value.
        got: u64,
        /// What it must be.
        cure: &'static str,
    },
    /// A slice has another number of entries than its batch, spec or dims need. Pass exactly `want` of them.
    #[error("{what} has {got} entries, {want} are needed: {cure}")]
    Length {
        /// The array at fault.
        what: &'static str,
        /// Its length.
        got: u64,
        /// The length it must have.
        want: u64,
        /// What to do.
        cure: &'static str,
    },
    /// A buffer ends before the view that was described on it. Make the buffer larger, or correct the view's offset, strides or counts.
    #[error(
        "{what}: the view ends at byte {}, the buffer has {size}: make the buffer larger or correct the offset, strides or counts",
        counted(*end)
    )]
    BufferTooSmall {
        /// The buffer at fault.
        what: &'static str,
        /// First byte past the view; `u64::MAX` where it is past all that 64 bits count.
        end: u64,
        /// Bytes in the buffer.
        size: u64,
    },
    /// An offset, stride or length is no multiple of what kernels or copies read at a time. Round it up to a multiple of `of`.
    #[error("{what} {got}: must be a multiple of {of} {unit}")]
    Alignment {
        /// The field at fault.
        what: &'static str,
        /// Its value.
        got: u64,
        /// The multiple.
        of: u64,
        /// The unit of both.
        unit: &'static str,
    },
    /// A dtype that this argument cannot have. Use one of those that `cure` names.
    #[error("{what} cannot be {got}: {cure}")]
    DtypeUnsupported {
        /// The argument at fault.
        what: &'static str,
        /// Its dtype.
        got: Dtype,
        /// What it can be.
        cure: &'static str,
    },
    /// A layout of the cache that this op has no kernel for on this backend. Use one that `cure` names.
    #[error("{op} has no kernel here for a cache of {layout}: {cure}")]
    LayoutUnsupported {
        /// The op.
        op: &'static str,
        /// The layout.
        layout: &'static str,
        /// What can be used.
        cure: &'static str,
    },
    /// A factor outside of its range, such as zero, negative, infinite, NaN, or so small that its reciprocal is infinite; or a product of
    /// factors by which logits cannot be scaled, because it is too small or too large. Pass one in the range that `cure` names.
    #[error("{what} {}: {cure}", number(*.got))]
    Scale {
        /// The factor at fault, or the product.
        what: &'static str,
        /// Its value.
        got: f64,
        /// The range.
        cure: &'static str,
    },
    /// A `k_scale` or `q_scale` other than 1 for elements that are no FP8 codes. Pass 1, or use e4m3.
    #[error("{what} {got}: {dtype} elements have no scale: pass 1, or use e4m3")]
    ScaleWithoutCodes {
        /// Which scale.
        what: &'static str,
        /// What it was.
        got: f32,
        /// What the elements are.
        dtype: Dtype,
    },
    /// A weight that is not finite, or past the largest finite number of the dtype that was asked for. Prepare it in bf16 or f32, or
    /// correct the checkpoint.
    #[error(
        "kv_b_proj.weight[{index}] = {value} is no finite {dtype}: prepare it in bf16 or f32, or correct the checkpoint where it is not finite"
    )]
    WeightRange {
        /// Index of the element.
        index: u64,
        /// Its value, scaled if it is e4m3.
        value: f32,
        /// The dtype that was asked for.
        dtype: Dtype,
    },
    /// Weights of a projection without the scales that their format needs, or with scales that it does not have. Do what `cure` says.
    #[error("weights of {format} {cure}")]
    WeightScales {
        /// Their format.
        format: &'static str,
        /// What to do.
        cure: &'static str,
    },
    /// A page id, in the used part of a block table, that is not in the pool. Make the table anew from the pool that owns the cache.
    #[error(
        "sequence {seq}, block {block}: page {page} is not in the pool of {num_pages} pages: rebuild the block table from the pool"
    )]
    PageOutOfRange {
        /// Index of the sequence in the batch.
        seq: usize,
        /// Index of the page in the sequence.
        block: usize,
        /// The id found there.
        page: i64,
        /// Pages in the pool.
        num_pages: u32,
    },
    /// Two sequences of a shared prefix whose block tables differ within it. Share fewer tokens, or fork one from the other.
    #[error(
        "shared prefix: block {block} of sequences {first} and {other} is not the same page: share fewer tokens, or fork the sequence from the other"
    )]
    PrefixNotShared {
        /// First sequence of the group.
        first: u32,
        /// The one that differs.
        other: u32,
        /// Index of the page in both.
        block: usize,
    },
    /// A slot of a `slot_mapping` that is not in the pool. Make the mapping from the pool; a negative slot skips its token.
    #[error(
        "slot_mapping[{index}] = {slot}: the pool has {num_slots} slots; use a negative slot to skip a token"
    )]
    SlotOutOfRange {
        /// Index in the mapping.
        index: usize,
        /// The slot found there.
        slot: i64,
        /// Slots in the pool: pages times page_size.
        num_slots: u64,
    },
    /// A new token that a layer would write to another slot than its block table has for it, so that it would never be read. Make mapping
    /// and table from one pool, after its append.
    #[error(
        "slot_mapping[{index}] = {slot}, but the block table has that token in slot {want}: make both from one pool, after its append; negative if the token is in the cache already"
    )]
    SlotMismatch {
        /// Index of the query token.
        index: usize,
        /// The slot found there.
        slot: i64,
        /// Where the block table has the token.
        want: i64,
    },
    /// Two tokens of one append go to the same slot, so the result would depend on timing. Give each a slot of its own.
    #[error(
        "slot_mapping[{first}] and slot_mapping[{second}] are both slot {slot}: give each token a slot of its own"
    )]
    SlotOverlap {
        /// Index of the first token.
        first: usize,
        /// Index of the second token.
        second: usize,
        /// The slot of both.
        slot: i64,
    },
    /// Two sequences of a batch that write new tokens to one page, so that each reads what the other wrote. A page that is written belongs
    /// to one sequence: copy it first, as [`PagePool::append`](crate::PagePool::append) asks for.
    #[error(
        "sequences {first} and {other} both write to page {page}: a page that is written belongs to one sequence; copy it first, as PagePool::append asks for"
    )]
    PageWrittenTwice {
        /// Index of a sequence in the batch.
        first: usize,
        /// Index of the other.
        other: usize,
        /// The page.
        page: u32,
    },
    /// A range of a gather that names a sequence, tokens or rows that are not there. Do what `cure` says.
    #[error("gather range {index}: {what} {got}, the limit is {limit}: {cure}")]
    GatherRange {
        /// Index of the range.
        index: usize,
        /// What is wrong with it.
        what: &'static str,
        /// Its value.
        got: u64,
        /// The largest that it may be.
        limit: u64,
        /// What to do.
        cure: &'static str,
    },
    /// Two ranges of one gather write the same row, so the result would depend on timing. Give each token a row of its own.
    #[error("gather ranges {first} and {second} both write row {row}: give each token a row of its own")]
    GatherOverlap {
        /// Index of the range that begins first.
        first: usize,
        /// Index of the other range.
        second: usize,
        /// The first row of both.
        row: u64,
    },
    /// A list of page copies that would depend on the order in which a GPU runs them, or that names a page outside the pool. `why` has the
    /// cure, such as a second call.
    #[error("copy {index}: page {page} {why}")]
    CopyConflict {
        /// Index of the pair in the list.
        index: usize,
        /// The page at fault.
        page: u32,
        /// What is wrong, and the cure.
        why: &'static str,
    },
    /// The pool has fewer free pages than were asked for. No sequence was changed. Free or truncate a sequence, or make a larger pool.
    #[error("out of pages: {wanted} wanted, {free} free of {total}: free a sequence or make the pool larger")]
    OutOfPages {
        /// Pages that the call needs.
        wanted: u64,
        /// Pages that are free.
        free: u32,
        /// Pages in the pool.
        total: u32,
    },
    /// A handle of a sequence that was freed. Add or fork another.
    #[error("sequence {number} is no longer in the pool: it was freed; add or fork another")]
    UnknownSequence {
        /// [`crate::SeqId::number`] of the handle.
        number: u64,
    },
    /// A handle of a sequence of another pool. Use it with the pool that made it.
    #[error("sequence {number} is of another pool: use it with the pool that made it")]
    OtherPool {
        /// [`crate::SeqId::number`] of the handle.
        number: u64,
    },
    /// A plan or block table that was made for another cache or other heads than the op was compiled for. Make both from one spec.
    #[error("{what} is {got}, the op was compiled for {want}: make both from one spec")]
    OtherSpec {
        /// What differs.
        what: &'static str,
        /// What the plan or table was made for.
        got: u32,
        /// What the op was compiled for.
        want: u32,
    },
    /// A `query_start_loc` that does not begin at 0 or that goes down. [`crate::query_start_loc`] makes it from the number of each
    /// sequence's query tokens.
    #[error("query_start_loc[{index}] = {got}: must start at 0 and never go down")]
    QueryStartLoc {
        /// Index of the entry at fault.
        index: usize,
        /// Its value.
        got: i64,
    },
    /// A `seq_lens` entry that is negative, or larger than the pool or the sequence's pages hold. Append pages first, or correct it.
    #[error("seq_lens[{seq}] = {got}: must be 0 to {max}: {cure}")]
    SeqLen {
        /// Index of the sequence.
        seq: usize,
        /// Its length.
        got: i64,
        /// The largest length possible.
        max: i64,
        /// What bounds it, and what to do.
        cure: &'static str,
    },
    /// A `kv_indptr` that is negative, goes down, or ends behind `kv_indices`, so that it names no pages. Make both from one list of pages:
    /// [`PagePool::csr`](crate::PagePool::csr) does.
    #[error(
        "kv_indptr[{index}] = {got}: must be {least} to {most}: it never goes down, and ends within kv_indices; correct kv_indptr, or hand over all of kv_indices"
    )]
    KvIndptr {
        /// Index of the entry at fault.
        index: usize,
        /// Its value.
        got: i64,
        /// The entry before it.
        least: i64,
        /// The length of `kv_indices`.
        most: u64,
    },
    /// A sequence with more query tokens than tokens. `seq_lens` counts this step's tokens too: correct it or `query_start_loc`.
    #[error(
        "sequence {seq} has {got} query tokens and seq_lens[{seq}] = {seq_len}: seq_lens counts the tokens in the cache, this step's included; correct it or query_start_loc"
    )]
    QueryLen {
        /// Index of the sequence.
        seq: usize,
        /// Its query tokens.
        got: u32,
        /// Its length.
        seq_len: u32,
    },
    /// A plan or batch that needs more than was reserved for it. Reserve `need`, or use a smaller batch.
    #[error("{what} is {got}, {need} are needed: {cure}")]
    Capacity {
        /// The field that is too small.
        what: &'static str,
        /// What it is.
        got: u64,
        /// What it has to be.
        need: u64,
        /// What to do.
        cure: &'static str,
    },
    /// More than a device allows, or than 32 bits count. Do what `cure` says, such as to ask for higher limits or use a smaller batch.
    #[error("{what}: {} needed, the limit is {limit}: {cure}", counted(*need))]
    Limit {
        /// What is limited.
        what: &'static str,
        /// What the call needs; `u64::MAX` where that is past all that 64 bits count.
        need: u64,
        /// The most there can be.
        limit: u64,
        /// What to do.
        cure: &'static str,
    },
    /// The host has no memory for a table of cosines and sines. Ask for fewer positions.
    #[error(
        "cos_sin of {max_position} positions takes {bytes} bytes, which the host has no memory for: pass the model's max_position_embeddings, or the longest sequence that is served"
    )]
    TableMemory {
        /// The positions that were asked for.
        max_position: u32,
        /// Bytes that the table would take.
        bytes: u64,
    },
    /// A kernel variant was forced that there is not, or that this device or spec cannot run. Force another, or none;
    /// [`Device::variants`](crate::Device::variants) lists them.
    #[error("variant {name} cannot run here: {why}; force another, or none")]
    VariantUnavailable {
        /// Name of the variant.
        name: String,
        /// What is missing.
        why: String,
    },
    /// No kernel variant of an op runs on this device. Use other dtypes or dims, or another backend.
    #[error("no kernel variant runs here: {why}; use other dtypes or dims, or another backend")]
    NoVariant {
        /// What each variant lacks.
        why: String,
    },
    /// Two arguments that must be different buffers are one, or overlap. Use two; parts of one that do not overlap may be used on wgpu with
    /// `Setup::shared_buffers`.
    #[error(
        "{a} and {b} are the same buffer: a shader may not read and write one buffer; use two, or for parts of one that do not overlap on wgpu `gpu::Setup::shared_buffers`"
    )]
    Aliased {
        /// One argument.
        a: &'static str,
        /// The other.
        b: &'static str,
    },
    /// A wgpu buffer lacks a usage flag. Add it where the buffer is created.
    #[error("{what}: the buffer lacks usage {usage}: add it where the buffer is created")]
    BufferUsage {
        /// The buffer.
        what: &'static str,
        /// The missing flag.
        usage: &'static str,
    },
    /// Arguments of a call that were not made for each other, such as a step and a binding. Make both with the op that records them, or do
    /// what `detail` says.
    #[error("what is given does not go together: {detail}")]
    LayoutMismatch {
        /// What differs.
        detail: &'static str,
    },
    /// A buffer, step or binding that another backend made. Make it with this one; [`Device::download`](crate::Device::download) and
    /// [`Device::upload`](crate::Device::upload) copy.
    #[error(
        "the {what} is one of {of}, not of {here}, and memory is never shared silently: make it with this backend, and copy by `download` and `upload`"
    )]
    OtherBackend {
        /// What was passed.
        what: &'static str,
        /// The backend that made it.
        of: &'static str,
        /// The backend that it was passed to.
        here: &'static str,
    },
    /// wgpu found no adapter. Install a Vulkan driver (Mesa's lavapipe is one in software), or use the CPU backend.
    #[error(
        "no GPU adapter: {detail}; install a Vulkan driver (on Debian `mesa-vulkan-drivers` is one in software), or use the CPU backend"
    )]
    NoAdapter {
        /// What was asked and what was there.
        detail: String,
    },
    /// No CUDA device can be used. Install NVIDIA's driver, or use the wgpu backend.
    #[error("no CUDA device: {detail}; install NVIDIA's driver (520 or later), or use the wgpu backend")]
    NoCuda {
        /// What is missing.
        detail: String,
    },
    /// A call of the CUDA driver failed. If the device is lost, make a new context and everything on it again.
    #[error(
        "CUDA failed {what}: {detail}; if the device is lost, make a new context and everything on it again"
    )]
    Cuda {
        /// What was being done.
        what: &'static str,
        /// What the driver said.
        detail: String,
    },
    /// NCCL cannot be used. Install it and put its folder on the library path, or use another communicator.
    #[error(
        "no NCCL: {detail}; install NCCL 2.14 or later (pip's nvidia-nccl-cu12 has it) and put its folder on LD_LIBRARY_PATH, or use another communicator"
    )]
    NoNccl {
        /// What is missing.
        detail: String,
    },
    /// An exchange between ranks did not come about: a rank is gone, failed, did not come within the time-out, or passed something else.
    /// The group is of no use after that. Find out why at the rank that is named, and make a new group on every rank.
    #[error("rank {rank}: {what} between the ranks failed: {detail}; make a new group on every rank")]
    Exchange {
        /// What was being done.
        what: &'static str,
        /// The rank that says so.
        rank: u32,
        /// What happened, with the rank at fault where it is known.
        detail: String,
    },
    /// The ranks of a group are not at the same step, or were not set up alike; or one rank contradicts itself, and is both `first` and
    /// `other`, such as a `ContextParallel` of another rank than its communicator's. [`StepDigest::agree`] gives every rank this error.
    /// Do what `cure` says.
    ///
    /// [`StepDigest::agree`]: crate::communicator::StepDigest::agree
    #[error("{}: {cure}", what_differs(.what, *.first, .first_has, *.other, .other_has))]
    RanksDiffer {
        /// What differs.
        what: &'static str,
        /// A rank.
        first: u32,
        /// What it has.
        first_has: String,
        /// The first rank that has something else; the same one where it contradicts itself.
        other: u32,
        /// What that one has.
        other_has: String,
        /// What to do.
        cure: &'static str,
    },
    /// The adapter refused to make the device. Ask for fewer features or lower limits, or use another adapter or driver.
    #[error(
        "the adapter refused the device: {detail}; ask for fewer features or lower limits, or use another adapter or driver"
    )]
    Device {
        /// What wgpu said.
        detail: String,
    },
    /// The device was lost; every object made from it is dead. Make a new device and everything on it again.
    #[error("device lost: {detail}; make a new device and everything on it again")]
    DeviceLost {
        /// What wgpu said.
        detail: String,
    },
    /// A call would wait for the device, which a browser does not allow. Use the asynchronous call that `cure` names.
    #[error("{what} would wait for the device, which a browser does not allow: {cure}")]
    Waits {
        /// What was called.
        what: &'static str,
        /// What to do.
        cure: &'static str,
    },

    /// The device, or the host, has no memory left for this call. Use a smaller pool, batch or context.
    #[error("out of memory for {what}: use a smaller pool, batch or context")]
    OutOfMemory {
        /// What was being made.
        what: &'static str,
    },
    /// wgpu rejected a buffer, queue or adapter of the host. Use those of the device that the `Gpu` was made on, neither mapped nor
    /// destroyed.
    #[error(
        "wgpu rejected {what}: {detail}; use buffers and the queue of the device that the `Gpu` was made on, neither mapped nor destroyed"
    )]
    ForeignResource {
        /// What they were used for.
        what: &'static str,
        /// What wgpu said.
        detail: String,
    },
    /// wgpu rejected something that this crate made: a bug of this crate. Please report it, with the message.
    #[error("wgpu rejected {what}: {detail}; this is a bug of wgpu-mla, please report it")]
    Internal {
        /// What was being made.
        what: &'static str,
        /// What wgpu said.
        detail: String,
    },
}

/// The number in the fewest digits that tell it from others; one that an f32 holds is shown as an f32.
fn number(x: f64) -> String {
    let narrow = x as f32;
    if f64::from(narrow) == x { format!("{narrow:?}") } else { format!("{x:?}") }
}

fn what_differs(what: &str, first: u32, first_has: &str, other: u32, other_has: &str) -> String {
    if first == other {
        format!("rank {first} has {first_has} and {other_has} as {what}")
    } else {
        format!("the ranks differ in {what}: rank {first} has {first_has}, rank {other} has {other_has}")
    }
}

/// A number that a check counted in 64 bits, saturating.
fn counted(number: u64) -> String {
    if number == u64::MAX { "2^64 or more".to_owned() } else { number.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_past_64_bits_is_not_shown_as_a_number() {
        let small = Error::BufferTooSmall { what: "kv", end: u64::MAX, size: 16 };
        assert!(small.to_string().starts_with("kv: the view ends at byte 2^64 or more, the buffer has 16"));
        let limit = Error::Limit { what: "bytes", need: u64::MAX, limit: u64::MAX - 1, cure: "use fewer" };
        assert_eq!(
            limit.to_string(),
            "bytes: 2^64 or more needed, the limit is 18446744073709551614: use fewer"
        );
        assert_eq!((counted(0), counted(u64::MAX - 1)), ("0".to_owned(), "18446744073709551614".to_owned()));
    }
}
