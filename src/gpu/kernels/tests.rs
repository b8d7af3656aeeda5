//! The composed kernels as naga reads them: they are valid, they fit the device that they were composed for, and they
//! agree with the host on every layout.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};
use naga::{AddressSpace, Expression, Literal, Module, TypeInner};

use super::compose::Source;
use super::decode::plain::Tile;
use super::decode::{Body, Merging, Sum, VARIANTS, coop, split};
use crate::base::dtype::Dtype;
use crate::cache::decode_spec::MlaDecode;
use crate::cache::{KvSpec, MlaShape, SUPPORTED_DIMS};
use crate::gpu::caps::{Caps, DeviceKind, STORAGE_BUFFERS};
use crate::ops::{DecodeOptions, DecodeRequest, Features, variants};
use crate::plan::{Batch, Plan, SplitPolicy};

mod dx12;
mod layouts;
mod literals;
mod optional;
mod projections;
mod selection;
mod vendors;
mod writers;

const HEADS: [u32; 7] = [1, 6, 8, 16, 20, 40, 128];
const OUTS: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

/// WebGPU's defaults, software devices, a large card, an Apple M1 on Vulkan and on Metal: limits as their drivers report
/// them.
fn devices() -> [Caps; 6] {
    let subgroups = |kind, lanes, kib: u32, cooperative_tile| Caps {
        kind,
        subgroups: true,
        min_subgroup_size: lanes,
        max_subgroup_size: lanes,
        shader_f16: true,
        deep_loads: kind == DeviceKind::Discrete,
        f16_subnormals: true,
        cooperative_tile,
        workgroup_memory_bytes: kib << 10,
        max_invocations: 1024,
        ..Caps::WEBGPU
    };
    [
        Caps::WEBGPU,
        subgroups(DeviceKind::Software, 8, 32, 8),
        subgroups(DeviceKind::Software, 8, 48, 8),
        subgroups(DeviceKind::Discrete, 32, 48, 16),
        subgroups(DeviceKind::Integrated, 32, 32, 0),
        subgroups(DeviceKind::Integrated, 32, 32, 8),
    ]
}

fn body(name: &str) -> Body {
    Body::ALL.into_iter().find(|body| body.name() == name).expect("there is such a variant")
}

fn decode(
    body: &Body,
    caps: &Caps,
    spec: &MlaDecode,
    query_tokens: u32,
    clamp_pages: bool,
) -> Option<Source> {
    let options = DecodeOptions { query_tokens, device_page_list: clamp_pages, ..DecodeOptions::default() };
    split(*body, caps, &DecodeRequest::new(spec, &options))
}

/// The variant that is selected, and why.
fn choose(forced: Option<&str>, caps: &Caps, spec: &MlaDecode) -> crate::base::error::Result<(Body, String)> {
    let (kernel, choice) = variants::choose(&VARIANTS, caps, &DecodeRequest::one_token(spec), forced)?;
    Ok((kernel.body, choice.why))
}

fn spec(dims: (u32, u32), num_heads: u32, query: Dtype, cache: Dtype, out: Dtype) -> MlaDecode {
    MlaDecode {
        shape: MlaShape { num_heads, kv_lora_rank: dims.0, qk_rope_head_dim: dims.1 },
        kv: KvSpec { layout: cache.into(), page_size: 16, num_pages: 64 },
        query,
        out,
    }
}

fn all_dims() -> impl Iterator<Item = (u32, u32)> {
    SUPPORTED_DIMS.iter().map(|&(l, r, _)| (l, r))
}

/// Every `(query, cache, out)`.
fn all_dtypes() -> Vec<(Dtype, Dtype, Dtype)> {
    let pairs = Dtype::ALL.into_iter().flat_map(|query| Dtype::ALL.map(|cache| (query, cache)));
    pairs.flat_map(|(query, cache)| OUTS.map(|out| (query, cache, out))).collect()
}

/// Reading f16 as f32 is part of WGSL without features, though naga can be told otherwise.
pub(in crate::gpu) const PLAIN: Capabilities = Capabilities::SHADER_FLOAT16_IN_FLOAT32;

/// What wgpu allows on a device with the features that the variant asks for, and no more.
fn capabilities(variant: &Body) -> Capabilities {
    match *variant {
        Body::Plain(Sum::Shared) => PLAIN,
        Body::Plain(Sum::Subgroup) => PLAIN | Capabilities::SUBGROUP,
        Body::Coop { .. } => {
            PLAIN
                | Capabilities::SUBGROUP
                | Capabilities::SHADER_FLOAT16
                | Capabilities::SHADER_INT16
                | Capabilities::COOPERATIVE_MATRIX
        }
    }
}

