//! The fields of a step's digest: how each is compared and shown.

use super::form::CombineForm;
use crate::base::dtype::Dtype;
use crate::base::error::Error;
use crate::ops::LseBase;

/// A field, by its place in [`FIELDS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Field(usize);

/// How the ranks' values go together, and how one is shown.
#[derive(Clone, Copy)]
enum Kind {
    Number,
    /// A rank's own place.
    Place,
    Hash,
    Float,
    Dtype,
    Form,
    Base,
}

macro_rules! fields {
    ($($name:ident, $kind:ident, $what:literal;)*) => {
        fields!(@ 0usize; $($name)*);
        const FIELDS: &[(&str, Kind)] = &[$(($what, Kind::$kind)),*];
    };
    (@ $at:expr; $name:ident $($rest:ident)*) => {
        pub(crate) const $name: Field = Field($at);
        fields!(@ $at + 1usize; $($rest)*);
    };
    (@ $at:expr;) => {
        const COUNT: usize = $at;
    };
}

fields! {
    PLACE, Place, "rank (of its communicator, and by the order in which all_gather_host gives the ranks' bytes)";
    WORLD, Number, "world of the communicator";
    CP_WORLD, Number, "world";
    CP_RANK, Place, "rank (of its ContextParallelSpec, and of its communicator)";
    STEP, Number, "step";
    HEADS, Number, "num_heads";
    LATENT, Number, "kv_lora_rank";
    ROPE, Number, "qk_rope_head_dim";
    QUERY, Dtype, "the query's dtype";
    OUT, Dtype, "the output's dtype";
    CP_HEADS, Number, "num_heads of the ContextParallelSpec";
    CP_LATENT, Number, "kv_lora_rank of the ContextParallelSpec";
    CP_OUT, Dtype, "out of the ContextParallelSpec";
    CP_TOKENS, Number, "max_tokens of the ContextParallelSpec";
    CP_FORM, Form, "form of the ContextParallelSpec";
    CP_BASE, Base, "lse_base of the ContextParallelSpec";
    SOFTMAX_SCALE, Float, "softmax_scale";
    Q_SCALE, Float, "q_scale";
    DECODE_BASE, Base, "lse_base of the decode";
    OTHER_LAYERS, Hash, "the scales of the layers after the first";
    SHARES_WORLD, Number, "world of the Shares";
    SHARES, Hash, "the shares of the context";
    SEQUENCES, Number, "the number of sequences";
    FIRST_LEN, Number, "seq_lens[0]";
    LENS, Hash, "seq_lens";
    STARTS, Hash, "query_start_loc";
    MASK, Hash, "the mask";
}

const OWN_PLACE: &str =
    "make each with the rank and world of its communicator, whose ranks are 0 to world - 1, one each";
const BOTH: &str = "make both alike, by ContextParallelSpec::of and ContextParallel::decode_args";

/// Fields that say the same of one rank, where it knows both.
const PAIRS: [(Field, Field, &str, &str); 6] = [
    (CP_WORLD, WORLD, "world (of its ContextParallelSpec, and of its communicator)", OWN_PLACE),
    (
        SHARES_WORLD,
        WORLD,
        "world (of its Shares, and of its communicator)",
        "make the Shares for the world of the communicator",
    ),
    (CP_HEADS, HEADS, "num_heads (of its ContextParallelSpec, and of its decode)", BOTH),
    (CP_LATENT, LATENT, "kv_lora_rank (of its ContextParallelSpec, and of its decode)", BOTH),
    (CP_OUT, OUT, "dtype of the output (of its ContextParallelSpec, and of its decode)", BOTH),
    (CP_BASE, DECODE_BASE, "lse_base (of its ContextParallelSpec, and of its decode)", BOTH),
];

const FORMS: [CombineForm; 3] =
    [CombineForm::AllGatherReduceScatter, CombineForm::AllToAll, CombineForm::AllGather];
const BASES: [LseBase; 2] = [LseBase::E, LseBase::Two];

/// What a rank says of each field; `None` where it says nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Known([Option<u64>; COUNT]);

impl Known {
    pub(super) const NOTHING: Self = Self([None; COUNT]);

    pub(super) fn get(&self, Field(at): Field) -> Option<u64> {
        self.0[at]
    }

    pub(super) fn set(&mut self, Field(at): Field, value: u64) {
        self.0[at] = Some(value);
    }

    /// 9 bytes a field: one that says whether the field is known, and 8 of its value.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let field = |value: &Option<u64>| {
            let mut bytes = [0; 9];
            bytes[0] = value.is_some().into();
            bytes[1..].copy_from_slice(&value.unwrap_or(0).to_le_bytes());
            bytes
        };
        self.0.iter().flat_map(field).collect()
    }

    /// The inverse of [`Known::bytes`].
    pub(super) fn from_bytes(bytes: &[u8]) -> Self {
        let mut known = Self::NOTHING;
        for (to, [is_known, value @ ..]) in known.0.iter_mut().zip(bytes.as_chunks::<9>().0) {
            *to = (*is_known != 0).then(|| u64::from_le_bytes(*value));
        }
        known
    }
}

/// The first field in which the ranks differ, or one of them contradicts itself: the same on every rank, as all have the same digests.
pub(super) fn differs(digests: &[Known]) -> Option<Error> {
    let first = digests.first()?;
    for (field, &(what, kind)) in (0..).map(Field).zip(FIELDS) {
        let first_has = first.get(field);
        for (rank, digest) in (0u32..).zip(digests) {
            let has = digest.get(field);
            let is_known = has.is_some() && first_has.is_some();
            if is_known && matches!(kind, Kind::Place) {
                let place = Some(rank.into());
                if has != place {
                    return Some(contradicts(what, kind, rank, [has, place], OWN_PLACE));
                }
            } else if has != first_has {
                let [first_has, other_has] = [first_has, has].map(|value| shown(kind, value));
                let (first, other, cure) = (0, rank, "give all ranks the same");
                return Some(Error::RanksDiffer { what, first, first_has, other, other_has, cure });
            }
        }
    }
    (0u32..).zip(digests).find_map(|(rank, digest)| {
        PAIRS.into_iter().find_map(|(a, b, what, cure)| {
            let pair = [digest.get(a), digest.get(b)];
            let differ = pair[0].is_some() && pair[1].is_some() && pair[0] != pair[1];
            differ.then(|| contradicts(what, FIELDS[a.0].1, rank, pair, cure))
        })
    })
}

fn contradicts(
    what: &'static str,
    kind: Kind,
    rank: u32,
    values: [Option<u64>; 2],
    cure: &'static str,
) -> Error {
    let [first_has, other_has] = values.map(|value| shown(kind, value));
    Error::RanksDiffer { what, first: rank, first_has, other: rank, other_has, cure }
}

fn shown(kind: Kind, value: Option<u64>) -> String {
    let Some(value) = value else { return "none".into() };
    let named = match kind {
        Kind::Dtype => Dtype::ALL.iter().find(|&&dtype| dtype as u64 == value).map(ToString::to_string),
        Kind::Form => FORMS.iter().find(|&&form| form as u64 == value).map(|form| format!("{form:?}")),
        Kind::Base => BASES.iter().find(|&&base| base as u64 == value).map(|base| format!("{base:?}")),
        Kind::Hash => Some(format!("a list of hash {value:016x}")),
        Kind::Float => Some(format!("{:?}", f32::from_bits(value as u32))),
        Kind::Number | Kind::Place => None,
    };
    // A negative length is sign-extended.
    named.unwrap_or_else(|| (value as i64).to_string())
}
