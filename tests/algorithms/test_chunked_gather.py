"""`chunked` where K is gathered: calls in several rounds, and what is computed before the first wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fusedcomm
from fusedcomm.algorithms import chunk_matmul
from fusedcomm.algorithms.chunk_matmul import GatheredMatmul
from fusedcomm.algorithms.transport import CpuTransport
from fusedcomm.geometry import exchange
from tests.helpers.op_problems import ALL_PROBLEMS
from tests.helpers.problems import GATHERS, Problem
from tests.ops.test_gradients import check_gradients

PROBLEMS = [problem for problem in ALL_PROBLEMS if problem.op in GATHERS]


def check_in_rounds(rank: int, problems: list[Problem]) -> int:
    """Calls whose rounds hold thirds of every chunk, with parts of K added whatever their size.

    Returns how many parts came from a gathered x.
    """
    from_gathered = 0
    rounds, part = exchange.Exchange.rounds, GatheredMatmul.part

    def thirds(self: exchange.Exchange, max_chunk_numel: int) -> Any:
        return rounds(self, min(max_chunk_numel, max(self.row_numel, self.chunk_numel // 3, 1)))

    def counted(self: GatheredMatmul, spans: Any, src_rank: int, chunk: Any, gathered: Any) -> Any:
        nonlocal from_gathered
        from_gathered += gathered is not None
        return part(self, spans, src_rank, chunk, gathered)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "FEW_ROWS", 0)
        patch.setattr(chunk_matmul, "_MIN_PIECE", 1)
        patch.setattr(exchange.Exchange, "rounds", thirds)
        patch.setattr(GatheredMatmul, "part", counted)
        for problem in problems:
            check_gradients(rank, problem, algorithm="chunked")
    return from_gathered


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_parts_of_k_in_rounds(ranks: Any, world_size: int) -> None:
    assert min(ranks(world_size).run(check_in_rounds, PROBLEMS)) > 0


def order(rank: int, dtype: torch.dtype, kept: bool) -> list[str]:
    """The order of what a call with K gathered does."""
    did: list[str] = []
    wait, multiply = CpuTransport.wait, chunk_matmul._multiply

    def waits(*args: Any) -> None:
        did.append("wait")
        wait(*args)

    def multiplies(*args: Any) -> None:
        did.append("matmul")
        multiply(*args)

    x, w = torch.ones(256, 256, dtype=dtype), torch.ones(512, 8, dtype=dtype, requires_grad=kept)
    with pytest.MonkeyPatch.context() as patch, fusedcomm.force_algorithm("chunked", strict=True):
        patch.setattr(CpuTransport, "wait", waits)
        patch.setattr(chunk_matmul, "_multiply", multiplies)
        y = fusedcomm.all_to_all_matmul(x, w, 1, 0)
    assert torch.equal(y.detach(), torch.full((128, 8), 512.0, dtype=dtype))
    return did


@pytest.mark.parametrize("kept", [True, False])
def test_the_own_part_is_multiplied_before_the_first_wait(ranks: Any, kept: bool) -> None:
    """The own part is multiplied first, unless the sums would be rounded in between."""
    assert ranks(2).run(order, torch.float32, kept) == [["matmul", "wait"]] * 2
    assert ranks(2).run(order, torch.bfloat16, kept) == [["wait", "matmul"]] * 2
