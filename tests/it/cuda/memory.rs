//! Memory of the card is refused, allocation by allocation, where the driver can be asked to: the emulated one can.

use std::collections::BTreeSet;
use std::fmt::Debug;

use cudarc::driver::sys;
use mla_support::{Ignored, Outcome};
use wgpu_mla::cuda::{Buffer, Cuda};
use wgpu_mla::*;

use crate::every_op::{self, Uses, Visit};

/// `emulated_refuse_memory` of tests/cuda_driver: see there.
type Refuse = unsafe extern "C" fn(u64) -> u64;

struct Refused<'a> {
    cuda: &'a Cuda,
    refuse: Refuse,
    seen: BTreeSet<&'static str>,
    refusals: u64,
}

impl Refused<'_> {
    /// Refuses each allocation of a call in turn: an error, and the same call works afterwards.
    fn each<T: Debug>(&mut self, what: &str, mut call: impl FnMut() -> Result<T>) {
        for n in 0..100 {
            // SAFETY: it takes and gives a number.
            unsafe { (self.refuse)(n) };
            let result = call();
            // SAFETY: as above.
            if unsafe { (self.refuse)(u64::MAX) } != u64::MAX {
                assert!(result.is_ok(), "{what}, after {n} refusals: {:?}", result.err());
                self.refusals += n;
                return;
            }
            assert!(matches!(result, Err(Error::OutOfMemory { .. })), "{what}, allocation {n}: {result:?}");
        }
        panic!("{what}: no end of allocations");
    }
}

impl Visit<Cuda> for Refused<'_> {
    fn visit<'a, O: Op>(
        &mut self,
        spec: O,
        options: &O::Options,
        input: O::Input<'a>,
        args: &O::Args<&Buffer>,
    ) where
        Cuda: Kernel<O>,
        O::Input<'a>: Clone,
    {
        let cuda = self.cuda.clone();
        self.each(O::NAME, || cuda.compile_with(spec, options).map(drop));
        let op = cuda.compile_with(spec, options).expect("compiles");
        self.each(O::NAME, || {
            let mut step = op.step(O::Capacity::default())?;
            op.prepare(&mut step, input.clone())
        });
        let mut step = op.step(O::Capacity::default()).expect("a step");
        self.each(O::NAME, || op.prepare(&mut step, input.clone()));
        let room = step.used();
        self.each(O::NAME, || op.bind(args, room).map(drop));
        self.seen.insert(O::NAME);
    }
}

fn each_allocation_is_refused() -> Outcome {
    let cuda = mla_support::graph::cuda()?;
    // SAFETY: the emulated driver's function is of this type, and others have none of this name.
    let Ok(refuse) = (unsafe { sys::culib().get::<Refuse>(b"emulated_refuse_memory") }) else {
        return Err(Ignored("only the emulated driver refuses memory when asked to".into()));
    };
    let uses = Uses::new(&cuda).expect("memory");
    let mut refused = Refused { cuda: &cuda, refuse: *refuse, seen: BTreeSet::new(), refusals: 0 };
    refused.each("a buffer", || cuda.buffer(1 << 20));
    uses.each(&mut refused);
    assert_eq!(refused.seen, every_op::names());
    assert!(refused.refusals > 20, "{} refusals", refused.refusals);
    Ok(())
}

crate::tests![each_allocation_is_refused];
