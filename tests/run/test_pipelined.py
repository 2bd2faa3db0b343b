"""`pipelined`: the values for every number of pieces, whenever a backend moves them, and what is under way when."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _get_work_registry_size

import fusedcomm
from fusedcomm.memory import topology
from fusedcomm.memory.errors import PeerMismatchError
from fusedcomm.plan import planner
from fusedcomm.plan.cost import in_pieces as cost
from fusedcomm.plan.schedule import Multiply, Wait
from fusedcomm.run import unfused
from fusedcomm.run.group_collectives import begin
from fusedcomm.run.python_executor import Execution
from tests.helpers.groups import AS_IT_IS, EARLY, LATE, call, check, empty_is_nan, fresh_group, in_pieces, moved
from tests.helpers.on_ranks import on_ranks
from tests.helpers.op_problems import NAMED, as_list
from tests.helpers.problems import Problem, expected, integers
from tests.helpers.uneven import Uneven
from tests.ops.test_uneven import MANY_ROUNDS, check_call
from tests.plan.test_model import CALLS, CPU

TOKENS = [
    Problem("tokens", (2, 30, 16), 24, 1, -2, out_shape=(4, 6), bias=True),
    Problem("rows-scattered", (60, 16), 10, 1, 0),
    Problem("heads-gathered", (2, 20, 3, 5), 7, 2, 1, k_dims=2, op="all_to_all_matmul", bias=True),
    Problem("list", (2, 130, 8), (6, 10), 1, op="all_gather_matmul", bias=(True, False)),
    Problem("k-gathered", (2, 30, 8), 6, 2, op="all_gather_matmul"),
    Problem("rows", (2, 140, 16), 12, scatter_dim=1, bias=True, op="matmul_reduce_scatter"),
    Problem("columns", (30, 16), 12, scatter_dim=1, reduce_op="avg", op="matmul_reduce_scatter"),
    Problem("all_reduce", (2, 30, 16), 12, bias=True, op="matmul_all_reduce"),
]
BY_NAME = {str(problem): problem for problem in TOKENS}


@on_ranks(3)
@pytest.mark.parametrize("name", BY_NAME)
def test_values_in_any_number_of_pieces(rank: int, name: str) -> None:
    problem = BY_NAME[name]
    with fresh_group() as group, fusedcomm.force_algorithm("pipelined", strict=True), empty_is_nan():
        for num_pieces, when in ((1, LATE), (2, EARLY), (3, LATE), (5, EARLY)):
            with in_pieces(num_pieces), moved(when) as begun:
                check(group, problem, call(group, problem, num_pieces), num_pieces)
            num_collectives = len(begun.bytes_to_a_peer) // (2 if problem.op == "matmul_all_reduce" else 1)
            assert 0.6 * num_pieces <= num_collectives <= num_pieces
            assert not any(num % 16 for num in begun.bytes_to_a_peer)


@on_ranks(3)
@pytest.mark.parametrize("name", MANY_ROUNDS)
def test_parts_of_different_sizes_in_pieces(rank: int, name: str) -> None:
    """A piece of a rank that has no more is sent all the same, as the collectives of all ranks are alike."""
    case: Uneven = MANY_ROUNDS[name]
    with fresh_group() as group, fusedcomm.force_algorithm("pipelined", strict=True):
        for num_pieces, when in ((1, LATE), (4, EARLY), (7, LATE)):
            with in_pieces(num_pieces), moved(when) as begun:
                check_call(case, rank, 3, num_pieces, group)
            counts: list[Any] = [None] * 3
            dist.all_gather_object(counts, begun.bytes_to_a_peer, group=group)
            assert counts == counts[:1] * 3


@on_ranks(3)
@pytest.mark.parametrize("name", BY_NAME)
def test_a_collective_is_under_way_beside_every_matmul_but_the_first(rank: int, name: str) -> None:
    """In a gather beside every one, but of the last piece's chunks that have come. A plan counts pieces and bytes."""
    problem = BY_NAME[name]
    inputs = integers(problem, rank, 3)
    with fusedcomm.force_algorithm("pipelined", strict=True), in_pieces(4):
        plan = problem.plan(inputs)
        with moved(AS_IT_IS) as begun:
            problem.call(inputs)
    under_way, alone = 0, []
    for number, event in enumerate(begun.events):
        under_way += (event == "begin") - (event == "wait")
        if event == "matmul" and under_way == 0:
            alone.append(number)
    pushes = not problem.op.endswith("_matmul")
    first, last = begun.events.index("begin"), len(begun.events) - begun.events[::-1].index("wait")
    assert under_way == 0 and alone == [number for number in alone if (number < first if pushes else number >= last)]
    assert begun.events.count("begin") >= 3
    num_collectives = 2 if problem.op == "matmul_all_reduce" else 1
    assert num_collectives * plan.num_rounds == len(begun.bytes_to_a_peer)
    assert plan.sent_bytes == begun.sent_bytes
    assert f"pipelined, {plan.num_rounds} pieces, " in str(plan) and str(plan).endswith("MiB sent (forced)")


