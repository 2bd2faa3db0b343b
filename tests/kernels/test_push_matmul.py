"""push_matmul_kernel and unpack_kernel in the Triton interpreter: virtual ranks in one process.

Indices, masks, layouts, ragged sizes, epochs and what a failed wait leaves behind. Order of memory
operations on a GPU is for test_compile_only.py.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.tiers import thorough_but

pytest.importorskip("triton")

from triton.runtime.errors import InterpreterError

from fusedcomm.algorithms import chunked, fused, kernel_launch, tiles
from fusedcomm.algorithms.tiles import TileConfig
from fusedcomm.geometry import shapes
from fusedcomm.geometry.exchange import Exchange
from fusedcomm.kernels.triton import primitives, rounds
from fusedcomm.runtime import segment, signals
from fusedcomm.runtime.segment import HeaderLayout
from fusedcomm.runtime.workspace import Call
from fusedcomm.testing.virtual import VirtualGroup
from tests.helpers.virtual_ranks import (
    FINGERPRINT,
    VirtualRank,
    assert_results,
    flag,
    guarded,
    record,
    sizes_and_names,
    virtual_ranks,
)


@dataclass(frozen=True)
class Case:
    """x [*lead, k] @ w [k, n] (batched: [*lead[:-1], k, n]), viewed as out_shape, and the dims of that."""

    lead: tuple[int, ...]
    k: int
    n: int
    gather_dim: int
    scatter_dim: int
    out_shape: tuple[int, ...] | None = None
    batched: bool = False
    transposed: bool = False
    bias: bool = False
    dtype: torch.dtype = torch.float32
    max_chunk_numel: int = 1 << 40
    padded: bool = False  # rows of w begin at multiples of 16 bytes

    def w_shape(self) -> tuple[int, ...]:
        return (*(self.lead[:-1] if self.batched else ()), self.k, self.n)

    def inputs(self, seed: int) -> tuple[Tensor, Tensor, Tensor | None]:
        generator = torch.Generator().manual_seed(seed)

        def integers(*shape: int) -> Tensor:
            return torch.randint(-3, 4, shape, generator=generator).to(self.dtype)

        x, w = integers(*self.lead, self.k), integers(*self.w_shape())
        if self.transposed:
            w = w.mT.contiguous().mT
        if self.padded:
            w = torch.nn.functional.pad(w, (0, -self.n % 8), value=float("nan"))[..., : self.n]
        return x, w, integers(self.n) if self.bias else None

    def exchange(self, group_size: int) -> Exchange:
        given = (*self.lead, self.k), self.w_shape(), self.out_shape
        return shapes.matmul_all_to_all(*given, self.gather_dim, self.scatter_dim, group_size)


def oracle(case: Case, inputs: list[tuple[Tensor, Tensor, Tensor | None]]) -> list[Tensor]:
    """Every rank's result, from integers small enough that only the one rounding is left."""
    blocks = []
    for x, w, bias in inputs:
        y = x.double() @ w.double() + (0 if bias is None else bias.double())
        y = y.to(case.dtype).view(*case.lead, *(case.out_shape or (case.n,)))
        blocks.append(y.chunk(len(inputs), case.scatter_dim))
    return [torch.cat([b[r] for b in blocks], case.gather_dim) for r in range(len(inputs))]


def run(case: Case, group_size: int, calls: int = 1) -> None:
    exchange = case.exchange(group_size)
    itemsize = torch.empty(0, dtype=case.dtype).itemsize
    chunk_numel = min(exchange.chunk_numel, case.max_chunk_numel)
    ranks = virtual_ranks(group_size, group_size * chunk_numel * itemsize)
    num_rounds = 0
    for call in range(calls):
        inputs = [case.inputs(100 * call + rank) for rank in range(group_size)]
        padded = [guarded(exchange.out_shape, case.dtype) for _ in ranks]
        for spans in exchange.rounds(case.max_chunk_numel):
            for rank, (x, w, bias) in zip(ranks, inputs, strict=True):
                kernel_launch.push(x, w, bias, spans, rank, FINGERPRINT)
            for rank, (out, _) in zip(ranks, padded, strict=True):
                kernel_launch.unpack(out, spans, rank, FINGERPRINT)
            num_rounds += 1
        assert_results(padded, oracle(case, inputs))
    for rank in ranks:
        rank.assert_idle(num_rounds)


