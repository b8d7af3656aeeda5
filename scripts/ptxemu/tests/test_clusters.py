"""Clusters: blocks that share loads by TMA multicast and use each other's memory; what they lack is found."""

import re
import struct

import numpy as np

from launch import Device, compiled, expect_fault, parse
from test_faults import HEAD
from test_small import normal
from tma import tensor_map

CLUSTERS = "scripts/ptxemu/tests/clusters.cu"
TILES, ROW = 5, 32
ARRIVE, WAIT = "barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;"
INIT = "fence.mbarrier_init.release.cluster;"


def text(entry="share_tiles"):
    """The text with one entry, which tests change."""
    ptx = compiled(CLUSTERS, "compute_90")
    head, *entries = re.split(r"(?=\.visible \.entry )", ptx)
    return head + next(one for one in entries if f".entry {entry}(" in one)


def share(ptx, entry="share_tiles", cluster=2, clusters=2, **options):
    """Runs it; returns what it gave and what it should give."""
    x = normal(clusters * TILES * 16 * ROW).reshape(clusters, TILES, 16 * ROW)
    device = Device()
    given, out = device.buffer(x, False), device.buffer(np.full((clusters, 2, 16 * ROW), np.nan, np.float32))
    tensor = tensor_map(given, 4, dims=[ROW, x.size // ROW], strides=[ROW * 4], box=[ROW, 8], swizzle=128)
    device.launch(parse(ptx)[entry], (2 * clusters, 1, 1), [struct.pack("<Qi4x", out, TILES), tensor], cluster=cluster, **options)
    want = np.einsum("cte,t->ce", x.astype(np.float64), np.arange(1, TILES + 1))
    return device.read(out), want[:, None] + np.arange(2)[:, None]


def shares(*given, **options):
    got, want = share(*given, **options)
    assert np.allclose(got, want, atol=1e-4), np.abs(got - want).max()


def lacks(*changes, words, **options):
    """A fault, once the text is changed: (pattern, what it becomes, which of those found; all if None)."""
    ptx = text()
    for pattern, other, *which in changes:
        places = list(re.finditer(pattern, ptx))
        assert places, pattern
        for found in [places[which[0]]] if which else places[::-1]:
            ptx = ptx[: found.start()] + found.expand(other) + ptx[found.end() :]
    expect_fault(lambda: share(ptx, **options), *words)


def test_blocks_share_tiles():
    shares(text())
    shares(text(), beside=2)
    shares(text(), races=False)
    shares(text("share_tiles_of_two"), "share_tiles_of_two", None)


def test_sizes_that_do_not_fit():
    expect_fault(lambda: share(text("share_tiles_of_two"), "share_tiles_of_two", 4), "requires")
    expect_fault(lambda: share(text(), cluster=3), "a grid of")
    expect_fault(lambda: share(text(), cluster=17), "clusters of")
    expect_fault(lambda: share(text(), cluster=1), "out of a cluster")


def test_a_begin_that_nothing_waits_for():
    lacks((ARRIVE, "", 0), (WAIT, "", 0), words=["has begun"])
    # Without the race check a wrong barrier is still not initialised.
    lacks((ARRIVE, "", 0), (WAIT, "", 0), (r"mbarrier\.init\S* [^;]*;", ""), words=["nothing has begun"], races=False)


def test_what_an_arrival_without_release_says():
    """That the block has begun, and its mbarriers after their fence."""
    relaxed = (ARRIVE, ARRIVE.replace("release", "relaxed"), 0)
    ptx = text()
    shares(ptx.replace(ARRIVE, relaxed[1], 1))
    lacks(relaxed, (INIT, ""), words=["no fence", "race"])
    lacks(relaxed, (INIT, "fence.proxy.async.shared::cta;"), words=["race"])
    shares(ptx.replace(ARRIVE, relaxed[1], 1).replace(INIT, "fence.proxy.async.shared::cta; fence.acq_rel.cluster;"))


def test_tensor_copies_see_mbarriers_after_a_fence():
    lacks((INIT, ""), words=["no fence"])
    shares(text().replace(INIT, "fence.proxy.async.shared::cta;"))


def test_a_block_that_exits_early():
    lacks((ARRIVE, "", 1), (WAIT, "", 1), words=["may exit before"])
    lacks((ARRIVE, ARRIVE.replace("release", "relaxed"), 1), words=["may exit before"])
    left = f"{WAIT} {{ .reg .pred gone; .reg .b32 rank; mov.u32 rank, %cluster_ctarank; setp.eq.u32 gone, rank, 1; @gone exit; }}"
    lacks((WAIT, left, 0), words=["may exit before"])
    lacks((WAIT, left, 0), words=["for ever"], races=False)
    late = f"{BOTH} setp.eq.u32 %p2, %r2, 1; @%p2 exit; bar.sync 0; {THERE} ld.shared::cluster.u32 %r9, [%r7];"
    for races in (True, False):
        expect_fault(lambda: pair(late, races=races), "uses the shared memory of block 1 of the cluster (%ctaid 1, 0, 0), which has exited")


def mask(value):
    """The mask of the copies becomes another."""
    return r"(mov\.u16\s+[^,]+),\s*3;", rf"\1, {value};"


def test_wrong_masks():
    lacks(mask(7), words=["out of a cluster"])
    lacks(mask(0), words=["out of a cluster"])
    lacks(mask(1), words=["for ever"])


def test_bytes_that_do_not_fit():
    size = r"(mov\.u32\s+[^,]+),\s*2048;"
    lacks((size, r"\1, 1024;"), words=["more bytes"])
    lacks((size, r"\1, 4096;"), words=["warp 0 of block 1 of the cluster (%ctaid 3, 0, 0) waits for ever"])


def test_places_are_reused_only_after_arrivals_of_both_blocks():
    lacks((r"mbarrier\.arrive\.release\.cluster\S* _,\s*[^;]*;", ""), words=["for ever"])
    # Each block's own readers arrive at each of its barriers twice: those of the other block may still read.
    lacks((r"(mapa\S* [^,;]+,[^,;]+,)[^;]*;", r"\1 %cluster_ctarank;"), words=["race"])
    lacks((r"mbarrier\.try_wait\S* p,\s*[^;]*;", "setp.eq.u32 p, 0, 0;", 1), words=["more than 1 arrivals"])
    lacks((r"mbarrier\.try_wait\S* p,\s*[^;]*;", "setp.eq.u32 p, 0, 0;", 0), words=["race"])


def pair(body, shared=".shared .align 16 .b8 s[512]; .shared .align 8 .b8 b[16];", threads=64, cluster=2, grid=2, directives="", **options):
    """Runs instructions in blocks of a cluster: %rd1 is the address of each block's 64 words, %r1 the thread, %r2 the rank, %r5 the other block's;
    returns the words, of each thread in %r9."""
    registers = ".reg .b64 %rd<9>; .reg .b32 %r<20>; .reg .b16 %rs<4>; .reg .pred %p<9>;"
    head = f".visible .entry k(.param .u64 k_param_0)\n.maxntid {threads}, 1, 1\n{directives}\n{{ {registers} {shared}\n"
    begin = """ld.param.u64 %rd1, [k_param_0]; mov.u32 %r1, %tid.x; mov.u32 %r2, %cluster_ctarank; xor.b32 %r5, %r2, 1; setp.eq.u32 %p1, %r1, 0;
        mov.u32 %r3, %ctaid.x; mul.wide.u32 %rd2, %r3, 256; add.u64 %rd1, %rd1, %rd2; mul.wide.u32 %rd2, %r1, 4; add.u64 %rd2, %rd1, %rd2;"""
    device = Device()
    words = device.buffer(np.arange(64 * grid, dtype=np.uint32))
    device.launch(parse(HEAD + head + begin + body + "\nst.global.u32 [%rd2], %r9; ret; }")["k"], (grid, 1, 1), [struct.pack("<Q", words)], cluster=cluster, **options)
    return device.read(words).reshape(grid, 64)


BOTH = f"{ARRIVE} {WAIT}"
# Where each thread's word, of 4 bytes, is in the other block.
THERE = "mov.u32 %r6, s; mapa.shared::cluster.u32 %r7, %r6, %r5; shl.b32 %r8, %r1, 2; add.u32 %r7, %r7, %r8; add.u32 %r6, %r6, %r8;"
BEGIN = f"mov.u32 %r10, b; @%p1 mbarrier.init.shared::cta.b64 [%r10], 1; @%p1 {INIT} {BOTH} mapa.shared::cluster.u32 %r11, %r10, %r5;"
LANDED = "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r10], 256; AGAIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r10], 0; @!%p2 bra AGAIN;"
OTHERS = np.arange(64) + 100 * np.array([[1], [0]])
MINE = "mad.lo.u32 %r12, %r2, 100, %r1;"


def test_special_registers():
    each = {"%cluster_ctarank": [0, 1, 0, 1], "%cluster_nctarank": [2] * 4, "%cluster_ctaid.x": [0, 1, 0, 1], "%cluster_nctaid.x": [2] * 4}
    for name, want in {**each, "%clusterid.x": [0, 0, 1, 1], "%nclusterid.x": [2] * 4, "%cluster_nctaid.y": [1] * 4}.items():
        assert (pair(f"mov.u32 %r9, {name};", grid=4) == np.array(want)[:, None]).all(), name
        alone = 1 if "nct" in name or name == "%nclusterid.x" else 0
        assert (pair(f"mov.u32 %r9, {name};", grid=1, cluster=None) == alone).all(), name
    explicit = "mov.pred %p2, %is_explicit_cluster; selp.u32 %r9, 1, 0, %p2;"
    assert (pair(explicit) == 1).all() and (pair(explicit, grid=1, cluster=None) == 0).all()
    assert (pair("mov.u32 %r9, %cluster_nctarank;", cluster=None, directives=".reqnctapercluster 2") == 2).all()
    expect_fault(lambda: pair("", cluster=None, directives=".explicitcluster"), "needs a cluster size")


def test_loads_and_stores():
    written = f"{MINE} {THERE} {BOTH} st.shared::cluster.u32 [%r7], %r12; {BOTH} ld.shared.u32 %r9, [%r6];"
    assert (pair(written) == OTHERS).all()
    read = f"{MINE} {THERE} st.shared.u32 [%r6], %r12; {BOTH} ld.shared::cluster.u32 %r9, [%r7]; {BOTH}"
    assert (pair(read) == OTHERS).all()
    generic = f"{MINE} {THERE} st.shared.u32 [%r6], %r12; {BOTH} cvt.u64.u32 %rd3, %r6; cvta.shared.u64 %rd3, %rd3; mapa.u64 %rd4, %rd3, %r5; ld.u32 %r9, [%rd4]; {BOTH}"
    assert (pair(generic) == OTHERS).all()
    expect_fault(lambda: pair(written.replace(BOTH, "", 1)), "has begun")
    expect_fault(lambda: pair(f"{BOTH} {written.replace(BOTH, 'bar.sync 0;')}"), "race", "may exit")
    expect_fault(lambda: pair(read.replace(BOTH, "", 1)), "has begun")
    expect_fault(lambda: pair(f"{BOTH} {read.replace(BOTH, '', 1)}"), "race")
    expect_fault(lambda: pair(read.removesuffix(BOTH)), "may exit before")
    expect_fault(lambda: pair(read.replace("ld.shared::cluster", "ld.shared")), "for an instruction of shared::cta")
    expect_fault(lambda: pair(read.replace("%r6, %r5", "%r6, 2")), "out of a cluster")


def test_ranks_of_addresses():
    assert (pair(f"{THERE} getctarank.shared::cluster.u32 %r9, %r7;") == [[1], [0]]).all()
    assert (pair(f"{THERE} getctarank.shared::cluster.u32 %r9, %r6;") == [[0], [1]]).all()


def test_stores_that_complete_on_an_mbarrier():
    text = f"{MINE} {THERE} {BEGIN} st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r7], %r12, [%r11]; {LANDED} ld.shared.u32 %r9, [%r6];"
    assert (pair(text) == OTHERS).all()
    expect_fault(lambda: pair(text.replace("[%r11]", "[%r10]")), "to another block than its mbarrier")
    expect_fault(lambda: pair(text.replace(LANDED, "")), "race", "may exit")
    expect_fault(lambda: pair(text.replace(f"@%p1 {INIT}", "").replace(ARRIVE, ARRIVE.replace("release", "relaxed"))), "race")


def test_proxy_fences():
    """Of the memory that another block has written: by the writer's fence of all, or by a fence once its store is known."""
    store = "st.shared::cluster.u32 [%r7], %r12;"
    use = "@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r6], [%rd1], 256, [%r10];"
    text = f"{MINE} {THERE} {BEGIN} {store} FENCE {BOTH} THEN {LANDED.split('AGAIN')[0]} {use} AGAIN{LANDED.split('AGAIN', 1)[1]} ld.shared.u32 %r9, [%r6];"
    fenced = lambda before, after: pair(text.replace("FENCE", before).replace("THEN", after))  # noqa: E731
    whole, own = "fence.proxy.async;", "fence.proxy.async.shared::cta;"
    for before, after in ((whole, ""), ("", whole), ("", own)):
        assert (fenced(before, after) == np.arange(128).reshape(2, 64)).all()
    expect_fault(lambda: fenced("", ""), "no fence")
    expect_fault(lambda: fenced(own, ""), "no fence")


def test_waits_without_acquire():
    text = f"{MINE} {THERE} {BEGIN} st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r7], %r12, [%r11]; {LANDED} ld.shared.u32 %r9, [%r6];"
    expect_fault(lambda: pair(text.replace("parity.acquire", "parity.relaxed")), "race")


def test_bulk_copies():
    fence = "fence.proxy.async.shared::cta; bar.sync 0;"
    copy = "@%p1 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r7+256], [%r6], 256, [%r11];"
    text = f"{MINE} {THERE} st.shared.u32 [%r6], %r12; {fence} {BEGIN} {copy} {LANDED} ld.shared.u32 %r9, [%r6+256]; {BOTH}"
    assert (pair(text) == OTHERS).all()
    expect_fault(lambda: pair(text.replace(fence, "bar.sync 0;")), "no fence")
    expect_fault(lambda: pair(text.replace("[%r6], 256", "[%r6], 264")), "a bulk copy of 264")
    of_global = "mov.u16 %rs1, 3; setp.eq.and.u32 %p1, %r2, 0, %p1; @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r6], [%rd1], 256, [%r10], %rs1;"
    text = f"{THERE} {BEGIN} {LANDED.split('AGAIN')[0]} {of_global} AGAIN{LANDED.split('AGAIN', 1)[1]} ld.shared.u32 %r9, [%r6];"
    assert (pair(text) == np.arange(64)).all()


def test_a_cluster_barrier_that_a_block_never_reaches():
    stuck = f"setp.eq.u32 %p2, %r2, 0; @%p2 bra HERE; bar.sync 1, 96; bra END; HERE: {BOTH} END:"
    expect_fault(lambda: pair(stuck), "warp 0 of block 0 of the cluster (%ctaid 0, 0, 0) waits for ever at the cluster barrier for warp 0 of block 1")
    expect_fault(lambda: pair(f"{ARRIVE} {BOTH}"), "second arrival")
    expect_fault(lambda: pair(WAIT), "no arrival before")
    part = f"setp.lt.u32 %p2, %r1, 40; @!%p2 bra END; {BOTH} END:"
    expect_fault(lambda: pair(part), "part of a warp")
    # What has exited counts as arrived, and an arrival that is not `aligned` may be of some lanes.
    assert (pair(f"mov.u32 %r9, 7; setp.eq.u32 %p2, %r2, 0; @%p2 bra END; {BOTH} END:") == 7).all()
    assert (pair(f"mov.u32 %r9, 7; {part}".replace(".aligned", "")) == 7).all()


def test_lanes_meet_after_one_has_waited():
    text = f"{BEGIN} @%p1 mbarrier.arrive.shared::cta.b64 _, [%r10]; @!%p1 bra MEET; {LANDED.split('; ', 1)[1]} MEET: bar.warp.sync 0xffffffff; {BOTH} mov.u32 %r9, 7;"
    remote = text.replace("mbarrier.arrive.shared::cta.b64 _, [%r10]", "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r11]")
    assert (pair(text) == 7).all() and (pair(remote) == 7).all()
    expect_fault(lambda: pair(text.replace("@%p1 mbarrier.arrive.shared::cta.b64 _, [%r10];", "")), "for ever")
