"""Parts of different sizes by plain collectives: padded to one size, or as they are; and ranks that disagree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedcomm
from fusedcomm.plan.cost import model
from fusedcomm.run import reference
from tests.helpers.groups import fresh_group
from tests.helpers.in_place import without_plans
from tests.helpers.on_ranks import on_ranks
from tests.helpers.spies import Dispatched
from tests.helpers.uneven import Uneven
from tests.ops.test_uneven import CASES, GATHER, REDUCE, check_call, into_attention

COLLECTIVES = {
    "matmul_all_to_all": "all_to_all_single",
    "all_to_all_matmul": "all_to_all_single",
    GATHER: "all_gather_into_tensor",
    REDUCE: "reduce_scatter_tensor",
}


class Spy:
    """The functional collectives, and what was given to each."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if name != "wait_tensor":
                self.calls.append((name, args))
            return getattr(torch.ops._c10d_functional, name)(*args)

        return call


@contextmanager
def decided(padded: bool) -> Iterator[Spy]:
    spy = Spy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "pads", lambda *args: padded)
        patch.setattr(reference, "_c10d", spy)
        yield spy


def check_decided(rank: int, names: list[str], num_ranks: int, padded: bool) -> None:
    """Forward and backward, which is the other op of a pair, or plain."""
    for name in names:
        case = CASES[name][1]
        with pytest.MonkeyPatch.context() as patch, decided(padded) as spy:
            without_plans(patch)  # which know what was decided before
            with fresh_group() as group, fusedcomm.force_algorithm("unfused", strict=True):
                check_call(case, rank, num_ranks, 0, group)
        forward, args = spy.calls[0]
        assert forward == (COLLECTIVES[case.op] if padded else "all_to_all_single"), name
        if padded and forward == "all_to_all_single":
            assert set(args[1]) == set(args[2]) and len(set(args[1])) == 1, (name, args[1:])
            assert args[1][0] > 0 and args[1][0] * args[0].element_size() % 16 == 0


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "as-they-are"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_either_way_gives_the_same(ranks: Any, num_ranks: int, padded: bool) -> None:
    names = [name for name, (size, _) in CASES.items() if size == num_ranks]
    ranks(num_ranks).run(check_decided, names, num_ranks, padded)


@on_ranks(3)
def test_sums_of_parts_as_they_are_are_in_rank_order_and_rounded_once(rank: int) -> None:
    """In bfloat16 256 + 1 is 256, which a sum that rounds in between, or adds in another order, may give."""
    case = Uneven(REDUCE, (4, 2), 1, scatter_dim=0, other=1, dtype=torch.bfloat16)
    x, w = torch.full((4, 1), (1.0, 1.0, 256.0)[rank]).bfloat16(), torch.ones(1, 2).bfloat16()
    with fusedcomm.force_algorithm("unfused", strict=True), decided(False):
        total = case.call((x, w, None), None, 3)
    assert torch.equal(total, torch.full_like(total, 258.0))


DISAGREE = {
    "all_gather_matmul": (
        Uneven(GATHER, (7, 4), gather_dim=0, gather=(4, 3)),
        Uneven(GATHER, (8, 4), gather_dim=0, gather=(4, 4)),
        "gather_splits [4, 3] on rank 0 and None on rank 1",
    ),
    "matmul_reduce_scatter": (
        Uneven(REDUCE, (6, 4), scatter_dim=0, scatter=(3, 3), bias=True),
        Uneven(REDUCE, (6, 4), scatter_dim=0, scatter=((0, 3), (0, 3)), bias=True),
        "scatter_ranges None on rank 0 and [[0, 3], [0, 3]] on rank 1",
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("op", DISAGREE)
def test_the_check_finds_ranks_that_disagree(rank: int, op: str) -> None:
    """Each call is right by itself, so that its rank alone can tell nothing."""
    *cases, text = DISAGREE[op]
    with fresh_group(CHECK="1", TIMEOUT_S="20") as group, fusedcomm.force_algorithm("unfused", strict=True):
        with pytest.raises(fusedcomm.PeerMismatchError) as caught:
            cases[rank].call(cases[rank].inputs(2)[rank], group, 2)
        assert text in str(caught.value)
        dist.barrier(group)
        check_call(cases[0], rank, 2, 0, group)


@on_ranks(2)
@pytest.mark.parametrize(("scatter", "plain"), [((2, 1), 0), (((0, 2), (1, 2)), 1)], ids=["tile", "overlap"])
def test_gradients_of_overlapping_ranges_are_exchanged_plainly(rank: int, scatter: Any, plain: int) -> None:
    case = into_attention(4, 3, gather=(3, 1), scatter=scatter)
    with fusedcomm.force_algorithm("chunked", strict=True), Dispatched() as dispatched:
        check_call(case, rank, 2, 0)
    assert dispatched.names("fusedcomm").count("all_to_all") == plain
