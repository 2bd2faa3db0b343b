"""Mixture of experts: tokens go to the ranks of their experts and come back, with sizes that the host knows before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedcomm.memory.group import Group, resolve
from fusedcomm.ops import routed  # noqa: F401 registers the ops
from fusedcomm.ops.arguments import check_int, check_tensor
from fusedcomm.plan import routing as layout
from fusedcomm.plan.geometry.shapes import OP_DTYPES


def moe_dispatch(
    x: Tensor,
    expert_ids: Tensor,
    num_experts: int,
    capacity: int | None,
    group: Group = None,
    *,
    alignment: int = 1,
    max_tokens: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Send each token's row to the ranks of its experts. Experts lie in equal blocks over the R ranks.

    Args:
        x: [..., H]; float32, float16, bfloat16 or float64. The number of tokens may differ between ranks, and be 0.
        expert_ids: [..., k], int32 or int64, the experts of each token; -1 for a choice without one. A token may name
            an expert twice.
        num_experts: E, a multiple of R.
        capacity: rows that each rank receives at most. None: R * max_tokens * min(k, E / R), and room to align, which
            holds all rows if no token names an expert twice.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        alignment: each expert's first row is a multiple of it.
        max_tokens: the most tokens of any rank; capacity=None needs it.

    Returns:
        (rows, offsets, routing). rows: [capacity, H], by expert, in it by rank and token; rows without a token are
        zero. offsets: int32 [E / R], ends of the experts of this rank, as ``F.grouped_mm`` takes them: each is where
        the next expert begins. routing: an opaque int64 tensor for `moe_combine`, `moe_overflow` and `moe_counts`.

    Where rows exceed the capacity of a rank, its fullest experts are cut to one level, and their last rows dropped; all
    ranks know it (`moe_overflow`), and with ``FUSEDCOMM_CHECK=1`` all raise RuntimeError.

    Every rank calls it with equal arguments but the number of tokens, in the same order of calls. The gradient of x is
    a `moe_combine` without scores.

    Raises:
        ValueError: an argument is not as described here; raised before anything is sent.
        TypeError: likewise, where it is of another type, or a DTensor: pass its ``.to_local()``.
        PeerMismatchError: a peer has another H, num_experts, capacity, alignment or k.
        PeerTimeoutError: a peer did not come within ``FUSEDCOMM_TIMEOUT_S``.

    Example, on each of 2 ranks::

        x, expert_ids = torch.ones(3, 8), torch.tensor([[0], [1], [1]])
        rows, offsets, routing = fusedcomm.moe_dispatch(x, expert_ids, num_experts=2, capacity=6)
        assert fusedcomm.moe_counts(routing).tolist() == [2, 4]
        assert fusedcomm.moe_combine(rows, routing, torch.ones(3, 1)).equal(x)
    """
    group_size, group_name = resolve(group)
    _check_payload("x", x)
    _check_slots("expert_ids", expert_ids)
    for name, value in {"num_experts": num_experts, "alignment": alignment}.items():
        check_int(name, value)
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if expert_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"expert_ids must be int32 or int64, got {expert_ids.dtype}")
    if x.shape[:-1] != expert_ids.shape[:-1]:
        raise ValueError(f"expert_ids must have x's leading dims {[*x.shape[:-1]]}, got {[*expert_ids.shape]}")
    if num_experts % group_size:
        raise ValueError(f"num_experts must be divisible by group_size={group_size}, got {num_experts}")
    ids = expert_ids.flatten(0, -2)
    if max_tokens is not None and ids.shape[0] > max_tokens:
        raise ValueError(f"x must have at most max_tokens={max_tokens} tokens, got {ids.shape[0]}")
    if capacity is None:
        if max_tokens is None:
            raise ValueError("max_tokens must be given, as capacity is None")
        own = num_experts // group_size
        capacity = group_size * max_tokens * min(ids.shape[1], own) + own * (alignment - 1)
    check_int("capacity", capacity)
    if capacity < 0:
        raise ValueError(f"capacity must not be negative, got {capacity}")
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.fusedcomm.moe_dispatch(
        x.flatten(0, -2), ids, num_experts, capacity, alignment, group_size, group_name
    )
    return found


def moe_combine(rows: Tensor, routing: Tensor, scores: Tensor, group: Group = None) -> Tensor:
    """Bring the experts' rows back and add those of each token: the way back of `moe_dispatch`.

    Args:
        rows: [capacity, H], as the dispatch has placed them.
        routing: of the dispatch.
        scores: [..., k], floating, the weight of each of a token's rows.
        group: that of the dispatch.

    Returns:
        [..., H] of rows' dtype, scores' leading dims: the sum of each token's rows times their scores, in float32, in
        the order of k, rounded once. Dropped rows and those of expert -1 count as zero.

    Gradients of rows go by a dispatch of the weighed gradient; where scores require grad the k rows of each token are
    saved, [..., k, H]. Errors are those of `moe_dispatch`.
    """
    return _combined(rows, None, routing, scores, group)


