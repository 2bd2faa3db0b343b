"""The tile that the table of sm_90 gives a matmul, against what an H200 took with each."""

import random
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedcomm
from fusedcomm.kernels.triton.bundles import TileConfig
from fusedcomm.memory.workspace import Workspace
from fusedcomm.plan import tiles
from fusedcomm.plan.geometry.spans import Span
from tests.helpers.groups import after_peers, fresh_group
from tests.helpers.on_ranks import on_ranks
from tests.helpers.prepared import without_plans
from tests.helpers.uneven import Ranges, Uneven

H200_SMS = 132
# Microseconds of a push to one rank by block_m and block_n, measured on 2026-11-26.
MEASURED: dict[tuple[int, int, int], dict[tuple[int, int], float]] = {  # by M, N, K
    (8192, 4096, 4096): {(128, 256): 351.95, (128, 128): 381.54, (64, 128): 478.04, (64, 64): 678.16},
    (16384, 3072, 1024): {(128, 256): 156.12, (128, 128): 165.21, (64, 128): 217.8, (64, 64): 284.81},
    (2048, 2048, 2048): {(128, 256): 28.26, (128, 128): 28.33, (64, 128): 31.74, (64, 64): 48.26},
    (512, 4096, 4096): {(128, 256): 45.66, (128, 128): 27.5, (64, 128): 32.4, (64, 64): 48.43},
    (128, 8192, 4096): {(128, 256): 45.97, (128, 128): 31.42, (64, 128): 24.95, (64, 64): 32.16},
    (1024, 1024, 1024): {(128, 256): 17.16, (128, 128): 11.5, (64, 128): 9.23, (64, 64): 10.8},
}


def shape_of(m: int, n: int, k: int) -> tiles.Shape:
    lines = tiles.lines(2 * k), tiles.lines(2 * n)
    return tiles.Shape(1, Span(m, 0, m, 0, 0), Span(n, 0, n, 0, 0), k, 1, x_lines=lines[0], w_lines=lines[1])


def chosen(m: int, n: int, k: int, describable: bool = True, aligned: bool = True) -> TileConfig:
    return tiles.matmul_config(90, torch.bfloat16, shape_of(m, n, k), H200_SMS, describable, False, aligned)


@pytest.mark.parametrize("sizes", MEASURED, ids=str)
def test_the_fastest_tile_is_chosen(sizes: tuple[int, int, int]) -> None:
    found = chosen(*sizes)
    assert MEASURED[sizes][found.block_m, found.block_n] <= 1.01 * min(MEASURED[sizes].values())


def test_costs_are_times() -> None:
    """But for the start and the end of a kernel, 3.4 us, and where memory is what counts (few rows)."""
    for sizes, times in MEASURED.items():
        for rated in tiles._HALF[90] if sizes[0] > 128 else ():
            config = rated.config
            predicted = 3.4 + tiles.cost(rated, shape_of(*sizes), H200_SMS) / 1e3
            assert predicted == pytest.approx(times[config.block_m, config.block_n], rel=0.15), (sizes, config)


def test_waves_count() -> None:
    """One tile more than multiprocessors takes a second wave, which smaller tiles do not."""
    assert chosen(128 * 12, 256 * 11, 4096)[:2] == (128, 256)
    assert chosen(128 * 12 + 1, 256 * 11, 4096)[:2] == (128, 128)


