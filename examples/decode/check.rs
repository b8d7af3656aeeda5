//! Compares results with what a case expects.

use wgpu_mla::{Dtype, KvLayout, MlaDecode};

use mla_support::cache::same_cache;
use mla_support::case::{
    AppendCase, DcpCombineCase, DcpDecodeCase, DecodeCase, IndexLogitsCase, MergeCase, SparseCase, TopKCase,
};
use mla_support::close::{Report, Tolerance, close};
use mla_support::paint::Problem;
use mla_support::suite::index_problem::close_logits;

/// The largest error as text, and what is wrong.
pub struct Verdict {
    pub error: String,
    pub failure: Option<String>,
}

impl Verdict {
    /// The worse of two comparisons, each as a share of its tolerance.
    fn worse(reports: [Report; 2]) -> Self {
        let failure = reports.iter().find(|report| !report.ok()).map(Report::to_string);
        let [a, b] = reports;
        let Report { what, worst_abs, worst_ratio, .. } = if b.worst_ratio > a.worst_ratio { b } else { a };
        let error = format!("{worst_abs:.1e} in {what} ({:.1} %)", worst_ratio * 100.0);
        Self { error, failure }
    }

    fn or_fail(mut self, failure: impl FnOnce() -> Option<String>) -> Self {
        self.failure = self.failure.or_else(failure);
        self
    }
}

fn wide(xs: &[f32]) -> Vec<f64> {
    xs.iter().map(|&x| x.into()).collect()
}

/// `rounds_weights` is that of the decode.
pub fn decode(case: &DecodeCase, rounds_weights: bool, out: &[f32], lse: &[f32]) -> Verdict {
    decoded(&case.spec, largest_latent(case), rounds_weights, [&case.out, &case.lse], [out, lse])
}

/// Like [`decode`], over lists of slots.
pub fn sparse(case: &SparseCase, rounds_weights: bool, out: &[f32], lse: &[f32]) -> Verdict {
    let largest = Problem::of_sparse_case("", case).largest_latent();
    decoded(&case.spec, largest, rounds_weights, [&case.out, &case.lse], [out, lse])
}

fn decoded(
    spec: &MlaDecode,
    largest_latent: f64,
    rounds_weights: bool,
    [want_out, want_lse]: [&[f32]; 2],
    [out, lse]: [&[f32]; 2],
) -> Verdict {
    let latent = spec.shape.kv_lora_rank as usize;
    let tolerance =
        Tolerance::decode(spec.kv.dtype(), spec.query, spec.out, rounds_weights, largest_latent, latent);
    let out_report = close("out", out, &wide(want_out), &tolerance);
    let lse_report = close("lse", lse, &wide(want_lse), &Tolerance::lse());
    Verdict::worse([out_report, lse_report]).or_fail(|| {
        // Rows that see no key are exactly 0, whatever the tolerance.
        let empty = |&row: &usize| want_lse[row] == f32::NEG_INFINITY;
        let filled = |row: &usize| out[row * latent..][..latent].iter().any(|&x| x != 0.0);
        let row = (0..want_lse.len()).filter(empty).find(filled)?;
        Some(format!("row {row} sees no key: its out must be exactly 0"))
    })
}

/// Like [`decode`], for a decode that was cut into ranks; `local_seq_lens` are the lengths that were found.
pub fn dcp_decode(
    case: &DcpDecodeCase,
    rounds_weights: bool,
    out: &[f32],
    lse: &[f32],
    local_seq_lens: &[i32],
) -> Verdict {
    decode(&case.decode, rounds_weights, out, lse).or_fail(|| {
        let expected = &case.local_seq_lens;
        (local_seq_lens != expected)
            .then(|| format!("local_seq_lens are {local_seq_lens:?}, expected {expected:?}"))
    })
}

pub fn dcp_combine(case: &DcpCombineCase, out: &[f32], lse: &[f32]) -> Verdict {
    let size = case.spec.head_size as usize;
    let out_report = close("out", out, &wide(&case.out), &Tolerance::merge(case.spec.dtype));
    let lse_report = close("lse", lse, &wide(&case.lse), &Tolerance::merge_lse());
    Verdict::worse([out_report, lse_report]).or_fail(|| {
        // Rows of which no rank has a part are exactly 0, whatever the tolerance.
        let empty = |&row: &usize| case.lse[row] == f32::NEG_INFINITY;
        let row =
            (0..lse.len()).filter(empty).find(|row| out[row * size..][..size].iter().any(|&x| x != 0.0))?;
        Some(format!("row {row} is of no rank: its out must be exactly 0"))
    })
}

