"""Random delays of this rank within rounds: before its signals and between its waits and its reads."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any
from unittest import mock

from fusedcomm.memory import workspace
from fusedcomm.run import python_executor

LONGEST_S = 0.002


class _Local(threading.local):
    """Each thread draws from a generator of its own, so that its delays do not depend on how the threads take turns."""

    def __init__(self, seed: str) -> None:
        self.random = Random(f"{seed} jitter")


@contextmanager
def jitter(seed: str, share: float) -> Iterator[None]:
    """Every ``share``-th signal, wait or copy-out of this process is late. On a GPU its launch is late."""
    local = _Local(seed)

    def late(function: Callable[..., Any], first: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            random = local.random
            sleeps = random.random() < share
            if sleeps and first:
                time.sleep(random.uniform(0, LONGEST_S))
            result = function(*args, **kwargs)
            if sleeps and not first:
                time.sleep(random.uniform(0, LONGEST_S))
            return result

        return call

    with ExitStack() as patches:
        for owner, name, first in (
            (workspace.Workspace, "signal", True),
            (workspace.Workspace, "wait", False),
            (python_executor, "launch", True),
        ):
            patches.enter_context(mock.patch.object(owner, name, late(getattr(owner, name), first)))
        yield
