"""mbarriers: a lane that waits sees all writes before the arrivals, and wrong uses are found."""

import numpy as np

from launch import expect_fault
from test_faults import by_hand

REGISTERS = ".reg .b32 %r<9>; .reg .pred %p<9>;"
SHARED = ".shared .align 8 .b8 s[256]; .shared .align 8 .b8 b[16];"
WAIT = "$AGAIN: mbarrier.test_wait.parity.shared.b64 %p3, [%r5], 0; @!%p3 bra $AGAIN;"
REUSE = "$LATER: mbarrier.test_wait.parity.shared.b64 %p4, [%r5+8], 0; @!%p4 bra $LATER;"
COPY = "cp.async.ca.shared.global [%r2], [%rd2], 4;"
ARRIVE = "cp.async.mbarrier.arrive.noinc.shared.b64 [%r5];"
# The second warp copies, the first waits for the copies and reads them. Then the first arrives, and the second reuses the memory.
TEXT = f"""mov.u32 %r1, %tid.x; mov.u32 %r2, s; mov.u32 %r5, b; shl.b32 %r3, %r1, 2; add.u32 %r2, %r2, %r3;
    cvt.u64.u32 %rd2, %r3; add.u64 %rd2, %rd2, %rd1;
    setp.eq.u32 %p2, %r1, 0; @%p2 mbarrier.init.shared.b64 [%r5], 32;
    @%p2 mbarrier.init.shared.b64 [%r5+8], 32; bar.sync 0;
    setp.lt.u32 %p1, %r1, 32; @%p1 bra $FIRST;
    {COPY} {ARRIVE}
    {REUSE} st.shared.u32 [%r2], %r1; bra $END;
    $FIRST: {WAIT} ld.shared.u32 %r4, [%r2+128]; st.global.u32 [%rd2], %r4;
    mbarrier.arrive.shared.b64 %rd3, [%r5+8];
    $END:"""


def run(text=TEXT):
    return by_hand(text, REGISTERS, SHARED)


def test_who_waits_sees_the_copies():
    assert (run() == np.concatenate([np.arange(32, 64), np.arange(32, 64)])).all()


def test_a_place_is_reused_only_after_a_wait():
    expect_fault(lambda: run(TEXT.replace(REUSE, "")), "race")


def test_copies_are_not_there_before_the_wait():
    expect_fault(lambda: run(TEXT.replace(WAIT, "")), "race")
    # An arrival that does not wait for the copies: the reader finds poison.
    early = TEXT.replace(ARRIVE, "mbarrier.arrive.shared.b64 %rd3, [%r5];")
    assert (run(early)[:32] == 0xFFFFFFFF).all()


def test_a_wait_without_enough_arrivals():
    expect_fault(lambda: run(TEXT.replace("[%r5], 32;", "[%r5], 65;")), "for ever")
    expect_fault(lambda: run(TEXT.replace("[%r5], 32;", "[%r5], 31;")), "more than", "for ever")


def test_a_barrier_that_nothing_has_begun():
    expect_fault(lambda: run(TEXT.replace("@%p2 mbarrier.init.shared.b64 [%r5], 32;", "")), "begun")


def test_a_barrier_that_is_begun_beside_its_use():
    expect_fault(lambda: run(TEXT.replace("bar.sync 0;", "")), "race", "begun")
