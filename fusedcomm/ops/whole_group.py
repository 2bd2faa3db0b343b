"""The five ops as programs of a whole group in one process: from all ranks' inputs to every rank's result.

They are oracles that trust no communication. [rows, K] @ [K, N] is the matmul of each.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusedcomm.geometry import shapes
from fusedcomm.geometry.cut import EVEN, Splits
from fusedcomm.geometry.exchange import Exchange


@dataclass(frozen=True)
class MatmulSize:
    """The local matmul: [rows, K] @ [K, N], or [batch, rows / batch, K] @ [K, N]."""

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


class WholeGroup(abc.ABC):
    """One op, as the program of all its ranks."""

    op: str
    kind: str  # the collective: "all_to_all", "all_gather", "reduce_scatter", "all_reduce"
    cut: str | None  # what the group divides: "rows", "k" or "n"
    gathers = False  # the collective comes before the matmul
    gather_dim: int | None = None  # the dim of x of which each rank has a part of its own
    scatters: str | None = None  # "rows" of x or "columns" of w, of whose product each rank gets a part
    same_grad_on_all_ranks = False  # and the same bias: the result is one that all ranks have

    @property
    def can_be_uneven(self) -> bool:
        return self.gather_dim is not None or self.scatters is not None

    def x_shape(self, size: MatmulSize, num_ranks: int) -> tuple[int, ...]:
        """The shape of each rank's x; w is [K, N]."""
        return (*size.lead, size.k)

    @abc.abstractmethod
    def dims(self, x: Tensor) -> tuple[int, ...]:
        """The op's dims, which follow x and w."""

    @abc.abstractmethod
    def exchange(self, x: Tensor, w: Tensor, num_ranks: int, splits: Splits = EVEN) -> Exchange:
        """The geometry of the op's call."""

    @abc.abstractmethod
    def exchanged(self, ts: Sequence[Tensor]) -> list[Tensor]:
        """Every rank's result of the collective from every rank's tensor."""

    def program(self, xs: Sequence[Tensor], ws: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> list[Tensor]:
        """Every rank's result from every rank's inputs."""
        if self.gathers:
            return _biased([torch.matmul(x, w) for x, w in zip(self.exchanged(xs), ws, strict=True)], biases)
        ys = [torch.matmul(x, w) for x, w in zip(xs, ws, strict=True)]
        if self.kind == "all_to_all":
            return self.exchanged(_biased(ys, biases))
        return _biased(self.exchanged(ys), biases)


def _biased(ys: list[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    return [y + bias for y, bias in zip(ys, biases, strict=True)] if biases else ys


class MatmulAllToAll(WholeGroup):
    """x [rows, K], w [K, N] on every rank; columns of y are scattered, rows gathered."""

    op = "matmul_all_to_all"
    kind = "all_to_all"
    cut = "n"
    gather_dim = -2
    scatters = "columns"

    def dims(self, x: Tensor) -> tuple[int, ...]:
        return x.ndim - 2, x.ndim - 1

    def exchange(self, x: Tensor, w: Tensor, num_ranks: int, splits: Splits = EVEN) -> Exchange:
        gather_dim, scatter_dim = self.dims(x)
        return shapes.matmul_all_to_all(x.shape, w.shape, None, gather_dim, scatter_dim, num_ranks, splits)

    def exchanged(self, ts: Sequence[Tensor]) -> list[Tensor]:
        blocks = [t.chunk(len(ts), -1) for t in ts]
        return [torch.cat([each[rank] for each in blocks], -2) for rank in range(len(ts))]


class AllToAllMatmul(WholeGroup):
    """x [R * rows, K / R] on every rank, exchanged [rows, K], w [K, N]; rows of x are scattered, columns gathered."""

    op = "all_to_all_matmul"
    kind = "all_to_all"
    cut = "k"
    gathers = True
    gather_dim = -1
    scatters = "rows"

    def x_shape(self, size: MatmulSize, num_ranks: int) -> tuple[int, ...]:
        *batch, rows = size.lead
        return (*batch, rows * num_ranks, size.k // num_ranks)

    def dims(self, x: Tensor) -> tuple[int, ...]:
        return x.ndim - 1, x.ndim - 2

    def exchange(self, x: Tensor, w: Tensor, num_ranks: int, splits: Splits = EVEN) -> Exchange:
        gather_dim, scatter_dim = self.dims(x)
        return shapes.all_to_all_matmul(x.shape, w.shape, gather_dim, scatter_dim, num_ranks, splits)

    def exchanged(self, ts: Sequence[Tensor]) -> list[Tensor]:
        blocks = [t.chunk(len(ts), -2) for t in ts]
        return [torch.cat([each[rank] for each in blocks], -1) for rank in range(len(ts))]


class AllGatherMatmul(WholeGroup):
    """x [rows / R, K] on every rank, gathered [rows, K], w [K, N]."""

    op = "all_gather_matmul"
    kind = "all_gather"
    cut = "rows"
    gathers = True
    gather_dim = -2

    def x_shape(self, size: MatmulSize, num_ranks: int) -> tuple[int, ...]:
        *batch, rows = size.lead
        return (*batch, rows // num_ranks, size.k)

    def dims(self, x: Tensor) -> tuple[int, ...]:
        return (x.ndim - 2,)

    def exchange(self, x: Tensor, w: Tensor, num_ranks: int, splits: Splits = EVEN) -> Exchange:
        [gather_dim] = self.dims(x)
        return shapes.all_gather_matmul(x.shape, [w.shape], gather_dim, num_ranks, splits)

    def exchanged(self, ts: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(ts), -2)] * len(ts)


class MatmulReduceScatter(WholeGroup):
    """x [rows, K], w [K, N] on every rank, y [rows / R, N] the sum of every rank's x @ w."""

    op = "matmul_reduce_scatter"
    kind = "reduce_scatter"
    cut = "rows"
    scatters = "rows"

    def dims(self, x: Tensor) -> tuple[int, ...]:
        return (x.ndim - 2,)

    def exchange(self, x: Tensor, w: Tensor, num_ranks: int, splits: Splits = EVEN) -> Exchange:
        [scatter_dim] = self.dims(x)
        return shapes.matmul_reduce_scatter(x.shape, w.shape, "sum", scatter_dim, num_ranks, splits)

    def exchanged(self, ts: Sequence[Tensor]) -> list[Tensor]:
        return list(torch.stack(list(ts)).sum(0).chunk(len(ts), -2))


class MatmulAllReduce(WholeGroup):
    """x [rows, K], w [K, N] on every rank, y [rows, N] the sum of every rank's x @ w."""

    op = "matmul_all_reduce"
    kind = "all_reduce"
    cut = None
    same_grad_on_all_ranks = True

    def dims(self, x: Tensor) -> tuple[int, ...]:
        return ()

    def exchange(self, x: Tensor, w: Tensor, num_ranks: int, splits: Splits = EVEN) -> Exchange:
        return shapes.matmul_all_reduce(x.shape, w.shape, "sum", num_ranks)

    def exchanged(self, ts: Sequence[Tensor]) -> list[Tensor]:
        return [torch.stack(list(ts)).sum(0)] * len(ts)


PROGRAMS: dict[str, WholeGroup] = {
    program.op: program
    for program in (
        MatmulAllToAll(),
        AllToAllMatmul(),
        AllGatherMatmul(),
        MatmulReduceScatter(),
        MatmulAllReduce(),
    )
}