def cases(r: int) -> dict[str, Case]:
    """Every Span shape, at sizes that no tile divides; dims to scatter are multiples of r."""
    return {
        "rows": Case((37 * r,), 29, 50, 1, 0),
        "columns": Case((37,), 29, 50 * r, 0, 1),
        "one row": Case((1,), 29, 8 * r, 0, 1),
        "one row each": Case((r,), 3, 5, 1, 0),
        "heads": Case((2, 19), 29, 7 * r * 5, 1, 2, (7 * r, 5)),
        "packed qkv": Case((2, 5), 13, 3 * 2 * r * 9, 1, 3, (3, 2 * r, 9), bias=True),
        "packed qkv, long runs": Case((5,), 13, 2 * 70 * r, 0, 2, (2, 70 * r), bias=True),
        "head dim": Case((9,), 13, 6 * 4 * r, 0, 2, (6, 4 * r)),
        "interleaved rows": Case((3, 7 * r), 13, 11, 2, 1),
        "interleaved rows, long runs": Case((2, 67 * r), 13, 11, 2, 1, bias=True),
        "outer rows": Case((3 * r, 7), 13, 11, 1, 0),
        "batched, columns": Case((3, 21), 17, 10 * r, 1, 2, batched=True, bias=True),
        "batched, rows": Case((3, 5 * r), 17, 10, 2, 1, batched=True),
        "batched, batches": Case((2 * r, 9), 17, 10, 1, 0, batched=True),
        "batched, inner batches": Case((3, 2 * r, 9), 17, 10, 2, 1, batched=True, transposed=True),
        "batched, outer batches": Case((2 * r, 3, 9), 17, 10, 3, 0, batched=True),
        "transposed w": Case((21,), 29, 20 * r, 0, 1, transposed=True, bias=True),
        "no rows": Case((0,), 8, 4 * r, 0, 1),
        "no depth": Case((3 * r, 2), 0, 5, 2, 0, bias=True),
        "no columns": Case((4 * r,), 8, 0, 1, 0, bias=True),
    }


ON_ALL_SIZES = ["rows", "columns", "heads", "packed qkv", "interleaved rows", "batched, batches", "no rows"]


@pytest.mark.parametrize(("group_size", "name"), sizes_and_names(cases(1), ON_ALL_SIZES))
def test_every_span_shape(group_size: int, name: str) -> None:
    run(cases(group_size)[name], group_size)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["columns", "packed qkv", "batched, columns", "transposed w"])
def test_half_precision_rounds_once(dtype: torch.dtype, name: str) -> None:
    """This is also the test that fails where the interpreter's own bf16 dot is used."""
    case = cases(3)[name]
    run(Case(**{**case.__dict__, "dtype": dtype}), 3)


@pytest.mark.parametrize("name", thorough_but(["rows"], ["rows", "heads", "interleaved rows", "batched, batches"]))
def test_rounds_cut_a_call(name: str) -> None:
    case = cases(2)[name]
    part = case.exchange(2).chunk_numel // 3
    run(Case(**{**case.__dict__, "max_chunk_numel": part}), 2)


@pytest.mark.thorough
@pytest.mark.parametrize("group_size", [2, 3])
def test_calls_back_to_back_with_fresh_data(group_size: int) -> None:
    run(cases(group_size)["packed qkv"], group_size, calls=7)


DESCRIPTOR_CASES = {
    "columns": Case((37,), 24, 48 * 2, 0, 1, bias=True, dtype=torch.bfloat16),
    "long runs": Case((2, 72), 24, 2 * 64 * 2, 1, 3, (2, 128), dtype=torch.bfloat16),
    "interleaved rows": Case((2, 2 * 30), 24, 40, 2, 1, dtype=torch.float16),
    "transposed w": Case((37,), 40, 48 * 2, 0, 1, transposed=True, dtype=torch.bfloat16),
    "batched": Case((3, 37), 32, 48 * 2, 1, 2, batched=True, dtype=torch.bfloat16),
    "batched, transposed": Case((4, 37), 32, 24, 1, 0, batched=True, transposed=True),
}


