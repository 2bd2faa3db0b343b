"""torch's interface of token switches, which torch has since 2.15."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedcomm.memory.group import Group, rank_of, resolve
from fusedcomm.ops.moe import moe_dispatch, require
from fusedcomm.plan.routing import Routing, counts_of

interface: Any
try:
    from torch.distributed import _token_switch as interface  # type: ignore[attr-defined, no-redef]
except ImportError:
    interface = None
_Base: Any = object if interface is None else interface.TokenSwitch


class TokenSwitch(_Base):  # type: ignore[misc]
    """torch.distributed._token_switch.TokenSwitch by `moe_dispatch` and its gradient. Every rank makes the same calls.

    Layout "expert_major": rows as `moe_dispatch` places them, each with its weight. "flat": a token comes once to each
    rank, by rank and token, with weights and numbers [rows, k] of its experts there, which lie in ascending order
    before zeros and -1. `combine` does not weigh. The arguments are those of TokenSwitchNCCL.

    Args:
        process_group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        num_experts: E, a multiple of R.
        max_dispatch_tokens_per_rank: the most tokens of any rank.
        max_recv_tokens_per_rank: the capacity of `moe_dispatch`, and the rows of each result of `dispatch`.
        max_token_bytes: not needed.
    """

    def __init__(
        self,
        process_group: Group,
        num_experts: int,
        max_dispatch_tokens_per_rank: int,
        max_recv_tokens_per_rank: int,
        max_token_bytes: int | None = None,
    ) -> None:
        require(interface is not None, "torch", "2.15 or newer", torch.__version__)
        self._where = resolve(process_group)
        self._num_experts, self._max_tokens = num_experts, max_dispatch_tokens_per_rank
        self._max_recv_tokens_per_rank = max_recv_tokens_per_rank  # torch reads it

    def create_routing(
        self, topk_idx: Tensor, per_expert_token_counts: Tensor | None = None, *, layout: str
    ) -> interface.Routing:
        layouts = "expert_major", "flat"
        require(layout in layouts, "layout", " or ".join(map(repr, layouts)), layout)
        (size, name), own = self._where, self._num_experts // self._where[0]
        rank, limits = rank_of(name), {"capacity": self._max_recv_tokens_per_rank, "max_tokens": self._max_tokens}
        if layout == "expert_major":
            x = torch.zeros(len(topk_idx), 1, device=topk_idx.device)
            packed, local, order = moe_dispatch(x, topk_idx, self._num_experts, group=name, **limits)[2], None, None
            kept = Routing(packed, rank, size, topk_idx.numel()).kept.sum(0)[rank * own :][:own]
        else:
            ranks = topk_idx.div(own, rounding_mode="floor")
            again = (ranks[:, :, None] == ranks[:, None, :]).tril(-1).any(-1)
            numbers = topk_idx.float() + 1  # 0 in rows of no token
            rows, _, packed = moe_dispatch(numbers, ranks.masked_fill(again, -1), size, group=name, **limits)
            local = rows.long() - 1 - rank * own
            local, order = local.masked_fill((local < 0) | (local >= own), own).sort(stable=True)
            local = local.masked_fill(local == own, -1)
            kept = counts_of(local.flatten(), own)
        if per_expert_token_counts is not None:
            per_expert_token_counts[:own] = kept
        return interface.Routing((packed, local, order), topk_idx, layout)

    def _alloc_dispatch_outputs(
        self, routing: Any, tokens: Tensor, topk_weights: Tensor, max_recv_tokens: int, H: int, K: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        is_flat, shape = routing.layout == "flat", (max_recv_tokens, K)
        weights = topk_weights.new_empty(shape if is_flat else shape[:1])
        idx = tokens.new_empty(shape, dtype=torch.int64) if is_flat else None
        return tokens.new_empty(max_recv_tokens, H), weights, idx

    def _dispatch(
        self,
        routing: Any,
        tokens: Tensor,
        topk_weights: Tensor,
        out_tokens: Tensor,
        out_topk_weights: Tensor | None,
        out_topk_idx: Tensor | None,
    ) -> None:
        k = routing.topk_idx.shape[1]
        self._check(out_tokens, "out_tokens")
        out_tokens.copy_(self._sent(tokens, routing, k))
        _, local, order = routing.handle
        if out_topk_weights is not None:
            if local is None:
                sent = self._sent(topk_weights.reshape(-1, 1), routing, 1)[:, 0]
            else:
                sent = self._sent(topk_weights, routing, k).gather(1, order).masked_fill(local < 0, 0)
            out_topk_weights.copy_(sent)
        if out_topk_idx is not None:
            out_topk_idx.copy_(local)

    def _combine(self, routing: Any, expert_tokens: Tensor, out_tokens: Tensor) -> None:
        self._check(expert_tokens, "expert_tokens")
        sizes = routing.topk_idx.shape
        combine = torch.ops.fusedcomm.moe_combine
        out_tokens.copy_(combine(expert_tokens, None, None, routing.handle[0], *sizes, False, *self._where)[0])

    def _sent(self, rows: Tensor, routing: Any, k: int) -> Tensor:
        capacity = self._max_recv_tokens_per_rank
        return torch.ops.fusedcomm.moe_send(rows, None, routing.handle[0], k, capacity, *self._where)  # type: ignore

    def _check(self, t: Tensor, name: str) -> None:
        capacity = self._max_recv_tokens_per_rank
        require(len(t) == capacity, name, f"[max_recv_tokens_per_rank = {capacity}, ...]", t.shape)
