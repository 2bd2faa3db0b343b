"""Objects for engines: values of every row count, decisions that all ranks share, and nothing new after the warm-up."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import fusedcomm
from fusedcomm.inference import Linear, RowParallelTail
from fusedcomm.run import unfused
from tests.helpers.groups import empty_is_nan, fresh_group, member_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.prepared import python_calls

K, N, MAX_ROWS, EPS = 6, 8, 5, 1e-5
WEIGHT = torch.arange(1.0, N + 1)
TAIL, OPS = "tail", ("matmul_all_reduce", "all_gather_matmul", "matmul_reduce_scatter")


def integers(seed: int, *shape: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


WS = [integers(each, K, N) for each in range(2)]
BIAS = integers(7, N)


def made(what: str, rank: int, group: Any = None, max_rows: int = MAX_ROWS) -> Any:
    if what == TAIL:
        return RowParallelTail(WS[rank], WEIGHT, group, max_rows, EPS, bias=BIAS)
    return Linear(what, WS[rank], group, max_rows, bias=BIAS)


def check(call: Any, what: str, rank: int, rows: int) -> None:
    """A call beside the program of one process; sums are exact."""
    xs, residual = [integers(10 * rows + each, rows, K) for each in range(2)], integers(rows, rows, N)
    with empty_is_nan():
        got = call(xs[rank], *([residual] if what == TAIL else []))
    total = xs[0] @ WS[0] + xs[1] @ WS[1] + BIAS
    if what == TAIL:
        assert torch.equal(got[1], total + residual)
        torch.testing.assert_close(got[0], F.rms_norm(got[1], (N,), WEIGHT, EPS))
        return
    gathered = torch.cat(xs) @ WS[rank] + BIAS
    scattered = total.tensor_split([-(-rows // 2)])[rank]
    assert torch.equal(got, dict(zip(OPS, (total, gathered, scattered), strict=True))[what])


@on_ranks(2)
@pytest.mark.parametrize("what", [TAIL, *OPS])
def test_values_below_and_beyond_max_rows_and_nothing_new_after_warm_up(rank: int, what: str) -> None:
    with fresh_group() as group:
        call = made(what, rank, group)
        assert call.can_run() and [call.should_run(rows) for rows in (0, 1, 5, 6)] == [False, True, True, False]
        call.warm_up()
        member = member_of(group)
        workspace, plans = member.workspace, len(member.plans)
        with python_calls() as calls:
            for rows in (5, 1, 3, 2, 4, 0, 9):
                check(call, what, rank, rows)
        assert (calls, len(member.plans), member.workspace is workspace) == ([], plans, True)


@on_ranks(2)
@pytest.mark.parametrize("what", [TAIL, *OPS])
def test_autocast_and_graphs_change_nothing(rank: int, what: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        call = made(what, rank)
        for each in (call, torch.compile(lambda *tensors: call(*tensors), backend="eager", fullgraph=True)):
            for rows in (MAX_ROWS, MAX_ROWS + 4):
                check(each, what, rank, rows)


@on_ranks(2)
def test_a_graph_of_real_tensors_holds_the_op(rank: int) -> None:
    """The plain program's collectives, which are not functional, would stand there without their waits."""
    graph = make_fx(made("matmul_all_reduce", rank))(integers(rank, MAX_ROWS + 4, K)).graph
    targets = " ".join(str(node.target) for node in graph.nodes)
    assert "fusedcomm.matmul_all_reduce" in targets and "c10d." not in targets


@on_ranks(2)
@pytest.mark.parametrize("what", [TAIL, *OPS])
def test_without_warm_up_calls_make_their_plans(rank: int, what: str) -> None:
    """The control of what is counted above."""
    with fresh_group() as group, python_calls() as calls:
        check(made(what, rank, group), what, rank, 4)
        assert len(calls) == 1 and len(member_of(group).plans) == 1


