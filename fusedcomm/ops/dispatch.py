"""From a checked call to an algorithm: what the ops have in common."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fusedcomm import group, planner
from fusedcomm.exchange import Exchange
from fusedcomm.planner import Plan
from fusedcomm.registry import Member, WorkspaceUnavailable, member, on_device
from fusedcomm.topology import tf32_allowed
from fusedcomm.workspace import Call

lib = torch.library.Library("fusedcomm", "DEF")


def prepare(
    op: str, exchange: Exchange, dtype: torch.dtype, device: torch.device, group_name: str
) -> tuple[Plan, Member | None]:
    """The plan of a call and this rank's part in the group. The first call of a group is a collective."""
    group.check_size(exchange.group_size, group_name)
    ours = member(group_name, device) if exchange.group_size > 1 else None
    return planner.plan(op, exchange, dtype, ours), ours


def run(
    op: str, verb: str, exchange: Exchange, group_name: str, x: Tensor, *args: Any, unfused: Callable[[], Any]
) -> Any:
    """Plan a call and run it: the algorithm's ``verb(call, x, *args)``, or on all ranks alike ``unfused()``."""
    with on_device(x.device):
        plan, ours = prepare(op, exchange, x.dtype, x.device, group_name)
        if plan.algorithm == "unfused":
            return unfused()
        assert ours is not None
        name, loading = plan.algorithm, None
        if x.is_cuda and (name == "fused" or plan.reason != planner.FORCED):
            loading = (op, exchange.key, x.dtype, tf32_allowed(), *_layouts(x, *args))
            name = _loading(name, op, loading, ours)
        algorithm = importlib.import_module(f"fusedcomm.algorithms.{name}")
        fingerprint = fingerprint_of(op, exchange.key, x.dtype)
        with ours.lock:
            try:
                workspace = ours.workspace_for(plan.slot_bytes, op, fingerprint)
            except WorkspaceUnavailable as error:
                planner.log_fallback(op, str(error))
                return unfused()
            result = getattr(algorithm, verb)(Call(op, fingerprint, exchange, workspace), x, *args)
            if loading is not None and name == "fused":
                ours.loaded.add(loading)
            return result


def by_product(gathered: Tensor | None, x: Tensor) -> Tensor:
    """The second result of a gather op: an empty tensor where it was not asked for, and never x itself."""
    if gathered is None:
        return x.new_empty(0)
    return gathered.clone() if gathered.data_ptr() == x.data_ptr() else gathered


def _layouts(*args: Any) -> list[Any]:
    """What kernels are specialised on besides shapes."""
    leaves = pytree.tree_leaves(args)
    return [(t.shape, t.stride(), t.data_ptr() % 16) if isinstance(t, Tensor) else t for t in leaves]


def _loading(name: str, op: str, call: tuple[Any, ...], ours: Member) -> str:
    """The first call of each kind runs fused unless chunked is forced: that loads the kernels, which a capture cannot.

    chunked and fused keep the same protocol, so a rank for which it is the first one fits the others.
    """
    if call in ours.loaded or ours.topology.no_fused is not None:
        return name
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{op}: call it once with these shapes on every rank before a CUDA graph is captured")
    return "fused"


def register_autocast(op: str) -> None:
    """Under autocast the op takes its tensors in autocast's dtype, as torch.matmul does."""
    for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        torch.library.impl(lib, op, key)(_autocast(op, device_type, key))


def _autocast(op: str, device_type: str, key: str) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def cast(arg: Any) -> Any:
        if isinstance(arg, Tensor) and arg.is_floating_point() and arg.dtype != torch.float64:
            return arg.to(torch.get_autocast_dtype(device_type))
        return arg

    def call(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return getattr(torch.ops.fusedcomm, op)(*pytree.tree_map(cast, args))

    return call


def refuse_transforms(op: str) -> None:
    """torch.func's transforms have no rule for a call that other ranks take part in."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(f"fusedcomm.{op} does not work inside torch.func transforms: use torch.autograd")


def fingerprint_of(*facts: Any) -> int:
    """24 bits, never 0, equal on ranks that make the same call."""
    return zlib.crc32(repr(facts).encode()) & 0xFFFFFF or 1
