"""The Triton kernels compiled without a GPU: instructions, order, registers, shared memory.

This happens in other processes (this one may be in the interpreter; tests/helpers/compilers.py): under the installed
Triton, and under Triton 3.6 where ``<sys.prefix>/triton-3.6`` has it (``make test-all`` puts it there). `make test` has
one target; `make test-all` adds those that cover every architecture and both versions; the other three are soak
tests. `pytest -s` prints the table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.thorough import thorough_but

pytest.importorskip("triton")

from fusedcomm.testing import compile_only, ptx_order
from tests.helpers.compilers import SOAKED, TARGETS, TRITON_36, Compilers, Target

pytestmark = pytest.mark.timeout(900)  # the first test of each target may wait for a minute's compiling

SHARED_BYTES = {
    80: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
}  # sm_80's kernels run on sm_86, 89 and 120 too
REGISTERS = 64 << 10  # how many a multiprocessor has

Compiled = dict[str, dict[str, Any]]  # by name


@pytest.fixture(
    scope="module",
    params=[*thorough_but(TARGETS[:1], TARGETS), *(pytest.param(target, marks=pytest.mark.soak) for target in SOAKED)],
    ids=str,
)
def target(request: pytest.FixtureRequest) -> Target:
    if not request.param.is_there():
        pytest.skip(f"{TRITON_36} does not exist: make test-all installs Triton 3.6 there")
    return request.param


@pytest.fixture(scope="module")
def arch(target: Target) -> int:
    return target.arch


@pytest.fixture(scope="module")
def folder(target: Target, compilers: Compilers) -> Path:
    return compilers[target].folder


@pytest.fixture(scope="module")
def compiled(target: Target, compilers: Compilers) -> Compiled:
    kernels = compilers[target].result(timeout_s=850)
    if target.triton == "3.6":
        assert all(kernel["triton"].startswith("3.6.") for kernel in kernels)
    assert {kernel["arch"] for kernel in kernels} == {target.arch}
    return {kernel["name"]: kernel for kernel in kernels}


def counts_of(compiled: Compiled, kernel_name: str) -> dict[str, dict[str, int]]:
    """Instruction counts of the half-precision matmuls."""
    return {
        name: kernel["counts"]
        for name, kernel in compiled.items()
        if kernel["kernel"] == kernel_name and "fp32" not in name
    }


def pushes(compiled: Compiled) -> dict[str, dict[str, int]]:
    return counts_of(compiled, "push_matmul_kernel")


def gathers(compiled: Compiled) -> dict[str, dict[str, int]]:
    return counts_of(compiled, "gather_matmul_kernel")


def test_prints_what_each_kernel_needs(compiled: Compiled, arch: int) -> None:
    for name, kernel in compiled.items():
        print(
            f"triton {kernel['triton']} sm_{arch:<3} {name:22} warps {kernel['num_warps']}"
            f" registers {kernel['registers']:3} shared {kernel['shared']:6}"
            f" {' '.join(f'{key}={count}' for key, count in kernel['counts'].items() if count)}"
        )


@pytest.mark.parametrize("triton", ["installed", "3.6"])
def test_every_architecture_is_compiled_for(triton: str) -> None:
    architectures = {each.arch for each in TARGETS + SOAKED if each.triton == triton}
    assert {each.arch for each in TARGETS} == architectures == set(compile_only.ARCHITECTURES) == set(SHARED_BYTES)


def test_every_matmul_is_on_the_tensor_cores(compiled: Compiled, arch: int) -> None:
    instruction = {80: "mma_sync", 90: "wgmma", 100: "tcgen05"}[arch]
    for found in (pushes(compiled), gathers(compiled)):
        assert len(found) >= 8
        assert all(counts[instruction] > 0 for counts in found.values()), found


def test_loads_are_tma_where_a_tile_is_a_box(compiled: Compiled, arch: int) -> None:
    """Ragged strides, a ragged K of batches, and short runs are loaded by pointer, and still pipelined."""
    by_pointer = {"push pointers", "push batched ragged", "push rows scattered"}
    for name, counts in pushes(compiled).items():
        by_tma = arch >= 90 and name not in by_pointer
        # both operands, in the prologue for num_stages - 1 tiles and in the loop
        assert counts["tma_loads"] >= 6 if by_tma else counts["cp_async"] > 0, name
        assert (counts["tma_loads"] > 0) == by_tma, name


def test_gathers_load_chunks_ahead_by_pointer(compiled: Compiled, arch: int) -> None:
    """cp.async belongs to the generic proxy, as the peers' stores do; w comes by TMA where blocks of K are whole.

    Where neither has rows that begin on 16 bytes, single elements are loaded, and not ahead.
    """
    for name, counts in gathers(compiled).items():
        assert (counts["cp_async"] >= 12) == (name != "gather ragged"), name
        by_tma = arch >= 90 and name not in ("gather ragged", "gather K short runs")
        assert (counts["tma_loads"] >= 3) == by_tma, name


def test_results_leave_in_whole_vectors(compiled: Compiled) -> None:
    at_least = {"push_matmul_kernel": 4, "unpack_kernel": 4, "pack_kernel": 4, "finish_kernel": 4}
    at_least |= {"gather_matmul_kernel": 8, "reduce_kernel": 2}  # one half of those poisons
    for name, kernel in compiled.items():
        if kernel["kernel"] in at_least and name not in ("gather ragged", "wait"):
            assert kernel["counts"]["vector_stores"] >= at_least[kernel["kernel"]], name
        assert kernel["counts"]["tma_stores"] == 0, name  # signal() would have to wait for them
    for name in ("unpack", "pack", "reduce", "reduce average bias", "reduce fp32 bias"):
        assert compiled[name]["counts"]["vector_loads"] >= 4, name


def test_waits_sleep_between_polls(compiled: Compiled) -> None:
    for name, kernel in compiled.items():
        sends = kernel["kernel"] in ("push_matmul_kernel", "pack_kernel", "begin_push_kernel", "signal_kernel")
        assert (kernel["counts"]["sleeps"] > 0) == (not sends), name


def test_no_spills_and_within_the_budget(compiled: Compiled, arch: int) -> None:
    for name, kernel in compiled.items():
        assert kernel["counts"]["local"] == 0 and kernel["spills_in_loops"] == 0, name
        # Triton 3.6 on sm_80 may put two words aside between its loops, and two in pack
        assert kernel["stack"] <= (8 if kernel["kernel"] in ("gather_matmul_kernel", "pack_kernel") else 0), name
        assert kernel["shared"] <= SHARED_BYTES[arch], (name, kernel["shared"])
        assert kernel["registers"] * kernel["num_warps"] * 32 <= REGISTERS, name


def test_no_flag_overtakes_data(compiled: Compiled) -> None:
    assert {name: kernel["order"] for name, kernel in compiled.items() if kernel["order"]} == {}


@pytest.mark.parametrize("name", ["push", "pack"])
def test_data_end_in_count_and_signal(compiled: Compiled, target: Target, folder: Path, name: str) -> None:
    """After the last store of data come a counter and a flag, so nothing of a push or a chunk is left unreported."""
    ptx = (folder / f"{name}.{target.arch}.ptx").read_text()
    last_store = ptx.rindex("st.global.v4")
    counter = ptx.index("atom.global.gpu.acq_rel.add", last_store)
    assert ptx.index("bar.sync", last_store) < counter
    assert ptx.index("st.release.sys.global.b64", counter)


@pytest.mark.parametrize("name", ["push", "pack", "unpack"])
def test_no_atomic_of_system_scope_goes_to_the_hosts_memory(compiled: Compiled, folder: Path, name: str) -> None:
    """The error record lies there. The one exchange tells the ranks' headers that this rank has failed."""
    (ptx,) = (path.read_text() for path in folder.glob(f"{name}.*.ptx"))
    assert "st.release.sys.global.b64" in ptx
    assert ptx.count("atom.global.sys.release.exch") == (name == "unpack")


