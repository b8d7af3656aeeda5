// The variants `mma` and `mma_*` for x and weights in f16.
#include "head_project_mma.cuh"

PROJECTS(f16, false, false)
