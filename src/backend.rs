//! A device that runs every op.

use crate::MlaSpec;
use crate::layer::{ExpandSpec, MlaLayerSpec};
use crate::ops::{
    AppendSpec, CalibrateSpec, CopySpec, Device, GatherSpec, Kernel, MergeAttnStatesSpec, MergeStatesSpec,
    PrefillSpec, ProjectSpec, RopeAppendSpec, RopeSpec,
};

/// A device that runs every op, for code that is generic over backends: one conformance suite runs on all of them.
///
/// Memory of different backends is never shared silently: [`Device::upload`] and `Device::download` are the copies.
pub trait Backend:
    Device
    + Kernel<MlaSpec>
    + Kernel<MergeAttnStatesSpec>
    + Kernel<MergeStatesSpec>
    + Kernel<AppendSpec>
    + Kernel<CopySpec>
    + Kernel<GatherSpec>
    + Kernel<CalibrateSpec>
    + Kernel<RopeSpec>
    + Kernel<RopeAppendSpec>
    + Kernel<ProjectSpec>
    + Kernel<PrefillSpec>
    + Kernel<MlaLayerSpec>
    + Kernel<ExpandSpec>
{
}

impl<D> Backend for D where
    D: Device
        + Kernel<MlaSpec>
        + Kernel<MergeAttnStatesSpec>
        + Kernel<MergeStatesSpec>
        + Kernel<AppendSpec>
        + Kernel<CopySpec>
        + Kernel<GatherSpec>
        + Kernel<CalibrateSpec>
        + Kernel<RopeSpec>
        + Kernel<RopeAppendSpec>
        + Kernel<ProjectSpec>
        + Kernel<PrefillSpec>
        + Kernel<MlaLayerSpec>
        + Kernel<ExpandSpec>
{
}
