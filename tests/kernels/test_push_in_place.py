"""Results in place in the Triton interpreter: push_matmul_kernel writes where peers have posted their results.

Virtual ranks in one process, with a heap of results each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fusedcomm.algorithms import kernel_launch
from fusedcomm.algorithms.in_place import landing_of
from fusedcomm.geometry.spans import RoundSpans
from fusedcomm.kernels.triton import in_place, push_matmul, rounds
from fusedcomm.runtime import segment, signals
from tests.helpers.kernel_calls import exchange_of
from tests.helpers.problems import Inputs, Problem, expected, integers
from tests.helpers.tiers import thorough_but
from tests.helpers.virtual_ranks import (
    FINGERPRINT,
    NOT_A_NUMBER,
    VirtualRank,
    flag,
    record,
    virtual_ranks,
)
from tests.kernels.test_push_matmul import CASES

PLACES = (256, 1 << 20)  # bytes into a heap: results of calls are there by turns
TILES = Problem("tiles", (150, 8), 300, 0, 1)
BEYOND = 512  # bytes of a heap behind the last result


class Heaps:
    """A heap for each rank. Outside of results it must stay as it is."""

    def __init__(self, num_ranks: int, result_bytes: int) -> None:
        assert result_bytes <= PLACES[1] - PLACES[0]
        size = PLACES[1] + result_bytes + BEYOND
        self.buffers = [torch.full((size,), NOT_A_NUMBER, dtype=torch.uint8) for _ in range(num_ranks)]
        self.addresses = torch.tensor([buffer.data_ptr() for buffer in self.buffers])

    def result(self, rank: int, place: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        num_bytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
        return self.buffers[rank][place : place + num_bytes].view(dtype).view(*shape)

    def assert_clean_but(self, places: Sequence[int], num_bytes: int) -> None:
        for buffer in self.buffers:
            rest = buffer.clone()
            for place in places:
                rest[place : place + num_bytes] = NOT_A_NUMBER
            assert (rest == NOT_A_NUMBER).all()


class World:
    """Virtual ranks that make a call, round by round."""

    def __init__(
        self, problem: Problem, group_size: int, dtype: torch.dtype = torch.float32, num_rounds: int = 1
    ) -> None:
        self.problem, self.group_size, self.dtype = problem, group_size, dtype
        self.exchange = exchange_of(problem, group_size)
        chunk_numel = max(self.exchange.chunk_numel // num_rounds, self.exchange.row_numel)
        self.rounds = self.exchange.rounds(chunk_numel)
        self.ranks = virtual_ranks(group_size, group_size * chunk_numel * dtype.itemsize)
        self.result_bytes = torch.Size(self.exchange.out_shape).numel() * dtype.itemsize
        self.heaps = Heaps(group_size, self.result_bytes)

    def inputs(self, rank: int, seed: int = 0) -> Inputs:
        return integers(self.problem, rank, self.group_size, self.dtype, seed)

    def post(self, rank: VirtualRank, place: int, fingerprint: int = FINGERPRINT, num_bytes: int | None = None) -> None:
        signals.post(place, self.result_bytes if num_bytes is None else num_bytes, rank, fingerprint)

    def push(self, rank: VirtualRank, spans: RoundSpans, inputs: Inputs) -> None:
        results = landing_of(spans, rank.rank, self.heaps.addresses, self.result_bytes)
        kernel_launch.push(*inputs, spans, rank, FINGERPRINT, results)

    def result(self, rank: VirtualRank, place: int) -> Tensor:
        return self.heaps.result(rank.rank, place, self.exchange.out_shape, self.dtype)

    def call(self, seed: int, place: int, posting: Callable[[int, int], bool], late: bool = False) -> list[list[int]]:
        """One call, which is checked. ``posting(round, rank)``: who posts, and ``late``: after the pushes.

        Returns the marks of each rank and round.
        """
        inputs = [self.inputs(rank.rank, seed) for rank in self.ranks]
        outs = [self.result(rank, place) for rank in self.ranks]
        marked = []
        for i, spans in enumerate(self.rounds):
            posted = [posting(i, rank.rank) for rank in self.ranks]
            posts = [rank for rank in self.ranks if posted[rank.rank]]
            for rank in [] if late else posts:
                self.post(rank, place)
            for rank, given in zip(self.ranks, inputs, strict=True):
                self.push(rank, spans, given)
            for rank in posts if late else []:
                self.post(rank, place)
            epoch = self.ranks[0].epoch + 1
            marked += [self.marks(rank, epoch) for rank in self.ranks]
            for rank, out in zip(self.ranks, outs, strict=True):
                kernel_launch.unpack(out, spans, rank, FINGERPRINT, posted=posted[rank.rank])
            assert not any(rank.word(rank.layout.decisions, rank.group_size).any() for rank in self.ranks)
        for out, value in zip(outs, expected(self.problem, self.group_size, self.dtype, seed), strict=True):
            torch.testing.assert_close(out, value, rtol=0, atol=0)
        return marked

    def marks(self, rank: VirtualRank, epoch: int) -> list[int]:
        return rank.word(rank.layout.mark(epoch, 0), rank.group_size).tolist()

    def slots_are_untouched(self) -> bool:
        header = self.ranks[0].layout.header_bytes
        return all(bool((rank.segment[header:-64] == NOT_A_NUMBER).all()) for rank in self.ranks)


IN_RUNS = [  # the rows of their chunks stay whole in the result
    "rows",
    "columns",
    "one row",
    "heads",
    "packed qkv",
    "packed qkv, long runs",
    "head dim",
    "interleaved rows",
    "interleaved rows, long runs",
    "outer rows",
    "batched, columns",
    "batched, rows",
    "batched, batches",
    "batched, inner batches",
    "batched, outer batches",
    "transposed w",
    "no depth",
]


@pytest.mark.parametrize("name", thorough_but(["rows", "heads", "batched, columns"], IN_RUNS))
def test_posted_results_are_written_in_place(name: str) -> None:
    group_size = 3 if name in ("heads", "interleaved rows, long runs") else 2
    world = World(CASES[name], group_size)
    for call in range(3):
        marked = world.call(call, PLACES[call % 2], lambda i, rank: True)
        assert marked == [[call + 1] * group_size] * group_size
    assert world.slots_are_untouched()
    world.heaps.assert_clean_but(PLACES, world.result_bytes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_in_place(dtype: torch.dtype) -> None:
    assert World(CASES["packed qkv"], 2, dtype).call(0, PLACES[0], lambda i, rank: True) == [[1, 1]] * 2


@pytest.mark.parametrize("name", thorough_but(["heads"], ["heads", "interleaved rows", "batched, batches"]))
def test_each_round_is_posted_anew(name: str) -> None:
    """Round by round another rank posts, so that a place of the round before would be found out."""
    world = World(CASES[name], 3, num_rounds=3)
    marked = world.call(0, PLACES[0], lambda i, rank: (i + rank) % 2 == 0)
    assert len(marked) >= 9
    for i, marks in enumerate(marked):
        epoch, rank = i // 3 + 1, i % 3
        assert (marks == [epoch] * 3) == ((epoch - 1 + rank) % 2 == 0) and (epoch in marks) == (marks == [epoch] * 3)
    world.heaps.assert_clean_but(PLACES[:1], world.result_bytes)


def test_a_post_that_comes_too_late_is_copied_out() -> None:
    """The mark in the same slot is that of the round two before."""
    world = World(CASES["heads"], 2)
    for call in range(5):
        marked = world.call(call, PLACES[call % 2], lambda i, rank: True, late=call >= 2)
        assert marked == [[call + 1 if call < 2 else call % 2 + 1] * 2] * 2


def test_rows_that_would_be_cut_go_to_slots() -> None:
    """Two ranks' parts of each of 6 heads: a row of a chunk has 6 runs."""
    whole = exchange_of(Problem("heads", (4, 13), 24, 1, 0, out_shape=(6, 4)), 2)
    cut = exchange_of(Problem("head dim", (4, 13), 24, 2, 0, out_shape=(6, 4)), 2)
    heaps = torch.zeros(2, dtype=torch.int64)
    for each, is_whole in ((whole, True), (cut, False)):
        (spans,) = each.rounds(1 << 40)
        assert (landing_of(spans, 0, heaps, 4) is not None) == is_whole


