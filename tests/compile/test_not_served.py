"""Programs of ranks that cannot understand each other end within the time-out, on every rank, and say why."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import fusedcomm.compile
from fusedcomm.errors import PeerTimeoutError
from tests.helpers.block_checks import interpreted, no_latency
from tests.helpers.on_ranks import on_ranks

TIMEOUT_S, MARGIN_S = 3, 5
N = 8


@contextmanager
def short_group() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEDCOMM_TIMEOUT_S", str(TIMEOUT_S))
        group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
        torch._dynamo.reset()
        yield group
    dist.barrier()
    dist.destroy_process_group(group)


def failure(call: Callable[[], Any]) -> Exception:
    dist.barrier()
    began = time.monotonic()
    with pytest.raises(Exception) as caught:
        call()
    assert time.monotonic() - began < TIMEOUT_S + MARGIN_S
    return caught.value


@on_ranks(2)
@pytest.mark.parametrize("matmul", [False, True])
def test_an_eager_collective_against_a_compiled_one(rank: int, matmul: bool) -> None:
    x = torch.ones(N, N)

    def program(x: Tensor) -> Tensor:
        return funcol.all_reduce(x @ x if matmul else x + 1, "sum", group)

    with short_group() as group, torch.no_grad(), fusedcomm.compile.enabled():
        compiled = torch.compile(program, backend=interpreted)
        torch.testing.assert_close(compiled(x), 2 * (x @ x if matmul else x + 1))
        error = failure(lambda: (program if rank == 0 else compiled)(x).sum().item())
        if rank > 0:
            assert isinstance(error, PeerTimeoutError) and "ranks [0] did not signal" in str(error), error


@on_ranks(2)
def test_a_rank_that_compiles_again_alone_behind_a_change_that_all_agreed_to(rank: int) -> None:
    """The first graph has one sum of both terms."""

    def program(x: Tensor, logs: bool) -> Any:
        a, b = funcol.all_reduce(x.sin(), "sum", group), funcol.all_reduce(x.cos(), "sum", group)
        return a + b, a.norm() if logs else None

    x = torch.ones(N, N)
    with short_group() as group, torch.no_grad(), no_latency(), fusedcomm.compile.enabled(overlap=True) as report:
        compiled = torch.compile(program, backend=interpreted)
        compiled(x, False)
        assert any(line.status == "merged" for line in report.collectives)
        failure(lambda: compiled(x, rank == 0))
