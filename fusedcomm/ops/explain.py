"""The plan of a call, and the reason for it, without a run."""

import inspect
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusedcomm.memory.group import resolve
from fusedcomm.ops import moe, routed
from fusedcomm.ops.all_gather_matmul import lists_of
from fusedcomm.ops.arguments import check_types, reduce_op_name
from fusedcomm.ops.call_arguments import Arguments
from fusedcomm.ops.dispatch import prepare
from fusedcomm.ops.splits import splits_of
from fusedcomm.ops.table import OPS, OpSpec
from fusedcomm.plan.call_plan import Plan

ROUTED = {
    each.__name__: each
    for each in (moe.moe_dispatch, moe.dispatch_grouped_matmul, moe.moe_combine, moe.grouped_matmul_combine)
}
_OPTIONS = ("out_shape", "gather_dim", "scatter_dim", "partial_bias", "residual", "norm_weight", "eps")
_SCALED = ("scale_x", "scale_w", "out_dtype", "use_fast_accum")
_SPLITS = ("gather_splits", "gather_size", "scatter_splits", "scatter_ranges")


def explain(op: str, *args: Any, **kwargs: Any) -> Plan:
    """Return how ``fusedcomm.<op>(*args, **kwargs)`` would run, and why, without running it.

    The arguments behind op are the call's. Tensors can be meta tensors (``torch.empty(..., device="meta")``): then the
    plan is that of the GPU if there is one, else of the CPU. The first call on a group is a collective, as the op's own
    is.

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
        return _routed_plan(op, *args, **kwargs)
    spec, given = arguments_of(op, *args, **kwargs)
    exchange, device = spec.exchange_of(given), _device(given.x)
    sent, multiplied = spec.sent_dtype(given), spec.multiplied(given, exchange)
    plan, ours = prepare(op, exchange, sent, device, given.group_name, multiplied=multiplied)
    kept = [] if ours is None else [*ours.plans.values()]
    return next((each for each in kept if each == plan and each.exchange == exchange), plan)


def _routed_plan(op: str, *args: Any, **kwargs: Any) -> Plan:
    with _UpToTheOp() as found, suppress(_Stopped):
        ROUTED[op](*args, **kwargs)
    return routed.plan_of(found.op, found.args, _device(found.args[0]))


class _Stopped(Exception):
    pass


class _UpToTheOp(TorchDispatchMode):
    """Checks of a public function run, its op does not."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fusedcomm":
            self.op, self.args = func.overloadpacket.__name__, args
            raise _Stopped
        return func(*args, **(kwargs or {}))


def _device(t: Tensor) -> torch.device:
    if t.device.type != "meta":
        return t.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def arguments_of(op: str, *args: Any, **kwargs: Any) -> tuple[OpSpec, Arguments]:
    """The op, and the arguments of ``fusedcomm.<op>(*args, **kwargs)``, whose types are checked."""
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
    spec, bound = OPS[op], inspect.signature(OPS[op].function).bind(*args, **kwargs)
    bound.apply_defaults()
    named = bound.arguments
    options = {name: named[name] for name in _OPTIONS if name in named}
    x, w, bias = named["x"], named.get("w", ()), named.get("bias")
    lists = spec.takes_lists or spec.is_plain
    of_scaled = {name: named[name] for name in _SCALED if name in named}
    check_types(x, w, bias, lists=lists, scaled=tuple(of_scaled.values())[:3], **options)
    group_size, group_name = resolve(named["group"])
    ws: Any = [None] if "bias" in spec.options else []
    biases: Any = [bias] * len(ws)
    if not spec.is_plain:
        ws, biases = lists_of(w, bias) if lists else ([w], [bias])
    gather_splits, gather_size, scatter_splits, scatter_ranges = (named.get(name) for name in _SPLITS)
    splits = splits_of(gather_splits, gather_size, scatter_splits, scatter_ranges, False, group_name).hashable
    options["reduce_op"] = reduce_op_name(named.get("reduce_op", "sum"))
    return spec, Arguments(x, ws, biases, group_size, group_name, splits, **options, **of_scaled)
