"""The Triton kernels compiled without a GPU: instructions, order, registers, shared memory.

This happens in other processes (this one may be in the interpreter; tests/helpers/compilers.py): under the installed
Triton, and under Triton 3.6 where ``<sys.prefix>/triton-3.6`` has it.
"""

import re
from pathlib import Path

import pytest

from tests.helpers.compile_only import IN_SM
from tests.helpers.compilers import Target
from tests.helpers.schedule.multiprocessors import KERNELS, Footprint
from tests.kernels.conftest import Compiled

pytestmark = pytest.mark.timeout(900)  # the first test of a target waits for a minute's compiling

SHARED_BYTES = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10}  # sm_80's kernels run on sm_86, 89 and 120 too
REGISTERS = 64 << 10  # how many a multiprocessor has
SENDS = {"push_matmul_kernel", "pack_kernel", "begin_push_kernel", "signal_kernel"}
SENDS |= {"send_rows_kernel", "return_rows_kernel", "grouped_matmul_kernel"}


# Every 32-bit product of run-time values in a kernel, and what bounds it: fusedcomm/memory/segment.py:MOST_SLOT_BYTES
# bounds a chunk, and with it the rows, tiles and blocks of K of a round.
BOUNDED_PRODUCTS = {
    "copy.py: num_tiles = tl.cdiv(num_runs, BLOCK_RUNS) * tiles_in_run": "the tiles of a chunk",
    "gather_matmul.py: before = step * tiles_in_chunk": ("the tiles of all chunks: launches._MOST_TILES"),
    "gather_matmul.py: first, end = step * in_chunk, tl.where(failed, step, step + 1) * in_chunk": "the blocks of K",
    "gather_matmul.py: row = x_rows[1] + src_rank * (spans.batches.size * spans.rows.size)": "can_describe_slots",
    "gather_matmul.py: tiles_in_chunk = spans.batches.size * num_m * num_n": "launches._MOST_TILES",
    "gather_matmul.py: x_rows = (slot, (src_rank * spans.batches.size + b) * spans.rows.size + i)": "likewise",
    "gather_matmul.py: row = (src_rank * spans.batches.size + b) * spans.rows.size + i": "can_describe_slots",
    "grouped_matmul.py: ends = tl.cumsum(tl.cdiv(tl.maximum(end - first, 0), TILE.block_m) * num_n, axis=0)": "tiles",
    "matmul.py: return (batch * (rows if len(w.block_shape) == 2 else PARTS)).to(tl.int32)": "can_describe_w",
    "matmul.py: begin = (tile // tiles_in_run) * span.inner": "the columns of a chunk",
    "matmul.py: return num_runs * tl.cdiv((span.inner if several else span.size) + SHIFT, BLOCK)": (
        "the tiles of a chunk"
    ),
    "matmul.py: run_first = (tile // tiles_in_run) * span.inner": "the rows or columns of a chunk",
    "matmul.py: batch = tile * 0 if TRAITS.one_batch else tile // (num_m * num_n)": "the tiles of a batch",
    "matmul.py: tile_m, tile_n = tile_coords(tile - batch * (num_m * num_n), num_m, num_n, TILE.group_m)": "all tiles",
    "scales.py: step = block_of(k, TRAITS) * num_columns(N, TRAITS)": "the blocks of w",
    "primitives.py: at = first + tl.cast(run, tl.int64) * span.outer_stride + (i - run * span.inner)": "i itself",
    "token_rows.py: first_tile = begin // TILE.block_runs * tiles_in_row + tl.program_id(0)": "launches._MOST_TILES",
    "token_rows.py: num_tiles = tl.cdiv(end, TILE.block_runs) * tiles_in_row": "launches._MOST_TILES",
    "push_matmul.py: at = offsets * columns.size  # a chunk fits 32 bits; rows behind the mask may wrap": "a chunk",
    "push_matmul.py: tiles_in_chunk = spans.batches.size * num_m * num_n": "the tiles of a chunk",
}


