"""The end of a tensor parallel layer, RMSNorm included: matmul_all_reduce_norm and its like."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedcomm.memory.group import Group, resolve
from fusedcomm.ops import gradients, matmul_reduce_scatter, splits
from fusedcomm.ops.arguments import check_types
from fusedcomm.ops.call_arguments import Arguments, PerTensor
from fusedcomm.ops.library import refuse_grad
from fusedcomm.plan.geometry.shapes import check_out


def matmul_all_reduce_norm(
    x: Tensor,
    w: Tensor,
    residual: Tensor,
    norm_weight: Tensor | None,
    group: Group = None,
    *,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Multiply x by w, reduce the result over the ranks, add a residual, and normalize. It equals, for R ranks::

        residual_out = sum(every_ranks_x @ every_ranks_w) + bias + residual  # in rank order
        normed = residual_out / sqrt(mean(residual_out ** 2, -1) + eps) * norm_weight
        return normed, residual_out

    Args:
        x: [..., K], at least 2-D; float32, float16, bfloat16 or, unfused, float64, on CPU or CUDA.
        w: [K, N], or [..., K, N] with exactly x's batch dims (x.shape[:-2]); of x's dtype and device.
        residual: [..., N], of x's dtype and device; the same on every rank.
        norm_weight: [N], likewise, or None: ones. Beside 16 bits it may be float32.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        bias: [N], of x's dtype and device, added once, to the sum; the same on every rank.
        eps: at least 0.
        out: memory for normed: contiguous, overlapping no other tensor of the call. With it nothing may require grad.
        residual_out: likewise for residual_out; it may be residual itself.

    Returns:
        Two contiguous tensors [..., N], (normed, residual_out), the same on every rank.

    Partial sums are rounded to x's dtype. They, the bias and the residual are added in float32 and rounded once;
    normed is computed from the rounded residual_out in float32. Results are bit-equal from run to run and between
    ranks. ``unfused`` leaves the sum to the backend, which rounds it before the residual is added.

    Few elements, up to 2^24 on 2 ranks, 2^20 on 4, 2^18 on more, are sent whole to every rank in one round; more by a
    reduce_scatter and an all_gather.

    Every rank of the group calls it with the same shapes and dtype, in the same order of calls. Autocast casts the
    tensors as torch.matmul's, but not with ``out``. Reverse-mode autograd communicates nothing: gradients of the
    results are taken to be the same on all ranks, as in `matmul_all_reduce`.

    Raises:
        ValueError: an argument is not as described here; raised before anything is sent.
        TypeError: likewise, where it is of another type, or a DTensor: pass its ``.to_local()``.

    Other errors are those of `matmul_all_reduce`.

    Example, on each of 2 ranks::

        x, w, residual = torch.ones(4, 3), torch.ones(3, 8), torch.zeros(4, 8)  # [tokens, K / R], [K / R, N]
        normed, residual_out = fusedcomm.matmul_all_reduce_norm(x, w, residual, torch.ones(8), eps=0.0)
        assert (residual_out == 6).all() and (normed == 1).all()
    """
    op, given = "matmul_all_reduce_norm", (residual, norm_weight, eps)
    check_types(x, w, bias, op, group, norm=(*given, out, residual_out))
    return _call(op, (x, w, bias, *given, *resolve(group)), residual, out, residual_out)


