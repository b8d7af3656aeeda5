//! The header of a cache file: written and checked here, with no device and no file system.
//!
//! ```text
//! offset  bytes
//!      0      8  magic
//!      8      4  version of this layout, little-endian as all that follow
//!     12      4  length of the key
//!     16      8  length of the payload
//!     24      8  checksum of bytes 0..24, the key and the payload
//!     32         the key, then the payload, then the end of the file
//! ```

use crate::base::fnv::{FNV_START, fnv1a};

/// First bytes of every file. The last four are what text-mode transfers and stripped eighth bits spoil.
const MAGIC: [u8; 8] = *b"MLAP\x89\r\n\x1a";
/// Goes up when the layout changes.
const VERSION: u32 = 1;
/// Bytes under the checksum before the key.
const SUMMED: usize = 24;
/// Bytes before the key.
const FIXED: usize = 32;

/// Why a cache file is not used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Rejection {
    /// The file is there and cannot be read.
    #[error("it cannot be read: {0}")]
    Unreadable(String),
    /// The file is larger than any that this crate writes.
    #[error("it has {got} bytes, the most that is read is {max}")]
    TooLarge {
        /// Bytes in the file, or the least that it can have.
        got: u64,
        /// The most that is read.
        max: u64,
    },
    /// The file does not begin as ours do.
    #[error("it is not a cache file of wgpu-mla")]
    NotOurs,
    /// The file has the layout of another release.
    #[error("its layout is version {0}, this release reads version {VERSION}")]
    Version(u32),
    /// The file is shorter or longer than its header says.
    #[error("it has {got} bytes where its header needs {want}")]
    Length {
        /// Bytes there are.
        got: u64,
        /// Bytes that the header asks for.
        want: u64,
    },
    /// The file was damaged after it was written.
    #[error("its checksum is wrong")]
    Checksum,
    /// The file is whole and belongs to another adapter, driver or release.
    #[error("it was made for {0}")]
    Foreign(String),
    /// The file passed every check of ours, and wgpu refused its contents.
    #[error("wgpu refused it: {0}")]
    Refused(String),
}

/// A file that holds `payload` for the adapter and driver named by `key`.
///
/// `None` for a key whose length does not fit its field.
pub(super) fn encode(key: &str, payload: &[u8]) -> Option<Vec<u8>> {
    let mut file = Vec::with_capacity(FIXED + key.len() + payload.len());
    file.extend_from_slice(&MAGIC);
    file.extend_from_slice(&VERSION.to_le_bytes());
    file.extend_from_slice(&u32::try_from(key.len()).ok()?.to_le_bytes());
    file.extend_from_slice(&u64::try_from(payload.len()).ok()?.to_le_bytes());
    let sum = [&file, key.as_bytes(), payload].into_iter().fold(FNV_START, fnv1a);
    file.extend_from_slice(&sum.to_le_bytes());
    file.extend_from_slice(key.as_bytes());
    file.extend_from_slice(payload);
    Some(file)
}

/// The payload of `file`, if the file is whole and was made for `key`.
pub(super) fn decode<'a>(file: &'a [u8], key: &str) -> Result<&'a [u8], Rejection> {
    // A cut is told from foreign contents only while all that is left agrees with the magic.
    let seen = file.len().min(MAGIC.len());
    if file[..seen] != MAGIC[..seen] {
        return Err(Rejection::NotOurs);
    }
    let got = file.len() as u64;
    let Some((fixed, rest)) = file.split_first_chunk::<FIXED>() else {
        return Err(Rejection::Length { got, want: FIXED as u64 });
    };
    let version = u32_at(fixed, 8);
    if version != VERSION {
        return Err(Rejection::Version(version));
    }
    let (key_bytes, payload_bytes) = (u64::from(u32_at(fixed, 12)), u64_at(fixed, 16));
    // Lengths come from the file: saturating, so that an absurd one is too long and not a small number.
    let want = (FIXED as u64).saturating_add(key_bytes).saturating_add(payload_bytes);
    if got != want {
        return Err(Rejection::Length { got, want });
    }
    if fnv1a(fnv1a(FNV_START, &fixed[..SUMMED]), rest) != u64_at(fixed, SUMMED) {
        return Err(Rejection::Checksum);
    }
    // key_bytes <= rest.len() since want == got, and the lengths are u64 sums that did not saturate.
    let (found, payload) = rest.split_at(key_bytes as usize);
    if found != key.as_bytes() {
        return Err(Rejection::Foreign(printable(found)));
    }
    Ok(payload)
}

