//! Host memory as a backend's buffer: shared, zeroed, 4-byte aligned, and written by several threads at once.

use std::alloc::Layout;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::base::error::{Error, Result};

/// Host memory that the CPU backend's kernels read and write. Clones share it.
///
/// Words are atomics, so that threads that own different elements of a buffer need no unsafe code to write them;
/// a lock around all of them keeps a call's inputs still while it runs.
#[derive(Clone)]
pub struct Buffer {
    words: Arc<RwLock<Vec<AtomicU32>>>,
    /// Its length in words, which needs no lock.
    len: usize,
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer").field("bytes", &self.bytes()).finish()
    }
}

impl Buffer {
    pub(super) fn new(bytes: u64) -> Result<Self> {
        let out_of_memory = Error::OutOfMemory { what: "a buffer" };
        let words = usize::try_from(bytes.div_ceil(4)).map_err(|_| out_of_memory)?;
        Ok(Self { words: Arc::new(RwLock::new(zeroed(words, "a buffer")?)), len: words })
    }

    /// Bytes that it holds, a multiple of 4.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.len as u64 * 4
    }

    pub(super) fn same_as(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.words, &other.words)
    }

    pub(super) fn upload(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        aligned("upload offset", offset)?;
        aligned("upload length", bytes.len() as u64)?;
        let mut words = self.write();
        let range = word_range("upload", offset, bytes.len() as u64, words.len())?;
        bytemuck::cast_slice_mut(&mut exclusive(&mut words)[range]).copy_from_slice(bytes);
        Ok(())
    }

    pub(super) fn download(&self, bytes: u64) -> Result<Vec<u8>> {
        aligned("download length", bytes)?;
        let words = self.read();
        let range = word_range("download", 0, bytes, words.len())?;
        let mut out = Vec::new();
        let out_of_memory = |_| Error::OutOfMemory { what: "a download" };
        out.try_reserve_exact(range.len() * 4).map_err(out_of_memory)?;
        out.extend_from_slice(bytemuck::cast_slice(&frozen(&words)[range]));
        Ok(out)
    }

    fn read(&self) -> RwLockReadGuard<'_, Vec<AtomicU32>> {
        // A panic elsewhere cannot leave words half written.
        self.words.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Vec<AtomicU32>> {
        self.words.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Words that no one writes for as long as the guard is borrowed.
fn frozen<'a>(guard: &'a RwLockReadGuard<'_, Vec<AtomicU32>>) -> &'a [u32] {
    let words: &[AtomicU32] = guard;
    // SAFETY: an AtomicU32 has the layout of a u32, and words are stored to under the write lock only.
    unsafe { &*(std::ptr::from_ref(words) as *const [u32]) }
}

/// The words for writing: the guard is exclusive.
pub(super) fn exclusive(words: &mut [AtomicU32]) -> &mut [u32] {
    // SAFETY: an AtomicU32 has the layout of a u32, and the borrow is exclusive.
    unsafe { &mut *(std::ptr::from_mut(words) as *mut [u32]) }
}

fn aligned(what: &'static str, got: u64) -> Result<()> {
    if !got.is_multiple_of(4) {
        return Err(Error::Alignment { what, got, of: 4, unit: "bytes" });
    }
    Ok(())
}

fn word_range(what: &'static str, offset: u64, bytes: u64, words: usize) -> Result<std::ops::Range<usize>> {
    let (end, size) = (offset.saturating_add(bytes), words as u64 * 4);
    if end > size {
        return Err(Error::BufferTooSmall { what, end, size });
    }
    Ok(offset as usize / 4..end as usize / 4)
}

/// How a call uses a buffer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
}

enum Guard<'a> {
    Read(RwLockReadGuard<'a, Vec<AtomicU32>>),
    Write(RwLockWriteGuard<'a, Vec<AtomicU32>>),
}

/// The buffers of one call, locked. Argument `i` of [`lock`] is `words(i)` or `bytes(i)`.
pub(super) struct Locked<'a, const N: usize> {
    guards: [Option<Guard<'a>>; N],
    /// Which guard holds each argument.
    at: [usize; N],
}

/// Locks every buffer of a call once: a buffer may stand for several arguments, all read or all written.
///
/// The locks are taken in the order of addresses, so that calls on several threads never wait for each other in
/// a circle.
pub(super) fn lock<'a, const N: usize>(uses: [(&'a Buffer, Access); N]) -> Locked<'a, N> {
    let address = |i: usize| Arc::as_ptr(&uses[i].0.words).addr();
    let mut order: [usize; N] = std::array::from_fn(|i| i);
    order.sort_unstable_by_key(|&i| address(i));
    let mut locked = Locked { guards: [const { None }; N], at: [0; N] };
    let mut last: Option<usize> = None;
    for i in order {
        let first = match last {
            Some(first) if address(first) == address(i) => first,
            _ => {
                let (buffer, access) = uses[i];
                locked.guards[i] = Some(match access {
                    Access::Read => Guard::Read(buffer.read()),
                    Access::Write => Guard::Write(buffer.write()),
                });
                *last.insert(i)
            }
        };
        locked.at[i] = first;
    }
    locked
}

