//! `kv_calibrate` against the oracle, and against the host's `calibrate_k_scale`.

use std::ops::Range;

use crate::reference::kv_calibrate;
use wgpu_mla::{
    Backend, CalibrationStats, Dtype, Error, KvCalibrate, KvCalibrateArgs, MlaShape, View, calibrate_k_scale,
    count_saturated,
};

use super::Session;
use super::memory::{Strides, download, gather, scatter, upload};
use super::run::Layout;
use crate::paint::Rng;

const TOKENS: usize = 41;

/// Every input dtype, ordinary values and any bits, several calls that add up.
pub fn calibrations<B: Backend>(session: &Session<'_, B>) {
    for (input, dims) in [(Dtype::F32, (256, 32)), (Dtype::F16, (512, 0)), (Dtype::Bf16, (512, 64))] {
        for any_bits in [false, true] {
            for gaps in [false, true] {
                let what = format!("calibrate {input} {dims:?} any bits {any_bits} gaps {gaps}");
                session.note(&what, check(session.backend, input, dims, any_bits, gaps));
            }
        }
    }
    session.finish("calibrations");
}

fn check<B: Backend>(
    backend: &B,
    input: Dtype,
    (latent, rope): (u32, u32),
    any_bits: bool,
    gaps: bool,
) -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let spec =
        KvCalibrate { shape: MlaShape { num_heads: 1, kv_lora_rank: latent, qk_rope_head_dim: rope }, input };
    let mut rng = Rng(u64::from(latent + rope) << 8 | input.bytes() as u64);
    let layout = if gaps { Layout::Gaps } else { Layout::Dense };
    let mut part = |dim: u32| -> Result<_, String> {
        let mut bytes = Vec::new();
        for i in 0..TOKENS * dim as usize {
            if any_bits && i % 3 == 0 {
                bytes.extend_from_slice(&rng.next().to_le_bytes()[..input.bytes()]);
            } else {
                input.encode(rng.randn() * [1.0, 100.0, 1e-7][i % 3], &mut bytes);
            }
        }
        let dims = [TOKENS, 1, dim as usize];
        let strides = layout.strides(dims, 4);
        let buffer = upload(backend, &scatter(&bytes, dims, input.bytes(), strides)).map_err(text)?;
        Ok((input.decode_all(&bytes), buffer, strides))
    };
    let (kv_c, k_pe) = (part(latent)?, part(rope)?);
    let values = |tokens: Range<usize>| {
        let (latent, rope) = (latent as usize, rope as usize);
        [&kv_c.0[tokens.start * latent..tokens.end * latent], &k_pe.0[tokens.start * rope..tokens.end * rope]]
            .concat()
    };
    // The counters, then poison; the count of elements is about to pass 32 bits.
    let dims = [1, 1, CalibrationStats::BYTES as usize];
    let strides = Strides::dense(1, dims[2]);
    let mut before = vec![0; dims[2]];
    let earlier = u32::MAX - 5;
    before[24..28].copy_from_slice(&earlier.to_le_bytes());
    let stats = upload(backend, &before).map_err(text)?;
    let mut want = CalibrationStats { elements: earlier.into(), ..Default::default() };
    // What was seen is kept; the middle is seen twice, the end never.
    for (tokens, k_scale) in [(3..20, 0.5), (0..TOKENS - 4, 0.003), (7..7, 1e-9), (2..3, 1e37)] {
        let args = KvCalibrateArgs {
            kv_c: kv_c.2.view(&kv_c.1),
            k_pe: k_pe.2.view(&k_pe.1),
            k_scale,
            stats: &stats,
        };
        backend.once(spec, tokens.start as u32..tokens.end as u32, &args).map_err(text)?;
        let one = kv_calibrate(&values(tokens), k_scale);
        want = CalibrationStats {
            amax: want.amax.max(one.amax),
            saturated: want.saturated + one.saturated,
            non_finite: want.non_finite + one.non_finite,
            elements: want.elements + one.elements,
        };
        let bytes = download(backend, &stats, before.len()).map_err(text)?;
        let (bytes, intact) = gather(&bytes, dims, 1, strides);
        intact?;
        let got = CalibrationStats::from_bytes(&bytes).map_err(text)?;
        if got != want {
            return Err(format!("{got:?} instead of {want:?}"));
        }
    }
    if want.elements <= u64::from(u32::MAX) || want.saturated == 0 || any_bits && want.non_finite == 0 {
        return Err(format!("the data is too tame: {want:?}"));
    }
    for power_of_two in [false, true] {
        let (got, data) = (want.calibration(power_of_two), values(0..TOKENS - 4));
        if got != calibrate_k_scale(&data, power_of_two) || count_saturated(&data, got.k_scale) != 0 {
            return Err(format!("{got:?} is not what the host finds"));
        }
    }
    Ok(())
}

