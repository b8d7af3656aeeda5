// How a cooperative matrix gets its keys: here they are binary16 already.
struct HalfOct {
    low: vec4<f16>,
    high: vec4<f16>,
}

alias KvOct = HalfOct;

const KEY_UNIT = 1.0; // what a staged key has to be multiplied with
const KEY_ATTEMPTS = 1u;

fn half_key(oct: KvOct, shrink: f32) -> HalfOct {
    return oct;
}

fn largest_key(oct: KvOct) -> f32 {
    return 0.0;
}