/// Kernels that [`valid`] keeps: a module takes up to a MB.
const MOST_KEPT: usize = 300;

/// A kernel as naga has it.
pub(in crate::gpu) type Valid = Arc<(Module, ModuleInfo)>;

/// Parses and validates as wgpu does on a device with these capabilities: each text once, as several devices and tests have it.
pub(in crate::gpu) fn valid(source: &Source, capabilities: Capabilities) -> Valid {
    static VALID: LazyLock<Mutex<HashMap<(u64, String), Valid>>> = LazyLock::new(Mutex::default);
    let lock = || VALID.lock().unwrap_or_else(PoisonError::into_inner);
    let key = (capabilities.bits(), source.text.clone());
    if let Some(found) = lock().get(&key) {
        return found.clone();
    }
    let module = naga::front::wgsl::parse_str(&source.text)
        .unwrap_or_else(|error| panic!("{}: {}", source.label, error.emit_to_string(&source.text)));
    let info = validate(&module, capabilities)
        .unwrap_or_else(|error| panic!("{}: {}", source.label, error.emit_to_string(&source.text)));
    let found = Arc::new((module, info));
    let mut kept = lock();
    if kept.len() == MOST_KEPT {
        kept.clear();
    }
    kept.insert(key, found.clone());
    found
}

fn validate(
    module: &Module,
    capabilities: Capabilities,
) -> Result<ModuleInfo, Box<naga::WithSpan<naga::valid::ValidationError>>> {
    Validator::new(ValidationFlags::all(), capabilities).validate(module).map_err(Box::new)
}

/// Bytes of each variable of an address space, with its name.
fn sizes(module: &Module, wanted: impl Fn(AddressSpace) -> bool) -> Vec<(String, u32)> {
    let context = module.to_ctx();
    module
        .global_variables
        .iter()
        .filter(|(_, variable)| wanted(variable.space))
        .map(|(_, variable)| {
            (variable.name.clone().unwrap_or_default(), module.types[variable.ty].inner.size(context))
        })
        .collect()
}

/// What holds for every kernel of a step.
fn check_module(source: &Source, module: &Module, caps: &Caps) {
    let label = &source.label;
    assert!(!source.text.contains("// unroll"), "{label}: a marked loop was left rolled");
    let [entry] = &module.entry_points[..] else { panic!("{label}: one entry point, please") };
    assert_eq!(entry.name, source.entry);
    let threads: u32 = entry.workgroup_size.iter().product();
    assert_eq!(source.threads(), threads, "{label}");
    assert!(threads <= caps.max_invocations.min(256), "{label}: {threads} invocations");

    let shared = sizes(module, |space| space == AddressSpace::WorkGroup);
    for (name, bytes) in &shared {
        // Others would shift their neighbours off 16-byte alignment, which some drivers do not expect.
        assert!(bytes.is_multiple_of(16), "{label}: {name} has {bytes} bytes of workgroup memory");
    }
    let bytes: u32 = shared.iter().map(|(_, bytes)| bytes).sum();
    assert!(bytes <= caps.workgroup_memory_bytes, "{label}: {bytes} bytes of workgroup memory");

    let storage = sizes(module, |space| matches!(space, AddressSpace::Storage { .. })).len() as u32;
    // Lists take the page list's place, and the merge binds neither. Counters beside the eight of a rope_append are a ninth.
    let more = u32::from(label.starts_with("mla.rope_append.") && label.ends_with(".guarded"));
    assert!(storage <= STORAGE_BUFFERS + more, "{label}: {storage} storage buffers");
    assert!(storage <= Caps::WEBGPU.max_storage_buffers + more);

    // Past about 256 words a lane, drivers spill. Variants on cooperative matrices unroll scopes whose variables do not live at the same
    // time, so the count says less of them. The few lanes of a software device hold as much as a card's, and have no
    // registers to run out of.
    let has_matrices = source.text.contains("coop_mat");
    let most = match caps.kind {
        DeviceKind::Software if has_matrices => 8192,
        _ if has_matrices => 2560,
        _ => 1024,
    };
    // The unroller's copies of a variable live one after another: the largest counts.
    let mut locals = HashMap::new();
    for (_, local) in entry.function.local_variables.iter() {
        let bytes = locals.entry(local.name.as_deref()).or_insert(0);
        *bytes = lane_bytes(module, local.ty, caps).max(*bytes);
    }
    let bytes: u32 = locals.values().sum();
    assert!(bytes <= most, "{label}: {bytes} bytes of local variables");
}

