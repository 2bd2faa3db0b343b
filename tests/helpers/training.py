"""Training calls, prepared and not: what runs in Python, and that both ways do the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from fusedcomm.ops.formula import Formula
from tests.helpers.in_place import without_plans
from tests.helpers.op_problems import as_list
from tests.helpers.prepared import started_group
from tests.helpers.problems import GATHERS, Problem, flat, integers, unflat

STEPS = 5
NATIVE_NODE = "torch::autograd::CppNode<fusedcomm::TrainingNode>"


@contextmanager
def formula_runs() -> Iterator[list[Formula]]:
    """The formulas whose backward runs in Python inside."""
    ran: list[Formula] = []
    run = Formula.run

    def counted(self: Formula, *args: Any) -> Any:
        ran.append(self)
        return run(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Formula, "run", counted)
        yield ran


@dataclass
class Step:
    """A step of a program: fresh leaves of a problem, which are different in each step and each rank."""

    problem: Problem
    group: Any
    seed: int
    frozen: str = ""

    def __post_init__(self) -> None:
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        kinds = "x" + "w" * len(self.problem.ns) + "b" * len(self.problem.ns)
        tensors = flat(integers(self.problem, rank, size, torch.float32, self.seed))
        self.tensors = [
            t if t is None else t.detach().requires_grad_(kind not in self.frozen)
            for t, kind in zip(tensors, kinds, strict=True)
        ]

    @property
    def leaves(self) -> list[Tensor]:
        return [t for t in self.tensors if t is not None and t.requires_grad]

    def call(self, **options: Any) -> list[Tensor]:
        return as_list(self.problem.call(unflat(self.problem, self.tensors), self.group, **options))

    def results(self) -> list[Tensor]:
        """The by-product of a gather among them."""
        by_product = self.problem.op in GATHERS
        *args, _, _ = self.problem.dispatched(unflat(self.problem, self.tensors), by_product=by_product)
        op = getattr(torch.ops.fusedcomm, self.problem.op).default
        leaves: list[Tensor] = pytree.tree_leaves(op(*args, self.group.size(), self.group.group_name))
        return leaves

    def weights(self, outs: list[Tensor]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.randint(-3, 4, out.shape, generator=generator).to(out.dtype) for out in outs]

    def grads(self, outs: list[Tensor], **options: Any) -> Any:
        return torch.autograd.grad(outs, self.leaves, self.weights(outs), allow_unused=True, **options)


def same_in_python(algorithm: str, program: Callable[[Any], list[Any]]) -> None:
    """``program(group)`` is the same on a group whose calls are prepared and on another: values, strides and so on."""
    with started_group(algorithm) as group:
        found = program(group)
    with pytest.MonkeyPatch.context() as patch:
        without_plans(patch)
        with started_group(algorithm) as group:
            wanted = program(group)
    assert len(found) == len(wanted) > 0
    for each, want in zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True):
        if isinstance(want, Tensor):
            assert torch.equal(each, want) and each.stride() == want.stride()
        else:
            assert each == want


def error_of(call: Callable[[], Any]) -> str:
    """The type and text of what ``call`` raises; "" if it raises nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
