"""torchtitan's interface of token dispatchers, which torchtitan has since 0.3."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fusedcomm.memory.group import Group, resolve
from fusedcomm.ops.moe import moe_combine, moe_dispatch, require


@dataclass(kw_only=True)
class TokenDispatcher:
    """torchtitan's token dispatcher by `moe_dispatch` and `moe_combine`, and its Config: ``build`` copies it.

    It is a ``token_dispatcher`` for torchtitan's ``RoutedExperts.Config``, and has the methods that this calls. All
    ranks have the same number of tokens, unless num_max_tokens_per_rank or capacity is given.

    Attributes:
        num_experts: E.
        top_k: k.
        num_max_tokens_per_rank: max_tokens of `moe_dispatch`, or None.
        capacity: as in `moe_dispatch`, or None, which may be R times what balanced routing needs.
        alignment: as in `moe_dispatch`, 1 by default.
    """

    num_experts: int
    top_k: int
    num_max_tokens_per_rank: int | None = None
    capacity: int | None = None
    alignment: int = 1

    def build(self) -> TokenDispatcher:
        return replace(self)

    def wire_meshes(self, *, ep_mesh: Group) -> None:
        require(ep_mesh is not None, "ep_mesh", "a 1-D DeviceMesh", None)
        self.group_name = resolve(ep_mesh)[1]

    def dispatch(
        self,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Any = None,
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        max_tokens = self.num_max_tokens_per_rank
        if self.capacity is None and max_tokens is None:
            max_tokens = len(x_TD)
        facts, alignment = (self.num_experts, self.capacity, self.group_name), self.alignment
        rows, offsets, routing = moe_dispatch(
            x_TD, topk_expert_ids_TK, *facts, alignment=alignment, max_tokens=max_tokens
        )
        return rows, offsets.diff(prepend=offsets.new_zeros(1)), (routing, topk_scores_TK)

    def combine(self, routed_output_RD: Tensor, metadata: tuple[Tensor, Tensor], x_TD: Any = None) -> Tensor:
        return moe_combine(routed_output_RD, *metadata, self.group_name)
