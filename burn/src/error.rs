//! What can go wrong, and what to do about it.

use burn::tensor::DType;

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong. Nothing is recorded or submitted where a call returns one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An error of wgpu-mla, which says what to do.
    #[error(transparent)]
    Mla(#[from] wgpu_mla::Error),
    /// burn made no wgpu device. It makes each one once: call [`MlaDevice::new`](crate::MlaDevice::new) before the first tensor, or make
    /// the device with `Device::wgpu_options().init_with_setup()` and hand both over to [`MlaDevice::on`](crate::MlaDevice::on).
    #[error(
        "burn made no wgpu device: {detail}; make it before the first tensor, or by `init_with_setup`, and use `MlaDevice::on`"
    )]
    Device {
        /// What burn says.
        detail: String,
    },
    /// A tensor that is not on burn's wgpu backend. Make it on [`MlaDevice::device`](crate::MlaDevice::device); take `tensor.inner()` of
    /// one that is differentiated.
    #[error(
        "{what} is no tensor of burn's wgpu backend ({detail}): make it on `MlaDevice::device()`, without autodiff"
    )]
    Backend {
        /// The tensor.
        what: &'static str,
        /// What burn says.
        detail: String,
    },
    /// A tensor of another device. Make it on [`MlaDevice::device`](crate::MlaDevice::device).
    #[error("{what} is on another device: make it on `MlaDevice::device()`")]
    OtherDevice {
        /// The tensor.
        what: &'static str,
    },
    /// A tensor of another shape.
    #[error("{what} has the shape {got:?}: it must be {want:?}")]
    Shape {
        /// The tensor.
        what: &'static str,
        /// Its shape.
        got: Vec<usize>,
        /// What it must be.
        want: Vec<usize>,
    },
    /// A tensor of another dtype. Use `tensor.cast`.
    #[error("{what} is {got:?}: cast it to {want}")]
    Dtype {
        /// The tensor.
        what: &'static str,
        /// Its dtype.
        got: DType,
        /// What it must be.
        want: wgpu_mla::Dtype,
    },
    /// Work that burn had queued failed, so that there is no tensor. burn says why.
    #[error("{what} was not computed: {detail}")]
    NotComputed {
        /// The tensors.
        what: &'static str,
        /// What burn says.
        detail: String,
    },
    /// Weights that cannot be loaded.
    #[error("weights: {detail}")]
    Weights {
        /// What burn says.
        detail: String,
    },
    /// A call out of order.
    #[error("{0}")]
    Order(&'static str),
}
