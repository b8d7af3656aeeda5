//! burn's tensors as parts of wgpu buffers, without a copy.
//!
//! ```text
//! Input::new     a tensor, perhaps only described by operations that burn has not run yet
//! compute        burn runs what they need: the fusing backend is drained, one round trip for all
//! on_buffers     outputs allocated by burn; each array's buffer and offset; burn's commands submitted; then the caller's
//! ```

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::fusion::client::GlobalFusionClient as FusionClient;
use burn::backend::fusion::stream::{Operation, StreamId};
use burn::backend::fusion::{ExecutionError, FusionBackend, FusionRuntime, FusionTensor, NoOp};
use burn::backend::ir::{
    BackendIr, CustomOpIr, HandleContainer, InitOperationIr, OperationIr, OperationOutput, TensorIr,
};
use burn::backend::wgpu::{CubeBackend, CubeTensor, Wgpu, WgpuResource, into_contiguous};
use burn::backend::{CubeDevice, TensorMetadata};
use burn::cubecl::wgpu::{AutoCompiler, WgpuServer};
use burn::tensor::{DType, Shape, Tensor};
use wgpu_mla::{Dtype, View, wgpu};

use crate::device::MlaDevice;
use crate::error::{Error, Result};

type Runtime = <CubeBackend as FusionBackend>::FusionRuntime;
type FusionHandle = <Runtime as FusionRuntime>::FusionHandle;

/// A tensor that an op reads.
pub struct Input {
    what: &'static str,
    tensor: FusionTensor<Runtime>,
    dtype: Dtype,
    is_dense: bool,
}

impl std::fmt::Debug for Input {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Input").field("what", &self.what).field("tensor", &self.tensor).finish()
    }
}

impl Input {
    /// Takes a tensor of f32, f16 or bf16. `what` names it in errors.
    ///
    /// # Errors
    /// [`Error::Backend`] for a tensor of another backend than burn's wgpu, or of autodiff; [`Error::Dtype`].
    pub fn new<const D: usize>(what: &'static str, tensor: Tensor<D>) -> Result<Self> {
        let tensor = tensor.try_into_primitive::<Wgpu>();
        let tensor = tensor.map_err(|error| Error::Backend { what, detail: format!("{error:?}") })?;
        let dtype =
            dtype_of(tensor.dtype).ok_or(Error::Dtype { what, got: tensor.dtype, want: Dtype::F32 })?;
        Ok(Self { what, tensor, dtype, is_dense: false })
    }

    /// Checks its dtype and shape.
    ///
    /// # Errors
    /// [`Error::Dtype`] and [`Error::Shape`].
    pub fn checked(self, dtype: Dtype, shape: &[usize]) -> Result<Self> {
        let what = self.what;
        if self.dtype != dtype {
            return Err(Error::Dtype { what, got: self.tensor.dtype, want: dtype });
        }
        if self.tensor.shape.as_slice() != shape {
            return Err(Error::Shape { what, got: self.tensor.shape.to_vec(), want: shape.to_vec() });
        }
        Ok(self)
    }

    /// Has burn copy it where its rows are not dense, one behind the other.
    #[must_use]
    pub fn dense(self) -> Self {
        Self { is_dense: true, ..self }
    }

    /// Its dtype.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    pub(crate) fn device(&self) -> &CubeDevice {
        self.tensor.client.device()
    }
}

/// An output, which burn allocates.
#[derive(Debug, Clone)]
pub struct Output {
    shape: Vec<usize>,
    dtype: Dtype,
}

impl Output {
    /// A dense tensor of f32, f16 or bf16.
    #[must_use]
    pub fn new<const D: usize>(shape: [usize; D], dtype: Dtype) -> Self {
        Self { shape: shape.to_vec(), dtype }
    }
}

/// burn's dtype as wgpu-mla has it.
fn dtype_of(dtype: DType) -> Option<Dtype> {
    match dtype {
        DType::F32 => Some(Dtype::F32),
        DType::F16 => Some(Dtype::F16),
        DType::BF16 => Some(Dtype::Bf16),
        _ => None,
    }
}

/// wgpu-mla's dtype as burn has it; `None` for codes.
#[must_use]
pub fn burn_dtype(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::F32 => Some(DType::F32),
        Dtype::F16 => Some(DType::F16),
        Dtype::Bf16 => Some(DType::BF16),
        Dtype::E4m3 => None,
    }
}

