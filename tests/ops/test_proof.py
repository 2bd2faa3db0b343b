"""Proved before use: what is wrong, late or raises on one rank is off for the group, alike on all ranks.

CPU ranks stand in for GPUs: the predicate that asks for proofs is patched.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedcomm
from fusedcomm.memory import topology
from fusedcomm.memory.group_member import Member
from fusedcomm.memory.workspace import Workspace
from fusedcomm.ops import proof
from fusedcomm.ops.whole_group import PROGRAMS, MatmulSize
from fusedcomm.plan import planner
from fusedcomm.plan.planner import Plan
from fusedcomm.run import calls, native_plan, python_executor
from tests.helpers.groups import call, check, fresh_group, in_pieces, member_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.op_problems import NAMED
from tests.helpers.problems import OPS, Problem, integers
from tests.helpers.spies import logged

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
PUSH, GATHER, REDUCE = (
    NAMED["packed-qkv"],
    NAMED["all_gather_matmul-batch-rows-gathered"],
    NAMED["matmul_reduce_scatter-columns-scattered"],
)
RIGHT = calls.run
NO_MEMORY = "chunked could not be proved: rank 1 has no memory"
LARGE = Problem("large", (600, 8), 512, 0, 1)
Plant = Callable[..., Any]


@contextmanager
def proving(folder: Path | str, plant: Callable[..., Any] | None = None, **env: str) -> Iterator[tuple[Any, list[str]]]:
    """A group that proves, with a cache directory of its own, and what it proves. ``plant``: in chunked of all ops."""
    made: list[str] = []
    prove = proof.prove

    def counted(op: str, algorithm: str, *args: Any) -> None:
        made.append(f"{op} {algorithm}")
        prove(op, algorithm, *args)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(topology, "_must_prove", lambda device: True))
        stack.enter_context(mock.patch.object(proof, "prove", counted))
        stack.enter_context(mock.patch.object(planner, "_logged", set()))
        stack.enter_context(mock.patch.object(proof, "BOUND_S", float(env.get("TIMEOUT_S", 240)) / 2))
        if plant is not None:
            stack.enter_context(planted_in("chunked", plant))
        group = stack.enter_context(fresh_group(CACHE_DIR=str(folder), **env))
        yield group, made
        dist.barrier(group)


def planted_in(algorithm: str, plant: Plant) -> Any:
    """Calls of an algorithm run by ``plant(rank, calls.run, *its arguments)``."""
    right = calls.run

    def run(plan: Plan, *args: Any) -> calls.Ran:
        if plan.algorithm != algorithm:
            return right(plan, *args)
        return plant(dist.get_rank(), right, plan, *args)

    return mock.patch.object(calls, "run", run)


def plan_of_all(group: Any, problem: Problem) -> Plan:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    plans: list[Any] = [None] * size
    dist.all_gather_object(plans, problem.plan(integers(problem, rank, size), group), group)
    assert all(plan == plans[0] for plan in plans)
    return plans[0]


def raises_on_one_rank(rank: int, right: Plant, *args: Any) -> Any:
    if rank == 1:
        raise RuntimeError("planted")
    return right(*args)


def raises_everywhere(rank: int, right: Plant, *args: Any) -> Any:
    raise MemoryError("planted")


def late_on_one_rank(rank: int, right: Plant, *args: Any) -> Any:
    if rank == 1:
        time.sleep(2.5)  # longer than a proof's waits: half of the time-out of 4 s
    return right(*args)


def never_waits(rank: int, right: Plant, *args: Any) -> Any:
    """It takes what lies in the slot. A part comes late, so that it lies there too late."""
    if rank == 0:
        time.sleep(0.2)
    with mock.patch.object(Workspace, "wait", lambda *args: None):
        return right(*args)


def forgets_the_bias(rank: int, right: Plant, plan: Any, memory: Any, name: str, operands: Any, facts: Any) -> Any:
    x, w, bias, *others = operands
    return right(plan, memory, name, (x, w, [None] if isinstance(bias, list) else None, *others), facts)


def writes_past_its_slot(rank: int, right: Plant, plan: Any, memory: Any, *args: Any) -> Any:
    ran = right(plan, memory, *args)
    if rank == 1:
        memory.buffers[0][-1] += 1
    return ran


def wrong_where(is_wrong: Callable[..., bool], rank: int, right: Plant, plan: Plan, memory: Any, *args: Any) -> Any:
    ran = right(plan, memory, *args)
    if rank == 1 and is_wrong(plan, memory, ran.returned[0].dtype):
        ran.returned[0][0, 0] += 1
    return ran


def wrong_on_one_rank(*args: Any) -> Any:  # pickled, as the next
    return wrong_where(lambda *call: True, *args)


def wrong_if_uneven(*args: Any) -> Any:
    return wrong_where(lambda plan, *_: plan.exchange.cut is not None, *args)


wrong_norm = partial(wrong_where, lambda plan, *_: plan.op == "matmul_reduce_scatter_norm")
wrong_where_copy_engines_send = partial(wrong_where, lambda plan, memory, _: memory.least_copied == 0)
PLANTED = {
    "wrong alone": (partial(wrong_where, lambda plan, *_: plan.exchange.is_plain), "rank 1 gave wrong values: 1 of "),
    "wrong by copies": (wrong_where_copy_engines_send, "rank 1 gave wrong values: 1 of "),
    "wrong": (wrong_on_one_rank, "rank 1 gave wrong values: 1 of "),
    "raises": (raises_on_one_rank, "rank 1 raised RuntimeError: planted"),
    "late": (late_on_one_rank, "rank 0 was late: PeerTimeoutError: "),
    "raises everywhere": (raises_everywhere, "rank 0 raised MemoryError: planted"),
    "never waits": (never_waits, "gave wrong values: "),
    "forgets the bias": (forgets_the_bias, "rank 0 gave wrong values: "),
    "wrong norm": (wrong_norm, "rank 1 gave wrong values: 1 of "),  # which peers of the plain op may have
    "overruns": (writes_past_its_slot, "guard bytes of rank 0's segment must stay as they are"),
}


@on_ranks(2)
@pytest.mark.parametrize("problem", [PUSH, GATHER, REDUCE], ids=str)
def test_what_is_right_is_used_and_proved_once(rank: int, tmp_path: Path, problem: Problem) -> None:
    """Growth does not prove again, but a reset does; and the proof grows nothing."""
    with proving(tmp_path) as (group, made), logged(logging.WARNING) as messages:
        assert plan_of_all(group, problem).reason.endswith("; proved at its first call") and not made
        check(group, problem, call(group, problem))
        assert made == [f"{problem.op} chunked"] and not messages
        plan, ours = plan_of_all(group, problem), member_of(group)
        assert plan.algorithm == "chunked" and "proved" not in plan.reason
        assert ours.workspace.epoch > 0 and ours.num_calls == 1
        if problem is PUSH:
            slot_bytes = ours.workspace.usable_bytes
            check(group, LARGE, call(group, LARGE))
            assert ours.workspace.usable_bytes > slot_bytes
        assert len(made) == 1
        fusedcomm.reset(group)
        check(group, problem, call(group, problem, 1), 1)
        assert len(made) == 2


@on_ranks(2)
@pytest.mark.parametrize(
    "name, problem",
    [
        *(("wrong", problem) for problem in (PUSH, GATHER, REDUCE)),
        ("raises", PUSH),
        ("late", PUSH),
        ("raises everywhere", PUSH),
        ("never waits", PUSH),
        ("forgets the bias", REDUCE),
        ("overruns", PUSH),
        ("wrong by copies", GATHER),
        ("wrong alone", GATHER),
        ("wrong norm", REDUCE),
    ],
    ids=str,
)
def test_what_fails_its_proof_is_off_for_all_ranks(rank: int, tmp_path: Path, name: str, problem: Problem) -> None:
    plant, text = PLANTED[name]
    start = time.monotonic()
    with proving(tmp_path, plant, TIMEOUT_S="4") as (group, made), logged(logging.WARNING) as messages:
        for seed in range(3):
            check(group, problem, call(group, problem, seed), seed)
        plan = plan_of_all(group, problem)
        assert plan.algorithm == "unfused" and text in plan.reason, plan
        assert plan.reason.startswith("chunked of float32 failed its proof on ")
        assert f"torch {torch.__version__}, " in plan.reason and f"fusedcomm {fusedcomm.__version__}" in plan.reason
        assert made == [f"{problem.op} chunked"]
        assert messages == [f"{problem.op} runs unfused: {plan.reason}"]
        assert member_of(group).workspace is None  # nothing was made for the group itself
        assert "fusedcomm.reset" not in plan.reason
        fusedcomm.reset(group)
        assert plan_of_all(group, problem).reason.endswith("; proved at its first call")
    assert time.monotonic() - start < 10


UNEVEN = {  # calls whose parts differ in size, by rank and group; they give 4 everywhere
    "matmul_all_to_all": lambda rank, group: fusedcomm.matmul_all_to_all(
        torch.ones(2 + rank, 4), torch.ones(4, 3), 0, 1, group, gather_splits=[2, 3]
    ),
    "all_to_all_matmul": lambda rank, group: fusedcomm.all_to_all_matmul(
        torch.ones(3, 1 + 2 * rank), torch.ones(4, 5), 1, 0, group, gather_splits=[1, 3]
    ),
    "all_gather_matmul": lambda rank, group: fusedcomm.all_gather_matmul(
        torch.ones(2 + rank, 4), torch.ones(4, 3), 0, group, gather_splits=[2, 3]
    ),
    "matmul_reduce_scatter": lambda rank, group: fusedcomm.matmul_reduce_scatter(
        torch.ones(3, 2), torch.ones(2, 3), 0, group
    ),
}


@on_ranks(2)
@pytest.mark.parametrize(("op", "plant"), [*((op, wrong_if_uneven) for op in UNEVEN), ("matmul_all_to_all", None)])
def test_parts_of_different_sizes_have_a_proof_of_their_own(
    rank: int, tmp_path: Path, op: str, plant: Callable[..., Any] | None
) -> None:
    problem = next(each for each in (PUSH, GATHER, REDUCE, NAMED["all_to_all_matmul-heads-gathered"]) if each.op == op)
    with proving(tmp_path, plant) as (group, made):
        check(group, problem, call(group, problem))
        for _ in range(2):
            assert (UNEVEN[op](rank, group) == 4).all()
        assert made == [f"{op} chunked"] * 2
        failed = {name: bool(text) for name, text in member_of(group).outcomes.items()}
        kind = PROGRAMS[op].kind
        assert failed == {f"{kind} chunked float32": False, f"{kind} chunked float32 uneven": plant is not None}


@on_ranks(2)
def test_other_kinds_and_dtypes_stay_on(rank: int, tmp_path: Path) -> None:
    pushes = partial(wrong_where, lambda plan, _, dtype: dtype == torch.float32 and not plan.exchange.gathers)
    with proving(tmp_path, pushes) as (group, _made):
        check(group, GATHER, call(group, GATHER))
        check(group, PUSH, call(group, PUSH))
        x, w = torch.ones(4, 4).bfloat16(), torch.ones(4, 4).bfloat16()
        assert (fusedcomm.matmul_all_to_all(x, w, 0, 1, group) == 4).all()
        failed = {name: bool(text) for name, text in member_of(group).outcomes.items()}
        assert failed == {
            "all_gather chunked float32": False,
            "all_to_all chunked float32": True,
            "all_to_all chunked bfloat16": False,
        }


@on_ranks(2)
def test_a_norm_has_a_proof_of_its_own(rank: int, tmp_path: Path) -> None:
    """One of both ways is wrong. So are Triton's kernels, which are right."""
    y = torch.full((8, 4096), 2.0)
    with proving(tmp_path, partial(wrong_where, lambda plan, *_: plan.exchange.gathers)) as (group, made):
        for _ in range(2):
            assert (fusedcomm.all_reduce(y, group) == 4).all()
            normed, out = fusedcomm.all_reduce_norm(y, y, None, group, eps=0.0)
            assert (normed == 1).all() and (out == 6).all()
        assert made == ["all_reduce chunked", "all_reduce_norm chunked"]
        ours = member_of(group)
        assert [*map(bool, ours.outcomes.values())] == [False, True]
        with mock.patch.object(proof, "SIZES", [MatmulSize(7, 5, 9)]):
            for kind in ("all_reduce_norm", "reduce_scatter"):
                assert proof._outcome(kind, "fused", torch.bfloat16, ours, False) == ""


