"""All ranks' inputs of a case, and what this rank must get: the program of all ranks in one process, in float64.

Nothing that is tested is used here, and nothing is communicated: every rank draws the inputs of all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.soak.random_call import SoakCase


@dataclass
class SoakInputs:
    x: Tensor
    ws: list[Tensor]
    biases: list[Tensor | None]

    def trained(self, frozen: str) -> list[Tensor]:
        """The tensors that get gradients, if x, w or nothing is frozen."""
        x, ws = [] if frozen == "x" else [self.x], [] if frozen == "w" else self.ws
        return [*x, *ws, *(bias for bias in self.biases if bias is not None)]


class KnownValues:
    """Small integers that differ by rank and by ``seed``, so that what an earlier call has left behind shows."""

    def __init__(self, case: SoakCase, seed: int) -> None:
        self.case = case
        self.shapes = [case.x, *case.ws, *(shape for shape in case.bias_shapes if shape), *case.out_shapes]
        self.numel = sum(map(math.prod, self.shapes))
        generator = torch.Generator().manual_seed(seed)
        shape = (case.group_size, self.numel)
        self.numbers = torch.randint(-case.largest, case.largest + 1, shape, generator=generator, dtype=torch.float64)
        if case.op == "matmul_all_reduce":  # all ranks have one result, and so one bias and one gradient
            same = sum(map(math.prod, (case.x, *case.ws)))
            self.numbers[1:, same:] = self.numbers[0, same:]

    def _tensors(self, rank: int) -> list[Tensor]:
        parts = self.numbers[rank].split([math.prod(shape) for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def exact_inputs(self, rank: int) -> SoakInputs:
        case, (x, *rest) = self.case, self._tensors(rank)
        num_ws = len(case.ws)
        biases = iter(rest[num_ws:])
        return SoakInputs(x * case.factor, rest[:num_ws], [next(biases) if bias else None for bias in case.biases])

    def exact_grads(self, rank: int) -> list[Tensor]:
        """What the loss multiplies the results with."""
        return [grad * self.case.factor for grad in self._tensors(rank)[-len(self.case.out_shapes) :]]

    def inputs(self, rank: int, device: torch.device) -> SoakInputs:
        case, exact = self.case, self.exact_inputs(rank)
        given = SoakInputs(
            _laid_out(exact.x.to(device, case.dtype), case.x_layout),
            [_laid_out(w.to(device, case.dtype), case.w_layout) for w in exact.ws],
            [None if bias is None else bias.to(device, case.dtype) for bias in exact.biases],
        )
        if case.use == "backward":
            for leaf in given.trained(case.frozen):
                leaf.requires_grad_()
        return given

    def expected(self, rank: int) -> list[Tensor]:
        """The results of ``rank``, and in a backward the gradients of its inputs."""
        case, everyone = self.case, [self.exact_inputs(r) for r in range(self.case.group_size)]
        if case.use != "backward":
            return [self._rounded(out) for out in _results(case, everyone, rank)]
        leaves = everyone[rank].trained(case.frozen)
        for leaf in leaves:
            leaf.requires_grad_()
        # matmul_all_reduce takes its gradient to be replicated: the loss is that of one model, not the sum of all
        ranks = [rank] if case.op == "matmul_all_reduce" else range(case.group_size)
        outs = {r: _results(case, everyone, r) for r in ranks}
        terms = [(out * g).sum() for r in ranks for out, g in zip(outs[r], self.exact_grads(r), strict=True)]
        grads = torch.autograd.grad(sum(terms, torch.zeros(())), leaves, materialize_grads=True)
        return [self._rounded(t.detach()) for t in (*outs[rank], *grads)]

    def _rounded(self, t: Tensor) -> Tensor:
        rounded = t.to(self.case.dtype)
        assert torch.equal(rounded.double(), t), f"sums must be exact: {self.case}"
        return rounded


def _results(case: SoakCase, everyone: Sequence[SoakInputs], rank: int) -> list[Tensor]:
    """The results of one rank, from the inputs of all."""
    xs, own = [each.x for each in everyone], everyone[rank]

    def my_block(t: Tensor) -> Tensor:
        assert case.scatter_dim is not None
        return t.tensor_split(case.group_size, case.scatter_dim)[rank]

    def gathered(ts: Sequence[Tensor]) -> Tensor:
        assert case.gather_dim is not None
        return torch.cat(list(ts), case.gather_dim)

    if case.op == "all_gather_matmul":
        return _matmuls(gathered(xs), own)
    if case.op == "all_to_all_matmul":
        return _matmuls(gathered([my_block(x) for x in xs]).flatten(-case.k_dims), own)
    if case.op == "matmul_all_to_all":
        ys = [_matmuls(each.x, each)[0] for each in everyone]
        return [gathered([my_block(y.unflatten(-1, case.out_shape or y.shape[-1:])) for y in ys])]
    total = torch.stack([each.x @ each.ws[0] for each in everyone]).sum(0) / case.factor
    mine = my_block(total) if case.op == "matmul_reduce_scatter" else total
    return [mine if own.biases[0] is None else mine + own.biases[0]]


def _matmuls(x: Tensor, inputs: SoakInputs) -> list[Tensor]:
    return [x @ w if bias is None else x @ w + bias for w, bias in zip(inputs.ws, inputs.biases, strict=True)]


def _laid_out(t: Tensor, layout: str) -> Tensor:
    """The same values in another layout."""
    if layout == "transposed":
        return t.mT.contiguous().mT
    if layout == "strided":
        wide = t.new_full([2 * size for size in t.shape], float("nan"))
        view = wide[tuple(slice(None, None, 2) for _ in t.shape)]
        return view.copy_(t)
    return t
