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
