"""Protections that a rank is without while a random program runs: the programs must notice each."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import get_ident
from typing import Any
from unittest import mock

import torch

from fusedcomm.memory import members, segment, workspace
from fusedcomm.ops import prepared
from fusedcomm.plan.schedule import Base, Copy, Multiply, Signal, Step, Stream, Wait
from fusedcomm.run import native_plan
from fusedcomm.run.python_executor import Execution
from tests.soak import invoke, worker
from tests.soak.jitter import jitter
from tests.soak.known_values import KnownValues
from tests.soak.outcome import SoakOutcome

LATE_S = 0.003
LATER_S = 0.03  # longer than a prepared call waits without Python
SHARE = 0.3  # share of signals and waits that are late
Fault = AbstractContextManager[Any]


def one_slot() -> Fault:
    return mock.patch.object(segment, "NUM_SLOTS", 1)


def no_waits() -> Fault:
    return mock.patch.object(workspace.Workspace, "wait", lambda *args: None)


def signal_before_data() -> Fault:
    step = Execution.step

    def early(self: Execution, work: Any, stream: Stream) -> None:
        to = work.out if isinstance(work, Multiply) else work.to if isinstance(work, Copy) else None
        if to is not None and to.base == Base.SLOT and to.number != self.workspace.rank:
            step(self, Signal(to.number), stream)
            time.sleep(LATE_S)
        step(self, work, stream)

    return mock.patch.object(Execution, "step", early)


def late_reads() -> Fault:
    """A thread copies out what has arrived. It ends before the results are compared, but nobody else waits for it."""
    return _late_reads(joined=False)


def late_reads_joined() -> Fault:
    """The late reads come before this rank's next signal, as the protocol wants."""
    return _late_reads(joined=True)


@contextmanager
def _late_reads(joined: bool) -> Iterator[None]:
    step, compare = Execution.step, worker._Worker._compare
    copies: dict[int, list[Future[None]]] = defaultdict(list)  # by the thread that has waited

    def copy_late(to: torch.Tensor, source: torch.Tensor) -> None:
        time.sleep(LATE_S)
        with torch.inference_mode():  # as the caller may be
            to.copy_(source)

    def step_late(self: Execution, work: Any, stream: Stream) -> None:
        if isinstance(work, Signal) and joined:
            join(get_ident())
        if isinstance(work, Copy) and work.source.base == Base.SLOT and self.op == "matmul_all_to_all":
            # others look at the result within the call
            copies[get_ident()].append(thread.submit(copy_late, self.tensor(work.to), self.tensor(work.source)))
        else:
            step(self, work, stream)

    def join(caller: int) -> None:
        while copies[caller]:
            copies[caller].pop().result()

    def compare_joined(self: worker._Worker) -> None:
        for caller in list(copies):
            join(caller)
        compare(self)

    with ExitStack() as patches, ThreadPoolExecutor(1) as thread:
        patches.enter_context(mock.patch.object(Execution, "step", step_late))
        patches.enter_context(mock.patch.object(worker._Worker, "_compare", compare_joined))
        yield


def plans_without_waits() -> Fault:
    """Calls in Python wait, and prepared ones do not."""
    append = native_plan._append

    def append_others(plan: Any, step: Step, sources: Any) -> None:
        if not isinstance(step.work, Wait):
            append(plan, step, sources)

    return mock.patch.object(native_plan, "_append", append_others)


@contextmanager
def plans_without_long_waits() -> Iterator[None]:
    """What prepared calls leave to Python is not done. Rank 1 of each group makes them wait."""
    results = invoke.results

    def late(data: KnownValues, rank: int, *args: Any) -> list[torch.Tensor]:
        time.sleep(LATER_S if rank == 1 else 0)
        return results(data, rank, *args)

    with mock.patch.object(prepared.Rescue, "wait", lambda *args: None), mock.patch.object(invoke, "results", late):
        yield


def wrong_element() -> Fault:
    """One element of a float16 matmul_reduce_scatter is wrong, on rank 1 of a group."""
    results = invoke.results

    def spoiled(data: KnownValues, rank: int, *args: Any) -> list[torch.Tensor]:
        outs = results(data, rank, *args)
        if rank == 1 and (data.case.op, data.case.dtype) == ("matmul_reduce_scatter", torch.float16):
            outs[0].view(-1)[-1:] += 1
        return outs

    return mock.patch.object(invoke, "results", spoiled)


IN_PLANS = (plans_without_waits, plans_without_long_waits, wrong_element)  # others are in functions that plans run past


def run_without(
    rank: int, fault: Callable[[], Fault], seed: int, index: int, steps: Sequence[int] | None = None, wait_s: int = 90
) -> SoakOutcome:
    """Run a program under ``fault``, with many delays, and with prepared calls if they have it too."""
    with ExitStack() as patches:
        if fault not in IN_PLANS:
            patches.enter_context(mock.patch.object(members.Member, "prepare_calls", lambda self: None))
        patches.enter_context(mock.patch.dict(worker.WAIT_S, cpu=wait_s))
        patches.enter_context(fault())
        patches.enter_context(jitter(f"{seed} {index} {rank}", SHARE))
        return worker.run_program(rank, seed, index, steps=steps)