def by_tma(monkeypatch: pytest.MonkeyPatch, config: TileConfig) -> list[Any]:
    """Take the path of sm_90 and later. Returns the arguments of each descriptor of x."""
    made = []

    def counted(*args: Any, describe: Any = kernel_launch.describe_x) -> Any:
        made.append(args)
        return describe(*args)

    monkeypatch.setattr(tiles, "architecture", lambda device: 90)
    monkeypatch.setattr(tiles, "BLOCK_K", 16)
    monkeypatch.setattr(tiles, "matmul_config", lambda *args: config)
    monkeypatch.setattr(kernel_launch, "describe_x", counted)
    return made


@pytest.mark.thorough
@pytest.mark.parametrize("name", DESCRIPTOR_CASES)
def test_tensor_descriptors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the path of sm_90 and later: a tile is one box of x and one of w."""
    made = by_tma(monkeypatch, TileConfig(32, 32, 16, 2, 4, 1, True))
    run(DESCRIPTOR_CASES[name], 2)
    assert made


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("remainder", thorough_but([0, 4, 7], range(16)))
def test_tma_loads_begin_at_multiples_of_16_bytes(
    remainder: int, dtype: torch.dtype, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns are cut anywhere, in one run and in several. The interpreter refuses a load that begins elsewhere."""
    by_tma(monkeypatch, TileConfig(32, 16, 16, 2, 4, 1))
    monkeypatch.setattr(tiles, "_MAX_RUN_WASTE", 2)
    columns, options = 16 + remainder, {"bias": True, "dtype": dtype, "transposed": transposed}
    run(Case((5,), 8, 3 * columns, 0, 1, padded=not transposed, **options), 3)
    run(Case((5,), 8, 2 * 2 * columns, 0, 2, (2, 2 * columns), padded=not transposed, **options), 2)
    if remainder == 4 and not transposed:
        monkeypatch.setattr(kernel_launch, "column_shift", lambda *args: 0)  # negative control
        with pytest.raises(InterpreterError, match="16-byte aligned"):
            run(Case((5,), 8, 3 * columns, 0, 1, padded=True, dtype=torch.bfloat16), 3)


def test_a_batch_of_w_does_not_reach_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """K is no multiple of BLOCK_K: behind K of one batch lies the next batch, which is infinite here."""
    monkeypatch.setattr(tiles, "architecture", lambda device: 90)
    monkeypatch.setattr(tiles, "BLOCK_K", 16)
    monkeypatch.setattr(tiles, "matmul_config", lambda *args: TileConfig(16, 16, 16, 2, 4, 1))
    x, w = torch.ones(2, 16, 24), torch.ones(2, 24, 16)
    w[1] = math.inf
    exchange = shapes.matmul_all_to_all(x.shape, w.shape, None, 1, 2, 1)
    (rank,) = virtual_ranks(1, exchange.chunk_numel * 4)
    out = torch.full(exchange.out_shape, float("nan"))
    (spans,) = exchange.rounds(1 << 40)
    kernel_launch.push(x, w, None, spans, rank, FINGERPRINT)
    kernel_launch.unpack(out, spans, rank, FINGERPRINT)
    assert (out[0] == 24).all() and torch.isinf(out[1]).all()


CASE = Case((5,), 8, 24, 0, 1)


def push(rank: VirtualRank, value: float, fingerprint: int = FINGERPRINT) -> None:
    """One round of CASE whose result is 8 * value everywhere."""
    (spans,) = CASE.exchange(rank.group_size).rounds(1 << 40)
    kernel_launch.push(torch.full((5, 8), float(value)), torch.ones(8, 24), None, spans, rank, fingerprint)


def unpack(rank: VirtualRank, fingerprint: int = FINGERPRINT) -> Tensor:
    exchange = CASE.exchange(rank.group_size)
    out = torch.zeros(exchange.out_shape)
    (spans,) = exchange.rounds(1 << 40)
    kernel_launch.unpack(out, spans, rank, fingerprint)
    return out


def case_ranks(group_size: int, timeout_s: float = 60.0, num_slots: int = 2) -> list[VirtualRank]:
    ranks = virtual_ranks(group_size, group_size * CASE.exchange(group_size).chunk_numel * 4, num_slots)
    for rank in ranks:
        rank.word(rank.layout.timeout)[0] = int(timeout_s * 1e9)
    return ranks


@pytest.mark.parametrize("num_slots", [2, 1])
def test_a_peer_may_be_one_round_ahead(num_slots: int) -> None:
    """Two slots are enough; one is not (negative control)."""
    ranks = case_ranks(2, timeout_s=0.2, num_slots=num_slots)
    for rank in ranks:
        push(rank, 1)
    ahead = unpack(ranks[1])
    push(ranks[1], 2)
    late = unpack(ranks[0])
    assert (ahead == 8).all()
    assert bool((late == 8).all()) == (num_slots == 2)


