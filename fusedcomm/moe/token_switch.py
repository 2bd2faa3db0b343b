"""torch's interface of token switches, which torch has since 2.15."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedcomm.memory.group import Group, rank_of, resolve
from fusedcomm.ops.moe import moe_dispatch, require
from fusedcomm.plan.routing import Routing

interface: Any
try:
    from torch.distributed import _token_switch as interface  # type: ignore[attr-defined, no-redef]
except ImportError:
    interface = None
_Base: Any = object if interface is None else interface.TokenSwitch


class TokenSwitch(_Base):  # type: ignore[misc]
    """torch.distributed._token_switch.TokenSwitch by `moe_dispatch` and its gradient. Every rank makes the same calls.

    The layout is "expert_major", rows as `moe_dispatch` places them, each with its weight; `combine` does not weigh.
    The arguments are those of TokenSwitchNCCL.

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
        require(layout == "expert_major", "layout", "'expert_major'", layout)
        size, name = self._where
        x, limits = (
            torch.zeros(len(topk_idx), 1, device=topk_idx.device),
            (self._num_experts, self._max_recv_tokens_per_rank),
        )
        packed = moe_dispatch(x, topk_idx, *limits, name, max_tokens=self._max_tokens)[2]
        if per_expert_token_counts is not None:
            routing = Routing(packed, rank_of(name), size, topk_idx.numel())
            kept = routing.kept.sum(0)[routing.experts(routing.rank)]
            per_expert_token_counts[: len(kept)] = kept
        return interface.Routing(packed, topk_idx, layout)

    def _alloc_dispatch_outputs(
        self, routing: Any, tokens: Tensor, topk_weights: Tensor, max_recv_tokens: int, H: int, K: int
    ) -> tuple[Tensor, Tensor, None]:
        return tokens.new_empty(max_recv_tokens, H), topk_weights.new_empty(max_recv_tokens), None

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
        if out_topk_weights is not None:
            out_topk_weights.copy_(self._sent(topk_weights.reshape(-1, 1), routing, 1)[:, 0])

    def _combine(self, routing: Any, expert_tokens: Tensor, out_tokens: Tensor) -> None:
        self._check(expert_tokens, "expert_tokens")
        sizes = routing.topk_idx.shape
        combine = torch.ops.fusedcomm.moe_combine
        out_tokens.copy_(combine(expert_tokens, None, None, routing.handle, *sizes, False, *self._where)[0])

    def _sent(self, rows: Tensor, routing: Any, k: int) -> Tensor:
        capacity = self._max_recv_tokens_per_rank
        return torch.ops.fusedcomm.moe_send(rows, None, routing.handle, k, capacity, *self._where)  # type: ignore

    def _check(self, t: Tensor, name: str) -> None:
        capacity = self._max_recv_tokens_per_rank
        require(len(t) == capacity, name, f"[max_recv_tokens_per_rank = {capacity}, ...]", t.shape)
