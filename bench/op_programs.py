"""The five ops as users write them today, and their oracles. [rows, K] @ [K, N] is the matmul of each."""

from __future__ import annotations

from torch import Tensor

from fusedcomm.bench import baselines
from fusedcomm.bench.op_bench import OpBench
from fusedcomm.ops import whole_group


class MatmulAllToAll(whole_group.MatmulAllToAll, OpBench):
    """matmul, pack, all_to_all_single."""

    def collective(self, t: Tensor) -> Tensor:
        return baselines.unpacked(baselines.all_to_all(baselines.packed(t, -1)), t.ndim - 2)


class AllToAllMatmul(whole_group.AllToAllMatmul, OpBench):
    """all_to_all_single, unpack, matmul: the way back from attention in Ulysses."""

    def collective(self, t: Tensor) -> Tensor:
        return baselines.unpacked(baselines.all_to_all(baselines.packed(t, -2)), t.ndim - 1)


class AllGatherMatmul(whole_group.AllGatherMatmul, OpBench):
    """all_gather_into_tensor, matmul."""

    def collective(self, t: Tensor) -> Tensor:
        return baselines.unpacked(baselines.all_gather(t), t.ndim - 2)


class MatmulReduceScatter(whole_group.MatmulReduceScatter, OpBench):
    """matmul, reduce_scatter_tensor."""

    def collective(self, t: Tensor) -> Tensor:
        return baselines.reduce_scatter(baselines.packed(t, -2))


class MatmulAllReduce(whole_group.MatmulAllReduce, OpBench):
    """matmul, all_reduce in place."""

    def collective(self, t: Tensor) -> Tensor:
        return baselines.all_reduce(t)


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
