//! Every finite e4m3 code, and every normal f16 and bf16 code, comes out of a cache exactly: a sequence of one token has its
//! latent as output, whatever the query.

mod common;

use wgpu_mla::{
    Backend, Batch, Capacity, Dtype, KvSpec, Layer, MlaShape, MlaSpec, PageTable, Plan, Policy, cpu::Cpu,
};

const LATENT: usize = 512;

/// All codes of a dtype that a device must read exactly, in rows of `LATENT`, the rest of the last row zeros.
fn codes(dtype: Dtype) -> Vec<u8> {
    let bytes = dtype.bytes();
    let smallest = if dtype == Dtype::F16 { f32::from(half::f16::MIN_POSITIVE) } else { f32::MIN_POSITIVE };
    let exact = |code: &[u8]| {
        let value = dtype.decode_at(code, 0);
        // Subnormals of e4m3 are normal in f32; those of f16 and bf16 may be flushed.
        value.is_finite() && (dtype == Dtype::E4m3 || value == 0.0 || value.abs() >= smallest)
    };
    let mut all: Vec<u8> = (0..1u32 << (8 * bytes))
        .map(|code| code.to_le_bytes())
        .filter(|code| exact(&code[..bytes]))
        .flat_map(|code| code[..bytes].to_vec())
        .collect();
    all.resize(all.len().next_multiple_of(LATENT * bytes), 0);
    all
}

fn check<B: Backend>(backend: &B, variant: &str, dtype: Dtype) -> wgpu_mla::Result<()> {
    let codes = codes(dtype);
    let tokens = codes.len() / dtype.bytes() / LATENT;
    let spec = MlaSpec {
        shape: MlaShape { num_heads: 1, kv_lora_rank: LATENT as u32, qk_rope_head_dim: 0 },
        kv: KvSpec { dtype, page_size: 1, num_pages: tokens as u32 },
        query: Dtype::F32,
        out: Dtype::F32,
    };
    // A query of zeros: a logit is a sum of large products otherwise, and bf16 reaches f32's limits.
    let out_bytes = (tokens * LATENT * 4) as u64;
    let (q, kv) = (backend.buffer(out_bytes)?, backend.buffer(codes.len() as u64)?);
    let (out, lse) = (backend.buffer(out_bytes)?, backend.buffer(tokens as u64 * 4)?);
    backend.upload(&kv, 0, &codes)?;
    let mla = backend.decode(&spec, Some(variant))?;
    let pages: Vec<i32> = (0..tokens as i32).collect();
    let starts: Vec<i32> = (0..=tokens as i32).collect();
    let lens = vec![1; tokens];
    let plan = Plan::new(&spec, &backend.tiling(&mla), &Batch::new(&lens, &starts), Policy::OneSplit)?;
    let mut step = backend.step(&mla, Capacity::default())?;
    backend.prepare(&mla, &mut step, &plan, PageTable::Dense { block_table: &pages, max_pages: 1 })?;
    let layer = Layer::dense(&spec, &q, &kv, &out, &lse, 1.0);
    backend.run(&mla, &step, &backend.bind(&mla, tokens as u32, &layer)?)?;
    let got = Dtype::F32.decode_all(&backend.download(&out, out_bytes)?);
    for (index, (got, want)) in got.into_iter().zip(dtype.decode_all(&codes)).enumerate() {
        assert!(got == want, "{variant} {dtype}: element {index} is {got:e} instead of {want:e}");
    }
    Ok(())
}

fn check_all<B: Backend>(backend: &B) {
    for dtype in [Dtype::E4m3, Dtype::F16, Dtype::Bf16] {
        for variant in ["avx2", "portable", "subgroup", "shared"] {
            // Only the rows that this backend has.
            match check(backend, variant, dtype) {
                Ok(()) => println!("{}: {variant} {dtype} exact", backend.name()),
                Err(wgpu_mla::Error::VariantUnavailable { .. }) => {}
                Err(error) => panic!("{variant} {dtype}: {error}"),
            }
        }
    }
}

#[test]
fn cpu() {
    check_all(&Cpu::new());
}

#[cfg(feature = "wgpu")]
#[test]
fn gpu() {
    if let Some(gpu) = common::gpu_or_say_why() {
        check_all(&gpu);
    }
}
