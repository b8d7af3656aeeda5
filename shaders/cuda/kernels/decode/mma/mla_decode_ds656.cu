// ptx: compute_89 version=8.1
// The variants `mma_*` for records of 656 bytes; columns as in mla_decode_16_bit.cuh.
#include "decode/mla_decode.cuh"

// limits: mla_decode_512_64_mma_m16* registers=255 threads=128 shared=101376
// limits: mla_decode_512_64_mma_m32_small registers=255 threads=256 shared=101376
// limits: mla_decode_512_64_mma_m64 registers=255 threads=256 shared=166912
//             entry                          layout      rows tokens warps stages parts sharers kept
DECODE_RECORDS(mla_decode_512_64_mma_m16,       Record<64>, 16, 64, 4, 2, 1, 1, 18)
DECODE_RECORDS(mla_decode_512_64_mma_m16_split, Record<64>, 16, 32, 4, 2, 2, 1, 0)
DECODE_RECORDS(mla_decode_512_64_mma_m32_small, Record<64>, 32, 32, 8, 2, 1, 1, 0)
DECODE_RECORDS(mla_decode_512_64_mma_m64,       Record<64>, 64, 32, 8, 3, 1, 1, 0)
