"""From a checked call to an algorithm: what the ops have in common."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fusedcomm.algorithms import fused, planner
from fusedcomm.algorithms.pieces import GroupCall
from fusedcomm.algorithms.planner import Plan
from fusedcomm.geometry.exchange import Exchange
from fusedcomm.geometry.shapes import check_out
from fusedcomm.ops import call_check, proof
from fusedcomm.runtime import dumps, exits, flight_recorder, group, tape
from fusedcomm.runtime.captures import WARM_UP, is_capturing
from fusedcomm.runtime.group_member import Member, WorkspaceUnavailable, on_device
from fusedcomm.runtime.members import member
from fusedcomm.runtime.topology import tf32_allowed
from fusedcomm.runtime.workspace import Call

Algorithms = Mapping[str, Callable[..., Any]]  # by name, those of an op
PREPARED = ("unfused",)  # the algorithms that tapes can hold


def prepare(
    op: str,
    exchange: Exchange,
    dtype: torch.dtype,
    device: torch.device,
    group_name: str,
    record: flight_recorder.Record | None = None,
) -> tuple[Plan, Member | None]:
    """The plan of a call and this rank's part in the group. The first call of a group is a collective."""
    pg = group.check_size(exchange.group_size, group_name)
    if exchange.cut is not None and exchange.cut.rank != pg.rank():
        raise ValueError(f"rank must be this process' rank in the group, {pg.rank()}, got {exchange.cut.rank}")
    ours = member(group_name, device, record) if exchange.group_size > 1 else None
    return planner.plan(op, exchange, dtype, ours), ours


def run(
    op: str,
    algorithms: Algorithms,
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
            fingerprint = fingerprint_of(op, exchange.key, x.dtype, plan.num_rounds) if plan.has_workspace else 0
            kernels = None
            if x.is_cuda and plan.algorithm == "fused":
                kernels = (op, exchange.key, x.dtype, tf32_allowed(), *_layouts(x, w, bias, *options.values()))
            with ours.lock:
                gathers = options.get("return_gathered", False)
                name = _begin(record, plan, ours, algorithms, fingerprint, kernels, bias=bias, by_product=gathers)
                if (recorder := tape.recorder()) is not None:
                    if name in PREPARED:
                        recorder.planned(record, record.workspace, fingerprint)
                    else:
                        recorder.give_up(f"{name} has no tape")
                if record.workspace is not None:
                    call = Call(op, fingerprint, exchange, record.workspace)
                    result = algorithms[name](call, x, w, bias, **options)
                    if kernels is not None and fused.loads_for_capture(call, x.dtype.itemsize):
                        ours.loaded.add((kernels, record.workspace.slot_bytes))
                    return result
            if name == "pipelined":  # without the lock, as gloo's waits may be long
                pieces = GroupCall(exchange, group.find(group_name), plan.num_rounds, ours.topology.backend_sums)
                return algorithms[name](pieces, x, w, bias, **options)
            return unfused()  # likewise


def _begin(
    record: flight_recorder.Record,
    plan: Plan,
    ours: Member,
    algorithms: Algorithms,
    fingerprint: int,
    kernels: tuple[Any, ...] | None,
    *,
    bias: Any,
    by_product: bool,
) -> str:
    """What ranks do together before a call: with FUSEDCOMM_CHECK they compare it, they prove its algorithm where it is
    new, and make its workspace, which the record has if the algorithm needs one.

    ``kernels``: what the kernels of a fused call on a GPU are specialised on, beside the size of a slot. Returns the
    algorithm's name. A call that fails here has sent nothing, so the next one takes its number.
    """
    assert record.dtype is not None and record.exchange is not None  # it is that of an op
    ours.count(record, plan.algorithm)
    try:
        if ours.topology.check:
            call_check.same_call(record, plan, ours, fingerprint, bias=bias, by_product=by_product)
        record.state = flight_recorder.RUNNING
        uneven = record.exchange.cut is not None
        if proof.is_unproved(plan, record.dtype, ours, uneven):
            ours.enter(record.op, fingerprint)
            proof.prove(record.op, plan.algorithm, algorithms, record.dtype, ours, uneven)
            plan = planner.plan(record.op, record.exchange, record.dtype, ours)  # which a failed proof has changed
            record.algorithm = plan.algorithm
        if not plan.has_workspace:
            return plan.algorithm
        by_host = plan.algorithm == "chunked"
        workspace = ours.workspace_for(plan.slot_bytes, record.op, fingerprint, by_host=by_host)
        if is_capturing(ours.device) and (kernels, workspace.slot_bytes) not in ours.loaded:
            raise RuntimeError(f"{record.op}: its kernels cannot be loaded while a CUDA graph is captured; {WARM_UP}")
        record.runs_on(workspace)
        return plan.algorithm
    except WorkspaceUnavailable as error:
        record.algorithm = "unfused"
        planner.log_fallback(record.op, str(error))
        return "unfused"
    except RuntimeError:  # a PeerError among others
        ours.num_calls -= 1
        raise


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


def fingerprint_of(*facts: Any) -> int:
    """24 bits, never 0, equal on ranks that make the same call."""
    return zlib.crc32(repr(facts).encode()) & 0xFFFFFF or 1
