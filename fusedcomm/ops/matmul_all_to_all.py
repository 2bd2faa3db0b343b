"""fusedcomm::matmul_all_to_all: a matmul whose result goes to the other ranks chunk by chunk while it is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedcomm import reference
from fusedcomm.exchange import Exchange, cached_exchange, check_tensors
from fusedcomm.group import Group, resolve
from fusedcomm.ops.dispatch import lib, prepare, push_matmul, register_autocast
from fusedcomm.registry import on_device

OP = "matmul_all_to_all"

lib.define(
    "matmul_all_to_all(Tensor x, Tensor w, Tensor? bias, SymInt[]? out_shape, int gather_dim, int scatter_dim, "
    "int group_size, str group_name) -> Tensor",
    tags=[torch.Tag.pt2_compliant_tag],
)


def matmul_all_to_all(
    x: Tensor,
    w: Tensor,
    gather_dim: int,
    scatter_dim: int,
    group: Group = None,
    *,
    bias: Tensor | None = None,
    out_shape: Sequence[int] | None = None,
) -> Tensor:
    """The matmul and the exchange of its result, overlapped. Same result on every rank as::

        y = (x @ w + bias).view(*x.shape[:-1], *out_shape)
        blocks = y.chunk(R, scatter_dim)               # block p goes to rank p
        return torch.cat(received_blocks, gather_dim)  # in rank order: DTensor Shard(gather_dim) -> Shard(scatter_dim)

    Args:
        x: [..., K], at least 2-D; float32, float16 or bfloat16.
        w: [K, N], or [..., K, N] with exactly x's batch dims (x.shape[:-2]).
        gather_dim, scatter_dim: dims of y, different; negative ones count from the end. y's size at scatter_dim must
            be divisible by the group's size R. The result is R times larger at gather_dim, and R times smaller at
            scatter_dim.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        bias: [N], added before the one rounding from float32.
        out_shape: sizes that view y's last dim, with product N, e.g. [heads, head_dim] or [3, heads, head_dim].

    Every rank of the group must call it with the same shapes, dtype and dims. Autocast casts its tensors as it does
    torch.matmul's. Reverse-mode autograd only; the backward exchanges unfused.

    Raises:
        ValueError: bad arguments, before anything is sent.
        PeerTimeoutError: a peer did not come within FUSEDCOMM_TIMEOUT_S (CUDA: at the next call or `synchronize`).
        PeerMismatchError: a peer called another op, or this one with other shapes, dtype or dims.
        Where it runs unfused (see `fusedcomm.explain`), such errors are those of the group's own collectives.
    """
    group_size, group_name = resolve(group)
    shape = None if out_shape is None else list(out_shape)
    return torch.ops.fusedcomm.matmul_all_to_all(x, w, bias, shape, gather_dim, scatter_dim, group_size, group_name)


def exchange_of(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    out_shape: Sequence[int] | None,
    gather_dim: int,
    scatter_dim: int,
    group_size: int,
) -> Exchange:
    """Check a call and work out its geometry. Raises ValueError."""
    check_tensors(x, w, bias)
    shape = None if out_shape is None else tuple(out_shape)
    return cached_exchange(tuple(x.shape), tuple(w.shape), shape, gather_dim, scatter_dim, group_size)


@torch.library.impl(lib, OP, "CPU")
@torch.library.impl(lib, OP, "CUDA")
def _kernel(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    out_shape: list[int] | None,
    gather_dim: int,
    scatter_dim: int,
    group_size: int,
    group_name: str,
) -> Tensor:
    exchange = exchange_of(x, w, bias, out_shape, gather_dim, scatter_dim, group_size)
    with on_device(x.device):
        plan, member = prepare(OP, exchange, x.dtype, x.device, group_name)
        out = push_matmul(OP, x, w, bias, exchange, plan, member)
        if out is None:
            out = reference.matmul_all_to_all(x, w, bias, out_shape, gather_dim, scatter_dim, group_size, group_name)
        return out


@torch.library.register_fake(f"fusedcomm::{OP}", lib=lib)
def _fake(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    out_shape: list[int] | None,
    gather_dim: int,
    scatter_dim: int,
    group_size: int,
    group_name: str,
) -> Tensor:
    check_tensors(x, w, bias)
    # not cached: sizes may be symbolic
    return x.new_empty(Exchange(x.shape, w.shape, out_shape, gather_dim, scatter_dim, group_size).out_shape)


register_autocast(OP)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, _bias, out_shape, gather_dim, scatter_dim, group_size, group_name = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w if ctx.needs_input_grad[0] else None)
    ctx.num_columns = 1 if out_shape is None else len(out_shape)
    ctx.exchange = (scatter_dim, gather_dim, group_size, group_name)
    ctx.batched = w.ndim > 2


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The exchange back, then the matmul's own gradients: what autograd of the unfused program gives on this rank."""
    x, w = ctx.saved_tensors
    grad_y = reference.exchange(grad, *ctx.exchange).flatten(-ctx.num_columns)
    grad_x = grad_w = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = torch.matmul(grad_y, w.mT)
    if ctx.needs_input_grad[1]:
        flat = (x, grad_y) if ctx.batched else (x.flatten(0, -2), grad_y.flatten(0, -2))
        grad_w = torch.matmul(flat[0].mT, flat[1])
    if ctx.needs_input_grad[2]:
        grad_bias = grad_y.flatten(0, -2).sum(0)
    return grad_x, grad_w, grad_bias, None, None, None, None, None


torch.library.register_autograd(f"fusedcomm::{OP}", _backward, setup_context=_setup_context, lib=lib)
