//! FNV-1a of 64 bits: a hash that is the same in every process and version. Pure.

/// Where [`fnv1a`] starts.
pub(crate) const FNV_START: u64 = 0xcbf2_9ce4_8422_2325;

/// Each step is a bijection of the state for a given byte, and for a given state tells all bytes apart, so two inputs that differ in one
/// byte never agree: every flipped bit is seen.
pub(crate) fn fnv1a(state: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(state, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_vectors() {
        assert_eq!(fnv1a(FNV_START, b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(FNV_START, b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(fnv1a(FNV_START, b"foobar"), 0x8594_4171_f739_67e8);
    }
}