/// The largest finite latent that the case's sequences hold: the spec's `u`.
fn largest_latent(case: &DecodeCase) -> f64 {
    let (kv, row) = (&case.spec.kv, case.spec.shape.row_elems() as usize);
    let page_size = kv.page_size as usize;
    let mut largest = 0f64;
    for (table, &len) in case.block_table.chunks(case.max_pages.max(1)).zip(&case.seq_lens) {
        for token in 0..len as usize {
            let at = (table[token / page_size] as usize * page_size + token % page_size) * row;
            for i in at..at + case.spec.shape.kv_lora_rank as usize {
                let x = f64::from(kv.dtype().decode_at(&case.kv_cache, i)) * f64::from(case.k_scale);
                largest = if x.is_finite() { largest.max(x.abs()) } else { largest };
            }
        }
    }
    largest
}

/// `output` in the case's dtype, `lse` as `[heads, tokens]`.
pub fn merge(case: &MergeCase, output: &[u8], lse: &[f32]) -> Verdict {
    let dtype = case.spec.dtype;
    let got = dtype.decode_all(output);
    let output_report = close("output", &got, &wide(&case.output), &Tolerance::merge(dtype));
    let lse_report = close("output_lse", lse, &wide(&case.output_lse), &Tolerance::merge_lse());
    Verdict::worse([output_report, lse_report]).or_fail(|| wrong_copy(case, output, lse))
}

/// Where one side is empty, the result is the other bit for bit; where both are, 0 and -inf.
fn wrong_copy(case: &MergeCase, output: &[u8], lse: &[f32]) -> Option<String> {
    let row_bytes = case.spec.head_size as usize * case.spec.dtype.bytes();
    let zeros = vec![0; row_bytes];
    for row in 0..case.num_tokens * case.num_heads {
        let at = row % case.num_heads * case.num_tokens + row / case.num_heads;
        let part = row * row_bytes..(row + 1) * row_bytes;
        let (prefix, suffix) = (case.prefix_lse[at], case.suffix_lse[at]);
        let (want, want_lse) = match (prefix.is_finite(), suffix.is_finite()) {
            (true, true) => continue,
            (true, false) => (&case.prefix_output[part.clone()], prefix),
            (false, true) => (&case.suffix_output[part.clone()], suffix),
            (false, false) => (zeros.as_slice(), f32::NEG_INFINITY),
        };
        if &output[part] != want || lse[at].to_bits() != want_lse.to_bits() {
            return Some(format!(
                "row {row} has an empty side: the other must be copied bit for bit, two leave 0 and -inf"
            ));
        }
    }
    None
}

pub fn index_logits(case: &IndexLogitsCase, logits: &[f32]) -> Verdict {
    match close_logits(case, logits) {
        Ok(worst) => Verdict { error: format!("{:.1} % of the allowed", worst * 100.0), failure: None },
        Err(failure) => Verdict { error: "-".into(), failure: Some(failure) },
    }
}

pub fn append(case: &AppendCase, cache: &[u8]) -> Verdict {
    let result = same_cache(case, cache);
    let error = match &result {
        Ok(0) => "byte-exact".to_owned(),
        Ok(codes) => format!("{codes} codes at a tie"),
        Err(_) => {
            let elem = case.spec.kv.dtype().bytes();
            let pairs = cache.chunks(elem).zip(case.kv_cache.chunks(elem));
            format!("{} elements differ", pairs.filter(|(a, b)| a != b).count())
        }
    };
    Verdict { error, failure: result.err() }
}

/// Every entry, exactly.
pub fn top_k(case: &TopKCase, indices: &[i32]) -> Verdict {
    let k = case.spec.k as usize;
    let wrong = |&at: &usize| indices[at] != case.indices[at];
    let differ = (0..indices.len()).filter(wrong).count();
    let failure = (0..indices.len()).find(wrong).map(|at| {
        format!("row {} has {} at place {}, expected {}", at / k, indices[at], at % k, case.indices[at])
    });
    Verdict { error: if differ == 0 { "exact".into() } else { format!("{differ} entries differ") }, failure }
}

/// The dtypes of a case's arrays, or the layout of its cache, the query or input first.
pub fn dtypes(from: Dtype, to: impl Into<KvLayout>) -> String {
    let to = to.into();
    if to == from.into() { from.to_string() } else { format!("{from}>{to}") }
}
