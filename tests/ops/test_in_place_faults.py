"""Results in place when calls fail: no rank writes into a tensor that is not the result of its call."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from fusedcomm.memory.workspace import Workspace
from fusedcomm.plan import moves, planner
from fusedcomm.run import python_executor
from tests.faults.prepared_calls import until_posted
from tests.helpers.groups import call, check, fresh_group, member_of
from tests.helpers.in_place import (
    TO_ALL,
    after_peers,
    arrived,
    assert_exact,
    chunked_group,
    results_of,
    wanted,
    warm_up,
)
from tests.helpers.on_ranks import on_ranks
from tests.helpers.op_problems import NAMED
from tests.helpers.prepared import python_calls
from tests.helpers.problems import Problem
from tests.helpers.spies import drop_plans


def stopped(original: Callable[..., Any], pid: int) -> Callable[..., Any]:
    """The function as a process runs it that is stopped at its begin, and goes on a second later."""

    def run(*args: Any, **kwargs: Any) -> Any:
        subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {pid}"])
        os.kill(pid, signal.SIGSTOP)
        return original(*args, **kwargs)

    return run


@contextmanager
def matmuls_stop(plans: bool) -> Iterator[None]:
    """This process is stopped where it begins to write a chunk, in Python or in a native plan."""

    def product(x: Tensor, w: Tensor, *, out: Tensor) -> Tensor:
        return out.copy_((x[:, :, None] * w).sum(1))

    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        if plans:
            library = torch.library.Library("aten", "IMPL")
            stack.callback(library._destroy)
            library.impl("mm.out", stopped(product, os.getpid()), "CPU", allow_override=True)
        else:
            patch.setattr(python_executor, "multiply", stopped(python_executor.multiply, os.getpid()))
        yield


@on_ranks(2)
@pytest.mark.parametrize("plans", [True, False], ids=["prepared", "python"])
def test_a_stopped_peer_writes_into_no_later_tensor(rank: int, plans: bool) -> None:
    """Rank 1 has found rank 0's post, and is stopped until rank 0 has timed out and has taken new results."""
    with chunked_group(plans, TIMEOUT_S="20") as group:
        warm_up(group, TO_ALL)
        workspace = member_of(group).workspace
        held = results_of(group, TO_ALL)
        warm_up(group, TO_ALL)  # the next block
        later = []
        if rank == 0:
            workspace.timeout_s = 0.2
        after_peers(group, 1)
        with matmuls_stop(plans) if rank else nullcontext(), python_calls() as ran:
            with pytest.raises(fusedcomm.PeerError):
                results_of(group, TO_ALL, 1)
            assert bool(ran) != plans
        if rank == 0:
            later = [workspace.results.empty(held[0].shape, torch.float32).fill_(7) for _ in range(3)]
        dist.barrier(group)
        assert all((t == 7).all() for t in later)
        assert_exact(held, wanted(group, TO_ALL))
        fusedcomm.reset(group)
        assert member_of(group).workspace.results is not workspace.results
        warm_up(group, TO_ALL)
        assert all((t == 7).all() for t in later)
        assert_exact(held, wanted(group, TO_ALL))


@on_ranks(2)
@pytest.mark.parametrize("plans", [True, False], ids=["prepared", "python"])
def test_calls_that_differ_write_into_no_result_of_the_other(rank: int, plans: bool) -> None:
    """Both results have the same size, and both ranks have posted."""
    other = Problem("other", (3, 5), 14, 0, 1)
    with chunked_group(plans) as group:
        warm_up(group, TO_ALL, other)
        after_peers(group, 1)
        with pytest.raises(fusedcomm.PeerMismatchError):
            results_of(group, (TO_ALL, other)[rank])
        workspace = member_of(group).workspace
        dist.barrier(group)
        workspace.epoch += 1
        assert arrived(group) == []
        fusedcomm.reset(group)
        warm_up(group, TO_ALL, other)


SMALL, LARGE = Problem("small", (512, 5), 4, 0, 1), Problem("large", (4096, 5), 4, 0, 1)


