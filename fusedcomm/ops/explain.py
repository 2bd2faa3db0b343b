"""The plan of a call, and the reason for it, without a run."""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from fusedcomm.ops import moe, routed
from fusedcomm.ops.call_arguments import Arguments
from fusedcomm.ops.dispatch import prepare
from fusedcomm.ops.library import Stopped, UpToTheOp
from fusedcomm.ops.table import OPS, OpSpec
from fusedcomm.plan.planner import Plan

ROUTED = {
    each.__name__: each
    for each in (moe.moe_dispatch, moe.dispatch_grouped_matmul, moe.moe_combine, moe.grouped_matmul_combine)
}


def explain(op: str, *args: Any, **kwargs: Any) -> Plan:
    """Return how ``fusedcomm.<op>(*args, **kwargs)`` would run, and why, without running it.

    The arguments behind op are the call's. Tensors can be meta tensors (``torch.empty(..., device="meta")``): then the
    plan is that of the GPU if there is one, else of the CPU; autocast casts none of them. The first call on a group is
    a collective, as the op's own is.

    Args:
        op: the name of an op.

    Returns:
        A `Plan`, equal on all ranks; it prints as one line. After such a call its `schedule` prints the steps of this
        rank, one a line.

    Raises:
        ValueError: op is no op, or an argument is not as the op takes it.
        TypeError: an argument is of another type than the op takes.
        PeerTimeoutError: a peer did not come to the first call on the group within ``FUSEDCOMM_TIMEOUT_S``.
        RuntimeError: `force_algorithm` with ``strict`` asks for an algorithm that cannot run.

    Example, on each of 2 ranks::

        x, w = torch.empty(64, 8, device="meta"), torch.empty(8, 6, device="meta")
        plan = fusedcomm.explain("matmul_all_reduce", x, w)
        assert plan.algorithm in ("unfused", "chunked", "fused", "pipelined") and plan.reason
    """
    if op in ROUTED:
        found = _up_to_the_op(ROUTED[op], *args, **kwargs)
        return routed.plan_of(found.op, found.args, _device(found.args[0]))
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
    spec, given = arguments_of(op, *args, **kwargs)
    exchange, device = spec.exchange_of(given), _device(given.x)
    sent, multiplied = spec.sent_dtype(given), spec.multiplied(given, exchange)
    plan, ours = prepare(op, exchange, sent, device, given.group_name, multiplied=multiplied)
    kept = [] if ours is None else [*ours.plans.values()]
    return next((each for each in kept if each == plan and each.exchange == exchange), plan)


def _up_to_the_op(function: Any, *args: Any, **kwargs: Any) -> UpToTheOp:
    with UpToTheOp() as found, suppress(Stopped):
        function(*args, **kwargs)
    return found


def _device(t: Tensor) -> torch.device:
    if t.device.type != "meta":
        return t.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def arguments_of(op: str, *args: Any, **kwargs: Any) -> tuple[OpSpec, Arguments]:
    """The op, and its arguments in the call ``fusedcomm.<op>(*args, **kwargs)``, which is checked but does not run."""
    found = _up_to_the_op(OPS[op].function, *args, **kwargs)
    return OPS[op], OPS[op].bind(found.args, **found.outs)