@on_ranks(2)
def test_a_wait_is_for_one_collective(rank: int) -> None:
    """Not for a later one, which the other rank begins only when this rank has waited for the first."""
    (sent, *received), group = torch.zeros(5, 2, 8).unbind(), dist.group.WORLD
    assert group is not None
    flat, store = [each.view(-1) for each in received], dist.distributed_c10d._get_default_store()
    first = begin("all_gather", group.group_name, flat[0], sent[0])
    # Torch's registry keeps works by storage, those of a failed call for good; all temporaries of a call share one.
    assert _get_work_registry_size() == 0
    if rank == 0:
        second = begin("all_gather", group.group_name, flat[1], sent[0])
        first()
        store.set("waited for the first", "yes")
    else:
        first()
        store.wait(["waited for the first"])
        second = begin("all_gather", group.group_name, flat[1], sent[0])
    second()


@on_ranks(3)
@pytest.mark.parametrize("name", BY_NAME)
def test_a_rank_that_raises_sends_nan_for_the_rest_of_its_call(rank: int, name: str) -> None:
    """Its next call meets the peers' next. ``at``: in quarters of the steps."""
    problem, step, failures = BY_NAME[name], Execution.step, list[Exception]()

    def failing(self: Execution, *args: Any) -> None:
        if failures and self.at == at * (len(self.schedule.steps) - 1) // 4:
            raise failures.pop()
        step(self, *args)

    with fresh_group() as group, fusedcomm.force_algorithm("pipelined", strict=True), in_pieces(3):
        for at in range(5):
            if rank == 1:
                failures.append(MemoryError("planted"))
                with mock.patch.object(Execution, "step", failing), pytest.raises(MemoryError, match="planted"):
                    call(group, problem, at)
            else:
                outs, wants = as_list(call(group, problem, at)), as_list(expected(problem, 3, seed=at)[rank])
                for out, want in zip(outs, wants, strict=True):
                    assert ((out == want) | out.isnan()).all()
            check(group, problem, call(group, problem, at + 5), at + 5)
        with mock.patch.object(Execution, "__init__", side_effect=MemoryError), pytest.raises(MemoryError):
            call(group, problem)
        with pytest.raises(fusedcomm.PeerError, match="left by MemoryError"):  # nothing was sent
            call(group, problem)
    with fresh_group() as group, fusedcomm.force_algorithm("unfused"):
        check(group, problem, call(group, problem))
        with mock.patch.object(unfused, "program_of", side_effect=MemoryError), pytest.raises(MemoryError):
            call(group, problem)
        with pytest.raises(fusedcomm.PeerError, match="left by MemoryError"):
            call(group, problem)


@on_ranks(3)
def test_the_ranks_of_a_host_share_memory_where_they_can(rank: int) -> None:
    problem = BY_NAME["tokens"]
    with fresh_group(HOST_ID="one host") as group:
        assert problem.plan(integers(problem, rank, 3), group).algorithm == "chunked"


@on_ranks(3)
def test_calls_are_compared_before_they_are_made(rank: int) -> None:
    problem = BY_NAME["tokens" if rank else "rows-scattered"]
    with fresh_group(CHECK="1", TIMEOUT_S="20") as group, fusedcomm.force_algorithm("pipelined", strict=True):
        with pytest.raises(PeerMismatchError, match="calls must be equal on all ranks, got x shape"):
            call(group, problem)
        check(group, BY_NAME["tokens"], call(group, BY_NAME["tokens"]))  # nothing had been sent


@on_ranks(2)
def test_it_is_refused_where_it_cannot_run(rank: int) -> None:
    x, w = torch.ones(4, 8, dtype=torch.float64), torch.ones(8, 6, dtype=torch.float64)
    with fusedcomm.force_algorithm("pipelined", strict=True):
        with pytest.raises(RuntimeError, match="cannot run as pipelined: float64 has no overlapped algorithm"):
            fusedcomm.matmul_all_reduce(x, w)
        refused = pytest.raises(RuntimeError, match="cannot run as pipelined: pipelined runs on nccl here, got gloo")
        with mock.patch.dict(planner.PIPELINED_BACKENDS, cpu="nccl"), refused:
            fusedcomm.matmul_all_reduce(x.float(), w.float())


@on_ranks(2)
def test_no_call_is_prepared(rank: int) -> None:
    """The second of a kind is where others are recorded, and the third where they need no Python."""
    problem = NAMED["heads"]
    with fresh_group() as group, fusedcomm.force_algorithm("pipelined", strict=True):
        for seed in range(4):
            with moved(AS_IT_IS) as begun:
                check(group, problem, call(group, problem, seed), seed)
            assert begun.bytes_to_a_peer


