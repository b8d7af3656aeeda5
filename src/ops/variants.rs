//! The kernel variants of an op on a backend: the type of the tables that list them, and the choice of one from such a table. Pure.

use super::features::{Asks, Features};
use crate::base::error::{Error, Result};

/// One kernel variant. `C` describes the device's capabilities, `R` the request (spec and options), `K` the kernel to compile.
pub(crate) struct Variant<C, R, K> {
    pub(crate) name: &'static str,
    rounds_weights: bool,
    tensor_cores: bool,
    features: Features,
    build: fn(&C, &R) -> Result<K, String>,
    by_default: fn(&C, &R) -> Result<(), String>,
    cost: fn(&R, &K) -> u32,
}

/// A kernel variant, and whether it runs here.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Candidate {
    /// Its name, by which it can be forced.
    pub name: &'static str,
    /// Whether it rounds softmax weights to 16 bits.
    pub rounds_weights: bool,
    /// Whether it multiplies on tensor cores.
    pub tensor_cores: bool,
    /// Why it cannot run here; `None` if it can.
    pub lacks: Option<String>,
    /// Whether it is the default: the variant that is compiled if none is forced.
    pub chosen: bool,
}

/// The variant that was selected.
#[derive(Debug, Clone)]
pub struct Choice {
    pub(crate) variant: &'static str,
    pub(crate) why: String,
    pub(crate) rounds_weights: bool,
    pub(crate) tensor_cores: bool,
}

/// Options of an op whose only choice is its kernel variant.
#[derive(Debug, Clone, Default)]
pub struct OpOptions {
    /// Forces a kernel variant by name.
    pub variant: Option<String>,
}

#[cfg_attr(not(feature = "wgpu"), allow(dead_code, reason = "not every backend's tables use all"))]
impl<C, R: Asks, K> Variant<C, R, K> {
    /// `build` gives the kernel that serves the request, or says in a sentence what the device or the request lacks for this variant.
    pub(crate) const fn new(name: &'static str, build: fn(&C, &R) -> Result<K, String>) -> Self {
        Self {
            name,
            rounds_weights: false,
            tensor_cores: false,
            features: Features::NONE,
            build,
            by_default: |_, _| Ok(()),
            cost: |_, _| 0,
        }
    }

    /// The variant rounds softmax weights to 16 bits.
    pub(crate) const fn rounding_weights(self) -> Self {
        Self { rounds_weights: true, ..self }
    }

    /// The variant multiplies on tensor cores.
    pub(crate) const fn on_tensor_cores(self) -> Self {
        Self { tensor_cores: true, ..self }
    }

    /// The variant serves these optional inputs; one that does not declare an input is not chosen for a request that has it.
    pub(crate) const fn serves(self, features: Features) -> Self {
        Self { features, ..self }
    }

    /// The variant is chosen only if `by_default` returns `Ok`, or if a host forces it by name.
    pub(crate) const fn not_by_default(self, by_default: fn(&C, &R) -> Result<(), String>) -> Self {
        Self { by_default, ..self }
    }

    /// Sets the cost, an estimate to compare with the other variants of the table that run here: the cheapest is chosen, the first of
    /// equals.
    pub(crate) const fn costing(self, cost: fn(&R, &K) -> u32) -> Self {
        Self { cost, ..self }
    }
}

/// The table of an op with a single kernel, which runs on every device of the backend.
const ONLY: [Variant<(), (), ()>; 1] = [Variant::new("plain", |(), ()| Ok(()))];

/// The choice for an op with a single kernel.
///
/// # Errors
/// [`Error::VariantUnavailable`] for a forced variant of another name.
pub(crate) fn only(options: &OpOptions) -> Result<Choice> {
    choose(&ONLY, &(), &(), options.variant.as_deref()).map(|(_, choice)| choice)
}

/// The candidates of an op with a single kernel.
pub(crate) fn only_candidate() -> Vec<Candidate> {
    candidates(&ONLY, &(), &())
}

/// Every variant of a table, each with the reason if it cannot run.
pub(crate) fn candidates<C, R: Asks, K>(
    table: &[Variant<C, R, K>],
    device: &C,
    request: &R,
) -> Vec<Candidate> {
    let chosen = choose(table, device, request, None).map(|(_, choice)| choice.variant);
    let candidate = |variant: &Variant<C, R, K>| Candidate {
        name: variant.name,
        rounds_weights: variant.rounds_weights,
        tensor_cores: variant.tensor_cores,
        lacks: variant.kernel(device, request).err(),
        chosen: chosen.as_ref().is_ok_and(|&name| name == variant.name),
    };
    table.iter().map(candidate).collect()
}

