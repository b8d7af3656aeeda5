// Keys for cooperative matrices from an f16 cache: an oct (8 consecutive elements, two a word) is used as it is.
alias KvOct = vec4<u32>;

const KEY_UNIT = 1.0; // scale of a staged key

fn float_key(oct: KvOct) -> mat2x4<f32> {
    let a = unpack2x16float(oct.x);
    let b = unpack2x16float(oct.y);
    let c = unpack2x16float(oct.z);
    let d = unpack2x16float(oct.w);
    return mat2x4<f32>(vec4<f32>(a, b), vec4<f32>(c, d));
}

fn half_key(oct: KvOct) -> HalfOct {
    return half_oct(oct);
}

fn odd_bits(oct: KvOct) -> u32 {
    return 0u;
}

const ODD = 0u;