@on_ranks(2)
def test_a_rank_that_leaves_a_proof_leaves_an_error_until_a_reset(rank: int, tmp_path: Path) -> None:
    """As in a call that makes memory: its peers wait where its next call does not come."""

    def interrupted(rank: int, right: Plant, *args: Any) -> Any:
        if rank == 1:
            raise KeyboardInterrupt
        return right(*args)

    with proving(tmp_path, interrupted, TIMEOUT_S="2") as (group, made):
        with pytest.raises(KeyboardInterrupt if rank == 1 else fusedcomm.PeerTimeoutError):
            call(group, PUSH)
        with pytest.raises(fusedcomm.PeerError, match="on every rank before the next call"):
            call(group, PUSH)
        dist.barrier(group)
        fusedcomm.reset(group)
        with mock.patch.object(calls, "run", RIGHT):
            check(group, PUSH, call(group, PUSH))
        assert len(made) == 2 and plan_of_all(group, PUSH).algorithm == "chunked"


@on_ranks(2)
def test_without_memory_for_the_proof_the_group_runs_unfused(rank: int, tmp_path: Path) -> None:
    allocate = Member._allocate

    def without(self: Member, size: int) -> Any:
        return (None, "has no memory") if rank == 1 else allocate(self, size)

    with proving(tmp_path) as (group, made):
        with mock.patch.object(Member, "_allocate", without):
            check(group, PUSH, call(group, PUSH))
        assert plan_of_all(group, PUSH) == Plan(PUSH.op, "unfused", NO_MEMORY)
        assert len(made) == 1
        fusedcomm.reset(group)
        check(group, PUSH, call(group, PUSH))
        assert len(made) == 2 and plan_of_all(group, PUSH).algorithm == "chunked"


