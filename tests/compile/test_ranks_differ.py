"""Random programs that differ by rank beside the same collectives: right on every rank, and none hangs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm.compile
from fusedcomm import env
from fusedcomm.compile.fuse.fuser import Fuser
from fusedcomm.compile.passes import FusedcommPass, Settings
from fusedcomm.compile.reports import CompileReport
from tests.helpers import differing_programs as programs
from tests.helpers.block_checks import interpreted, no_latency
from tests.helpers.differing_programs import Program
from tests.helpers.graphs import aten_graph
from tests.helpers.on_ranks import forget_consents, on_ranks


@contextmanager
def fresh_group() -> Iterator[str]:
    """The name of a group that no other program has used: what ranks agree to stands in its store."""
    pg = dist.new_group(timeout=timedelta(seconds=env.timeout_s()))
    yield pg.group_name
    dist.destroy_process_group(pg)


def on_any_rank(text: str | None) -> str | None:
    failed = torch.tensor(0 if text is None else 1)
    dist.all_reduce(failed)
    if not failed:
        return None
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return "\n".join(f"rank {rank}: {each}" for rank, each in enumerate(texts) if each)


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


def outcome(p: Program, rank: int, run: Callable[..., Any]) -> str | None:
    wants = [programs.expected(p, call) for call in range(1 if run is traced else 2)]
    if not all(programs.is_exact(p, each) for each in wants):
        return None
    text = None
    with fresh_group() as name:
        try:
            for found, want in zip(run(p, rank, name), wants, strict=True):
                want32 = [each.float() for each in want[rank]]
                torch.testing.assert_close([each.float() for each in found], want32, rtol=0, atol=0)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        return on_any_rank(text)


def check(rank: int, seeds: Iterable[int], run: Callable[..., Any]) -> None:
    for seed in seeds:
        forget_consents(1 / 5)  # a rank that compiles alone waits for each of its graphs, and peers wait for it
        p = programs.drawn(seed, dist.get_world_size(), run is compiled)
        why = outcome(p, rank, run)
        assert why is None, f"{p} of seed {seed}:\n{why}"


@on_ranks()
@pytest.mark.parametrize("world_size", [2, 3])
def test_passes(rank: int, world_size: int) -> None:
    check(rank, range(60 // world_size), traced)


@on_ranks()
@pytest.mark.parametrize("world_size", [2, 3])
def test_compiled(rank: int, world_size: int) -> None:
    check(rank, range(8 // world_size), compiled)


@on_ranks(2)
def test_without_plain_ops_ranks_wait_for_each_other(rank: int) -> None:
    """Negative control: the collectives of ranks without a matmul beside stay torch's."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Fuser, "plain", lambda *args: []))
        stack.enter_context(mock.patch.dict(os.environ, FUSEDCOMM_TIMEOUT_S="2"))
        stack.enter_context(pytest.raises(AssertionError, match="PeerTimeoutError"))
        check(rank, range(20), traced)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("run", "count", "batch"), [(traced, 1500, 30), (compiled, 100, 4)])
def test_for_long(ranks: Any, run: Callable[..., Any], count: int, batch: int, world_size: int) -> None:
    first = int(os.environ.get("FUSEDCOMM_TEST_SEED", time.time_ns() % 10**9))
    print(f"FUSEDCOMM_TEST_SEED={first} repeats it")
    for start in range(first, first + count, batch):  # within the pool's time-out
        ranks(world_size).run(check, range(start, start + batch), run)
