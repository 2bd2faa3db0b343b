"""The faults. Each function is called at a step with what the rank would do there, ``go_on``."""

import gc
import os
import signal
import time
from typing import Any

import torch

from tests.faults.steps import Fault, GoOn

EARLY_S = 1.0  # a rank that comes then is in time
LATE = 1.5  # times the time-out: a rank that comes then is too late


class Injected(Exception):
    pass


class InjectedMemoryError(torch.OutOfMemoryError):
    pass


def delay(go_on: GoOn) -> Any:
    time.sleep(EARLY_S)
    return go_on()


def stop(go_on: GoOn) -> Any:
    """SIGSTOP. The parent sees it and kills the rank, or lets it go on, in time or after the peers' time-outs."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return go_on()


def repeat(go_on: GoOn) -> Any:
    go_on()
    return go_on()


def fail(go_on: GoOn) -> Any:
    raise Injected


def run_out_of_memory(go_on: GoOn) -> Any:
    raise InjectedMemoryError("injected")


def interrupt(go_on: GoOn) -> Any:
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        os.kill(os.getpid(), signal.SIGINT)
        return go_on()
    finally:
        signal.signal(signal.SIGINT, previous)


def collect_garbage(go_on: GoOn) -> Any:
    gc.collect()
    taken = [torch.full((1 << exponent,), float("nan"), device="cpu") for exponent in range(4, 16) for _ in range(4)]
    taken.clear()  # only when all are made, or one block would be overwritten again and again
    return go_on()


INJECTIONS: dict[str, Fault] = {
    "delay": delay,
    "pause": stop,
    "stop": stop,
    "kill": stop,
    "drop": lambda go_on: None,
    "repeat": repeat,
    "raise": fail,
    "memory": run_out_of_memory,
    "interrupt": interrupt,
    "gc": collect_garbage,
}
RAISED = (Injected, InjectedMemoryError, KeyboardInterrupt)
