"""fusedcomm::all_gather_matmul: multiplies gathered chunks as they arrive, by one weight or by several."""

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from fusedcomm.memory.group import Group, resolve
from fusedcomm.ops import gradients, splits
from fusedcomm.ops.arguments import LISTS, check_types
from fusedcomm.ops.call_arguments import Arguments, PerTensor
from fusedcomm.plan.geometry.cut import Splits

Biases = Sequence[Tensor | None] | Tensor | None


@overload
def all_gather_matmul(
    x: Tensor,
    w: Tensor,
    gather_dim: int,
    group: Group = None,
    *,
    bias: Biases = None,
    save_gathered: bool = True,
    gather_splits: Sequence[int] | None = None,
    gather_size: int | None = None,
) -> Tensor: ...
@overload
def all_gather_matmul(
    x: Tensor,
    w: Sequence[Tensor],
    gather_dim: int,
    group: Group = None,
    *,
    bias: Biases = None,
    save_gathered: bool = True,
    gather_splits: Sequence[int] | None = None,
    gather_size: int | None = None,
) -> list[Tensor]: ...
def all_gather_matmul(
    x: Tensor,
    w: Tensor | Sequence[Tensor],
    gather_dim: int,
    group: Group = None,
    *,
    bias: Biases = None,
    save_gathered: bool = True,
    gather_splits: Sequence[int] | None = None,
    gather_size: int | None = None,
) -> Tensor | list[Tensor]:
    """Gather x from the ranks and multiply it by w, or by several, while it arrives. It equals, for R ranks::

        gathered = torch.cat(every_ranks_x, gather_dim)  # in rank order
        return gathered @ w + bias                       # for lists: [gathered @ w + b for w, b in zip(w, bias)]

    Args:
        x: at least 2-D, e.g. [batch, tokens / R, K]; float32, float16, bfloat16 or, unfused, float64, on CPU or CUDA.
        w: [K, N], or [..., K, N] with exactly the batch dims of the gathered x; of x's dtype and device. Or a list of
            such, equal but for N; they share one gather.
        gather_dim: a dim of x; negative ones count from the end. If it is the last one, K is R times x's size there,
            and `chunked` and `fused` keep sums in float32 across sources, own data first.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        bias: [N], of x's dtype and device, added before the one rounding from float32; for a list of w, None or a list
            of [N] or None.
        save_gathered: whether the gathered x, R times as large as x, is kept for grad w; otherwise the backward gathers
            x again, by a plain collective.
        gather_splits: each rank's size at gather_dim, where they differ; R ints, the same on all ranks.
        gather_size: their sum, in place of gather_splits, where ranks have torch.chunk's sizes.

    Returns:
        A contiguous tensor [..., N] of the gathered x's leading dims; for a list of w the list of results.

    Every rank of the group calls it with the same shapes, but for gather_dim where splits say so, dtype and dims, in
    the same order of calls. Autocast casts the tensors as torch.matmul's. Matmuls accumulate in float32.

    Reverse-mode autograd equals that of the program above: grad x is `matmul_reduce_scatter` of the results' gradients,
    one for a list of w; grad w and grad bias are this rank's own.

    Errors are those of `matmul_all_to_all`.

    Example, on each of 2 ranks::

        x, w_gate, w_up = torch.ones(2, 4, 8), torch.ones(8, 6), torch.ones(8, 5)  # [batch, tokens / R, K], [K, N]
        gate, up = fusedcomm.all_gather_matmul(x, [w_gate, w_up], gather_dim=1)
        assert gate.shape == (2, 8, 6) and up.shape == (2, 8, 5)  # [batch, tokens, N]
    """
    given = (gather_splits, gather_size)
    check_types(x, w, bias, "all_gather_matmul", group, gather_dim, 0, given, lists=True)
    group_size, group_name = resolve(group)
    ws, biases = lists_of(w, bias)
    keep = bool(save_gathered) and torch.is_grad_enabled() and any(each.requires_grad for each in ws)
    parts = splits.splits_of(*given, None, None, True, group_name).to_gather
    outs = torch.ops.fusedcomm.all_gather_matmul(x, ws, biases, gather_dim, keep, *parts, group_size, group_name)[0]
    return outs if isinstance(w, LISTS) else outs[0]


