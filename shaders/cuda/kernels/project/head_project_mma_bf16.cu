// The variants `mma` and `mma_*` for x and weights in bf16.
#include "head_project_mma.cuh"

PROJECTS(bf16, true, false)
