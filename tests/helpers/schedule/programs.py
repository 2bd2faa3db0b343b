"""Programs to record: calls of every op, forward and backward, in several rounds, on one group or two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.helpers.problems import EVEN, GATHERS, Problem
from tests.helpers.schedule.kernel_effects import Group
from tests.helpers.schedule.operations import Recording
from tests.helpers.schedule.recorder import Recorder
from tests.helpers.uneven import Uneven

Program = Callable[[Recorder], None]


@dataclass(frozen=True)
class World:
    """``group_size`` ranks, each on a GPU of its own, and all of them in every group.

    Without ``writes_words`` the GPUs' streams cannot write words, and each signal is a kernel.
    """

    group_size: int
    slot_bytes: int
    algorithm: str
    num_groups: int = 1
    writes_words: bool = True

    @property
    def groups(self) -> list[Group]:
        return [Group(f"group {i}", tuple(range(self.group_size))) for i in range(self.num_groups)]

    def record(self, program: Program) -> list[Recording]:
        """What each rank enqueues. They all run the same program."""
        recordings = []
        for rank in range(self.group_size):
            groups = [group for group in self.groups if rank in group.ranks]
            recorder = Recorder(rank, groups, self.slot_bytes, self.algorithm, self.writes_words)
            with recorder.records() as recording:
                program(recorder)
            recordings.append(recording)
        return recordings


class Mesh(World):
    """Two rows of ranks: each rank is in the group of its row, and in that of its column."""

    @property
    def groups(self) -> list[Group]:
        half = self.group_size // 2
        rows = [Group(f"row {i}", tuple(range(i * half, (i + 1) * half))) for i in range(2)]
        return rows + [Group(f"column {i}", (i, i + half)) for i in range(half)]


def call(problem: Problem, recorder: Recorder, group: Group, dtype: torch.dtype, backward: bool) -> None:
    """One call with fresh inputs, all of which are gone when it returns, and its backward."""
    num_ranks = len(group.ranks)
    x_shape, w_shapes, _ = problem.sizes(num_ranks)
    made = partial(recorder.tensor, dtype=dtype, requires_grad=backward)
    x, ws = made(*x_shape), [_weight(made, shape, problem.transposed) for shape in w_shapes]
    biases = [None if size is None else made(size) for size in problem.bias_sizes(num_ranks)]
    outs = _call(problem, x, ws, biases, group, by_product=backward)
    if backward:
        torch.autograd.backward(outs, [torch.empty_like(out) for out in outs])


def _weight(made: Callable[..., Tensor], shape: Sequence[int], transposed: bool) -> Tensor:
    return made(*shape[:-2], shape[-1], shape[-2]).mT if transposed else made(*shape)


def _call(
    problem: Problem, x: Tensor, ws: list[Tensor], biases: list[Any], group: Group, by_product: bool
) -> list[Tensor]:
    op, arguments = getattr(torch.ops.fusedcomm, problem.op), problem.arguments(len(group.ranks))
    where = *EVEN[problem.op], len(group.ranks), group.name
    if problem.op == "all_gather_matmul":
        return op(x, ws, biases, *arguments, by_product, *where)[0]
    if problem.op in GATHERS:
        return [op(x, ws[0], biases[0], *arguments, by_product, *where)[0]]
    return [op(x, ws[0], biases[0], *arguments, *where)]


def uneven_call(case: Uneven, recorder: Recorder, group: Group, dtype: torch.dtype, backward: bool) -> None:
    """As `call`, with parts of different sizes."""
    num_ranks, rank = len(group.ranks), group.ranks.index(recorder.rank)
    x, w, bias = (
        None if t is None else recorder.tensor(*t.shape, dtype=dtype, requires_grad=backward)
        for t in case.inputs(num_ranks)[rank]
    )
    assert x is not None and w is not None
    found = case.dispatch(x, w, bias, rank, num_ranks, group.name, by_product=backward)
    out = found if isinstance(found, Tensor) else found[0]
    if backward:
        out.backward(torch.empty_like(out))


def uneven_calls(cases: Sequence[Uneven], dtype: torch.dtype = torch.bfloat16, backward: bool = True) -> Program:
    def program(recorder: Recorder) -> None:
        for case in cases:
            for group in recorder.groups.values():
                uneven_call(case, recorder, group, dtype, backward)

    return program


def calls(problems: Sequence[Problem], dtype: torch.dtype = torch.bfloat16, backward: bool = True) -> Program:
    """The calls one after the other, in each group in turn."""

    def program(recorder: Recorder) -> None:
        for problem in problems:
            for group in recorder.groups.values():
                call(problem, recorder, group, dtype, backward)

    return program


def on_two_streams(problems: Sequence[Problem]) -> Program:
    """Each group's calls on a stream of its own."""

    def program(recorder: Recorder) -> None:
        streams = [torch.cuda.Stream() for _ in recorder.groups]
        for problem in problems:
            for stream, group in zip(streams, recorder.groups.values(), strict=True):
                with torch.cuda.stream(stream):
                    call(problem, recorder, group, torch.bfloat16, backward=True)

    return program
