//! Memory of the cards, which the interpreter maps too: two files, of the bytes and of the rights to each byte.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{c_uchar, c_uint, c_void};
use std::fs::File;
use std::path::{Path, PathBuf};

use cudarc::driver::sys::{CUdeviceptr, CUresult, CUstream};
use memmap2::MmapRaw;

use crate::state::{card, code, state};
use crate::streams::{self, Work};

/// Where the address space of the cards begins: `BASE` of scripts/ptxemu/memory.py.
pub const BASE: u64 = 0x7F00_0000_0000;
/// What can be addressed. The files have holes: only what is written takes room.
const SIZE: u64 = 64 << 30;
/// The first part is the interpreter's, for the parameters of launches.
const FIRST: u64 = 16 << 20;
/// Between allocations: wider than any access.
const GAP: u64 = 4096;
/// What memory holds that nobody has written: NaN in every dtype.
const POISON: u8 = 0xFF;
const READ_AND_WRITE: u8 = 3;

thread_local! {
    /// How many allocations of this thread succeed before one is refused.
    static REFUSAL: Cell<Option<u64>> = const { Cell::new(None) };
}

pub struct Memory {
    folder: PathBuf,
    bytes: MmapRaw,
    rights: MmapRaw,
    /// By offset: bytes, and the card.
    live: BTreeMap<u64, (u64, usize)>,
    /// What was freed, by its room.
    free: BTreeMap<u64, Vec<u64>>,
    end: u64,
}

impl Memory {
    pub fn new() -> Self {
        let shared = Path::new("/dev/shm");
        let folder = if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() };
        let folder = folder.join(format!("emulated-cuda-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder for the memory");
        let map = |name| {
            let path = folder.join(name);
            let file = File::options().read(true).write(true).create(true).truncate(true).open(path);
            let file = file.expect("a file for the memory");
            file.set_len(SIZE).expect("a file with holes");
            MmapRaw::map_raw(&file).expect("mapped memory")
        };
        let (bytes, rights) = (map("bytes"), map("rights"));
        Self { folder, bytes, rights, live: BTreeMap::new(), free: BTreeMap::new(), end: FIRST }
    }

    /// The folder of both files, `bytes` and `rights`.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Up to where the memory was ever used.
    pub fn end(&self) -> u64 {
        self.end
    }

    fn allocate(&mut self, bytes: u64, card: usize) -> Result<u64, CUresult> {
        match REFUSAL.get() {
            Some(0) => {
                REFUSAL.set(None);
                return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
            }
            left => REFUSAL.set(left.map(|left| left - 1)),
        }
        let room = bytes.checked_next_multiple_of(256).and_then(|bytes| bytes.checked_add(GAP));
        let room = room.filter(|&room| bytes > 0 && room < SIZE).ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        let at = match self.free.get_mut(&room).and_then(Vec::pop) {
            Some(at) => at,
            None if self.end + room > SIZE => return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY),
            None => {
                self.end += room;
                self.end - room
            }
        };
        self.fill(at, bytes, POISON);
        self.give_rights(at, bytes, READ_AND_WRITE);
        self.live.insert(at, (bytes, card));
        Ok(BASE + at)
    }

    fn release(&mut self, address: u64) -> Result<(), CUresult> {
        let at = address.checked_sub(BASE).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let (bytes, _) = self.live.remove(&at).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        self.give_rights(at, bytes, 0);
        self.free.entry(bytes.next_multiple_of(256) + GAP).or_default().push(at);
        Ok(())
    }

    fn fill(&self, at: u64, bytes: u64, with: u8) {
        // SAFETY: `allocate` and `place` give offsets inside of the file.
        unsafe { std::ptr::write_bytes(self.bytes.as_mut_ptr().add(at as usize), with, bytes as usize) };
    }

    fn give_rights(&self, at: u64, bytes: u64, right: u8) {
        // SAFETY: as in `fill`.
        unsafe { std::ptr::write_bytes(self.rights.as_mut_ptr().add(at as usize), right, bytes as usize) };
    }

    /// Where bytes of a card's memory lie, all in one allocation.
    fn place(&self, address: u64, bytes: u64, card: usize) -> Result<*mut u8, CUresult> {
        let wrong = CUresult::CUDA_ERROR_INVALID_VALUE;
        let at = address.checked_sub(BASE).ok_or(wrong)?;
        let (&start, &(size, owner)) = self.live.range(..=at).next_back().ok_or(wrong)?;
        let inside = at - start <= size && bytes <= size - (at - start);
        if !inside || owner != card {
            return Err(wrong);
        }
        // SAFETY: inside of an allocation, and so of the file.
        Ok(unsafe { self.bytes.as_mut_ptr().add(at as usize) })
    }

    pub fn set(&self, card: usize, address: u64, bytes: u64, value: u8) -> Result<(), CUresult> {
        let to = self.place(address, bytes, card)?;
        // SAFETY: `place` has checked the extent.
        unsafe { std::ptr::write_bytes(to, value, bytes as usize) };
        Ok(())
    }

    /// # Safety
    /// `from` is valid for so many bytes.
    unsafe fn write(&self, card: usize, address: u64, from: *const u8, bytes: u64) -> Result<(), CUresult> {
        let to = self.place(address, bytes, card)?;
        // SAFETY: `place` has checked one side, the caller the other.
        unsafe { std::ptr::copy(from, to, bytes as usize) };
        Ok(())
    }

    pub fn copy(&self, card: usize, to: u64, from: u64, bytes: u64) -> Result<(), CUresult> {
        let from = self.place(from, bytes, card)?;
        // SAFETY: `place` has checked both.
        unsafe { self.write(card, to, from, bytes) }
    }
}