def counts_of(compiled: Compiled, kernel: str) -> dict[str, dict[str, int]]:
    return {name: each["counts"] for name, each in compiled.items() if each["kernel"] == kernel and "fp32" not in name}


def pushes(compiled: Compiled) -> dict[str, dict[str, int]]:
    return counts_of(compiled, "push_matmul_kernel")


def experts(compiled: Compiled) -> dict[str, dict[str, int]]:
    return counts_of(compiled, "grouped_matmul_kernel") | counts_of(compiled, "experts_matmul_kernel")


def gathers(compiled: Compiled) -> dict[str, dict[str, int]]:
    return counts_of(compiled, "gather_matmul_kernel")


def test_every_matmul_is_on_the_tensor_cores(compiled: Compiled, arch: int) -> None:
    instruction = {80: "mma_sync", 90: "wgmma", 100: "tcgen05"}[arch]
    for found in (pushes(compiled), experts(compiled), gathers(compiled)):
        assert len(found) >= 6
        assert all(counts[instruction] > 0 for counts in found.values()), found


# Bytes of each store of a result and of each load by pointer. Columns of "cut" are no multiples of 16 bytes, nor are
# rows of x or w of "pointers", "ragged" and "odd".
WIDTHS = {
    "push": ({16}, {16}),
    "push of eights": ({16}, {16}),
    "push batched ragged": ({16}, {16}),
    "push cut at fours": ({8}, {8, 16}),
    "push cut anywhere": ({4}, {4, 16}),
    "push pointers": ({16}, {8, 16}),
    "push rows scattered": ({16}, {16}),
    "push odd": ({2}, {2}),
    "gather": ({16}, {16}),
    "gather of eights": ({16}, {16}),
    "gather K of eights": ({16}, {16}),
    "gather K short runs": ({16}, {16}),
    "gather ragged": ({16}, {8, 16}),
    "gather odd": ({2}, {2}),
    "grouped matmul": ({16}, {16}),
    "grouped matmul transposed 4104": ({16}, {16}),
    "push float8": ({16}, {16}),
    "gather float8": ({16}, {16}),
}
BY_POINTER = {"push pointers", "push rows scattered", "push odd", "gather ragged", "gather odd"}
BY_POINTER |= {"grouped matmul transposed 4099", "grouped matmul stored odd"}
# The zeros behind a source's part of K could meet the next one's inf in w.
BY_POINTER |= {"push float8 odd", "gather K float8 ragged"}


@pytest.mark.parametrize("name", WIDTHS)
def test_loads_and_stores_are_as_wide_as_rows_allow(compiled: Compiled, target: Target, name: str) -> None:
    """By TMA where rows begin at multiples of 16 bytes. Other loads fly ahead too, if fenced and not of 2 bytes."""
    if "float8" in name and target.arch < 90:
        pytest.skip("sm_80 has no float8 kernels")
    stored, loaded = WIDTHS[name]
    counts = compiled[name]["counts"]
    by_tma, fenced = target.arch >= 90 and name not in BY_POINTER, target.arch < 90 or target.triton != "3.6"
    assert {size for size in (2, 4, 8, 16) if counts[f"stores_{size}"]} == stored
    # both operands, in the prologue for num_stages - 1 tiles and in the loop
    assert counts["tma_loads"] >= 6 if by_tma else counts["tma_loads"] == 0
    assert (counts["cp_async"] > 0) == (not by_tma and fenced and loaded != {2})
    if counts["cp_async"]:
        assert {size for size in (2, 4, 8, 16) if counts[f"copies_{size}"]} == loaded
    elif not by_tma:  # a bias takes 1 or 2 loads of 2 bytes, or some of 4
        assert {size for size in (2, 8, 16) if counts[f"loads_{size}"] > 2} == loaded