@pytest.mark.parametrize("wrong", ["epoch before", "epoch after", "fingerprint", "size", "nothing posted"])
def test_a_post_of_another_call_is_not_used(wrong: str) -> None:
    """Its place may be another tensor by now. The own result is posted as it must be."""
    world = World(CASES["columns"], 2)
    first, second = world.ranks
    (spans,) = world.rounds
    inputs = [world.inputs(rank) for rank in range(2)]
    if wrong == "fingerprint":
        world.post(second, PLACES[0], FINGERPRINT ^ 1)
    elif wrong == "size":
        world.post(second, PLACES[0], num_bytes=world.result_bytes + 4)
    elif wrong.startswith("epoch"):
        world.post(second, PLACES[0])
        first.word(first.layout.post(1) + 16)[0] = flag(0 if wrong == "epoch before" else 2)
    world.post(first, PLACES[0])
    for rank, given in zip(world.ranks, inputs, strict=True):
        world.push(rank, spans, given)
    assert world.marks(second, 1) == [0, int(wrong.startswith("epoch"))]  # its own look finds its post
    outs = [world.result(rank, PLACES[0]) for rank in world.ranks]
    for rank, out in zip(world.ranks, outs, strict=True):
        kernel_launch.unpack(out, spans, rank, FINGERPRINT, posted=True)
    for out, value in zip(outs, expected(world.problem, 2), strict=True):
        torch.testing.assert_close(out, value, rtol=0, atol=0)