@on_ranks(2)
@pytest.mark.parametrize("wrong", [False, True])
def test_where_the_native_part_is_wrong_calls_stay_in_python(rank: int, tmp_path: Path, wrong: bool) -> None:
    right, ran = native_plan.bound, []

    def bound(*args: Any) -> Callable[[], Any]:
        run = right(*args)
        ran.append(run)
        return (lambda: [t + 1 for t in run()]) if wrong and rank == 1 else run

    with (
        proving(tmp_path) as (group, _),
        logged(logging.WARNING) as said,
        mock.patch.object(native_plan, "bound", bound),
    ):
        for seed in range(4):
            check(group, GATHER, call(group, GATHER, seed), seed)
        assert plan_of_all(group, GATHER).algorithm == "chunked" and ran
        assert (member_of(group).prepared is None) == wrong and len(said) == wrong
        assert not wrong or "fails: chunked of float32 by the native part failed its proof on " in said[0]


@on_ranks(2)
def test_a_rendezvous_that_fails_in_a_proof_is_tried_once(rank: int, tmp_path: Path) -> None:
    """The call then runs pipelined, which has a proof of its own."""
    tried, text = [], "rank 0 cannot map its peers' memory"

    def failing(self: Member, *args: Any) -> tuple[None, str]:
        tried.append(self)
        return None, "cannot map its peers' memory"

    with proving(tmp_path) as (group, made), mock.patch.object(Member, "_rendezvous", failing), in_pieces(3):
        for problem in (BY_OP["all_gather_matmul"], BY_OP["matmul_all_reduce"]):
            check(group, problem, call(group, problem))
            plan = plan_of_all(group, problem)
            assert plan.algorithm == "pipelined" and plan.reason.startswith(text), plan
        ours = member_of(group)
        assert made == ["all_gather_matmul chunked", "all_gather_matmul pipelined", "matmul_all_reduce pipelined"]
        assert len(tried) == 1 and ours.unavailable == text
        proof.prove("all_gather_matmul", "fused", torch.bfloat16, ours, False)  # as planned before, in a thread
        assert len(tried) == 1


