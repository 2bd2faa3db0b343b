"""Ranks for the models of other packages, in place of those of the session."""

from collections.abc import Callable, Iterator

import pytest

from fusedcomm.launch.ranks import RankPool


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """Ranks of this module alone: the packages change torch and each other. They are done before the next begin."""
    pools: dict[int, RankPool] = {}

    def get(world_size: int) -> RankPool:
        pool = pools.get(world_size)
        if pool is None or pool.dead:
            pool = pools[world_size] = RankPool(world_size, env={"FUSEDCOMM_TIMEOUT_S": "60"}, timeout_s=240)
        return pool

    yield get
    for pool in pools.values():
        pool.close()
