"""One call of a case: what it checked, and how long its host was blocked."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from fusedcomm.ops.exact_problem import difference
from fusedcomm.runtime.device_to_host import DeviceToHost

Result = TypeVar("Result")


class CaseCall:
    """One call. ``wrong`` is final after `finish`; with ``keep`` the call can say what is wrong.

    ``blocked`` is how many seconds the host spent in the waits of the case. Reading the result of the checks does not
    count, because a program that has something else to do reads it when it is there.
    """

    def __init__(self, keep: bool) -> None:
        self.keep = keep
        self.wrong = 0  # how many elements
        self.blocked = 0.0
        self._counts: list[Any] = []
        self._compared: list[tuple[Tensor, Tensor]] = []

    def waited(self, wait: Callable[[], Result]) -> Result:
        """``wait()``; its time counts as blocked."""
        start = time.perf_counter()
        result = wait()
        self.blocked += time.perf_counter() - start
        return result

    def check(self, result: Tensor, expected: Tensor) -> None:
        """Compare on the device: only the number of wrong elements comes to the host, which does not wait for it."""
        self._counts.append(DeviceToHost((result != expected).sum()).lazy())
        if self.keep:
            self._compared.append((result, expected))

    def finish(self) -> None:
        self.wrong += sum(int(count) for count in self._counts)

    def wrong_text(self) -> str | None:
        """What is wrong, or None."""
        if not self.wrong:
            return None
        texts = (difference(result, expected) for result, expected in self._compared)
        return next((text for text in texts if text), f"{self.wrong} elements are not in their place")
