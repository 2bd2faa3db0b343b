"""Calls that may block without a bound, on a thread of their own."""

import threading
from collections.abc import Callable
from concurrent import futures
from typing import TypeVar

T = TypeVar("T")


def start(call: Callable[[], T], name: str) -> futures.Future[T]:
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
