"""The five ops as users write them today, with their oracles, and one rank's data for one size of an op.

[rows, K] @ [K, N] is the matmul of each.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from fusedcomm.bench import baselines
from fusedcomm.ops import whole_group
from fusedcomm.ops.exact_problem import difference
from fusedcomm.ops.whole_group import MatmulSize, WholeGroup

ROOF, COLLECTIVE, BASELINE, AUTO = "roof", "collective", "baseline", "auto"
Variants = Mapping[str, Callable[[], tuple[Tensor, ...]]]
RESULTS = {"forward": ("result",), "backward": ("grad x", "grad w"), "both": ("result", "grad x", "grad w")}
MATMULS = {"forward": 1, "backward": 2, "both": 3}  # how many of one size a pass has


class OpBench(WholeGroup):
    """One op, and the program of today that it equals."""

    def collective(self, t: Tensor) -> Tensor:
        """Users' own exchange, with the layout copies that it needs; differentiable."""
        if self.kind == "all_reduce":
            return baselines.all_reduce(t)
        blocks = t if self.scatter_dim is None else baselines.packed(t, self.scatter_dim)
        received = getattr(baselines, self.kind)(blocks)
        return received if self.gather_dim is None else baselines.unpacked(received, self.gather_dim % t.ndim)

    def exchanges(self, direction: str) -> int:
        """Exchanges of the tensor next to the collective in a pass. An all_reduce's gradient is there already."""
        backward = 0 if self.kind == "all_reduce" else 1
        return {"forward": 1, "backward": backward, "both": 1 + backward}[direction]

    def baseline(self, x: Tensor, w: Tensor) -> Tensor:
        """Users' program today, differentiable."""
        return torch.matmul(self.collective(x), w) if self.gathers else self.collective(torch.matmul(x, w))

    @property
    def baseline_text(self) -> str:
        return f"{self.kind}, matmul" if self.gathers else f"matmul, {self.kind}"

    def corners(self, scale: int = 1) -> list[tuple[int, int, int]]:
        """(rows, K, N) of least and most flops per sent byte, of few rows and of rows that no tile divides.

        A push sends rows x N, much per flop if K is small; a gather rows x K, much if N is small.
        """
        few, many = 512, 2500
        k, more_k, n, more_n = (2048, 4096, 256, 2048) if self.gathers else (256, 2048, 2048, 4096)
        shapes = [(few, k, n), (few, more_k, more_n), (many, k, more_n), (many, more_k, n)]
        return [(rows * scale, k * scale, n * scale) for rows, k, n in shapes]

    def matmul(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.matmul(x, w)

    def payload(self, t: Tensor) -> Tensor:
        """t as the collective takes it."""
        return t

    def ours(self, x: Tensor, w: Tensor) -> Tensor:
        return getattr(fusedcomm, self.op)(x, w, *self.dims(x))

    def plan(self, x: Tensor, w: Tensor) -> fusedcomm.Plan:
        return fusedcomm.explain(self.op, x, w, *self.dims(x))

    def exchanged_bytes(self, size: MatmulSize, dtype: torch.dtype) -> int:
        """Bytes as nccl-tests counts them: the larger of a rank's input to the collective and its output."""
        return size.rows * (size.k if self.gathers else size.n) * dtype.itemsize


PROGRAMS: dict[str, OpBench] = {
    op: type(type(each).__name__, (type(each), OpBench), {})() for op, each in whole_group.PROGRAMS.items()
}


class OpData:
    """One rank's inputs of a problem and the ways to use them: ``direction`` is forward, backward, or both.

    The inputs start as integers, so small and with so many zeros that products and sums are exact in every dtype and
    order.
    """

    def __init__(
        self, bench: OpBench, size: MatmulSize, dtype: torch.dtype, device: torch.device, direction: str = "forward"
    ) -> None:
        self.bench, self.size, self.dtype, self.device, self.direction = bench, size, dtype, device, direction
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.x, self.w, self.grad = self._integers(self.rank)
        self.random = False
        # The inputs of the matmul alone: x itself, or as much as would have been gathered
        shape = (*size.lead, size.k)
        self.local_x = self.x if self.x.shape == shape else self._random_integers(shape, self.rank, 3)
        self.local_grad = self._random_integers((*size.lead, size.n), self.rank, 4)

    @property
    def exchanged_bytes(self) -> int:
        return self.bench.exchanged_bytes(self.size, self.dtype)

    def randomize(self) -> None:
        """Make the inputs random for timing, after the checks: on integers GPUs draw less power, so they run faster.

        Call ``variants`` again after it, because a backward has saved the old ones.
        """
        self.__dict__.pop("_oracle", None)
        self.random = True
        generator = torch.Generator(self.device).manual_seed(self.rank)
        for t in (self.x, self.w, self.grad, self.local_x, self.local_grad):
            t.detach().normal_(generator=generator)

    def plan(self) -> fusedcomm.Plan:
        return self.bench.plan(self.x, self.w)

    def variants(self) -> Variants:
        return {
            ROOF: self.variant(self.bench.matmul, self.local_x, self.w, grad=self.local_grad),
            BASELINE: self.variant(self.bench.baseline, self.x, self.w, grad=self.grad),
            AUTO: self.variant(self.bench.ours, self.x, self.w, grad=self.grad),
        }

    def variant(self, fn: Callable[..., Tensor], *inputs: Tensor, grad: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """``fn`` on inputs, forward, backward or both, as the direction says."""
        if self.direction == "forward":
            return lambda: (fn(*inputs),)
        for each in inputs:
            each.requires_grad_()
        if self.direction == "backward":
            made = fn(*inputs)
            return lambda: torch.autograd.grad(made, inputs, grad, retain_graph=True)

        def call() -> tuple[Tensor, ...]:
            y = fn(*inputs)
            return y, *torch.autograd.grad(y, inputs, grad)

        return call

    def forced(self, algorithm: str) -> Callable[[], tuple[Tensor, ...]]:
        """The op with that algorithm where it can run, forward and backward."""
        with fusedcomm.force_algorithm(algorithm):
            variant = self.variant(self.bench.ours, self.x, self.w, grad=self.grad)

        def call() -> tuple[Tensor, ...]:
            with fusedcomm.force_algorithm(algorithm):
                return variant()

        return call

    def collective(self) -> Callable[[], tuple[Tensor, ...]]:
        """The collective alone, with its layout copies, on a tensor of the size that the op exchanges."""
        self.sent, grad = self._sent(self.rank)
        if self.random:
            self.sent.normal_()
        self.sent = self.bench.payload(self.sent)
        if self.bench.kind == "all_reduce":  # in place, and its backward exchanges nothing
            return lambda: (self.bench.collective(self.sent),)
        return self.variant(self.bench.collective, self.sent, grad=grad)

    def check(self, name: str, results: tuple[Tensor, ...]) -> str | None:
        if name == ROOF:
            expected = self._exact(lambda xs, ws: [xs[0] @ ws[0]], [[self.local_x], [self.w]], [self.local_grad], 0)
        elif name == COLLECTIVE:
            sent, grads = zip(*(self._sent(rank) for rank in range(self.num_ranks)), strict=True)
            expected = self._exact(self.bench.exchanged, [[*map(self.bench.payload, sent)]], grads, self.rank)
            results = tuple(result.to(self.dtype) for result in results)
        else:
            expected = self._oracle
        for what, result, must in zip(RESULTS[self.direction], results, expected, strict=False):
            if wrong := difference(result, must):
                return f"{what}: {wrong}"
        if name == COLLECTIVE:
            self.restore()
        return None

    def restore(self) -> None:
        """Undo what the collective alone has done to its input: an all_reduce is in place."""
        if self.bench.kind == "all_reduce" and hasattr(self, "sent"):
            self.sent.copy_(self._sent(self.rank)[0])

    @cached_property
    def _oracle(self) -> tuple[Tensor, ...]:
        """This rank's results, from all ranks' inputs: no communication must be trusted."""
        xs, ws, grads = zip(*(self._integers(rank) for rank in range(self.num_ranks)), strict=True)
        return self._exact(self.bench.program, [xs, ws], grads, self.rank)

    def _exact(
        self,
        program: Callable[..., list[Tensor]],
        inputs: Sequence[Sequence[Tensor]],
        grads: Sequence[Tensor],
        rank: int,
    ) -> tuple[Tensor, ...]:
        """This rank's exact results. ``inputs`` has every rank's tensor for each argument of ``program``."""
        differentiates = self.direction != "forward"
        floats = [[t.detach().float().requires_grad_(differentiates) for t in each] for each in inputs]
        outs = program(*floats)
        exact = [outs[rank]] if self.direction != "backward" else []
        if differentiates:
            if self.bench.same_grad_on_all_ranks:  # one result, which every rank has
                outs, grads = [outs[rank]], [grads[rank]]
            exact += torch.autograd.grad(outs, [each[rank] for each in floats], [g.float() for g in grads])
        return tuple(t.detach().to(self.dtype) for t in exact)

    def _sent(self, rank: int) -> tuple[Tensor, Tensor]:
        """(a rank's input to the collective alone, the gradient of its output)."""
        size, bench = self.size, self.bench
        shape = bench.x_shape(size, self.num_ranks) if bench.gathers else (*size.lead, size.n)
        got = bench.exchanged([torch.empty(shape, device="meta")] * self.num_ranks)[rank]
        grad_rank = 0 if bench.same_grad_on_all_ranks else rank
        return self._random_integers(shape, rank, 6), self._random_integers(got.shape, grad_rank, 7)

    def _integers(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """x, w and the gradient of the result, of any rank."""
        size, bench = self.size, self.bench
        x_shape, w_shape = bench.x_shape(size, self.num_ranks), (size.k, size.n)
        x = self._random_integers(x_shape, rank, 0)
        w = self._random_integers(w_shape, rank, 1)
        # w is mostly zeros, so that sums over K, N and ranks stay below 256, bfloat16's exact range.
        w *= self._random(w_shape, rank, 5) < 64 / max(w_shape)
        meta = [torch.empty(shape, device="meta") for shape in (x_shape, w_shape)]
        outs = bench.program([meta[0]] * self.num_ranks, [meta[1]] * self.num_ranks)
        grad = self._random_integers(outs[rank].shape, 0 if bench.same_grad_on_all_ranks else rank, 2)
        return x, w, grad

    def _random_integers(self, shape: Sequence[int], rank: int, which: int) -> Tensor:
        return self._random(shape, rank, which).mul_(3).floor_().sub_(1).to(self.dtype)

    def _random(self, shape: Sequence[int], rank: int, which: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(8 * rank + which)
        return torch.rand(tuple(shape), generator=generator, device=self.device)
