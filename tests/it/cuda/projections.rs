//! Each variant of `head_project` on a card: against the oracle, bit for bit among tiles and numbers of tokens, and in graphs.

use super::uploaded;
use crate::harness::count;
use mla_support::Outcome;
use mla_support::graph::{captured, cuda};
use mla_support::paint::{POISON, Rng};
use mla_support::suite::project::{Case, Data, check, q8_0, spec};
use mla_support::suite::run::Layout;
use wgpu_mla::cuda::Cuda;
use wgpu_mla::{
    Device, Dtype, HeadProject, HeadProjectArgs, OpOptions, View, WeightOrder, WeightScales, WeightView,
};

use Dtype::{Bf16, E4m3, F16, F32};
use WeightOrder::{Kn, Nk};

/// The variants that serve a spec.
fn variants(cuda: &Cuda, spec: &HeadProject) -> Vec<&'static str> {
    let all = cuda.variants(spec).into_iter();
    all.filter(|variant| variant.lacks.is_none()).map(|variant| variant.name).collect()
}

/// Runs each case on each variant that serves it.
fn check_all(cuda: &Cuda, cases: impl IntoIterator<Item = Case>) {
    let (mut failures, mut ran) = (Vec::new(), 0);
    for case in cases {
        for variant in variants(cuda, &case.spec) {
            let wrong = check(cuda, &case, Some(variant)).err();
            failures.extend(wrong.map(|error| format!("{variant} {case:?}: {error}")));
            ran += 1;
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    count("cuda head_project", ran, 0);
}

/// Every dtype of tensor cores and some that are not, both orders, ends of k and n, tokens around the tiles'.
fn variants_agree_with_the_oracle() -> Outcome {
    let cuda = cuda()?;
    let dtypes = [[F16; 3], [Bf16; 3], [Bf16, Bf16, F32], [F16, F16, Bf16], [Bf16, Bf16, F16], [F32; 3]];
    let dims = [(128, 512), (512, 128), (40, 72), (8, 8), (520, 136)];
    let layouts = [Layout::Dense, Layout::Gaps, Layout::HeadMajor];
    let mut cases = Vec::new();
    for (turn, dtypes) in dtypes.into_iter().enumerate() {
        for order in [Kn, Nk] {
            for (i, tokens) in [1, 16, 17, 64, 65, 130].into_iter().enumerate() {
                let case = Case::new(spec(dtypes, 3, dims[(turn + i) % dims.len()], order), tokens);
                let layout = layouts[(turn + i) % layouts.len()];
                cases.push(Case { layout, shared: i % 2 == turn % 2, ..case });
            }
        }
    }
    for order in [Kn, Nk] {
        for (turn, dtypes) in [[Bf16, E4m3, Bf16], [F16, E4m3, F32], [F32, E4m3, F16]].into_iter().enumerate()
        {
            for (i, tokens) in [1, 17, 65, 130].into_iter().enumerate() {
                let dims = [(128, 512), (512, 128), (48, 80), (144, 272)][(turn + i) % 4];
                let case = Case { one_scale: i == 1, ..Case::new(spec(dtypes, 3, dims, order), tokens) };
                cases.push(Case { layout: layouts[(turn + i) % layouts.len()], ..case });
            }
        }
        cases.push(Case::new(q8_0([Bf16, F32], 2, (64, 96), order), 17));
        cases
            .push(Case { layout: Layout::HeadMajor, ..Case::new(q8_0([F32, Bf16], 3, (96, 32), order), 66) });
        cases.push(Case::new(spec([Bf16; 3], 2, (136, 72), order), 1000));
        cases.push(Case::new(spec([F16, F16, F32], 128, (64, 40), order), 33));
    }
    check_all(&cuda, cases);
    Ok(())
}

fn variants_hold_on_hard_data() -> Outcome {
    let cuda = cuda()?;
    let case = |data, dtypes, k, order| Case { data, ..Case::new(spec(dtypes, 2, (k, 72), order), 70) };
    let some = [[Bf16; 3], [Bf16, Bf16, F32]].into_iter().flat_map(|dtypes| [Kn, Nk].map(|o| (dtypes, o)));
    let hard = some.flat_map(|(dtypes, order)| [64, 512].map(|k| case(Data::Hard, dtypes, k, order)));
    // Subnormals of f16.
    let tiny = [Kn, Nk].map(|order| case(Data::Tiny, [F16; 3], 64, order));
    check_all(&cuda, hard.chain(tiny));
    Ok(())
}

/// The arrays of a projection, dense.
struct Arrays {
    spec: HeadProject,
    tokens: usize,
    x: Vec<f32>,
    weight: Vec<f32>,
}

impl Arrays {
    fn new(spec: HeadProject, tokens: usize) -> Self {
        let mut rng = Rng(11);
        let (heads, k, n) = (spec.num_heads as usize, spec.k as usize, spec.n as usize);
        let x = (0..tokens * heads * k).map(|_| rng.randn()).collect();
        Self { spec, tokens, x, weight: (0..heads * k * n).map(|_| rng.randn()).collect() }
    }

    fn row_bytes(&self) -> usize {
        self.spec.num_heads as usize * self.spec.n as usize * self.spec.output.bytes()
    }

    /// `y` after a graph that was captured with `capacity` tokens ran for some, and poison elsewhere.
    fn run(
        &self,
        cuda: &Cuda,
        variant: &str,
        capacity: u32,
        ranges: &[std::ops::Range<u32>],
    ) -> Vec<Vec<u8>> {
        let HeadProject { input, weight: of_weights, num_heads, k, n, order, .. } = self.spec;
        let x = uploaded(cuda, &input.encode_all(&self.x));
        let dtype = of_weights.dtype().expect("elements");
        let weight = uploaded(cuda, &dtype.encode_all(&self.weight));
        let ones = uploaded(cuda, &F32.encode_all(&[1.0]));
        let poison = vec![POISON; self.tokens * self.row_bytes()];
        let y = uploaded(cuda, &poison);
        let (rows, columns) = if order == Kn { (k, n) } else { (n, k) };
        let args = HeadProjectArgs {
            x: View::dense(&x, num_heads, k),
            weight: WeightView {
                buffer: &weight,
                offset: 0,
                head_stride: u64::from(rows * columns),
                row_stride: columns.into(),
                scales: of_weights.has_scales().then_some(WeightScales::per_tensor(&ones)),
            },
            y: View::dense(&y, num_heads, n),
            scale: 1.0,
            out_scale: 1.0,
            saturates: false,
            guard: None,
        };
        let project =
            cuda.compile_with(self.spec, &OpOptions { variant: Some(variant.into()) }).expect("loads");
        assert_eq!(project.variant(), variant);
        let binding = project.bind(&args, self.tokens as u32).expect("binds");
        let mut step = project.step(capacity).expect("a step");
        project.prepare(&mut step, 0..0).expect("prepared");
        let graph = captured(cuda, || project.record(&step, &binding));
        let after = |range: &std::ops::Range<u32>| {
            cuda.upload(&y, 0, &poison).expect("uploaded");
            project.prepare(&mut step, range.clone()).expect("prepared");
            graph.launch().expect("launched");
            cuda.download(&y, poison.len() as u64).expect("read")
        };
        ranges.iter().map(after).collect()
    }
}

/// A token's bits are the same on every tile and among any other tokens. Those outside of a range keep their bytes.
fn bits_do_not_depend_on_the_tile_or_on_other_tokens() -> Outcome {
    let cuda = cuda()?;
    let tokens = 300;
    for (dims, order) in [((128, 512), Kn), ((512, 128), Nk), ((200, 72), Kn), ((72, 200), Nk)] {
        let arrays = Arrays::new(spec([Bf16, Bf16, F32], 2, dims, order), tokens);
        let on_tensor_cores: Vec<_> =
            variants(&cuda, &arrays.spec).into_iter().filter(|name| *name != "simple").collect();
        assert!(on_tensor_cores.len() > 1, "{on_tensor_cores:?}");
        let ranges = [0..300, 0..1, 3..20, 7..71, 299..300, 100..230, 5..5];
        let whole = arrays.run(&cuda, on_tensor_cores[0], 300, &ranges[..1]).remove(0);
        let row = arrays.row_bytes();
        for variant in on_tensor_cores {
            for (range, got) in ranges.iter().zip(arrays.run(&cuda, variant, 300, &ranges)) {
                let mut want = vec![POISON; tokens * row];
                let some = range.start as usize * row..range.end as usize * row;
                want[some.clone()].copy_from_slice(&whole[some]);
                assert!(got == want, "{variant} {:?} {range:?}", arrays.spec);
            }
        }
        // Steps of their own, whose grids have other tiles.
        for range in &ranges[1..6] {
            let got = arrays.run(&cuda, "mma", range.len() as u32, std::slice::from_ref(range)).remove(0);
            let some = range.start as usize * row..range.end as usize * row;
            assert!(got[some.clone()] == whole[some], "{range:?} by itself");
        }
    }
    Ok(())
}

/// Codes with a scale of 1 are the same weights in 16 bits, bit for bit, on every tile.
fn codes_are_multiplied_as_16_bit_weights() -> Outcome {
    let cuda = cuda()?;
    for (dtype, (dims, order)) in [(Bf16, ((144, 80), Kn)), (F16, ((80, 144), Nk))] {
        let mut arrays = Arrays::new(spec([dtype, dtype, F32], 2, dims, order), 70);
        // Numbers that all dtypes have, subnormals of e4m3 among them.
        for (i, weight) in arrays.weight.iter_mut().enumerate() {
            *weight = wgpu_mla::e4m3_decode([(i * 7 % 0x7F) as u8, 0x80 | (i % 9) as u8][i % 2]);
        }
        let range = 0..70;
        for variant in ["mma_m16n32", "mma_m64n32", "mma_m64n64", "mma_m128n128"] {
            arrays.spec.weight = dtype.into();
            let want = arrays.run(&cuda, variant, 70, std::slice::from_ref(&range));
            arrays.spec.weight = E4m3.into();
            let got = arrays.run(&cuda, variant, 70, std::slice::from_ref(&range));
            assert!(got == want, "{variant} {:?}", arrays.spec);
        }
    }
    Ok(())
}

/// An infinity or NaN of `x` gives what f32 arithmetic gives, in its own row alone; k has an end that is filled with zeros.
fn what_is_not_finite_stays_in_its_row() -> Outcome {
    let cuda = cuda()?;
    let dims = [(24, 40), (64, 64)];
    for (dtype, order, (k, n)) in [F16, Bf16]
        .into_iter()
        .flat_map(|dtype| [Kn, Nk].map(|order| dims.map(|dims| (dtype, order, dims))))
        .flatten()
    {
        let mut arrays = Arrays::new(spec([dtype, dtype, F32], 1, (k, n), order), 40);
        for variant in variants(&cuda, &arrays.spec) {
            let all = 0..40;
            let finite = F32.decode_all(&arrays.run(&cuda, variant, 40, std::slice::from_ref(&all))[0]);
            for (value, sign) in [(f32::INFINITY, 1.0), (f32::NEG_INFINITY, -1.0), (f32::NAN, f32::NAN)] {
                let at = 17 * k as usize + 23;
                let before = std::mem::replace(&mut arrays.x[at], value);
                let got = F32.decode_all(&arrays.run(&cuda, variant, 40, std::slice::from_ref(&all))[0]);
                arrays.x[at] = before;
                for (i, (got, finite)) in got.iter().zip(&finite).enumerate() {
                    let (k, n) = (k as usize, n as usize);
                    let (token, column) = (i / n, i % n);
                    let weight = arrays.weight[if order == Kn { 23 * n + column } else { column * k + 23 }];
                    let want = if token == 17 { weight.signum() * sign * f32::INFINITY } else { *finite };
                    let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                    assert!(
                        same,
                        "{variant} {dtype} {order:?} {value}: {got} at {token}, {column}, not {want}"
                    );
                }
            }
        }
    }
    Ok(())
}

crate::tests![
    variants_agree_with_the_oracle,
    variants_hold_on_hard_data,
    bits_do_not_depend_on_the_tile_or_on_other_tokens,
    codes_are_multiplied_as_16_bit_weights,
    what_is_not_finite_stays_in_its_row,
];
