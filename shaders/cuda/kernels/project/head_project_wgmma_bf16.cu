// ptx: compute_90a version=8.0
// The tiles of `mma` by wgmma, for bf16 x and weights.
#include "head_project_wgmma.cuh"

PROJECTS(bf16, true)