def grouped_matmul_combine(h: Tensor, w: Tensor, routing: Tensor, scores: Tensor, group: Group = None) -> Tensor:
    """``moe_combine(F.grouped_mm(h, w, offs=offsets), routing, scores)``, multiplied into memory that peers read.

    Args:
        h: [capacity, K], as the dispatch has placed its rows.
        w: [E / R, K, N], of this rank's experts; of h's dtype and device.
        routing: of the dispatch.
        scores: [..., k], floating, the weight of each of a token's rows.
        group: that of the dispatch.

    Returns:
        [..., N]. The rest is that of `moe_combine`. Autocast casts h and w.
    """
    _check_weights(w, h.shape[-1] if isinstance(h, Tensor) else None)
    return _combined(*_autocast(h, w), routing, scores, group)


def dispatch_grouped_matmul(
    x: Tensor,
    expert_ids: Tensor,
    w: Tensor,
    num_experts: int,
    capacity: int | None,
    group: Group = None,
    *,
    alignment: int = 1,
    max_tokens: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`moe_dispatch`, and its rows times the w of their experts, [E / R, H, N].

    Returns:
        (h, offsets, routing). h: [capacity, N], zero where rows have no token. Autocast casts x and w. The rest is that
        of `moe_dispatch`. One runs behind the other: on CPUs a copy and a matmul would share the cores.
    """
    _check_weights(w, x.shape[-1] if isinstance(x, Tensor) else None)
    x, w = _autocast(x, w)
    _check_same_dtype(x, w)
    _check_experts(w, num_experts, resolve(group)[0])
    rows, offsets, routing = moe_dispatch(
        x, expert_ids, num_experts, capacity, group, alignment=alignment, max_tokens=max_tokens
    )
    return torch.ops.fusedcomm.moe_grouped_matmul(rows, w, offsets), offsets, routing


def moe_overflow(routing: Tensor) -> Tensor:
    """bool [] on the device: whether rows of any rank were dropped, the same on all ranks."""
    return layout.overflow(routing)


def moe_counts(routing: Tensor) -> Tensor:
    """int64 [E] on the device: the rows of all ranks for each expert, before any was dropped."""
    return layout.totals(routing)


def _combined(h: Tensor, w: Tensor | None, routing: Tensor, scores: Tensor, group: Group) -> Tensor:
    group_size, group_name = resolve(group)
    _check_payload("rows" if w is None else "h", h)
    check_tensor("routing", routing)
    _check_slots("scores", scores)
    if h.ndim != 2:
        raise ValueError(f"{'rows' if w is None else 'h'} must be 2-D, [capacity, H], got {[*h.shape]}")
    if not scores.is_floating_point():
        raise ValueError(f"scores must be floating, got {scores.dtype}")
    num_experts = routing.shape[-1]
    if w is not None:
        _check_same_dtype(h, w)
        _check_experts(w, num_experts, group_size)
    flat = scores.flatten(0, -2)
    num_tokens, k = flat.shape
    if [*routing.shape] != [*layout.packed_shape(num_tokens * k, num_experts, group_size)]:
        raise ValueError(f"routing must be of a dispatch of scores' tokens and k, {[num_tokens, k]}, in the same group")
    saves = torch.is_grad_enabled() and scores.requires_grad
    y, _ = torch.ops.fusedcomm.moe_combine(h, w, flat, routing, num_tokens, k, saves, group_size, group_name)
    return y.view(*scores.shape[:-1], y.shape[-1])  # type: ignore[no-any-return]


def _check_payload(name: str, t: Any) -> None:
    check_tensor(name, t)
    if t.dtype not in OP_DTYPES:
        raise ValueError(f"{name} must be float32, float16, bfloat16 or float64, got {t.dtype}")
    if t.ndim < 2:
        raise ValueError(f"{name} must have at least 2 dims, got {[*t.shape]}")


def _check_slots(name: str, t: Any) -> None:
    check_tensor(name, t)
    if t.ndim < 2 or t.shape[-1] < 1:
        raise ValueError(f"{name} must be [..., k] with k at least 1, got {[*t.shape]}")


def _check_weights(w: Any, k: Any) -> None:
    check_tensor("w", w)
    if w.ndim != 3 or w.shape[1] != k:
        raise ValueError(f"w must be [experts of this rank, {k}, N], got {[*w.shape]}")


def _check_experts(w: Tensor, num_experts: int, group_size: int) -> None:
    if w.shape[0] * group_size != num_experts:
        raise ValueError(
            f"w must have num_experts / group_size = {num_experts / group_size:g} experts, got {[*w.shape]}"
        )


def _check_same_dtype(x: Tensor, w: Tensor) -> None:
    if (x.dtype, x.device) != (w.dtype, w.device):
        raise ValueError(f"w must have dtype {x.dtype} on {x.device}, got {w.dtype} on {w.device}")


def _autocast(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or torch.float64 in (x.dtype, w.dtype):
        return x, w
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), w.to(dtype)
