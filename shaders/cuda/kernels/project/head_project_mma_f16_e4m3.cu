// The variants `mma` and `mma_*` for x in f16 and weights in e4m3.
#include "head_project_mma.cuh"

PROJECTS(f16_e4m3, false, true)
