"""Prepared calls: from the third of its kind on, a call on CPU tensors runs without Python, and is right."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch

import fusedcomm
from fusedcomm.memory import flight_recorder, segment
from fusedcomm.ops import dispatch, prepared, register
from fusedcomm.plan import planner
from tests.helpers.groups import call, check, empty_is_nan, fresh_group, member_of, non_contiguous
from tests.helpers.on_ranks import on_ranks
from tests.helpers.op_problems import NAMED, TABLES
from tests.helpers.prepared import CALLS, IN_PYTHON, check_prepared, num_prepared, python_calls, started_group
from tests.helpers.problems import HEADS, OPS, Problem, integers
from tests.helpers.spies import Dispatched
from tests.ops.test_call_check import ONE_EACH

LARGER = Problem("larger", (2, 6, 5), 1 << 16, 1, -2, out_shape=(1 << 14, 4))


@on_ranks(2)
@pytest.mark.parametrize("op", OPS)
def test_the_third_call_runs_without_python(rank: int, op: str) -> None:
    problems = dict.fromkeys([ONE_EACH[op], *TABLES[op][:3], TABLES[op][-1]])
    with started_group("chunked") as group, empty_is_nan():
        for problem in problems:
            check_prepared(group, problem, torch.float32)
        assert num_prepared(group) == len(problems)


@on_ranks(2)
def test_layouts_of_arguments(rank: int) -> None:
    """A plan is for strides too, but for no place in a storage."""
    problem = NAMED["bias"]
    x, w, bias = integers(problem, rank, 2)
    both = torch.zeros(x.numel() + w.numel() + 3)

    def shifted(t: torch.Tensor, offset: int) -> torch.Tensor:
        return torch.cat([torch.full((offset,), float("nan")), t.flatten()])[offset:].view(t.shape)

    def in_one_storage(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both[3 : 3 + x.numel()], both[3 + x.numel() :] = x.flatten(), w.flatten()
        return both[3 : 3 + x.numel()].view(x.shape), both[3 + x.numel() :].view(w.shape)

    layouts = {
        "contiguous": lambda x, w: (x, w),
        "shifted": lambda x, w: (shifted(x, 5), shifted(w, 2)),
        "one-storage": in_one_storage,
        "strided": lambda x, w: (non_contiguous(x), non_contiguous(w)),
        "transposed": lambda x, w: (x.mT.contiguous().mT, w.mT.contiguous().mT),
    }
    same = ("shifted", "one-storage")  # elements begin at any multiple of their size
    with started_group("chunked") as group, python_calls() as ran:
        for name, layout in layouts.items():
            before = len(ran)
            for seed in range(CALLS):
                x, w, bias = integers(problem, rank, 2, seed=seed)
                check(group, problem, problem.call((*layout(x, w), bias), group), seed)
            assert len(ran) - before == (0 if name in same else IN_PYTHON), name
        check_expanded(group, ran)


def check_expanded(group: Any, ran: list[str]) -> None:
    row, element, before = torch.arange(5.0), torch.ones(()), len(ran)
    for i in range(CALLS):
        x, w = (row + i).expand(4, 5), (element * i).expand(5, 6)
        y = fusedcomm.matmul_all_to_all(x, w, 0, 1, group)
        torch.testing.assert_close(y, torch.full((8, 3), (10.0 + 5 * i) * i), rtol=0, atol=0)
    assert len(ran) - before == IN_PYTHON


@on_ranks(2)
def test_arguments_that_share_a_storage_while_they_are_recorded(rank: int) -> None:
    """A plan tells x from w also where both are parts of one tensor, or the same one."""
    with started_group("chunked") as group:
        for i in range(CALLS):
            x = torch.full((4, 4), float(i + rank))
            w = x if i < IN_PYTHON else torch.eye(4)
            y = fusedcomm.matmul_all_reduce(x, w, group)
            want = sum((i + r) * (4.0 * (i + r) if i < IN_PYTHON else 1.0) for r in range(2))
            torch.testing.assert_close(y, torch.full((4, 4), want), rtol=0, atol=0)


@on_ranks(2)
@pytest.mark.parametrize("shape", [(5, 6), (2, 5, 6)], ids=str)
def test_a_sum_that_the_group_does_not_divide(rank: int, shape: tuple[int, ...]) -> None:
    """x gets a row, so that all blocks of the sum have one size."""
    with started_group("chunked") as group:
        check_prepared(group, Problem("padded", shape, 7, op="matmul_all_reduce", bias=True), torch.float32)


@on_ranks(2)
@pytest.mark.parametrize("algorithm", ["chunked", "unfused"])
@pytest.mark.parametrize("recorded_under", [False, True], ids=["outside", "inside"])
def test_autocast_does_not_reach_into_a_call(rank: int, algorithm: str, recorded_under: bool) -> None:
    """A program has matmuls in x's dtype, which autocast would take for its own; the `.out` overload gets there."""
    x = torch.full((4, 2), 1 + 2.0**-12)  # which bfloat16 cannot hold
    w, want = torch.eye(2), torch.full((8, 1), 1 + 2.0**-12)
    with started_group(algorithm) as group:
        for i in range(CALLS):
            out = torch.empty(8, 1)
            with torch.autocast("cpu", torch.bfloat16, enabled=recorded_under != (i >= 3)):
                args = x, w.roll(0), None, None, 0, 1, *[None] * 5, 2, group.group_name
                torch.ops.fusedcomm.matmul_all_to_all.out(*args, out=out)
            torch.testing.assert_close(out, want * w.sum(0)[0], rtol=0, atol=0)
            with torch.autocast("cpu", torch.bfloat16):
                assert fusedcomm.matmul_all_to_all(x, w, 0, 1, group).dtype == torch.bfloat16