/// Not the driver's: after so many more allocations of this thread one is refused; `u64::MAX` asks for none. Returns how many were left to
/// the refusal before, `u64::MAX` where there was none or it has happened.
#[unsafe(no_mangle)]
pub extern "C" fn emulated_refuse_memory(after: u64) -> u64 {
    REFUSAL.replace(Some(after).filter(|&after| after < u64::MAX)).unwrap_or(u64::MAX)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize) -> CUresult {
    let made = card().and_then(|card| {
        streams::outside_of_captures()?;
        state().memory.allocate(bytes as u64, card)
    });
    code(made.map(|made| unsafe { address.write(made) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocAsync(
    address: *mut CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    let made = streams::idle(stream).and_then(|card| state().memory.allocate(bytes as u64, card));
    code(made.map(|made| unsafe { address.write(made) }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(address: CUdeviceptr) -> CUresult {
    code(card().and_then(|_| state().memory.release(address)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeAsync(address: CUdeviceptr, stream: CUstream) -> CUresult {
    code(streams::idle(stream).and_then(|_| state().memory.release(address)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8Async(
    address: CUdeviceptr,
    value: c_uchar,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    code(streams::put(stream, Work::Set { address, value, bytes: bytes as u64 }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoDAsync_v2(
    to: CUdeviceptr,
    from: CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    code(streams::put(stream, Work::Copy { to, from, bytes: bytes as u64 }))
}

/// A copy from the host cannot be captured here: what this crate captures is kernels.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: CUdeviceptr,
    from: *const c_void,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    code(
        streams::idle(stream)
            .and_then(|card| unsafe { state().memory.write(card, to, from.cast(), bytes as u64) }),
    )
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    code(streams::idle(stream).and_then(|card| {
        let from = state().memory.place(from, bytes as u64, card)?;
        unsafe { std::ptr::copy(from, to.cast(), bytes) };
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostAlloc(memory: *mut *mut c_void, bytes: usize, _: c_uint) -> CUresult {
    code(card().map(|_| {
        // The size stands before the memory, for `cuMemFreeHost`.
        let words = vec![0u128; bytes.div_ceil(16) + 1].into_boxed_slice();
        let len = words.len();
        let start = Box::into_raw(words).cast::<u128>();
        unsafe {
            start.write(len as u128);
            memory.write(start.add(1).cast());
        }
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeHost(memory: *mut c_void) -> CUresult {
    unsafe {
        let start = memory.cast::<u128>().sub(1);
        drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(start, start.read() as usize)));
    }
    CUresult::CUDA_SUCCESS
}
