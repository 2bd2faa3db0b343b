"""Work given to streams by each op and algorithm, on a device that is not the current one, on a user's stream."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton import knobs

import fusedcomm
from fusedcomm import force_algorithm
from fusedcomm.kernels.native_part import native
from fusedcomm.memory import members
from fusedcomm.memory.segment import FINGERPRINT_BITS, NUM_SLOTS
from fusedcomm.memory.workspace import Workspace
from fusedcomm.ops import dispatch
from fusedcomm.plan.schedule import Place
from fusedcomm.run import native_plan
from fusedcomm.run.packing import Packed, pack
from tests.host_cost.device import Driver, join, made, place
from tests.host_cost.traces import (
    WRITES,
    Access,
    Trace,
    counts,
    early_signals,
    foreign_streams,
    misplaced_copies,
    races,
)

SLOT_BYTES = 32 << 20  # most calls below take two rounds or more
DEVICE, FLOAT8 = torch.device("cuda", 1), torch.float8_e4m3fn
CALLS = 3  # of each: the allocator gives away again the memory of the one before
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def cases(group_size: int) -> Iterator[tuple[str, Call, list[Tensor]]]:
    """By op: a call, and x, w and bias."""
    square, wide = (4096, 4096), 8192
    calls: list[tuple[str, tuple[int, ...], tuple[int, ...], int]] = [  # the op, its dims, the shape of x, and K
        ("matmul_all_to_all", (0, 1), square, 4096),
        ("all_to_all_matmul of K", (1, 0), (wide, 1024), 1024 * group_size),
        ("all_to_all_matmul of rows", (0, 1), (wide, 4096), 4096 // group_size),
        ("all_gather_matmul", (0,), (1024, 4096), 4096),
        ("matmul_reduce_scatter", (0,), square, 4096),
        ("matmul_all_reduce", (), square, 4096),
    ]
    for name, dims, x, k in calls:
        op = getattr(fusedcomm, name.partition(" ")[0])
        yield name, partial(_called, op, dims), [made(*shape, device=DEVICE) for shape in (x, (k, wide), (wide,))]
    own, weight, bias = (made(*shape, device=DEVICE) for shape in ((4096, 1024), (wide, 1024 * group_size), (wide,)))
    yield "scaled_all_gather_matmul of K", _called_with_scales, [own.to(FLOAT8), weight.to(FLOAT8).mT, bias]


def _called(op: Callable[..., Tensor], dims: tuple[int, ...], x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return op(x, w, *dims, bias=bias)


def _called_with_scales(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    one = torch.ones((), device=DEVICE)
    found: Tensor = fusedcomm.scaled_all_gather_matmul(x, w, one, one, 1, bias=bias)
    return found


def traces(driver: Driver, group_size: int) -> Iterator[dict[str, Any]]:
    """Calls of the driver by kind, and faults, of each case."""
    workspace = join(group_size, SLOT_BYTES, DEVICE)
    user = torch.cuda.Stream(DEVICE)
    before = torch.cuda.current_device()
    yield {"case": "a call of a thread without a context", "wrong": [*in_fresh_thread(group_size)]}
    yield {"case": "a launch hook", "wrong": [*unseen_launches(group_size)]}
    for name, call, inputs in cases(group_size):
        for algorithm in ("fused", "chunked"):
            with force_algorithm(algorithm, strict=True):
                torch.cuda.set_stream(user)
                torch.cuda.set_device(before)  # which set_stream has changed
                call(*inputs)  # its kernels are loaded
                trace = trace_of(driver, call, inputs, user)
                wrong = [*dict.fromkeys(violations(trace, workspace, user))]
                yield {"case": f"{algorithm} {name}", "counts": counts(trace), "wrong": wrong}
                yield {"case": f"{algorithm} {name}, native", "wrong": [*differences(driver, call, inputs, workspace)]}
                if "scaled" not in name:  # whose multiplications are torch's kernels, without known operands
                    missed = [*missed_defects(driver, call, inputs, workspace, user, trace)]
                    yield {"case": f"{algorithm} {name}, with defects planted", "wrong": missed}


def in_fresh_thread(group_size: int) -> Iterator[str]:
    """An error of a call that is the first work of its thread. Default streams need no call of CUDA's runtime."""
    _, call, inputs = next(cases(group_size))
    with ThreadPoolExecutor(1) as threads, force_algorithm("fused", strict=True):
        if error := threads.submit(call, *inputs).exception():
            yield str(error)


def unseen_launches(group_size: int) -> Iterator[str]:
    """Calls without a launch seen by a hook that was set before their plan."""
    _, call, inputs = next(cases(group_size))
    seen: list[Any] = []
    hooks = knobs.runtime.launch_enter_hook
    hooks.add(seen.append)
    with force_algorithm("fused", strict=True):
        for i in range(3):  # native from the third on
            call(*inputs)
            if not seen:
                yield f"call {i}"
            seen.clear()
    hooks.remove(seen.append)
    _forget_plans()


