"""All chosen cases and their parts in one run: values first, then round by round, by the clock of the host.

That clock stops when the device is done too. It is the host's on GPUs as well, because the question is how long the
host is blocked.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from fusedcomm.bench.all_to_all.case_call import CaseCall
from fusedcomm.bench.all_to_all.cases import VARIANTS, Variant, fused
from fusedcomm.bench.all_to_all.data import SuiteData, SuiteSize
from fusedcomm.bench.all_to_all.parts import CasePart
from fusedcomm.bench.timing import Timing, check_values, measure_rounds
from fusedcomm.launch import console, world
from fusedcomm.ops.explain import explain

HOST = torch.device("cpu")  # the device whose clock is read
WARMUP = 1
NOT_MEASURABLE = "not measurable: the shorter of compute and communication is within the noise"
HINDERED = "the call takes longer than its compute and then its communication"
MORE_THAN_ALL = "more is saved than the shorter of the two takes"


@dataclass(frozen=True)
class SuiteRow:
    """One variant: seconds of the slowest rank, as medians over rounds where there is one number."""

    case: str
    variant: str
    about: str
    total: Timing
    compute: Timing  # alone, checks included
    communication: Timing  # alone
    overlapped: float  # compute + communication - total of each round: what slows a whole round down does not count
    noise: float  # (P90 - P10) / sqrt(rounds) of overlapped: about two standard errors of the median
    blocked: float | None  # the host, in waits; None where they are inside an op
    cpu: float  # CPU time of all threads of the process

    @property
    def shorter(self) -> float:
        """What could be overlapped."""
        return min(self.compute.median, self.communication.median)

    @property
    def share_limit(self) -> str | None:
        """Why ``overlapped_share`` is not the quotient, or None where it is so within noise."""
        if self.shorter <= self.noise:
            return NOT_MEASURABLE
        if self.overlapped < -self.noise:
            return HINDERED
        return MORE_THAN_ALL if self.overlapped > self.shorter + self.noise else None

    @property
    def overlapped_share(self) -> float | None:
        """The share of what could be overlapped, from 0 to 1; None where noise hides it."""
        return None if self.share_limit == NOT_MEASURABLE else min(max(self.overlapped / self.shorter, 0.0), 1.0)


@dataclass(frozen=True)
class SuiteReport:
    """What rank 0 reports."""

    world_size: int
    plan: str  # what the fused op runs
    moduli: list[int]  # the moduli of the values that were checked
    rows: list[SuiteRow]


def measure_suite(rank: int, cases: Sequence[str], size: SuiteSize, device_type: str, rounds: int) -> SuiteReport:
    """Measure the cases, in every rank. Raises ValuesDiffer on all if an element of any call is not in its place."""
    data = SuiteData(size, world.rank_device(device_type))
    variants = [variant for variant in VARIANTS if variant.case in cases]
    try:
        calls = {name: _Measured(data, run) for name, run in _runs(variants).items()}
        with console.progress(rank == 0, WARMUP + rounds, "checking values", "round") as on_round:
            _check(data, calls)
            totals = measure_rounds(calls, HOST, rounds=rounds, warmup=WARMUP, on_round=on_round, check=_wrong)
        plan = str(explain("matmul_all_to_all", data.x, data.w, 0, -1))
        rows = [_row(variant, calls, totals, rounds) for variant in variants]
        return SuiteReport(data.num_ranks, plan, data.moduli, rows)
    finally:
        data.close()


def _runs(variants: Sequence[Variant]) -> dict[str, CasePart]:
    """The variants, and each of their parts once."""
    parts = [part for variant in variants for part in (variant.compute, variant.communication)]
    return {variant.name: variant.run for variant in variants} | {_part(part): part for part in parts}


def _part(part: CasePart) -> str:
    return f"{part.__name__} alone"


class _Measured:
    """A variant or part as the timing module calls it. It also keeps the blocked and the CPU seconds of each call."""

    def __init__(self, data: SuiteData, run: CasePart) -> None:
        self.data, self.run = data, run
        self.blocked: list[float] = []
        self.cpu: list[float] = []

    def __call__(self, keep: bool = False) -> tuple[Tensor, CaseCall]:
        call = CaseCall(keep)
        start = time.process_time()
        self.run(self.data, call)
        call.finish()
        if self.data.device.type == "cuda":
            torch.cuda.synchronize()
        self.cpu.append(time.process_time() - start)
        self.blocked.append(call.blocked)
        return torch.tensor(call.wrong, device="cpu"), call

    def median(self, seconds: list[float], rounds: int) -> float:
        """The median over rounds of the slowest rank's seconds; a collective."""
        slowest = torch.tensor(seconds[-rounds:], dtype=torch.float64, device="cpu")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest.quantile(0.5))


def _check(data: SuiteData, calls: dict[str, _Measured]) -> None:
    for modulus in data.moduli:
        for salt, (name, measured) in enumerate(calls.items()):
            data.encode(modulus, salt)
            check_values({name: partial(measured, keep=True)}, _wrong)
    data.encode(data.moduli[0], len(calls))


def _wrong(name: str, result: tuple[Tensor, CaseCall]) -> str | None:
    return result[1].wrong_text()


def _row(variant: Variant, calls: dict[str, _Measured], totals: dict[str, Tensor], rounds: int) -> SuiteRow:
    own = calls[variant.name]
    blocked = own.median(own.blocked, rounds)
    total, compute, communication = (
        totals[name] for name in (variant.name, _part(variant.compute), _part(variant.communication))
    )
    overlapped = compute + communication - total
    low, median, high = overlapped.quantile(overlapped.new_tensor([0.1, 0.5, 0.9])).tolist()
    waits_inside = variant.run is fused and own.data.device.type == "cpu"
    return SuiteRow(
        case=variant.case,
        variant=variant.kind,
        about=variant.about,
        total=Timing.of(total),
        compute=Timing.of(compute),
        communication=Timing.of(communication),
        overlapped=median,
        noise=(high - low) / rounds**0.5,
        blocked=None if waits_inside else blocked,
        cpu=own.median(own.cpu, rounds),
    )
