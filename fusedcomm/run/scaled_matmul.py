"""Products of float8 values with their scales, in float32, rounded once."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fusedcomm.plan.scaled_programs import OfPayload
from fusedcomm.plan.scaling import BLOCK, Scaled
from fusedcomm.plan.schedule import Multiply

Shape = Sequence[int]


def scaled_matmul(
    out: Tensor,
    x: Tensor,
    w: Tensor,
    scale_x: Tensor,
    scale_w: Tensor,
    bias: Tensor | None,
    *,
    adds: bool = False,
    fast: bool = False,
) -> None:
    """``out = (x * scale_x) @ (w * scale_w) + bias``, or ``out += ...`` in float32; [M, K] @ [K, N], or with batches.

    Scales are of one element, one per row of x and column of w, or one per block of 128.
    """
    if out.ndim == 3:
        for each in zip(out, x, w, scale_x, scale_w, strict=True):
            scaled_matmul(*each, bias, adds=adds, fast=fast)
        return
    if _torch_can(x.device, x.shape, w.shape[1], scale_x.shape, scale_w.shape):
        y = _by_torch(out, x, w, scale_x, scale_w, bias, adds, fast)
    else:
        y = dequantized(x, scale_x) @ dequantized(w, scale_w)
    if y is out:
        return
    if bias is not None:
        y += bias
    if adds:
        out += y
    else:
        out.copy_(y)


def scaled_product(x: Scaled, w: Scaled, bias: Tensor | None) -> Tensor:
    """``x @ w + bias`` of x [..., M, K] and w [K, N], or w [..., K, N] of x's batch dims."""
    out = x.values.new_empty((*x.shape[:-1], w.shape[-1]), dtype=x.dtype)
    _into(out, x.values, w, x.scale, bias)
    return out


def product_of_payload(rows: Tensor, w: OfPayload, bias: Tensor | None) -> Tensor:
    """The product of packed rows [..., bytes], or of x alone, and w: a piece of K after the other, in float32."""
    out = rows.new_empty((*rows.shape[:-1], w.shape[-1]), dtype=w.dtype)
    if w.payload is None:
        assert w.scale_x is not None
        _into(out, rows, w, w.scale_x, bias)
        return out
    total = out if len(w.payload.ks) == 1 else torch.empty_like(out, dtype=torch.float32)
    for before, values, scale in w.payload.pieces(rows):
        of_k = Scaled(w.values.narrow(-2, before, values.shape[-1]), w.scale, w.dtype, fast=w.fast)
        if w.payload.block:
            of_k = replace(of_k, scale=w.scale.narrow(-2, before // w.payload.block, scale.shape[-1]))
        _into(total, values, of_k, scale, bias if before == 0 else None, adds=before > 0)
    return out if total is out else out.copy_(total)


def _into(out: Tensor, x: Tensor, w: Scaled, scale_x: Tensor, bias: Tensor | None, *, adds: bool = False) -> None:
    num_batch_dims = w.ndim - 2
    batches, rows = x.shape[:num_batch_dims].numel(), x.shape[num_batch_dims:-1].numel()
    if out.numel() == 0:
        return

    def matrices(t: Tensor) -> Tensor:
        return t.reshape(batches, rows, t.shape[-1])

    per_row = scale_x.expand(*x.shape[:-1], scale_x.shape[-1] if scale_x.ndim else 1)
    w_scale = w.scale if w.scale.ndim == w.ndim else w.scale.reshape([1] * w.ndim)
    w_scale = w_scale.expand(*w.shape[:-2], *w_scale.shape[-2:]).reshape(batches, *w_scale.shape[-2:])
    values = w.values.reshape(batches, *w.shape[-2:])
    scaled_matmul(matrices(out), matrices(x), values, matrices(per_row), w_scale, bias, adds=adds, fast=w.fast)


def dequantized(t: Tensor, scale: Tensor) -> Tensor:
    """t [..., M, N] in float32, times its scales."""
    for dim in (-2, -1):
        if scale.shape[dim] not in (1, t.shape[dim]):
            scale = scale.repeat_interleave(BLOCK, dim).narrow(dim, 0, t.shape[dim])
    return t.to(torch.float32) * scale


def has_float8(device: torch.device) -> bool:
    """On CPUs torch's own takes as long as dequantising."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def torch_can(step: Multiply, device: torch.device) -> bool:
    """Whether `torch._scaled_mm` makes the product of this step."""
    x, w, scale_x, scale_w = (place.sizes[-2:] for place in (step.x, step.w, *step.scales))
    return _torch_can(device, x, w[1], scale_x, scale_w)


def _torch_can(device: torch.device, x: Shape, n: int, scale_x: Shape, scale_w: Shape) -> bool:
    return has_float8(device) and 0 not in x and x[1] % 16 == n % 16 == 0 and scale_x[1] == scale_w[0] == 1


def _is_one_number(scale: Tensor) -> bool:
    return all(size == 1 or step == 0 for size, step in zip(scale.shape, scale.stride(), strict=True))


def _by_torch(
    out: Tensor, x: Tensor, w: Tensor, scale_x: Tensor, scale_w: Tensor, bias: Tensor | None, adds: bool, fast: bool
) -> Tensor:
    """``out``, where torch can write it; else the product in float32, without the bias."""
    is_loadable = w.stride(0) == 1 and w.stride(1) % 16 == 0 and w.data_ptr() % 16 == 0
    x, w = x.contiguous(), w if is_loadable else w.mT.clone(memory_format=torch.contiguous_format).mT
    tensor_wise = _is_one_number(scale_x) and _is_one_number(scale_w)
    if not adds and out.dtype == torch.bfloat16 and out.is_contiguous() and (tensor_wise or out.is_cuda):
        if tensor_wise:
            scales = scale_x[0, 0], scale_w[0, 0]
        else:
            scales = scale_x.expand(len(x), 1).contiguous(), scale_w.expand(1, w.shape[1]).contiguous()
        return torch._scaled_mm(x, w, *scales, bias, None, out.dtype, fast, out=out)
    one = torch.ones((), dtype=torch.float32, device=x.device)
    product = torch._scaled_mm(x, w, one, one, out_dtype=torch.float32, use_fast_accum=fast)
    return product.mul_(scale_x).mul_(scale_w)
