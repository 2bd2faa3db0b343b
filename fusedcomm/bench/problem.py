"""What a bench of one op says, and one rank's data of one size of it."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from fusedcomm.bench.timing import difference

ROOF, BASELINE, AUTO = "roof", "baseline", "auto"
Variants = Mapping[str, Callable[[], tuple[Tensor, ...]]]
RESULTS = ("result", "grad x", "grad w")


@dataclass(frozen=True)
class Size:
    """Of the local matmul: [rows, K] @ [K, N], or [batch, rows / batch, K] @ [K, N]."""

    rows: int
    k: int
    n: int
    batch: int = 0

    @property
    def lead(self) -> tuple[int, ...]:
        return (self.batch, self.rows // self.batch) if self.batch else (self.rows,)

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.k * self.n


class OpBench(abc.ABC):
    """One op, and the program of today that it equals; what measures it does the rest."""

    op: str
    kind: str  # the collective: "all_to_all", "all_gather", "reduce_scatter", "all_reduce"
    cut: str | None  # of "rows", "k", "n": what the group divides
    gathers = False  # the collective comes before the matmul
    same_grad_on_all_ranks = False

    @property
    def k(self) -> tuple[int, ...]:
        """Much to send per flop and little: a push sends rows x N, so small K; a gather sends rows x K, so small N."""
        return (2048, 4096) if self.gathers else (256, 512, 1024, 2048)

    @property
    def n(self) -> tuple[int, ...]:
        return (256, 512, 1024, 2048) if self.gathers else (2048, 4096)

    def x_shape(self, size: Size, num_ranks: int) -> tuple[int, ...]:
        """Of every rank; w is [K, N]."""
        return (*size.lead, size.k)

    @abc.abstractmethod
    def dims(self, x: Tensor) -> tuple[int, ...]:
        """The op's dims, which follow x and w."""

    @abc.abstractmethod
    def collective(self, t: Tensor) -> Tensor:
        """What users write for the exchange, with the layout copies that it needs; differentiable."""

    @abc.abstractmethod
    def program(self, xs: Sequence[Tensor], ws: Sequence[Tensor]) -> list[Tensor]:
        """Every rank's result from every rank's inputs, in one process: the oracle."""

    def baseline(self, x: Tensor, w: Tensor) -> Tensor:
        """What users write today, differentiable."""
        return torch.matmul(self.collective(x), w) if self.gathers else self.collective(torch.matmul(x, w))

    def ours(self, x: Tensor, w: Tensor) -> Tensor:
        return getattr(fusedcomm, self.op)(x, w, *self.dims(x))

    def divisible(self, size: Size, num_ranks: int) -> Size:
        """A few rows more, where the group or the batch needs them."""
        return replace(size, rows=size.rows + -size.rows % self._row_step(size, num_ranks))

    def ragged(self, size: Size, num_ranks: int) -> list[Size]:
        """Neighbours of an aligned size: more rows, fewer K, fewer N, and all of it. Odd where the group allows it."""
        rows = size.rows + self._row_step(size, num_ranks)
        k = size.k - (num_ranks if self.cut == "k" else 3)
        n = size.n - (num_ranks if self.cut == "n" else 3)
        changes = ({"rows": rows}, {"k": k}, {"n": n}, {"rows": rows, "k": k, "n": n})
        return [replace(size, **change) for change in changes]

    def _row_step(self, size: Size, num_ranks: int) -> int:
        return max(size.batch, 1) * (num_ranks if self.cut == "rows" else 1)


