"""The five ops as programs of a whole group in one process: from all ranks' inputs to every rank's result.

They are oracles that trust no communication. [rows, K] @ [K, N] is the matmul of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fusedcomm.ops import exchanges
from fusedcomm.ops.call_arguments import Arguments
from fusedcomm.plan.geometry.cut import EVEN, Splits
from fusedcomm.plan.geometry.exchange import Exchange


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


class WholeGroup:
    """One op, as the program of all its ranks."""

    op: str
    kind: str  # the collective: "all_to_all", "all_gather", "reduce_scatter", "all_reduce"
    cut: str | None  # the size that the group divides: "rows", "k" or "n"
    gathers = False  # the collective comes before the matmul
    gather_dim: int | None = None  # each rank has its own part of this dim of x, and of x @ w
    scatter_dim: int | None = None  # each rank gets a part of this dim of x, or of x @ w
    same_grad_on_all_ranks = False  # and the same bias: the result is one that all ranks have

    @property
    def can_be_uneven(self) -> bool:
        return self.gather_dim is not None or self.scatter_dim is not None

    def row_step(self, size: MatmulSize, num_ranks: int) -> int:
        return max(size.batch, 1) * (num_ranks if self.cut == "rows" else 1)

    def divisible(self, size: MatmulSize, num_ranks: int) -> MatmulSize:
        """The size, rounded up to multiples of the group and of the batch."""
        rows = size.rows + -size.rows % self.row_step(size, num_ranks)
        k = size.k + (-size.k % num_ranks if self.cut == "k" else 0)
        n = size.n + (-size.n % num_ranks if self.cut == "n" else 0)
        return replace(size, rows=rows, k=k, n=n)

    def x_shape(self, size: MatmulSize, num_ranks: int) -> tuple[int, ...]:
        """The shape of each rank's x; w is [K, N]."""
        shape = [*size.lead, size.k]
        if self.gathers and self.scatter_dim is not None:
            shape[self.scatter_dim] *= num_ranks
        if self.gathers and self.gather_dim is not None:
            shape[self.gather_dim] //= num_ranks
        return tuple(shape)

    def dims(self, x: Tensor) -> tuple[int, ...]:
        """The op's dims, which follow x and w."""
        return tuple(dim % x.ndim for dim in (self.gather_dim, self.scatter_dim) if dim is not None)

    def exchange(self, x: Tensor, w: Tensor, num_ranks: int, splits: Splits = EVEN) -> Exchange:
        """The geometry of the op's call."""
        args = Arguments(x, [w], [None], num_ranks, group_name="", splits=splits)
        args = args._replace(gather_dim=self.gather_dim or 0, scatter_dim=self.scatter_dim or 0)
        exchange: Exchange = getattr(exchanges, self.op)(args)
        return exchange

    def exchanged(self, ts: Sequence[Tensor]) -> list[Tensor]:
        """Every rank's result of the collective from every rank's tensor."""
        num_ranks = len(ts)
        if self.gather_dim is None:
            total = torch.stack(list(ts)).sum(0)
            return [total] * num_ranks if self.scatter_dim is None else list(total.chunk(num_ranks, self.scatter_dim))
        if self.scatter_dim is None:
            return [torch.cat(list(ts), self.gather_dim)] * num_ranks
        blocks = [t.chunk(num_ranks, self.scatter_dim) for t in ts]
        return [torch.cat([each[rank] for each in blocks], self.gather_dim) for rank in range(num_ranks)]

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

    op, kind, cut = "matmul_all_to_all", "all_to_all", "n"
    gather_dim, scatter_dim = -2, -1


class AllToAllMatmul(WholeGroup):
    """x [R * rows, K / R] on every rank, exchanged [rows, K], w [K, N]; rows of x are scattered, columns gathered."""

    op, kind, cut = "all_to_all_matmul", "all_to_all", "k"
    gathers, gather_dim, scatter_dim = True, -1, -2


class AllGatherMatmul(WholeGroup):
    """x [rows / R, K] on every rank, gathered [rows, K], w [K, N]."""

    op, kind, cut = "all_gather_matmul", "all_gather", "rows"
    gathers, gather_dim = True, -2


class MatmulReduceScatter(WholeGroup):
    """x [rows, K], w [K, N] on every rank, y [rows / R, N] the sum of every rank's x @ w."""

    op, kind, cut = "matmul_reduce_scatter", "reduce_scatter", "rows"
    scatter_dim = -2


class MatmulAllReduce(WholeGroup):
    """x [rows, K], w [K, N] on every rank, y [rows, N] the sum of every rank's x @ w."""

    op, kind, cut = "matmul_all_reduce", "all_reduce", None
    same_grad_on_all_ranks = True


PROGRAMS: dict[str, WholeGroup] = {
    program.op: program
    for program in (MatmulAllToAll(), AllToAllMatmul(), AllGatherMatmul(), MatmulReduceScatter(), MatmulAllReduce())
}
