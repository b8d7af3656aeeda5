//! The order in which logits are chosen, as that of unsigned integers.

/// A key that is greater the earlier a logit is chosen: by value, the two zeros alike, and NaNs of any bits after -inf, all alike.
pub(crate) const fn order_key(bits: u32) -> u32 {
    const INFINITY: u32 = 0x7F80_0000;
    const SIGN: u32 = 1 << 31;
    if bits & !SIGN > INFINITY {
        0
    } else if bits > SIGN {
        !bits
    } else {
        // 0x8000_0000, the negative zero, is left: it keeps the key of the positive one.
        bits | SIGN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_in_the_order_of_values() {
        let key = |x: f32| order_key(x.to_bits());
        let ascending = [f32::NEG_INFINITY, f32::MIN, -1.5, -1.0, -f32::MIN_POSITIVE, -f32::from_bits(1)];
        let ascending: Vec<f32> =
            ascending.into_iter().chain([0.0]).chain(ascending.into_iter().rev().map(|x| -x)).collect();
        assert!(ascending.windows(2).all(|pair| key(pair[0]) < key(pair[1])), "{ascending:?}");
        assert_eq!(key(0.0), key(-0.0));
        for nan in [0x7FC0_0000, 0xFFC0_0000, 0x7F80_0001, 0xFFFF_FFFF] {
            assert_eq!(order_key(nan), 0, "{nan:x}");
        }
        assert!(key(f32::NEG_INFINITY) > 0);
    }
}