impl<const N: usize> Locked<'_, N> {
    /// The words of an argument that is written.
    pub(super) fn words(&self, argument: usize) -> &[AtomicU32] {
        match &self.guards[self.at[argument]] {
            Some(Guard::Write(words)) => words,
            _ => &[],
        }
    }

    /// The bytes of an argument that is read.
    pub(super) fn bytes(&self, argument: usize) -> &[u8] {
        match &self.guards[self.at[argument]] {
            Some(Guard::Read(words)) => bytemuck::cast_slice(frozen(words)),
            _ => &[],
        }
    }
}

/// A cache line of scratch.
#[repr(C, align(64))]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub(super) struct Line(pub(super) [f32; 16]);

/// # Safety
/// All bytes zero are a value of the type, and it has nothing to drop.
pub(super) unsafe trait Zero {}
// SAFETY: zero is an AtomicU32.
unsafe impl Zero for AtomicU32 {}
// SAFETY: zero is a u32.
unsafe impl Zero for u32 {}
// SAFETY: zeros are a line of floats.
unsafe impl Zero for Line {}

/// Zeroed memory, or an error where there is not enough; large pieces are not touched until they are used.
pub(super) fn zeroed<T: Zero>(len: usize, what: &'static str) -> Result<Vec<T>> {
    let layout = Layout::array::<T>(len).map_err(|_| Error::OutOfMemory { what })?;
    if layout.size() == 0 {
        return Ok(Vec::new());
    }
    // SAFETY: the layout has a size; a null pointer is handled; what is left is `len` zeroed values that came from
    // the global allocator with the layout that Vec will free.
    unsafe {
        let memory = std::alloc::alloc_zeroed(layout).cast::<T>();
        if memory.is_null() {
            return Err(Error::OutOfMemory { what });
        }
        Ok(Vec::from_raw_parts(memory, len, len))
    }
}

/// Stores `count` elements of `element_bytes` bytes, the first at element `first` of a buffer. Words that the row
/// shares with another row are changed atomically, in its own part only.
pub(super) fn store_elements(
    words: &[AtomicU32],
    element_bytes: usize,
    first: usize,
    count: usize,
    bits: impl Fn(usize) -> u32,
) {
    // Constants, so that nothing is divided in the loop.
    match element_bytes {
        1 => store::<1>(words, first, count, bits),
        2 => store::<2>(words, first, count, bits),
        _ => store::<4>(words, first, count, bits),
    }
}

fn store<const BYTES: usize>(words: &[AtomicU32], first: usize, count: usize, bits: impl Fn(usize) -> u32) {
    let per_word = 4 / BYTES;
    let mut done = 0;
    while done < count {
        let at = first + done;
        let lane = at % per_word;
        let many = (per_word - lane).min(count - done);
        let word = &words[at / per_word];
        let (mut value, mut mask) = (0, 0);
        for i in 0..many {
            let shift = (lane + i) * BYTES * 8;
            value |= bits(done + i) << shift;
            mask |= (u32::MAX >> (32 - BYTES * 8)) << shift;
        }
        if many == per_word {
            word.store(value, Ordering::Relaxed);
        } else {
            let merge = |old| Some(old & !mask | value);
            let _ = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, merge);
        }
        done += many;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_land_where_they_belong() {
        let buffer = Buffer::new(16).unwrap();
        buffer.upload(0, &[0xAA; 16]).unwrap();
        store_elements(lock([(&buffer, Access::Write)]).words(0), 2, 1, 4, |i| 0x1110 + i as u32);
        let want = [0xAA, 0xAA, 0x10, 0x11, 0x11, 0x11, 0x12, 0x11, 0x13, 0x11, 0xAA];
        assert_eq!(buffer.download(16).unwrap()[..11], want);
        store_elements(lock([(&buffer, Access::Write)]).words(0), 1, 2, 3, |i| i as u32);
        assert_eq!(buffer.download(8).unwrap(), [0xAA, 0xAA, 0, 1, 2, 0x11, 0x12, 0x11]);
    }

    #[test]
    fn a_buffer_bound_twice_is_locked_once() {
        let (a, b) = (Buffer::new(4).unwrap(), Buffer::new(4).unwrap());
        let locked = lock([(&a, Access::Read), (&b, Access::Write), (&a, Access::Read), (&b, Access::Write)]);
        locked.words(1)[0].store(7, Ordering::Relaxed);
        assert_eq!(locked.words(3)[0].load(Ordering::Relaxed), 7);
        assert_eq!(locked.bytes(2), [0; 4]);
    }
}
