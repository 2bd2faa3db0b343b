"""All ranks' inputs of a case, and what this rank must get: the program of all ranks in one process, in float64.

Nothing that is tested is used here, and nothing is communicated: every rank draws the inputs of all.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.helpers.groups import non_contiguous
from tests.helpers.problems import exact, flat, integers, whole_group
from tests.soak.random_call import SoakCase

SoakInputs = list[Tensor | None]  # x, the weights, the biases


class KnownValues:
    """Small integers that differ by rank and by ``seed``, so that what an earlier call has left behind shows."""

    def __init__(self, case: SoakCase, seed: int) -> None:
        self.case, self.num_ws = case, len(case.problem.ns)
        every = [flat(integers(case.problem, r, case.group_size, torch.float64, seed)) for r in range(case.group_size)]
        most = [case.largest * case.factor, *[case.largest] * 2 * self.num_ws]  # x is multiplied by the factor
        self.everyone = [
            [None if t is None else t.clamp(-m, m) for t, m in zip(each, most, strict=True)] for each in every
        ]
        generator = torch.Generator().manual_seed(seed)
        shapes = [shape for _ in range(case.group_size) for shape in case.shapes[2]]
        drawn = [torch.randint(-case.largest, case.largest + 1, shape, generator=generator) for shape in shapes]
        self.grads = [drawn[i : i + self.num_ws] for i in range(0, len(drawn), self.num_ws)]

    def exact_grads(self, rank: int) -> list[Tensor]:
        """Factors of the results in the loss; all ranks of a matmul_all_reduce have one result."""
        return [grad * self.case.factor for grad in self.grads[0 if self.case.op == "matmul_all_reduce" else rank]]

    def trained(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        kept = zip(tensors, self.case.problem.kinds, strict=True)
        return [t for t, kind in kept if t is not None and kind != self.case.frozen]

    def inputs(self, rank: int, device: torch.device) -> SoakInputs:
        case = self.case
        layouts = [case.x_layout, *[case.w_layout] * self.num_ws, *["contiguous"] * self.num_ws]
        given = [
            None if t is None else _laid_out(t.to(device, case.dtype), layout)
            for t, layout in zip(self.everyone[rank], layouts, strict=True)
        ]
        if case.use == "backward":
            for leaf in self.trained(given):
                leaf.requires_grad_()
        return given

    def expected(self, rank: int) -> list[Tensor]:
        """The results of ``rank``, and in a backward the gradients of its inputs."""
        case = self.case
        everyone = [[None if t is None else t.clone() for t in each] for each in self.everyone]
        leaves = self.trained(everyone[rank])
        for leaf in leaves:
            leaf.requires_grad_(case.use == "backward")
        outs, _ = whole_group(case.problem, everyone, case.group_size)
        if case.use != "backward":
            return [exact(out, case.dtype) for out in outs[rank]]
        # matmul_all_reduce takes its gradient to be replicated: the loss is that of one model, not the sum of all
        ranks = [rank] if case.op == "matmul_all_reduce" else range(case.group_size)
        terms = [(out * g).sum() for r in ranks for out, g in zip(outs[r], self.exact_grads(r), strict=True)]
        grads = torch.autograd.grad(sum(terms, torch.zeros(())), leaves, materialize_grads=True)
        return [exact(t.detach(), case.dtype) for t in (*outs[rank], *grads)]


def _laid_out(t: Tensor, layout: str) -> Tensor:
    """The same values in another layout."""
    if layout == "transposed":
        return t.mT.contiguous().mT
    if layout == "strided":
        return non_contiguous(t)
    return t