@on_ranks(2)
def test_a_peer_may_compile_for_longer_than_the_time_out(rank: int, tmp_path: Path) -> None:
    pauses = [2.5] if rank == 1 else []

    def compiling(rank: int, right: Plant, *args: Any) -> Any:
        time.sleep(pauses.pop() if pauses else 0)
        return right(*args)

    with proving(tmp_path, compiling, TIMEOUT_S="2") as (group, _), mock.patch.object(proof, "BOUND_S", 120.0):
        check(group, PUSH, call(group, PUSH))
        assert plan_of_all(group, PUSH).algorithm == "chunked"


@on_ranks(2)
def test_nothing_is_proved_where_it_is_not_asked_for(rank: int, tmp_path: Path) -> None:
    """On CPUs, in a group of one rank, and by the fake tensors of torch.compile."""
    x, w = torch.ones(2, 4, 8), torch.ones(8, 6)
    with mock.patch.object(proof, "prove", None), fresh_group(CACHE_DIR=str(tmp_path)) as group:
        check(group, PUSH, call(group, PUSH))
        assert not member_of(group).topology.prove
    alone = [dist.new_group([each]) for each in range(2)][rank]
    with proving(tmp_path) as (group, made):
        fusedcomm.matmul_all_reduce(x, w, alone)
        with FakeTensorMode() as mode:
            fusedcomm.matmul_all_reduce(mode.from_tensor(x), mode.from_tensor(w), group)
        assert not made
    dist.destroy_process_group(alone)


