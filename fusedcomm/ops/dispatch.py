"""From the arguments of a call to its algorithm."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fusedcomm.memory import dumps, exits, flight_recorder, group
from fusedcomm.memory.captures import WARM_UP, is_capturing
from fusedcomm.memory.group_member import Member, WorkspaceUnavailable, on_device
from fusedcomm.memory.members import member
from fusedcomm.memory.topology import tf32_allowed
from fusedcomm.memory.workspace import Call
from fusedcomm.ops import call_check, proof
from fusedcomm.ops.call_arguments import Arguments
from fusedcomm.ops.prepared import Seen
from fusedcomm.ops.table import OpSpec
from fusedcomm.plan import planner
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.plan.geometry.shapes import check_out
from fusedcomm.plan.planner import Plan


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


def run(spec: OpSpec, args: Arguments, seen: Seen | None = None) -> list[Tensor]:
    """Check a call, plan it, meet the other ranks, and run its algorithm. The exchanged x of a gather comes last.

    ``seen`` gets the call, for one that is made again.
    """
    exchange, operands, x = spec.exchange_of(args), spec.operands(args), args.x
    if args.out is not None:
        check_out(args.out, x, spec.result_shapes(args)[0])
    call = Call(spec.name, 0, exchange, group_name=args.group_name)
    with on_device(x.device):
        if exchange.group_size == 1:
            group.check_size(1, args.group_name)
            return results(spec, x, spec.algorithms["unfused"](call, *operands))
        dumps.arm()
        exits.arm()
        about = spec.name, args.group_name, x.device, exchange, x.dtype
        with dumps.on_failure(), flight_recorder.Record(*about) as record:
            plan, ours = prepare(spec.name, exchange, x.dtype, x.device, args.group_name, record)
            assert ours is not None
            if plan.has_workspace:
                call.fingerprint = fingerprint_of(spec.name, exchange.key, x.dtype, plan.num_rounds)
            call.num_rounds, call.backend_sums = plan.num_rounds, ours.topology.backend_sums
            kernels = None
            if x.is_cuda and plan.algorithm == "fused":
                kernels = (spec.name, exchange.key, x.dtype, tf32_allowed(), *_layouts(operands))
            with ours.lock:
                name = _begin(spec, args, call, plan, ours, record, kernels)
                if call.memory is not None:
                    made = spec.algorithms[name](call, *operands)
                    if is_capturing(ours.device):  # replays will move the epoch that plans count on the host
                        ours.prepare_anew()
                    elif seen is not None:
                        seen.call, seen.kind = call, record.kind()
                    if kernels is not None and call.ran.schedule.can_be_captured:
                        ours.loaded.add((kernels, call.memory.slot_bytes))
                    return results(spec, x, made)
            # without the lock, as gloo's waits may be long
            return results(spec, x, spec.algorithms[name](call, *operands))


def _begin(
    spec: OpSpec,
    args: Arguments,
    call: Call,
    plan: Plan,
    ours: Member,
    record: flight_recorder.Record,
    kernels: tuple[Any, ...] | None,
) -> str:
    """The collective prologue of a call: compare it, prove its algorithm, allocate. Returns the algorithm's name.

    ``kernels``: the key of a fused call's kernels on a GPU, beside the size of a slot. Call and record get the
    workspace. A call that fails here has sent nothing, so the next one takes its number.
    """
    assert record.dtype is not None and record.exchange is not None  # it is that of an op
    ours.count(record, plan.algorithm)
    try:
        if ours.topology.check:
            bias = args.biases if spec.takes_lists else args.bias
            call_check.same_call(record, plan, ours, call.fingerprint, bias=bias, by_product=args.return_gathered)
        record.state = flight_recorder.RUNNING
        uneven = record.exchange.cut is not None
        if proof.is_unproved(plan, record.dtype, ours, uneven):
            ours.enter(spec.name, call.fingerprint)
            proof.prove(record.op, plan.algorithm, spec.algorithms, record.dtype, ours, uneven)
            plan = planner.plan(record.op, record.exchange, record.dtype, ours)  # which a failed proof has changed
            record.algorithm = plan.algorithm
        if not plan.has_workspace:
            return plan.algorithm
        by_host = plan.algorithm == "chunked"
        workspace = ours.workspace_for(plan.slot_bytes, spec.name, call.fingerprint, by_host=by_host)
        if is_capturing(ours.device) and (kernels, workspace.slot_bytes) not in ours.loaded:
            raise RuntimeError(f"{record.op}: its kernels cannot be loaded while a CUDA graph is captured; {WARM_UP}")
        record.runs_on(workspace)
        call.memory = workspace
        return plan.algorithm
    except WorkspaceUnavailable as error:
        record.algorithm = "unfused"
        planner.log_fallback(record.op, str(error))
        return "unfused"
    except RuntimeError:  # a PeerError among others
        ours.num_calls -= 1
        raise


def results(spec: OpSpec, x: Tensor, made: Any) -> list[Tensor]:
    """The results in a row. The exchanged x is empty where it was not asked for, and never x itself."""
    if not spec.gathers:
        return [made]
    outs, gathered = made
    if gathered is None:
        return [*outs, x.new_empty(0)]
    return [*outs, gathered.clone() if gathered.data_ptr() == x.data_ptr() else gathered]


def _layouts(operands: tuple[Any, ...]) -> list[Any]:
    """The facts that kernels are specialised on: shape, strides and alignment of tensors, and other options."""
    leaves = pytree.tree_leaves(operands)
    return [(t.shape, t.stride(), t.data_ptr() % 16) if isinstance(t, Tensor) else t for t in leaves]


def fingerprint_of(*facts: Any) -> int:
    """24 bits, never 0, equal on ranks that make the same call."""
    return zlib.crc32(repr(facts).encode()) & 0xFFFFFF or 1