# sums of the backend
SUMS = {str(problem): problem for problem in TOKENS if problem.op in ("matmul_reduce_scatter", "matmul_all_reduce")}
SUMS["average"] = Problem("average", (2, 30, 16), 12, bias=True, reduce_op="avg", op="matmul_all_reduce")
UNEVEN = {name: case for name, case in MANY_ROUNDS.items() if case.op == "matmul_reduce_scatter"}


@on_ranks(3)
@pytest.mark.parametrize("name", SUMS)
def test_values_of_sums_in_pieces(rank: int, name: str) -> None:
    problem = SUMS[name]
    num_collectives = 2 if problem.op == "matmul_all_reduce" else 1
    with fresh_group(BACKEND_SUMS="1") as group, fusedcomm.force_algorithm("pipelined", strict=True), empty_is_nan():
        for num_pieces, when in ((1, EARLY), (3, EARLY), (5, LATE)):
            with in_pieces(num_pieces), moved(when) as begun:
                check(group, problem, call(group, problem, num_pieces), num_pieces)
            assert begun.sums * num_collectives == len(begun.bytes_to_a_peer) > 0


@on_ranks(3)
@pytest.mark.parametrize("name", UNEVEN)
def test_parts_of_different_sizes(rank: int, name: str) -> None:
    with fresh_group(BACKEND_SUMS="1") as group, fusedcomm.force_algorithm("pipelined", strict=True):
        for num_pieces in (1, 4):
            with in_pieces(num_pieces), moved(LATE) as begun:
                check_call(UNEVEN[name], rank, 3, num_pieces, group)
            assert begun.sums > 0


@on_ranks(2)
def test_averages_whose_sum_would_overflow(rank: int) -> None:
    x, w = torch.full((32, 4), 100.0, dtype=torch.float16), torch.full((4, 8), 100.0, dtype=torch.float16)
    with fresh_group(BACKEND_SUMS="1") as group, fusedcomm.force_algorithm("pipelined", strict=True):
        out = fusedcomm.matmul_all_reduce(x, w, reduce_op="avg", group=group)
        total = fusedcomm.matmul_all_reduce(x, w, group=group)
    assert (out == 40000).all() and total.isinf().all()


@on_ranks(2)
def test_it_counts_where_all_ranks_have_it(rank: int) -> None:
    problem = SUMS["average"]
    with fresh_group(BACKEND_SUMS=str(rank)) as group, fusedcomm.force_algorithm("pipelined", strict=True):
        with in_pieces(2), moved(AS_IT_IS) as begun, mock.patch.object(topology.log, "warning") as warned:
            check(group, problem, call(group, problem))
        assert begun.sums == 0 and begun.bytes_to_a_peer
    (told,) = [args[0][0] % args[0][1:] for args in warned.call_args_list] if rank == 0 else [""]
    assert told == "FUSEDCOMM_BACKEND_SUMS=1 is not used: it must be set on all ranks, got ranks [1]" * (rank == 0)


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_the_model_takes_the_link_of_what_moves_the_sums(op: str) -> None:
    slow_sums = replace(CPU, backend_bandwidth=CPU.backend_bandwidth | {"reduce_scatter": 1e3})
    slow_moves = replace(CPU, backend_bandwidth=CPU.backend_bandwidth | {"all_to_all": 1e3})
    for constants, backend_sums in ((slow_sums, True), (slow_moves, False)):
        here = cost.seconds(op, CALLS[op], "float32", constants, 2, backend_sums)
        assert here > 10 * cost.seconds(op, CALLS[op], "float32", constants, 2, not backend_sums)


# `chunked` where K is gathered: what is computed before the first wait.
def order(rank: int, dtype: torch.dtype, kept: bool) -> list[str]:
    """The order of what a call with K gathered does."""
    did: list[str] = []
    step = Execution.step

    def does(self: Execution, work: Any, *rest: Any) -> None:
        if isinstance(work, Wait | Multiply):
            did.append("wait" if isinstance(work, Wait) else "matmul")
        step(self, work, *rest)

    x, w = torch.ones(256, 256, dtype=dtype), torch.ones(512, 8, dtype=dtype, requires_grad=kept)
    with pytest.MonkeyPatch.context() as patch, fusedcomm.force_algorithm("chunked", strict=True):
        patch.setattr(Execution, "step", does)
        y = fusedcomm.all_to_all_matmul(x, w, 1, 0)
    assert torch.equal(y.detach(), torch.full((128, 8), 512.0, dtype=dtype))
    return did


@pytest.mark.parametrize("kept", [True, False])
def test_the_own_part_is_multiplied_before_the_first_wait(ranks: Any, kept: bool) -> None:
    assert ranks(2).run(order, torch.float32, kept) == [["matmul", "wait", "matmul"]] * 2
    assert ranks(2).run(order, torch.bfloat16, kept) == [["wait", "matmul"]] * 2