# without ranks
ABLE = topology.Topology(None, None, 1 << 30, None, prove=True)


def gpu_member(verdict: topology.Topology = ABLE) -> Member:
    return Member(0, 2, "group", GPU, None, verdict)


def test_a_capture_is_refused_with_what_to_call_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="on every rank inside"):
        proof.prove(PUSH.op, "fused", torch.bfloat16, gpu_member(), False)


def test_an_algorithm_that_failed_in_another_thread_is_planned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan made before: without a second proof, whose votes the peers would not join."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    ours, plan = gpu_member(), Plan(PUSH.op, "fused", "estimated")
    monkeypatch.setattr(proof, "_outcome", None)
    for outcome in ("wrong values", ""):
        for name in ("chunked", "fused"):
            ours.outcomes[ours.topology.name_of_proof("all_to_all", name, torch.bfloat16, False)] = outcome
        assert proof.is_unproved(plan, torch.bfloat16, ours, False) is bool(outcome)
        proof.prove(PUSH.op, "fused", torch.bfloat16, ours, False)


def test_a_plan_of_an_older_generation_is_not_kept() -> None:
    """All were dropped, by a reset say, while its call ran."""
    ours, plan = gpu_member(), Plan(PUSH.op, "unfused", "estimated")
    before = ours.generation
    ours.prepare_anew()
    ours.keep("a kind", plan, before)
    assert not ours.plans
    ours.keep("a kind", plan, ours.generation)
    assert ours.plans == {"a kind": plan}


