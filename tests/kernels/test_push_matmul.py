"""push_matmul_kernel and unpack_kernel in the Triton interpreter: virtual ranks in one process.

Indices, masks, layouts, ragged sizes, epochs. Waits that fail: test_failed_waits.py. Order of memory
operations on a GPU is for test_compile_only.py.
"""

import math
from typing import Any

import pytest
import torch
from triton.runtime.errors import InterpreterError

from fusedcomm.bench import launch_now
from fusedcomm.bench.virtual import VirtualGroup, run_op
from fusedcomm.kernels.triton import primitives
from fusedcomm.memory import segment
from fusedcomm.memory.segment import HeaderLayout
from fusedcomm.ops.call_arguments import Arguments
from fusedcomm.plan import launches, tiles
from fusedcomm.plan.geometry import shapes
from fusedcomm.plan.tiles import TileConfig
from tests.helpers.problems import Problem, expected, integers
from tests.helpers.virtual_ranks import (
    FINGERPRINT,
    by_name,
    by_tma,
    check_calls,
    exchange_of,
    flag,
    record,
    sizes_and_names,
    virtual_ranks,
)

CASES = by_name(  # every Span shape, at sizes that no tile divides
    [
        Problem("rows", (37, 29), 50, 1, 0),
        Problem("columns", (37, 29), 50, 0, 1),
        Problem("one row", (1, 29), 8, 0, 1),
        Problem("one row each", (1, 3), 5, 1, 0),
        Problem("heads", (2, 19, 29), 35, 1, 2, out_shape=(7, 5)),
        Problem("packed qkv", (2, 5, 13), 54, 1, 3, out_shape=(3, 2, 9), bias=True),
        Problem("packed qkv, long runs", (5, 13), 140, 0, 2, out_shape=(2, 70), bias=True),
        Problem("head dim", (9, 13), 24, 0, 2, out_shape=(6, 4)),
        Problem("interleaved rows", (3, 7, 13), 11, 2, 1),
        Problem("interleaved rows, long runs", (2, 67, 13), 11, 2, 1, bias=True),
        Problem("outer rows", (3, 7, 13), 11, 1, 0),
        Problem("batched, columns", (3, 21, 17), 10, 1, 2, batched=True, bias=True),
        Problem("batched, rows", (3, 5, 17), 10, 2, 1, batched=True),
        Problem("batched, batches", (2, 9, 17), 10, 1, 0, batched=True),
        Problem("batched, inner batches", (3, 2, 9, 17), 10, 2, 1, batched=True, transposed=True),
        Problem("batched, outer batches", (2, 3, 9, 17), 10, 3, 0, batched=True),
        Problem("transposed w", (21, 29), 20, 0, 1, transposed=True, bias=True),
        Problem("no rows", (0, 8), 4, 0, 1),
        Problem("no depth", (3, 2, 0), 5, 2, 0, bias=True),
        Problem("no columns", (4, 8), 0, 1, 0, bias=True),
    ]
)
ON_THREE = ["columns", "packed qkv", "interleaved rows", "batched, batches", "no rows"]


@pytest.mark.parametrize(("group_size", "name"), sizes_and_names(CASES, ON_THREE))
def test_every_span_shape(group_size: int, name: str) -> None:
    check_calls(CASES[name], group_size)


def test_bfloat16_rounds_to_nearest_even() -> None:
    """All of K and the bias come before the rounding: 256 + 1 + 1 + 1 is 259, half way between 258 and 260."""
    exchange = shapes.matmul_all_to_all((4, 4), (4, 3), None, 0, 1, 1)
    (spans,) = exchange.rounds(1 << 40)
    (rank,) = virtual_ranks(1, exchange.chunk_numel * 2)
    w = torch.tensor([256, 1, 1, 1], dtype=torch.bfloat16)[:, None].expand(4, 3)
    for bias, rounded in ((None, 260), (2, 260), (4, 264)):
        vector = None if bias is None else torch.full((3,), bias, dtype=torch.bfloat16)
        out = torch.full(exchange.out_shape, math.nan, dtype=torch.bfloat16)
        launch_now.push(torch.ones(4, 4, dtype=torch.bfloat16), w, vector, spans, rank, FINGERPRINT)
        launch_now.unpack(out, spans, rank, FINGERPRINT)
        assert (out == rounded).all()


