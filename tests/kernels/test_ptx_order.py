"""The order checker: it accepts the right order, and refuses each way of breaking it, in PTX of real kernels too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers import ptx_order
from tests.helpers.compilers import Target
from tests.helpers.ptx_order import Rule
from tests.kernels.conftest import Compiled

pytestmark = pytest.mark.timeout(900)


PUSH = """
.visible .entry push() {
$L__BB0_1:
    @%p1 st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };
    @%p2 bra $L__BB0_1;
    bar.sync 0; mov.b32 %r5, 0;
    @%p3 atom.global.gpu.acq_rel.add.u64 %rd2, [ %rd3 + 0 ], %rd4;
    @%p4 bra $L__BB0_2;
    st.global.b64 [ %rd3 + 0 ], { %rd5 };
    bar.sync 0;
    @%p3 atom.global.sys.release.exch.b64 %rd6, [ %rd7 + 0 ], %rd8;
$L__BB0_2:
    ret;
}
"""
UNPACK = """
.visible .entry unpack() {
$L__BB0_1:
    @%p1 atom.global.sys.acquire.add.u64 %rd1, [ %rd2 + 0 ], %rd3;
    @%p2 bra $L__BB0_1;
    bar.sync 0;
    ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd4 + 0 ];
    ret;
}
"""
LOAD = "ld.global.v4.b32 { %r1, %r2, %r3, %r4 }"
GATHER = UNPACK.replace(LOAD, "cp.async.cg.shared.global [ %r1 + 0 ]")
FENCED = UNPACK.replace(
    LOAD, "fence.proxy.async.global;\n    cp.async.bulk.tensor.3d.shared::cta.global [ %r1 ], [ %r2 ]"
)


def test_the_order_checker_accepts_the_right_order() -> None:
    assert ptx_order.violations(PUSH) == []
    assert ptx_order.violations(UNPACK, reads_after_wait=True) == []
    assert ptx_order.violations(GATHER, reads_after_wait=True) == []
    assert ptx_order.violations(FENCED, reads_after_wait=True) == []


def _moved(ptx: str, what: str, before: str) -> str:
    """``ptx`` with the first line that holds ``what`` put before the first with ``before``."""
    lines = ptx.splitlines()
    line = lines.pop(next(i for i, text in enumerate(lines) if what in text))
    lines.insert(next(i for i, text in enumerate(lines) if before in text), line)
    return "\n".join(lines)


@pytest.mark.parametrize(
    "ptx, count",
    [
        pytest.param(PUSH.replace("bar.sync 0; mov.b32 %r5, 0;", ""), 1, id="no barrier before the counter"),
        pytest.param(PUSH.replace("    bar.sync 0;\n", ""), 1, id="no barrier before the flag"),
        pytest.param(_moved(PUSH, "release.exch", "acq_rel"), 1, id="flag before the counter"),
        pytest.param(_moved(PUSH, "bar.sync 0; mov", "st.global.v4"), 1, id="store after the barrier"),
        pytest.param(_moved(PUSH, "st.global.v4", "st.global.b64"), 1, id="store after the counter"),
        pytest.param(
            PUSH.replace("st.global.v4.b32", "cp.async.bulk.tensor.2d.global.shared::cta"),
            2,
            id="TMA store that nobody waits for",
        ),
        pytest.param(UNPACK.replace("bar.sync 0;", ""), 1, id="no barrier after the poll"),
        pytest.param(_moved(UNPACK, "ld.global.v4", "atom"), 1, id="read before the poll"),
        pytest.param(_moved(UNPACK, "bar.sync", "$L__BB0_1"), 1, id="barrier before the poll"),
        pytest.param(GATHER.replace("bar.sync 0;", ""), 1, id="no barrier before loads into shared memory"),
        pytest.param(_moved(GATHER, "cp.async.cg", "atom"), 1, id="loads into shared memory before the poll"),
        pytest.param(_moved(FENCED, "tensor.3d", "atom"), 1, id="TMA loads before the poll"),
        pytest.param(_moved(FENCED, "tensor.3d", "fence"), 1, id="TMA loads before the fence"),
        pytest.param(_moved(FENCED, "fence", "$L__BB0_1"), 1, id="fence before the poll"),
        pytest.param(_moved(FENCED, "fence", "bar.sync"), 1, id="fence before the barrier"),
        pytest.param(FENCED.replace("async.global;", "async.shared::cta;"), 1, id="fence of shared memory"),
    ],
)
def test_the_order_checker_can_fail(ptx: str, count: int) -> None:
    assert len(ptx_order.violations(ptx, reads_after_wait="unpack" in ptx)) == count


COUNTER, FLAG = r"atom\.global\.gpu\.acq_rel\.add", r"atom\.global\.sys\.release\.exch"
POINTERS = "gather ragged"  # chunks and w by pointer, on every architecture
POLL = r"(?:ld|atom)\.global\.sys\.acquire(?:\.add)?\.(?:u|b)64"
STORE = "st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r1, %r1, %r1 };"
TMA_STORE = (
    "cp.async.bulk.tensor.2d.global.shared::cta [%rd1, {%r1, %r1}], [%r1]; cp.async.bulk.wait_group.read 0; bar.sync 0;"
)


class Mutant(NamedTuple):
    kernel: str
    rule: Rule  # what it breaks
    pattern: str
    by: str
    which: int | None = None  # index of the match that changes; None: all do


BARRIERS, FENCES = r"bar\.sync\s+0;", r"fence\.proxy\.async\S*;"
MUTANTS = {
    "flag at the scope of one GPU": Mutant("push", Rule.STRENGTH, FLAG, "atom.global.gpu.release.exch", -1),
    "relaxed flag": Mutant("push", Rule.STRENGTH, FLAG, "atom.global.sys.relaxed.exch", -1),
    "counter of one block": Mutant("push", Rule.STRENGTH, COUNTER, "atom.global.cta.acq_rel.add", -1),
    "relaxed counter": Mutant("pack", Rule.STRENGTH, COUNTER, "atom.global.gpu.relaxed.add", -1),
    "relaxed poll in the loop": Mutant("unpack", Rule.STRENGTH, POLL, "atom.global.sys.relaxed.add.u64", 1),
    "poll at the scope of one GPU": Mutant("gather", Rule.STRENGTH, POLL, "atom.global.gpu.acquire.add.u64", 1),
    "plain poll in the loop": Mutant("gather", Rule.READ, POLL, "ld.global.b64", 1),
    "relaxed look at who has given up": Mutant("reduce", Rule.STRENGTH, r"sys\.acquire\.or", "sys.relaxed.or", 0),
    "record claimed in one block": Mutant("unpack", Rule.STRENGTH, r"acq_rel\.gpu\.cas", "acq_rel.cta.cas", 0),
    "no barriers in a push": Mutant("push", Rule.BARRIER, BARRIERS, ""),
    "no barriers in a gather": Mutant("gather", Rule.READ, BARRIERS, ""),
    "no barriers behind a wait for rows": Mutant("add rows", Rule.READ, BARRIERS, ""),
    "flag of rows at the scope of one GPU": Mutant(
        "show rows", Rule.STRENGTH, FLAG, "atom.global.gpu.release.exch", -1
    ),
    "store behind the counter": Mutant("push", Rule.COUNT, rf"^.*{COUNTER}.*$", rf"\g<0>\n{STORE}", -1),
    "store right before the flag": Mutant("pack", Rule.COUNT, rf"^.*{FLAG}.*$", rf"{STORE}\n\g<0>", -1),
    "TMA store that is only read": Mutant("push", Rule.BARRIER, rf"^.*{COUNTER}.*$", rf"{TMA_STORE}\n\g<0>", -1),
    "copies that are not waited for": Mutant(POINTERS, Rule.LANDED, r"cp\.async\.wait_group\s+\d+;", ""),
    "no fence": Mutant(POINTERS, Rule.FENCE, FENCES, ""),
    "fence of other memory": Mutant(POINTERS, Rule.FENCE, FENCES, "fence.proxy.async.global;"),
    "no fence behind a wait": Mutant("gather", Rule.PROXY, FENCES, ""),
    "no fence behind a wait, K gathered": Mutant("gather K", Rule.PROXY, FENCES, ""),
    "fence of other memory behind a wait": Mutant("gather", Rule.PROXY, FENCES, "fence.proxy.async.shared::cta;"),
    "fence before the wait": Mutant("gather", Rule.PROXY, rf"(?s)^([^\n]*{POLL}.*?)({FENCES})", r"\2\n\1", 0),
    "loads that are not waited for": Mutant("push", Rule.MBARRIER, r"mbarrier\.try_wait", "mbarrier.test"),
}


def mutated(ptx: str, mutant: Mutant) -> str:
    found = list(re.finditer(mutant.pattern, ptx, re.MULTILINE))
    for match in reversed(found if mutant.which is None else [found[mutant.which]]):
        ptx = ptx[: match.start()] + match.expand(mutant.by) + ptx[match.end() :]
    return ptx


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_of_real_kernels_are_refused(compiled: Compiled, target: Target, folder: Path, name: str) -> None:
    mutant = MUTANTS[name]
    if target.arch == 80 and mutant.rule in (Rule.FENCE, Rule.PROXY, Rule.MBARRIER):
        pytest.skip("sm_80 has no async proxy")
    if target.arch >= 90 and target.triton == "3.6" and mutant.kernel == POINTERS:
        pytest.skip("nothing is copied ahead by pointer, as Triton 3.6 does not fence it")
    ptx = (folder / f"{mutant.kernel.replace(' ', '_')}.{target.arch}.ptx").read_text()

    def broken(ptx: str) -> list[str]:
        reads = mutant.kernel.startswith(("gather", "unpack", "reduce", "add"))
        return [text for text in ptx_order.violations(ptx, reads) if mutant.rule in text]

    assert broken(ptx) == [] and broken(mutated(ptx, mutant))