/// Bytes of a local variable in one lane: a cooperative matrix is spread over a subgroup.
fn lane_bytes(module: &Module, ty: naga::Handle<naga::Type>, caps: &Caps) -> u32 {
    match module.types[ty].inner {
        TypeInner::Array { base, size: naga::ArraySize::Constant(len), .. } => {
            len.get() * lane_bytes(module, base, caps)
        }
        ref inner @ TypeInner::CooperativeMatrix { .. } => {
            inner.size(module.to_ctx()).div_ceil(caps.min_subgroup_size)
        }
        ref inner => inner.size(module.to_ctx()),
    }
}

fn request(spec: &MlaDecode, query_tokens: u32) -> DecodeRequest {
    DecodeRequest::new(spec, &DecodeOptions { query_tokens, ..DecodeOptions::default() })
}

fn check_decode(variant: &Body, caps: &Caps, spec: &MlaDecode, query_tokens: u32, clamp_pages: bool) {
    let source = decode(variant, caps, spec, query_tokens, clamp_pages).expect("composed only where it runs");
    let valid = valid(&source, capabilities(variant));
    let (module, _) = &*valid;
    check_module(&source, module, caps);

    let request = request(spec, query_tokens);
    let (threads, estimate) = match *variant {
        Body::Plain(sum) => {
            let tile = Tile::balanced(sum, caps, &request).expect("it was composed");
            (tile.threads(), tile.workgroup_bytes(sum, request.features))
        }
        Body::Coop { small } => {
            let tile = coop::CoopTile::for_device(small, caps, &request).expect("it was composed");
            (tile.threads(), tile.workgroup_bytes(spec, request.features))
        }
    };
    assert_eq!(module.entry_points[0].workgroup_size, [threads, 1, 1], "{}", source.label);
    // The tile is chosen by this estimate, so it has to be what the device will see.
    let bytes: u32 = sizes(module, |space| space == AddressSpace::WorkGroup).iter().map(|v| v.1).sum();
    assert_eq!(bytes, estimate, "{}", source.label);
    assert_eq!(constant(module, "CLAMP_PAGES"), u32::from(clamp_pages), "{}", source.label);
    let tiling = variant.tiling(caps, &request).expect("it was composed");
    assert_eq!(
        constant(module, "ROWS"),
        tiling.rows_per_tile,
        "{}: what `prepare` checks plans by",
        source.label
    );
    assert_eq!(constant(module, "TOKENS"), tiling.tokens_per_block, "{}", source.label);
}

/// The value of a module constant.
fn constant(module: &Module, name: &str) -> u32 {
    let named = module.constants.iter().find(|(_, constant)| constant.name.as_deref() == Some(name));
    let (_, constant) = named.unwrap_or_else(|| panic!("no constant {name}"));
    match module.global_expressions[constant.init] {
        Expression::Literal(Literal::U32(value)) => value,
        Expression::Literal(Literal::Bool(value)) => u32::from(value),
        ref other => panic!("{name} is {other:?}"),
    }
}

fn runs_somewhere() -> impl Iterator<Item = (Body, Caps)> {
    let any = spec((512, 64), 16, Dtype::F16, Dtype::F16, Dtype::F32);
    let pairs = Body::ALL.into_iter().flat_map(|variant| devices().map(|caps| (variant, caps)));
    pairs.filter(move |(variant, caps)| variant.runs_on(caps, &any).is_ok())
}

/// Whether a variant that runs on a device serves a spec there: only those on cooperative matrices do not serve every one. Where the
/// larger one has no tile, the smaller one serves it.
fn serves(variant: &Body, caps: &Caps, spec: &MlaDecode) -> bool {
    let serves = variant.runs_on(caps, spec);
    let must = match *variant {
        Body::Plain(_) => true,
        Body::Coop { small: false } if serves.is_err() => body("coop_small").runs_on(caps, spec).is_err(),
        Body::Coop { .. } => true,
    };
    let must = must && (spec.kv.dtype() != Dtype::F32 || matches!(*variant, Body::Plain(_)));
    assert!(serves.is_ok() || !must, "{} for {spec:?}: {serves:?}", variant.name());
    serves.is_ok()
}

