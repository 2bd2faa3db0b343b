"""The Triton kernels compiled without a GPU: instructions, order, registers, shared memory.

Two subprocesses (this one may be in the interpreter): under the installed Triton, and under Triton
3.6 where ``<sys.prefix>/triton-3.6`` has it (``make test`` puts it there). `pytest -s` prints the
table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from fusedcomm.testing import ptx_order

pytestmark = pytest.mark.timeout(900)  # the first test of each version waits for two minutes' compiling

SHARED_BYTES = {
    80: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
}  # sm_80's kernels run on sm_86, 89 and 120 too
REGISTERS = 64 << 10  # of a multiprocessor
TRITON_36 = Path(sys.prefix) / "triton-3.6"

Compiled = dict[tuple[str, int], dict[str, Any]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tmp_path_factory.mktemp(f"triton-{name}") for name in ("installed", "3.6")}


@pytest.fixture(scope="module")
def processes(folders: dict[str, Path]) -> Any:
    """Both at once: each is one core's work."""
    started = {"installed": _start(folders["installed"], None)}
    if TRITON_36.is_dir():
        started["3.6"] = _start(folders["3.6"], TRITON_36)
    yield started
    for process in started.values():
        process.kill()
        process.wait()


@pytest.fixture(scope="module", params=["installed", "3.6"])
def version(request: pytest.FixtureRequest, processes: dict[str, Any]) -> str:
    if request.param not in processes:
        pytest.skip(f"{TRITON_36} does not exist: make test installs Triton 3.6 there")
    return request.param


@pytest.fixture(scope="module")
def compiled(version: str, processes: dict[str, Any]) -> Compiled:
    out, err = processes[version].communicate(timeout=850)
    assert processes[version].returncode == 0, err
    kernels = [json.loads(line) for line in out.splitlines()]
    if version == "3.6":
        assert all(kernel["triton"].startswith("3.6.") for kernel in kernels)
    return {(kernel["name"], kernel["arch"]): kernel for kernel in kernels}


def _start(folder: Path, first_on_path: Path | None) -> subprocess.Popen[str]:
    env = {**os.environ, "TRITON_CACHE_DIR": str(folder / "cache"), "TRITON_DEFAULT_FP_FUSION": "1"}
    env.pop("TRITON_INTERPRET", None)
    if first_on_path is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(first_on_path), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "fusedcomm.testing.compile_only", str(folder)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)


def counts_of(compiled: Compiled, arch: int, kernel_name: str) -> dict[str, dict[str, int]]:
    """Instruction counts of the half-precision matmuls."""
    return {
        name: kernel["counts"]
        for (name, a), kernel in compiled.items()
        if a == arch and kernel["kernel"] == kernel_name and "fp32" not in name
    }


def pushes(compiled: Compiled, arch: int) -> dict[str, dict[str, int]]:
    return counts_of(compiled, arch, "push_matmul_kernel")


def gathers(compiled: Compiled, arch: int) -> dict[str, dict[str, int]]:
    return counts_of(compiled, arch, "gather_matmul_kernel")


def test_prints_what_each_kernel_needs(compiled: Compiled) -> None:
    for (name, arch), kernel in compiled.items():
        print(
            f"triton {kernel['triton']} sm_{arch:<3} {name:22} warps {kernel['num_warps']}"
            f" registers {kernel['registers']:3} shared {kernel['shared']:6}"
            f" {' '.join(f'{key}={count}' for key, count in kernel['counts'].items() if count)}"
        )
    assert {arch for _, arch in compiled} == set(SHARED_BYTES)


def test_every_matmul_is_on_the_tensor_cores(compiled: Compiled) -> None:
    for arch, instruction in ((80, "mma_sync"), (90, "wgmma"), (100, "tcgen05")):
        for found in (pushes(compiled, arch), gathers(compiled, arch)):
            assert len(found) >= 8
            assert all(counts[instruction] > 0 for counts in found.values()), found


def test_loads_are_tma_where_a_tile_is_a_box(compiled: Compiled) -> None:
    """Ragged strides, a ragged K of batches and short runs: loaded by pointer, still pipelined."""
    by_pointer = {"push pointers", "push batched ragged", "push rows scattered"}
    for arch in (90, 100):
        for name, counts in pushes(compiled, arch).items():
            # both operands, in the prologue for num_stages - 1 tiles and in the loop
            assert counts["tma_loads"] >= 6 if name not in by_pointer else counts["cp_async"] > 0, name
            assert (counts["tma_loads"] == 0) == (name in by_pointer), name
    for name, counts in pushes(compiled, 80).items():
        assert counts["tma_loads"] == 0 and counts["cp_async"] > 0, name


