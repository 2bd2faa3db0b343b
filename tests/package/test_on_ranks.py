"""The decorator `on_ranks`: each rank runs the body with the arguments of the test, and one that fails is enough."""

from __future__ import annotations

from typing import Any

import pytest

from fusedcomm.launch.ranks import RankError
from tests.helpers.on_ranks import on_ranks


@on_ranks(2)
def fails_on_rank_1(rank: int, what: str) -> None:
    assert rank == 0, what


def test_a_rank_that_fails_fails_the_test(ranks: Any) -> None:
    with pytest.raises(RankError, match="rank 1 raised: AssertionError: planted") as raised:
        fails_on_rank_1(ranks=ranks, what="planted")
    assert [failure.rank for failure in raised.value.failures] == [1]