fn u32_at(fixed: &[u8; FIXED], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| fixed[at + i]))
}

fn u64_at(fixed: &[u8; FIXED], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| fixed[at + i]))
}

/// A key from a file, fit for a log: no control characters, and not longer than a line or two.
fn printable(key: &[u8]) -> String {
    String::from_utf8_lossy(&key[..key.len().min(256)]).escape_debug().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "adapter \"x\" driver 1";
    const PAYLOAD: &[u8] = b"forty bytes of pipelines, more or less..";

    fn good() -> Vec<u8> {
        encode(KEY, PAYLOAD).expect("a short key")
    }

    #[test]
    fn round_trip() {
        assert_eq!(decode(&good(), KEY), Ok(PAYLOAD));
        let empty = encode("", b"").expect("a short key");
        assert_eq!(empty.len(), FIXED);
        assert_eq!(decode(&empty, ""), Ok(&[][..]));
    }

    #[test]
    fn layout_is_the_documented_one() {
        let file = good();
        assert_eq!(file[..8], MAGIC);
        assert_eq!(file[8..12], [1, 0, 0, 0]);
        assert_eq!(file[12..16], (KEY.len() as u32).to_le_bytes());
        assert_eq!(file[16..24], (PAYLOAD.len() as u64).to_le_bytes());
        assert_eq!(&file[32..32 + KEY.len()], KEY.as_bytes());
        assert_eq!(&file[32 + KEY.len()..], PAYLOAD);
    }

    #[test]
    fn every_truncation_is_rejected() {
        let file = good();
        for end in 0..file.len() {
            assert!(matches!(decode(&file[..end], KEY), Err(Rejection::Length { .. })), "cut at {end}");
        }
    }

    #[test]
    fn every_flipped_bit_is_rejected() {
        let file = good();
        for bit in 0..file.len() * 8 {
            let mut bad = file.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let why = decode(&bad, KEY).expect_err("a flipped bit was not seen");
            let expected = match bit / 8 {
                0..8 => matches!(why, Rejection::NotOurs),
                8..12 => matches!(why, Rejection::Version(_)),
                12..24 => matches!(why, Rejection::Length { .. }),
                _ => matches!(why, Rejection::Checksum),
            };
            assert!(expected, "bit {bit}: {why}");
        }
    }

    #[test]
    fn every_other_byte_is_rejected() {
        let file = good();
        for at in 0..file.len() {
            for change in 1..=255u8 {
                let mut bad = file.clone();
                bad[at] ^= change;
                assert!(decode(&bad, KEY).is_err(), "byte {at} ^ {change:#x}");
            }
        }
    }

    #[test]
    fn moved_boundary_is_rejected() {
        // The total is the same, so that only the checksum sees it.
        let mut file = good();
        file[12] += 1;
        file[16] -= 1;
        assert_eq!(decode(&file, KEY), Err(Rejection::Checksum));
    }

    #[test]
    fn trailing_garbage_is_rejected() {
        for extra in [1, 7, 4096] {
            let mut file = good();
            file.resize(file.len() + extra, 0);
            assert!(matches!(decode(&file, KEY), Err(Rejection::Length { .. })));
        }
    }

    #[test]
    fn absurd_lengths_are_rejected() {
        for (key_bytes, payload_bytes) in
            [(u32::MAX, u64::MAX), (0, u64::MAX), (u32::MAX, 0), (1, u64::MAX - 31)]
        {
            let mut file = good();
            file[12..16].copy_from_slice(&key_bytes.to_le_bytes());
            file[16..24].copy_from_slice(&payload_bytes.to_le_bytes());
            assert!(matches!(decode(&file, KEY), Err(Rejection::Length { .. })));
        }
    }

    #[test]
    fn foreign_keys_are_rejected() {
        for key in ["", "adapter", "adapter \"x\" driver 2", "adapter \"x\" driver 1 "] {
            assert_eq!(decode(&good(), key), Err(Rejection::Foreign(KEY.escape_debug().to_string())));
        }
    }

    #[test]
    fn foreign_keys_are_fit_for_a_log() {
        let hostile = "\x1b[2J\n".repeat(1000);
        let file = encode(&hostile, b"").expect("a short key");
        let Err(Rejection::Foreign(shown)) = decode(&file, KEY) else { panic!("not foreign") };
        assert!(shown.len() < 3000 && !shown.chars().any(char::is_control));
    }
}
