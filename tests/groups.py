"""A group of its own for a test, and calls in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

import fusedcomm
from fusedcomm import registry
from tests.problems import Problem, expected, integers


@contextmanager
def fresh_group(**env: str) -> Iterator[Any]:
    """A group of all ranks that has voted under these settings, and is gone afterwards."""
    saved = dict(os.environ)
    os.environ.update({f"FUSEDCOMM_{name}": value for name, value in env.items()})
    group = dist.new_group()
    try:
        yield group
    finally:
        os.environ.clear()
        os.environ.update(saved)
        dist.destroy_process_group(group)


def call(group: Any, problem: Problem, seed: int = 0) -> torch.Tensor:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    x, w, bias = integers(problem, rank, size, seed=seed)
    return fusedcomm.matmul_all_to_all(
        x,
        w,
        problem.gather_dim,
        problem.scatter_dim,
        group,
        bias=bias,
        out_shape=problem.sizes(size)[2],
    )


def check(group: Any, problem: Problem, out: torch.Tensor, seed: int = 0) -> None:
    want = expected(problem, dist.get_world_size(group), seed=seed)[dist.get_rank(group)]
    torch.testing.assert_close(out, want, rtol=0, atol=0)


def member_of(group: Any) -> registry.Member:
    (member,) = registry.members(group)
    return member