/// Scales, sizes and dtypes.
pub fn refuses_calibrations<B: Backend>(session: &Session<'_, B>) {
    let result = || -> Result<(), Error> {
        let backend = session.backend;
        let shape = MlaShape { num_heads: 1, kv_lora_rank: 256, qk_rope_head_dim: 32 };
        let spec = KvCalibrate { shape, input: Dtype::F16 };
        let (rows, stats) = (backend.buffer(2 * 288 * 2)?, backend.buffer(CalibrationStats::BYTES)?);
        let small = backend.buffer(16)?;
        let good = || KvCalibrateArgs {
            kv_c: View { offset: 0, ..Strides::dense(1, 288).view(&rows) },
            k_pe: View { offset: 256, ..Strides::dense(1, 288).view(&rows) },
            k_scale: 1.0,
            stats: &stats,
        };
        let run = |spec: &KvCalibrate, tokens, args: KvCalibrateArgs<&B::Buffer>| {
            backend.once(*spec, tokens, &args)
        };
        session.note("a good one", run(&spec, 0..2, good()).map_err(|e| e.to_string()));
        let e4m3 = KvCalibrate { input: Dtype::E4m3, ..spec };
        #[allow(clippy::reversed_empty_ranges)]
        for (what, result, why) in [
            ("e4m3", run(&e4m3, 0..1, good()), "e4m3"),
            ("too many tokens", run(&spec, 1..3, good()), "kv_c"),
            ("a range that ends before it begins", run(&spec, 2..1, good()), "range"),
            ("k_scale 0", run(&spec, 0..1, KvCalibrateArgs { k_scale: 0.0, ..good() }), "k_scale"),
            (
                "k_scale 1e-39",
                run(&spec, 0..1, KvCalibrateArgs { k_scale: 1e-39, ..good() }),
                "k_scale 1e-39",
            ),
            (
                "one row for all tokens",
                run(&spec, 0..2, KvCalibrateArgs { kv_c: View { token_stride: 0, ..good().kv_c }, ..good() }),
                "kv_c 0",
            ),
            (
                "half a row",
                run(
                    &spec,
                    0..2,
                    KvCalibrateArgs { k_pe: View { token_stride: 16, ..good().k_pe }, ..good() },
                ),
                "k_pe 16",
            ),
            ("k_scale NaN", run(&spec, 0..1, KvCalibrateArgs { k_scale: f32::NAN, ..good() }), "k_scale"),
            (
                "an odd offset",
                run(&spec, 0..1, KvCalibrateArgs { kv_c: View { offset: 2, ..good().kv_c }, ..good() }),
                "kv_c",
            ),
            (
                "one row for all tokens",
                run(
                    &spec,
                    0..1 << 20,
                    KvCalibrateArgs { kv_c: View { token_stride: 0, ..good().kv_c }, ..good() },
                ),
                "kv_c 0: token and head strides make rows overlap",
            ),
            (
                "rotary rows that overlap",
                run(
                    &spec,
                    0..2,
                    KvCalibrateArgs { k_pe: View { token_stride: 28, ..good().k_pe }, ..good() },
                ),
                "k_pe 28: token and head strides make rows overlap",
            ),
            (
                "counters in the rows",
                run(&spec, 0..1, KvCalibrateArgs { stats: &rows, ..good() }),
                "same buffer",
            ),
            ("16 bytes", run(&spec, 0..1, KvCalibrateArgs { stats: &small, ..good() }), "stats"),
        ] {
            session.note(
                what,
                match result {
                    Ok(()) => Err("was accepted".to_owned()),
                    Err(error) if error.to_string().contains(why) => Ok(()),
                    Err(error) => Err(format!("{error:?} does not name {why:?}")),
                },
            );
        }
        let bytes = backend.download(&stats, CalibrationStats::BYTES)?;
        let after = CalibrationStats::from_bytes(&bytes)?;
        let want = CalibrationStats { elements: 2 * 288, ..Default::default() };
        session.note(
            "only the good one counted",
            if after == want { Ok(()) } else { Err(format!("{after:?}")) },
        );
        Ok(())
    }();
    session.note("calibrations", result.map_err(|error| error.to_string()));
    session.finish("refuses calibrations");
}
