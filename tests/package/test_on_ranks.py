"""The decorator `on_ranks`: each rank runs the body with the arguments of the test, and one that fails is enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fusedcomm.launch.ranks import RankError
from tests.helpers.on_ranks import on_ranks


@on_ranks()
@pytest.mark.parametrize("text", ["a b", "c"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_rank_gets_the_arguments(rank: int, world_size: int, text: str, tmp_path: Path) -> None:
    assert (rank, world_size) == (dist.get_rank(), dist.get_world_size())
    assert text in ("a b", "c") and tmp_path.is_dir()


@on_ranks(2)
def fails_on_rank_1(rank: int, what: str) -> None:
    assert rank == 0, what


def test_a_rank_that_fails_fails_the_test(ranks: Any) -> None:
    with pytest.raises(RankError, match="rank 1 raised: AssertionError: planted") as raised:
        fails_on_rank_1(ranks=ranks, what="planted")
    assert [failure.rank for failure in raised.value.failures] == [1]


def test_it_keeps_the_name_and_the_marks() -> None:
    assert fails_on_rank_1.__name__ == "fails_on_rank_1"
    assert [mark.name for mark in getattr(test_every_rank_gets_the_arguments, "pytestmark", [])] == [
        "parametrize",
        "parametrize",
    ]
