//! What the samples of ops are made of, and what holds of the samples of all.

use crate::base::dtype::Dtype;
use crate::cache::{KvLayout, KvSpec, MlaShape};

/// The dtypes that arrays may have, other than caches, queries and arrays that are only copied.
pub(super) const FLOATS: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

/// DeepSeek V3's cache.
pub(super) const SHAPE: MlaShape = MlaShape { num_heads: 16, kv_lora_rank: 512, qk_rope_head_dim: 64 };

/// A small cache of a dtype or another layout.
pub(super) fn kv(layout: impl Into<KvLayout>) -> KvSpec {
    KvSpec { layout: layout.into(), page_size: 64, num_pages: 64 }
}

/// Small caches whose tokens are records, with the dims that they are for.
pub(super) fn records() -> [(MlaShape, KvSpec); 2] {
    let no_rope = MlaShape { qk_rope_head_dim: 0, ..SHAPE };
    [(SHAPE, kv(KvLayout::Ds656)), (no_rope, kv(KvLayout::Ds528))]
}

/// A spec for each pair.
pub(super) fn pairs<A: Copy, B: Copy, O>(a: &[A], b: &[B], spec: impl Fn(A, B) -> O) -> Vec<O> {
    a.iter().flat_map(|&a| b.iter().map(move |&b| (a, b))).map(|(a, b)| spec(a, b)).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use crate::ops::{Op, for_each_op};

    fn distinct_and_served<O: Op>() {
        let samples = O::samples();
        let distinct: BTreeSet<_> = samples.iter().map(|spec| format!("{spec:?}")).collect();
        assert!(!samples.is_empty() && distinct.len() == samples.len(), "{}", O::NAME);
        for spec in samples {
            assert_eq!(spec.check(), Ok(()), "{spec:?}");
        }
    }

    #[test]
    fn samples_are_distinct_and_served() {
        macro_rules! check {
            ($($op:ty),*) => { $(distinct_and_served::<$op>();)* };
        }
        for_each_op!(check);
        distinct_and_served::<crate::layer::MlaLayer>();
        distinct_and_served::<crate::layer::MlaExpand>();
    }

    #[test]
    fn every_op_of_this_folder_is_listed() {
        macro_rules! names {
            ($($op:ty),*) => { BTreeSet::from([$(<$op>::NAME.to_owned()),*]) };
        }
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/ops");
        let found: BTreeSet<_> = std::fs::read_dir(folder)
            .expect("the sources")
            .filter_map(|entry| std::fs::read_to_string(entry.expect("an entry").path()).ok())
            .filter(|text| text.lines().any(|line| line.starts_with("impl Op for ")))
            .map(|text| {
                let (_, rest) = text.split_once("const NAME: &'static str = \"").expect("a name");
                rest.split('"').next().expect("its end").to_owned()
            })
            .collect();
        assert_eq!(found, for_each_op!(names));
    }
}
