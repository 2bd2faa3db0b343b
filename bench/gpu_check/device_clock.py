"""Times of variants on one GPU: all in turn in each round, on a cold L2, without the time that the host takes."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Variants = dict[str, Callable[[], Any]]

COLD_L2_BYTES = 256 << 20  # more than the L2 of any GPU
ROUNDS = 15
SLEEP_CYCLES = (20_000_000, 200_000_000)  # about 10 ms; more where the host was held up


def interleaved(variants: Variants, device: torch.device, before: Callable[[], Any] = lambda: None) -> dict[str, float]:
    """Milliseconds, median over rounds; every variant once per round, after two warm-ups each and behind ``before``."""
    cuda = device.type == "cuda"
    flush = torch.empty(COLD_L2_BYTES if cuda else 1, dtype=torch.uint8, device=device)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for variant in [*variants.values()] * 2 if cuda else ():
        before()
        variant()
        torch.cuda.synchronize()
    for _ in range(ROUNDS if cuda else 1):
        for name, variant in variants.items():
            flush.zero_()
            before()
            times[name].append(_event_ms(variant) if cuda else _wall_ms(variant))
    return {name: statistics.median(each) for name, each in times.items()}


def _event_ms(variant: Callable[[], Any]) -> float:
    """Time on the GPU alone: all launches are queued before the first one runs."""
    for cycles in SLEEP_CYCLES:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        start.record()
        variant()
        queued = not start.query()
        end.record()
        torch.cuda.synchronize()
        if queued:
            return start.elapsed_time(end)
    raise AssertionError("the host took longer to launch than the GPU was kept waiting")


def _wall_ms(variant: Callable[[], Any]) -> float:
    start = time.perf_counter()
    variant()
    return (time.perf_counter() - start) * 1e3
