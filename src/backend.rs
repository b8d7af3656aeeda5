//! A device that runs every op.

use crate::MlaDecode;
use crate::layer::{MlaExpand, MlaLayer};
use crate::ops::{
    CorrectAttnOut, Device, HeadProject, Kernel, KvAppend, KvCalibrate, KvCopyPages, KvGather, MergeState,
    MergeStates, MlaPrefill, ReorgKvCache, Rope, RopeAppend,
};

macro_rules! backend {
    ($(#[$doc:meta])* $($op:ty),*) => {
        $(#[$doc])*
        pub trait Backend: Device $(+ Kernel<$op>)* {}

        impl<D: Device $(+ Kernel<$op>)*> Backend for D {}
    };
}

backend! {
    /// A device that runs every op, for code that is generic over backends: one conformance suite runs on all of them.
    ///
    /// Memory of different backends is never shared silently: [`Device::upload`] and `Device::download` are the copies.
    MlaDecode, MergeState, MergeStates, CorrectAttnOut, KvAppend, KvCopyPages, KvGather, ReorgKvCache, KvCalibrate, Rope, RopeAppend,
    HeadProject, MlaPrefill, MlaLayer, MlaExpand
}
