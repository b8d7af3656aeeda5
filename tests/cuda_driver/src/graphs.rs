//! Graphs of what was captured.

use std::ffi::c_ulonglong;

use cudarc::driver::sys::{CUgraph, CUgraphExec, CUgraphNode, CUgraphNodeType, CUresult, CUstream};

use crate::state::{card, code};
use crate::streams::{Work, end_capture, put};

/// Behind the handles of a graph and of its executable.
#[derive(Clone)]
struct Graph {
    work: Vec<Work>,
}

/// A handle that this driver gave out, and that was not destroyed.
fn graph<'a, T>(handle: *mut T) -> Result<&'a Graph, CUresult> {
    card()?;
    // SAFETY: the functions below made the handle.
    unsafe { handle.cast::<Graph>().as_ref() }.ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
}

fn destroy<T>(handle: *mut T) -> CUresult {
    code(graph(handle).map(|_| drop(unsafe { Box::from_raw(handle.cast::<Graph>()) })))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamEndCapture(stream: CUstream, made: *mut CUgraph) -> CUresult {
    unsafe { made.write(std::ptr::null_mut()) };
    code(
        end_capture(stream)
            .map(|(_, work)| unsafe { made.write(Box::into_raw(Box::new(Graph { work })).cast()) }),
    )
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphInstantiateWithFlags(
    made: *mut CUgraphExec,
    from: CUgraph,
    _: c_ulonglong,
) -> CUresult {
    code(graph(from).map(|from| unsafe { made.write(Box::into_raw(Box::new(from.clone())).cast()) }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphLaunch(handle: CUgraphExec, stream: CUstream) -> CUresult {
    code(graph(handle).and_then(|graph| graph.work.iter().try_for_each(|work| put(stream, work.clone()))))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphUpload(handle: CUgraphExec, _: CUstream) -> CUresult {
    code(graph(handle).map(drop))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphDestroy(handle: CUgraph) -> CUresult {
    destroy(handle)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphExecDestroy(handle: CUgraphExec) -> CUresult {
    destroy(handle)
}

/// A node's handle is the address of its work.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphGetNodes(
    handle: CUgraph,
    nodes: *mut CUgraphNode,
    count: *mut usize,
) -> CUresult {
    code(graph(handle).map(|graph| {
        let all = &graph.work;
        if !nodes.is_null() {
            for (i, work) in all.iter().enumerate().take(unsafe { count.read() }) {
                unsafe { nodes.add(i).write(std::ptr::from_ref(work).cast_mut().cast()) };
            }
        }
        unsafe { count.write(all.len()) };
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphNodeGetType(node: CUgraphNode, kind: *mut CUgraphNodeType) -> CUresult {
    let is = match unsafe { &*node.cast::<Work>() } {
        Work::Launch(_) => CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL,
        Work::Set { .. } => CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMSET,
        Work::Copy { .. } => CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMCPY,
    };
    unsafe { kind.write(is) };
    CUresult::CUDA_SUCCESS
}