def test_gathers_load_chunks_ahead_by_pointer(compiled: Compiled) -> None:
    """cp.async is of the generic proxy, as the peers' stores are; w comes by TMA where blocks of K are whole.

    Where neither has rows that begin on 16 bytes, single elements are loaded, and not ahead.
    """
    for arch in SHARED_BYTES:
        for name, counts in gathers(compiled, arch).items():
            assert (counts["cp_async"] >= 12) == (name != "gather ragged"), (name, arch)
            by_tma = arch >= 90 and name not in ("gather ragged", "gather K short runs")
            assert (counts["tma_loads"] >= 3) == by_tma, (name, arch)


def test_results_leave_in_whole_vectors(compiled: Compiled) -> None:
    at_least = {"push_matmul_kernel": 4, "unpack_kernel": 4, "pack_kernel": 4, "finish_kernel": 4}
    at_least |= {"gather_matmul_kernel": 8, "reduce_kernel": 2}  # of those, one half poisons
    for key, kernel in compiled.items():
        if kernel["kernel"] in at_least and key[0] not in ("gather ragged", "wait"):
            assert kernel["counts"]["vector_stores"] >= at_least[kernel["kernel"]], key
        assert kernel["counts"]["tma_stores"] == 0, key  # signal() would have to wait for them
    for arch in SHARED_BYTES:
        for name in ("unpack", "pack", "reduce", "reduce average bias", "reduce fp32 bias"):
            assert compiled[name, arch]["counts"]["vector_loads"] >= 4, (name, arch)


def test_waits_sleep_between_polls(compiled: Compiled) -> None:
    for key, kernel in compiled.items():
        sends = kernel["kernel"] in ("push_matmul_kernel", "pack_kernel", "signal_kernel")
        assert (kernel["counts"]["sleeps"] > 0) == (not sends), key


def test_no_spills_and_within_the_budget(compiled: Compiled) -> None:
    for key, kernel in compiled.items():
        assert kernel["counts"]["local"] == 0 and kernel["spills_in_loops"] == 0, key
        # Triton 3.6 on sm_80 needs all 255 registers; between its loops it may put two words aside
        assert kernel["stack"] <= (8 if kernel["kernel"] == "gather_matmul_kernel" else 0), key
        assert kernel["shared"] <= SHARED_BYTES[key[1]], (key, kernel["shared"])
        assert kernel["registers"] * kernel["num_warps"] * 32 <= REGISTERS, key


def test_no_flag_overtakes_data(compiled: Compiled) -> None:
    assert {key: kernel["order"] for key, kernel in compiled.items() if kernel["order"]} == {}


def test_a_push_ends_in_count_and_signal(compiled: Compiled, version: str, folders: dict) -> None:
    """After the last store of data come a counter and a flag: nothing is left unreported."""
    for arch in SHARED_BYTES:
        ptx = (folders[version] / f"push.{arch}.ptx").read_text()
        last_store = ptx.rindex("st.global.v4")
        counter = ptx.index("atom.global.gpu.acq_rel.add", last_store)
        assert ptx.index("bar.sync", last_store) < counter
        assert ptx.index("atom.global.sys.release.exch", counter)


def test_a_pack_counts_and_signals_each_chunk(compiled: Compiled, version: str, folders: dict) -> None:
    for arch in SHARED_BYTES:
        ptx = (folders[version] / f"pack.{arch}.ptx").read_text()
        last_store = ptx.rindex("st.global.v4")
        counter = ptx.index("atom.global.gpu.acq_rel.add", last_store)
        assert ptx.index("bar.sync", last_store) < counter
        assert ptx.index("atom.global.sys.release.exch", counter)


def test_only_the_last_kernel_of_a_round_counts_arrivals(compiled: Compiled, version: str, folders: dict) -> None:
    for arch in SHARED_BYTES:
        first, last = ((folders[version] / f"{name}.{arch}.ptx") for name in ("gather_first_of_two", "gather"))
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
    ],
)
def test_the_order_checker_can_fail(ptx: str, count: int) -> None:
    assert len(ptx_order.violations(ptx, reads_after_wait="unpack" in ptx)) == count
