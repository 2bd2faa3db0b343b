"""A group of its own for a test, calls in it, and the checks of values that all ops share."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

import fusedcomm
from fusedcomm.memory import members
from fusedcomm.memory.group import find
from fusedcomm.plan import pipelined
from fusedcomm.plan.cost import in_pieces as cost_in_pieces
from fusedcomm.redistribution import mesh_groups
from fusedcomm.run import python_executor
from tests.faults.prepared_calls import until_signalled
from tests.helpers.problems import Problem, expected, integers
from tests.helpers.spies import Dispatched, drop_plans, pushed

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ALGORITHMS = ["unfused", "chunked", "fused", "pipelined"]


@contextmanager
def fresh_group(**env: str) -> Iterator[Any]:
    """A group of all ranks that votes under these settings, and is gone afterwards."""
    with mock.patch.dict(os.environ, {f"FUSEDCOMM_{name}": value for name, value in env.items()}):
        group = dist.new_group()
        try:
            yield group
        finally:
            dist.destroy_process_group(group)


@contextmanager
def empty_is_nan(warn_only: bool = False) -> Iterator[None]:
    """torch fills what ``empty`` returns with NaN: an element that an op leaves out shows."""
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def call(group: Any, problem: Problem, seed: int = 0) -> Any:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return problem.call(integers(problem, rank, size, seed=seed), group)


def after_peers(group: Any, late: int) -> None:
    """The next call of one rank begins when the others have signalled their chunks to it."""
    dist.barrier(group)
    if dist.get_rank(group) == late:
        for member in members.members(group):  # none before the first call
            if member.workspace is not None:
                for peer in set(range(member.group_size)) - {late}:
                    until_signalled(member.workspace, peer, bound_s=30.0)


def check(group: Any, problem: Problem, out: Any, seed: int = 0) -> None:
    want = expected(problem, dist.get_world_size(group), seed=seed)[dist.get_rank(group)]
    torch.testing.assert_close(out, want, rtol=0, atol=0)


def refuse_a_forked_child(group: Any, problem: Problem) -> None:
    if (child := os.fork()) == 0:
        try:
            call(group, problem)
        except RuntimeError as error:
            os._exit(7 if "was forked from rank" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    dist.barrier(group)
    check(group, problem, call(group, problem, 1), 1)


def check_values(rank: int, problem: Problem, dtype: torch.dtype, algorithm: str | None, calls: int) -> None:
    """Make ``calls`` calls back to back with fresh data, so that both slots are used several times."""
    size = dist.get_world_size()
    wants = [expected(problem, size, dtype, seed)[rank] for seed in range(calls)]
    with fusedcomm.force_algorithm(algorithm, strict=True), empty_is_nan():
        outs = [problem.call(integers(problem, rank, size, dtype, seed)) for seed in range(calls)]
    for out, want in zip(outs, wants, strict=True):
        assert all(t.is_contiguous() for t in (out if isinstance(out, list) else [out]))
        torch.testing.assert_close(out, want, rtol=0, atol=0)


def non_contiguous(t: torch.Tensor) -> torch.Tensor:
    """The same values, with every stride doubled."""
    wide = t.new_full([2 * size for size in t.shape], float("nan"))
    return wide[tuple(slice(None, None, 2) for _ in t.shape)].copy_(t)


def member_of(group: Any) -> members.Member:
    (member,) = members.members(group)
    return member


def check_bad_input(rank: int, op: str, arguments: dict[str, Any], message: str) -> None:
    """One ValueError on CPU and meta tensors, and nothing is sent. x, w and bias are shapes, or lists."""

    def tensors(shapes: Any, device: str) -> Any:
        if isinstance(shapes, list):
            return [tensors(shape, device) for shape in shapes]
        return None if shapes is None else torch.ones(shapes, device=device)

    texts = set()
    for device in ("cpu", "meta"):
        given = {
            name: tensors(value, device) if name in ("x", "w", "bias", "partial_bias") else value
            for name, value in arguments.items()
        }
        with pushed() as sent, Dispatched() as plain, pytest.raises(ValueError, match=message) as caught:
            getattr(fusedcomm, op)(**given)
        assert not sent.chunks and not plain.names("_c10d_functional")
        texts.add(str(caught.value))
    assert len(texts) == 1


@contextmanager
def left_as_found(**env: str) -> Iterator[pytest.MonkeyPatch]:
    """WORLD is as new inside, under these settings; groups that are made inside are destroyed."""
    before = list(c10d._world.pg_map)
    mesh_groups._worlds.clear()
    mesh_groups._meshes.clear()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(f"FUSEDCOMM_{name}", value)
        try:
            yield patch
        finally:
            for pg in [pg for pg in c10d._world.pg_map if pg not in before]:
                dist.destroy_process_group(pg)
            mesh_groups._worlds.clear()


# The collectives that `pipelined` begins, seen from outside, and moved as early or as late as a backend may.
AS_IT_IS, EARLY, LATE = "as-it-is", "early", "late"


@dataclass
class Begun:
    """What this rank has done in one call, in order, and what it has given to collectives."""

    events: list[str] = field(default_factory=list)  # "begin", "wait", "matmul"
    bytes_to_a_peer: list[int] = field(default_factory=list)  # by collective
    sent_bytes: int = 0  # to all peers
    sums: int = 0  # collectives in which the backend adds


@contextmanager
def moved(when: str) -> Iterator[Begun]:
    """Every collective moves its elements in its begin, or in its wait, or when the backend does."""
    begun = Begun()
    begin, multiply = python_executor.begin, python_executor.multiply

    def counted(kind: str, group_name: str, received: Tensor, sent: Tensor) -> Callable[[], object]:
        size, numels = find(group_name).size(), (received.numel(), sent.numel())
        assert numels[0] * {"reduce_scatter": size, "all_gather": 1 / size}.get(kind, 1) == numels[1]
        assert sent.is_contiguous() and received.is_contiguous()
        begun.events.append("begin")
        begun.sums += kind == "reduce_scatter"
        begun.bytes_to_a_peer.append(sent.nbytes // (1 if kind == "all_gather" else size))
        begun.sent_bytes += (size - 1) * begun.bytes_to_a_peer[-1]
        start = partial(begin, kind, group_name, received, sent)
        wait = start() if when != LATE else lambda: start()()
        if when == EARLY:
            wait()

        def ended() -> None:
            begun.events.append("wait")
            if when != EARLY:
                wait()

        return ended

    def logged(*args: Any, **options: Any) -> None:
        begun.events.append("matmul")
        multiply(*args, **options)

    with mock.patch.object(python_executor, "begin", counted), mock.patch.object(python_executor, "multiply", logged):
        yield begun


@contextmanager
def in_pieces(num_pieces: int) -> Iterator[None]:
    """Calls that are forced to `pipelined` are cut into so many pieces, if rows are as many."""
    drop_plans()
    with mock.patch.object(cost_in_pieces, "fastest", lambda *call: (num_pieces, 0.0)):
        yield
    drop_plans()


def one_buffer() -> Any:
    """All pieces send from and receive in one place: a defect."""
    return mock.patch.object(pipelined, "Buffers", cache(pipelined.Buffers))
