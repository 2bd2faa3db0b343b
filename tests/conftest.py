"""Rank processes that live as long as the test session; Triton's interpreter, chosen before anything imports Triton."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns that the default changes

import pytest

from fusedcomm.testing.ranks import RankPool

TIMEOUT_S = "20"  # of waits between ranks; a test that hangs is over long before its own limit


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """``ranks(world_size)``: persistent processes with a gloo group; shared by tests, so leave them as they were."""
    pools: dict[int, RankPool] = {}

    def get(world_size: int) -> RankPool:
        pool = pools.get(world_size)
        if pool is None or pool.dead:
            pool = pools[world_size] = RankPool(world_size, env={"FUSEDCOMM_TIMEOUT_S": TIMEOUT_S})
        return pool

    yield get
    for pool in pools.values():
        pool.close()
