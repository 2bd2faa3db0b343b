"""The five ops as users write them today, and their oracles. [rows, K] @ [K, N] is the matmul of each."""

from __future__ import annotations

from fusedcomm.bench.op_bench import OpBench
from fusedcomm.ops import whole_group


class MatmulAllToAll(whole_group.MatmulAllToAll, OpBench):
    """matmul, pack, all_to_all_single."""


class AllToAllMatmul(whole_group.AllToAllMatmul, OpBench):
    """all_to_all_single, unpack, matmul: the way back from attention in Ulysses."""


class AllGatherMatmul(whole_group.AllGatherMatmul, OpBench):
    """all_gather_into_tensor, matmul."""


class MatmulReduceScatter(whole_group.MatmulReduceScatter, OpBench):
    """matmul, reduce_scatter_tensor."""


class MatmulAllReduce(whole_group.MatmulAllReduce, OpBench):
    """matmul, all_reduce in place."""


_CLASSES = MatmulAllToAll, AllToAllMatmul, AllGatherMatmul, MatmulReduceScatter, MatmulAllReduce
PROGRAMS: dict[str, OpBench] = {each.op: each() for each in _CLASSES}
