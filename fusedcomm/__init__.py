"""Matmuls fused with their collectives, as torch ops. Importing this registers the ops and does nothing else."""

from fusedcomm.errors import PeerError, PeerMismatchError, PeerTimeoutError
from fusedcomm.explain import explain
from fusedcomm.ops.matmul_all_to_all import matmul_all_to_all
from fusedcomm.planner import Plan, force_algorithm
from fusedcomm.registry import close, reset, synchronize

__all__ = [
    "PeerError",
    "PeerMismatchError",
    "PeerTimeoutError",
    "Plan",
    "close",
    "explain",
    "force_algorithm",
    "matmul_all_to_all",
    "reset",
    "synchronize",
]
