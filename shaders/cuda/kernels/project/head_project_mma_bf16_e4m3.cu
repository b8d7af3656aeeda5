// The variants `mma` and `mma_*` for x in bf16 and weights in e4m3.
#include "head_project_mma.cuh"

PROJECTS(bf16_e4m3, true, true)
