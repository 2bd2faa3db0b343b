"""Mixture of experts: tokens go to the ranks of their experts and come back, with sizes that the host knows before."""

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from fusedcomm.memory.group import Group, resolve
from fusedcomm.ops.arguments import check_int, check_tensor
from fusedcomm.ops.call_check import told_to_peers
from fusedcomm.ops.routed import require  # registers the ops too
from fusedcomm.plan import routing as layout
from fusedcomm.plan.geometry.shapes import OP_DTYPES

Experts = TypeVar("Experts", Tensor, list[Tensor])


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
            an expert twice. A GPU takes others for -1, but with ``FUSEDCOMM_CHECK=1``.
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
    rows, offsets, routing = _dispatch(x, expert_ids, (), num_experts, capacity, group, alignment, max_tokens)
    return rows, offsets, routing


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
    """``moe_combine(F.grouped_mm(h, w, offs=offsets), routing, scores)``, stored where the tokens' ranks read it.

    Args:
        h: [capacity, K], as the dispatch has placed its rows.
        w: [E / R, K, N], of this rank's experts; of h's dtype and device.
        routing: of the dispatch.
        scores: [..., k], floating, the weight of each of a token's rows.
        group: that of the dispatch.

    Returns:
        [..., N]. The rest is that of `moe_combine`. Autocast casts h and w.
    """
    return _combined(h, w, routing, scores, group)


def dispatch_grouped_matmul(
    x: Tensor,
    expert_ids: Tensor,
    w: Experts,
    num_experts: int,
    capacity: int | None,
    group: Group = None,
    *,
    alignment: int = 1,
    max_tokens: int | None = None,
) -> tuple[Experts, Tensor, Tensor]:
    """`moe_dispatch`, and its rows times the w of their experts.

    Args:
        x: [..., H]. It and all others but w are those of `moe_dispatch`.
        expert_ids: [..., k].
        w: [E / R, H, N], of this rank's experts; of x's dtype and device. Or a list of them, as gate and up.
        num_experts: E.
        capacity: rows that each rank receives at most, or None.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        alignment: of each expert's first row.
        max_tokens: the most tokens of any rank.

    Returns:
        (h, offsets, routing). h: [capacity, N], zero where rows have no token; a list for a list. Autocast casts x and
        w. The rest is that of `moe_dispatch`. On GPUs half of the experts' rows travel while others are multiplied, if
        that pays.
    """
    several = isinstance(w, list)
    ws: Any = w if several else [w]
    _, offsets, routing, *hs = _dispatch(x, expert_ids, ws, num_experts, capacity, group, alignment, max_tokens)
    return cast(Experts, hs if several else hs[0]), offsets, routing


def moe_overflow(routing: Tensor) -> Tensor:
    """bool [] on the device: whether rows of any rank were dropped, the same on all ranks.

    Args:
        routing: of `moe_dispatch`.
    """
    return layout.overflow(routing)


def moe_counts(routing: Tensor) -> Tensor:
    """int64 [E] on the device: the rows of all ranks for each expert, before any was dropped.

    Args:
        routing: of `moe_dispatch`.
    """
    return layout.totals(routing)