def trace_of(driver: Driver, call: Call, inputs: list[Tensor], user: torch.cuda.Stream) -> Trace:
    """The caller writes the inputs before and after each call, and the result after it; then it drops that."""
    with driver.hears(inputs) as trace:
        for _ in range(CALLS):
            trace += [used(each, user) for each in inputs]
            trace.append(used(call(*inputs), user))
        trace += [used(each, user) for each in inputs]
    return trace


def used(t: Tensor, user: torch.cuda.Stream) -> Access:
    start, end = place(t)
    return Access("use", DEVICE.index, user.cuda_stream, WRITES, start, end - start)


def violations(trace: Trace, workspace: Workspace, user: torch.cuda.Stream) -> Iterator[str]:
    streams = [each.cuda_stream for each in (user, *workspace.streams)]
    segments = [place(each) for i, each in enumerate(workspace.buffers) if i != workspace.rank]
    yield from foreign_streams(trace, DEVICE.index, streams)
    yield from races(trace)
    yield from early_signals(trace, [*segments, place(workspace.segment)])
    yield from misplaced_copies(trace, segments, streams[1])


def differences(driver: Driver, call: Call, inputs: list[Tensor], workspace: Workspace) -> Iterator[str]:
    """Work that the native executor gives to the streams, and Python's does not, or the other way round.

    Both run from each parity of the epoch, and from the same state of the allocator.
    """
    if native is None:
        return
    runs: dict[tuple[bool, int], list[Any]] = {}
    for by_python in (True, False):
        with in_python(by_python):
            for _ in range(4):  # the first two of a kind run in Python, one as any, one to be kept
                epoch = workspace.epoch
                with driver.hears(inputs) as trace:
                    call(*inputs)
                runs[by_python, epoch % NUM_SLOTS] = [*normal(trace, driver.given, epoch)]
    for parity in {parity for _, parity in runs}:
        ours, python = runs.get((False, parity)), runs.get((True, parity))
        if ours != python:
            pairs = zip_longest(ours or [], python or [])
            at = next(i for i, (one, other) in enumerate(pairs) if one != other)
            yield f"slot {parity}, #{at}: {(ours or [])[at:][:1]} is not {(python or [])[at:][:1]}"


def normal(trace: Trace, given: list[tuple[Any, ...]], epoch: int) -> Iterator[Any]:
    """The trace without epochs and handles of events."""
    events: dict[int, int] = {}
    for each in trace:
        is_event = each.what in ("record", "wait", "host waits")
        yield replace(each, address=events.setdefault(each.address, len(events))) if is_event else each
    for words in given:
        yield (words[0], words[1] - (epoch << FINGERPRINT_BITS)) if len(words) == 2 else words


@contextmanager
def in_python(by_python: bool = True) -> Iterator[None]:
    """Calls inside run in Python, by their existing plans: Python's count of warm-ups does not change."""
    if native is not None:
        native.set_warm_ups(int(by_python))
    yield
    if native is not None:
        native.set_warm_ups(0)


def _forget_plans() -> None:
    for each in members.all_members():
        each.prepare_anew()


def _one_program_more(*args: Any) -> tuple[list[Place], Packed]:
    places, packed = pack(*args)
    blocks, threads, shared = packed.grid
    return places, packed._replace(grid=(blocks + 1, threads, shared))


def missed_defects(
    driver: Driver, call: Call, inputs: list[Tensor], workspace: Workspace, user: torch.cuda.Stream, trace: Trace
) -> Iterator[str]:
    """Planted defects that nothing above finds."""
    planted: dict[str, Trace] = {}
    others = {each.stream for each in trace} - {user.cuda_stream}
    for name, streams in (("the caller's stream", {user.cuda_stream}), ("the other streams", others)):
        if others:
            planted[f"{name} without waits"] = [
                each for each in trace if each.what != "wait" or each.stream not in streams
            ]
    if any(each.what == "copy" for each in trace):  # otherwise torch's kernels copy, with unknown operands
        for what in ("copy", "signal"):
            moved = [replace(each, stream=user.cuda_stream) if each.what == what else each for each in trace]
            planted[f"each {what} on the caller's stream"] = moved
    if any(each.what == "launch" and each.stream == user.cuda_stream for each in trace):  # others set the device
        with (
            mock.patch.object(dispatch, "on_device", lambda device: nullcontext()),
            suppress(RuntimeError),
            in_python(),
        ):
            planted["no device guard"] = trace_of(driver, call, inputs, user)  # or an op of torch refuses it
    if native is not None:
        _forget_plans()
        with mock.patch.object(native_plan, "pack", _one_program_more):
            if not any(differences(driver, call, inputs, workspace)):
                yield "a native plan whose kernels have one program more"
        _forget_plans()
    for name, bad in planted.items():
        if not any(violations(bad, workspace, user)):
            yield name
