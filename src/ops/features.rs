//! The optional inputs of an op, as bits: a request asks for some, and a kernel variant serves those that it declares. Pure.

/// A set of optional inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Features(u32);

impl Features {
    pub(crate) const NONE: Self = Self(0);
    /// A page list that the device may have written, whose ids a kernel clamps to the pool.
    pub(crate) const DEVICE_PAGE_LIST: Self = Self(1);

    /// Tokens that are listed by slots.
    pub(crate) const INDICES: Self = Self(2);
    /// A logit of each head that has no value.
    pub(crate) const ATTN_SINK: Self = Self(4);

    /// All of them.
    #[cfg(feature = "wgpu")]
    pub(crate) const ALL: Self = Self(7);

    /// What messages call each.
    const NAMES: [(Self, &'static str); 3] = [
        (Self::DEVICE_PAGE_LIST, "a page list written on the device"),
        (Self::INDICES, "lists of slots (topk)"),
        (Self::ATTN_SINK, "attention sinks"),
    ];

    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    pub(crate) const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub(crate) const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Checks that a variant serves all that is asked for.
    ///
    /// # Errors
    /// Names what it does not serve.
    pub(super) fn check(self, asked: Self) -> Result<(), String> {
        let lacking = Self::NAMES.iter().filter(|(one, _)| asked.contains(*one) && !self.contains(*one));
        let names: Vec<_> = lacking.map(|(_, name)| *name).collect();
        if names.is_empty() { Ok(()) } else { Err(format!("it does not serve {}", names.join(", "))) }
    }
}

/// A request for a kernel.
pub(crate) trait Asks {
    /// The optional inputs that the kernel has to serve.
    fn features(&self) -> Features {
        Features::NONE
    }
}

impl Asks for () {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::variants::{Variant, candidates, choose};

    impl Asks for Features {
        fn features(&self) -> Self {
            *self
        }
    }

    const TABLE: [Variant<(), Features, u32>; 2] = [
        Variant::new("fast", |(), _| Ok(1)),
        Variant::new("full", |(), _| Ok(2)).serves(Features::DEVICE_PAGE_LIST),
    ];

    #[test]
    fn a_variant_that_does_not_serve_a_feature_is_not_chosen() {
        let why = |asked| choose(&TABLE, &(), &asked, None).map(|(kernel, choice)| (kernel, choice.why));
        assert_eq!(why(Features::NONE), Ok((1, "fast".into())));
        let lacks = "it does not serve a page list written on the device";
        assert_eq!(why(Features::DEVICE_PAGE_LIST), Ok((2, format!("full; not fast: {lacks}"))));

        let forced = choose(&TABLE, &(), &Features::DEVICE_PAGE_LIST, Some("fast")).map(|_| ());
        let error = forced.expect_err("a variant ignores no feature").to_string();
        assert_eq!(error, format!("variant fast cannot run here: {lacks}; force another, or none"));
        let all = candidates(&TABLE, &(), &Features::DEVICE_PAGE_LIST);
        let found: Vec<_> = all.iter().map(|one| (one.lacks.as_deref(), one.chosen)).collect();
        assert_eq!(found, [(Some(lacks), false), (None, true)]);
        assert!(choose(&TABLE[..1], &(), &Features::DEVICE_PAGE_LIST, None).is_err(), "none serves it");
    }

    #[test]
    fn each_feature_has_a_bit_and_a_name_of_its_own() {
        let mut seen = 0;
        for (Features(bit), name) in Features::NAMES {
            assert!(bit.is_power_of_two() && seen & bit == 0, "{name}");
            seen |= bit;
        }
        let refused = Features::NONE.check(Features(seen)).expect_err("none is served");
        assert!(Features::NAMES.iter().all(|(_, name)| refused.contains(name)), "{refused}");
    }
}