def look(round: Any, dst_rank: Any, num_bytes: Any, LAYOUT: Any) -> Any:
    """`in_place.decide` without a decision: each program takes what it sees."""
    post = in_place.word(round.segment, LAYOUT.posts + in_place.POST_BYTES * dst_rank)
    stamp, place = in_place.poll(post + 2), in_place.tl.load(post)
    is_posted = stamp == in_place.flag_value(round.epoch, round.fingerprint)
    return in_place.tl.where(is_posted, place + in_place.RESULT, in_place.SLOT).to(in_place.tl.int64)


@pytest.mark.parametrize("decides", [True, False])
def test_a_post_that_comes_between_two_programs(decides: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All programs go with the first one. If each went by what it sees, a part would be in the wrong memory."""
    world, looks = World(TILES, 2), list[int]()
    (spans,) = world.rounds
    inputs = [world.inputs(rank) for rank in range(2)]
    found: Callable[..., Any] = in_place.decide if decides else look

    def late(round: Any, dst_rank: Any, *args: Any) -> Any:
        decision = found(round, dst_rank, *args)
        looks.append(int(dst_rank.handle.data.item()))
        if looks == [1]:
            words = first.word(first.layout.post(1), 3)
            words[:] = torch.tensor([PLACES[0], world.result_bytes, flag(1)])
        return decision

    first, second = world.ranks
    out = world.result(second, PLACES[0])
    monkeypatch.setattr(push_matmul, "decide", late)
    world.push(first, spans, inputs[0])
    monkeypatch.undo()
    assert looks.count(1) == 3  # once for each program
    world.push(second, spans, inputs[1])
    kernel_launch.unpack(out, spans, second, FINGERPRINT, posted=True)
    assert torch.equal(out, expected(world.problem, 2)[1]) == decides


def test_a_program_looks_before_it_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """And once for each chunk: the receiver may post the next round when this one is complete."""
    world, looks = World(TILES, 2), list[list[int]]()
    (spans,) = world.rounds
    first, decide = world.ranks[0], in_place.decide

    def counted(round: Any, dst_rank: Any, *args: Any) -> Any:
        looks.append([*first.word(first.layout.tiles_done, 2).tolist(), int(dst_rank.handle.data.item())])
        return decide(round, dst_rank, *args)

    monkeypatch.setattr(push_matmul, "decide", counted)
    world.push(first, spans, world.inputs(0))
    num_tiles = 150 * 300 // 1024  # at least
    assert [dst_rank for *_, dst_rank in looks] == [1, 0] * 3
    assert all(done[dst_rank] < num_tiles for *done, dst_rank in looks)


@pytest.mark.parametrize("event", ["mark", "flag"])
def test_a_chunk_is_complete_before_its_mark(event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is marked before it is signalled."""
    world, holes = World(TILES, 2), list[int]()
    (spans,) = world.rounds
    first, second = world.ranks
    world.post(second, PLACES[0])
    before = {"mark": in_place.marks_of, "flag": rounds.signal}[event]
    chunk = spans.unpack.view(world.result(second, PLACES[0]).view(-1), 0, 0)

    def looked(*args: Any) -> Any:
        if world.marks(second, 1)[0] == (event == "flag"):
            holes.append(int(chunk.isnan().sum()))
        return before(*args)

    monkeypatch.setattr(*((in_place, "marks_of") if event == "mark" else (rounds, "signal")), looked)
    world.push(first, spans, world.inputs(0))
    assert holes and holes[0] == 0


def test_a_failed_round_is_poisoned_in_place_too() -> None:
    """The chunk that has come in place is no number either."""
    world = World(CASES["columns"], 3)
    (spans,) = world.rounds
    first = world.ranks[0]
    first.word(first.layout.timeout)[0] = int(0.2e9)
    for rank in world.ranks[:2]:
        world.post(rank, PLACES[0])
    for rank in world.ranks[:2]:
        world.push(rank, spans, world.inputs(rank.rank))
    out = world.result(first, PLACES[0])
    assert not out.isnan().all()
    kernel_launch.unpack(out, spans, first, FINGERPRINT, posted=True)
    assert out.isnan().all()
    assert first.record.tolist() == record(1, 1, 0, [flag(1), flag(1), 0], [0, 0, 1])


def test_kernels_and_host_agree_on_posts() -> None:
    assert in_place.POST_BYTES.value == segment.POST_BYTES
    layout = segment.HeaderLayout(3)
    kernels = layout.for_kernels
    assert (kernels.posts, kernels.marks) == (layout.post(0), layout.mark(0, 0))
    assert kernels.decisions + 8 * 3 <= layout.last_words(0)
