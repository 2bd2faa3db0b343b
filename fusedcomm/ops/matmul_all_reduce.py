"""fusedcomm::matmul_all_reduce: a reduce_scatter of the matmul's result and a gather of the reduced blocks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from fusedcomm.memory.group import Group, resolve
from fusedcomm.ops import gradients
from fusedcomm.ops.arguments import check_types, reduce_op_name
from fusedcomm.ops.call_arguments import Arguments, PerTensor
from fusedcomm.plan.planner import CALL
from fusedcomm.run import reference


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
    the tensors as torch.matmul's. Matmuls accumulate in float32.

    Reverse-mode autograd communicates nothing: the result's gradient g is taken to be the same on all ranks, as in
    tensor parallelism, so that grad x is ``g @ w.mT``, grad w ``x.mT @ g`` and grad partial_bias g's sum over rows, all
    divided by R for "avg".
    Derivatives of these by g are added up over the ranks, by a plain collective.

    Errors are those of `matmul_all_to_all`.

    Example, on each of 2 ranks::

        x, w = torch.ones(2, 8, 3), torch.ones(3, 5)  # [batch, tokens, K / R], [K / R, N]
        y = fusedcomm.matmul_all_reduce(x, w)
        assert y.shape == (2, 8, 5) and (y == 6).all()  # [batch, tokens, N], summed over K
    """
    check_types(x, w, bias, "matmul_all_reduce", group, partial_bias=partial_bias, reduce_op=reduce_op)
    reduce_op = reduce_op_name(reduce_op)
    group_size, group_name = resolve(group)
    return torch.ops.fusedcomm.matmul_all_reduce(x, w, bias, reduce_op, group_size, group_name, CALL, partial_bias)


def save(ctx: Any, args: Arguments, needs: PerTensor, results: Sequence[Tensor]) -> None:
    ctx.save_for_backward(args.x if needs.ws[0] else None, args.w if needs.x else None)
    ctx.w_layout, ctx.reduce_op, ctx.group = gradients.layout_of(args.w), args.reduce_op, args.group


def backward(ctx: Any, needs: PerTensor, grad: Tensor) -> PerTensor:
    x, w = ctx.saved_tensors
    part = reference.averaged(gradients.same_on_all_ranks(grad, ctx.group), ctx.reduce_op, ctx.group[0])
    grad_x = torch.matmul(part, w.mT) if needs.x else None
    grad_w = gradients.of_w(x, part, ctx.w_layout) if needs.ws[0] else None
    grad_bias = gradients.of_bias(grad) if needs.biases[0] else None
    grad_partial = gradients.of_bias(part) if needs.partial_bias else None
    return PerTensor(grad_x, [grad_w], [grad_bias], grad_partial)
