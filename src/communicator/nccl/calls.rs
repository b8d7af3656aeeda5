//! Exchanges as NCCL's calls, which the caller makes one group.

use std::ffi::{c_int, c_void};

use super::library::{Api, BYTE, Code, Handle, SUM, Stream};

/// The addresses of an exchange, and a part's bytes.
#[derive(Clone, Copy)]
pub struct Ends {
    pub from: *mut c_void,
    pub to: *mut c_void,
    pub bytes: usize,
}

/// Where calls go.
#[derive(Clone, Copy)]
pub struct Target<'a> {
    pub api: &'a Api,
    pub handle: Handle,
    pub stream: Stream,
}

impl Target<'_> {
    /// # Safety
    /// `from` is a part of the communicator's card, `to` has room for one of each rank.
    pub unsafe fn all_gather(&self, ends: Ends) -> Code {
        let Ends { from, to, bytes } = ends;
        // SAFETY: the caller's.
        unsafe { (self.api.all_gather)(from, to, bytes, BYTE, self.handle, self.stream) }
    }

    /// # Safety
    /// Both have a part for each rank.
    pub unsafe fn all_to_all(&self, ends: Ends, world: u32) -> Code {
        let peers = (0..world).map(|peer| {
            let at = peer as usize * ends.bytes;
            let (api, handle, stream, peer) = (self.api, self.handle, self.stream, peer as c_int);
            // SAFETY: the caller's.
            let codes = unsafe {
                let (from, to) = (ends.from.byte_add(at), ends.to.byte_add(at));
                [
                    (api.send)(from, ends.bytes, BYTE, peer, handle, stream),
                    (api.receive)(to, ends.bytes, BYTE, peer, handle, stream),
                ]
            };
            worst(codes)
        });
        worst(peers)
    }

    /// # Safety
    /// `from` has a part for each rank, of whole elements; `to` has room for one.
    pub unsafe fn reduce_scatter(&self, ends: Ends, (dtype, element): (c_int, usize)) -> Code {
        let (Ends { from, to, bytes }, api) = (ends, self.api);
        // SAFETY: the caller's.
        unsafe { (api.reduce_scatter)(from, to, bytes / element, dtype, SUM, self.handle, self.stream) }
    }
}

/// The first code that is not success. All calls are made even if one fails, since the NCCL group must be closed after them.
pub fn worst(codes: impl IntoIterator<Item = Code>) -> Code {
    let said = |code: &Code| *code != Code::SUCCESS && *code != Code::IN_PROGRESS;
    codes.into_iter().fold(Code::SUCCESS, |worst, code| if said(&worst) { worst } else { code })
}
