// ptx: compute_89 version=8.1
// The variants `mma_*` for records of 528 bytes, without a rotary part; columns as in mla_decode_16_bit.cuh. Few entries: f32
// queries have `simple`, and tiles of more rows wgmma.
#include "decode/mla_decode.cuh"

// limits: mla_decode_512_0_mma_m16 registers=255 threads=128 shared=101376
// limits: mla_decode_512_0_mma_m32_small registers=255 threads=256 shared=101376
//             entry                          layout      rows tokens warps stages parts sharers kept
DECODE_RECORDS(mla_decode_512_0_mma_m16,       Record<0>, 16, 64, 4, 2, 1, 1, 18)
DECODE_RECORDS(mla_decode_512_0_mma_m32_small, Record<0>, 32, 32, 8, 2, 1, 1, 0)
