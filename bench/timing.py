"""The measurement of every speed: values first, then all variants side by side in one run.

* Every variant's result is checked on every rank before any is timed: wrong results have no time.
* Variants are interleaved round by round, in an order that changes with the round and is equal on
  all ranks: a slow moment of the machine meets all, and none always follows the same other.
* The ranks start a measurement together; its time is the slowest rank's. Reported are the median over rounds, P10, P90,
  P99 and the variation.

Ranks call these functions alike, under torchrun or in a RankPool.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

Result = TypeVar("Result")  # a tensor or a tuple of them
Check = Callable[[str, Any], "str | None"]  # (variant's name, result) to an error or None

L2_BYTES = 256 << 20  # more than the L2 of any GPU
SKEW_CYCLES = 2_000_000  # about 1 ms for each call: the GPU waits until all launches of a measurement are queued
METHOD = {
    "time": "slowest rank",
    "order": "interleaved by round",
    "start": "barrier; on GPUs also an all_reduce on the stream",
    "l2_flush_bytes": L2_BYTES,
    "skew_cycles": SKEW_CYCLES,
}  # as reports name it; the last two matter on GPUs only


class ValuesDiffer(Exception):
    """A variant gave wrong values on some rank; raised alike on all ranks."""


@dataclass(frozen=True)
class Timing:
    """Seconds of the slowest rank."""

    median: float
    p10: float
    p90: float
    p99: float
    variation: float  # standard deviation / mean, over rounds

    @staticmethod
    def of(seconds: Tensor) -> Timing:
        """The timing of ``seconds`` [rounds], float64."""
        quantiles = seconds.new_tensor([0.1, 0.5, 0.9, 0.99])
        p10, median, p90, p99 = seconds.quantile(quantiles).tolist()
        variation = float(seconds.std(correction=0) / seconds.mean())
        return Timing(median, p10, p90, p99, variation)


def check_values(variants: Mapping[str, Callable[[], Result]], check: Callable[[str, Result], str | None]) -> None:
    """Call and check each variant. Raises ValuesDiffer, on all ranks alike.

    ``check(name, result)`` returns the error, or None. Each is called twice, because on a GPU the first call of a shape
    loads kernels, and may run another way than those after it.
    """
    for name, variant in variants.items():
        for _ in range(2):
            result = variant()
            device = pytree.tree_leaves(result)[0].device
            _raise_if_any(check(name, result) or "", device, f"{name!r} gave wrong values")


def measure(variants: Mapping[str, Callable[[], Any]], device: torch.device, **options: Any) -> dict[str, Timing]:
    """The times of variants that have been checked. ``options``: those of `measure_rounds`."""
    return {name: Timing.of(each) for name, each in measure_rounds(variants, device, **options).items()}


def measure_rounds(
    variants: Mapping[str, Callable[[], Any]],
    device: torch.device,
    *,
    rounds: int,
    warmup: int = 1,
    calls: int = 1,
    on_round: Callable[[int], None] = lambda done: None,
    check: Check | None = None,
    clock: Callable[[Any], tuple[float, Any]] | None = None,
) -> dict[str, Tensor]:
    """Per variant the seconds of the slowest rank in every round, float64, on the CPU.

    ``on_round`` gets the number of rounds done, warm-up included. With ``check`` the result of every measured call is
    checked too, after its clock has stopped. ``calls``: in a variant. ``clock(variant)`` gives its seconds and result.
    """
    names = list(variants)
    clock = clock or (_CudaClock(device, calls) if device.type == "cuda" else by_host)
    seconds = torch.zeros(rounds, len(names), dtype=torch.float64, device=device)
    for round_ in range(-warmup, rounds):
        wrong = ""
        for i in random.Random(round_).sample(range(len(names)), len(names)):
            elapsed, result = clock(variants[names[i]])
            if check is not None and (text := check(names[i], result)):
                wrong = wrong or f"{names[i]!r} in round {round_ + warmup + 1}: {text}"
            del result  # after the clock was read: freeing is not part of any variant
            if round_ >= 0:
                seconds[round_, i] = elapsed
        if check is not None:
            _raise_if_any(wrong, device, "wrong values")
        on_round(round_ + warmup + 1)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return dict(zip(names, seconds.cpu().unbind(1), strict=True))


def repeated(call: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        call()


def all_gather_bytes(data: bytes, device: torch.device) -> list[bytes]:
    """Every rank's bytes, of any length. all_gather_object would need NumPy, which torch does not depend on."""
    num_ranks = dist.get_world_size()
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(num_ranks)]
    dist.all_gather(lengths, torch.tensor([len(data)], device=device))
    longest = max(1, *(int(length) for length in lengths))
    local = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8).to(device)
    every = [torch.empty_like(local) for _ in range(num_ranks)]
    dist.all_gather(every, local)
    return [bytes(t[: int(length)].tolist()) for t, length in zip(every, lengths, strict=True)]


def _raise_if_any(text: str, device: torch.device, what: str) -> None:
    found = [each.decode(errors="replace") for each in all_gather_bytes(text.encode(), device)]
    wrong = [f"rank {rank}: {each}" for rank, each in enumerate(found) if each]
    if wrong:
        raise ValuesDiffer(f"{what}: " + "; ".join(wrong))


def by_host(variant: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds until the results are there, those of launches included."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_initialized() else bool
    dist.barrier()
    synchronize()
    start = time.perf_counter()
    result = variant()
    synchronize()
    return time.perf_counter() - start, result


class _CudaClock:
    def __init__(self, device: torch.device, calls: int) -> None:
        self.pause = calls * SKEW_CYCLES
        self.flush = torch.empty(L2_BYTES, dtype=torch.uint8, device=device)
        self.token = torch.zeros(1, device=device)

    def __call__(self, variant: Callable[[], Any]) -> tuple[float, Any]:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        dist.barrier()
        self.flush.zero_()
        torch.cuda._sleep(self.pause)
        dist.all_reduce(self.token)  # on the stream, so GPUs start together, however long launches took
        start.record()
        result = variant()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3, result
