//! Which variant and tile a device gets, and what it is told where it gets none.

use super::*;

/// Query rows of a tile that hold no head, as a share of all rows computed, in percent: a row group without a head
/// computes nothing.
fn waste(heads: u32, tile: &Tile) -> u32 {
    let computed = heads.next_multiple_of(tile.rows_per_group);
    (computed - heads) * 100 / computed
}

#[test]
fn tiles_serve_many_heads_and_waste_few_rows() {
    let mut worst = (0, String::new());
    for (variant, caps) in runs_somewhere() {
        // A cooperative matrix has a fixed number of rows.
        let Body::Plain(sum) = variant else { continue };
        for dims in all_dims() {
            let tile = |heads| {
                let spec = spec(dims, heads, Dtype::F16, Dtype::F16, Dtype::F32);
                Tile::balanced(
                    sum,
                    &caps,
                    &DecodeRequest { query_rows: heads, ..DecodeRequest::one_token(&spec) },
                )
                .expect("it runs")
            };
            for heads in 1..=128u32 {
                let tile = tile(heads);
                let rows = tile.rows();
                let what = format!("{} {dims:?} {heads} heads: tiles of {rows} rows", variant.name());
                let least = if caps == Caps::WEBGPU { 4 } else { 8 };
                assert!(heads < 8 || rows >= least, "{what}");
                let idle = (heads.next_multiple_of(rows) - heads) * 100 / heads.next_multiple_of(rows);
                assert!(idle <= 25, "{what}: {idle} % wasted");
                if idle > worst.0 {
                    worst = (idle, what);
                }
            }
            // Heads of real models that are no power of two.
            for heads in [6, 12, 20, 40, 96] {
                assert_eq!(waste(heads, &tile(heads)), 0, "{} {dims:?}: {heads} heads", variant.name());
            }
        }
    }
    println!("most wasted rows: {} % by {}", worst.0, worst.1);
}

#[test]
fn what_a_device_lacks_is_said() {
    let spec = spec((512, 64), 16, Dtype::F16, Dtype::F16, Dtype::F32);
    let [_, software, _, good, plain, metal] = devices();
    let small = Caps { kind: DeviceKind::Discrete, ..software };
    let [coop, coop_small, subgroup, shared] = ["coop", "coop_small", "subgroup", "shared"].map(body);
    let select = |caps: &Caps, spec: &MlaDecode| choose(None, caps, spec).ok().map(|(variant, _)| variant);
    assert_eq!(select(&good, &spec), Some(coop));
    assert_eq!(select(&small, &spec), Some(coop_small));
    assert_eq!(select(&metal, &spec), Some(coop_small));
    // It runs there, but slower.
    assert_eq!(select(&software, &spec), Some(subgroup));
    assert_eq!(
        choose(Some("coop_small"), &software, &spec).ok().map(|(variant, _)| variant),
        Some(coop_small)
    );
    assert_eq!(select(&plain, &spec), Some(subgroup));
    assert_eq!(select(&Caps::WEBGPU, &spec), Some(shared));
    for (what, caps, variant) in [
        ("cooperative matrices", plain, coop),
        ("SHADER_F16", Caps { shader_f16: false, ..good }, coop),
        ("SUBGROUP", Caps { subgroups: false, ..good }, coop),
        ("vary from 32 to 64", Caps { max_subgroup_size: 64, ..good }, coop),
        ("workgroup memory", small, coop),
        ("workgroup memory", Caps { workgroup_memory_bytes: 16 << 10, ..good }, coop_small),
        ("storage buffers", Caps { max_storage_buffers: 7, ..good }, coop),
        ("SUBGROUP", Caps { subgroups: false, ..good }, subgroup),
        ("4 lanes", Caps { min_subgroup_size: 4, ..good }, subgroup),
        ("storage buffers", Caps { max_storage_buffers: 7, ..good }, shared),
        ("workgroup memory", Caps { workgroup_memory_bytes: 512, ..good }, shared),
        ("invocations", Caps { max_invocations: 127, ..good }, shared),
        ("invocations", Caps { max_invocations: 32, ..good }, shared),
    ] {
        let why = variant.runs_on(&caps, &spec).expect_err(what);
        assert!(why.contains(what), "{why:?} does not say {what:?}");
    }
    let f32_cache = MlaDecode { kv: KvSpec { layout: Dtype::F32.into(), ..spec.kv }, ..spec };
    assert_eq!(select(&good, &f32_cache), Some(subgroup));
    let why = coop.runs_on(&good, &f32_cache).expect_err("f16 does not hold f32");
    assert!(why.contains("f32 cache"), "{why:?}");
}

/// Intel's compiler spills with more rows a thread: `benches/results/vendors.md`.
#[test]
fn intels_threads_have_two_rows() {
    let [.., card, integrated, _] = devices();
    for caps in [card, integrated].map(|caps| Caps { min_subgroup_size: 8, ..caps }) {
        for (dims, heads) in all_dims().flat_map(|dims| HEADS.map(|heads| (dims, heads))) {
            let spec = spec(dims, heads, Dtype::F16, Dtype::F16, Dtype::F32);
            let tile = Tile::balanced(
                Sum::Subgroup,
                &caps,
                &DecodeRequest { query_rows: heads, ..DecodeRequest::one_token(&spec) },
            )
            .expect("it runs");
            assert!(tile.rows_per_group <= 2 && tile.threads() <= 256, "{heads} heads: {tile:?}");
            assert!(heads < 16 || tile.rows() >= 8, "{heads} heads: {tile:?}");
        }
        let spec = spec((512, 64), 16, Dtype::F16, Dtype::F16, Dtype::F32);
        let (chosen, why) = choose(None, &caps, &spec).expect("some variant runs everywhere");
        assert_eq!(chosen.name(), "subgroup", "{why}");
    }
}

/// A promise: there is a variant for every device of WebGPU, whatever else it has.
#[test]
fn some_variant_runs_on_every_device() {
    for caps in devices().into_iter().flat_map(|caps| caps.downgrades()) {
        for dims in all_dims() {
            for heads in 1..=128 {
                for (query, cache, out) in
                    [(Dtype::F32, Dtype::F32, Dtype::F32), (Dtype::E4m3, Dtype::E4m3, Dtype::Bf16)]
                {
                    let spec = spec(dims, heads, query, cache, out);
                    let variant = choose(None, &caps.1, &spec)
                        .unwrap_or_else(|_| panic!("none on {caps:?} for {spec:?}"))
                        .0;
                    assert!(variant.tiling(&caps.1, &DecodeRequest::one_token(&spec)).is_some());
                }
            }
        }
    }
}