def test_no_other_tile_is_faster_over_500_shapes() -> None:
    """By the measured costs. The rule before was the largest tile that gives every program work."""
    generator, table = random.Random(0), tiles._HALF[90]
    gains: list[tuple[float, ...]] = []  # over that rule, and over the largest tile
    for _ in range(500):
        rows, columns = (64 * generator.randint(8, 128) for _ in range(2))
        k, count = 1024 << generator.randrange(4), 1 << generator.randrange(4)
        shape = replace(shape_of(rows // count, columns, k), count=count)
        costs = {each.config: tiles.cost(each, shape, H200_SMS) for each in table}
        busy = (each for each in costs if tiles.num_tiles(each, shape) * count >= H200_SMS)
        others = costs[next(busy, table[-1].config)], costs[table[0].config]
        found = costs[tiles.matmul_config(90, torch.bfloat16, shape, H200_SMS, True, False)]
        assert found == min(costs.values())
        gains.append(tuple(each / found for each in others))
    assert [round(statistics.geometric_mean(each), 2) for each in zip(*gains, strict=True)] == [1.06, 1.09]


def test_rows_that_straddle_lines_take_wide_tiles() -> None:
    """An H200 took 631 us for 8000 x 4104 x 4104 by 128 x 128."""
    ragged = shape_of(8000, 4104, 4104)
    assert chosen(8000, 4104, 4104)[:2] == (128, 256)
    assert 3.4 + tiles.cost(tiles._HALF[90][1], ragged, H200_SMS) / 1e3 == pytest.approx(631, rel=0.05)


def test_tiles_by_pointer_leave_registers() -> None:
    """Operands and masks take them, single elements most of all."""
    for aligned, widest, per_warp in ((True, 128, 2048), (False, 64, 512)):
        found = chosen(8192, 8192, 4096, describable=False, aligned=aligned)
        assert found.block_n <= widest and found.block_m * found.block_n <= per_warp * found.num_warps


# What several ranks get of a push: one matmul, just before the first of them, and a copy to each.
PAIRS: Ranges = ((0, 2), (0, 2), (3, 2), (3, 2))  # nobody gets the third head
OTHERS: Ranges = ((0, 2), (3, 2), (0, 2), (2, 1))


def heads(scatter: Ranges, tokens: int = 601, **options: Any) -> Uneven:
    return Uneven("matmul_all_to_all", (tokens, 5, 32), 2, gather_dim=0, scatter_dim=1, scatter=scatter, **options)


def summed(scatter: Ranges) -> Uneven:
    return Uneven("matmul_reduce_scatter", (40, 80), 1, scatter_dim=1, scatter=scatter)


ORDER = {  # rank 1 sends to ranks 2, 3, 0 and 1
    "pairs": (heads(PAIRS), ["64", "to 2", "to 3", "64", "to 0"]),
    "others": (heads(OTHERS), ["64", "to 2", "32", "to 3", "to 0", "64"]),
    "one head": (heads(((1, 1),) * 4), ["32", "to 2", "to 3", "to 0"]),
    "partly": (heads(((0, 2), (1, 2), (0, 2), (2, 1))), ["160", "to 2", "to 3", "to 0"]),
    "sums": (summed(((0, 32), (48, 32), (0, 32), (0, 32))), ["32", "to 2", "to 3", "to 0", "32"]),
}


@on_ranks(4)
@pytest.mark.parametrize("name", ORDER)
def test_what_several_ranks_get_is_multiplied_once(rank: int, name: str) -> None:
    """Columns of each matmul, and signals, in their order."""
    case, wanted = ORDER[name]
    seen: list[str] = []
    multiply, signal = torch.mm, Workspace.signal

    def spied_multiply(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(str(args[1].shape[-1]))
        return multiply(*args, **kwargs)

    def spied_signal(self: Workspace, dst_rank: int, *round: int) -> None:
        seen.append(f"to {dst_rank}")
        signal(self, dst_rank, *round)

    with fresh_group() as group, fusedcomm.force_algorithm("chunked", strict=True):
        inputs = case.inputs(4)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "mm", spied_multiply)
            patch.setattr(Workspace, "signal", spied_signal)
            out = case.call(inputs[rank], group, 4)
        assert torch.equal(out, case.expected(inputs)[rank])
        assert rank != 1 or seen == wanted, seen


@on_ranks(4)
@pytest.mark.parametrize("prepared", [True, False], ids=["prepared", "python"])
@pytest.mark.parametrize("scatter", [PAIRS, OTHERS], ids=["pairs", "others"])
def test_shared_chunks_are_right_whoever_is_late(rank: int, scatter: Ranges, prepared: bool) -> None:
    case = heads(scatter, bias=True)
    with pytest.MonkeyPatch.context() as patch:
        if not prepared:
            without_plans(patch)
        with fresh_group() as group, fusedcomm.force_algorithm("chunked", strict=True):
            for seed in range(8):
                after_peers(group, seed % 4)
                out = case.call(case.inputs(4, seed)[rank], group, 4)
                assert torch.equal(out, case.expected(case.inputs(4, seed))[rank])
