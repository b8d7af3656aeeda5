//! Every finite e4m3 code, and every normal f16 and bf16 code, comes out of a cache exactly: a sequence of one token has its
//! latent as output, whatever the query.

#[cfg(feature = "wgpu")]
use mla_support::Outcome;
#[cfg(feature = "wgpu")]
use wgpu_mla::wgpu;
use wgpu_mla::{
    Backend, Batch, Capacity, DecodeOptions, Dtype, KvSpec, MlaDecode, MlaDecodeArgs, MlaShape, PageTable,
    Plan, SplitPolicy, cpu::Cpu,
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
    let got = read_back(backend, variant, dtype, &codes)?;
    for (index, (got, want)) in got.into_iter().zip(dtype.decode_all(&codes)).enumerate() {
        assert!(got == want, "{variant} {dtype}: element {index} is {got:e} instead of {want:e}");
    }
    Ok(())
}

/// A NaN code among ordinary ones makes its token's output NaN, all of it, as its logit is, and no other token's.
fn check_nan<B: Backend>(backend: &B, variant: &str) -> wgpu_mla::Result<()> {
    let mut codes = vec![0x38; 10 * LATENT];
    for (token, element, code) in [(1, 0, 0x7F), (3, 5, 0xFF), (4, LATENT - 1, 0x7F), (8, 42, 0xFF)] {
        codes[token * LATENT + element] = code;
    }
    let got = read_back(backend, variant, Dtype::E4m3, &codes)?;
    for (token, row) in got.chunks_exact(LATENT).enumerate() {
        let nan = [1, 3, 4, 8].contains(&token);
        assert!(row.iter().all(|x| x.is_nan() == nan && (nan || *x == 1.0)), "{variant}: token {token}");
    }
    Ok(())
}

/// The latents as they come out of a decode.
fn read_back<B: Backend>(
    backend: &B,
    variant: &str,
    dtype: Dtype,
    codes: &[u8],
) -> wgpu_mla::Result<Vec<f32>> {
    let tokens = codes.len() / dtype.bytes() / LATENT;
    let spec = MlaDecode {
        shape: MlaShape { num_heads: 1, kv_lora_rank: LATENT as u32, qk_rope_head_dim: 0 },
        kv: KvSpec { layout: dtype.into(), page_size: 1, num_pages: tokens as u32 },
        query: Dtype::F32,
        out: Dtype::F32,
    };
    // A query of zeros: a logit is a sum of large products otherwise, and bf16 reaches f32's limits.
    let out_bytes = (tokens * LATENT * 4) as u64;
    let (q, kv) = (backend.buffer(out_bytes)?, backend.buffer(codes.len() as u64)?);
    let (out, lse) = (backend.buffer(out_bytes)?, backend.buffer(tokens as u64 * 4)?);
    backend.upload(&kv, 0, codes)?;
    let options = DecodeOptions { variant: Some(variant.to_owned()), ..DecodeOptions::default() };
    let mla = backend.compile_with(spec, &options)?;
    let pages: Vec<i32> = (0..tokens as i32).collect();
    let starts: Vec<i32> = (0..=tokens as i32).collect();
    let lens = vec![1; tokens];
    let plan = Plan::new(&spec, &mla.tiling(), &Batch::new(&lens, &starts), SplitPolicy::OneSplit)?;
    let mut step = mla.step(Capacity::default())?;
    mla.prepare(&mut step, (&plan, PageTable::Dense { block_table: &pages, max_pages: 1 }))?;
    let layer = MlaDecodeArgs::dense(&spec, &q, &kv, &out, &lse, 1.0);
    mla.run(&step, &mla.bind(&layer, tokens as u32)?)?;
    Ok(Dtype::F32.decode_all(&backend.download(&out, out_bytes)?))
}

fn check_all<B: Backend>(backend: &B) {
    for dtype in [Dtype::E4m3, Dtype::F16, Dtype::Bf16] {
        for variant in ["avx512", "avx2", "neon", "portable", "subgroup", "shared"] {
            // Only the variants that this backend has.
            let nan = || if dtype == Dtype::E4m3 { check_nan(backend, variant) } else { Ok(()) };
            match check(backend, variant, dtype).and_then(|()| nan()) {
                Ok(()) => println!("{}: {variant} {dtype} exact", backend.name()),
                Err(wgpu_mla::Error::VariantUnavailable { .. }) => {}
                Err(error) => panic!("{variant} {dtype}: {error}"),
            }
        }
    }
}

fn cpu() {
    check_all(&Cpu::new());
}

#[cfg(feature = "wgpu")]
fn gpu() -> Outcome {
    check_all(&mla_support::gpu()?);
    Ok(())
}

/// A device that was made without asking for any feature: on it e4m3 is not read through f16.
#[cfg(feature = "wgpu")]
fn gpu_without_features() -> Outcome {
    let gpu = mla_support::gpu()?;
    let (features, limits) = (wgpu::Features::empty(), wgpu::Limits::default());
    let adapter = gpu.adapter().expect("it was made from one").clone();
    let experimental = wgpu::ExperimentalFeatures::disabled();
    let none = wgpu_mla::gpu::Wanted { features, limits, experimental };
    let made = wgpu_mla::gpu::Gpu::from_adapter(adapter, &none);
    let gpu = pollster::block_on(made).expect("a default device");
    assert!(!gpu.caps().f16_subnormals);
    check_all(&gpu);
    Ok(())
}

crate::tests![
    cpu,
    #[cfg(feature = "wgpu")]
    gpu,
    #[cfg(feature = "wgpu")]
    gpu_without_features,
];
