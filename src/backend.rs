//! A device that runs every op.

use crate::MlaSpec;
use crate::layer::{ExpandSpec, MlaLayerSpec};
use crate::ops::{
    AppendSpec, CalibrateSpec, CopySpec, Device, GatherSpec, Kernel, MergeAttnStatesSpec, MergeStatesSpec,
    PrefillSpec, ProjectSpec, RopeAppendSpec, RopeSpec,
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
    MlaSpec, MergeAttnStatesSpec, MergeStatesSpec, AppendSpec, CopySpec, GatherSpec, CalibrateSpec, RopeSpec, RopeAppendSpec,
    ProjectSpec, PrefillSpec, MlaLayerSpec, ExpandSpec
}