def matmul_and_gathered(
    x: Tensor, ws: Sequence[Tensor], gather_dim: int, group: Group, biases: Biases, gather_size: int | None
) -> tuple[list[Tensor], Tensor]:
    """`all_gather_matmul` of a list, and the gathered x, in autocast's dtype as the results are."""
    group_size, group_name = resolve(group)
    ws, biases = lists_of(ws, biases)
    parts = splits.splits_of(None, gather_size, None, None, True, group_name).to_gather
    options = (gather_dim, True, *parts, group_size, group_name)
    return torch.ops.fusedcomm.all_gather_matmul(x, ws, biases, *options)  # type: ignore[no-any-return]


def lists_of(w: Any, bias: Any) -> tuple[list[Tensor], list[Tensor | None]]:
    if not isinstance(w, LISTS):
        return [w], [bias]
    return list(w), [None] * len(w) if bias is None else list(bias)


def save(ctx: Any, args: Arguments, needs: PerTensor, results: Sequence[Tensor]) -> None:
    ctx.set_materialize_grads(False)
    saved_x = None
    if any(needs.ws):
        saved_x = results[-1] if args.return_gathered else args.x
    ctx.save_for_backward(saved_x, *(args.ws if needs.x else []))
    ctx.saved_gathered, ctx.w_layouts = args.return_gathered, [gradients.layout_of(w) for w in args.ws]
    ctx.gather_dim, ctx.group, ctx.splits = args.gather_dim % args.x.ndim, args.group, args.splits


def backward(ctx: Any, needs: PerTensor, *grads: Tensor | None) -> PerTensor:
    x, *ws = ctx.saved_tensors
    *grad_outs, grad_gathered = grads
    grad_x = _grad_x(ctx, grad_outs, ws, grad_gathered) if needs.x else None
    if any(needs.ws) and not ctx.saved_gathered and any(g is not None for g in grad_outs):
        x = splits.all_gather(x, ctx.gather_dim, ctx.splits, *ctx.group)
    grad_ws = [
        gradients.of_w(x, g, w) if needed and g is not None else None
        for g, w, needed in zip(grad_outs, ctx.w_layouts, needs.ws, strict=True)
    ]
    grad_biases = [
        gradients.of_bias(g) if needed and g is not None else None
        for g, needed in zip(grad_outs, needs.biases, strict=True)
    ]
    return PerTensor(grad_x, grad_ws, grad_biases)


def _grad_x(
    ctx: Any, grad_outs: Sequence[Tensor | None], ws: Sequence[Tensor], grad_gathered: Tensor | None
) -> Tensor | None:
    """The gradient of x, by one matmul_reduce_scatter of the concatenated gradients and weights."""
    used = [(g, w) for g, w in zip(grad_outs, ws, strict=True) if g is not None]
    grad_x, back = None, Splits(scatter_lengths=ctx.splits.gather_splits, rank=ctx.splits.rank)
    if used:
        grad = used[0][0] if len(used) == 1 else torch.cat([g for g, _ in used], -1)
        w = used[0][1] if len(used) == 1 else torch.cat([w for _, w in used], -1)
        options = ("sum", ctx.gather_dim, *back.to_scatter, *ctx.group)
        grad_x = torch.ops.fusedcomm.matmul_reduce_scatter(grad, w.mT, None, *options)
    if grad_gathered is not None and ctx.saved_gathered:  # otherwise it is empty, and constant
        part = splits.reduce_scatter(grad_gathered, ctx.gather_dim, back, *ctx.group)
        grad_x = part if grad_x is None else grad_x + part
    return grad_x