def test_a_chunk_is_signalled_when_all_programs_have_stored_it(monkeypatch: pytest.MonkeyPatch) -> None:
    case, group_size = Case((150,), 8, 2 * 300, 0, 1), 2
    exchange, signal, holes = case.exchange(group_size), rounds.signal, []
    ranks = virtual_ranks(group_size, group_size * exchange.chunk_numel * 4)
    start = ranks[0].layout.slot(1, ranks[0].slot_bytes)

    def look(*args: Any) -> None:
        chunks = [rank.segment[start : start + exchange.chunk_numel * 4].view(torch.float32) for rank in ranks]
        holes.append([int(chunk.isnan().sum()) for chunk in chunks])
        signal(*args)

    monkeypatch.setattr(rounds, "signal", look)
    x, w, _ = case.inputs(0)
    (spans,) = exchange.rounds(1 << 40)
    kernel_launch.push(x, w, None, spans, ranks[0], FINGERPRINT)
    assert [each[dst_rank] for each, dst_rank in zip(holes, (1, 0), strict=True)] == [0, 0]


def test_time_out_names_who_is_missing() -> None:
    ranks = case_ranks(3, timeout_s=0.2)
    push(ranks[0], 1)
    push(ranks[1], 1)
    start = time.monotonic()
    assert torch.isnan(unpack(ranks[0])[5:]).all()
    assert 0.2 <= time.monotonic() - start < 10
    assert ranks[0].record.tolist() == record(1, 1, 0, [flag(1), flag(1), 0], [0, 0, 1])
    assert [rank.broken for rank in ranks] == [[1 | 1 << 8, 0, 0]] * 3
    assert ranks[0].epoch == 1
    ranks[0].assert_idle(1, failed=True)


def test_a_broken_workspace_waits_no_more_and_keeps_its_first_record() -> None:
    ranks = case_ranks(2, timeout_s=0.2)
    push(ranks[0], 1)
    unpack(ranks[0])
    first = ranks[0].record.tolist()
    ranks[0].word(ranks[0].layout.timeout)[0] = int(60e9)
    push(ranks[0], 1)
    start = time.monotonic()
    assert torch.isnan(unpack(ranks[0])).all()
    assert time.monotonic() - start < 10
    assert ranks[0].record.tolist() == first


def test_mismatch_is_found_on_both_sides() -> None:
    """The first rank breaks the second, which must still say that it is a mismatch."""
    other = FINGERPRINT ^ 1
    ranks = case_ranks(2)
    push(ranks[0], 1)
    push(ranks[1], 1, other)
    assert torch.isnan(unpack(ranks[0])[5:]).all()
    assert ranks[0].record.tolist() == record(2, 1, 0, [flag(1), flag(1, other)], [0, 1])
    assert ranks[1].broken == [2 | 1 << 8, 0]
    assert torch.isnan(unpack(ranks[1], other)).all()
    expected = record(2, 1, 1, [flag(1), flag(1, other)], [1, 0])
    expected[4] = other
    assert ranks[1].record.tolist() == expected
    assert ranks[1].broken == [2 | 1 << 8, 2 | 1 << 8]


@pytest.mark.parametrize("arrived", [True, False])
def test_broken_by_a_peer(arrived: bool) -> None:
    """If all data are there, the error names the peer that gave up. If data are missing, it names who did not send."""
    ranks = case_ranks(3)
    for rank in ranks[: 3 if arrived else 2]:
        push(rank, 1)
    ranks[0].word(ranks[0].layout.broken, 3)[1] = 1 | 1 << 8
    out = unpack(ranks[0])
    assert torch.isnan(out if arrived else out[5:]).all()  # the own chunk is copied before the wait that fails
    flags = [flag(1), flag(1), flag(1) if arrived else 0]
    bad = [0, 1, 0] if arrived else [0, 0, 1]
    assert ranks[0].record.tolist() == record(3 if arrived else 1, 1, 0, flags, bad)