def test_tiles_are_loaded_by_tma(compiled: Compiled, arch: int) -> None:
    for name, counts in (pushes(compiled) | gathers(compiled) | experts(compiled)).items():
        assert (counts["tma_loads"] > 0) == (arch >= 90 and name not in BY_POINTER), name


def test_loads_of_a_tile_fly_while_the_one_before_is_stored(compiled: Compiled, arch: int) -> None:
    """By TMA one loop runs through tiles and K. Where K is gathered, another before it waits for the sources."""
    for name, kernel in compiled.items():
        if kernel["kernel"].endswith("_matmul_kernel"):
            assert kernel["joined"] == (kernel["counts"]["tma_loads"] > 0), name
            assert kernel["loops"] == 1 + name.startswith("gather K"), name


def test_copies_are_of_whole_vectors(compiled: Compiled) -> None:
    at_least = {"unpack_kernel": 4, "pack_kernel": 4, "finish_kernel": 4, "reduce_kernel": 2}
    at_least |= {"reduce_norm_kernel": 4, "unpack_norm_kernel": 4, "norm_kernel": 1}
    at_least |= {"send_rows_kernel": 2, "take_rows_kernel": 4, "return_rows_kernel": 2, "add_rows_kernel": 2}
    for name, kernel in compiled.items():
        if kernel["kernel"] in at_least and name not in ("wait", "take rows fp32 odd", "add rows odd"):
            assert kernel["counts"]["stores_16"] >= at_least[kernel["kernel"]], name
        assert kernel["counts"]["tma_stores"] == 0, name  # signal() would have to wait for them
    for name in ("unpack", "pack", "reduce", "reduce average bias", "reduce fp32 bias"):
        assert compiled[name]["counts"]["loads_16"] >= 4, name


def test_waits_sleep_between_polls(compiled: Compiled) -> None:
    for name, kernel in compiled.items():
        others = "norm", "experts_matmul", "count", "scan", "plan", "shift", "return", "place"
        alone = SENDS | {f"{each}_kernel" for each in others}
        assert (kernel["counts"]["sleeps"] > 0) == (kernel["kernel"] not in alone), name


def test_no_spills_and_within_the_budget(compiled: Compiled, arch: int) -> None:
    for name, kernel in compiled.items():
        assert kernel["counts"]["local"] == 0 and kernel["spills_in_loops"] == 0, name
        # Triton 3.6 may put two words aside between loops, in the copies, and for the record of a failure
        aside = ("gather_matmul_kernel", "pack_kernel", "unpack_kernel", "reduce_norm_kernel")
        assert kernel["stack"] <= (8 if kernel["kernel"] in aside else 0), name
        assert kernel["shared"] <= SHARED_BYTES[arch], (name, kernel["shared"])
        in_sm = 1 if name in ("reduce of 8 ranks bias", "add rows odd") else IN_SM.get(kernel["kernel"], 1)
        assert in_sm * kernel["registers"] * kernel["num_warps"] * 32 <= REGISTERS, name


def read_early(ptx: str, may_run: bool) -> list[str]:
    """Float32 arithmetic between a wgmma and the wait for it; and waits that leave it running, unless it may."""
    in_flight = re.findall(r"wgmma\.mma_async.*?wgmma\.wait_group\S*\s+\d+", ptx, re.DOTALL)
    early = re.compile(r"\b(add|fma|mul)\S*\.f32")
    return [part for part in in_flight if early.search(part) or not (may_run or part.endswith(" 0"))]


def test_products_of_float8_are_added_behind_their_wait(compiled: Compiled, folder: Path, arch: int) -> None:
    """tl.dot's ``max_num_imprecise_acc`` breaks this in Triton 3.9."""
    for name in compiled if arch == 90 else ():
        if "float8" in name:
            ptx = (folder / f"{name.replace(' ', '_')}.{arch}.ptx").read_text()
            fast = "fast" in name  # the next product is added to a running one, by the tensor cores
            assert "wgmma.mma_async" in ptx and not read_early(ptx, fast), name
            spoiled = ptx.replace("wgmma.commit_group", "add.f32 %r1, %r1, %r2;\n\twgmma.commit_group")
            assert read_early(spoiled, fast), name


