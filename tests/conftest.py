"""Rank processes that live as long as the test session; Triton's interpreter, chosen before anything imports Triton."""

import gc
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns that the default changes
os.environ.pop("COLUMNS", None)  # 80 in workers of pytest-xdist, where the console has a width of its own

import pytest

from fusedcomm.launch import ranks as rank_processes
from fusedcomm.launch.ranks import RankPool
from tests.helpers import compilers as kernel_compilers
from tests.helpers import fork_server, negative_controls
from tests.helpers.on_ranks import begin_consents
from tests.helpers.tiers import mark_thorough

_CACHE = tempfile.TemporaryDirectory(prefix="fusedcomm-tests-")
os.environ["FUSEDCOMM_CACHE_DIR"] = _CACHE.name  # numbers tuned on this machine would change plans

TIMEOUT_S = "20"  # bound of waits between ranks; a test that hangs is over long before its own limit


@pytest.hookimpl(optionalhook=True)  # where pytest-xdist is not installed
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Workers share out files, and builds one by one. Files that need compiled kernels count as one."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            alone = nodeid if file in (*negative_controls.TESTS, "tests/memory/test_sanitizers.py") else file
            return "compiled" if file in kernel_compilers.USED_BY else alone

    return ByFile(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--night", default="0/1", help="of a part of nightly: its number, from 0, and how many it takes")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    mark_thorough(items)
    yield  # for -m
    night, nights = map(int, config.getoption("--night").split("/"))
    items[:] = items[len(items) * night // nights : len(items) * (night + 1) // nights]


def pytest_collection_finish() -> None:
    """What is loaded stays: collections that look through it take most of a second, and tests make many."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def forked_ranks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_processes, "_start", fork_server.start)
        yield


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """``ranks(world_size)``: persistent processes with a gloo group; shared by tests, so leave them as they were."""
    pools: dict[int, RankPool] = {}
    numbers = itertools.count()

    def get(world_size: int) -> RankPool:
        pool = pools.get(world_size)
        if pool is None or pool.dead:
            pool = pools[world_size] = RankPool(world_size, env={"FUSEDCOMM_TIMEOUT_S": TIMEOUT_S})
        pool.run(begin_consents, next(numbers))
        return pool

    yield get
    with ThreadPoolExecutor() as executor:  # a rank takes seconds to leave, where Inductor was used
        list(executor.map(RankPool.close, pools.values()))


@pytest.fixture
def shared_ranks(ranks: Callable[[int], RankPool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands on a CPU use the ranks that live on, in place of new ones."""
    from fusedcomm.launch import world

    @contextmanager
    def live(device_type: str, world_size: int, *args: Any) -> Iterator[Callable[..., Any]]:
        yield lambda fn, *args: ranks(world_size).run(fn, *args)[0]

    monkeypatch.setattr(world, "default_device_type", lambda: "cpu")
    monkeypatch.setattr(world, "ranks", live)


@pytest.fixture(scope="session")
def compilers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[kernel_compilers.Compilers]:
    found = kernel_compilers.Compilers(request.session, tmp_path_factory)
    yield found
    found.close()
