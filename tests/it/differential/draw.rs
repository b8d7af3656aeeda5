//! What cases are drawn with, and number formats as `docs/numbers.md` and the standards have them: the crate's conversions are not used.

use wgpu_mla::Dtype;

/// xorshift64* (Vigna, 2016).
#[derive(Debug, Clone)]
pub struct Draw(u64);

impl Draw {
    /// Seeds that differ in a bit give streams that have nothing in common: the seed is hashed (murmur3's finaliser).
    pub fn new(seed: u64) -> Self {
        let mut x = seed ^ 0x6A09_E667_F3BC_C909;
        for factor in [0xFF51_AFD7_ED55_8CCD, 0xC4CE_B9FE_1A85_EC53] {
            x = (x ^ x >> 33).wrapping_mul(factor);
        }
        Self((x ^ x >> 33) | 1)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// Uniform in `0..n`; 0 where `n` is.
    pub fn below(&mut self, n: usize) -> usize {
        ((self.bits() >> 32) as usize * n) >> 32
    }

    /// Uniform in `low..=high`.
    pub fn within(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high - low + 1)
    }

    /// True once in `n`.
    pub fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub fn pick<T: Clone>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())].clone()
    }

    /// Uniform in `[0, 1)`.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// About standard normal: the sum of twelve, three times four at once.
    pub fn normal(&mut self) -> f64 {
        let odd = 0x0000_FFFF_0000_FFFF;
        let pairs = |x: u64| (x & odd) + (x >> 16 & odd);
        let sums = pairs(self.bits()) + pairs(self.bits()) + pairs(self.bits());
        ((sums & 0xFFFF_FFFF) + (sums >> 32)) as f64 / 65536.0 - 6.0
    }

    pub fn shuffled(&mut self, n: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..n).collect();
        (1..n).rev().for_each(|i| order.swap(i, self.below(i + 1)));
        order
    }
}

/// Bits of the exponent and of the mantissa.
fn fields(dtype: Dtype) -> (u32, u32) {
    match dtype {
        Dtype::F32 => (8, 23),
        Dtype::F16 => (5, 10),
        Dtype::Bf16 => (8, 7),
        Dtype::E4m3 => (4, 3),
    }
}

/// What the bits of an element stand for.
pub fn value(dtype: Dtype, bits: u32) -> f64 {
    let (exponents, mantissas) = fields(dtype);
    let bias = (1i64 << (exponents - 1)) - 1;
    let (e, m) = (i64::from(bits >> mantissas & ((1 << exponents) - 1)), bits & ((1 << mantissas) - 1));
    let last = e == (1 << exponents) - 1;
    let magnitude = match dtype {
        Dtype::E4m3 if last && m == 7 => f64::NAN,
        Dtype::F32 | Dtype::F16 | Dtype::Bf16 if last && m > 0 => f64::NAN,
        Dtype::F32 | Dtype::F16 | Dtype::Bf16 if last => f64::INFINITY,
        _ if e == 0 => f64::from(m) * power(1 - bias - i64::from(mantissas)),
        _ => f64::from(m | 1 << mantissas) * power(e - bias - i64::from(mantissas)),
    };
    if bits >> (exponents + mantissas) & 1 == 1 { -magnitude } else { magnitude }
}

/// 2^n, which f64 has as a normal number.
fn power(n: i64) -> f64 {
    f64::from_bits(((n + 1023) as u64) << 52)
}

/// The nearest element's bits, ties to even. Past the largest: infinity, or of e4m3 the largest. NaN is a quiet one.
pub fn nearest(dtype: Dtype, x: f64) -> u32 {
    let (exponents, mantissas) = fields(dtype);
    let bias = (1i64 << (exponents - 1)) - 1;
    let sign = u32::from(x.is_sign_negative()) << (exponents + mantissas);
    let infinity = ((1 << exponents) - 1) << mantissas;
    let largest = if dtype == Dtype::E4m3 { 0x7E } else { infinity };
    if x.is_nan() {
        return if dtype == Dtype::E4m3 { 0x7F } else { infinity | 1 << (mantissas - 1) };
    }
    if x.is_infinite() {
        return sign | largest;
    }
    let exponent = ((x.abs().to_bits() >> 52) as i64 - 1023).max(1 - bias);
    // Steps of the last place: one more than the mantissa has carries into the exponent.
    let steps = (x.abs() * power(i64::from(mantissas) - exponent)).round_ties_even();
    let code = ((exponent + bias - 1) << mantissas) as f64 + steps;
    sign | if code >= f64::from(largest) { largest } else { code as u32 }
}

/// The values of an array of little-endian elements.
pub fn values(dtype: Dtype, bytes: &[u8]) -> Vec<f64> {
    let mut all = Vec::with_capacity(bytes.len() / dtype.bytes());
    match dtype {
        Dtype::F32 => bytes.as_chunks().0.iter().for_each(|&x| all.push(value(dtype, u32::from_le_bytes(x)))),
        Dtype::F16 | Dtype::Bf16 => {
            bytes.as_chunks().0.iter().for_each(|&x| all.push(value(dtype, u16::from_le_bytes(x).into())));
        }
        Dtype::E4m3 => bytes.iter().for_each(|&x| all.push(value(dtype, x.into()))),
    }
    all
}

/// The bytes of the nearest elements.
pub fn bytes(dtype: Dtype, values: impl IntoIterator<Item = f64>) -> Vec<u8> {
    let mut all = Vec::new();
    for x in values {
        all.extend_from_slice(&nearest(dtype, x).to_le_bytes()[..dtype.bytes()]);
    }
    all
}

/// Every code of a small dtype is the nearest to itself, ties and ends are as IEEE 754 and OCP have them.
pub fn formats_round_to_nearest_even() {
    for dtype in [Dtype::F16, Dtype::Bf16, Dtype::E4m3] {
        for code in 0..1u32 << (8 * dtype.bytes()) {
            let x = value(dtype, code);
            assert!(x.is_nan() || nearest(dtype, x) == code, "{dtype} {code:#x} is {x}");
        }
        let end = if dtype == Dtype::E4m3 { 0x7E } else { nearest(dtype, f64::INFINITY) };
        for code in 0..end - 1 {
            let (low, high) = (value(dtype, code), value(dtype, code + 1));
            let middle = (low + high) / 2.0;
            assert_eq!(nearest(dtype, middle), code + code % 2, "{dtype} {code:#x}");
            assert_eq!(nearest(dtype, middle - (high - low) / 1024.0), code, "{dtype} {code:#x}");
            assert_eq!(
                nearest(dtype, -middle - (high - low) / 1024.0) & ((1 << (8 * dtype.bytes() - 1)) - 1),
                code + 1
            );
        }
    }
    assert_eq!([448.0, 464.0, 465.0, 1e9].map(|x| nearest(Dtype::E4m3, x)), [0x7E; 4]);
    assert_eq!([65519.9, 65520.0].map(|x| nearest(Dtype::F16, x)), [0x7BFF, 0x7C00]);
    for x in [0.1f32, 1e-40, 3.4e38, -7.5, 1e-45] {
        assert_eq!(nearest(Dtype::F32, x.into()), x.to_bits());
        assert_eq!(value(Dtype::F32, x.to_bits()), f64::from(x));
    }
}
