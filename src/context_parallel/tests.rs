use std::sync::atomic::{AtomicU32, Ordering};

use super::{ContextParallel, ContextParallelSpec};
use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};
use crate::cache::decode_spec::MlaDecode;
use crate::cache::{KvSpec, MlaShape};
use crate::communicator::Communicator;
use crate::communicator::form::CombineForm;
use crate::cpu::Cpu;
use crate::ops::Device;

/// Rank 0 of 2, whose other rank has the same; counts exchanges.
struct Counts(AtomicU32);

impl<D: Device> Communicator<D> for Counts {
    fn rank(&self) -> u32 {
        0
    }

    fn world(&self) -> u32 {
        2
    }

    fn all_gather_host(&self, mine: &[u8]) -> Result<Vec<u8>> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok([mine, mine].concat())
    }
}

#[test]
fn nothing_is_exchanged_before_it_was_prepared() {
    let shape = MlaShape { num_heads: 4, kv_lora_rank: 256, qk_rope_head_dim: 32 };
    let kv = KvSpec { layout: Dtype::F32.into(), page_size: 4, num_pages: 2 };
    let decode = MlaDecode { shape, kv, query: Dtype::F32, out: Dtype::F32 };
    for form in [CombineForm::AllToAll, CombineForm::AllGather, CombineForm::AllGatherReduceScatter] {
        let spec = ContextParallelSpec { form, ..ContextParallelSpec::of(&decode, 0, 2, 2) };
        let mut cp = ContextParallel::new(&Cpu::with_threads(1), spec).expect("a group");
        let counts = Counts(AtomicU32::new(0));
        let refused = cp.combine(&counts);
        assert!(matches!(refused, Err(Error::LayoutMismatch { .. })), "{form:?}: {refused:?}");
        assert_eq!(counts.0.load(Ordering::Relaxed), 0, "{form:?}");
        cp.prepare(2).expect("prepared");
        cp.combine(&counts).expect("combined");
        assert!(counts.0.load(Ordering::Relaxed) > 0, "{form:?}");
    }
}
