//! A device that runs every op.

use crate::layer::{MlaExpand, MlaLayer};
use crate::ops::for_each_op;
use crate::ops::{Device, Kernel};

macro_rules! backend {
    ($($op:ty),*) => {
        /// A device that runs every op, for code that is generic over backends: one conformance suite runs on all of them.
        ///
        /// Memory of different backends is never shared silently: [`Device::upload`] and `Device::download` are the copies.
        pub trait Backend: Device $(+ Kernel<$op>)* + Kernel<MlaLayer> + Kernel<MlaExpand> {}

        impl<D: Device $(+ Kernel<$op>)* + Kernel<MlaLayer> + Kernel<MlaExpand>> Backend for D {}
    };
}

for_each_op!(backend);
