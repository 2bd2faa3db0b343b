"""The five ops as users write them today, and their oracles. [rows, K] @ [K, N] is the matmul of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedcomm.bench import baselines
from fusedcomm.bench.op_bench import MatmulSize, OpBench


class MatmulAllToAll(OpBench):
    """matmul, pack, all_to_all_single.

    x [rows, K], w [K, N] on every rank; columns of y are scattered, rows gathered.
    """

    op = "matmul_all_to_all"
    kind = "all_to_all"
    cut = "n"

    def dims(self, x: Tensor) -> tuple[int, ...]:
        return x.ndim - 2, x.ndim - 1

    def collective(self, t: Tensor) -> Tensor:
        return baselines.unpacked(baselines.all_to_all(baselines.packed(t, -1)), t.ndim - 2)

    def exchanged(self, ts: Sequence[Tensor]) -> list[Tensor]:
        blocks = [t.chunk(len(ts), -1) for t in ts]
        return [torch.cat([each[rank] for each in blocks], -2) for rank in range(len(ts))]


class AllToAllMatmul(OpBench):
    """all_to_all_single, unpack, matmul: the way back from attention in Ulysses.

    x [R * rows, K / R] on every rank, exchanged [rows, K], w [K, N]; rows of x are scattered, columns gathered.
    """

    op = "all_to_all_matmul"
    kind = "all_to_all"
    cut = "k"
    gathers = True

    def x_shape(self, size: MatmulSize, num_ranks: int) -> tuple[int, ...]:
        *batch, rows = size.lead
        return (*batch, rows * num_ranks, size.k // num_ranks)

    def dims(self, x: Tensor) -> tuple[int, ...]:
        return x.ndim - 1, x.ndim - 2

    def collective(self, t: Tensor) -> Tensor:
        return baselines.unpacked(baselines.all_to_all(baselines.packed(t, -2)), t.ndim - 1)

    def exchanged(self, ts: Sequence[Tensor]) -> list[Tensor]:
        blocks = [t.chunk(len(ts), -2) for t in ts]
        return [torch.cat([each[rank] for each in blocks], -1) for rank in range(len(ts))]


class AllGatherMatmul(OpBench):
    """all_gather_into_tensor, matmul.

    x [rows / R, K] on every rank, gathered [rows, K], w [K, N].
    """

    op = "all_gather_matmul"
    kind = "all_gather"
    cut = "rows"
    gathers = True

    def x_shape(self, size: MatmulSize, num_ranks: int) -> tuple[int, ...]:
        *batch, rows = size.lead
        return (*batch, rows // num_ranks, size.k)

    def dims(self, x: Tensor) -> tuple[int, ...]:
        return (x.ndim - 2,)

    def collective(self, t: Tensor) -> Tensor:
        return baselines.unpacked(baselines.all_gather(t), t.ndim - 2)

    def exchanged(self, ts: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(ts), -2)] * len(ts)


class MatmulReduceScatter(OpBench):
    """matmul, reduce_scatter_tensor.

    x [rows, K], w [K, N] on every rank, y [rows / R, N] the sum of every rank's x @ w.
    """

    op = "matmul_reduce_scatter"
    kind = "reduce_scatter"
    cut = "rows"

    def dims(self, x: Tensor) -> tuple[int, ...]:
        return (x.ndim - 2,)

    def collective(self, t: Tensor) -> Tensor:
        return baselines.reduce_scatter(baselines.packed(t, -2))

    def exchanged(self, ts: Sequence[Tensor]) -> list[Tensor]:
        return list(torch.stack(list(ts)).sum(0).chunk(len(ts), -2))


class MatmulAllReduce(OpBench):
    """matmul, all_reduce in place.

    x [rows, K], w [K, N] on every rank, y [rows, N] the sum of every rank's x @ w.
    """

    op = "matmul_all_reduce"
    kind = "all_reduce"
    cut = None
    same_grad_on_all_ranks = True

    def dims(self, x: Tensor) -> tuple[int, ...]:
        return ()

    def collective(self, t: Tensor) -> Tensor:
        return baselines.all_reduce(t)

    def exchanged(self, ts: Sequence[Tensor]) -> list[Tensor]:
        return [torch.stack(list(ts)).sum(0)] * len(ts)


PROGRAMS: dict[str, OpBench] = {
    program.op: program
    for program in (
        MatmulAllToAll(),
        AllToAllMatmul(),
        AllGatherMatmul(),
        MatmulReduceScatter(),
        MatmulAllReduce(),
    )
}
