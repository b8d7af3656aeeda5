//! The variants of `head_project`.

use super::super::project::{Tile, VARIANTS};
use super::*;
use crate::ops::{HeadProject, WeightOrder};

/// k and n of DeepSeek-V2 and V3, of GLM and MiniCPM3, and small ones.
const DIMS: [(u32, u32); 6] = [(128, 512), (512, 128), (64, 256), (256, 192), (192, 512), (32, 64)];

fn specs() -> impl Iterator<Item = HeadProject> {
    let codes = [Dtype::Bf16, Dtype::E4m3, Dtype::Bf16];
    let dtypes = [[Dtype::Bf16; 3], [Dtype::F16; 3], [Dtype::F32, Dtype::Bf16, Dtype::F32], codes];
    DIMS.into_iter().flat_map(move |(k, n)| {
        dtypes.into_iter().flat_map(move |[input, weight, output]| {
            [WeightOrder::Kn, WeightOrder::Nk].into_iter().flat_map(move |order| {
                let spec = move |num_heads| HeadProject {
                    input,
                    weight: weight.into(),
                    output,
                    num_heads,
                    k,
                    n,
                    order,
                    guard: false,
                };
                [1, 16, 128].map(spec)
            })
        })
    })
}

#[test]
fn matrices_fit_the_device_that_they_are_composed_for() {
    let capabilities = capabilities(&super::body("coop"));
    let mut seen = std::collections::HashSet::new();
    for caps in devices().into_iter().filter(|caps| caps.cooperative_tile > 0) {
        for spec in specs() {
            let Ok((tiles, _)) = variants::choose(&VARIANTS, &caps, &spec, Some("coop")) else {
                // f32 rows of x are staged in two parts, and long ones take many registers.
                let is_tight = spec.input == Dtype::F32 && caps.workgroup_memory_bytes < 48 << 10;
                assert!(spec.k * spec.n < 4096 || is_tight, "{spec:?} on {caps:?}");
                continue;
            };
            for tile in tiles {
                let source = tile.source(&caps, &spec);
                if !seen.insert(source.text.clone()) {
                    continue;
                }
                let valid = valid(&source, capabilities);
                let (module, _) = &*valid;
                assert!(!source.text.contains("// unroll"), "{}: a loop is left rolled", source.label);
                let threads: u32 = module.entry_points[0].workgroup_size.iter().product();
                assert!(threads <= caps.max_invocations);
                let shared = sizes(module, |space| space == AddressSpace::WorkGroup);
                assert!(shared.iter().all(|(_, bytes)| bytes.is_multiple_of(16)), "{shared:?}");
                let bytes: u32 = shared.iter().map(|(_, bytes)| bytes).sum();
                assert!(bytes <= caps.workgroup_memory_bytes, "{}: {bytes}", source.label);
            }
        }
    }
    assert!(seen.len() > 50);
}

#[test]
fn few_tokens_get_narrow_tiles_that_fill_a_card() {
    let card = devices()[3];
    let spec = |k, n, num_heads, order| HeadProject {
        input: Dtype::Bf16,
        weight: Dtype::Bf16.into(),
        output: Dtype::Bf16,
        num_heads,
        k,
        n,
        order,
        guard: false,
    };
    for (spec, want) in [
        (spec(128, 512, 16, WeightOrder::Kn), [8, 8]),
        (spec(512, 128, 16, WeightOrder::Nk), [4, 2]),
        (spec(512, 128, 128, WeightOrder::Nk), [2, 2]),
    ] {
        let (tiles, choice) = variants::choose(&VARIANTS, &card, &spec, None).expect("some variant runs");
        assert_eq!(choice.variant, "coop", "{}", choice.why);
        assert_eq!(tiles.map(|tile: Tile| tile.column_groups(&spec)), want);
    }
    let software = devices()[1];
    let spec = spec(128, 512, 16, WeightOrder::Kn);
    let (_, choice) = variants::choose(&VARIANTS, &software, &spec, None).expect("some variant runs");
    assert_eq!(choice.variant, "direct", "{}", choice.why);
}