@on_ranks(2)
@pytest.mark.parametrize("plans", [True, False], ids=["prepared", "python"])
def test_calls_with_one_fingerprint_write_beyond_no_result(rank: int, plans: bool) -> None:
    """A fingerprint has 24 bits. What two such calls give is wrong, but other tensors stay as they are."""
    with pytest.MonkeyPatch.context() as patch, chunked_group(plans) as group:
        for where in (planner, moves):  # a layout has 24 bits too
            patch.setattr(where, "fingerprint_of", lambda *facts: 5)
        warm_up(group, LARGE, SMALL)
        results = member_of(group).workspace.results
        freed = results.empty([4096], torch.float32)  # where the result of SMALL goes
        around = [results.empty([4096], torch.float32).fill_(7) for _ in range(7)]
        assert results.heap.place(freed) == 0 and None not in map(results.heap.place, around)
        del freed
        dist.barrier(group)
        if rank:
            until_posted(member_of(group).workspace, bound_s=20)
        results_of(group, (SMALL, LARGE)[rank])
        dist.barrier(group)
        assert all((t == 7).all() for t in around)


@on_ranks(2)
def test_an_exception_between_post_and_signal(rank: int) -> None:
    def fail(*args: Any) -> None:
        raise MemoryError

    with chunked_group(plans=False, TIMEOUT_S="20") as group:
        warm_up(group, TO_ALL)
        results = member_of(group).workspace.results
        with pytest.MonkeyPatch.context() as fails:
            if rank == 1:
                fails.setattr(Workspace, "signal", fail)
            with pytest.raises(MemoryError if rank else fusedcomm.PeerError):
                results_of(group, TO_ALL, 1)
        assert results.heap.place(results.empty([6, 7], torch.float32)) is None
        dist.barrier(group)
        fusedcomm.reset(group)
        warm_up(group, TO_ALL)


# Ranks in different calls, for every op. Ranks that do not come: tests/memory/test_faults.py.
@on_ranks(2)
def test_ranks_that_cut_a_call_into_other_rounds_do_not_believe_each_other(rank: int) -> None:
    """As where one runs `chunked` on a GPU, which may cut a gather of K into pieces, and one runs `fused`."""
    problem = NAMED["bias"]
    with fresh_group() as group, fusedcomm.force_algorithm("chunked", strict=True):
        check(group, problem, call(group, problem))
        rounds = planner._rounds
        cut = mock.patch.object(planner, "_rounds", lambda *args: (rounds(*args)[0], 1 + rank))
        with cut, pytest.raises(fusedcomm.PeerMismatchError):
            drop_plans()
            call(group, problem)
        dist.barrier(group)


def check_mismatch(rank: int, problem: Problem, other: Problem, algorithm: str) -> None:
    with fresh_group() as group, fusedcomm.force_algorithm(algorithm, strict=True):
        check(group, problem, call(group, problem))
        check(group, other, call(group, other))
        with pytest.raises(fusedcomm.PeerMismatchError, match="another op, or this one with other shapes") as caught:
            call(group, other if rank == 1 else problem)
        assert caught.value.op == (other if rank == 1 else problem).op
        assert caught.value.peers == [1 - rank]
        dist.barrier(group)
        fusedcomm.reset(group)
        for seed in range(3):
            check(group, problem, call(group, problem, seed), seed)


OTHERS = [
    (NAMED["bias"], NAMED["matmul_all_reduce-nothing-divides"]),
    (NAMED["all_to_all_matmul-heads-gathered"], NAMED["all_to_all_matmul-head-dim-gathered"]),
    (NAMED["all_gather_matmul-batch-gathered"], NAMED["all_gather_matmul-batch-rows-gathered"]),
    (NAMED["matmul_reduce_scatter-batch-scattered"], NAMED["matmul_reduce_scatter-batched-w"]),
    (
        NAMED["matmul_reduce_scatter-rows-scattered"],
        Problem("avg", (3, 5), 7, scatter_dim=0, reduce_op="avg", op="matmul_reduce_scatter"),
    ),
    (NAMED["matmul_all_reduce-ragged"], NAMED["matmul_all_reduce-one-row"]),
]


@pytest.mark.parametrize("problem, other", OTHERS, ids=str)
def test_a_peer_with_other_shapes_or_dims(ranks: Any, problem: Problem, other: Problem) -> None:
    ranks(2).run(check_mismatch, problem, other, "chunked")
