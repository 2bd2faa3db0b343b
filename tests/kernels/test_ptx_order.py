"""The order checker refuses each way of breaking the order in PTX of real kernels, which it accepts as they are."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers import ptx_order
from tests.helpers.compilers import Target
from tests.helpers.ptx_order import Rule
from tests.kernels.conftest import Compiled

pytestmark = pytest.mark.timeout(900)


COUNTER, FLAG = r"atom\.global\.gpu\.acq_rel\.add", r"atom\.global\.sys\.release\.exch"
POINTERS = "gather ragged"  # chunks and w by pointer, on every architecture
POLL = r"ld\.acquire\.sys\.global\.b64"
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


BARRIERS, FENCES = r"bar\.(?:sync\s+0|red\.or\.pred\s+some, 0, some);", r"fence\.proxy\.async\S*;"
MUTANTS = {
    "flag at the scope of one GPU": Mutant("push", Rule.STRENGTH, FLAG, "atom.global.gpu.release.exch", -1),
    "relaxed flag": Mutant("push", Rule.STRENGTH, FLAG, "atom.global.sys.relaxed.exch", -1),
    "counter of one block": Mutant("push", Rule.STRENGTH, COUNTER, "atom.global.cta.acq_rel.add", -1),
    "relaxed counter": Mutant("pack", Rule.STRENGTH, COUNTER, "atom.global.gpu.relaxed.add", -1),
    "relaxed poll in the loop": Mutant("unpack", Rule.STRENGTH, POLL, "ld.relaxed.sys.global.b64", 1),
    "poll at the scope of one GPU": Mutant("gather", Rule.STRENGTH, POLL, "ld.acquire.gpu.global.b64", 1),
    "plain poll in the loop": Mutant("gather", Rule.READ, POLL, "ld.global.b64", 1),
    "relaxed look at who has given up": Mutant("reduce", Rule.STRENGTH, r"sys\.acquire\.or", "sys.relaxed.or", 0),
    "record claimed in one block": Mutant("unpack", Rule.STRENGTH, r"acq_rel\.gpu\.cas", "acq_rel.cta.cas", 0),
    "no barriers in a push": Mutant("push", Rule.BARRIER, BARRIERS, ""),
    "no barriers in a gather": Mutant("gather", Rule.READ, BARRIERS, ""),
    "no barriers behind a wait for rows": Mutant("add rows", Rule.READ, BARRIERS, ""),
    "flag of rows at the scope of one GPU": Mutant(
        "return rows", Rule.STRENGTH, FLAG, "atom.global.gpu.release.exch", -1
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
    "no wait for earlier kernels": Mutant("push", Rule.EARLY, r"griddepcontrol\.wait;", ""),
    "no wait for earlier kernels, of a norm": Mutant("norm 8192", Rule.EARLY, r"griddepcontrol\.wait;", ""),
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
    if target.arch == 80 and mutant.rule in (Rule.FENCE, Rule.PROXY, Rule.MBARRIER, Rule.EARLY):
        pytest.skip("sm_80 has neither async proxy nor early starts")
    if target.arch >= 90 and target.triton == "3.6" and mutant.kernel == POINTERS:
        pytest.skip("nothing is copied ahead by pointer, as Triton 3.6 does not fence it")
    ptx = (folder / f"{mutant.kernel.replace(' ', '_')}.{target.arch}.ptx").read_text()

    def broken(ptx: str) -> list[str]:
        reads = mutant.kernel.startswith(("gather", "unpack", "reduce", "add"))
        return [text for text in ptx_order.violations(ptx, reads) if mutant.rule in text]

    assert broken(ptx) == [] and broken(mutated(ptx, mutant))