@on_ranks(2)
def test_what_one_rank_has_set_decides_for_all(rank: int) -> None:
    with fresh_group() as group:
        with fusedcomm.force_algorithm("unfused" if rank else None):
            calls = {what: made(what, rank, group) for what in (TAIL, *OPS)}
        for what, call in calls.items():
            assert not call.can_run() and not call.should_run(1) and call.reason == "forced"
            with mock.patch.object(unfused, "reference", wraps=unfused.reference) as moves:
                call.warm_up([3])
            assert moves.method_calls, what  # or a CUDA graph would hold the first collective of NCCL
            check(call, what, rank, 3)
    with fresh_group(WORKSPACE_BYTES="1000" if rank else "100000000") as group:
        call = made(TAIL, rank, group, 64)
        assert not call.should_run(64) and "FUSEDCOMM_WORKSPACE_BYTES=1000" in call.reason
        check(call, TAIL, rank, 64)


@on_ranks(2)
def test_ranks_that_differ_are_told(rank: int) -> None:
    differ: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [  # what rank 1 does in place of rank 0's
        (("matmul_all_reduce", WS[0], 8), {}, "max_rows 4 on rank 0 and 8 on rank 1"),
        (("matmul_reduce_scatter", WS[0], 4), {}, "op matmul_all_reduce on rank 0"),
        (("matmul_all_reduce", WS[0].bfloat16(), 4), {}, "dtype float32 on rank 0"),
        (("matmul_all_reduce", WS[0], 4), {"bias": BIAS}, r"bias shape None on rank 0 and \[8\] on rank 1"),
        (("matmul_all_reduce", WS[0], 4), {"reduce_op": "avg"}, "reduce_op sum on rank 0"),
    ]
    with fresh_group() as group:
        for (what, w, rows), options, text in differ:
            args = (what, w, group, rows) if rank else ("matmul_all_reduce", WS[0], group, 4)
            with pytest.raises(fusedcomm.PeerMismatchError, match=text):
                Linear(*args, **(options if rank else {}))
        with pytest.raises(fusedcomm.PeerMismatchError, match="norm_weight None on rank 0 and float32 on rank 1"):
            RowParallelTail(WS[0], WEIGHT if rank else None, group, 4)
        for rows, w, more, text in BAD:
            with pytest.raises(ValueError, match=rf"{text}.* \(rank 1\)"):
                Linear(*(("matmul_all_reduce", w, group, rows) if rank else args), **(more if rank else {}))
        check(made(TAIL, rank, group), TAIL, rank, 4)


BAD: list[tuple[Any, Any, dict[str, Any], str]] = [
    (0, WS[0], {}, "max_rows must be an int, at least 1, got 0"),
    (4.0, WS[0], {}, "max_rows must be an int, at least 1, got 4.0"),
    (True, WS[0], {}, "max_rows must be an int, at least 1, got True"),
    (2, WS[0], {"out": BIAS}, "inputs and results are those of each call, got out"),
    (2, WS[0], {"x": BIAS}, "inputs and results are those of each call, got x"),
    (2, BIAS, {}, r"w must be \[K, N\], got torch.Size\(\[8\]\)"),
    (2, [], {}, r"w must be \[K, N\], got \[\]"),
]


@on_ranks(2)
def test_lists_and_bad_input(rank: int) -> None:
    both = Linear("all_gather_matmul", WS, None, 2)(torch.ones(2, K))
    assert all(torch.equal(y, torch.ones(4, K) @ w) for y, w in zip(both, WS, strict=True))
    with pytest.raises(ValueError, match="op must be one of all_gather_matmul, "):
        Linear("matmul_all_to_all", WS[0], None, 2)
    with pytest.raises(TypeError, match="a call takes x and residual, got 1 arguments"):
        made(TAIL, rank)(torch.ones(2, K))
    with pytest.raises(ValueError, match="eps must be at least 0"):
        RowParallelTail(WS[0], None, None, 2, -1.0)
