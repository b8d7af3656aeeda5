// The end of a row of an attention: what its weighted sum of values is multiplied by, and its LSE, of the running maximum `top`, which is
// the base-2 logit that weights are relative to, and the sum of weights. All kernels end their rows by these.
#pragma once

#include "ptx.cuh"

// Whether some key has a weight. NaN too. It is a macro because nvcc keeps what a function returns as a number, not as a predicate.
#define HAS_WEIGHT(sum) (!((sum) == 0.0f))

// The factor of a row that has a weight. A sink's weight is part of the sum.
DEVICE float factor_of_row(float sum) {
    return 1.0f / sum;
}

// The LSE of a row that has a weight, in base 2.
DEVICE float lse_of_row(float top, float sum) {
    return top + log2_fast(sum);
}
