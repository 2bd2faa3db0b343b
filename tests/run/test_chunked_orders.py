"""Results of `chunked` on GPUs, without one, in random orders that its streams, events and flags allow.

tests/helpers/schedule/random_orders.py runs them. All ranks' hosts are far ahead: they enqueue everything first.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

pytest.importorskip("triton")

from fusedcomm.errors import PeerError
from fusedcomm.memory.workspace import Workspace
from fusedcomm.ops.call_arguments import Arguments
from fusedcomm.plan import copies
from fusedcomm.plan.builder import Device
from fusedcomm.plan.call_plan import CallPlan
from fusedcomm.plan.geometry import exchange
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.run import calls
from fusedcomm.run.python_executor import Execution
from fusedcomm.testing.virtual import VirtualGroup, run_op
from tests.helpers.op_problems import as_list
from tests.helpers.problems import GATHERS, Problem, expected, expected_by_product, integers
from tests.helpers.schedule.random_orders import Gpus, NoProgressError
from tests.helpers.tiers import thorough_but

SLOT_BYTES, FINGERPRINT = 1 << 14, 0x5A17C3
BF16, FP32 = torch.bfloat16, torch.float32

PUSH = Problem("tokens-to-heads", (2, 3, 5), 4, 1, 2, bias=True)
TO_SLOT = Problem("columns-to-rows", (6, 5), 4, 1, 0)  # the own chunk lies in the slot
BATCHED = Problem("batched-w", (3, 4, 5), 4, 1, 2, batched=True)
EXCHANGE = Problem("heads-to-tokens", (3, 2, 4), 4, 1, 0, op="all_to_all_matmul", k_dims=2, bias=True)
ROWS = Problem("rows", (3, 5), (4, 3), 0, op="all_gather_matmul", bias=(True, False))
COLUMNS = Problem("columns", (3, 5), 4, 1, op="all_gather_matmul", bias=True)
SCATTER = Problem("rows", (3, 5), 4, scatter_dim=0, op="matmul_reduce_scatter", bias=True, reduce_op="avg")
SUM = Problem("sum", (12, 5), 3, op="matmul_all_reduce", bias=True)
PARTIAL = Problem("partial bias", (12, 5), 3, op="matmul_all_reduce", bias=True, partial=True)
WHOLE_ROUNDS = Exchange.rounds
PROBLEMS = [PUSH, TO_SLOT, BATCHED, EXCHANGE, ROWS, COLUMNS, SCATTER, SUM, PARTIAL]


@pytest.fixture(autouse=True)
def pieces_of_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matmuls and copies of parts, as for large tensors, and calls in three rounds."""
    monkeypatch.setattr(exchange, "FEW_ROWS", 0)
    monkeypatch.setattr(exchange, "MIN_RUN", 1)
    cut_in(3, monkeypatch)


