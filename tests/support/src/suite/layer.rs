//! The whole layer against its f64 oracle: dtypes, workspaces, prefixes that are kept expanded, caches of records.

use wgpu_mla::{Backend, Dtype, Error, KvLayout, MlaLayer, RopeLayout, SplitPolicy};

use super::layer_rig::{Amplitudes, PREFIX_ROWS, Rig, StepOutput, Submitted, spec};
use super::{Cases, Session};

/// Notes each step by its name, or why there are none.
fn note<B: Backend>(session: &Session<'_, B>, what: &str, steps: Result<Vec<(&str, StepOutput)>, Error>) {
    match steps {
        Ok(steps) => {
            for (name, step) in &steps {
                session.note(&format!("{what}, {name}"), step.check());
            }
        }
        Err(error) => session.note(what, Err(error.to_string())),
    }
}

/// The steps of a life.
fn numbered(steps: Vec<StepOutput>) -> Vec<(&'static str, StepOutput)> {
    const NAMES: [&str; 5] = ["step 0", "step 1", "step 2", "step 3", "step 4"];
    assert_eq!(steps.len(), NAMES.len());
    NAMES.into_iter().zip(steps).collect()
}

/// Decodes over two prefixes that are kept expanded, beside sequences that have none and one that is prefilled; and what is refused.
pub fn cascades<B: Backend>(session: &Session<'_, B>) {
    for (dtype, cache) in [(Dtype::F32, Dtype::F16), (Dtype::F16, Dtype::E4m3), (Dtype::Bf16, Dtype::Bf16)] {
        let spec = spec(dtype, cache, RopeLayout::Interleaved, 64);
        let steps =
            Rig::new(session.backend, spec, PREFIX_ROWS, Submitted, 11).and_then(|mut rig| rig.cascade());
        note(session, &format!("{dtype} over {cache}"), steps);
    }
    session.finish("expanded prefixes");
}

/// Dtypes and rotary layouts.
pub fn layers<B: Backend>(session: &Session<'_, B>) {
    let (interleaved, half) = (RopeLayout::Interleaved, RopeLayout::HalfSplit);
    for (dtype, cache, rope) in [
        (Dtype::F32, Dtype::F16, interleaved),
        (Dtype::F16, Dtype::E4m3, half),
        (Dtype::Bf16, Dtype::Bf16, interleaved),
    ] {
        let spec = spec(dtype, cache, rope, 64);
        let steps =
            Rig::new(session.backend, spec, 0, Submitted, 7).and_then(|mut rig| rig.life(SplitPolicy::Auto));
        note(session, &format!("{dtype} over {cache}"), steps.map(numbered));
    }
    session.finish("layers");
}

/// A `kv_b_proj` in e4m3 with a scale for each half of each head: decodes, prefills and prefixes that are kept expanded.
pub fn layers_of_e4m3_weights<B: Backend>(session: &Session<'_, B>) {
    let all = [(Dtype::F16, Dtype::E4m3), (Dtype::Bf16, Dtype::Bf16), (Dtype::F32, Dtype::F16)];
    // Kernels take seconds to compile where there is software only.
    let count = if session.cases == Cases::Full { all.len() } else { 1 };
    for (dtype, cache) in all.into_iter().take(count) {
        let spec = MlaLayer { weight: Dtype::E4m3, ..spec(dtype, cache, RopeLayout::Interleaved, 64) };
        let steps =
            Rig::new(session.backend, spec, PREFIX_ROWS, Submitted, 13).and_then(|mut rig| rig.cascade());
        note(session, &format!("{dtype} over {cache}"), steps);
    }
    session.finish("layers of e4m3 weights");
}

/// A cache of records, where the backend decodes them: every op of a layer, chunks of a long prompt and expanded prefixes too.
pub fn record_layers<B: Backend>(session: &Session<'_, B>) {
    for (dtype, rope) in [(Dtype::F32, RopeLayout::Interleaved), (Dtype::Bf16, RopeLayout::HalfSplit)] {
        let spec = spec(dtype, KvLayout::Ds656, rope, 64);
        // 1 / sqrt(L), as usual of the smaller latents elsewhere.
        let weight = 512f32.sqrt().recip();
        let amplitudes = Amplitudes { w_uk: weight, w_uv: weight, ..Amplitudes::USUAL };
        let rig = |prefix_rows, seed| {
            let spec = (spec, spec.kv.num_pages);
            Rig::with(session.backend, spec, prefix_rows, Submitted, seed, amplitudes)
        };
        let life = rig(0, 7).and_then(|mut rig| rig.life(SplitPolicy::Auto)).map(numbered);
        for steps in [life, rig(PREFIX_ROWS, 11).and_then(|mut rig| rig.cascade())] {
            match steps {
                // The decode says so and what to use.
                Err(Error::LayoutUnsupported { op: "mla_decode", .. }) => session.note("refused", Ok(())),
                steps => note(session, &dtype.to_string(), steps),
            }
        }
    }
    session.finish("layers over records");
}

/// The size of the workspace changes last bits at most, and no bit with splits of a fixed length.
pub fn layer_workspaces<B: Backend>(session: &Session<'_, B>) {
    for (policy, rows) in [(SplitPolicy::Auto, [8, 24]), (SplitPolicy::FixedTokens(8), [8, 41])] {
        let life = |rows: u64| {
            let spec = spec(Dtype::F32, Dtype::F16, RopeLayout::Interleaved, rows);
            Rig::new(session.backend, spec, 0, Submitted, 9)?.life(policy)
        };
        match (life(rows[0]), life(rows[1])) {
            (Ok(small), Ok(large)) => {
                for (index, (small, large)) in small.iter().zip(&large).enumerate() {
                    let name = format!("{policy:?}, step {index}");
                    session.note(&format!("{name}: small"), small.check());
                    session.note(&format!("{name}: large"), large.check());
                    if policy != SplitPolicy::Auto {
                        let same = small.got.iter().zip(&large.got).all(|(a, b)| a.to_bits() == b.to_bits());
                        let what =
                            if same { Ok(()) } else { Err("bits differ with the workspace".to_owned()) };
                        session.note(&format!("{name}: bits"), what);
                    }
                }
            }
            (Err(error), _) | (_, Err(error)) => session.note(&format!("{policy:?}"), Err(error.to_string())),
        }
    }
    session.finish("workspaces of layers");
}
