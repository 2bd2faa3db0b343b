"""What an op would do with given arguments, and why, without running it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedcomm.algorithms.planner import Plan
from fusedcomm.geometry.exchange import Exchange
from fusedcomm.ops import (
    all_gather_matmul,
    all_to_all_matmul,
    matmul_all_reduce,
    matmul_all_to_all,
    matmul_reduce_scatter,
)
from fusedcomm.ops.arguments import check_types, reduce_op_name
from fusedcomm.ops.dispatch import prepare
from fusedcomm.ops.splits import splits_of
from fusedcomm.runtime.group import resolve

_OPS = {
    module.OP: module
    for module in (
        matmul_all_to_all,
        all_to_all_matmul,
        all_gather_matmul,
        matmul_reduce_scatter,
        matmul_all_reduce,
    )
}


def explain(op: str, *args: Any, **kwargs: Any) -> Plan:
    """Return how ``fusedcomm.<op>(*args, **kwargs)`` would run, and why, without running it.

    The arguments behind op are those of the call. Tensors can be meta tensors (``torch.empty(..., device="meta")``):
    then the plan is that of the GPU if there is one, else of the CPU. The first call on a group is a collective, as the
    op's own is.

    Args:
        op: the name of one of the five ops.

    Returns:
        A `Plan`, equal on all ranks; it prints as one line.

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
    if op not in _OPS:
        raise ValueError(f"op must be one of {', '.join(_OPS)}, got {op!r}")
    module = _OPS[op]
    bound = inspect.signature(getattr(module, op)).bind(*args, **kwargs)
    bound.apply_defaults()
    named = bound.arguments
    x: Tensor = named["x"]
    check_types(**named, lists=module is all_gather_matmul)
    if "reduce_op" in named:
        named["reduce_op"] = reduce_op_name(named["reduce_op"])
    named["group_size"], group_name = resolve(named["group"])
    names = ("gather_splits", "gather_size", "scatter_splits", "scatter_ranges")
    given: tuple[Any, Any, Any, Any] = tuple(named.get(name) for name in names)  # type: ignore[assignment]
    named |= splits_of(*given, False, group_name)._asdict()
    exchange: Exchange = module.exchange_of(*(named[name] for name in inspect.signature(module.exchange_of).parameters))
    device = x.device
    if device.type == "meta":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan, _ = prepare(op, exchange, x.dtype, device, group_name)
    return plan


def algorithms_of(op: str) -> Mapping[str, Callable[..., Any]]:
    return _OPS[op].ALGORITHMS


def by_name(op: str, args: Sequence[Any]) -> dict[str, Any]:
    """The arguments of ``torch.ops.fusedcomm.<op>(*args)``, with those that have defaults."""
    arguments = getattr(torch.ops.fusedcomm, op).default._schema.arguments
    return {each.name: args[i] if i < len(args) else each.default_value for i, each in enumerate(arguments)}


def exchange_of(op: str, *args: Any) -> Exchange:
    """The geometry of ``torch.ops.fusedcomm.<op>(*args)``."""
    named = by_name(op, args)
    named |= {"w": named.get("ws", named.get("w")), "bias": named.get("biases", named.get("bias"))}
    check = _OPS[op].exchange_of
    return check(*(named[name] for name in inspect.signature(check).parameters))
