"""The interpreter finds missing barriers and waits, accesses out of bounds, and races."""

import struct

import numpy as np

from launch import Device, barriers, compiled, expect_fault, parse, without_barrier
from test_small import SMALL, normal

HEAD = ".version 7.0\n.target sm_80\n.address_size 64\n"


def differs(ptx, name, n, shared=0, races=True, orders=("forward", "reverse"), size=1024):
    """Runs a kernel of small.cu from a changed text; whether its result is not that of the unchanged text."""
    results = []
    for text in (compiled(SMALL), ptx):
        device = Device()
        given, out = device.buffer(normal(size), False), device.buffer(np.full(size, np.nan, np.float32))
        args = [struct.pack("<QQi4x", given, out, n)]
        device.launch(parse(text)[name], (1, 1, 1), args, shared=shared, races=races, orders=orders)
        results.append(device.read(out))
    return not np.array_equal(*results, equal_nan=True)


def test_every_barrier_that_is_missing_is_a_race():
    for name, n, shared, count in (("pass_on", 0, 0, 1), ("two_rounds", 5, 0, 2), ("fly", 1024, 4096, 2)):
        ptx = compiled(SMALL)
        assert len(barriers(ptx, name)) == count
        for index in range(count):
            expect_fault(lambda: differs(without_barrier(ptx, name, index), name, n, shared), "race")


def test_a_missing_barrier_shows_by_order_and_poison_alone():
    ptx = without_barrier(compiled(SMALL), "pass_on", 0)
    # Each warp reads what the next one writes: unwritten, if the first warp runs first.
    assert differs(ptx, "pass_on", 0, races=False, orders=("forward",))
    expect_fault(lambda: differs(ptx, "pass_on", 0, races=False), "order of the warps")


def test_a_missing_wait_shows_by_poison():
    ptx = compiled(SMALL)
    for wait in ("cp.async.wait_group 1;", "cp.async.wait_group 0;"):
        assert ptx.count(wait) == 1
        assert differs(ptx.replace(wait, ""), "fly", 1024, 4096, races=False, orders=("reverse",))
    late = ptx.replace("cp.async.wait_group 1;", "cp.async.wait_group 2;")
    assert differs(late, "fly", 1024, 4096, races=False, orders=("reverse",))
    # The copy lands after other warps have read: that is a race too.
    expect_fault(lambda: differs(late, "fly", 1024, 4096), "race")


def test_reads_past_a_buffer():
    expect_fault(lambda: differs(compiled(SMALL), "fly", 1024, 4096, size=1020), "global")
    expect_fault(lambda: differs(compiled(SMALL), "fly", 1024, 4092), "a block has 4092")


def by_hand(body, registers, shared="", threads=64):
    """Runs instructions with the address of 64 words in %rd1; returns the words."""
    head = f".visible .entry k(.param .u64 k_param_0)\n.maxntid {threads}, 1, 1\n{{ .reg .b64 %rd<9>; {registers} {shared}\n"
    text = HEAD + head + "ld.param.u64 %rd1, [k_param_0];\n" + body + "\nret; }"
    device = Device()
    words = device.buffer(np.arange(64, dtype=np.uint32))
    device.launch(parse(text)["k"], (1, 1, 1), [struct.pack("<Q", words)])
    return device.read(words)


def test_a_write_to_what_is_read_only():
    device = Device()
    words = device.buffer(np.zeros(4, np.uint32), False)
    text = HEAD + ".visible .entry k(.param .u64 p)\n.maxntid 32, 1, 1\n{ .reg .b64 %a; ld.param.u64 %a, [p]; st.u32 [%a], 1; ret; }"
    expect_fault(lambda: device.launch(parse(text)["k"], (1, 1, 1), [struct.pack("<Q", words)]), "write")


def test_an_address_that_is_not_aligned():
    expect_fault(lambda: by_hand("ld.global.v2.u32 {%r1, %r2}, [%rd1+4];", ".reg .b32 %r<9>;"), "multiple")


def test_a_barrier_that_a_part_of_a_warp_reaches():
    part = "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 40; @!%p1 bra $A; bar.sync 0; $A:"
    expect_fault(lambda: by_hand(part, ".reg .b32 %r<9>; .reg .pred %p<3>;"), "part of a warp")


def test_a_barrier_that_a_warp_never_reaches():
    stuck = "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; @%p1 bra $A; bar.sync 1, 64; $A:"
    expect_fault(lambda: by_hand(stuck, ".reg .b32 %r<9>; .reg .pred %p<3>;"), "for ever")


def test_a_named_barrier_orders_whom_it_joins():
    """The second warp only arrives, the first waits for it and reads."""
    text = """mov.u32 %r1, %tid.x; mov.u32 %r2, s; shl.b32 %r3, %r1, 2; add.u32 %r2, %r2, %r3; setp.lt.u32 %p1, %r1, 32;
        @%p1 bra $FIRST;
        st.shared.u32 [%r2], %r1; bar.arrive 3, 64; bra $END;
        $FIRST: bar.sync 3, 64; ld.shared.u32 %r4, [%r2+128];
        cvt.u64.u32 %rd2, %r3; add.u64 %rd2, %rd2, %rd1; st.global.u32 [%rd2], %r4;
        $END:"""
    registers, shared = ".reg .b32 %r<9>; .reg .pred %p<3>;", ".shared .align 4 .b8 s[256];"
    words = by_hand(text, registers, shared)
    assert (words == np.concatenate([np.arange(32, 64), np.arange(32, 64)])).all()
    expect_fault(lambda: by_hand(text.replace("bar.sync 3, 64;", ""), registers, shared), "race")


def test_a_shuffle_from_a_lane_that_is_elsewhere():
    text = """mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 5; @%p1 bra $A;
        shfl.sync.idx.b32 %r2, %r1, 3, 31, 0xffffffe0; $A:"""
    expect_fault(lambda: by_hand(text, ".reg .b32 %r<9>; .reg .pred %p<3>;", threads=32), "no part")
    expect_fault(lambda: by_hand(text.replace("e0;", "ff;"), ".reg .b32 %r<9>; .reg .pred %p<3>;", threads=32), "elsewhere", "no part")


def test_names_in_braces_are_their_own():
    text = """mov.u32 %r1, %tid.x; { .reg .b32 x; mov.b32 x, 7; { .reg .b64 x; cvt.u64.u32 x, %r1; shl.b64 x, x, 2; add.u64 %rd2, %rd1, x; }
        st.global.u32 [%rd2], x; }"""
    assert (by_hand(text, ".reg .b32 %r<9>;") == 7).all()


def test_registers_that_a_block_does_not_have():
    """Of 384 threads: 168 each at launch, so that two warpgroups may have 224 where the third keeps 56."""

    def run(taken, kept):
        ptx = f"""{HEAD.replace("sm_80", "sm_90a").replace("7.0", "8.0")}.visible .entry share()
.maxntid 384, 1, 1
{{
.reg .pred %p<2>;
.reg .b32 %r<2>;
mov.u32 %r1, %tid.x;
setp.ge.u32 %p1, %r1, 256;
@%p1 bra LOADER;
setmaxnreg.inc.sync.aligned.u32 {taken};
ret;
LOADER:
setmaxnreg.dec.sync.aligned.u32 {kept};
ret;
}}"""
        Device().launch(parse(ptx)["share"], (2, 1, 1), [])

    run(224, 56)
    run(240, 24)
    expect_fault(lambda: run(232, 48), "setmaxnreg waits for ever")
