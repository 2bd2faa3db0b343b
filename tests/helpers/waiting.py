"""Waits for a condition in place of a fixed time: a busy machine takes longer, and no test may fail for that."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PATIENCE_S = 90.0  # only what never comes takes as long


def wait_until(condition: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"it was waited {patience_s:g} s for what did not come"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False
