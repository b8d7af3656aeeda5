"""wgmma of FP8: operands along k in lines of 64 bytes, swizzled by 64."""

import struct

import numpy as np

from convert import E4M3
from launch import Device, expect_fault, parse

ROWS, LINE = 64, 64  # rows of either operand, and bytes of one: two steps of k = 32
OPERAND = ROWS * LINE
FENCE = "fence.proxy.async.shared::cta;"
WAIT = "wgmma.wait_group.sync.aligned 0;"


def multiply(step, adds):
    sums = ", ".join(f"%f{i}" for i in range(32))
    return f"""add.u64 %rd5, %rd3, {step * 2}; add.u64 %rd6, %rd4, {step * 2};
wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {{{sums}}}, %rd5, %rd6, {adds}, 1, 1;"""


# Copies a and b to shared memory as they are, multiplies, and stores each lane's sums.
TEXT = f""".version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 given, .param .u64 out)
.maxntid 128, 1, 1
{{ .reg .b64 %rd<9>; .reg .b32 %r<9>; .reg .f32 %f<32>; .shared .align 1024 .b8 s[{2 * OPERAND}];
ld.param.u64 %rd1, [given]; ld.param.u64 %rd2, [out];
mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 2; mov.u32 %r3, s; add.u32 %r4, %r3, %r2; cvt.u64.u32 %rd7, %r2; add.u64 %rd1, %rd1, %rd7;
{" ".join(f"ld.global.u32 %r5, [%rd1+{at}]; st.shared.u32 [%r4+{at}], %r5;" for at in range(0, 2 * OPERAND, 512))}
{FENCE} bar.sync 0;
shr.u32 %r6, %r3, 4; cvt.u64.u32 %rd3, %r6; or.b64 %rd3, %rd3, {2 << 62 | 8 * LINE >> 4 << 32}; add.u64 %rd4, %rd3, {OPERAND // 16};
wgmma.fence.sync.aligned; {multiply(0, 0)} {multiply(1, 1)} wgmma.commit_group.sync.aligned; {WAIT}
shl.b32 %r7, %r1, 7; cvt.u64.u32 %rd8, %r7; add.u64 %rd2, %rd2, %rd8;
{" ".join(f"st.global.f32 [%rd2+{i * 4}], %f{i};" for i in range(32))}
ret; }}"""


def swizzled(codes):
    """Chunks of 16 codes permuted by the line of 128 bytes they are in."""
    row, column = np.indices(codes.shape)
    out = np.empty(codes.size, np.uint8)
    out[row * LINE + (column // 16 ^ row // 2 % 4) * 16 + column % 16] = codes
    return out


def product(a, b, text=TEXT):
    device = Device()
    given, out = device.buffer(np.concatenate([swizzled(a), swizzled(b)]), False), device.buffer(np.zeros((128, 32), np.float32))
    device.launch(parse(text)["k"], (1, 1, 1), [struct.pack("<Q", given), struct.pack("<Q", out)])
    thread, i = np.indices((128, 32))
    sums = np.empty((ROWS, ROWS), np.float32)
    sums[thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8, i // 4 * 8 + thread % 4 * 2 + i % 2] = device.read(out)
    return sums


def codes(seed):
    return np.random.default_rng(seed).integers(0, 256, (ROWS, LINE)).astype(np.uint8) & 0xF7  # no NaN


def test_a_product_of_codes():
    a, b = codes(1), codes(2)
    want = E4M3[a].astype(np.float64) @ E4M3[b].astype(np.float64).T
    assert np.allclose(product(a, b), want, rtol=0, atol=1e-6 * np.abs(want).max())


def test_a_code_that_is_nan():
    a, b = codes(1), codes(2)
    b[5, 40] = 0x7F
    sums = product(a, b)
    assert np.isnan(sums[:, 5]).all() and np.isfinite(np.delete(sums, 5, 1)).all()


def test_what_codes_lack_is_found():
    a, b = codes(1), codes(2)
    expect_fault(lambda: product(a, b, TEXT.replace(FENCE, "")))
    assert not np.allclose(product(a, b, TEXT.replace(WAIT, "")), product(a, b), atol=1e-3)
