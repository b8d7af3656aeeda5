//! Each row of `head_project` on the adapter that `Gpu::new` picks, forced by name, and the verbs of the op.
//!
//! The row on matrices runs on a card, and on Mesa 26's software driver: `scripts/vendors.sh mesa26`.

use crate::harness::count;
use mla_support::suite::memory::{download, scatter, upload};
use mla_support::suite::project::{Case, Data, check, spec};
use mla_support::suite::run::Layout;
use mla_support::{Ignored, Outcome};
use wgpu_mla::gpu::Gpu;
use wgpu_mla::gpu::ops::{HeadProject, ProjectStep};
use wgpu_mla::{Backend, Dtype, Error, Project, ProjectSpec, WeightOrder, WeightView, wgpu};

use Dtype::{Bf16, F16, F32};
use WeightOrder::{Kn, Nk};

/// Runs a case on a row, in one submit; an error where the row does not serve it.
fn run(gpu: &Gpu, row: &str, case: &Case) -> Result<(), String> {
    check(gpu, case, |spec, args| {
        let project = HeadProject::with_variant(&gpu.pipelines, *spec, Some(row))?;
        assert_eq!(project.variant(), row);
        record(gpu, &project, args, 0, args.num_tokens)
    })
    .map_err(|error| format!("{row} {case:?}: {error}"))
}

fn record(
    gpu: &Gpu,
    project: &HeadProject,
    args: &Project<&wgpu::Buffer>,
    first: u32,
    count: u32,
) -> Result<(), Error> {
    let mut step = ProjectStep::default();
    project.prepare(&gpu.device, &gpu.queue, &mut step, first, count)?;
    let binding = project.bind(&gpu.device, args)?;
    project.check(&step, &binding)?;
    let mut encoder = gpu.device.create_command_encoder(&Default::default());
    project.record(&mut encoder, &step, &binding);
    gpu.queue.submit([encoder.finish()]);
    Ok(())
}

/// Why a variant does not serve a spec here, if so.
fn lacks(gpu: &Gpu, variant: &str, spec: ProjectSpec) -> Option<String> {
    match HeadProject::with_variant(&gpu.pipelines, spec, Some(variant)) {
        Ok(_) => None,
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
            None => failures.extend(run(&gpu, variant, case).err()),
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
            .enumerate()
    {
        for order in [Kn, Nk] {
            let spec = spec(dtypes, 3, [(64, 32), (32, 64), (96, 48)][turn % 3], order);
            all.push(Case { shared: turn % 2 == 1, ..Case::new(spec, [5, 70][turn % 2]) });
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
    let project = HeadProject::new(&gpu.pipelines, spec).expect("compiles");
    for (first, count) in [(0, 40), (39, 1), (3, 30), (7, 0)] {
        let y = upload(&gpu, &vec![mla_support::paint::POISON; y_bytes]).expect("uploads");
        let args = Project {
            x: wgpu_mla::View::dense(&x_buffer, 2, 16),
            weight: WeightView { buffer: &ones, offset: 0, head_stride: 128, row_stride: 8 },
            y: wgpu_mla::View::dense(&y, 2, 8),
            num_tokens: 40,
        };
        record(&gpu, &project, &args, first, count).expect("runs");
        let sums: Vec<f32> = x.chunks(16).flat_map(|row| [row.iter().sum::<f32>(); 8]).collect();
        let row = heads * 8 * 4;
        let mut want = scatter(&[], [0, 1, 8], 4, mla_support::suite::memory::Strides::dense(1, 8));
        want.resize(y_bytes, mla_support::paint::POISON);
        let range = first as usize * row..(first + count) as usize * row;
        want[range.clone()].copy_from_slice(&F32.encode_all(&sums)[range]);
        assert!(download(&gpu, &y, y_bytes).expect("downloads")[..y_bytes] == want, "{first} + {count}");
        let error = record(&gpu, &project, &args, 1, 40).expect_err("one too many");
        assert!(matches!(error, Error::LayoutMismatch { .. }), "{error}");
    }
    Ok(())
}

fn rows_are_chosen_and_forced_by_name() -> Outcome {
    let gpu = mla_support::gpu()?;
    let spec = spec([F32; 3], 2, (16, 16), Nk);
    let project = HeadProject::new(&gpu.pipelines, spec).expect("some row runs");
    let software = gpu.adapter.get_info().device_type == wgpu::DeviceType::Cpu;
    let row = if software { "direct" } else { "plain" };
    assert_eq!(project.variant(), row, "{}: f32 weights", project.why());
    for (name, why) in [("coop", "coop"), ("none such", "coop, direct, plain")] {
        let error = HeadProject::with_variant(&gpu.pipelines, spec, Some(name)).expect_err("does not run");
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
    rows_are_chosen_and_forced_by_name,
];
