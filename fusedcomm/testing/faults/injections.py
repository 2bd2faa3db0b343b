"""What goes wrong at a step. Each function takes what the rank would do there (``go_on``) and the time-out."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

from fusedcomm.testing.faults.protocol_steps import GoOn

EARLY_S = 1.0  # a rank that comes then is in time
LATE = 1.5  # times the time-out: a rank that comes then is too late
REFUSED = 7  # exit code of a forked child that was told to be no rank


class Injected(Exception):
    """What a fault raises."""


class InjectedMemoryError(torch.OutOfMemoryError):
    """What an allocation raises that a fault has made fail."""


def delay(go_on: GoOn, timeout_s: float) -> Any:
    time.sleep(EARLY_S)
    return go_on()


def stop(go_on: GoOn, timeout_s: float) -> Any:
    """SIGSTOP. The parent sees it and kills the rank, or lets it go on, in time or after the peers' time-outs."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return go_on()


def drop(go_on: GoOn, timeout_s: float) -> Any:
    return None


def repeat(go_on: GoOn, timeout_s: float) -> Any:
    go_on()
    return go_on()


def fail(go_on: GoOn, timeout_s: float) -> Any:
    raise Injected


def run_out_of_memory(go_on: GoOn, timeout_s: float) -> Any:
    raise InjectedMemoryError("injected")


def interrupt(go_on: GoOn, timeout_s: float) -> Any:
    """Ctrl-C, as in a program that does not ignore it."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        os.kill(os.getpid(), signal.SIGINT)
        return go_on()
    finally:
        signal.signal(signal.SIGINT, previous)


def collect_garbage(go_on: GoOn, timeout_s: float) -> Any:
    """Collect what was freed too early, and fill its memory with other numbers."""
    gc.collect()
    taken = [torch.full((1 << exponent,), float("nan"), device="cpu") for exponent in range(4, 16) for _ in range(4)]
    taken.clear()  # only when all are made, or one block would be overwritten again and again
    return go_on()


def fork(go_on: GoOn, timeout_s: float) -> Any:
    """Fork a child that would take the rank's place. It is told that it is no rank, and the parent goes on."""
    child = os.fork()
    if child == 0:
        signal.setitimer(signal.ITIMER_REAL, timeout_s)  # ends it if it hangs, even without a parent
        code = 1
        try:
            go_on()
        except RuntimeError as error:
            code = REFUSED if "was forked from rank" in str(error) else 2
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != REFUSED:
        raise AssertionError(f"a forked child must be refused, exit code {REFUSED}, got {code}")
    return go_on()


INJECTIONS: dict[str, Callable[[GoOn, float], Any]] = {
    "delay": delay,
    "pause": stop,
    "stop": stop,
    "kill": stop,
    "drop": drop,
    "repeat": repeat,
    "raise": fail,
    "memory": run_out_of_memory,
    "interrupt": interrupt,
    "gc": collect_garbage,
    "fork": fork,
}
RAISED = (Injected, InjectedMemoryError, KeyboardInterrupt)