def test_no_flag_overtakes_data(compiled: Compiled) -> None:
    assert {name: kernel["order"] for name, kernel in compiled.items() if kernel["order"]} == {}


@pytest.mark.parametrize("name", ["push", "pack", "send rows", "return rows", "grouped matmul"])
def test_data_end_in_count_and_signal(compiled: Compiled, target: Target, folder: Path, name: str) -> None:
    """After the last store of data come a counter and a flag, so nothing of a push or a chunk is left unreported."""
    ptx = (folder / f"{name.replace(' ', '_')}.{target.arch}.ptx").read_text()
    last_store = ptx.rindex("st.global.v4")
    counter = ptx.index("atom.global.gpu.acq_rel.add", last_store)
    assert ptx.index("bar.sync", last_store) < counter
    assert ptx.index("atom.global.sys.release.exch", counter)


def test_only_the_last_kernel_of_a_round_counts_arrivals(compiled: Compiled, target: Target, folder: Path) -> None:
    first, last = ((folder / f"{name}.{target.arch}.ptx") for name in ("gather_first_of_two", "gather"))
    assert "atom.global.gpu.acq_rel.add" not in first.read_text()
    assert "atom.global.gpu.acq_rel.add" in last.read_text()


def test_32_bit_products_are_bounded(compiled: Compiled, arch: int) -> None:
    found = {product for kernel in compiled.values() for product in kernel["products"]}
    assert not found - BOUNDED_PRODUCTS.keys()
    assert arch < 90 or not BOUNDED_PRODUCTS.keys() - found  # sm_80 has no descriptors


def record_pointers(ptx: str) -> set[str]:
    """Registers with addresses in the error record, whose own address lies 24 bytes into a segment."""
    words = re.findall(r"add\.s64\s+(%rd\d+), %rd\d+, 24;", ptx)
    found = {at for word in words for at in re.findall(rf"b64 {{ (%rd\d+) }}, \[ {word} \+ 0 \]", ptx)}
    return found | {at for base in found for at in re.findall(rf"add\.s64\s+(%rd\d+), {base}, ", ptx)}


def atomics_on_record(ptx: str) -> list[str]:
    atomics = [line.strip() for line in ptx.splitlines() if "atom." in line]
    return [line for line in atomics if any(f"[ {at} +" in line for at in record_pointers(ptx))]


@pytest.mark.parametrize("name", ["finish", "unpack", "take_rows"])
def test_the_host_s_memory_gets_no_atomics(name: str, folder: Path, target: Target, compiled: Compiled) -> None:
    """Where a GPU has none there, the record of a failed wait would never be filled."""
    ptx = (folder / f"{name}.{target.arch}.ptx").read_text()
    assert record_pointers(ptx) and not atomics_on_record(ptx)
    for at in record_pointers(ptx):
        assert atomics_on_record(f"{ptx}\n\t@%p1 atom.global.acq_rel.gpu.cas.b64 %rd1, [ {at} + 0 ], %rd2, %rd3;")


LARGEST = ["push", "gather K", "pack", "unpack", "reduce", "finish", "wait source", "begin push", "signal"]
LARGEST += ["reduce and norm 8192", "unpack and norm 8192", "norm 8192", "grouped matmul", "grouped matmul stored"]
LARGEST += ["send rows", "take rows", "return rows", "add rows"]


@pytest.mark.thorough
@pytest.mark.parametrize("target", [Target("installed", 90)], indirect=True, ids=str)
def test_footprints_are_those_of_the_compiled_kernels(compiled: Compiled, target: Target) -> None:
    kernels = [compiled[name] for name in LARGEST]
    found = {each["kernel"]: Footprint(each["num_warps"], each["registers"], each["shared"]) for each in kernels}
    assert found == KERNELS
