"""Compiles the kernels of later parts, on all cores, so that no part spends its time on Triton's compiler.

The parts' own calls run on tensors without memory, under a driver that launches nothing (`compiling`). Kernels go to
Triton's cache; a later case's result has the number that it compiled itself ("compiled").
"""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from typing import Any, NamedTuple

import torch

from fusedcomm.bench import launch_now
from fusedcomm.bench.gpu_check import (
    child,
    kernel_speed,
    moe_calls,
    op_speed,
    problems,
    processes,
    scaled,
    tail_speed,
    virtual_ranks,
)
from fusedcomm.bench.gpu_check.compiling import compiling
from fusedcomm.bench.gpu_check.gpu_calls import FINGERPRINT, GpuCall, first_calls
from fusedcomm.bench.virtual import VirtualGroup
from fusedcomm.env import available_cpus
from fusedcomm.memory import topology

META = torch.device("meta")
GROUP_SIZES = (1, 2, 4, 8)
NUM_REHEARSED = 2  # jobs where there is no GPU

Job = Callable[[], Any]


class Target(NamedTuple):
    """The facts that kernels are compiled for. ``table`` is the key of the tables of tile sizes."""

    arch: int
    table: int
    num_sms: int


H100 = Target(90, 90, 132)  # the target without a GPU


def cases(device: torch.device, half: str) -> child.Cases:
    return {f"kernels of {half}": partial(compile_all, device, half)}


def compile_all(device: torch.device, half: str) -> dict[str, Any]:
    """Every process compiles one job at a time; a job is a call, which may launch several kernels."""
    start, failed, launches = time.monotonic(), {}, 0
    todo = dict(JOBS[half]() if device.type == "cuda" else list(JOBS[half]())[:NUM_REHEARSED])
    num_processes = min(available_cpus(), len(todo))
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("fork")) as pool:
        pool.submit(int).result()  # all processes are there before this one asks the GPU: none of them has a context
        target = target_of(device)
        futures = {pool.submit(compile_job, job, target): name for name, job in todo.items()}
        for future in as_completed(futures):
            try:
                launches += future.result()
            except Exception as error:
                failed[futures[future]] = f"{type(error).__name__}: {error}"
    assert not failed, f"{len(failed)} of {len(todo)} calls: {failed}"
    seconds = round(time.monotonic() - start, 1)
    found = {"calls": len(todo), "launches": launches, "processes": num_processes, "seconds": seconds}
    return {**found, **target._asdict()}


def target_of(device: torch.device) -> Target:
    if device.type != "cuda":
        return H100
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Target(10 * found.major + found.minor, topology.architecture(device), found.multi_processor_count)


def compile_job(job: Job, target: Target) -> int:
    """Compile the kernels that ``job`` launches. Returns the number of launches."""
    with compiling(*target) as compiled:
        job()
    return len(compiled)


def jobs_of_right() -> Iterator[tuple[str, Job]]:
    """The launches of the half's parts, by name, in the parts' order."""
    for size in GROUP_SIZES:
        yield f"signals R={size}", partial(_signals, size)
    for part in (processes, virtual_ranks):
        yield from _calls(part.calls(cuda=True))
    yield from problems.jobs()
    yield from moe_calls.jobs("right")


def jobs_of_fast() -> Iterator[tuple[str, Job]]:
    yield from ((f"signals R={size}", partial(_signals, size)) for size in GROUP_SIZES)
    for part in (kernel_speed, scaled, tail_speed):
        yield from part.jobs()
    yield from moe_calls.jobs("fast")
    yield from _calls([*op_speed.calls(cuda=True), *first_calls(cuda=True)])


JOBS = {"right": jobs_of_right, "fast": jobs_of_fast}


def _calls(calls: list[GpuCall]) -> Iterator[tuple[str, Job]]:
    for call in calls:
        yield str(call), partial(call.group, META)


def _signals(group_size: int) -> None:
    """The launches of `chunked` beside the kernels of `fused`."""
    own = VirtualGroup(group_size, 128, META).workspaces[0]
    launch_now.begin_push(own)
    launch_now.signal(own, None, FINGERPRINT)
    launch_now.wait_source(0, own, FINGERPRINT)
    launch_now.wait(own, FINGERPRINT)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for end_round in (False, True):
            out = torch.empty(4096, dtype=dtype, device=META)
            launch_now.finish(out, own, FINGERPRINT, end_round=end_round)