/// A tensor's memory: a part of a buffer of burn's. It stays where it is as long as this is held.
#[derive(Debug)]
pub struct Array {
    resource: WgpuResource,
    /// burn's type cannot be named through burn.
    _held: Box<dyn Any + Send>,
    shape: Vec<usize>,
    /// Elements from an entry of a dimension to the next.
    strides: Vec<usize>,
    dtype: Dtype,
}

impl Array {
    /// The buffer that it is a part of.
    #[must_use]
    pub fn buffer(&self) -> &wgpu::Buffer {
        &self.resource.buffer
    }

    /// Bytes of the buffer before it.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.resource.offset
    }

    /// Its elements as `[tokens, heads, dim]`: a tensor `[tokens, heads, dim]`, or `[tokens, heads * dim]`, whose rows are then cut into
    /// heads.
    #[must_use]
    pub fn view(&self, dim: u32) -> View<&wgpu::Buffer> {
        let offset = self.offset() / self.dtype.bytes() as u64;
        let stride = |dimension: usize| self.strides.get(dimension).map_or(0, |&stride| stride as u64);
        let head_stride = if self.shape.len() > 2 { stride(1) } else { dim.into() };
        View { buffer: self.buffer(), offset, token_stride: stride(0), head_stride }
    }

    /// What tells the place of this array from others.
    pub(crate) fn place(&self) -> Place {
        Place { buffer: self.buffer().clone(), offset: self.offset(), strides: self.strides.clone() }
    }
}

/// Where an array is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    buffer: wgpu::Buffer,
    offset: u64,
    strides: Vec<usize>,
}

/// Takes tensors out of the stream of burn's fusing backend as it gets there: behind every operation that they need.
struct Taken {
    inputs: Vec<TensorIr>,
    tensors: Arc<Mutex<Vec<CubeTensor>>>,
}

impl std::fmt::Debug for Taken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Taken").field("inputs", &self.inputs).finish_non_exhaustive()
    }
}

impl Operation<Runtime> for Taken {
    fn execute(&self, handles: &mut HandleContainer<FusionHandle>) -> Result<(), ExecutionError> {
        let taken = self.inputs.iter().map(|input| handles.get_float_tensor::<CubeBackend>(input));
        self.tensors.lock().unwrap_or_else(PoisonError::into_inner).extend(taken);
        Ok(())
    }
}

/// Has burn queue all operations that the inputs need, and gives their memory.
///
/// # Errors
/// [`Error::NotComputed`].
pub(crate) fn compute<const N: usize>(inputs: [Input; N]) -> Result<[CubeTensor; N]> {
    let what = inputs.first().map_or("nothing", |input| input.what);
    let failed = |detail: String| Error::NotComputed { what, detail };
    let Some(client) = inputs.first().map(|input| input.tensor.client.clone()) else {
        return Vec::new().try_into().map_err(|_| failed("no tensors".into()));
    };
    let tensors = Arc::default();
    let must_be_dense = inputs.each_ref().map(|input| input.is_dense);
    let inputs: Vec<_> = inputs.into_iter().map(|input| input.tensor.into_ir()).collect();
    let description = CustomOpIr::new("wgpu_mla_taken", &inputs, &[]);
    let taken = Taken { inputs, tensors: Arc::clone(&tensors) };
    client.register(StreamId::current(), OperationIr::Custom(description), taken);
    client.try_sync(|| ()).map_err(|error| failed(format!("{error:?}")))?;
    let tensors = std::mem::take(&mut *tensors.lock().unwrap_or_else(PoisonError::into_inner));
    let tensors = tensors.into_iter().zip(must_be_dense);
    let tensors: Vec<_> = tensors.map(|(tensor, is_dense)| readable(tensor, is_dense)).collect();
    tensors
        .try_into()
        .map_err(|_| failed("an operation before it failed, as its own tensor will tell".into()))
}

/// The tensor itself, where kernels can read its rows; a copy, by burn, where its last dimension is strided, as that of a transposed one,
/// or where it must be dense and is not.
fn readable(tensor: CubeTensor, must_be_dense: bool) -> CubeTensor {
    if must_be_dense {
        return into_contiguous(tensor);
    }
    let rows = |tensor: &CubeTensor| {
        let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
        let (last, outer) = strides.split_last()?;
        let is_row = *last == 1 || shape.last() == Some(&1);
        (is_row && outer.iter().all(|stride| stride.is_multiple_of(8))).then_some(())
    };
    let is_plain = !tensor.meta.is_tiled() && tensor.qparams.is_none();
    if is_plain && rows(&tensor).is_some() { tensor } else { into_contiguous(tensor) }
}

