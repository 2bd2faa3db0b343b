"""Random programs that differ by rank beside the same collectives: right on every rank, and none hangs."""

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
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.nn import functional as F

import fusedcomm.compile
from fusedcomm import env
from fusedcomm.compile.fuse.fuser import Fuser
from fusedcomm.compile.reports import CompileReport
from tests.helpers import differing_programs as programs
from tests.helpers.block_checks import interpreted, no_latency
from tests.helpers.differing_programs import Program
from tests.helpers.graphs import rewritten
from tests.helpers.on_ranks import forget_consents, on_ranks
from tests.helpers.program_parts import all_gather, heads_first, reduce_scatter, world


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
    gm, _ = rewritten(all_of_it, args)
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


def check(rank: int, seeds: Iterable[int], run: Callable[..., Any]) -> None:
    for seed in seeds:
        forget_consents(rank, 1 / 5)  # a rank that compiles alone waits for each of its graphs, and peers wait for it
        p, text = programs.drawn(seed, dist.get_world_size(), run is compiled), None
        wants = [programs.expected(p, call) for call in range(1 if run is traced else 2)]
        if not all(map(programs.is_exact, wants)):
            continue
        with fresh_group() as name:
            try:
                for found, want in zip(run(p, rank, name), wants, strict=True):
                    want32 = [each.float() for each in want[rank]]
                    torch.testing.assert_close([each.float() for each in found], want32, rtol=0, atol=0)
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
            why = on_any_rank(text)
        assert why is None, f"{p} of seed {seed}:\n{why}"


@on_ranks(2)
@pytest.mark.thorough
def test_passes(rank: int) -> None:
    check(rank, range(30), traced)


@on_ranks(2)
def test_compiled(rank: int) -> None:
    check(rank, range(4), compiled)


@on_ranks(2)
@pytest.mark.thorough
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
@pytest.mark.parametrize(("run", "count", "batch"), [(traced, 120, 30), (compiled, 12, 4)])
def test_for_long(ranks: Any, run: Callable[..., Any], count: int, batch: int, world_size: int) -> None:
    first = int(os.environ.get("FUSEDCOMM_TEST_SEED", time.time_ns() % 10**9))
    print(f"FUSEDCOMM_TEST_SEED={first} repeats it")
    for start in range(first, first + count, batch):  # within the pool's time-out
        ranks(world_size).run(check, range(start, start + batch), run)


# Ranks whose programs differ: every rank has the values of its own program, and what all share is still rewritten.
N = 8
RankProgram = Callable[[Tensor, Tensor, int], Any]


def reduced(x: Tensor, op: str = "sum") -> Tensor:
    return funcol.all_reduce(x, op, world())


def last(y: Tensor) -> Tensor:
    """A collective behind: ranks out of step would give it the wrong tensors."""
    return reduced(y * (dist.get_rank() + 1.0))


def logged(x: Tensor, w: Tensor, me: int) -> Any:
    a, b = reduced(x.sin()), reduced(x.cos())
    y = a + b
    return y, last(y), a.norm() if me == 0 else None


def one_of_three(x: Tensor, w: Tensor, me: int) -> Any:
    terms = [reduced(x * (i + 1)) for i in range(3)]
    return last(sum(terms[1:], terms[0])), terms[1].amax() if me == 1 else None


def scattered(x: Tensor, w: Tensor, me: int) -> Any:
    a, b = (reduce_scatter(t.contiguous(), "sum", 0, world()) for t in (x.sin(), x.cos()))
    y = last(a + b)
    return y if me else (y, b.mean())


def logged_between(x: Tensor, w: Tensor, me: int) -> Any:
    y = F.rms_norm((x @ w).view(1, 8, 4, 2), (2,), eps=1.0)
    return heads_first(y, dist.get_world_size()), (y.amax() if me == 0 else None)


def small_ones(x: Tensor, w: Tensor, me: int) -> Any:
    parts = [all_gather(x * (i + 1), 0, world()) for i in range(3)]
    y = sum(part.sin() @ w for part in parts)
    return last(y), parts[1].norm() if me == 0 else None