def matmul_reduce_scatter_norm(
    x: Tensor,
    w: Tensor,
    residual: Tensor,
    norm_weight: Tensor | None,
    scatter_dim: int,
    group: Group = None,
    *,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    scatter_splits: Sequence[int] | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Multiply x by w, reduce the result over the ranks to rows for each, add a residual, and normalize. It equals::

        y = sum(every_ranks_x @ every_ranks_w)  # in rank order
        residual_out = y.chunk(R, scatter_dim)[rank] + bias + residual
        normed = residual_out / sqrt(mean(residual_out ** 2, -1) + eps) * norm_weight
        return normed, residual_out

    Args:
        x: [..., K], at least 2-D; float32, float16, bfloat16 or, unfused, float64, on CPU or CUDA.
        w: [K, N], or [..., K, N] with exactly x's batch dims (x.shape[:-2]); of x's dtype and device.
        residual: of the result's shape, and of x's dtype and device: this rank's rows.
        norm_weight: [N], likewise, or None: ones. Beside 16 bits it may be float32.
        scatter_dim: a dim of y but the last, cut as in `matmul_reduce_scatter`.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        bias: [N], of x's dtype and device; added to this rank's rows.
        eps: at least 0.
        scatter_splits: the size at scatter_dim that each rank gets, as in `matmul_reduce_scatter`.
        out, residual_out: memory for the results, as in `matmul_all_reduce_norm`.

    Returns:
        Two contiguous tensors of y's shape with this rank's part at scatter_dim, (normed, residual_out).

    Every rank calls it with the same shapes, dtype, dims, norm_weight, bias and eps, in the same order of calls.
    Rounding and autocast are those of `matmul_all_reduce_norm`.

    Reverse-mode autograd gathers the gradient of the sum, as in `matmul_reduce_scatter`. The gradients of norm_weight
    and bias are those of this rank's rows alone: where the ranks share a parameter, add them over the ranks.

    Raises:
        ValueError: an argument is not as described here; raised before anything is sent.
        TypeError: likewise, where it is of another type, or a DTensor: pass its ``.to_local()``.

    Other errors are those of `matmul_reduce_scatter`.

    Example, on each of 2 ranks::

        x, w, residual = torch.ones(4, 3), torch.ones(3, 8), torch.zeros(2, 8)  # [tokens, K / R], [K / R, N]
        normed, residual_out = fusedcomm.matmul_reduce_scatter_norm(x, w, residual, None, scatter_dim=0, eps=0.0)
        assert (residual_out == torch.full((2, 8), 6.0)).all() and (normed == 1).all()
    """
    op, given = "matmul_reduce_scatter_norm", (residual, norm_weight, eps)
    sizes = (None, None, scatter_splits, None)
    check_types(x, w, bias, op, group, 0, scatter_dim, sizes, norm=(*given, out, residual_out))
    group_size, group_name = resolve(group)
    divisible = splits.divides_product(group_size, x, w, scatter_dim)
    parts = splits.splits_of(*sizes, divisible, group_name).to_scatter
    args = (x, w, bias, *given, scatter_dim, *parts, group_size, group_name)
    return _call(op, args, residual, out, residual_out)


def all_reduce_norm(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor | None,
    group: Group = None,
    *,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Reduce x over the ranks, add a residual, and normalize: `matmul_all_reduce_norm` of a product that is there.

    Args:
        x: [..., N], at least 1-D; float32, float16, bfloat16 or, unfused, float64, on CPU or CUDA. It is not written.
        residual: of x's shape, dtype and device; the same on every rank.
        norm_weight: [N], likewise, or None: ones. Beside 16 bits it may be float32.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        bias: [N], of x's dtype and device, added once, to the sum; the same on every rank.
        eps: at least 0.
        out, residual_out: memory for the results, as in `matmul_all_reduce_norm`.

    Returns:
        Two contiguous tensors of x's shape, (normed, residual_out), the same on every rank.

    Autocast casts the tensors as torch.matmul's. Rounding, gradients and errors are those of `matmul_all_reduce_norm`.

    Example, on each of 2 ranks::

        normed, residual_out = fusedcomm.all_reduce_norm(torch.ones(4, 8), torch.ones(4, 8), None, eps=0.0)
        assert (residual_out == 3).all() and (normed == 1).all()
    """
    op = "all_reduce_norm"
    check_types(x, (), bias, op, group, lists=True, norm=(residual, norm_weight, eps, out, residual_out))
    return _call(op, (x, residual, norm_weight, bias, eps, *resolve(group)), residual, out, residual_out)


def _call(
    op: str, args: Sequence[Any], residual: Tensor, out: Tensor | None, residual_out: Tensor | None
) -> tuple[Tensor, Tensor]:
    call = getattr(torch.ops.fusedcomm, op)
    if out is None and residual_out is None:
        return call(*args)  # type: ignore[no-any-return]
    if torch.compiler.is_compiling():  # graphs keep the order of collectives, but not of what writes its arguments
        refuse_grad(op, *args, out, residual_out)
        with torch.autocast(args[0].device.type, enabled=False):  # as in the op with memory
            normed, total = call(*args)
        return _written(normed, out, "out"), _written(total, residual_out, "residual_out")
    like = partial(torch.empty_like, residual, memory_format=torch.contiguous_format)
    out, residual_out = like() if out is None else out, like() if residual_out is None else residual_out
    call.out(*args, out=out, residual_out=residual_out)
    return out, residual_out


def _written(result: Tensor, out: Tensor | None, name: str) -> Tensor:
    if out is None:
        return result
    check_out(out, result, result.shape, name)
    return out.copy_(result)


def save(ctx: Any, args: Arguments, needs: PerTensor, results: Sequence[Tensor]) -> None:
    needs_w = bool(needs.ws) and needs.ws[0]
    ctx.save_for_backward(args.x if needs_w else None, args.w if needs.x else None, results[1], args.norm_weight)
    ctx.w_layout = None if args.w is None else gradients.layout_of(args.w)
    ctx.group, ctx.eps = args.group, args.eps


def save_scattered(ctx: Any, args: Arguments, needs: PerTensor, results: Sequence[Tensor]) -> None:
    matmul_reduce_scatter.save(ctx, args, needs, results)
    save(ctx, args, needs, results)


def _of_norm(
    ctx: Any, needs: PerTensor, out: Tensor, weight: Tensor | None, grad_normed: Tensor, grad_out: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The gradients of the sum and of norm_weight."""
    wide, grad = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (out, grad_normed))
    inverse = (wide.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
    scaled, of_scaled = wide * inverse, grad if weight is None else grad * weight
    of_out = inverse * (of_scaled - scaled * (of_scaled * scaled).mean(-1, keepdim=True))
    grad_weight = None if weight is None or not needs.norm_weight else gradients.of_bias(grad * scaled).to(weight.dtype)
    return (of_out + grad_out).to(out.dtype), grad_weight


def scattered_backward(ctx: Any, needs: PerTensor, *grads: Tensor) -> PerTensor:
    x, w, out, weight = ctx.saved_tensors
    part, grad_weight = _of_norm(ctx, needs, out, weight, *grads)
    found = matmul_reduce_scatter.of_block(ctx, needs._replace(partial_bias=False), x, w, part)
    return found._replace(residual=part if needs.residual else None, norm_weight=grad_weight)


def backward(ctx: Any, needs: PerTensor, *grads: Tensor) -> PerTensor:
    x, w, out, weight = ctx.saved_tensors
    part, grad_weight = _of_norm(ctx, needs, out, weight, *grads)
    needs_bias = needs.bias or (bool(needs.biases) and needs.biases[0])
    grad_bias = gradients.of_bias(part) if needs_bias else None
    residual = part if needs.residual else None
    part = gradients.same_on_all_ranks(part, ctx.group)
    if ctx.w_layout is None:
        return PerTensor(part if needs.x else None, [], [], None, grad_bias, residual, grad_weight)
    grad_x = torch.matmul(part, w.mT) if needs.x else None
    grad_w = gradients.of_w(x, part, ctx.w_layout) if needs.ws[0] else None
    return PerTensor(grad_x, [grad_w], [grad_bias], None, None, residual, grad_weight)
