//! What was launched on a stream, as a graph that can be launched again.

use super::{Ignored, ignored_unless_required};
use wgpu_mla::cuda::cudarc::driver::sys;
use wgpu_mla::cuda::{Cuda, Graph};

/// A card with a stream of its own, so that nothing of another test gets into a capture.
pub fn cuda() -> Result<Cuda, Ignored> {
    Cuda::new(0).map_err(|error| ignored_unless_required("MLA_REQUIRE_CUDA", error))
}

/// A graph of what `record` launches. It must be kernels only: no allocation, no host callback.
pub fn captured(cuda: &Cuda, record: impl Fn() -> wgpu_mla::Result<()>) -> Graph {
    let captured = cuda.capture(record).expect("captured");
    let graph = captured.raw();
    let mut count = 0;
    // SAFETY: the graph is alive; without an array only the count is written.
    let status = unsafe { sys::cuGraphGetNodes(graph.cu_graph(), std::ptr::null_mut(), &mut count) };
    assert_eq!(status, sys::CUresult::CUDA_SUCCESS);
    let mut nodes = vec![std::ptr::null_mut(); count];
    // SAFETY: there is room for as many nodes as the graph has.
    let status = unsafe { sys::cuGraphGetNodes(graph.cu_graph(), nodes.as_mut_ptr(), &mut count) };
    assert_eq!(status, sys::CUresult::CUDA_SUCCESS);
    assert!(count > 0);
    for node in nodes {
        let mut kind = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
        // SAFETY: a node of a graph that is alive.
        let status = unsafe { sys::cuGraphNodeGetType(node, &mut kind) };
        assert_eq!(status, sys::CUresult::CUDA_SUCCESS);
        assert_eq!(kind, sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL);
    }
    captured
}