def read_before_it_is_sent(x: Tensor, w: Tensor, me: int) -> Any:
    """On each kind of collective: rank 0 has no matmul to fuse, or one with a bias."""
    ys = [x @ (w + i) for i in range(3)]
    sums = reduced(ys[0]), reduce_scatter(ys[1], "sum", 0, world())
    sent = funcol.wait_tensor(funcol.all_to_all_single(ys[2], None, None, world()))
    gathered, arrived = all_gather(x, 0, world()), funcol.wait_tensor(funcol.all_to_all_single(x, None, None, world()))
    w = w.tanh() if me == 0 else w
    rows = [each @ w + 1 if me == 0 else each @ w for each in (gathered, arrived)]
    alone = [reduced(x.cos()), all_gather(x.sin(), 0, world())]
    return *sums, sent, *rows, *alone, [y.norm() for y in ys] if me == 0 else None


PROGRAMS = [logged, one_of_three, scattered, logged_between, small_ones, read_before_it_is_sent]


def run(program: RankProgram, overlap: bool, me: int, n: int = N) -> CompileReport:
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, w = torch.randn(n, n, generator=generator), torch.randn(n, n, generator=generator)
    torch._dynamo.reset()
    with torch.no_grad(), no_latency(), fusedcomm.compile.enabled(overlap=overlap) as report:
        got = torch.compile(program, backend=interpreted)(x, w, me)
    torch.testing.assert_close(got, program(x, w, me), rtol=1e-4, atol=1e-4)
    return report


@on_ranks(2)
@pytest.mark.thorough
@pytest.mark.parametrize("overlap", [False, True])
def test_values_of_each_rank_s_own_program(rank: int, overlap: bool) -> None:
    for program in PROGRAMS:
        run(program, overlap, 0)  # equal on all ranks: agreed on, which must not count later
        run(program, overlap, rank)


@on_ranks(2)
def test_a_rank_s_own_matmuls_change_nothing_that_is_sent(rank: int) -> None:
    fused = [[line.op for line in run(read_before_it_is_sent, False, me).collectives] for me in (1, rank)]
    ops = ["matmul_all_reduce", "matmul_reduce_scatter", "matmul_all_to_all", "all_gather_matmul", "all_to_all_matmul"]
    assert sorted(map(str, fused[0])) == sorted([*ops, "all_reduce", "all_gather"]), fused
    assert rank or fused[1] != fused[0]


@on_ranks(2)
def test_what_ranks_share_is_rewritten_and_what_they_do_not_has_a_reason(rank: int) -> None:
    def statuses(me: int) -> list[str]:
        return [line.status for line in run(logged, True, me).collectives]

    with mock.patch.dict(os.environ, FUSEDCOMM_TIMEOUT_S="300"):  # a slow rank is not given up
        assert statuses(1).count("merged") == 2
        mixed = run(logged, True, rank)
        assert not any(line.status == "merged" for line in mixed.collectives)
        assert not rank or any("rank 0 compiled another one" in line.reason for line in mixed.collectives), str(mixed)
        assert statuses(1).count("merged") == 2


@on_ranks(2)
def test_the_first_that_communicates_may_have_several_results(rank: int) -> None:
    def program(x: Tensor, w: Tensor, me: int) -> Any:
        gathered = all_gather(x, 0, world())
        return last(gathered @ w), gathered

    report = run(program, True, 0, n=512)
    assert [line.status for line in report.collectives] == ["fused", "exposed"], str(report)


@on_ranks(2)
def test_a_rank_that_compiles_again_alone_keeps_what_all_agreed_to(rank: int) -> None:
    def first(x: Tensor, mine: Tensor) -> Any:
        return reduced(x), reduced(x.cos()), mine.sin()

    def second(x: Tensor) -> Any:
        y = reduced(x)
        if rank:
            torch._dynamo.graph_break()
        return y, reduced(x.cos())

    forget_consents(rank, 1 / 20)
    x, mine = torch.arange(4.0) + rank, torch.ones(4)
    with no_latency(), fusedcomm.compile.enabled(overlap=True) as report:
        compiled = [torch.compile(each, backend=interpreted) for each in (first, second)]
        for program, args in [(0, (x, mine)), (1, (x,)), (0, (x, mine[: 4 - rank]))]:
            torch.testing.assert_close(compiled[program](*args), (first, second)[program](*args))
    # On rank 0 the digests are equal; the third call compiles on rank 1 alone.
    agreed = ["overlapped"] * 2
    assert [line.status for line in report.collectives] == [*agreed, "plain", "plain", *agreed * rank]