def cut_in(num_rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Exchange.rounds

    def cut(self: Exchange, max_chunk_numel: int) -> Any:
        return rounds(self, min(max_chunk_numel, max(self.row_numel, self.chunk_numel // num_rounds, 1)))

    monkeypatch.setattr(Exchange, "rounds", cut)


def call(problem: Problem, workspace: Workspace, inputs: Any, by_product: bool, algorithm: str) -> list[Tensor]:
    """The op's results by an algorithm, and behind them the exchanged or gathered x if it is asked for."""
    x, w, bias = inputs
    size = workspace.group_size
    ws, biases = (w, bias) if isinstance(w, list) else ([w], [bias])
    partial, biases = (bias, [None]) if problem.partial else (None, biases)
    options = {"reduce_op": problem.reduce_op, "return_gathered": by_product, "partial_bias": partial}
    args = Arguments(x, ws, biases, size, workspace.group_name, **options)
    return run_op(problem.op, algorithm, problem.exchange(x, w, size), workspace, args, FINGERPRINT)


class Run:
    """Calls of a problem by every rank, all on one workspace, each with inputs of its own."""

    def __init__(
        self,
        problem: Problem,
        group_size: int = 2,
        dtype: torch.dtype = BF16,
        by_product: bool = False,
        writes_words: bool = True,
        num_calls: int = 2,
        leaves: type[Exception] | None = None,
        algorithm: str = "chunked",
    ) -> None:
        """``leaves``: what a rank's call may raise."""
        self.problem, self.group_size, self.dtype, self.algorithm = problem, group_size, dtype, algorithm
        self.by_product, self.num_calls = by_product and problem.op in GATHERS, num_calls
        self.workspaces = VirtualGroup(group_size, SLOT_BYTES, "cpu").workspaces
        for workspace in self.workspaces:
            workspace.buffers[workspace.rank][workspace.layout.header_bytes :] = 0xFF  # NaN
        self.gpus = Gpus(self.workspaces, writes_words)
        self.results: dict[int, list[list[Tensor]]] = {}  # by rank and call
        with self.gpus.enqueue_all():
            for workspace in self.workspaces:
                expects = nullcontext() if leaves is None else suppress(leaves)
                with torch.cuda.stream(torch.cuda.Stream()), expects:
                    self.results[workspace.rank] = [self._call(workspace, seed) for seed in range(num_calls)]

    def _call(self, workspace: Workspace, seed: int) -> list[Tensor]:
        """The inputs are made just before, and overwritten just after, when a copy of the results is taken."""
        with _disable_current_modes():
            values = integers(self.problem, workspace.rank, self.group_size, self.dtype, seed)
        x = torch.empty_like(values[0])
        x.copy_(values[0])
        outs = call(self.problem, workspace, (x, *values[1:]), self.by_product, self.algorithm)
        kept = [each.clone() for each in outs]
        for each in (x, *outs):
            each.fill_(float("nan"))
        return kept

    def finish(self, seed: int) -> None:
        """Run it all in one order, and compare."""
        self.gpus.run_all(seed)
        for seed in range(self.num_calls):
            outs = expected(self.problem, self.group_size, self.dtype, seed)
            for rank, workspace in enumerate(self.workspaces):
                workspace.check(self.problem.op)
                wanted = as_list(outs[rank])
                if self.by_product:
                    wanted = [*wanted, expected_by_product(self.problem, self.group_size, self.dtype, seed)[rank]]
                for got, value in zip(self.results[rank][seed], wanted, strict=True):
                    torch.testing.assert_close(got, value, rtol=0, atol=0)
        for workspace in self.workspaces:
            assert int(workspace._epoch_word()) == workspace.epoch >= 3 * self.num_calls


def check(seeds: Sequence[int], *args: Any, **options: Any) -> None:
    for seed in seeds:
        Run(*args, **options).finish(seed)


@pytest.mark.parametrize(("seed", "problem"), list(enumerate(PROBLEMS)), ids=str)
def test_every_op_is_right_in_a_random_order(seed: int, problem: Problem) -> None:
    check([seed], problem, 2, (BF16, FP32)[seed % 2], by_product=seed % 3 == 0)


@pytest.mark.parametrize("problem", thorough_but([TO_SLOT, ROWS], PROBLEMS), ids=str)
def test_three_ranks_with_signals_by_kernels_are_right(problem: Problem) -> None:
    check([1], problem, 3, FP32, problem.op in GATHERS, writes_words=False, num_calls=1)


@pytest.mark.thorough
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_few_rows_and_copies_of_single_runs_are_right(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """One matmul for all chunks, before they are sent or when all are there."""
    monkeypatch.setattr(exchange, "FEW_ROWS", 128)
    monkeypatch.setattr(copies, "_LONG_RUN", 1)
    check([0], problem, 3, by_product=True, num_calls=1)


class LeftError(Exception):
    pass


def left_half_way(problem: Any, monkeypatch: pytest.MonkeyPatch, run: type[Run] = Run) -> Run:
    """Rank 0 raises at a signal of its second round, when its streams have begun it."""
    signal = Execution._signal

    def leaves(self: Execution, *args: Any) -> None:
        if (self.epoch, self.workspace.rank) == (2, 0):
            raise LeftError
        signal(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Execution, "_signal", leaves)
        return run(problem, num_calls=1, leaves=LeftError)


@pytest.mark.parametrize("problem", thorough_but([PUSH, COLUMNS], [PUSH, COLUMNS, SUM]), ids=str)
def test_a_call_that_is_left_half_way_leaves_nothing_wrong(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for ever. The peer learns who has left in which round, and its results are right or NaN."""
    for seed in range(2):
        run = left_half_way(problem, monkeypatch)
        run.gpus.run_all(seed)
        left, peer = run.workspaces
        with pytest.raises(PeerError, match="left by LeftError"):
            left.check(problem.op)
        with pytest.raises(PeerError) as found:
            peer.check(problem.op)
        assert (found.value.peers, found.value.epoch) == ([0], 2)
        wanted = as_list(expected(problem, 2, BF16)[1])
        for got, value in zip(run.results[1][0], wanted, strict=True):
            assert got.isnan().any() and bool((got.isnan() | (got == value)).all())


def test_a_rank_that_leaves_and_tells_nobody_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workspace, "_give_up", lambda *args: None)
    with pytest.raises(NoProgressError, match="unpack_kernel"):
        left_half_way(PUSH, monkeypatch).gpus.run_all(seed=0)


@pytest.mark.parametrize("interrupted", [1, 2])
def test_ctrl_c_at_the_end_leaves_both_streams_joined(interrupted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come before either wait of the caller's stream for the others."""
    workspace, joined = VirtualGroup(2, SLOT_BYTES, "cpu").workspaces[0], list[Any]()

    def step(self: Execution, work: Any, stream: Any) -> None:
        left = len(self.schedule.steps) - next(i for i, each in enumerate(self.schedule.steps) if each.work is work)
        if left == interrupted:
            main = self.streams[stream]
            monkeypatch.setattr(main, "wait_stream", joined.append, raising=False)
            raise KeyboardInterrupt
        run(self, work, stream)

    run = Execution.step
    with Gpus([workspace]).enqueue_all():
        monkeypatch.setattr(Execution, "step", step)
        with pytest.raises(KeyboardInterrupt):
            call(PUSH, workspace, integers(PUSH, 0, 2, BF16), False, "chunked")
        assert {workspace.side_stream(), workspace.reading_stream()} <= set(joined)


def test_each_round_takes_the_staging_of_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Exchange, "rounds", WHOLE_ROUNDS)
    cut_in(8, monkeypatch)
    problem, workspace = Problem("tokens", (16, 5), 4, 0, 1), VirtualGroup(3, SLOT_BYTES, "cpu").workspaces[0]
    x, w, _ = integers(problem, 0, 3, BF16)
    made = CallPlan(problem.op, "chunked", "test", fingerprint=FINGERPRINT, exchange=problem.exchange(x, w, 3))
    monkeypatch.setattr(workspace, "device_facts", lambda: Device(is_gpu=True))
    schedule = calls.schedule_of(made, workspace, "push_matmul", (x, w, None, None), {})
    assert schedule.num_rounds == 8 and len(schedule.temporaries) == 2  # one for each peer