@on_ranks(2)
def test_modes_see_the_op_and_not_its_plan(rank: int) -> None:
    with started_group("chunked") as group:
        for seed in range(CALLS):
            with Dispatched() as dispatched:
                out = call(group, HEADS, seed)
            check(group, HEADS, out, seed)
            assert dispatched.names("fusedcomm") == ["matmul_all_to_all"] and dispatched.matmuls() == 0
        with torch.inference_mode(), python_calls() as ran:
            for seed in range(CALLS):
                check(group, HEADS, call(group, HEADS, seed), seed)
        assert ran == []


@on_ranks(2)
def test_calls_that_are_compared_are_not_prepared(rank: int) -> None:
    with fresh_group(CHECK="1") as group, python_calls() as ran:
        for seed in range(CALLS):
            check(group, HEADS, call(group, HEADS, seed), seed)
        assert len(ran) == CALLS and member_of(group).prepared is None


@on_ranks(2)
def test_plans_that_take_too_much_are_dropped(rank: int) -> None:
    x, most = torch.ones(12, 8), 3
    with started_group("chunked", PLAN_BYTES=str(2 * most * 10 * planner.STEP_BYTES)) as group:
        for rows in (*range(1, 10), *range(1, 10)):
            for _ in range(3):
                y = fusedcomm.matmul_all_reduce(x[: 2 * rows], torch.ones(8, 6), group)
                assert y.eq(16).all() and y.shape == (min(2 * rows, 12), 6)
            ours = member_of(group)
            assert len(ours.prepared) <= most and sum(plan.num_bytes for plan in ours.plans.values()) <= ours.plan_bytes
            assert ours.plan_bytes <= ours.topology.plan_bytes


@on_ranks(2)
@pytest.mark.parametrize("how", ["reset", "close", "growth"])
def test_what_drops_plans(rank: int, how: str) -> None:
    with started_group("chunked") as group:
        check_prepared(group, HEADS, torch.float32)
        if how == "growth":
            check(group, LARGER, call(group, LARGER))
        else:
            getattr(fusedcomm, how)(group)
        assert num_prepared(group) == 0
        with fusedcomm.force_algorithm("chunked"), python_calls() as ran:
            for seed in range(CALLS):
                check(group, HEADS, call(group, HEADS, seed), seed)
        assert len(ran) == IN_PYTHON + (how == "close")  # whose first call makes the workspace


@on_ranks(2)
def test_a_layout_that_plans_do_not_know_has_none(rank: int) -> None:
    more_slots = mock.patch.object(segment, "NUM_SLOTS", 2 * segment.NUM_SLOTS)
    with more_slots, started_group("chunked") as group, python_calls() as ran:
        for seed in range(CALLS):
            check(group, HEADS, call(group, HEADS, seed), seed)
    assert len(ran) == CALLS


@on_ranks(2)
def test_a_value_of_another_kind_is_another_call(rank: int) -> None:
    """A plan of None does not serve -1, which is refused, in any argument that may be None."""
    arguments = torch.ops.fusedcomm.matmul_all_to_all.default._schema.arguments
    optional = [each.name for each in arguments if str(each.type) in ("Optional[int]", "Optional[SymInt]")]
    x, w = torch.ones(4, 5), torch.ones(5, 6)
    with started_group("chunked") as group:

        def outcome(**others: int) -> str:
            given = {"x": x, "w": w, "gather_dim": 0, "scatter_dim": 1, "group_size": 2, "group_name": group.group_name}
            values = {**given, **others}
            try:
                torch.ops.fusedcomm.matmul_all_to_all.default(
                    *[values.get(each.name, each.default_value) for each in arguments]
                )
            except ValueError as error:
                return str(error)
            return "right"

        before = {name: outcome(**{name: -1}) for name in optional}
        assert before["gather_size"] != "right"
        assert [outcome() for _ in range(CALLS)] == ["right"] * CALLS
        assert {name: outcome(**{name: -1}) for name in optional} == before


