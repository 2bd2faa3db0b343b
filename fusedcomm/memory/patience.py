"""Long waits: each is logged once, with the missing ranks, long before its time-out; and calls that may block without a
bound run on a thread of their own.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import TypeVar

T = TypeVar("T")

log = logging.getLogger("fusedcomm")

PATIENCE_S = 30.0


class Patience:
    """When one wait began, and whether it was logged."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.told = False

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def is_over(self) -> bool:
        return not self.told and self.seconds >= PATIENCE_S

    def tell(self, ranks: Sequence[int], where: str) -> None:
        self.told = True
        names = f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"
        log.warning("still waiting for %s (%s s) in %s", names, f"{self.seconds:.3g}", where)


def on_thread(call: Callable[[], T], name: str) -> futures.Future[T]:
    """Run ``call`` on a daemon thread. It may be left behind: it ends with its call."""
    result: futures.Future[T] = futures.Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError:  # no thread can be started, as in exit handlers since Python 3.12
        run()
    return result
