//! The devices of `scripts/vendors.sh`, with the capabilities that their drivers report there, and the variant that each gets.

use super::*;

/// What Mesa's drivers report, for the features and limits of `wanted`.
const CARD: Caps = Caps {
    kind: DeviceKind::Discrete,
    subgroups: true,
    min_subgroup_size: 32,
    max_subgroup_size: 32,
    shader_f16: true,
    f16_subnormals: true,
    workgroup_memory_bytes: 64 << 10,
    max_invocations: 1024,
    max_binding_bytes: (2 << 30) - 4,
    max_buffer_bytes: (2 << 30) - 1,
    ..Caps::WEBGPU
};

const RDNA2: Caps = Caps { max_subgroup_size: 64, ..CARD };
const RDNA3: Caps = Caps { cooperative_tile: 16, ..RDNA2 };
const VEGA: Caps = Caps { min_subgroup_size: 64, max_subgroup_size: 64, ..CARD };
const M1: Caps = Caps { kind: DeviceKind::Integrated, workgroup_memory_bytes: 32 << 10, ..CARD };
const ADRENO: Caps = Caps {
    kind: DeviceKind::Integrated,
    min_subgroup_size: 64,
    max_subgroup_size: 128,
    shader_f16: false,
    f16_subnormals: false,
    workgroup_memory_bytes: 32 << 10,
    max_binding_bytes: 128 << 20,
    ..CARD
};
const TURING: Caps =
    Caps { cooperative_tile: 16, workgroup_memory_bytes: 48 << 10, max_buffer_bytes: 2 << 30, ..CARD };

const ARC: Caps = Caps { min_subgroup_size: 8, max_subgroup_size: 32, f16_subnormals: false, ..CARD };
const INTEL: Caps = Caps { kind: DeviceKind::Integrated, ..ARC };
const BATTLEMAGE: Caps = Caps { min_subgroup_size: 16, workgroup_memory_bytes: 128 << 10, ..ARC };
const LUNAR_LAKE: Caps = Caps { kind: DeviceKind::Integrated, ..BATTLEMAGE };

/// Name, capabilities, and the variant of a decode from each cache of [`Dtype::ALL`].
fn vendors() -> [(&'static str, Caps, [&'static str; 4]); 13] {
    let subgroup = ["subgroup"; 4];
    [
        ("AMD RDNA2", RDNA2, subgroup),
        ("AMD RDNA3", RDNA3, subgroup),
        ("AMD RDNA4", RDNA3, subgroup),
        ("AMD Vega", VEGA, subgroup),
        ("Intel Skylake", INTEL, subgroup),
        ("Intel Tiger Lake", INTEL, subgroup),
        ("Intel Arc A770", ARC, subgroup),
        ("Intel Meteor Lake", INTEL, subgroup),
        ("Intel Lunar Lake", LUNAR_LAKE, subgroup),
        ("Intel Battlemage", BATTLEMAGE, subgroup),
        ("Apple M1", M1, subgroup),
        ("Qualcomm Adreno 740", ADRENO, subgroup),
        ("NVIDIA Turing", TURING, ["subgroup", "coop", "coop", "coop"]),
    ]
}

#[test]
fn each_vendor_gets_its_variant() {
    for (name, caps, rows) in vendors() {
        for (cache, row) in Dtype::ALL.into_iter().zip(rows) {
            let spec = spec((512, 64), 16, Dtype::F16, cache, Dtype::F16);
            let (chosen, why) = choose(None, &caps, &spec).expect("some variant runs everywhere");
            assert_eq!(chosen.name(), row, "{name}, {cache} cache: {why}");
            for better in Body::ALL.iter().take_while(|better| **better != chosen) {
                let lacks = format!("not {}: ", better.name());
                assert!(why.contains(&lacks), "{name}, {cache} cache: {why:?} does not say why {lacks}");
            }
        }
    }
}

/// What is chosen uses nothing that the device does not have, and fits it.
#[test]
fn each_vendors_kernels_fit_it() {
    for (name, caps, _) in vendors() {
        for dims in all_dims() {
            for (query, cache, out) in all_dtypes() {
                for heads in [16, 20, 128] {
                    let spec = spec(dims, heads, query, cache, out);
                    let (variant, _) = choose(None, &caps, &spec).expect("some variant runs everywhere");
                    let tiling = variant.tiling(&caps, &DecodeRequest::one_token(&spec)).expect("it runs");
                    let num_partials = u64::from(tiling.target_items) * u64::from(tiling.rows_per_tile);
                    let partials = num_partials * (u64::from(dims.0) + 4) * 4;
                    assert!(
                        partials <= caps.max_binding_bytes,
                        "{name}, {spec:?}: {partials} bytes of partial results"
                    );
                    if heads == 16 {
                        check_decode(&variant, &caps, &spec, 1, false);
                    }
                }
            }
        }
    }
}

/// `scripts/vendors.sh` writes what the drivers say into the results; here it must be the same.
#[test]
fn the_capabilities_are_those_of_the_drivers() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/results/vendors.md");
    let text = std::fs::read_to_string(path).expect("the results are part of the repository");
    for (name, caps, _) in vendors() {
        let heading = format!("## {name} ");
        let section = text.split(&heading).nth(1).unwrap_or_else(|| panic!("no section {heading:?}"));
        let section = section.split("\n## ").next().unwrap_or_default();
        // Reports of older versions have no such field; whoever has the adapter knows its matrices.
        let known = format!("`{caps:?}`").replace("matrices_unknown: false, ", "");
        let section = section.replace("matrices_unknown: false, ", "");
        assert!(section.contains(&known), "{name}: run scripts/vendors.sh; not {caps:?}");
    }
}
