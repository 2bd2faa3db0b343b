"""`unfused`: the plain program. The matmul and the process group's own collective run one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedcomm.memory.workspace import Call
from fusedcomm.plan.cost import model
from fusedcomm.plan.geometry.cut import Cut
from fusedcomm.run import reference


def push_matmul(call: Call, x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """``exchange((x @ w + bias).view(out_shape), gather_dim, scatter_dim)``."""
    exchange, y = call.exchange, reference.matmul(x, w, bias)
    columns = exchange.shape[exchange.num_lead :]
    if len(columns) > 1:
        y = y.unflatten(-1, columns)
    gather_dim = exchange.unpacked[1]
    assert gather_dim is not None
    return _into(out, reference.exchange(y, gather_dim, exchange.split_dim, *_collective(call, x)))


def push_reduce(
    call: Call,
    x: Tensor,
    w: Tensor | None,
    bias: Tensor | None,
    scale: float,
    partial_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``reduce_scatter(x @ w + partial_bias) * scale + bias``; ``bias`` is the part of this rank's block."""
    y, split_dim = _product(x, w, partial_bias), call.exchange.split_dim
    total = reference.reduce_scatter(y, _reduce_op(scale), split_dim, *_collective(call, x))
    return _into(out, total if bias is None else total + bias)


def push_reduce_gather(
    call: Call,
    x: Tensor,
    w: Tensor | None,
    bias: Tensor | None,
    scale: float,
    partial_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``all_reduce(x @ w + partial_bias) * scale + bias``."""
    y = _product(x, w, partial_bias)
    total = reference.all_reduce(y, _reduce_op(scale), call.exchange.group_size, call.group_name)
    return _into(out, total if bias is None else total + bias)


def gather_matmul(
    call: Call, x: Tensor, ws: Sequence[Tensor], biases: Sequence[Tensor | None], return_gathered: bool
) -> tuple[list[Tensor], Tensor | None]:
    """``[gathered @ w + bias for w, bias in zip(ws, biases)]``, and gathered (or exchanged) x itself if asked for."""
    exchange, collective = call.exchange, _collective(call, x)
    scatter_dim = exchange.packed[1]
    if scatter_dim is None:
        gathered = reference.all_gather(x, exchange.split_dim, *collective)
    else:
        gathered = reference.exchange(x, exchange.split_dim, scatter_dim, *collective)
    rows = gathered.flatten(exchange.num_lead)
    outs = [reference.matmul(rows, w, bias) for w, bias in zip(ws, biases, strict=True)]
    return outs, gathered if return_gathered else None


def pads(kind: str, cut: Cut | None, outer_numel: int, t: Tensor) -> bool:
    """Whether a collective pads parts that differ in size; the same on all ranks."""
    if cut is None or cut.is_symbolic or isinstance(outer_numel, torch.SymInt):
        return False  # a graph that is for many sizes gets no guard of its own for them
    return model.pads(kind, cut, outer_numel * t.element_size(), t.device.type)


def _product(x: Tensor, w: Tensor | None, bias: Tensor | None) -> Tensor:
    return x if w is None else reference.matmul(x, w, bias)


def _collective(call: Call, x: Tensor) -> tuple[Any, ...]:
    cut = call.exchange.cut
    padded = cut is not None and pads(model.KINDS[call.op], cut, call.exchange.outer_numel, x)
    return call.exchange.group_size, call.group_name, cut, padded


def _reduce_op(scale: float) -> str:
    return "sum" if scale == 1 else "avg"


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    return result if out is None else out.copy_(result)
