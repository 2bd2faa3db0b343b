"""Random programs that differ by rank beside the same collectives: right on every rank, and none hangs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm.compile
from fusedcomm.compile.fuse.fuser import Fuser
from fusedcomm.compile.passes import FusedcommPass, Settings
from fusedcomm.compile.reports import CompileReport
from tests.helpers import differing_programs as programs
from tests.helpers.block_checks import interpreted, no_latency
from tests.helpers.differing_programs import Program
from tests.helpers.graphs import aten_graph
from tests.helpers.on_ranks import on_ranks

TIMEOUT_S = 20
MOST_TRIES = 40  # to make a program that fails smaller


class Group:
    """A group of all ranks, a new one after a failure. Waits in it are bounded."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s, self.pg = timeout_s, None

    def name(self) -> str:
        if self.pg is None:
            self.pg = dist.new_group(timeout=timedelta(seconds=self.timeout_s))
        return self.pg.group_name

    def first_failure(self, text: str | None) -> str | None:
        """The same on all ranks; ``text`` is this rank's."""
        failed = torch.tensor(0 if text is None else 1)
        dist.all_reduce(failed)
        if not failed:
            return None
        texts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, text)
        dist.destroy_process_group(self.pg)
        self.pg = None
        return "\n".join(f"rank {rank}: {each}" for rank, each in enumerate(texts) if each)


@contextmanager
def bounded(timeout_s: float) -> Iterator[Group]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEDCOMM_TIMEOUT_S", str(timeout_s))
        group = Group(timeout_s)
        yield group
        if group.pg is not None:
            dist.destroy_process_group(group.pg)


def traced(p: Program, rank: int, name: str) -> list[list[Tensor]]:
    """Forward and backward as one graph, by the passes alone."""
    program, backward = programs.program_of(p, rank, name), p.backward_on(rank)

    def all_of_it(*given: Tensor) -> list[Tensor]:
        args = [each.detach().requires_grad_(backward) for each in given]
        outs = program(args, False)
        grads = torch.autograd.grad(programs.loss_of(*outs), args, allow_unused=True) if backward else ()
        return programs.results(outs, grads)

    args = programs.inputs(p, rank, 0)
    gm = aten_graph(all_of_it, args)
    FusedcommPass(Settings(), CompileReport())(gm.graph)
    gm.recompile()
    return [gm(*args)]


def compiled(p: Program, rank: int, name: str, backend: Any = interpreted) -> list[list[Tensor]]:
    """Two calls; the flag flips, and another number of tokens may be given."""
    torch._dynamo.reset()
    found, backward = [], p.backward_on(rank)
    recorded = backward or (p.grad == "recorded" and rank in p.some)
    with no_latency(), fusedcomm.compile.enabled(overlap=p.overlap), torch.set_grad_enabled(recorded):
        program = torch.compile(programs.program_of(p, rank, name), backend=backend)
        for call in range(2):
            args = [each.requires_grad_(recorded) for each in programs.inputs(p, rank, call)]
            outs = program(args, p.flag_on(rank, call))
            grads = torch.autograd.grad(programs.loss_of(*outs), args, allow_unused=True) if backward else ()
            found.append(programs.results(outs, grads))
    return found


def outcome(p: Program, rank: int, group: Group, run: Callable[..., Any]) -> str | None:
    """Why the program failed, on any rank."""
    wants = [programs.expected(p, call) for call in range(1 if run is traced else 2)]
    if not all(programs.is_exact(p, each) for each in wants):
        return None
    name, text = group.name(), None
    try:
        for found, want in zip(run(p, rank, name), wants, strict=True):
            want32 = [each.float() for each in want[rank]]
            torch.testing.assert_close([each.float() for each in found], want32, rtol=0, atol=0)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    return group.first_failure(text)


def smallest(p: Program, rank: int, group: Group, run: Callable[..., Any], why: str) -> tuple[Program, str]:
    tries = MOST_TRIES
    while tries > 0:
        for less in programs.smaller(p):
            tries -= 1
            if tries < 0:
                break
            if (text := outcome(less, rank, group, run)) is not None:
                p, why = less, text
                break
        else:
            break
    return p, why


def check(rank: int, seeds: Iterable[int], run: Callable[..., Any], timeout_s: float, shrink: bool = True) -> None:
    with bounded(timeout_s) as group:
        for seed in seeds:
            p = programs.drawn(seed, dist.get_world_size(), run is compiled)
            why = outcome(p, rank, group, run)
            if why is not None:
                p, why = smallest(p, rank, group, run, why) if shrink else (p, why)
                raise AssertionError(f"{p} of seed {seed}:\n{why}")


@on_ranks()
@pytest.mark.parametrize("world_size", [2, 3])
def test_passes(rank: int, world_size: int) -> None:
    check(rank, range(70), traced, TIMEOUT_S)


@on_ranks()
@pytest.mark.parametrize("world_size", [2, 3])
def test_compiled(rank: int, world_size: int) -> None:
    check(rank, range(14 - 4 * (world_size - 2)), compiled, TIMEOUT_S)


@on_ranks(2)
def test_without_plain_ops_ranks_wait_for_each_other(rank: int) -> None:
    """Negative control: the collectives of ranks without a matmul beside stay torch's."""
    with mock.patch.object(Fuser, "plain", lambda *args: []), pytest.raises(AssertionError, match="PeerTimeoutError"):
        check(rank, range(20), traced, 2, shrink=False)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("run", "count", "batch"), [(traced, 3000, 100), (compiled, 300, 15)])
def test_for_long(ranks: Any, run: Callable[..., Any], count: int, batch: int, world_size: int) -> None:
    first = int(os.environ.get("FUSEDCOMM_TEST_SEED", time.time_ns() % 10**9))
    print(f"FUSEDCOMM_TEST_SEED={first} repeats it")
    for start in range(first, first + count, batch):  # within the pool's time-out
        ranks(world_size).run(check, range(start, start + batch), run, TIMEOUT_S)
