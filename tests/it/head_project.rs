//! Each variant of `head_project` on the adapter that `Gpu::new` picks, forced by name, and ranges of tokens.
//!
//! The variant `coop` runs on a card, and on Mesa 26's software driver: `scripts/vendors.sh mesa26`.

use crate::harness::count;
use mla_support::paint::POISON;
use mla_support::suite::memory::{download, upload};
use mla_support::suite::project::{Case, Data, check, q8_0, spec};
use mla_support::suite::run::Layout;
use mla_support::{Ignored, Outcome};
use wgpu_mla::gpu::Gpu;
use wgpu_mla::{
    Device, DeviceKind, Dtype, Error, HeadProject, HeadProjectArgs, OpOptions, View, WeightOrder, WeightView,
};

use Dtype::{Bf16, E4m3, F16, F32};
use WeightOrder::{Kn, Nk};

fn forced(variant: &str) -> OpOptions {
    OpOptions { variant: Some(variant.into()) }
}

/// Why a variant does not serve a spec here, if so.
fn lacks(gpu: &Gpu, variant: &str, spec: HeadProject) -> Option<String> {
    match gpu.compile_with(spec, &forced(variant)) {
        Ok(project) => {
            assert_eq!(project.variant(), variant);
            None
        }
        Err(Error::VariantUnavailable { why, .. }) => Some(why),
        Err(error) => panic!("{variant} of {spec:?}: {error}"),
    }
}