/// The forced variant, or the first of those that cost least.
///
/// # Errors
/// [`Error::VariantUnavailable`] where the forced one is unknown or cannot run, [`Error::NoVariant`] where none can.
pub(crate) fn choose<C, R: Asks, K>(
    table: &[Variant<C, R, K>],
    device: &C,
    request: &R,
    forced: Option<&str>,
) -> Result<(K, Choice)> {
    if let Some(name) = forced {
        let unavailable = |why| Error::VariantUnavailable { name: name.to_owned(), why };
        let Some(variant) = table.iter().find(|variant| variant.name == name) else {
            let names: Vec<_> = table.iter().map(|variant| variant.name).collect();
            return Err(unavailable(format!("there is no such variant; there are {}", names.join(", "))));
        };
        let kernel = variant.kernel(device, request).map_err(unavailable)?;
        return Ok((kernel, variant.choice(format!("{name}, forced"))));
    }
    let mut best: Option<(usize, K, u32)> = None;
    let mut lacking = Vec::new();
    for (place, variant) in table.iter().enumerate() {
        let kernel = variant.kernel(device, request);
        match kernel.and_then(|kernel| (variant.by_default)(device, request).map(|()| kernel)) {
            Ok(kernel) => {
                let cost = (variant.cost)(request, &kernel);
                if best.as_ref().is_none_or(|(.., least)| cost < *least) {
                    best = Some((place, kernel, cost));
                }
            }
            Err(why) => lacking.push((place, format!("not {}: {why}", variant.name))),
        }
    }
    let Some((place, kernel, _)) = best else {
        let reasons: Vec<_> = lacking.into_iter().map(|(_, why)| why).collect();
        return Err(Error::NoVariant { why: reasons.join("; ") });
    };
    let mut why = table[place].name.to_owned();
    for (_, reason) in lacking.iter().filter(|(lacks, _)| *lacks < place) {
        why = why + "; " + reason;
    }
    Ok((kernel, table[place].choice(why)))
}

impl<C, R: Asks, K> Variant<C, R, K> {
    /// The kernel that serves the request.
    fn kernel(&self, device: &C, request: &R) -> Result<K, String> {
        self.features.check(request.features())?;
        (self.build)(device, request)
    }

    fn choice(&self, why: String) -> Choice {
        Choice {
            variant: self.name,
            why,
            rounds_weights: self.rounds_weights,
            tensor_cores: self.tensor_cores,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Number = Variant<u32, u32, u32>;

    impl Asks for u32 {}

    fn at_least<const N: u32>(has: &u32, _: &u32) -> Result<u32, String> {
        if *has >= N { Ok(N) } else { Err(format!("{N} is more than {has}")) }
    }

    const TABLE: [Number; 4] = [
        Number::new("eight", at_least::<8>).rounding_weights().on_tensor_cores(),
        Number::new("four", at_least::<4>).not_by_default(|_, asked| match asked {
            3 => Err("3 is asked for".into()),
            _ => Ok(()),
        }),
        Number::new("two", at_least::<2>).costing(|asked, _| if *asked == 2 { 0 } else { 1 }),
        Number::new("zero", at_least::<0>).costing(|_, _| 2),
    ];

    #[test]
    fn the_first_of_the_cheapest_that_run_is_taken() {
        let chosen = |has: u32, asked: u32| {
            let (kernel, choice) = choose(&TABLE, &has, &asked, None).expect("zero runs everywhere");
            (kernel, choice.why, choice.rounds_weights)
        };
        assert_eq!(chosen(9, 0), (8, "eight".into(), true));
        assert_eq!(chosen(5, 0), (4, "four; not eight: 8 is more than 5".into(), false));
        assert_eq!(
            chosen(5, 3),
            (2, "two; not eight: 8 is more than 5; not four: 3 is asked for".into(), false)
        );
        assert_eq!(chosen(5, 2).0, 4, "the first of two that cost the same");
        assert_eq!(chosen(1, 2).0, 0);
    }

    #[test]
    fn a_forced_one_runs_or_says_what_it_lacks() {
        let forced = |has: u32, name| choose(&TABLE, &has, &3, Some(name)).map(|(kernel, _)| kernel);
        assert_eq!(forced(4, "four"), Ok(4), "what speaks against it does not count");
        let error = forced(3, "four").expect_err("too few");
        assert_eq!(
            error.to_string(),
            "variant four cannot run here: 4 is more than 3; force another, or none"
        );
        let error = forced(3, "five").expect_err("unknown");
        assert!(error.to_string().contains("no such variant; there are eight, four, two, zero"), "{error}");
        let none = choose(&TABLE[..1], &3, &3, None).map(|_| ()).expect_err("nothing runs");
        let want = "no kernel variant runs here: not eight: 8 is more than 3; use other dtypes or dims, or another backend";
        assert_eq!(none.to_string(), want);
    }

    #[test]
    fn candidates_say_what_they_lack() {
        let all = candidates(&TABLE, &4, &0);
        let lacks: Vec<_> = all.iter().map(|c| (c.name, c.lacks.is_none())).collect();
        assert_eq!(lacks, [("eight", false), ("four", true), ("two", true), ("zero", true)]);
        let chosen: Vec<_> = all.iter().filter(|c| c.chosen).map(|c| c.name).collect();
        assert_eq!(chosen, [choose(&TABLE, &4, &0, None).expect("one runs").1.variant]);
    }
}
