"""From a checked call to an algorithm: what the ops have in common."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedcomm import group, planner
from fusedcomm.exchange import Exchange
from fusedcomm.planner import Plan
from fusedcomm.registry import Member, WorkspaceUnavailable, member

lib = torch.library.Library("fusedcomm", "DEF")


def prepare(
    op: str, exchange: Exchange, dtype: torch.dtype, device: torch.device, group_name: str
) -> tuple[Plan, Member | None]:
    """The plan of a call and this rank's part in the group. The first call of a group is a collective."""
    group.check_size(exchange.group_size, group_name)
    ours = member(group_name, device) if exchange.group_size > 1 else None
    return planner.plan(op, exchange, dtype, ours), ours


def push_matmul(
    op: str,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    exchange: Exchange,
    plan: Plan,
    ours: Member | None,
) -> Tensor | None:
    """Run a planned call that pushes a matmul's result. None: on all ranks alike, it is to be run unfused."""
    if plan.algorithm == "unfused":
        return None
    assert ours is not None
    fingerprint = fingerprint_of(op, exchange.shape, exchange.k, exchange.gather_dim, exchange.scatter_dim, x.dtype)
    name = plan.algorithm
    if x.is_cuda and (name == "fused" or plan.reason != planner.FORCED):
        name = _loading(name, op, (exchange, x.dtype, x.stride(), w.stride(), bias is None), ours)
    algorithm = importlib.import_module(f"fusedcomm.algorithms.{name}")
    with ours.lock:
        try:
            workspace = ours.workspace_for(plan.slot_bytes, op, fingerprint)
        except WorkspaceUnavailable as error:
            planner.log_fallback(op, str(error))
            return None
        return algorithm.push_matmul(x, w, bias, exchange, workspace, op, fingerprint)


def _loading(name: str, op: str, call: tuple[Any, ...], ours: Member) -> str:
    """The first call of each kind runs fused, whatever was planned: that loads the kernels, which a capture cannot.

    chunked and fused keep the same protocol, so a rank for which it is the first one fits the others.
    """
    if call in ours.loaded or ours.topology.no_fused is not None:
        return name
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{op}: call it once with these shapes on every rank before a CUDA graph is captured")
    ours.loaded.add(call)
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
            return getattr(torch.ops.fusedcomm, op)(*map(cast, args))

    return call


def fingerprint_of(*facts: Any) -> int:
    """24 bits, never 0, equal on ranks that make the same call."""
    return zlib.crc32(repr(facts).encode()) & 0xFFFFFF or 1
