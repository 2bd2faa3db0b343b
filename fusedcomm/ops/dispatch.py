"""From a checked call to an algorithm: what the ops have in common."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fusedcomm.algorithms import planner
from fusedcomm.algorithms.planner import Plan
from fusedcomm.errors import PeerError
from fusedcomm.geometry.exchange import Exchange
from fusedcomm.geometry.shapes import check_out
from fusedcomm.ops import call_check
from fusedcomm.runtime import dumps, exits, flight_recorder, group
from fusedcomm.runtime.members import Member, WorkspaceUnavailable, member, on_device
from fusedcomm.runtime.topology import tf32_allowed
from fusedcomm.runtime.workspace import Call, Workspace


def prepare(
    op: str,
    exchange: Exchange,
    dtype: torch.dtype,
    device: torch.device,
    group_name: str,
    record: flight_recorder.Record | None = None,
) -> tuple[Plan, Member | None]:
    """The plan of a call and this rank's part in the group. The first call of a group is a collective."""
    group.check_size(exchange.group_size, group_name)
    ours = member(group_name, device, record) if exchange.group_size > 1 else None
    return planner.plan(op, exchange, dtype, ours), ours


def run(
    op: str,
    algorithms: Mapping[str, Callable[..., Any]],
    exchange: Exchange,
    group_name: str,
    x: Tensor,
    w: Any,
    bias: Any,
    *,
    unfused: Callable[[], Any],
    out: Tensor | None = None,
    **options: Any,
) -> Any:
    """Plan a call and run it: ``algorithms[name](call, x, w, bias, **options)``, or on all ranks alike ``unfused()``.

    ``w`` and ``bias`` are a tensor each, or lists. ``out`` is where an algorithm that takes it puts the result.
    """
    if out is not None:
        check_out(out, x, exchange.out_shape)
        options["out"], unfused = out, functools.partial(_copied, unfused, out)
    with on_device(x.device):
        if exchange.group_size == 1:
            group.check_size(1, group_name)
            return unfused()
        dumps.arm()
        exits.arm()
        with dumps.on_failure(), flight_recorder.Record(op, group_name, x.device, exchange, x.dtype) as record:
            plan, ours = prepare(op, exchange, x.dtype, x.device, group_name, record)
            assert ours is not None
            name, loading = plan.algorithm, None
            may_load = name == "fused" or (plan.reason != planner.FORCED and ours.topology.no_fused is None)
            if x.is_cuda and name != "unfused" and may_load:
                loading = (op, exchange.key, x.dtype, tf32_allowed(), *_layouts(x, w, bias, *options.values()))
                name = _loading(name, op, loading, ours)
            fingerprint = 0 if name == "unfused" else fingerprint_of(op, exchange.key, x.dtype)
            with ours.lock:
                gathers = options.get("return_gathered", False)
                workspace = _workspace_for(record, plan, ours, fingerprint, bias, by_product=gathers)
                if workspace is not None:
                    result = algorithms[name](Call(op, fingerprint, exchange, workspace), x, w, bias, **options)
                    if loading is not None and name == "fused":
                        ours.loaded.add(loading)
                    return result
            return unfused()  # without the lock, as gloo's waits may be long


def _workspace_for(
    record: flight_recorder.Record, plan: Plan, ours: Member, fingerprint: int, bias: Any, by_product: bool
) -> Workspace | None:
    """The workspace, or None if the call runs unfused. With FUSEDCOMM_CHECK all ranks compare the call first.

    A call that fails here has sent nothing, so the next one takes its number.
    """
    ours.count(record, plan.algorithm)
    try:
        if ours.topology.check:
            call_check.same_call(record, plan, ours, fingerprint, bias=bias, by_product=by_product)
        record.state = flight_recorder.RUNNING
        if plan.algorithm == "unfused":
            return None
        record.runs_on(ours.workspace_for(plan.slot_bytes, record.op, fingerprint))
    except WorkspaceUnavailable as error:
        record.algorithm = "unfused"
        planner.log_fallback(record.op, str(error))
    except PeerError:
        ours.num_calls -= 1
        raise
    return record.workspace


def _copied(unfused: Callable[[], Tensor], out: Tensor) -> Tensor:
    return out.copy_(unfused())


def by_product(gathered: Tensor | None, x: Tensor) -> Tensor:
    """The second result of a gather op: an empty tensor where it was not asked for, and never x itself."""
    if gathered is None:
        return x.new_empty(0)
    return gathered.clone() if gathered.data_ptr() == x.data_ptr() else gathered


def _layouts(*args: Any) -> list[Any]:
    """What kernels are specialised on: shape, strides and alignment of tensors, and other options."""
    leaves = pytree.tree_leaves(args)
    return [(t.shape, t.stride(), t.data_ptr() % 16) if isinstance(t, Tensor) else t for t in leaves]


def _loading(name: str, op: str, call: tuple[Any, ...], ours: Member) -> str:
    """The algorithm to run. The first call of a kind runs fused unless chunked is forced, as a capture loads no
    kernels.

    chunked and fused keep the same protocol, so a rank that makes its first call fits the others.
    """
    if call in ours.loaded:
        return name
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{op}: call it once with these shapes on every rank before a CUDA graph is captured")
    return "fused"


def fingerprint_of(*facts: Any) -> int:
    """24 bits, never 0, equal on ranks that make the same call."""
    return zlib.crc32(repr(facts).encode()) & 0xFFFFFF or 1
