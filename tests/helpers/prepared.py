"""Which calls the kernels in Python run, and what prepared calls are compared with."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedcomm
from fusedcomm.memory import members
from fusedcomm.ops import dispatch
from tests.helpers.groups import fresh_group, member_of
from tests.helpers.problems import Problem, expected, integers
from tests.helpers.spies import first_arguments

CALLS = 6
IN_PYTHON = 2  # the first call of a kind, and the one whose plan is kept


@contextmanager
def started_group(algorithm: str, **env: str) -> Iterator[Any]:
    """A group that has made a call, and the workspace if ``algorithm`` has one; inside it is forced."""
    with fresh_group(**env) as group, fusedcomm.force_algorithm(algorithm, strict=True):
        size = dist.get_world_size(group)
        fusedcomm.matmul_all_reduce(torch.ones(size, 1), torch.ones(1, 1), group)
        yield group


def without_plans(patch: pytest.MonkeyPatch) -> None:
    """Groups that are made from here on run Python in each call."""
    patch.setattr(members.Member, "prepare_calls", lambda self: None)


def python_calls() -> AbstractContextManager[list[str]]:
    """The ops whose kernels in Python run inside."""
    return first_arguments(dispatch, "prepare")


def check_prepared(group: Any, problem: Problem, dtype: torch.dtype, calls: int = CALLS) -> None:
    """Calls back to back with fresh data: the first two run in Python, and all results stay right to the end."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    outs = []
    with python_calls() as ran:
        for seed in range(calls):
            outs.append(problem.call(integers(problem, rank, size, dtype, seed), group))
    assert len(ran) == min(calls, IN_PYTHON), f"{problem}: {len(ran)} of {calls} calls ran in Python"
    for seed, out in enumerate(outs):
        torch.testing.assert_close(out, expected(problem, size, dtype, seed)[rank], rtol=0, atol=0)


def num_prepared(group: Any) -> int:
    return len(member_of(group).prepared)
