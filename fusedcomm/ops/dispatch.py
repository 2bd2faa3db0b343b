"""From the arguments of a call to its plan, and to its run."""

from collections.abc import Hashable

import torch
from torch import Tensor

from fusedcomm.memory import dumps, exits, flight_recorder, group
from fusedcomm.memory.call_memory import CallMemory
from fusedcomm.memory.captures import WARM_UP, is_capturing, is_for_capture
from fusedcomm.memory.group_member import Member, WorkspaceUnavailable, on_device
from fusedcomm.memory.members import member
from fusedcomm.memory.topology import tf32_allowed
from fusedcomm.ops import call_check, proof
from fusedcomm.ops.call_arguments import Arguments
from fusedcomm.ops.prepared import Seen
from fusedcomm.ops.table import OpSpec
from fusedcomm.plan import planner
from fusedcomm.plan.builder import layout_of
from fusedcomm.plan.forced import Forced, force_algorithm
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.plan.planner import CALL, Plan
from fusedcomm.run import calls

How = tuple[str, str | None, Forced]  # the last arguments of `planner.plan`


def prepare(
    op: str,
    exchange: Exchange,
    dtype: torch.dtype,
    device: torch.device,
    group_name: str,
    record: flight_recorder.Record | None = None,
    key: Hashable = None,
    wire: str = CALL,
    multiplied: str | None = None,
    forced: Forced | None = None,
) -> tuple[Plan, Member | None]:
    """The plan of a call, kept under ``key`` or new, and this rank's Member. A group's first call is a collective."""
    pg = group.check_size(exchange.group_size, group_name)
    if exchange.cut is not None and exchange.cut.rank != pg.rank():
        raise ValueError(f"rank must be this process' rank in the group, {pg.rank()}, got {exchange.cut.rank}")
    ours = member(group_name, device, record) if exchange.group_size > 1 else None
    kept = None if ours is None else ours.plans.get(key)
    return kept or planner.plan(op, exchange, dtype, ours, wire, multiplied, forced), ours


def run(spec: OpSpec, args: Arguments, seen: Seen | None = None) -> list[Tensor]:
    """Check a call, plan it, meet the other ranks, and run its algorithm. The exchanged x of a gather comes last.

    ``seen`` gets the call, to prepare it.
    """
    exchange, x, dtype = spec.exchange_of(args), args.x, spec.sent_dtype(args)
    spec.check_outs(args)
    program = spec.program, *spec.operands(args)
    with on_device(x.device):
        if exchange.group_size == 1:
            plan, _ = prepare(spec.name, exchange, dtype, x.device, args.group_name)
            memory = CallMemory(0, 1, args.group_name, x.device)
            return _results(spec, args, calls.run(plan, memory, *program))
        dumps.arm()
        exits.arm()
        about = spec.name, args.group_name, x.device, exchange, dtype
        with dumps.on_failure(), flight_recorder.Record(*about) as record:
            kind = kind_of(spec, args)
            forced = force_algorithm.current  # once: another thread may change it
            if seen is not None:
                seen.forced = forced
            key = kind, forced, is_for_capture(x.device)
            how = args.wire, spec.multiplied(args, exchange), forced
            plan, ours = prepare(spec.name, exchange, dtype, x.device, args.group_name, record, key, *how)
            assert ours is not None
            with ours.lock:
                plan, memory = _begin(spec, args, plan, ours, record, kind, how)
                generation = ours.generation
                if plan.has_workspace:
                    ran = calls.run(plan, memory, *program)
                    if seen is not None and not is_capturing(ours.device):
                        seen.ran, seen.record = ran, record.kind()
                    if x.is_cuda and plan.schedule is not None and plan.schedule.can_be_captured:
                        ours.loaded.add(kind, memory.memory_facts().slot_bytes)
            if not plan.has_workspace:  # without the lock, as gloo's waits may be long
                with ours.in_order(spec.name, sends_nan=plan.algorithm == "pipelined"):
                    ran = calls.run(plan, memory, *program)
            ours.keep(key, plan, generation)
            return _results(spec, args, ran)


def _begin(
    spec: OpSpec, args: Arguments, plan: Plan, ours: Member, record: flight_recorder.Record, kind: Hashable, how: How
) -> tuple[Plan, CallMemory]:
    """The collective prologue of a call: compare it, prove its algorithm, allocate. Returns (plan to run, its memory).

    A call that fails here has sent nothing, so the next one takes its number.
    """
    assert record.dtype is not None and record.exchange is not None  # it is that of an op
    ours.count(record, plan.algorithm)
    try:
        if ours.topology.check:
            call_check.same_call(record, plan, ours, args)
        record.state = flight_recorder.RUNNING
        uneven = record.exchange.cut is not None
        while proof.is_unproved(plan, record.dtype, ours, uneven):
            ours.enter(spec.name, plan.fingerprint)
            proof.prove(record.op, plan.algorithm, record.dtype, ours, uneven)
            plan = planner.plan(record.op, record.exchange, record.dtype, ours, *how)  # by what it has found
            record.algorithm = plan.algorithm
        if not plan.has_workspace:
            return plan, ours.memory
        workspace = ours.workspace_for(plan.slot_bytes, spec.name, plan.fingerprint)
        if is_capturing(ours.device) and not ours.loaded.has(kind, workspace.slot_bytes):
            raise RuntimeError(f"{record.op}: its kernels cannot be loaded while a CUDA graph is captured; {WARM_UP}")
        record.runs_on(workspace)
        return plan, workspace
    except WorkspaceUnavailable as error:
        record.algorithm = "unfused"
        planner.log_fallback(record.op, str(error))
        return Plan(record.op, "unfused", str(error), exchange=record.exchange), ours.memory
    except RuntimeError:  # a PeerError among others
        ours.num_calls -= 1
        raise


def kind_of(spec: OpSpec, args: Arguments) -> Hashable:
    """The facts that plans and kernels depend on: shapes, strides and alignment of tensors, and other options."""
    made = args.out, args.residual_out
    tensors = args.x, *args.ws, *args.scales, *args.biases, args.partial_bias, args.residual, args.norm_weight, *made
    layouts = [None if t is None else layout_of(t) for t in tensors]
    shape = None if args.out_shape is None else tuple(args.out_shape)
    options = (
        args.splits,
        shape,
        args.gather_dim,
        args.scatter_dim,
        args.reduce_op,
        args.return_gathered,
        args.eps,
        args.wire,
        args.out_dtype,
        args.use_fast_accum,
        args.sends_scales,
    )
    return spec.name, *layouts, *options, args.x.is_cuda and tf32_allowed()


def _results(spec: OpSpec, args: Arguments, ran: calls.Ran) -> list[Tensor]:
    """[*results, exchanged x]; the exchanged x is empty unless asked for."""
    if not spec.gathers or args.return_gathered:
        return ran.returned
    return [*ran.returned, args.x.new_empty(0)]
