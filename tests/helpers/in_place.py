"""What the tests of results in place share: calls with all their results, and which chunks have come in place."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

import fusedcomm
from fusedcomm.memory import members
from fusedcomm.memory.workspace import Workspace
from tests.faults.cells import MEET_S
from tests.faults.prepared_calls import until_signalled
from tests.helpers.groups import fresh_group, member_of
from tests.helpers.problems import GATHERS, Problem, expected, expected_by_product, integers

WARM_UP = 6  # calls whose results are dropped: two in ordinary memory, one cold for its owner, one for each peer
TO_ALL = Problem("in-place", (6, 5), 7, 0, 1)
RUNS = Problem("in-place-runs", (2, 256, 4), 8, 1, 2)  # the matmul writes runs of the peer's result
SCATTERED = Problem("in-place-copied", (2, 6, 5), 8, 1, 2)  # runs are too short for it: never in place
FEW_ROWS = Problem("in-place-few-rows", (6, 5), 7, 0, op="all_gather_matmul")
EACH_SOURCE = Problem("in-place-each-source", (160, 5), 7, 0, op="all_gather_matmul")
LIST = Problem("in-place-list", (160, 5), (7, 3), 0, op="all_gather_matmul", bias=(True, False))
SUMS = Problem("in-place-sums", (6, 130), 7, 1, op="all_gather_matmul")  # each source is added to the result
TAKES_ALL = Problem("in-place-takes-all", (6, 5), 7, 1, op="all_gather_matmul")
EXCHANGED = Problem("in-place-exchanged", (160, 5), 7, 0, 1, op="all_to_all_matmul", bias=True)
HEADS = Problem("in-place-heads", (2, 3, 2, 4), 7, -2, 1, k_dims=2, bias=True, op="all_to_all_matmul")
ALL_REDUCE = Problem("in-place", (6, 5), 7, op="matmul_all_reduce", bias=True)
IN_PLACE = [TO_ALL, RUNS, FEW_ROWS, EACH_SOURCE, LIST, SUMS, TAKES_ALL, EXCHANGED, HEADS, ALL_REDUCE]


def without_plans(patch: pytest.MonkeyPatch) -> None:
    """Groups that are made from here on run Python in each call."""
    patch.setattr(members.Member, "prepare_calls", lambda self: None)


@contextmanager
def chunked_group(plans: bool = True, **env: str) -> Iterator[Any]:
    """A group whose calls run `chunked`, and in Python each time if there are to be no ``plans``."""
    with pytest.MonkeyPatch.context() as patch, fresh_group(**env) as group:
        if not plans:
            without_plans(patch)
        with fusedcomm.force_algorithm("chunked", strict=True):
            yield group


def results_of(group: Any, problem: Problem, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The results of a call with fresh data, the by-product of a gather among them."""
    inputs = integers(problem, dist.get_rank(group), dist.get_world_size(group), dtype, seed)
    *args, _, _ = problem.dispatched(inputs, by_product=problem.op in GATHERS)
    result = getattr(torch.ops.fusedcomm, problem.op).default(*args, group.size(), group.group_name)
    return pytree.tree_leaves(result)


def wanted(group: Any, problem: Problem, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    results = pytree.tree_leaves(expected(problem, size, dtype, seed)[rank])
    if problem.op in GATHERS:
        results.append(expected_by_product(problem, size, dtype, seed)[rank])
    return results


def assert_exact(results: list[Tensor], wants: list[Tensor]) -> None:
    torch.testing.assert_close(results, wants, rtol=0, atol=0)


def warm_up(group: Any, *problems: Problem, **options: Any) -> None:
    """Afterwards two ranks have memory for results that is warm for both: it gets so where a rank finds a post."""
    for problem in problems:
        for seed in range(WARM_UP):
            after_peers(group, seed % dist.get_world_size(group))
            assert_exact(results_of(group, problem, seed, **options), wanted(group, problem, seed, **options))


def after_peers(group: Any, late: int) -> None:
    """The next call of one rank begins when the others have signalled their chunks to it, and have posted before."""
    dist.barrier(group)
    if dist.get_rank(group) == late:
        for member in members.members(group):  # none before the first call
            if member.workspace is not None:
                for peer in set(range(member.group_size)) - {late}:
                    until_signalled(member.workspace, peer, MEET_S)


def arrived(group: Any) -> list[int]:
    return in_place_from(member_of(group).workspace)


def in_place_from(workspace: Workspace) -> list[int]:
    """The ranks whose chunks of the last round have come in place."""
    words = workspace.segment[: workspace.layout.header_bytes].view(torch.int64).tolist()
    first = workspace.layout.marks // 8 + workspace.epoch % 2 * workspace.group_size
    marks = words[first : first + workspace.group_size]
    return [src for src, mark in enumerate(marks) if mark == workspace.epoch > 0]