@pytest.mark.parametrize("name", ["rows", "heads", "batched, batches"])
def test_rounds_cut_a_call(name: str) -> None:
    """Calls follow one another, so each slot is used again."""
    check_calls(CASES[name], 2, num_rounds=3, num_calls=2)


DESCRIBED = by_name(
    [
        Problem("columns", (37, 24), 48, 0, 1, bias=True),
        Problem("long runs", (2, 72, 24), 128, 1, 3, out_shape=(2, 64)),
        Problem("interleaved rows", (2, 30, 24), 40, 2, 1),
        Problem("transposed w", (37, 40), 48, 0, 1, transposed=True),
        Problem("batched", (3, 37, 32), 48, 1, 2, batched=True),
        Problem("batched, transposed", (2, 37, 32), 24, 1, 0, batched=True, transposed=True),
        Problem("ragged, batched, transposed", (2, 37, 24), 24, 1, 0, batched=True, transposed=True),
    ]
)


@pytest.mark.parametrize("name", DESCRIBED)
def test_tensor_descriptors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    described = by_tma(monkeypatch, "describe_x", TileConfig(32, 32, 16, 2, 4, 1, True))
    check_calls(DESCRIBED[name], 2, dtype=torch.bfloat16)
    assert described


def check_chunks(problem: Problem, group_size: int, dtype: torch.dtype) -> None:
    """One rank's push, which is all that differs with the columns: every dst_rank gets its part of x @ w + bias."""
    exchange, (x, w, bias) = exchange_of(problem, group_size), integers(problem, 0, group_size, dtype)
    ranks = virtual_ranks(group_size, group_size * exchange.chunk_numel * dtype.itemsize)
    (spans,) = exchange.rounds(1 << 40)
    launch_now.push(x, w, bias, spans, ranks[0], FINGERPRINT)
    y = (x.double() @ w.double() + bias.double()).view(len(x), -1, group_size, exchange.block[-1])
    for dst_rank, rank in enumerate(ranks):
        start = rank.layout.slot(1, rank.slot_bytes)
        chunk = rank.segment[start : start + exchange.chunk_numel * dtype.itemsize].view(dtype)
        assert torch.equal(chunk.double(), y[:, :, dst_rank].flatten())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("remainder", [0, 1, 4, 7, 8, 15])
