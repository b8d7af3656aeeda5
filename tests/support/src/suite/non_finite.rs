//! NaN and infinities among the inputs, and logits near the end of f32: results have the oracle's pattern.

use wgpu_mla::{Backend, Dtype, SplitPolicy};

use super::Session;
use super::run::How;
use crate::close::{Tolerance, close};
use crate::paint::{Data, Make, Problem, Sees, sequences};

const POLICIES: [SplitPolicy; 3] = [SplitPolicy::FixedTokens(16), SplitPolicy::OneSplit, SplitPolicy::Auto];

/// An element that is not finite, by its bits.
#[derive(Debug, Clone, Copy)]
enum Odd {
    /// Quiet, as arithmetic makes it.
    Nan,
    /// All bits set.
    AllOnes,
    /// The least of its significands: signalling.
    LeastNan,
    Infinity,
    MinusInfinity,
}

impl Odd {
    const ALL: [Self; 5] = [Self::Nan, Self::AllOnes, Self::LeastNan, Self::Infinity, Self::MinusInfinity];

    /// e4m3 has two NaN codes and no infinity.
    fn bits(self, dtype: Dtype) -> Option<u32> {
        let (infinity, quiet, sign) = match dtype {
            Dtype::F32 => (0x7F80_0000, 0x40_0000, 1 << 31),
            Dtype::F16 => (0x7C00, 0x200, 1 << 15),
            Dtype::Bf16 => (0x7F80, 0x40, 1 << 15),
            Dtype::E4m3 => {
                return match self {
                    Self::Nan => Some(0x7F),
                    Self::AllOnes => Some(0xFF),
                    _ => None,
                };
            }
        };
        Some(match self {
            Self::Nan => infinity | quiet,
            Self::AllOnes => sign | (sign - 1),
            Self::LeastNan => infinity | 1,
            Self::Infinity => infinity,
            Self::MinusInfinity => sign | infinity,
        })
    }
}

/// Where it is put.
#[derive(Debug, Clone, Copy)]
enum Place {
    /// Column of the keys of these tokens of a sequence.
    Keys { seq: usize, from: usize, to: usize, column: usize },
    /// Column of a query token's heads.
    Query { token: usize, column: usize },
}

/// Writes an element's bits.
fn put(bytes: &mut [u8], dtype: Dtype, at: usize, bits: u32) {
    let size = dtype.bytes();
    bytes[at * size..][..size].copy_from_slice(&bits.to_le_bytes()[..size]);
}

/// Element `column` of a key.
fn key_at(problem: &Problem, seq: usize, token: usize, column: usize) -> usize {
    let (row, page_size) = (problem.spec.shape.row_elems() as usize, problem.spec.kv.page_size as usize);
    let page = problem.block_table[seq * problem.max_pages + token / page_size] as usize;
    (page * page_size + token % page_size) * row + column
}

/// The problem with one non-finite element, or a column of them.
fn with(clean: &Problem, place: Place, odd: Odd) -> Option<Problem> {
    let mut problem = clean.clone();
    let (row, heads) = (clean.spec.shape.row_elems() as usize, clean.spec.shape.num_heads as usize);
    match place {
        Place::Keys { seq, from, to, column } => {
            let bits = odd.bits(clean.spec.kv.dtype())?;
            for token in from..to {
                let at = key_at(clean, seq, token, column);
                put(&mut problem.kv, clean.spec.kv.dtype(), at, bits);
            }
        }
        Place::Query { token, column } => {
            let bits = odd.bits(clean.spec.query)?;
            for head in (0..heads).step_by(2) {
                put(&mut problem.q, clean.spec.query, (token * heads + head) * row + column, bits);
            }
        }
    }
    problem.name = format!("{}, {odd:?} at {place:?}", clean.name);
    Some(problem)
}

/// NaN and infinities in keys, values and queries, seen by some rows of a tile and not by others, split and not.
pub fn non_finite<B: Backend>(session: &Session<'_, B>) {
    let pairs = [
        (Dtype::Bf16, Dtype::Bf16),
        (Dtype::E4m3, Dtype::F16),
        (Dtype::F32, Dtype::F32),
        (Dtype::F16, Dtype::E4m3),
    ];
    for (cache, query) in session.one_in(2, pairs) {
        // The third query token sees no key, the second one split of three, and the last all but the latest key.
        let bounds = Sees::Bounds(vec![40, 9, 0, 39, 21]);
        let sequences = sequences(&[(40, 4), (21, 1)]);
        let clean = Make { heads: 3, cache, query, sees: bounds, sequences, ..Make::default() }.build();
        if !session.serves(&clean.spec) {
            session.leave_out();
            continue;
        }
        let (latent, row) = (clean.spec.shape.kv_lora_rank as usize, clean.spec.shape.row_elems() as usize);
        let places = [
            Place::Keys { seq: 0, from: 20, to: 21, column: 5 },
            Place::Keys { seq: 0, from: 39, to: 40, column: latent - 1 },
            Place::Keys { seq: 0, from: 3, to: 4, column: row - 1 },
            // A whole split, and every key.
            Place::Keys { seq: 0, from: 16, to: 32, column: row - 2 },
            Place::Keys { seq: 0, from: 0, to: 40, column: row - 3 },
            Place::Keys { seq: 0, from: 16, to: 32, column: 8 },
            Place::Query { token: 0, column: 7 },
            Place::Query { token: 1, column: row - 1 },
            Place::Query { token: 3, column: 0 },
        ];
        let runs = POLICIES.map(|policy| {
            let how = How { policy, ..How::default() };
            (how, session.run_decode(&clean, &how))
        });
        let all = runs
            .iter()
            .flat_map(|run| places.iter().flat_map(move |&place| Odd::ALL.map(|odd| (run, place, odd))));
        // Representatives have each policy, each place and each non-finite element, but not every combination.
        for ((how, before), place, odd) in session.one_in(4, all) {
            if let Some(problem) = with(&clean, place, odd) {
                let result = before.as_ref().map_err(Clone::clone).and_then(|before| {
                    let after = session.run_decode(&problem, how)?;
                    compare(session, &clean, &problem, [before, &after])
                });
                session.note(&format!("{}, {how:?}", problem.name), result);
            }
        }
    }
    session.finish("non-finite elements");
}