def test_gpus_prove_unless_it_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert topology._must_prove(GPU) and not topology._must_prove(CPU)
    monkeypatch.setenv("FUSEDCOMM_PROVE", "0")
    assert not topology._must_prove(GPU)
    monkeypatch.setenv("FUSEDCOMM_PROVE", "yes")
    with pytest.raises(ValueError, match="FUSEDCOMM_PROVE must be 0 or 1, got 'yes'"):
        topology._must_prove(GPU)


# `pipelined`
BY_OP = {
    "matmul_all_to_all": Problem("rows", (30, 8), 12, 0, 1),
    "all_to_all_matmul": Problem("rows", (30, 8), 12, 1, 0, op="all_to_all_matmul"),
    "all_gather_matmul": Problem("rows", (200, 8), 12, 0, op="all_gather_matmul"),
    "matmul_reduce_scatter": Problem("rows", (200, 8), 12, scatter_dim=0, op="matmul_reduce_scatter"),
    "matmul_all_reduce": Problem("rows", (30, 8), 12, op="matmul_all_reduce"),
}
NAME = "{kind} pipelined float32"


@on_ranks(2)
@pytest.mark.parametrize("op", OPS)
def test_a_right_algorithm_is_used(rank: int, op: str, tmp_path: Path) -> None:
    with in_pieces(3), proving(tmp_path, HOST_ID=f"host {rank}") as (group, made):
        for seed in range(2):
            check(group, BY_OP[op], call(group, BY_OP[op], seed), seed)
        plan = plan_of_all(group, BY_OP[op])
        assert plan.algorithm == "pipelined" and made == [f"{op} pipelined"]
        assert member_of(group).outcomes == {NAME.format(kind=PROGRAMS[op].kind): ""}


@on_ranks(2)
def test_sums_of_the_backend_have_a_proof_of_their_own(rank: int, tmp_path: Path) -> None:
    op = "matmul_reduce_scatter"
    by_ranks = NAME.format(kind="reduce_scatter")
    for sums, name in (("0", by_ranks), ("1", f"{by_ranks} with sums of the backend")):
        with in_pieces(3), proving(tmp_path, HOST_ID=f"host {rank}", BACKEND_SUMS=sums) as (group, made):
            check(group, BY_OP[op], call(group, BY_OP[op]))
            assert made == [f"{op} pipelined"] and member_of(group).outcomes[name] == ""
            for kind in ("reduce_scatter", "all_reduce_norm"):  # with norms
                assert proof._outcome(kind, "pipelined", torch.bfloat16, member_of(group), False) == ""


def raises_half_way(rank: int, right: Plant, *args: Any) -> Any:
    """In the matmuls of rank 1, before and behind a collective: the peers wait for all of its collectives."""
    error = RuntimeError("planted") if rank == 1 else None
    with mock.patch.object(python_executor, "multiply", mock.Mock(side_effect=error, wraps=python_executor.multiply)):
        return right(*args)


FAILS = {
    wrong_on_one_rank: "pipelined of float32 failed its proof on",
    raises_everywhere: "rank 0 raised MemoryError",
    raises_half_way: "rank 1 raised RuntimeError: planted",
}


@on_ranks(2)
@pytest.mark.parametrize("plant", FAILS)
@pytest.mark.parametrize("op", ["matmul_all_to_all", "all_gather_matmul"])
def test_a_wrong_one_is_not(rank: int, op: str, plant: Any, tmp_path: Path) -> None:
    with in_pieces(3), planted_in("pipelined", plant), proving(tmp_path, HOST_ID=f"host {rank}") as (group, made):
        for seed in range(2):
            check(group, BY_OP[op], call(group, BY_OP[op], seed), seed)
        plan = plan_of_all(group, BY_OP[op])
    assert plan.algorithm == "unfused" and made == [f"{op} pipelined"]
    assert FAILS[plant] in plan.reason