/// Every tile with a few dtypes each, walked so that all of them are met.
#[test]
fn every_tile_is_valid_and_fits() {
    let dtypes = all_dtypes();
    let mut at = 0;
    for (variant, caps) in runs_somewhere() {
        for dims in all_dims() {
            for heads in HEADS {
                for clamp_pages in [false, true] {
                    let (query, cache, out) = dtypes[at % dtypes.len()];
                    at += 7; // coprime to their number
                    let spec = spec(dims, heads, query, cache, out);
                    if serves(&variant, &caps, &spec) {
                        check_decode(&variant, &caps, &spec, 1, clamp_pages);
                    }
                }
            }
        }
    }
}

/// Tiles for the query tokens of a speculative decode, with a few dtypes each.
#[test]
fn every_tile_for_several_query_tokens_is_valid_and_fits() {
    let dtypes = all_dtypes();
    let mut at = 0;
    for (variant, caps) in runs_somewhere() {
        for dims in all_dims() {
            for heads in [6, 8, 16, 20] {
                for query_tokens in [1, 2, 4] {
                    let (query, cache, out) = dtypes[at % dtypes.len()];
                    at += 7; // coprime to their number
                    let spec = spec(dims, heads, query, cache, out);
                    if serves(&variant, &caps, &spec) {
                        check_decode(&variant, &caps, &spec, query_tokens, at.is_multiple_of(2));
                    }
                }
            }
        }
    }
}

/// Variants on cooperative matrices address pages that hold whole blocks, of 16 tokens or of 32 too, differently from others.
#[test]
fn every_page_size_is_valid_and_fits() {
    for (variant, caps) in runs_somewhere().filter(|(variant, _)| matches!(variant, Body::Coop { .. })) {
        for (page_size, heads) in
            [1, 3, 16, 48, 64, 256].into_iter().flat_map(|size| [(size, 16), (size, 20)])
        {
            let spec = spec((512, 64), heads, Dtype::Bf16, Dtype::E4m3, Dtype::Bf16);
            let spec = MlaDecode { kv: KvSpec { page_size, ..spec.kv }, ..spec };
            if serves(&variant, &caps, &spec) {
                check_decode(&variant, &caps, &spec, 1, false);
            }
        }
    }
}

/// Two query tokens of 16 heads share one tile on a large card, so that the cache is read once.
#[test]
fn two_query_tokens_share_a_tile() {
    let (caps, coop) = (devices()[3], body("coop"));
    let spec = spec((512, 64), 16, Dtype::Bf16, Dtype::Bf16, Dtype::Bf16);
    let num_pages = 3 * 4096 / spec.kv.page_size;
    let spec = MlaDecode { kv: KvSpec { num_pages, ..spec.kv }, ..spec };
    let batch = Batch::new(&[4096; 3], &[0, 2, 4, 6]);
    let plan = |query_tokens, policy| {
        let tiling = coop.tiling(&caps, &request(&spec, query_tokens)).expect("it runs");
        (tiling.rows_per_tile, Plan::new(&spec, &tiling, &batch, policy).expect("a good batch"))
    };
    for (query_tokens, rows, items) in [(0, 16, 6), (1, 16, 6), (2, 32, 3)] {
        let (rows_per_tile, plan) = plan(query_tokens, SplitPolicy::OneSplit);
        assert_eq!((rows_per_tile, plan.items.len()), (rows, items), "{query_tokens} query tokens");
    }
    let (_, plan) = plan(2, SplitPolicy::Auto);
    let attended: u32 = plan.items.iter().map(|item| item.kv_end - item.kv_begin).sum();
    assert_eq!(attended, 3 * 4096, "each token of the cache is in one item");
    // What a host may have guessed wrong, or meant as `as many as come`.
    assert!(coop.tiling(&caps, &request(&spec, u32::MAX)).is_some());
}

/// Every triple of dtypes, on the weakest device of each variant.
#[test]
fn every_dtype_is_valid_in_every_variant() {
    for variant in Body::ALL {
        let caps = devices().into_iter().find(|caps| {
            variant.runs_on(caps, &spec((512, 64), 8, Dtype::F32, Dtype::F16, Dtype::F32)).is_ok()
        });
        let caps = caps.expect("each variant runs somewhere");
        for (i, (query, cache, out)) in all_dtypes().into_iter().enumerate() {
            let dims = all_dims().nth(i % SUPPORTED_DIMS.len()).expect("in range");
            let spec = spec(dims, 8, query, cache, out);
            if serves(&variant, &caps, &spec) {
                check_decode(&variant, &caps, &spec, 1, i % 2 == 0);
            }
        }
    }
}

