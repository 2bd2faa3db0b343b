"""Matmuls fused with the collectives next to them, as PyTorch ops.

Importing this module registers the ops, and their lowerings once a program imports Inductor; it does nothing else.
Every op takes a group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
"""

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not Path(__file__).with_name("kernels").joinpath("__init__.py").exists():
    # A checkout, installed or not, has them beside this folder. Their parent on __path__ would hold this package too.
    for _name in ("kernels", "bench"):
        _spec = importlib.util.spec_from_file_location(
            f"fusedcomm.{_name}", Path(__file__).parents[1] / _name / "__init__.py"
        )
        sys.modules[f"fusedcomm.{_name}"] = globals()[_name] = importlib.util.module_from_spec(_spec)  # type: ignore

from fusedcomm.memory.captures import before_capture
from fusedcomm.memory.errors import PeerError, PeerMismatchError, PeerTimeoutError
from fusedcomm.memory.members import close, reset, synchronize
from fusedcomm.memory.nccl_options import nccl_options
from fusedcomm.ops import import_hooks, register, same_moves, tracing  # noqa: F401 the last three register
from fusedcomm.ops.all_gather_matmul import all_gather_matmul
from fusedcomm.ops.all_to_all_matmul import all_to_all_matmul
from fusedcomm.ops.explain import explain
from fusedcomm.ops.matmul_all_reduce import matmul_all_reduce
from fusedcomm.ops.matmul_all_to_all import matmul_all_to_all
from fusedcomm.ops.matmul_reduce_scatter import matmul_reduce_scatter
from fusedcomm.ops.moe import (
    dispatch_grouped_matmul,
    grouped_matmul_combine,
    moe_combine,
    moe_counts,
    moe_dispatch,
    moe_overflow,
)
from fusedcomm.ops.norms import all_reduce_norm, matmul_all_reduce_norm, matmul_reduce_scatter_norm
from fusedcomm.ops.plain import all_gather, all_reduce, all_to_all, reduce_scatter
from fusedcomm.ops.scaled import (
    quantize,
    scaled_all_gather_matmul,
    scaled_all_to_all_matmul,
    scaled_matmul_all_reduce,
    scaled_matmul_all_to_all,
    scaled_matmul_reduce_scatter,
)
from fusedcomm.ops.splits import replica_ranges
from fusedcomm.plan.forced import force_algorithm
from fusedcomm.plan.planner import Plan
from fusedcomm.redistribution.api import redistribute, redistribute_plan
from fusedcomm.run.device_to_host import DeviceToHost

if TYPE_CHECKING:
    from fusedcomm import inference, moe, nn, parallel

__version__ = "0.1.0"  # pyproject.toml reads it here

__all__ = [
    "DeviceToHost",
    "PeerError",
    "PeerMismatchError",
    "PeerTimeoutError",
    "Plan",
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "all_reduce_norm",
    "all_to_all",
    "all_to_all_matmul",
    "before_capture",
    "close",
    "dispatch_grouped_matmul",
    "explain",
    "force_algorithm",
    "grouped_matmul_combine",
    "inference",
    "matmul_all_reduce",
    "matmul_all_reduce_norm",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
    "matmul_reduce_scatter_norm",
    "moe",
    "moe_combine",
    "moe_counts",
    "moe_dispatch",
    "moe_overflow",
    "nccl_options",
    "nn",
    "parallel",
    "quantize",
    "redistribute",
    "redistribute_plan",
    "reduce_scatter",
    "replica_ranges",
    "reset",
    "scaled_all_gather_matmul",
    "scaled_all_to_all_matmul",
    "scaled_matmul_all_reduce",
    "scaled_matmul_all_to_all",
    "scaled_matmul_reduce_scatter",
    "synchronize",
]

_LATE = {
    name: f"fusedcomm.{name}" for name in ("inference", "moe", "nn", "parallel")
}  # DTensors take a second to import

import_hooks.install()


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return importlib.import_module(_LATE[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, without the submodules that importing them has bound here."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
