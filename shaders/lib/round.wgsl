// placeholder, replaced by the ops branch
fn f16_bits(bits: u32) -> u32 { return pack2x16float(vec2<f32>(bitcast<f32>(bits), 0.0)) & 0xFFFFu; }
fn bf16_bits(bits: u32) -> u32 { return (bits + 0x7FFFu + ((bits >> 16u) & 1u)) >> 16u; }