#[test]
fn every_merge_is_valid_and_fits() {
    for dims in all_dims() {
        for (query, cache, out) in all_dtypes() {
            for (merging, pins_loads) in Merging::ALL.iter().flat_map(|m| [(m, false), (m, true)]) {
                let source = merging.source(&spec(dims, 16, query, cache, out), Features::NONE, pins_loads);
                let valid = valid(&source, PLAIN);
                let (module, _) = &*valid;
                check_module(&source, module, &Caps::WEBGPU);
            }
        }
    }
}

/// Totals cost time and registers: only what promises f32 has them, and the text of every other kernel is without.
#[test]
fn only_kernels_of_f32_sum_in_levels() {
    let has_levels = |source: &Source| {
        assert!(!source.text.lines().any(|line| line.ends_with("// all f32")), "{}", source.label);
        ["total_max", "mid_sum", "load_total("].iter().any(|name| source.text.contains(name))
    };
    for (query, cache, out) in all_dtypes() {
        let is_all_f32 = [query, cache, out] == [Dtype::F32; 3];
        let spec = spec((256, 32), 8, query, cache, out);
        for variant in Body::ALL {
            let caps = devices().into_iter().find(|caps| variant.runs_on(caps, &spec).is_ok());
            if let Some(source) = caps.and_then(|caps| decode(&variant, &caps, &spec, 1, false)) {
                assert_eq!(has_levels(&source), is_all_f32, "{}", source.label);
            }
        }
        for merging in Merging::ALL {
            let source = merging.source(&spec, Features::NONE, false);
            assert_eq!(has_levels(&source), is_all_f32, "{} for {spec:?}", source.label);
        }
    }
    for source in
        crate::gpu::kernels::prefill::every_source(&<crate::ops::MlaPrefill as crate::ops::Op>::samples())
    {
        let is_all_f32 = source.label.contains(".f32.out_f32.");
        assert_eq!(has_levels(&source), is_all_f32, "{}", source.label);
    }
}

/// An LSE would have rounded the sum of the weights away where logits are large.
#[test]
fn partial_results_keep_their_maximum_and_their_sum_apart() {
    let spec = spec((512, 64), 16, Dtype::Bf16, Dtype::Bf16, Dtype::F32);
    for (variant, caps) in runs_somewhere() {
        let source = decode(&variant, &caps, &spec, 1, false).expect("it runs");
        let last_quad = |line: &&str| line.contains("2u * LATENT_OCTS] = vec4<f32>(");
        let quads: Vec<&str> = source.text.lines().filter(last_quad).collect();
        let holds = |quad: &&str| quad.contains("sum") && !quad.contains("log2");
        assert!(!quads.is_empty() && quads.iter().all(holds), "{}: {quads:?}", source.label);
    }
}

/// A variant needs each capability that it asks for.
#[test]
fn variants_ask_for_what_they_use() {
    let caps = devices()[3];
    let spec = spec((512, 64), 16, Dtype::F16, Dtype::E4m3, Dtype::F32);
    for variant in Body::ALL {
        let source = decode(&variant, &caps, &spec, 1, false).expect("it runs");
        let valid = valid(&source, capabilities(&variant));
        let (module, _) = &*valid;
        for one in capabilities(&variant).difference(PLAIN).iter() {
            let others = capabilities(&variant).difference(one);
            assert!(validate(module, others).is_err(), "{} is valid without {one:?}", variant.name());
        }
    }
}

#[test]
fn variants_on_matrices_round_the_weights() {
    let spec = spec((512, 64), 16, Dtype::F16, Dtype::F16, Dtype::F32);
    let all = variants::candidates(&VARIANTS, &devices()[3], &DecodeRequest::one_token(&spec));
    let rounding: Vec<_> =
        all.iter().filter(|candidate| candidate.rounds_weights).map(|candidate| candidate.name).collect();
    assert_eq!(rounding, ["coop", "coop_small"]);
    assert_eq!(all.iter().map(|candidate| candidate.name).collect::<Vec<_>>(), Body::ALL.map(Body::name));
}
