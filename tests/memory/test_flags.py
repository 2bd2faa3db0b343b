"""signal, load and wait on 64-bit words: what the CPU algorithms hand over data with."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch
from torch import Tensor

from tests.helpers.symmetric_memory import native


def word(value: int = 0) -> Tensor:
    return torch.tensor([value], dtype=torch.int64)


def test_signal_and_load() -> None:
    t = word()
    native.signal(t.data_ptr(), 7 << 24 | 5)
    assert native.load(t.data_ptr()) == int(t) == 7 << 24 | 5
    with pytest.raises(ValueError, match="64-bit word, got 0"):
        native.load(0)
    with pytest.raises(ValueError, match="64-bit word"):
        native.signal(t.data_ptr() + 4, 1)


@pytest.mark.parametrize("timeout_s", [0, 0.002, 0.05])
def test_wait_returns_in_time(timeout_s: float) -> None:
    t, broken = word(3 << 24 | 9), torch.zeros(2, dtype=torch.int64)
    assert native.wait(t.data_ptr(), 3, broken.data_ptr(), 2, 60) == int(t)
    late: list[float] = []
    while len(late) < 5 or (min(late) >= 0.005 and len(late) < 100):  # on a busy machine few return at once
        start = time.monotonic()
        assert native.wait(t.data_ptr(), 4, broken.data_ptr(), 2, timeout_s) == int(t)
        late.append(time.monotonic() - start - timeout_s)
    assert 0 <= min(late) < 0.005


def test_wait_sees_signal_and_broken_while_python_runs() -> None:
    t, broken = word(), torch.zeros(2, dtype=torch.int64)
    threading.Timer(0.02, native.signal, (t.data_ptr(), 1 << 24)).start()
    assert native.wait(t.data_ptr(), 1, broken.data_ptr(), 2, 20) == 1 << 24
    threading.Timer(0.02, native.signal, (broken.data_ptr() + 8, 1)).start()
    start = time.monotonic()
    assert native.wait(t.data_ptr(), 2, broken.data_ptr(), 2, 20) == 1 << 24
    assert time.monotonic() - start < 10


def test_wait_can_be_interrupted() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    t = word()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            native.wait(t.data_ptr(), 1, 0, 0, 20)
    finally:
        signal.signal(signal.SIGALRM, before)
