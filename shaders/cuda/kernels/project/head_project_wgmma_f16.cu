// ptx: compute_90a version=8.0
// The tiles of `mma` by wgmma, for f16 x and weights.
#include "head_project_wgmma.cuh"

PROJECTS(f16, false)