/// The oracle's pattern and numbers. Rows that see no non-finite element keep their bits. Variants on cooperative matrices may
/// compute a tile with such an element again in f32: there only other sequences keep them.
fn compare<B: Backend>(
    session: &Session<'_, B>,
    clean: &Problem,
    problem: &Problem,
    [before, after]: [&super::run::Answer; 2],
) -> Result<(), String> {
    let latent = clean.spec.shape.kv_lora_rank as usize;
    let (out, lse) = problem.expected();
    // The tolerance is the clean problem's: one from an infinite latent would allow anything.
    let tolerance = session.tolerance(clean, 1);
    close("lse", &after.lse, &lse, &Tolerance::lse()).into_result()?;
    close("out", &after.out, &out, &tolerance).into_result()?;
    let (clean_out, clean_lse) = clean.expected();
    let rounds_weights = session.decode(&clean.spec).is_ok_and(|decode| decode.rounds_weights());
    for row in 0..lse.len() {
        let columns = row * latent..(row + 1) * latent;
        let alone = row / clean.spec.shape.num_heads as usize >= clean.query_start_loc[1] as usize;
        if (alone || !rounds_weights)
            && lse[row] == clean_lse[row]
            && out[columns.clone()] == clean_out[columns.clone()]
        {
            let bytes = |bits: &[Vec<u8>; 2]| {
                let size = bits[0].len() / (lse.len() * latent);
                let out = bits[0][columns.start * size..columns.end * size].to_vec();
                (out, bits[1][row * 4..(row + 1) * 4].to_vec())
            };
            if bytes(&before.bits) != bytes(&after.bits) {
                return Err(format!("row {row} sees nothing odd, and has other bits"));
            }
        }
    }
    Ok(())
}

/// Finite logits so large that f32 rounds them by more than an exponent: never NaN.
pub fn huge_logits<B: Backend>(session: &Session<'_, B>) {
    for (cache, query) in session.one_in(2, [(Dtype::F32, Dtype::F32), (Dtype::Bf16, Dtype::Bf16)]) {
        let sequences = sequences(&[(40, 1)]);
        let mut problem =
            Make { heads: 3, cache, query, sequences, data: Data::Randn, ..Make::default() }.build();
        if !session.serves(&problem.spec) {
            session.leave_out();
            continue;
        }
        // Logits come from the last column alone, which is in no output where keys have a rotary part.
        let row = problem.spec.shape.row_elems() as usize;
        problem.softmax_scale = 1.0;
        let name = problem.name.clone();
        for logit in [1e10f32, 1e30, 5e37, -1e10, -1e30, -5e37] {
            // The one key among others of logit 0, and all keys alike.
            for alone in [true, false] {
                let element = |dtype: Dtype, x: f32| {
                    let mut bytes = Vec::new();
                    dtype.encode(x, &mut bytes);
                    bytes
                };
                let root = (logit.abs() / 1.5).sqrt();
                for head in 0..3 {
                    let q = &mut problem.q[head * row * query.bytes()..][..row * query.bytes()];
                    q.fill(0);
                    q[(row - 1) * query.bytes()..].copy_from_slice(&element(query, root));
                }
                for token in 0..40 {
                    let at = key_at(&problem, 0, token, row - 1) * cache.bytes();
                    let x = if alone && token != 27 { 0.0 } else { root.copysign(logit) * 1.5 };
                    problem.kv[at..at + cache.bytes()].copy_from_slice(&element(cache, x));
                }
                problem.name = format!("{name}, logit {logit:e}, alone {alone}");
                let (out, lse) = problem.expected();
                for policy in POLICIES {
                    let how = How { policy, ..How::default() };
                    // Equal keys weigh the same, however many of them a split has: the LSE has lost that number at this size.
                    let result = session.compare(&problem, &how, &out, &lse);
                    session.note(&format!("{}, {how:?}", problem.name), result);
                }
            }
        }
    }
    session.finish("huge logits");
}