class RankData:
    """One rank's inputs of a problem and the ways to use them.

    They start as integers, so few and small that products and sums are exact in every dtype and order.
    """

    def __init__(
        self, bench: OpBench, size: Size, dtype: torch.dtype, device: torch.device, backward: bool = False
    ) -> None:
        self.bench, self.size, self.dtype, self.device, self.backward = bench, size, dtype, device, backward
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.x, self.w, self.grad = self._integers(self.rank)
        # of the matmul alone: x itself, or what would have been gathered
        shape = (*size.lead, size.k)
        self.local_x = self.x if self.x.shape == shape else self._random_integers(shape, self.rank, 3)
        self.local_grad = self._random_integers((*size.lead, size.n), self.rank, 4)

    def randomize(self) -> None:
        """Inputs for timing, after the checks: GPUs draw less power, so run faster, on integers."""
        self.__dict__.pop("_oracle", None)
        generator = torch.Generator(self.device).manual_seed(self.rank)
        with torch.no_grad():
            for t in (self.x, self.w, self.grad, self.local_x, self.local_grad):
                t.normal_(generator=generator)

    def plan(self) -> fusedcomm.Plan:
        return fusedcomm.explain(self.bench.op, self.x, self.w, *self.bench.dims(self.x), verbose=False)

    def variants(self) -> Variants:
        return {
            ROOF: self._variant(torch.matmul, self.local_x, self.local_grad),
            BASELINE: self._variant(self.bench.baseline, self.x, self.grad),
            AUTO: self._variant(self.bench.ours, self.x, self.grad),
        }

    def forced(self, algorithm: str) -> Callable[[], tuple[Tensor, ...]]:
        def call(x: Tensor, w: Tensor) -> Tensor:
            with fusedcomm.force_algorithm(algorithm):
                return self.bench.ours(x, w)

        return self._variant(call, self.x, self.grad)

    def check(self, name: str, results: tuple[Tensor, ...]) -> str | None:
        if name == ROOF:
            expected = self._exact([self.local_x], [self.w], [self.local_grad], 0, lambda xs, ws: [xs[0] @ ws[0]])
        else:
            expected = self._oracle
        for what, result, must in zip(RESULTS, results, expected, strict=False):
            if wrong := difference(result, must):
                return f"{what}: {wrong}"
        return None

    def _variant(
        self, fn: Callable[[Tensor, Tensor], Tensor], x: Tensor, grad: Tensor
    ) -> Callable[[], tuple[Tensor, ...]]:
        if not self.backward:
            return lambda: (fn(x, self.w),)
        x.requires_grad_()
        self.w.requires_grad_()

        def call() -> tuple[Tensor, ...]:
            y = fn(x, self.w)
            return y, *torch.autograd.grad(y, (x, self.w), grad)

        return call

    @cached_property
    def _oracle(self) -> tuple[Tensor, ...]:
        """This rank's results from all ranks' inputs, made here: no communication to trust."""
        xs, ws, grads = zip(*(self._integers(rank) for rank in range(self.num_ranks)), strict=True)
        return self._exact(xs, ws, grads, self.rank, self.bench.program)

    def _exact(
        self,
        xs: Sequence[Tensor],
        ws: Sequence[Tensor],
        grads: Sequence[Tensor],
        rank: int,
        program: Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]],
    ) -> tuple[Tensor, ...]:
        xs = [x.detach().float().requires_grad_(self.backward) for x in xs]
        ws = [w.detach().float().requires_grad_(self.backward) for w in ws]
        outs = program(xs, ws)
        exact = [outs[rank]]
        if self.backward:
            if self.bench.same_grad_on_all_ranks:  # one result, which every rank has
                outs, grads = [outs[rank]], [grads[rank]]
            exact += torch.autograd.grad(outs, (xs[rank], ws[rank]), [g.float() for g in grads])
        return tuple(t.detach().to(self.dtype) for t in exact)

    def _integers(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """x, w and the gradient of the result, of any rank."""
        size, bench = self.size, self.bench
        x_shape, w_shape = bench.x_shape(size, self.num_ranks), (size.k, size.n)
        x = self._random_integers(x_shape, rank, 0)
        w = self._random_integers(w_shape, rank, 1)
        # Mostly zeros: sums over K, N and ranks stay below 256, what bfloat16 counts to.
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