@on_ranks(2)
def test_settings_that_change_later_reach_no_call(rank: int) -> None:
    """A key has none of them: a group keeps those of its first call, and its tuned numbers, for calls in Python too."""
    later = {"ALGORITHM": "unfused", "WORKSPACE_BYTES": "8192", "PROVE": "0", "CACHE_DIR": os.devnull}
    with fresh_group(ALGORITHM="chunked") as group:
        call(group, LARGER)
        check_prepared(group, HEADS, torch.float32)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in later.items():
                patch.setenv(f"FUSEDCOMM_{name}", value)
            with python_calls() as ran:
                for seed in range(CALLS):
                    check(group, HEADS, call(group, HEADS, seed), seed)
            assert ran == []
            check_prepared(group, NAMED["bias"], torch.float32)
        assert [record.algorithm for record in flight_recorder.last()[-2 * CALLS :]] == ["chunked"] * 2 * CALLS


@on_ranks(2)
def test_a_plan_that_a_thread_has_found_is_dropped_too(rank: int) -> None:
    """The thread waits for the lock of calls while its plan goes."""
    with started_group("chunked") as group:
        check_prepared(group, HEADS, torch.float32)
        member, outs = member_of(group), []
        with python_calls() as ran:
            thread = threading.Thread(target=lambda: outs.append(call(group, HEADS, 7)))
            with member.lock:
                thread.start()
                thread.join(0.3)
                member.prepare_anew()
            thread.join()
        check(group, HEADS, outs[0], 7)
        assert len(ran) == 1


@on_ranks(2)
def test_a_plan_that_is_made_while_others_go_is_dropped(rank: int) -> None:
    init = prepared.Rescue.__init__

    def late(*args: Any) -> None:
        member_of(group).prepare_anew()
        init(*args)

    with started_group("chunked") as group:
        check(group, HEADS, call(group, HEADS))
        with mock.patch.object(prepared.Rescue, "__init__", late):
            check(group, HEADS, call(group, HEADS, 1), 1)
        assert num_prepared(group) == 0
        check_prepared(group, HEADS, torch.float32)


@on_ranks(2)
@pytest.mark.parametrize("what", ["algorithm", "precision"])
def test_a_plan_of_another_setting_is_not_kept(rank: int, what: str) -> None:
    """As when another thread changes it once a call has its key; the algorithm changes back."""
    run, matmul = dispatch.run, torch.backends.cuda.matmul
    before = matmul.fp32_precision

    def changed(*args: Any) -> Any:
        matmul.fp32_precision = "tf32" if what == "precision" else before
        with fusedcomm.force_algorithm("unfused" if what == "algorithm" else "chunked", strict=True):
            return run(*args)

    with started_group("chunked") as group, pytest.MonkeyPatch.context() as patch:
        check(group, HEADS, call(group, HEADS))
        patch.setattr(register, "run", changed)
        check(group, HEADS, call(group, HEADS, 1), 1)
        matmul.fp32_precision = before
        assert num_prepared(group) == 0


@on_ranks(2)
def test_results_without_elements_are_distinct_and_have_gradients(rank: int) -> None:
    x, scale, v, w = (torch.ones(*shape, requires_grad=True) for shape in ((0, 6), (6,), (6, 6), (6, 6)))
    gather = torch.ops.fusedcomm.all_gather_matmul
    with started_group("chunked") as group:
        for _ in range(CALLS):
            two = fusedcomm.all_gather_matmul(x, [v, w], 0, group)
            (y,), gathered = gather(x, [v], [None], 0, True, None, None, None, 2, group.group_name)
            normed = fusedcomm.matmul_all_reduce_norm(x, w, torch.ones(0, 6), scale, group)
            for results, parameters in ((two, (v, w)), ((y, gathered), (v,)), (normed, (w, scale))):
                assert results[0] is not results[1]
                assert not any(grad.any() for grad in torch.autograd.grad([t.sum() for t in results], parameters))
        assert num_prepared(group) == 3


@on_ranks(2)
def test_a_group_that_is_gone_has_no_calls(rank: int) -> None:
    """Another group may have its address, or its name, while something still holds what was kept for it."""
    kept = []
    for _ in range(3):
        with started_group("chunked") as group:
            check_prepared(group, HEADS, torch.float32)
            kept.append(member_of(group).prepared)
            del group
    assert not any(each.withdraw() for each in kept[:2])


@on_ranks(2)
@pytest.mark.nightly
def test_the_table_is_bounded(rank: int) -> None:
    with started_group("chunked") as group:
        for rows in range(1, 4200):
            for _ in range(2):
                y = fusedcomm.matmul_reduce_scatter(torch.ones(2 * rows, 1), torch.ones(1, 1), 0, group)
            assert num_prepared(group) <= 4096
        assert y.shape == (4199, 1) and y.unique().tolist() == [2.0]


@on_ranks(2)
def test_threads(rank: int) -> None:
    x, w = torch.arange(8.0).view(4, 2) + rank, torch.eye(2)
    with started_group("chunked") as group:
        want = fusedcomm.matmul_all_reduce(x, w, group)
        with ThreadPoolExecutor(3) as threads:
            outs = threads.map(lambda _: [fusedcomm.matmul_all_reduce(x, w, group) for _ in range(50)], range(3))
            assert all(torch.equal(out, want) for each in outs for out in each)
