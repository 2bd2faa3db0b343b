"""enable(overlap=True): Inductor's code runs matmuls between starts and waits, with the same values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm.compile
from fusedcomm.bench.start_program import matmul_and_reshard_heads
from fusedcomm.compile.overlap.estimator import Estimator
from tests.compile.test_inductor_order import calls, matmuls_between
from tests.compile.test_lowering import codes_of
from tests.helpers.block_checks import interpreted

_c10d = torch.ops._c10d_functional


PAIRS = 3


def integers(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randint(-2, 3, shape, generator=generator).float() for shape in shapes]


def start_program() -> tuple[Any, list[Tensor]]:
    """The start program, so large that one exchange for all of them would not pay."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def program(*args: Tensor) -> list[Tensor]:
        return matmul_and_reshard_heads(list(args[:PAIRS]), list(args[PAIRS:]), mesh)

    return program, integers(*[(2, 256, 64)] * PAIRS, *[(2, 64, 1024)] * PAIRS)


def check_start_program(rank: int, overlap: bool) -> tuple[list[str], list[str]]:
    program, args = start_program()
    want = program(*args)
    with fusedcomm.compile.enabled(fuse=(), overlap=overlap) as report:
        got, (code,) = codes_of(lambda compiled: compiled(*args), program)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    return calls(code), [line.status for line in report.collectives]


def test_matmuls_stand_between_starts_and_waits_of_the_start_program(ranks: Any) -> None:
    """Behind the last exchange every matmul needs it. As traced (the control) no exchange has one."""
    (names, statuses), other = ranks(2).run(check_start_program, True)
    assert other == (names, statuses)
    assert len(matmuls_between(names)) == PAIRS and all(matmuls_between(names)[:-1])
    assert set(statuses) <= {"overlapped", "exposed"} and len(statuses) == PAIRS
    (names, statuses), _ = ranks(2).run(check_start_program, False)
    assert matmuls_between(names) == [0] * PAIRS and set(statuses) == {"exposed"}


def beside(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """A product that does not need the exchange is added to what it brings: Inductor makes one addmm of both."""
    group_name = dist.group.WORLD.group_name
    arrived = _c10d.wait_tensor(_c10d.all_to_all_single(u, [1, 1], [1, 1], group_name))
    return arrived + x @ w


def check_addition(rank: int, overlap: bool) -> list[str]:
    args = integers((2, 8), (8, 16), (2, 16))
    want = beside(*args)
    with fusedcomm.compile.enabled(fuse=(), overlap=overlap):
        got, (code,) = codes_of(lambda compiled: compiled(*args), beside)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    return calls(code)


@pytest.mark.thorough
def test_a_product_added_to_what_arrives_runs_meanwhile(ranks: Any) -> None:
    for overlap, number in ((True, 1), (False, 0)):
        names, other = ranks(2).run(check_addition, overlap)
        assert names == other and matmuls_between(names) == [number]


def check_fusing(rank: int) -> list[str]:
    program, args = start_program()
    want = program(*args)
    with fusedcomm.compile.enabled(overlap=True) as report:
        got = torch.compile(program, fullgraph=True, backend=interpreted)(*args)
    torch.testing.assert_close(got, want)
    assert all(line.reason for line in report.collectives if line.status != "fused")
    return [line.status for line in report.collectives]


def test_what_stays_exposed_is_fused(ranks: Any) -> None:
    first, second = ranks(2).run(check_fusing)
    assert first == second and "fused" in first


def test_an_estimator_alone_does_nothing() -> None:
    with pytest.raises(ValueError, match="estimator must come with overlap=True"):
        fusedcomm.compile.enable(estimator=Estimator("cpu"))


def test_overlap_needs_ranks_to_agree_with() -> None:
    with pytest.raises(ValueError, match="must come after init_process_group"):
        fusedcomm.compile.enable(overlap=True)