def test_a_peer_that_left_is_the_cause_of_what_is_missing() -> None:
    ranks = case_ranks(3)
    push(ranks[0], 1)
    ranks[0].word(ranks[0].layout.broken, 3)[1] = 4 | 1 << 8
    assert torch.isnan(unpack(ranks[0])[5:]).all()
    assert ranks[0].record.tolist() == record(3, 1, 0, [flag(1), 0, 0], [0, 1, 0])


def test_nobody_is_to_blame_for_a_flag_that_comes_with_the_deadline() -> None:
    """The wait is over, and the flag arrives before the judgement: the rank must not name itself."""
    ranks = case_ranks(2)
    for rank in ranks:
        push(rank, 1)
    ranks[0].word(ranks[0].layout.broken, 2)[0] = 1  # as poll_broken leaves it
    assert torch.isnan(unpack(ranks[0])).all()
    assert ranks[0].record.tolist() == record(3, 1, 0, [flag(1), flag(1)], [0, 0])


def test_host_driven_rounds() -> None:
    """signal and wait run as kernels: rounds without data are signalled to all at once or one by one."""
    ranks = virtual_ranks(3, 0)
    for epoch in (1, 2, 3):
        for rank in ranks:
            signals.signal(rank, None if epoch != 2 else rank.rank, FINGERPRINT)
            if epoch == 2:
                for dst_rank in {0, 1, 2} - {rank.rank}:
                    signals.signal(rank, dst_rank, FINGERPRINT)
        for rank in ranks:
            signals.wait(rank, FINGERPRINT)
            assert rank.epoch == epoch
            slot_flags = rank.word(rank.layout.flag(epoch, 0), 3)
            assert slot_flags.tolist() == [flag(epoch)] * 3
            assert not rank.record.any()


def test_host_driven_wait_that_fails() -> None:
    ranks = virtual_ranks(2, 0)
    ranks[0].word(ranks[0].layout.timeout)[0] = int(0.1e9)
    signals.signal(ranks[0], 0, FINGERPRINT)
    signals.wait(ranks[0], FINGERPRINT)
    assert ranks[0].epoch == 1
    assert ranks[0].record.tolist() == record(1, 1, 0, [flag(1), 0], [0, 1])
    assert ranks[1].broken == [1 | 1 << 8, 0]


@pytest.mark.parametrize("algorithm", [chunked, fused], ids=["chunked", "fused"])
@pytest.mark.parametrize("name", ["packed qkv", "no rows"])
def test_a_virtual_group_is_as_new_after_load(algorithm: Any, name: str) -> None:
    """Every rank's kernels run alone, wait for nobody, and leave no flag, no data and no epoch."""
    case = cases(2)[name]
    exchange = case.exchange(2)
    group = VirtualGroup(2, max(1, 2 * exchange.chunk_numel * 4), "cpu")
    for _ in range(2):
        group.load(lambda ws, *inputs: algorithm.push_matmul(Call("op", 7, exchange, ws), *inputs), 7, *case.inputs(0))
    (spans,) = exchange.rounds(1 << 40)
    for call in range(3):
        inputs = [case.inputs(10 * call + rank) for rank in range(2)]
        outs = [torch.full(exchange.out_shape, float("nan")) for _ in inputs]
        group.run(lambda ws, each: kernel_launch.push(each[0], each[1], each[2], spans, ws, FINGERPRINT), inputs)
        group.run(lambda ws, out: kernel_launch.unpack(out, spans, ws, FINGERPRINT), outs)
        group.check("op")
        for out, expected in zip(outs, oracle(case, inputs), strict=True):
            torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_kernels_and_host_agree_on_the_header() -> None:
    layout = HeaderLayout(4)
    header = (layout.epoch, layout.arrivals, layout.timeout, layout.record, layout.claim, layout.broken)
    words = (
        primitives.EPOCH,
        primitives.ARRIVALS,
        primitives.TIMEOUT,
        primitives.RECORD,
        primitives.CLAIM,
        primitives.BROKEN,
    )
    assert tuple(word.value for word in words) == header
    assert primitives.FINGERPRINT_BITS.value == segment.FINGERPRINT_BITS
    assert primitives.RECORD_WORDS.value == segment.ErrorRecord.WORDS
    kinds = (primitives.TIMED_OUT, primitives.MISMATCHED, primitives.BROKEN_BY_PEER)
    assert tuple(kind.value for kind in kinds) == (
        segment.TIMED_OUT,
        segment.MISMATCHED,
        segment.BROKEN_BY_PEER,
    )
