"""A bias of every shape that broadcasts: it is fused, or left with a reason, and no pass fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import fusedcomm.compile
from tests.helpers.graphs import recorded_graphs
from tests.helpers.on_ranks import on_ranks
from tests.helpers.program_parts import all_gather, reduce_scatter, world

T, K, N = 4, 8, 8
SHAPES: dict[str, tuple[tuple[int, ...], bool]] = {  # and whether the bias is the same in every row
    "one": ((1,), True),
    "columns": ((N,), True),
    "one-row": ((1, N), True),
    "one-by-one": ((1, 1), True),
    "scalar": ((), True),
    "rows": ((T, 1), False),
    "whole": ((T, N), False),
}


def exchange(y: Tensor) -> Tensor:
    r = dist.get_world_size()
    y = y.view(-1, r, N // r).transpose(0, 1).contiguous()
    return funcol.all_to_all_single_autograd(y, [1] * r, [1] * r, world())


PROGRAMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "added": lambda x, w, b: exchange(x @ w + b),
    "addmm": lambda x, w, b: exchange(torch.addmm(b, x, w)),
    "gather": lambda x, w, b: all_gather(x, 1, world()) @ w.repeat(dist.get_world_size(), 1) + b,
    "reduce-scatter": lambda x, w, b: reduce_scatter(x @ w + b / dist.get_world_size(), "sum", 0, world()),
    "all-reduce": lambda x, w, b: funcol.all_reduce(x @ w + b / dist.get_world_size(), "sum", world()),
}
CASES = [(program, shape) for program in PROGRAMS for shape in SHAPES]
QUICK = [("added", "one"), ("reduce-scatter", "scalar"), ("added", "rows")]
ONE_ELEMENT = ("one", "one-by-one", "scalar")


def cases() -> list[Any]:
    """The shapes of one element differ by how they are broadcast, so each has one program in `make test-all`."""
    thorough = [("all-reduce", "one"), ("gather", "one-by-one"), ("addmm", "scalar")]
    most = [case for case in CASES if case[1] not in ONE_ELEMENT or case in (*QUICK, *thorough)]
    return [
        pytest.param(case, marks=() if case in QUICK else pytest.mark.thorough if case in most else pytest.mark.nightly)
        for case in CASES
    ]


@on_ranks(2)
@pytest.mark.parametrize("case", cases(), ids="-".join)
def test_values_and_gradients(rank: int, case: tuple[str, str]) -> None:
    program, (shape, same_in_rows) = PROGRAMS[case[0]], SHAPES[case[1]]
    generator = torch.Generator().manual_seed(7)
    x, w, bias = (torch.randint(-3, 4, size, generator=generator).float() for size in ((T, K), (K, N), shape))
    x, differentiable = x * (rank + 1), case[0] in ("added", "addmm")
    found = []
    for compiled in (False, True):
        leaves = [t.clone().requires_grad_(differentiable) for t in (x, w, bias)]
        with recorded_graphs(), fusedcomm.compile.enabled() as report, warnings.catch_warnings():
            warnings.filterwarnings("error", message="fusedcomm")  # a pass that fails says so
            out = torch.compile(program, fullgraph=True)(*leaves) if compiled else program(*leaves)
            if differentiable:
                (out * torch.arange(out.numel()).view_as(out)).sum().backward()
        found.append([out.detach(), *(leaf.grad for leaf in leaves if differentiable)])
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)
    forward = report.collectives[0]
    assert (forward.status == "fused") == (same_in_rows or case[0] == "gather"), forward  # else it adds behind the op