def test_tma_loads_begin_at_multiples_of_16_bytes(
    remainder: int, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns are cut anywhere, in one run and in two. The interpreter refuses loads that begin elsewhere."""
    described = by_tma(monkeypatch, "describe_x", TileConfig(16, 16, 16, 2, 4, 1))
    monkeypatch.setattr(tiles, "_MAX_RUN_WASTE", 2)
    columns = 16 + remainder
    one = Problem("one run", (3, 8), columns, 0, 1, bias=True, transposed=transposed)
    two = Problem("two runs", (3, 8), 2 * columns, 0, 2, out_shape=(2, columns), bias=True, transposed=transposed)
    check_chunks(one, 8, torch.bfloat16)
    check_chunks(two, 4, torch.float32)
    assert len(described) == 2
    if remainder == 4 and not transposed:
        monkeypatch.setattr(launches, "column_shift", lambda *args: 0)  # negative control
        with pytest.raises(InterpreterError, match="16-byte aligned"):
            check_chunks(one, 8, torch.bfloat16)


def test_a_batch_of_w_does_not_reach_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """K is no multiple of BLOCK_K: behind K of one batch lies the next batch, which is infinite here."""
    described = by_tma(monkeypatch, "describe_x", TileConfig(16, 16, 16, 2, 4, 1))
    x, w = torch.ones(2, 16, 24), torch.ones(2, 24, 16)
    w[1] = math.inf
    exchange = shapes.matmul_all_to_all(x.shape, w.shape, None, 1, 2, 1)
    (rank,) = virtual_ranks(1, exchange.chunk_numel * 4)
    out = torch.full(exchange.out_shape, float("nan"))
    (spans,) = exchange.rounds(1 << 40)
    launch_now.push(x, w, None, spans, rank, FINGERPRINT)
    launch_now.unpack(out, spans, rank, FINGERPRINT)
    assert (out[0] == 24).all() and torch.isinf(out[1]).all() and described


def test_a_chunk_is_signalled_when_all_programs_have_stored_it(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, group_size = Problem("tiles", (150, 8), 300, 0, 1), 2
    exchange, signal, holes = exchange_of(problem, group_size), primitives.signal, []
    ranks = virtual_ranks(group_size, group_size * exchange.chunk_numel * 4)
    start = ranks[0].layout.slot(1, ranks[0].slot_bytes)

    def look(*args: Any) -> None:
        chunks = [rank.segment[start : start + exchange.chunk_numel * 4].view(torch.float32) for rank in ranks]
        holes.append([int(chunk.isnan().sum()) for chunk in chunks])
        signal(*args)

    monkeypatch.setattr(primitives, "signal", look)
    x, w, _ = integers(problem, 0, group_size)
    (spans,) = exchange.rounds(1 << 40)
    launch_now.push(x, w, None, spans, ranks[0], FINGERPRINT)
    assert [each[dst_rank] for each, dst_rank in zip(holes, (1, 0), strict=True)] == [0, 0]


def test_host_driven_rounds() -> None:
    """signal and wait run as kernels: rounds without data are signalled to all at once or one by one."""
    ranks = virtual_ranks(3, 0)
    for epoch in (1, 2, 3):
        for rank in ranks:
            launch_now.signal(rank, None if epoch != 2 else rank.rank, FINGERPRINT)
            if epoch == 2:
                for dst_rank in {0, 1, 2} - {rank.rank}:
                    launch_now.signal(rank, dst_rank, FINGERPRINT)
        for rank in ranks:
            launch_now.wait(rank, FINGERPRINT)
            assert rank.epoch == epoch
            slot_flags = rank.word(rank.layout.flag(epoch, 0), 3)
            assert slot_flags.tolist() == [flag(epoch)] * 3
            assert not rank.record.any()


def test_host_driven_wait_that_fails() -> None:
    ranks = virtual_ranks(2, 0)
    ranks[0].word(ranks[0].layout.timeout)[0] = int(0.1e9)
    launch_now.signal(ranks[0], 0, FINGERPRINT)
    launch_now.wait(ranks[0], FINGERPRINT)
    assert ranks[0].epoch == 1
    assert ranks[0].record.tolist() == record(1, 1, 0, [flag(1), 0], [0, 1])
    assert ranks[1].broken == [1 | 1 << 8, 0]


@pytest.mark.parametrize("algorithm", ["chunked", "fused"])
@pytest.mark.parametrize("name", ["packed qkv", "no rows"])
def test_a_virtual_group_is_as_new_after_load(algorithm: Any, name: str) -> None:
    """Every rank's kernels run alone, wait for nobody, and leave no flag, no data and no epoch."""
    problem = CASES[name]
    exchange, given = exchange_of(problem, 2), integers(problem, 0, 2)
    group = VirtualGroup(2, max(1, 2 * exchange.chunk_numel * 4), "cpu")
    args = Arguments(given[0], [given[1]], [given[2]], 2, "virtual 2")
    for _ in range(2):
        group.load(lambda ws: run_op(problem.op, algorithm, exchange, ws, args, 7), 7)
    (spans,) = exchange.rounds(1 << 40)
    for call in range(3):
        inputs = [integers(problem, rank, 2, seed=call) for rank in range(2)]
        outs = [torch.full(exchange.out_shape, float("nan")) for _ in inputs]
        group.run(lambda ws, each: launch_now.push(each[0], each[1], each[2], spans, ws, FINGERPRINT), inputs)
        group.run(lambda ws, out: launch_now.unpack(out, spans, ws, FINGERPRINT), outs)
        group.check("op")
        for out, value in zip(outs, expected(problem, 2, seed=call), strict=True):
            torch.testing.assert_close(out, value, rtol=0, atol=0)


def test_kernels_and_host_agree_on_the_header() -> None:
    layout = HeaderLayout(4)
    header = (layout.epoch, layout.arrivals, layout.timeout, layout.record, layout.claim, layout.broken)
    words = ["EPOCH", "ARRIVALS", "TIMEOUT", "RECORD", "CLAIM", "BROKEN"]
    assert tuple(getattr(primitives, word).value for word in words) == header
    assert primitives.FINGERPRINT_BITS.value == segment.FINGERPRINT_BITS
    assert primitives.RECORD_WORDS.value == segment.ErrorRecord.WORDS
    kinds = (primitives.TIMED_OUT, primitives.MISMATCHED, primitives.BROKEN_BY_PEER)
    assert tuple(kind.value for kind in kinds) == (segment.TIMED_OUT, segment.MISMATCHED, segment.BROKEN_BY_PEER)
