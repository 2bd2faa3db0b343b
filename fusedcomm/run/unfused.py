"""`unfused`: the plain program. The matmul and the process group's own collective run one behind the other."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedcomm.memory.call_memory import CallMemory
from fusedcomm.plan import scaled_programs
from fusedcomm.plan.builder import Given
from fusedcomm.plan.chunk_matmul import Operand
from fusedcomm.plan.cost import model
from fusedcomm.plan.geometry.cut import Cut
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.plan.scaled_programs import OfPayload, of_payload
from fusedcomm.plan.scaling import VALUES, Payload, Scaled
from fusedcomm.plan.terms import Terms, of_terms
from fusedcomm.run import reference
from fusedcomm.run.rms_norm import rms_norm
from fusedcomm.run.scaled_matmul import product_of_payload, scaled_product


def program_of(name: str) -> Callable[..., list[Tensor]]:
    if name == "scaled_gather_matmul":
        return _scaled_gather
    if name.startswith("scaled_"):
        return partial(scaled_programs.push, program_of(name.removeprefix("scaled_")))
    program: Callable[..., list[Tensor]] = globals()[name]
    return partial(of_terms, program) if name in ("push_reduce", "push_reduce_gather") else program


def push_matmul(
    s: CallMemory, exchange: Exchange, x: Operand, w: Operand, bias: Given, out: Given = None
) -> list[Tensor]:
    """``exchange((x @ w + bias).view(out_shape), gather_dim, scatter_dim)``."""
    y = _product(x, w, bias)
    columns = exchange.shape[exchange.num_lead :]
    if len(columns) > 1:
        y = y.unflatten(-1, columns)
    gather_dim = exchange.unpacked[1]
    assert gather_dim is not None
    moves = _collective("all_to_all", s, exchange, y)
    return _into(out, reference.exchange(y, gather_dim, exchange.split_dim, *moves))


def push_reduce(s: CallMemory, exchange: Exchange, terms: Terms) -> list[Tensor]:
    """``reduce_scatter(x @ w + partial_bias) * scale + bias``."""
    y = _product(terms.x, terms.w, terms.partial_bias)
    moves = _collective("reduce_scatter", s, exchange, y)
    return _with_bias(terms, reference.reduce_scatter(y, _reduce_op(terms.scale), exchange.split_dim, *moves))


def push_reduce_gather(s: CallMemory, exchange: Exchange, terms: Terms) -> list[Tensor]:
    """``all_reduce(x @ w + partial_bias) * scale + bias``."""
    y = _product(terms.x, terms.w, terms.partial_bias)
    moves = s.group_size, s.group_name
    return _with_bias(terms, reference.all_reduce(y, _reduce_op(terms.scale), *moves, owned=terms.w is not None))


def _with_bias(terms: Terms, total: Tensor) -> list[Tensor]:
    total = _apart(total, terms.x)
    return _into(terms.out, total if terms.bias is None else total + terms.bias)


def push_reduce_norm(
    s: CallMemory,
    exchange: Exchange,
    x: Tensor,
    w: Given,
    bias: Given,
    residual: Tensor,
    *norm: Given,
    eps: float,
) -> list[Tensor]:
    """``residual_out = all_reduce(x @ w) + bias + residual``, behind its ``rms_norm(residual_out) * norm_weight``."""
    total = reference.all_reduce(_product(x, w, None), "sum", s.group_size, s.group_name, owned=w is not None)
    return _with_norm(total, bias, residual, eps, *norm)


def push_reduce_scatter_norm(
    s: CallMemory, exchange: Exchange, x: Tensor, w: Tensor, bias: Given, residual: Tensor, *norm: Given, eps: float
) -> list[Tensor]:
    """``residual_out = reduce_scatter(x @ w) + bias + residual``, likewise."""
    moves = _collective("reduce_scatter", s, exchange, x)
    total = reference.reduce_scatter(reference.matmul(x, w, None), "sum", exchange.split_dim, *moves)
    return _with_norm(total, bias, residual, eps, *norm)


def _with_norm(
    total: Tensor, bias: Given, residual: Tensor, eps: float, norm_weight: Given, normed: Given, out: Given
) -> list[Tensor]:
    out = torch.empty(total.shape, dtype=total.dtype, device=total.device) if out is None else out
    if bias is None:  # one kernel, which adds in float32 too
        torch.add(total, residual, out=out)
    else:
        out.copy_(total.to(torch.promote_types(total.dtype, torch.float32)) + residual + bias)
    normed = torch.empty_like(out) if normed is None else normed
    rms_norm(normed, out, norm_weight, eps)
    return [normed, out]


def gather_matmul(
    s: CallMemory, exchange: Exchange, x: Tensor, ws: Sequence[Operand], biases: Sequence[Given], return_gathered: bool
) -> list[Tensor]:
    """``[gathered @ w + bias for w, bias in zip(ws, biases)]``, and then gathered (or exchanged) x if asked for."""
    scatter_dim, dtype = exchange.packed[1], x.dtype
    x = x.view(torch.uint8) if dtype in VALUES else x  # which all backends move
    if scatter_dim is None:
        gathered = reference.all_gather(x, exchange.split_dim, *_collective("all_gather", s, exchange, x))
    else:
        moves = _collective("all_to_all", s, exchange, x)
        gathered = reference.exchange(x, exchange.split_dim, scatter_dim, *moves)
    gathered = gathered.view(dtype)
    rows = gathered if exchange.is_plain else gathered.flatten(exchange.num_lead)
    outs = [_product(rows, w, bias) for w, bias in zip(ws, biases, strict=True)]
    if not return_gathered:
        return outs
    return [*outs, _apart(gathered, x)]


def pads(kind: str, cut: Cut | None, outer_numel: int, t: Tensor) -> bool:
    """Whether a collective pads parts that differ in size; the same on all ranks."""
    if cut is None or cut.is_symbolic or isinstance(outer_numel, torch.SymInt):
        return False  # a graph that is for many sizes gets no guard of its own for them
    return model.pads(kind, cut, outer_numel * t.element_size(), t.device.type)


def _scaled_gather(
    s: CallMemory,
    exchange: Exchange,
    x: Tensor,
    ws: Sequence[Tensor],
    scales: Sequence[Tensor],
    biases: Sequence[Given],
    *,
    return_gathered: bool,
    out_dtype: torch.dtype,
    fast: bool,
    payload: Payload | None,
    sent: tuple[int, ...],
) -> list[Tensor]:
    rows = x
    if payload is not None:
        rows = torch.zeros(exchange.packed[0], dtype=torch.uint8, device=x.device)
        for to, source in payload.packed(rows, x.reshape(*rows.shape[:-1], sum(sent)), scales[0], sent):
            to.copy_(source)
    return gather_matmul(s, exchange, rows, of_payload(ws, scales, out_dtype, payload, fast), biases, return_gathered)


def _product(x: Operand, w: Operand | None, bias: Tensor | None) -> Tensor:
    if isinstance(w, OfPayload) and isinstance(x, Tensor):
        return product_of_payload(x, w, bias)
    if isinstance(w, Scaled) and isinstance(x, Scaled):
        return scaled_product(x, w, bias)
    assert isinstance(x, Tensor) and not isinstance(w, Scaled)
    return x if w is None else reference.matmul(x, w, bias)


def _apart(result: Tensor, x: Operand) -> Tensor:
    """A result is never x itself."""
    return result.clone() if isinstance(x, Tensor) and result.data_ptr() == x.data_ptr() else result


def _collective(kind: str, s: CallMemory, exchange: Exchange, x: Tensor) -> tuple[Any, ...]:
    padded = exchange.cut is not None and pads(kind, exchange.cut, exchange.outer_numel, x)
    return s.group_size, s.group_name, exchange.cut, padded


def _reduce_op(scale: float) -> str:
    return "sum" if scale == 1 else "avg"


def _into(out: Tensor | None, result: Tensor) -> list[Tensor]:
    return [result if out is None else out.copy_(result)]
