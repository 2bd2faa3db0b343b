"""Results of `chunked` on GPUs, without one, in random orders that its streams, events and flags allow.

tests/helpers/schedule/random_orders.py runs them. All ranks' hosts are far ahead: they enqueue everything first.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fusedcomm.bench.virtual import VirtualGroup
from fusedcomm.memory.errors import PeerError
from fusedcomm.memory.workspace import Workspace
from fusedcomm.plan import copies, launches, moves
from fusedcomm.plan.geometry import exchange
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.plan.schedule import Schedule, Stream
from fusedcomm.run import python_executor
from fusedcomm.run.python_executor import Execution
from tests.helpers.op_problems import as_list
from tests.helpers.plain_cases import NormCase
from tests.helpers.problems import GATHERS, Problem, expected, expected_by_product, integers
from tests.helpers.schedule.programs import GPU, operands, schedule
from tests.helpers.schedule.random_orders import Gpus, NoProgressError
from tests.helpers.uneven import Uneven

SLOT_BYTES = 1 << 14
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
ONE_SHOT = NormCase("matmul_all_reduce_norm", (12, 7), splits="one_shot")
TWO_SHOT = NormCase("matmul_all_reduce_norm", (12, 7), splits="two_shot")
SCATTERED = NormCase("matmul_reduce_scatter_norm", (12, 7))
PROBLEMS = [PUSH, TO_SLOT, BATCHED, EXCHANGE, ROWS, COLUMNS, SCATTER, SUM, PARTIAL, ONE_SHOT, TWO_SHOT, SCATTERED]


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


class Run:
    """Calls of a problem by every rank, all on one workspace, each with inputs of its own."""

    def __init__(
        self,
        problem: Problem | Uneven | NormCase,
        group_size: int = 2,
        dtype: torch.dtype = BF16,
        by_product: bool = False,
        writes_words: bool = True,
        num_calls: int = 2,
        leaves_in: int = 0,
        algorithm: str = "chunked",
        least_copied: int = 0,
    ) -> None:
        """``leaves_in``: the round in which rank 0 leaves its call, when its streams have begun it."""
        self.problem, self.group_size, self.dtype, self.num_calls = problem, group_size, dtype, num_calls
        self.by_product = by_product and problem.op in GATHERS
        self.workspaces = VirtualGroup(group_size, SLOT_BYTES, "cpu").workspaces
        self.gpus = Gpus()
        self.results: dict[int, list[list[Tensor]]] = {}  # by rank and call
        num_sms = self.workspaces[0].num_sms
        device = GPU._replace(num_sms=num_sms, writes_by_stream=writes_words, least_copied=least_copied)
        for rank, workspace in enumerate(self.workspaces):
            workspace.buffers[rank][workspace.layout.header_bytes :] = 0xFF  # NaN
            steps = schedule(problem, workspace.memory_facts(), device, algorithm, dtype, self.by_product)
            leaves = leaves_in if rank == 0 else 0
            self.results[rank] = [self._call(workspace, steps, seed, leaves) for seed in range(num_calls)]

    def _call(self, workspace: Workspace, steps: Schedule, seed: int, leaves_in: int) -> list[Tensor]:
        """The inputs are made just before, and overwritten just after, when a copy of the results is taken."""
        enqueue = partial(self.gpus.enqueue, workspace, "caller")
        x, ws, biases = self.inputs(workspace.rank, seed)
        given = torch.full_like(x, float("nan"))
        enqueue(lambda: given.copy_(x))
        if isinstance(self.problem, NormCase):
            inputs = [given, *ws, *biases]
        else:
            inputs = [t for each in operands(self.problem, given, ws, biases) for t in as_list(each)]
        outs = self.gpus.call(workspace, steps, inputs, leaves_in)
        kept = [torch.full_like(out, float("nan")) for out in outs]
        for to, source in (*zip(kept, outs, strict=True), *((t, torch.tensor(float("nan"))) for t in (given, *outs))):
            enqueue(partial(to.copy_, source))
        return kept

    def inputs(self, rank: int, seed: int) -> tuple[Tensor, list[Any], list[Any]]:
        if isinstance(self.problem, NormCase):
            x, *others = self.problem.tensors(rank, self.group_size, self.dtype, seed)
            assert x is not None
            return x, others, []
        if isinstance(self.problem, Uneven):
            x, w, bias = self.problem.inputs(self.group_size, seed)[rank]
        else:
            x, w, bias = integers(self.problem, rank, self.group_size, self.dtype, seed)
        return (x, w, bias) if isinstance(w, list) else (x, [w], [bias])

    def expected(self, seed: int) -> list[list[Tensor]]:
        if isinstance(self.problem, NormCase):
            problem = self.problem.problem(self.group_size, seed)
            return [[t.to(self.dtype) for t in problem.results(rank)] for rank in range(self.group_size)]
        if isinstance(self.problem, Uneven):
            inputs = self.problem.inputs(self.group_size, seed)
            return [
                list(each) for each in zip(self.problem.expected(inputs), self.problem.arrived(inputs), strict=True)
            ]
        outs = [as_list(out) for out in expected(self.problem, self.group_size, self.dtype, seed)]
        if self.by_product:
            arrived = expected_by_product(self.problem, self.group_size, self.dtype, seed)
            outs = [[*out, each] for out, each in zip(outs, arrived, strict=True)]
        return outs

    def finish(self, seed: int) -> None:
        self.gpus.run_all(seed)
        for seed in range(self.num_calls):
            for workspace, wanted in zip(self.workspaces, self.expected(seed), strict=True):
                workspace.check(self.problem.op)
                for got, value in zip(self.results[workspace.rank][seed], wanted, strict=False):
                    torch.testing.assert_close(got, value, rtol=0, atol=0)
        for workspace in self.workspaces:
            assert int(workspace._epoch_word()) == workspace.epoch >= 2 * self.num_calls


def check(seeds: Sequence[int], *args: Any, **options: Any) -> None:
    for seed in seeds:
        Run(*args, **options).finish(seed)


@pytest.mark.parametrize(("seed", "problem"), list(enumerate(PROBLEMS)), ids=str)
def test_every_op_is_right_in_a_random_order(seed: int, problem: Problem) -> None:
    check([seed], problem, 2, (BF16, FP32)[seed % 2], by_product=seed % 3 == 0)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_three_ranks_with_signals_by_kernels_are_right(problem: Problem) -> None:
    check([1], problem, 3, FP32, problem.op in GATHERS, writes_words=False, num_calls=1)


@pytest.mark.thorough
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_few_rows_and_copies_of_single_runs_are_right(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """One matmul for all chunks, before they are sent or when all are there."""
    monkeypatch.setattr(exchange, "FEW_ROWS", 128)
    monkeypatch.setattr(copies, "_LONG_RUN", 1)
    check([0], problem, 3, by_product=True, num_calls=1)


@pytest.mark.parametrize("group_size", [2, 4])
def test_a_norm_of_scattered_rows_by_one_kernel_is_right(group_size: int) -> None:
    check([0], SCATTERED, group_size, algorithm="fused", num_calls=2)


@pytest.mark.parametrize("problem", [PUSH, COLUMNS, SUM], ids=str)
def test_a_call_that_is_left_half_way_leaves_nothing_wrong(problem: Problem) -> None:
    """Nobody waits for ever. The peer learns who has left in which round, and its results are right or NaN."""
    for seed in range(2):
        run = Run(problem, num_calls=1, leaves_in=2)
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
        Run(PUSH, num_calls=1, leaves_in=2).gpus.run_all(seed=0)


def test_ctrl_c_leaves_all_streams_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    workspace, streams = VirtualGroup(2, SLOT_BYTES, "cpu").workspaces[0], dict[Any, Any]()
    streams.update({stream: Mock() for stream in Stream})

    def interrupted(self: Execution) -> None:
        self.streams = streams
        raise KeyboardInterrupt

    monkeypatch.setattr(Execution, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        python_executor.run(Schedule((), (), 0, (), 0, ()), workspace, PUSH.op, 7, [])
    assert [each.args[0] for each in streams[Stream.MAIN].wait_stream.mock_calls] == list(streams.values())


def test_each_round_takes_the_staging_of_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Exchange, "rounds", WHOLE_ROUNDS)
    cut_in(8, monkeypatch)
    memory = VirtualGroup(3, SLOT_BYTES, "cpu").workspaces[0].memory_facts()
    steps = schedule(Problem("tokens", (16, 5), 96, 0, 1), memory, GPU, "chunked")
    assert steps.num_rounds == 8 and len(steps.temporaries) == 2  # one for each peer


# parts of different sizes
A2A, BACK = "matmul_all_to_all", "all_to_all_matmul"
GATHER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter"
UNEVEN = {
    "heads": Uneven(A2A, (2, 5, 3, 3), 2, gather_dim=1, scatter_dim=2, bias=True),
    "rows": Uneven(A2A, (7, 5), gather_dim=1, scatter_dim=0),
    "shared-heads": Uneven(A2A, (2, 5, 3, 2), 2, gather_dim=1, scatter_dim=2, scatter=((0, 2), (1, 2))),
    "batches": Uneven(A2A, (3, 4, 5), gather_dim=2, scatter_dim=0, batched=True),
    "heads-back": Uneven(BACK, (2, 5, 3, 3), 2, gather_dim=2, scatter_dim=1, bias=True),
    "rows-back": Uneven(BACK, (5, 7), 1, gather_dim=0, scatter_dim=1),
    "gathered": Uneven(GATHER, (7, 4), gather_dim=0, bias=True),
    "gathered-from-one": Uneven(GATHER, (3, 4), gather_dim=0, gather=(0, 3)),
    "gathered-k": Uneven(GATHER, (4, 7), gather_dim=1),
    "summed": Uneven(REDUCE, (7, 4), scatter_dim=0, bias=True),
    "summed-for-one": Uneven(REDUCE, (4, 5), scatter_dim=1, scatter=(5, 0)),
    "summed-and-normed": NormCase("matmul_reduce_scatter_norm", (11, 7)),
    "summed-for-both": Uneven(REDUCE, (7, 4), scatter_dim=0, scatter=((0, 5), (2, 5))),
}
BY_PRODUCTS = ["heads", "heads-back", "summed-for-one", "summed-and-normed"]


def check_uneven(name: str, seed: int = 0, group_size: int = 2, num_calls: int = 1, **options: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "rounds", WHOLE_ROUNDS)
        cut_in(2, patch)
        check([seed], UNEVEN[name], group_size, FP32, num_calls=num_calls, **options)


@pytest.mark.parametrize("name", UNEVEN)
def test_parts_of_different_sizes_are_right_in_a_random_order(name: str) -> None:
    check_uneven(name, by_product=name.startswith("gathered") or name in BY_PRODUCTS)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["heads", "gathered", "summed"])
def test_three_ranks_are_right(name: str) -> None:
    check_uneven(name, 1, 3, num_calls=2)


def goes_wrong(name: str) -> bool:
    try:
        check_uneven(name)
    except (AssertionError, NoProgressError, PeerError):
        return True
    return False


def test_chunks_that_lie_as_far_apart_as_they_are_long_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reduction of the smaller part, whose sources' chunks lie as far apart as the largest are long."""
    monkeypatch.setattr(launches, "Reduced", lambda size, start, apart: (size, start, size))
    assert goes_wrong("summed")


def test_a_chunk_that_is_copied_before_it_comes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves.Moves, "wait", lambda *args: None)
    assert goes_wrong("heads")