def test_only_the_last_kernel_of_a_round_counts_arrivals(compiled: Compiled, target: Target, folder: Path) -> None:
    first, last = ((folder / f"{name}.{target.arch}.ptx") for name in ("gather_first_of_two", "gather"))
    assert "atom.global.gpu.acq_rel.add" not in first.read_text()
    assert "atom.global.gpu.acq_rel.add" in last.read_text()


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
    { .reg .pred %first; @%first st.release.sys.global.b64 [%rd7], %rd8; mov.b32 %r6, 0; }
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
GATHER = UNPACK.replace("ld.global.v4.b32 { %r1, %r2, %r3, %r4 }", "cp.async.cg.shared.global [ %r1 + 0 ]")


def test_the_order_checker_accepts_the_right_order() -> None:
    assert ptx_order.violations(PUSH) == []
    assert ptx_order.violations(UNPACK, reads_after_wait=True) == []
    assert ptx_order.violations(GATHER, reads_after_wait=True) == []


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
        pytest.param(_moved(PUSH, "st.release", "acq_rel"), 1, id="flag before the counter"),
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
    ],
)
def test_the_order_checker_can_fail(ptx: str, count: int) -> None:
    assert len(ptx_order.violations(ptx, reads_after_wait="unpack" in ptx)) == count
