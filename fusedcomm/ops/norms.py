"""fusedcomm::matmul_all_reduce_norm and all_reduce_norm: the end of a tensor parallel layer, RMSNorm included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedcomm.memory.group import Group, resolve
from fusedcomm.ops import gradients
from fusedcomm.ops.arguments import check_types
from fusedcomm.ops.call_arguments import Arguments, PerTensor


def matmul_all_reduce_norm(
    x: Tensor,
    w: Tensor,
    residual: Tensor,
    norm_weight: Tensor | None,
    group: Group = None,
    *,
    bias: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Multiply x by w, reduce the result over the ranks, add a residual, and normalize. It equals, for R ranks::

        residual_out = sum(every_ranks_x @ every_ranks_w) + bias + residual  # in rank order
        normed = residual_out / sqrt(mean(residual_out ** 2, -1) + eps) * norm_weight
        return normed, residual_out

    Args:
        x: [..., K], at least 2-D; float32, float16, bfloat16 or, unfused, float64, on CPU or CUDA.
        w: [K, N], or [..., K, N] with exactly x's batch dims (x.shape[:-2]); of x's dtype and device.
        residual: [..., N], of x's dtype and device; the same on every rank.
        norm_weight: [N], likewise, or None: ones.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        bias: [N], of x's dtype and device, added once, to the sum; the same on every rank.
        eps: at least 0.

    Returns:
        Two contiguous tensors [..., N], (normed, residual_out), the same on every rank.

    Partial sums are rounded to x's dtype. They, the bias and the residual are added in float32 and rounded once;
    normed is computed from the rounded residual_out in float32. Results are bit-equal from run to run and between
    ranks. ``unfused`` leaves the sum to the backend, which rounds it before the residual is added.

    Few elements, up to 2^24 on 2 ranks, 2^20 on 4, 2^18 on more, are sent whole to every rank in one round; more by a
    reduce_scatter and an all_gather.

    Every rank of the group calls it with the same shapes and dtype, in the same order of calls. Autocast casts the
    tensors as torch.matmul's. Reverse-mode autograd communicates nothing: gradients of the results are taken to be the
    same on all ranks, as in `matmul_all_reduce`.

    Raises:
        ValueError: an argument is not as described here; raised before anything is sent.
        TypeError: likewise, where it is of another type, or a DTensor: pass its ``.to_local()``.

    Other errors are those of `matmul_all_reduce`.

    Example, on each of 2 ranks::

        x, w, residual = torch.ones(4, 3), torch.ones(3, 8), torch.zeros(4, 8)  # [tokens, K / R], [K / R, N]
        normed, residual_out = fusedcomm.matmul_all_reduce_norm(x, w, residual, torch.ones(8), eps=0.0)
        assert (residual_out == 6).all() and (normed == 1).all()
    """
    _check(x, w, residual, norm_weight, bias, eps, op="matmul_all_reduce_norm", group=group)
    group_size, group_name = resolve(group)
    given = x, w, bias, residual, norm_weight, eps
    return torch.ops.fusedcomm.matmul_all_reduce_norm(*given, group_size, group_name)  # type: ignore[no-any-return]


def all_reduce_norm(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor | None,
    group: Group = None,
    *,
    bias: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Reduce x over the ranks, add a residual, and normalize: `matmul_all_reduce_norm` of a product that is there.

    Args:
        x: [..., N], at least 1-D; float32, float16, bfloat16 or, unfused, float64, on CPU or CUDA. It is not written.
        residual: of x's shape, dtype and device; the same on every rank.
        norm_weight: [N], likewise, or None: ones.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        bias: [N], of x's dtype and device, added once, to the sum; the same on every rank.
        eps: at least 0.

    Returns:
        Two contiguous tensors of x's shape, (normed, residual_out), the same on every rank.

    Autocast casts the tensors as torch.matmul's. Rounding, gradients and errors are those of `matmul_all_reduce_norm`.

    Example, on each of 2 ranks::

        normed, residual_out = fusedcomm.all_reduce_norm(torch.ones(4, 8), torch.ones(4, 8), None, eps=0.0)
        assert (residual_out == 3).all() and (normed == 1).all()
    """
    _check(x, (), residual, norm_weight, bias, eps, op="all_reduce_norm", group=group)
    given = x, residual, norm_weight, bias, eps
    return torch.ops.fusedcomm.all_reduce_norm(*given, *resolve(group))  # type: ignore[no-any-return]


def _check(x: Any, w: Any, residual: Any, norm_weight: Any, bias: Any, eps: Any, *, op: str, group: Group) -> None:
    tensors = {"residual": residual, "norm_weight": norm_weight, "eps": eps}
    check_types(x, w, bias, lists=isinstance(w, tuple), op=op, group=group, **tensors)


def save(ctx: Any, args: Arguments, needs: PerTensor, results: Sequence[Tensor]) -> None:
    needs_w = bool(needs.ws) and needs.ws[0]
    ctx.save_for_backward(args.x if needs_w else None, args.w if needs.x else None, results[1], args.norm_weight)
    ctx.w_layout = None if args.w is None else gradients.layout_of(args.w)
    ctx.group, ctx.eps = args.group, args.eps


def backward(ctx: Any, needs: PerTensor, grad_normed: Tensor, grad_out: Tensor) -> PerTensor:
    x, w, out, weight = ctx.saved_tensors
    wide, grad = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (out, grad_normed))
    inverse = (wide.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
    scaled, of_scaled = wide * inverse, grad if weight is None else grad * weight
    of_out = inverse * (of_scaled - scaled * (of_scaled * scaled).mean(-1, keepdim=True))
    part = (of_out + grad_out).to(out.dtype)
    grad_weight = gradients.of_bias(grad * scaled).to(out.dtype) if needs.norm_weight else None
    needs_bias = needs.bias or (bool(needs.biases) and needs.biases[0])
    grad_bias = gradients.of_bias(part) if needs_bias else None
    residual = part if needs.residual else None
    part = gradients.same_on_all_ranks(part, ctx.group)
    if ctx.w_layout is None:
        return PerTensor(part if needs.x else None, [], [], None, grad_bias, residual, grad_weight)
    grad_x = torch.matmul(part, w.mT) if needs.x else None
    grad_w = gradients.of_w(x, part, ctx.w_layout) if needs.ws[0] else None
    return PerTensor(grad_x, [grad_w], [grad_bias], None, None, residual, grad_weight)