impl MlaDevice {
    /// Runs commands on tensors: has burn compute the inputs, lets it allocate the outputs, has it submit what it has queued, and calls `f`
    /// with all of them as parts of buffers. `f` submits commands, as [`Device::submit`](wgpu_mla::Device::submit) does. What burn is asked
    /// for afterwards comes after them.
    ///
    /// `f` runs on burn's thread of the device.
    ///
    /// # Errors
    /// The errors of `f`, [`Error::OtherDevice`] and [`Error::NotComputed`].
    pub fn on_buffers<const N: usize, const M: usize>(
        &self,
        inputs: [Input; N],
        outputs: [Output; M],
        f: impl FnOnce(&[Array; N], &[Array; M]) -> Result<()> + Send,
    ) -> Result<[Made; M]> {
        if let Some(other) = inputs.iter().find(|input| input.device() != self.cube()) {
            return Err(Error::OtherDevice { what: other.what });
        }
        let read = compute(inputs)?;
        let client = self.client();
        let written = outputs.map(|output| {
            let bytes = output.shape.iter().product::<usize>() * output.dtype.bytes();
            let dtype = burn_dtype(output.dtype).unwrap_or(DType::U8);
            let handle = client.empty(bytes);
            CubeTensor::new_contiguous(
                client.clone(),
                self.cube().clone(),
                Shape::from(output.shape),
                handle,
                dtype,
            )
        });
        let fusing = FusionClient::load(self.cube());
        let made = written.clone().map(|tensor| Made { tensor, client: fusing.clone() });
        let run = move || {
            let written = located(&written)?;
            let arrays = located(&read)?;
            // What these calls queued, and the operations that made the inputs, perhaps on other threads.
            let mut streams: Vec<_> = read.iter().map(|tensor| tensor.handle.stream).collect();
            streams.push(StreamId::current());
            streams.sort_unstable();
            streams.dedup();
            for stream in streams {
                stream.executes(|| client.flush()).map_err(not_computed)?;
            }
            f(&arrays, &written)
        };
        client.exclusive(run).map_err(not_computed)??;
        Ok(made)
    }
}

/// Where burn has tensors.
fn located<const N: usize>(tensors: &[CubeTensor; N]) -> Result<[Array; N]> {
    let located = tensors.iter().map(|tensor| {
        let held = tensor.client.get_resource::<WgpuServer<AutoCompiler>>(tensor.handle.clone());
        let dtype = dtype_of(tensor.dtype).unwrap_or(Dtype::F32);
        let (shape, strides) = (tensor.meta.shape().to_vec(), tensor.meta.strides().to_vec());
        let held = held.map_err(not_computed)?;
        Ok(Array { resource: held.resource().clone(), _held: Box::new(held), shape, strides, dtype })
    });
    let located: Vec<_> = located.collect::<Result<_>>()?;
    located.try_into().map_err(|_| not_computed("another number of tensors"))
}

fn not_computed(error: impl std::fmt::Debug) -> Error {
    Error::NotComputed { what: "a tensor", detail: format!("{error:?}") }
}

/// An output of [`MlaDevice::on_buffers`].
pub struct Made {
    tensor: CubeTensor,
    client: FusionClient<Runtime>,
}

impl std::fmt::Debug for Made {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Made").field("tensor", &self.tensor).finish_non_exhaustive()
    }
}

impl Made {
    /// The tensor. Its rank is that of the [`Output`].
    #[must_use]
    pub fn tensor<const D: usize>(self) -> Tensor<D> {
        let Self { tensor, client } = self;
        let (shape, dtype) = (tensor.shape(), tensor.dtype);
        let handle = CubeBackend::float_tensor_handle(tensor);
        let description = InitOperationIr::create(shape, dtype, || client.register_tensor_handle(handle));
        let tensor =
            client.register(StreamId::current(), OperationIr::Init(description), NoOp::<CubeBackend>::new());
        Tensor::from_primitive::<Wgpu>(tensor.output())
    }
}
