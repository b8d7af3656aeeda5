//! What may be sent to other threads and used by several: told by the compiler. `conformance::*::threads` runs it.

use wgpu_mla::communicator::{InProcess, StepDigest};
use wgpu_mla::cpu::Cpu;
use wgpu_mla::{
    AnyBackend, AppendBatch, Backend, Binding, BlockTable, Compiled, ContextParallel, Csr, Expanded, KvView,
    LayerArrays, LayerPlan, MlaExpand, MlaLayer, PagePool, Plan, RopeFrequencies, Shares, Step, View,
    for_each_op,
};

fn shared<T: Send + Sync>() {}

/// By the traits alone, as generic code of a host has it.
fn generic<B: Backend>() {
    shared::<B>();
    shared::<B::Buffer>();
    shared::<View<B::Buffer>>();
    shared::<KvView<B::Buffer>>();
    shared::<Expanded<B::Buffer>>();
    shared::<ContextParallel<B>>();
    macro_rules! ops {
        ($($op:ty),*) => {
            $(shared::<Compiled<$op, B>>();
            shared::<Step<$op, B>>();
            shared::<Binding<$op, B>>();)*
        };
    }
    ops!(MlaLayer, MlaExpand);
    for_each_op!(ops);
}

fn what_is_shared_by_threads() {
    generic::<Cpu>();
    generic::<AnyBackend>();
    #[cfg(feature = "wgpu")]
    generic::<wgpu_mla::gpu::Gpu>();
    #[cfg(feature = "cuda")]
    generic::<wgpu_mla::cuda::Cuda>();
    shared::<PagePool>();
    shared::<Plan>();
    shared::<LayerPlan>();
    shared::<Shares>();
    shared::<LayerArrays>();
    shared::<(BlockTable, Csr, AppendBatch, RopeFrequencies, StepDigest, wgpu_mla::Error)>();
    // A rank is one thread's.
    fn sent<T: Send>() {}
    sent::<InProcess>();
}

crate::tests![what_is_shared_by_threads];
