"""fusedcomm::matmul_all_reduce: a reduce_scatter of the matmul's result and a gather of what each rank has added."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from fusedcomm import reference
from fusedcomm.algorithms import chunked, fused, pipelined
from fusedcomm.geometry import shapes
from fusedcomm.geometry.exchange import Exchange
from fusedcomm.geometry.shapes import check_bias, check_out, check_tensors
from fusedcomm.ops import gradients
from fusedcomm.ops.arguments import check_types, reduce_op_name
from fusedcomm.ops.dispatch import Algorithms, run
from fusedcomm.ops.library import (
    define_out,
    lib,
    new_or_given,
    register_autograd,
    register_fake,
    register_kernel,
    register_modes,
)
from fusedcomm.runtime.group import Group, check_size, resolve

OP = "matmul_all_reduce"
ALGORITHMS: Algorithms = {
    "chunked": chunked.push_reduce_gather,
    "fused": fused.push_reduce_gather,
    "pipelined": pipelined.push_reduce_gather,
}

lib.define(
    "matmul_all_reduce(Tensor x, Tensor w, Tensor? bias, str reduce_op, int group_size, str group_name, "
    "Tensor? partial_bias=None) -> Tensor",
    tags=[torch.Tag.pt2_compliant_tag],
)


def matmul_all_reduce(
    x: Tensor,
    w: Tensor,
    group: Group = None,
    *,
    reduce_op: str | ReduceOp = "sum",
    bias: Tensor | None = None,
    partial_bias: Tensor | None = None,
) -> Tensor:
    """Multiply x by w and reduce the result over the ranks to all of them, overlapped. It equals, for R ranks::

        y = sum(every_ranks_x @ every_ranks_w + every_ranks_partial_bias)  # in rank order; "avg": divided by R
        return y + bias

    Args:
        x: [..., K], at least 2-D; float32, float16, bfloat16 or, unfused, float64, on CPU or CUDA.
        w: [K, N], or [..., K, N] with exactly x's batch dims (x.shape[:-2]); of x's dtype and device.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        reduce_op: "sum" or "avg", or torch.distributed.ReduceOp.SUM or AVG.
        bias: [N], of x's dtype and device, added once, to the sum; the same on every rank.
        partial_bias: [N], likewise, or None: this rank's own, added to its product. Ranks may differ in it.

    Returns:
        A contiguous tensor of y's shape [..., N], the same on every rank.

    Partial sums are rounded to x's dtype, added in float32 in rank order, and rounded once more, so that the
    results of `chunked`, `fused` and `pipelined` are bit-equal from run to run and between ranks. `unfused`, and
    `pipelined` with FUSEDCOMM_BACKEND_SUMS=1, leave the sums to the backend.

    Every rank of the group calls it with the same shapes, dtype and dims, in the same order of calls. Autocast casts
    the tensors as it does those of torch.matmul. Matmuls accumulate in float32.

    Reverse-mode autograd communicates nothing: the result's gradient g is taken to be the same on all ranks, as in
    tensor parallelism, so that grad x is ``g @ w.mT``, grad w ``x.mT @ g`` and grad partial_bias g's sum over rows, all
    divided by R for "avg".
    Derivatives of these by g are added up over the ranks, by a plain collective.

    Raises:
        ValueError: an argument is not as described here; raised before anything is sent.
        TypeError: likewise, where it is of another type, or a DTensor: pass its ``.to_local()``.
        PeerTimeoutError: a peer did not come within ``FUSEDCOMM_TIMEOUT_S``. On CUDA the next call, or `synchronize`,
            raises it.
        PeerMismatchError: a peer called another op, or this one with other shapes, dtype or dims; on CUDA as above.
        RuntimeError: the call cannot be made here: inside a torch.func transform, with forward-mode tangents, in a
            process that was forked from a rank, or in the capture of a CUDA graph without a call in
            `before_capture` before it.

    A call that runs ``unfused`` or ``pipelined`` (see `explain`) exchanges by the process group's own collectives, and
    raises their errors.

    Example, on each of 2 ranks::

        x, w = torch.ones(2, 8, 3), torch.ones(3, 5)  # [batch, tokens, K / R], [K / R, N]
        y = fusedcomm.matmul_all_reduce(x, w)
        assert y.shape == (2, 8, 5) and (y == 6).all()  # [batch, tokens, N], summed over K
    """
    check_types(x, w, bias, partial_bias=partial_bias)
    reduce_op = reduce_op_name(reduce_op)
    group_size, group_name = resolve(group)
    return torch.ops.fusedcomm.matmul_all_reduce(x, w, bias, reduce_op, group_size, group_name, partial_bias)


def exchange_of(
    x: Tensor, w: Tensor, bias: Tensor | None, reduce_op: str, group_size: int, partial_bias: Tensor | None
) -> Exchange:
    """Check a call and work out its geometry, with a few more rows of x where R divides no dim. Raises ValueError."""
    check_tensors(x, [w], [bias], partial_bias)
    exchange = shapes.of(shapes.matmul_all_reduce, x.shape, w.shape, reduce_op, group_size)
    check_bias(bias, w.shape[-1])
    check_bias(partial_bias, w.shape[-1], argument="partial_bias")
    return exchange


def _kernel(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    reduce_op: str,
    group_size: int,
    group_name: str,
    partial_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    exchange = exchange_of(x, w, bias, reduce_op, group_size, partial_bias)

    def unfused() -> Tensor:
        return reference.matmul_all_reduce(x, w, bias, reduce_op, group_size, group_name, partial_bias)

    options: dict[str, Any] = {"scale": 1 / group_size if reduce_op == "avg" else 1.0, "partial_bias": partial_bias}
    num_rows = x.shape[-2]
    padding = exchange.shape[x.ndim - 2] - num_rows
    padded = torch.nn.functional.pad(x, (0, 0, 0, padding)) if padding else x
    own_bias = bias
    if bias is not None and exchange.splits_columns:
        own_bias = bias.chunk(group_size)[check_size(group_size, group_name).rank()]
    if out is not None:
        check_out(out, x, [*x.shape[:-1], w.shape[-1]])
    call = (OP, ALGORITHMS, exchange, group_name, padded, w, own_bias)
    if not padding:
        return run(*call, unfused=unfused, out=out, **options)
    result = run(*call, unfused=unfused, **options).narrow(-2, 0, num_rows)
    return result.contiguous() if out is None else out.copy_(result)


register_kernel(OP, _kernel)


@register_fake(OP)
def _fake(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    reduce_op: str,
    group_size: int,
    group_name: str,
    partial_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    check_tensors(x, [w], [bias], partial_bias)
    shapes.check_all_reduce(x.shape, w.shape, reduce_op, group_size)  # a graph does not depend on which dim is cut
    check_bias(bias, w.shape[-1])
    check_bias(partial_bias, w.shape[-1], argument="partial_bias")
    return new_or_given(x, [*x.shape[:-1], w.shape[-1]], out)


define_out(OP, _kernel, _fake)
register_modes(OP)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, _bias, reduce_op, group_size, group_name, _partial_bias = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w if ctx.needs_input_grad[0] else None)
    ctx.w_layout, ctx.reduce_op, ctx.group = gradients.layout_of(w), reduce_op, (group_size, group_name)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors
    needs_x, needs_w, needs_bias, *_, needs_partial = ctx.needs_input_grad
    part = reference.averaged(gradients.same_on_all_ranks(grad, ctx.group), ctx.reduce_op, ctx.group[0])
    grad_x = torch.matmul(part, w.mT) if needs_x else None
    grad_w = gradients.of_w(x, part, ctx.w_layout) if needs_w else None
    grad_bias = gradients.of_bias(grad) if needs_bias else None
    grad_partial = gradients.of_bias(part) if needs_partial else None
    return grad_x, grad_w, grad_bias, None, None, None, grad_partial


register_autograd(OP, _backward, _setup_context)