def _dispatch(
    x: Tensor,
    expert_ids: Tensor,
    ws: Sequence[Tensor],
    num_experts: int,
    capacity: int | None,
    group: Group,
    alignment: int,
    max_tokens: int | None,
) -> list[Tensor]:
    """[rows, offsets, routing], and the rows times each of ``ws``."""
    group_size, group_name = resolve(group)
    with told_to_peers("moe_dispatch", group_name, x):
        _check_payload("x", x)
        _check_slots("expert_ids", expert_ids)
        for name, value in {"num_experts": num_experts, "alignment": alignment}.items():
            check_int(name, value)
            require(value >= 1, name, "at least 1", value)
        require(expert_ids.dtype in (torch.int32, torch.int64), "expert_ids", "int32 or int64", expert_ids.dtype)
        require(x.shape[:-1] == expert_ids.shape[:-1], "expert_ids", "[*x.shape[:-1], k]", expert_ids.shape)
        require(x.device == expert_ids.device, "expert_ids", f"on {x.device}", expert_ids.device)
        require(num_experts % group_size == 0, "num_experts", "a multiple of group_size", num_experts)
        require(ws != [], "w", "[E / R, H, N], or a list of them", ws)
        x, *ws = _checked_and_cast("x", x, num_experts, group_size, *ws)
        ids = expert_ids.flatten(0, -2)
        if max_tokens is not None:
            require(ids.shape[0] <= max_tokens, "max_tokens", "at least the tokens of x", max_tokens)
        if capacity is None:
            require(max_tokens is not None, "max_tokens", "an int where capacity is None", None)
            assert max_tokens is not None
            own = num_experts // group_size
            capacity = group_size * max_tokens * min(ids.shape[1], own) + own * (alignment - 1)
        check_int("capacity", capacity)
        require(capacity >= 0, "capacity", "at least 0", capacity)
    found: list[Tensor] = torch.ops.fusedcomm.moe_dispatch(
        x.flatten(0, -2), ids, ws, num_experts, capacity, alignment, group_size, group_name
    )
    return found


def _combined(h: Tensor, w: Tensor | None, routing: Tensor, scores: Tensor, group: Group) -> Tensor:
    group_size, group_name = resolve(group)
    with told_to_peers("moe_combine", group_name, h):
        name = "rows" if w is None else "h"
        _check_payload(name, h)
        check_tensor("routing", routing)
        _check_slots("scores", scores)
        require(h.ndim == 2, name, "[capacity, H]", h.shape)
        require(scores.is_floating_point(), "scores", "floating", scores.dtype)
        for other, each in {"scores": scores, "routing": routing}.items():
            require(each.device == h.device, other, f"on {h.device}", each.device)
        require(routing.ndim == 2, "routing", "that of a dispatch", routing.shape)
        num_experts = routing.shape[-1]
        if w is not None:
            h, w = _checked_and_cast(name, h, num_experts, group_size, w)
        flat = scores.flatten(0, -2)
        num_tokens, k = flat.shape
        shape = layout.packed_shape(num_tokens * k, num_experts, group_size)
        wanted = "of a dispatch of scores' tokens and k in this group"
        require([*routing.shape] == [*shape], "routing", wanted, routing.shape)
    saves = torch.is_grad_enabled() and scores.requires_grad
    y, _ = torch.ops.fusedcomm.moe_combine(h, w, flat, routing, num_tokens, k, saves, group_size, group_name)
    return y.view(*scores.shape[:-1], y.shape[-1])  # type: ignore[no-any-return]


def _check_payload(name: str, t: Any) -> None:
    check_tensor(name, t)
    require(t.dtype in OP_DTYPES, name, "float32, float16, bfloat16 or float64", t.dtype)
    require(t.ndim >= 2, name, "at least 2-D", t.shape)


def _check_slots(name: str, t: Any) -> None:
    check_tensor(name, t)
    require(t.ndim >= 2 and t.shape[-1] >= 1, name, "[..., k], k at least 1", t.shape)


def _checked_and_cast(name: str, x: Tensor, num_experts: int, group_size: int, *ws: Any) -> list[Tensor]:
    """[x, *ws], cast by autocast if there are ws. Each is [E / R, x.shape[-1], N]."""
    for w in ws:
        check_tensor("w", w)
        require(w.ndim == 3 and w.shape[1] == x.shape[-1], "w", f"[E / R, {name}.shape[-1], N]", w.shape)
    kind, found = x.device.type, [x, *ws]
    casts = bool(ws) and kind != "meta" and torch.is_autocast_enabled(kind)
    if casts and torch.float64 not in [t.dtype for t in found]:
        found = [t.to(torch.get_autocast_dtype(kind)) for t in found]
    for w in found[1:]:
        same = (w.dtype, w.device) == (found[0].dtype, found[0].device)
        require(same, "w", f"of {name}'s dtype and device", (w.dtype, w.device))
        require(w.shape[0] * group_size == num_experts, "w", "[num_experts / group_size, K, N]", w.shape)
    return found
