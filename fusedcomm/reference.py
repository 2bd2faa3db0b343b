"""Each op as the plain program: its contract, the oracle of its tests, and the `unfused` algorithm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_c10d = torch.ops._c10d_functional


def exchange(t: Tensor, gather_dim: int, scatter_dim: int, group_size: int, group_name: str) -> Tensor:
    """Cut t into R blocks along scatter_dim, send block p to rank p, concatenate what arrives along gather_dim."""
    gather_dim, scatter_dim = gather_dim % t.ndim, scatter_dim % t.ndim
    if group_size == 1:
        return t.contiguous()
    blocks = t.unflatten(scatter_dim, (group_size, t.shape[scatter_dim] // group_size)).movedim(scatter_dim, 0)
    rows = [blocks.shape[1]] * group_size
    sent = blocks.flatten(0, 1).contiguous()
    received = _c10d.wait_tensor(_c10d.all_to_all_single(sent, rows, rows, group_name))
    return received.view(blocks.shape).movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1).contiguous()


def all_gather(t: Tensor, gather_dim: int, group_size: int, group_name: str) -> Tensor:
    """Every rank's t, concatenated along gather_dim."""
    gather_dim = gather_dim % t.ndim
    if group_size == 1:
        return t.contiguous()
    gathered = _c10d.wait_tensor(_c10d.all_gather_into_tensor(t.contiguous(), group_size, group_name))
    if gather_dim == 0:  # the views below are a tenth of a tiny call
        return gathered
    blocks = gathered.unflatten(0, (group_size, t.shape[0]))
    return blocks.movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1).contiguous()


def reduce_scatter(t: Tensor, reduce_op: str, scatter_dim: int, group_size: int, group_name: str) -> Tensor:
    """Block r, of R along scatter_dim, of the sum or average of every rank's t."""
    scatter_dim = scatter_dim % t.ndim
    if group_size == 1:
        return t.contiguous()
    t = averaged(t, reduce_op, group_size)
    blocks = t.unflatten(scatter_dim, (group_size, t.shape[scatter_dim] // group_size)).movedim(scatter_dim, 0)
    sent = blocks.flatten(0, 1).contiguous()
    total = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(sent, "sum", group_size, group_name))
    return total.view(blocks.shape[1:])


def all_reduce(t: Tensor, reduce_op: str, group_size: int, group_name: str) -> Tensor:
    """The sum or average of every rank's t."""
    if group_size == 1:
        return t.contiguous()
    part = averaged(t, reduce_op, group_size).contiguous()
    return _c10d.wait_tensor(_c10d.all_reduce(part, "sum", group_name))


def averaged(part: Tensor, reduce_op: str, group_size: int) -> Tensor:
    """What this rank adds to the sum. Averages are divided first, as float16 may hold them but not their sum."""
    return part / group_size if reduce_op == "avg" else part


def matmul(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ w + bias``, rounded once; w is [K, N] or has x's batch dims."""
    if bias is None:
        return torch.matmul(x, w)
    if w.ndim == 2:
        return torch.nn.functional.linear(x, w.mT, bias)
    return torch.baddbmm(bias, x.flatten(0, -3), w.flatten(0, -3)).unflatten(0, x.shape[:-2])


def matmul_all_to_all(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    out_shape: Sequence[int] | None,
    gather_dim: int,
    scatter_dim: int,
    group_size: int,
    group_name: str,
) -> Tensor:
    y = matmul(x, w, bias)
    if out_shape is not None:
        y = y.unflatten(-1, tuple(out_shape))
    return exchange(y, gather_dim, scatter_dim, group_size, group_name)


def all_to_all_matmul(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    gather_dim: int,
    scatter_dim: int,
    num_lead: int,
    group_size: int,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    """The result and the exchanged x. ``num_lead``: how many of its leading dims are not K."""
    exchanged = exchange(x, gather_dim, scatter_dim, group_size, group_name)
    return matmul(exchanged.flatten(num_lead), w, bias), exchanged


def all_gather_matmul(
    x: Tensor,
    ws: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    gather_dim: int,
    group_size: int,
    group_name: str,
) -> tuple[list[Tensor], Tensor]:
    """The results and the gathered x."""
    gathered = all_gather(x, gather_dim, group_size, group_name)
    return [matmul(gathered, w, bias) for w, bias in zip(ws, biases, strict=True)], gathered


def matmul_reduce_scatter(
    x: Tensor, w: Tensor, bias: Tensor | None, reduce_op: str, scatter_dim: int, group_size: int, group_name: str
) -> Tensor:
    total = reduce_scatter(torch.matmul(x, w), reduce_op, scatter_dim, group_size, group_name)
    return total if bias is None else total + bias


def matmul_all_reduce(
    x: Tensor, w: Tensor, bias: Tensor | None, reduce_op: str, group_size: int, group_name: str
) -> Tensor:
    total = all_reduce(torch.matmul(x, w), reduce_op, group_size, group_name)
    return total if bias is None else total + bias