fn cases(variant: &str, cases: &[Case]) -> Outcome {
    let gpu = mla_support::gpu()?;
    let (mut failures, mut not_served) = (Vec::new(), Vec::new());
    for case in cases {
        match lacks(&gpu, variant, case.spec) {
            Some(why) => not_served.push(why),
            None => {
                let wrong = check(&gpu, case, Some(variant)).err();
                failures.extend(wrong.map(|error| format!("{variant} {case:?}: {error}")));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    let ran = cases.len() - not_served.len();
    count(&format!("wgpu head_project {variant}"), ran, not_served.len());
    match not_served.pop() {
        Some(why) if ran == 0 => {
            Err(Ignored(format!("{variant} serves none of its {} cases: {why}", cases.len())))
        }
        _ => Ok(()),
    }
}

/// Dtypes and orders, with a tile that is not full, more than one, and all heads.
fn coop_dtypes() -> Outcome {
    let mut all = Vec::new();
    for (turn, dtypes) in
        [[F16, F16, F32], [Bf16; 3], [F32, Bf16, F32], [Bf16, F16, F16], [F32, F16, Bf16], [F16, Bf16, F16]]
            .into_iter()
            .chain([[Bf16, E4m3, Bf16], [F16, E4m3, F32], [F32, E4m3, F16]])
            .enumerate()
    {
        for order in [Kn, Nk] {
            let spec = spec(dtypes, 3, [(64, 32), (32, 64), (96, 48)][turn % 3], order);
            let case = Case::new(spec, [5, 70][turn % 2]);
            all.push(Case { shared: turn % 2 == 1, one_scale: turn == 7, ..case });
        }
    }
    cases("coop", &all)
}

fn coop_hard_data() -> Outcome {
    let case = |data, dtypes, order| Case { data, ..Case::new(spec(dtypes, 2, (64, 32), order), 9) };
    let some = [[Bf16; 3], [F32, Bf16, F32]].into_iter().zip([Kn, Nk]);
    let all = some.flat_map(|(dtypes, order)| [Data::Hard, Data::Tiny].map(|data| case(data, dtypes, order)));
    cases("coop", &all.collect::<Vec<_>>())
}

/// The dims of DeepSeek-V3, whose chunks and splits differ from those of small ones; layouts.
fn coop_dims_of_models() -> Outcome {
    let case = |k, n, heads, order, layout| {
        let case = Case::new(spec([Bf16; 3], heads, (k, n), order), 66);
        Case { layout, ..case }
    };
    let some = [
        case(128, 512, 2, Kn, Layout::Dense),
        case(512, 128, 2, Nk, Layout::HeadMajor),
        // Enough workgroups for the widest tile.
        case(64, 256, 40, Kn, Layout::Gaps),
    ];
    cases("coop", &some)
}

fn dtypes(variant: &str) -> Outcome {
    let mut all = Vec::new();
    for (turn, dtypes) in [[F32; 3], [Bf16; 3], [F16, Bf16, F32]].into_iter().enumerate() {
        for order in [Kn, Nk] {
            let case = Case::new(spec(dtypes, 3, (40, 72), order), [3, 70, 17][turn]);
            all.push(Case { layout: [Layout::HeadMajor, Layout::Gaps][turn % 2], ..case });
        }
    }
    let codes = Case::new(spec([F32, E4m3, F32], 3, (40, 80), Kn), 17);
    let blocks = Case::new(q8_0([Bf16, F32], 3, (64, 40), Nk), 17);
    all.extend([codes, Case { layout: Layout::HeadMajor, ..blocks }]);
    cases(variant, &all)
}

fn plain_dtypes() -> Outcome {
    dtypes("plain")
}

fn direct_dtypes() -> Outcome {
    dtypes("direct")?;
    let hard = |order| Case { data: Data::Hard, ..Case::new(spec([Bf16; 3], 2, (64, 32), order), 9) };
    cases(
        "direct",
        &[hard(Kn), hard(Nk), Case { shared: true, ..Case::new(spec([F32; 3], 3, (64, 40), Nk), 6) }],
    )
}

/// A binding serves any range of its tokens; the others keep their bytes.
fn a_step_names_its_tokens() -> Outcome {
    let gpu = mla_support::gpu()?;
    let spec = spec([F32; 3], 2, (16, 8), Kn);
    let (heads, tokens) = (2, 40);
    let x: Vec<f32> = (0..tokens * heads * 16).map(|i| (i % 97) as f32).collect();
    let x_buffer = upload(&gpu, &F32.encode_all(&x)).expect("uploads");
    let ones = upload(&gpu, &F32.encode_all(&[1.0; 2 * 16 * 8])).expect("uploads");
    let y_bytes = tokens * heads * 8 * 4;
    let project = gpu.compile(spec).expect("compiles");
    let mut step = project.step(0).expect("a step");
    for tokens in [0..40, 39..40, 3..33, 7..7] {
        let y = upload(&gpu, &vec![POISON; y_bytes]).expect("uploads");
        let args = HeadProjectArgs {
            x: View::dense(&x_buffer, 2, 16),
            weight: WeightView { buffer: &ones, offset: 0, head_stride: 128, row_stride: 8, scales: None },
            y: View::dense(&y, 2, 8),
            scale: 1.0,
            out_scale: 1.0,
            saturates: false,
            guard: None,
        };
        let binding = project.bind(&args, 40).expect("binds");
        project.prepare(&mut step, tokens.clone()).expect("prepares");
        project.run(&step, &binding).expect("runs");
        let sums: Vec<f32> = x.chunks(16).flat_map(|row| [row.iter().sum::<f32>(); 8]).collect();
        let row = heads * 8 * 4;
        let mut want = vec![POISON; y_bytes];
        let range = tokens.start as usize * row..tokens.end as usize * row;
        want[range.clone()].copy_from_slice(&F32.encode_all(&sums)[range]);
        assert!(download(&gpu, &y, y_bytes).expect("downloads")[..y_bytes] == want, "{tokens:?}");
        project.prepare(&mut step, 1..41).expect("prepares");
        let error = project.run(&step, &binding).expect_err("one too many");
        assert!(matches!(error, Error::LayoutMismatch { .. }), "{error}");
    }
    Ok(())
}

fn variants_are_chosen_and_forced_by_name() -> Outcome {
    let gpu = mla_support::gpu()?;
    let spec = spec([F32; 3], 2, (16, 16), Nk);
    let project = gpu.compile(spec).expect("some variant runs");
    let software = gpu.caps().kind == DeviceKind::Software;
    let variant = if software { "direct" } else { "plain" };
    assert_eq!(project.variant(), variant, "{}: f32 weights", project.why());
    for (name, why) in [("coop", "coop"), ("none such", "coop, direct, plain")] {
        let error = gpu.compile_with(spec, &forced(name)).expect_err("does not run");
        assert!(
            matches!(error, Error::VariantUnavailable { .. }) && error.to_string().contains(why),
            "{error}"
        );
    }
    println!("{}", gpu.name());
    Ok(())
}

crate::tests![
    coop_dtypes,
    coop_hard_data,
    coop_dims_of_models,
    plain_dtypes,
    direct_dtypes,
    a_step_names_its_tokens,
    variants_are_chosen_and_forced_by_name,
];
