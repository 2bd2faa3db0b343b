"""Calls of the soak whose parts differ in size: drawn, run and known as those of tests/ops/test_uneven.py are."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

import fusedcomm
from tests.helpers.problems import exact
from tests.helpers.uneven import Uneven
from tests.helpers.uneven import draw as draw_uneven
from tests.soak.random_call import EXACT

LARGEST = 3  # bound of the inputs

UnevenInputs = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class UnevenCase:
    """What every rank of a group gives to an op, with parts that are not blocks of one size, or are by chance."""

    drawn: Uneven
    group_size: int
    use: str  # "forward" or "backward"

    is_small = False  # no kernel takes it

    def __str__(self) -> str:
        return f"{self.use} on {self.group_size} ranks of {self.drawn}"

    @property
    def op(self) -> str:
        return self.drawn.op

    @property
    def num_bytes(self) -> int:
        """At least what a rank's slots would have to hold for a call of one round."""
        return self.group_size * self.dtype.itemsize * math.prod(self.drawn.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.drawn.dtype


def draw(random: Random, group_size: int) -> UnevenCase:
    """A forward is in a random dtype of those that hold its sums, and a backward in float32."""
    drawn, use = draw_uneven(random, group_size), random.choice(("forward", "backward"))
    k = max(w.shape[-2] for _, w, _ in drawn.inputs(group_size))
    bound = LARGEST**2 * k * group_size + LARGEST
    held = [dtype for dtype, largest in EXACT.items() if bound <= largest]
    return UnevenCase(replace(drawn, dtype=random.choice(held)) if use == "forward" else drawn, group_size, use)


class UnevenValues:
    """All ranks' inputs of a case, and what each must get."""

    def __init__(self, case: UnevenCase, seed: int) -> None:
        self.case, self.everyone = case, case.drawn.inputs(case.group_size, seed)
        generator = torch.Generator().manual_seed(seed + 1)
        shapes = [out.shape for out in case.drawn.expected(self.everyone)]
        self.grads = [torch.randint(-LARGEST, LARGEST + 1, shape, generator=generator) for shape in shapes]

    def inputs(self, rank: int, device: torch.device) -> UnevenInputs:
        trains = self.case.use == "backward"
        x, w, bias = (None if t is None else t.to(device).requires_grad_(trains) for t in self.everyone[rank])
        assert x is not None and w is not None
        return x, w, bias

    def expected(self, rank: int) -> list[Tensor]:
        """The results of ``rank``, and in a backward the gradients of its inputs."""
        trains, case = self.case.use == "backward", self.case
        everyone = [
            tuple(None if t is None else t.double().requires_grad_(trains) for t in each) for each in self.everyone
        ]
        outs = case.drawn.expected(everyone)  # type: ignore[arg-type]
        if not trains:
            return [exact(outs[rank], case.dtype)]
        leaves = [t for t in everyone[rank] if t is not None]
        grads = torch.autograd.grad(outs, leaves, [grad.double() for grad in self.grads], materialize_grads=True)
        return [exact(t.detach(), case.dtype) for t in (outs[rank], *grads)]


def arguments(data: UnevenValues, rank: int, inputs: UnevenInputs, group: Any) -> tuple[list[Any], dict[str, Any]]:
    x, w, bias = inputs
    return [x, w], {"bias": bias, "group": group, **data.case.drawn.arguments(rank, data.case.group_size)}


def results(data: UnevenValues, rank: int, inputs: UnevenInputs, group: Any) -> list[Tensor]:
    args, options = arguments(data, rank, inputs, group)
    out = getattr(fusedcomm, data.case.op)(*args, **options)
    if data.case.use == "forward":
        return [out]
    leaves = [t for t in inputs if t is not None]
    grads = torch.autograd.grad(out, leaves, data.grads[rank].to(out), materialize_grads=True)
    return [out.detach(), *grads]
