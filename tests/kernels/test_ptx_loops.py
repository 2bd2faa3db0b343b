"""The loops that the checker finds in PTX, also where a block of a loop lies before its header."""

from __future__ import annotations

import pytest

from tests.helpers.ptx_loops import MainLoop, main_loops

NESTED = """
.visible .entry nested() {
$L_tiles:
    bar.sync 0;
$L_k:
    @%p1 bra $L_skip;
    bar.sync 0;
$L_skip:
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1}, %rd1, %rd2;
    bar.sync 0;
    @%p2 bra $L_k;
    st.global.v4.b32 [%rd1], {%r1, %r1, %r1, %r1};
    @%p3 bra $L_tiles;
    ret;
}
"""
JOINED = """
.visible .entry joined() {
    bra $L_k;
$L_store:
    bar.sync 0;
    st.global.v4.b32 [%rd1], {%r1, %r1, %r1, %r1};
    bra $L_next;
$L_k:
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1}, %rd1, %rd2;
    bar.sync 0;
    @%p1 bra $L_store;
$L_next:
    @%p2 bra $L_k;
    ret;
}
"""


@pytest.mark.parametrize(
    ("ptx", "loops"),
    [
        (NESTED, [MainLoop(stores=False, barriers=1)]),
        (JOINED, [MainLoop(stores=True, barriers=1)]),
        (JOINED.replace("bra $L_store", "nanosleep.u32 64"), [MainLoop(stores=False, barriers=1)]),
        (JOINED.replace("wgmma.mma_async", "wgmma.fence"), []),
    ],
    ids=["nested", "joined", "nothing stored", "nothing multiplied"],
)
def test_main_loops(ptx: str, loops: list[MainLoop]) -> None:
    assert main_loops(ptx) == loops
