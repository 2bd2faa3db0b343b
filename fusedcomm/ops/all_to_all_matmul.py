"""fusedcomm::all_to_all_matmul: an exchange whose chunks are multiplied as they arrive."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedcomm import reference
from fusedcomm.algorithms import chunked, fused
from fusedcomm.geometry import shapes
from fusedcomm.geometry.exchange import Exchange
from fusedcomm.geometry.shapes import check_bias, check_tensors
from fusedcomm.ops import gradients
from fusedcomm.ops.arguments import check_types
from fusedcomm.ops.dispatch import by_product, run
from fusedcomm.ops.library import lib, register_autograd, register_fake, register_kernel, register_modes
from fusedcomm.runtime.group import Group, resolve

OP = "all_to_all_matmul"
ALGORITHMS = {"chunked": chunked.gather_matmul, "fused": fused.gather_matmul}

lib.define(
    "all_to_all_matmul(Tensor x, Tensor w, Tensor? bias, int gather_dim, int scatter_dim, bool return_exchanged, "
    "int group_size, str group_name) -> (Tensor, Tensor)",
    tags=[torch.Tag.pt2_compliant_tag],
)


def all_to_all_matmul(
    x: Tensor,
    w: Tensor,
    gather_dim: int,
    scatter_dim: int,
    group: Group = None,
    *,
    bias: Tensor | None = None,
    save_exchanged: bool = True,
) -> Tensor:
    """Exchange x between the ranks and multiply what arrives by w, overlapped. It equals, for R ranks::

        blocks = x.chunk(R, scatter_dim)                    # block p goes to rank p
        exchanged = torch.cat(received_blocks, gather_dim)  # in rank order
        return exchanged.flatten(-c) @ w + bias             # its last c dims, as few as make up K

    Args:
        x: at least 2-D, e.g. [batch, tokens, heads / R, head_dim]; float32, float16, bfloat16 or, unfused, float64, on
            CPU or CUDA.
        w: [K, N], or [..., K, N] with exactly the batch dims of the exchanged x, which then has one dim of rows; of x's
            dtype and device.
        gather_dim: a dim of x, along which the received blocks are concatenated; negative ones count from the end.
            Where it is part of K, `chunked` and `fused` keep sums in float32 across sources, own data first.
        scatter_dim: another dim of x, along which it is cut; R must divide x's size there.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        bias: [N], of x's dtype and device, added before the one rounding from float32.
        save_exchanged: whether the exchanged x, as large as x, is kept for grad w; otherwise the backward exchanges x
            again, by a plain collective.

    Returns:
        A contiguous tensor of the exchanged x's shape, with [N] in place of the dims that make up K.

    Every rank of the group calls it with the same shapes, dtype and dims, in the same order of calls. Autocast casts
    the tensors as it does those of torch.matmul. Matmuls accumulate in float32.

    Reverse-mode autograd gives what it gives for the program above: grad x is `matmul_all_to_all` of the result's
    gradient; grad w and grad bias are this rank's own.

    Raises:
        ValueError: an argument is not as described here; raised before anything is sent.
        TypeError: likewise, where it is of another type, or a DTensor: pass its ``.to_local()``.
        PeerTimeoutError: a peer did not come within ``FUSEDCOMM_TIMEOUT_S``. On CUDA the next call, or `synchronize`,
            raises it.
        PeerMismatchError: a peer called another op, or this one with other shapes, dtype or dims; on CUDA as above.
        RuntimeError: the call cannot be made here: inside a torch.func transform, with forward-mode tangents, in a
            process that was forked from a rank, or in the capture of a CUDA graph without a call in
            `before_capture` before it.

    A call that runs ``unfused`` (see `explain`) exchanges by the process group's own collectives, and raises their
    errors.

    Example, on each of 2 ranks::

        x, w = torch.ones(2, 8, 1, 3), torch.ones(6, 5)  # [batch, tokens, heads / R, head_dim], [heads * head_dim, N]
        y = fusedcomm.all_to_all_matmul(x, w, gather_dim=-2, scatter_dim=1)
        assert y.shape == (2, 4, 5)  # [batch, tokens / R, N]
    """
    check_types(x, w, bias, gather_dim=gather_dim, scatter_dim=scatter_dim)
    group_size, group_name = resolve(group)
    keep = bool(save_exchanged) and torch.is_grad_enabled() and w.requires_grad
    call = torch.ops.fusedcomm.all_to_all_matmul
    return call(x, w, bias, gather_dim, scatter_dim, keep, group_size, group_name)[0]


def exchange_of(
    x: Tensor, w: Tensor, bias: Tensor | None, gather_dim: int, scatter_dim: int, group_size: int
) -> Exchange:
    """Check a call and work out its geometry. Raises ValueError."""
    check_tensors(x, [w], [bias])
    exchange = shapes.of(shapes.all_to_all_matmul, x.shape, w.shape, gather_dim, scatter_dim, group_size)
    check_bias(bias, w.shape[-1])
    return exchange


def _kernel(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    gather_dim: int,
    scatter_dim: int,
    return_exchanged: bool,
    group_size: int,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    exchange = exchange_of(x, w, bias, gather_dim, scatter_dim, group_size)

    def unfused() -> tuple[list[Tensor], Tensor | None]:
        out, exchanged = reference.all_to_all_matmul(
            x, w, bias, gather_dim, scatter_dim, exchange.num_lead, group_size, group_name
        )
        return [out], exchanged if return_exchanged else None

    call = (OP, ALGORITHMS, exchange, group_name, x, [w], [bias])
    (out,), exchanged = run(*call, unfused=unfused, return_gathered=return_exchanged)
    return out, by_product(exchanged, x)


register_kernel(OP, _kernel)


@register_fake(OP)
def _fake(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    gather_dim: int,
    scatter_dim: int,
    return_exchanged: bool,
    group_size: int,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    exchange = exchange_of(x, w, bias, gather_dim, scatter_dim, group_size)
    return x.new_empty(exchange.out_shape), x.new_empty(exchange.shape if return_exchanged else 0)


register_modes(OP)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w, _bias, gather_dim, scatter_dim, return_exchanged, group_size, group_name = inputs
    ctx.set_materialize_grads(False)
    saved_x = None
    if ctx.needs_input_grad[1]:
        saved_x = output[1] if return_exchanged else x
    ctx.save_for_backward(saved_x, w if ctx.needs_input_grad[0] else None)
    ctx.x_shape, ctx.w_layout, ctx.num_lead = x.shape, gradients.layout_of(w), output[0].ndim - 1
    ctx.saved_exchanged = return_exchanged
    ctx.dims, ctx.group = (gather_dim, scatter_dim), (group_size, group_name)


def _backward(ctx: Any, grad: Tensor | None, grad_exchanged: Tensor | None) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors
    gather_dim, scatter_dim = ctx.dims
    grad_x = grad_w = grad_bias = None
    if grad is not None:
        if ctx.needs_input_grad[0]:
            columns = _exchanged_shape(ctx.x_shape, gather_dim, scatter_dim, ctx.group[0])[ctx.num_lead :]
            grad_x = torch.ops.fusedcomm.matmul_all_to_all(
                grad, w.mT, None, columns, scatter_dim, gather_dim, *ctx.group
            )
        if ctx.needs_input_grad[1]:
            exchanged = x if ctx.saved_exchanged else reference.exchange(x, gather_dim, scatter_dim, *ctx.group)
            grad_w = gradients.of_w(exchanged.flatten(ctx.num_lead), grad, ctx.w_layout)
        if ctx.needs_input_grad[2]:
            grad_bias = gradients.of_bias(grad)
    if grad_exchanged is not None and ctx.saved_exchanged and ctx.needs_input_grad[0]:  # or it is empty, and constant
        back = reference.exchange(grad_exchanged, scatter_dim, gather_dim, *ctx.group)
        grad_x = back if grad_x is None else grad_x + back
    return grad_x, grad_w, grad_bias, None, None, None, None, None


def _exchanged_shape(x: torch.Size, gather_dim: int, scatter_dim: int, group_size: int) -> list[int]:
    shape = list(x)
    shape[scatter_dim] = shape[scatter_dim] // group_size
    shape[gather_dim] = shape[gather_dim] * group_size
    return shape


register_autograd(OP, _backward, _setup_context)
