"""What several ranks get of a push: one matmul, just before the first of them, and a copy to each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fusedcomm
from fusedcomm.memory.workspace import Workspace
from tests.helpers.groups import fresh_group, member_of
from tests.helpers.in_place import after_peers, in_place_from, without_plans
from tests.helpers.on_ranks import on_ranks
from tests.helpers.uneven import Ranges, Uneven

PAIRS: Ranges = ((0, 2), (0, 2), (3, 2), (3, 2))  # nobody gets the third head
OTHERS: Ranges = ((0, 2), (3, 2), (0, 2), (2, 1))


def heads(scatter: Ranges, tokens: int = 601, **options: Any) -> Uneven:
    return Uneven("matmul_all_to_all", (tokens, 5, 32), 2, gather_dim=0, scatter_dim=1, scatter=scatter, **options)


def summed(scatter: Ranges) -> Uneven:
    return Uneven("matmul_reduce_scatter", (40, 80), 1, scatter_dim=1, scatter=scatter)


ORDER = {  # rank 1 sends to ranks 2, 3, 0 and 1; its own heads come before all others where another rank gets them
    "pairs": (heads(PAIRS), ["64", "64", "to 2", "to 3", "to 0"]),
    "others": (heads(OTHERS), ["64", "to 2", "32", "to 3", "to 0", "64"]),
    "one head": (heads(((1, 1),) * 4), ["32", "to 2", "to 3", "to 0"]),
    "partly": (heads(((0, 2), (1, 2), (0, 2), (2, 1))), ["160", "to 2", "to 3", "to 0"]),
    "sums": (summed(((0, 32), (48, 32), (0, 32), (0, 32))), ["32", "to 2", "to 3", "to 0", "32"]),
}


@on_ranks(4)
@pytest.mark.parametrize("name", ORDER)
def test_what_several_ranks_get_is_multiplied_once(rank: int, name: str) -> None:
    """Columns of each matmul, and signals, in their order."""
    case, wanted = ORDER[name]
    seen: list[str] = []
    multiply, signal = torch.mm, Workspace.signal

    def spied_multiply(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(str(args[1].shape[-1]))
        return multiply(*args, **kwargs)

    def spied_signal(self: Workspace, dst_rank: int, *round: int) -> None:
        seen.append(f"to {dst_rank}")
        signal(self, dst_rank, *round)

    with fresh_group() as group, fusedcomm.force_algorithm("chunked", strict=True):
        inputs = case.inputs(4)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "mm", spied_multiply)
            patch.setattr(Workspace, "signal", spied_signal)
            out = case.call(inputs[rank], group, 4)
        assert torch.equal(out, case.expected(inputs)[rank])
        assert rank != 1 or seen == wanted, seen


@on_ranks(4)
@pytest.mark.parametrize("prepared", [True, False], ids=["prepared", "python"])
@pytest.mark.parametrize("scatter", [PAIRS, OTHERS], ids=["pairs", "others"])
def test_shared_chunks_come_in_place_whoever_is_late(rank: int, scatter: Ranges, prepared: bool) -> None:
    """Where a peer is late the own chunk goes first, in prepared calls too, and some chunks come through slots."""
    case, seen = heads(scatter, bias=True), set()
    with pytest.MonkeyPatch.context() as patch:
        if not prepared:
            without_plans(patch)
        with fresh_group() as group, fusedcomm.force_algorithm("chunked", strict=True):
            for seed in range(16):
                if seed < 12:
                    after_peers(group, seed % 4)  # they have sent it their chunks before it has posted
                out = case.call(case.inputs(4, seed)[rank], group, 4)
                seen |= {len(in_place_from(member_of(group).workspace))}
                assert torch.equal(out, case.expected(case.inputs(4, seed))[rank])
                del out
    assert len(seen) > 1, seen
