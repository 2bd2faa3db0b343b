"""Rounds with the largest slots that a workspace has, and results of many more elements, in Triton's interpreter.

Some tiles of billions of elements are computed: the first ones, and the last. A 32-bit sum, difference or product that
wraps is an error, as is a value in the wrong place: the tensors begin as zeros, and 2^31 more elements lie before them.
"""

from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor

from fusedcomm.bench import launch_now
from fusedcomm.memory.segment import MOST_SLOT_BYTES
from fusedcomm.plan import tiles
from fusedcomm.plan.geometry import shapes
from fusedcomm.plan.tiles import TileConfig
from tests.helpers.virtual_ranks import (
    FINGERPRINT,
    VirtualRank,
    large_ranks,
    only_programs,
    overflow_is_an_error,
    signalled,
    slot_of,
    sparse,
    virtual_ranks,
)

pytestmark = pytest.mark.usefixtures("overflow")

DTYPE = torch.bfloat16
MOST = MOST_SLOT_BYTES // 2 // 2  # elements of a chunk of 2 ranks
ROWS, K = 32, 512
COLUMNS, TALL = MOST // ROWS, MOST // K - 1
EPOCH = 1  # its slot begins at nearly 2^32


def test_these_chunks_fill_a_slot() -> None:
    assert ROWS * COLUMNS == MOST and TALL % 64 != 0 and MOST >= 1 << 29


def integers(*shape: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(sum(shape))).to(DTYPE)


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=0, atol=0, equal_nan=True)


def ranks_with(failed: bool = False) -> list[VirtualRank]:
    """Two ranks, which have signalled; or, if ``failed``, have signalled another call."""
    ranks = large_ranks(2, MOST_SLOT_BYTES)
    for rank in ranks:
        signalled(rank, EPOCH, FINGERPRINT + failed)
    return ranks


def first_and_last(num_tiles: int) -> list[int]:
    return [0, num_tiles - 1]


def of_both_halves(num_tiles: int) -> list[int]:
    """The first and the last tile of each rank's chunk."""
    return [0, num_tiles // 2 - 1, num_tiles // 2, num_tiles - 1]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("num_rows", [1, ROWS])
def test_a_push_fills_a_slot(num_rows: int, transposed: bool) -> None:
    """The chunk of rank 1 in each slot begins at nearly 2^31 bytes. With one row, offsets behind the mask wrap."""
    columns = MOST // num_rows
    x, ranks = integers(num_rows, 5), ranks_with()
    w = sparse(5 * 2 * columns, DTYPE)
    w = w.view(2 * columns, 5).mT if transposed else w.view(5, 2 * columns)
    last = (columns - 1) // 64 * 64
    for start, end in ((0, 64), (last, columns + 64), (columns + last, 2 * columns)):
        w[:, start:end] = integers(5, end - start)
    exchange = shapes.matmul_all_to_all((num_rows, 5), (5, 2 * columns), None, 0, 1, 2)
    (spans,) = exchange.rounds(MOST)
    with only_programs(of_both_halves), overflow_is_an_error(num_rows > 1):
        launch_now.push(x, w, None, spans, ranks[1], FINGERPRINT)
    for dst in range(2):
        chunk = slot_of(ranks[dst], EPOCH, DTYPE)[MOST : 2 * MOST].view(num_rows, columns)
        y = x @ w[:, dst * columns : (dst + 1) * columns][:, [*range(64), *range(last, columns)]]
        same(chunk[:, :64], y[:, :64])
        same(chunk[:, last:], y[:, 64:])
        assert not chunk[:, 64:192].any() and not chunk[:, last - 128 : last].any()


def test_a_push_reads_rows_where_they_lie() -> None:
    """The last round of 2^12 rows begins 2^33 elements behind the first row."""
    num_rows = 1 << 24
    x, ranks = sparse(num_rows * K).view(num_rows, K), large_ranks(2, 1 << 20)
    x[-64:], w = integers(64, K), integers(K, 7).float()
    spans = shapes.matmul_reduce_scatter((num_rows, K), (K, 7), "sum", 0, 2).rounds(7 << 12)[-1]
    with only_programs(of_both_halves):
        launch_now.push(x, w, None, spans, ranks[0], FINGERPRINT)
    chunk = slot_of(ranks[1], EPOCH, torch.float32)[: 7 << 12].view(-1, 7)
    same(chunk[-64:], x[-64:] @ w)
    assert not chunk[:-64].any()


@pytest.mark.parametrize("dtype", [DTYPE, torch.uint8])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_pack_fills_slots(rank: int, dtype: torch.dtype) -> None:
    most = MOST * 2 // dtype.itemsize  # of bytes nearly 2^31
    x, ranks = sparse(most, dtype), ranks_with()
    x[:4096], x[-4096:] = integers(4096).to(dtype), (integers(4096) + 1).to(dtype)
    (spans,) = shapes.all_gather_matmul((ROWS, most // ROWS), ((most // ROWS, 1),), 0, 2).rounds(most)
    with only_programs(first_and_last):
        launch_now.pack(x.view(ROWS, -1), spans, ranks[rank], FINGERPRINT)
    last = (most - 1) // 1024 * 1024
    for dst in ranks:
        chunk = slot_of(dst, EPOCH, dtype)[rank * most : (rank + 1) * most]
        same(chunk[:1024], x[:1024])
        same(chunk[last:], x[last:])


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("average", [False, True])
def test_a_reduction_reads_a_full_slot(average: bool, failed: bool) -> None:
    """The results of round 5 begin at 2^32. A bias has as many columns."""
    ranks, num_rows = ranks_with(failed), 2 * 5 * ROWS
    exchange = shapes.matmul_reduce_scatter((num_rows, 1), (1, COLUMNS), "sum", 0, 2)
    spans = exchange.rounds(MOST)[-1]
    last, slot = (MOST - 1) // 1024 * 1024, slot_of(ranks[1], EPOCH, DTYPE)
    for i in (0, last, MOST, MOST + last):
        slot[i : i + 1024] = integers(len(slot[i : i + 1024])) + i % 7
    out, bias = sparse(5 * MOST, DTYPE), sparse(COLUMNS, DTYPE)
    bias[:1024], bias[-1024:] = integers(1024), integers(1024) - 1
    with only_programs(first_and_last):
        launch_now.reduce(out.view(-1, COLUMNS), spans, bias, 0.5 if average else 1.0, ranks[1], FINGERPRINT)
    for i, end in ((0, 1024), (last, MOST)):
        total = slot[i:end].float() + slot[MOST + i : MOST + end].float()
        want = total * (0.5 if average else 1.0) + bias[torch.arange(i, end) % COLUMNS]
        same(out[4 * MOST + i : 4 * MOST + end], torch.full_like(want, torch.nan) if failed else want)
    assert not out[4 * MOST - 2048 : 4 * MOST].any()


@pytest.fixture(params=["pointers", "descriptors"])
def config(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TileConfig:
    """How slots and w are loaded; one size of tiles for both."""
    fixed = TileConfig(64, 64, 64, 2, 4, 1)
    monkeypatch.setattr(tiles, "matmul_config", lambda *args: fixed)
    if request.param == "descriptors":
        monkeypatch.setattr("tests.helpers.virtual_ranks.ARCHITECTURE", 90)
    return fixed


@pytest.mark.parametrize("failed", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_gather_of_rows_reads_a_full_slot(failed: bool, config: TileConfig) -> None:
    """The last element of the result lies behind 2^34, and the last chunk's rows behind 2^30 in the slot."""
    ranks, n = ranks_with(failed), 1 << 12
    exchange = shapes.all_gather_matmul((TALL, K), ((K, n),), 0, 2)
    (spans,) = exchange.rounds(MOST)
    chunks = slot_of(ranks[0], EPOCH, DTYPE)[: 2 * TALL * K].view(2, TALL, K)
    last = (TALL - 1) // 64 * 64
    for src in range(2):
        chunks[src, :64], chunks[src, last:] = integers(64, K) + src, integers(TALL - last, K) - src
    w, out = integers(K, n), sparse(2 * TALL * n, DTYPE).view(2, TALL, n)
    with only_programs(of_both_halves):
        launch_now.gather_matmul(out.view(-1, n), w, None, spans, ranks[0], FINGERPRINT, end_round=True)
    for src in range(2):
        for rows, columns in ((slice(0, 64), slice(0, 64)), (slice(last, TALL), slice(n - 64, n))):
            want = chunks[src, rows].float() @ w[:, columns].float()
            same(out[src, rows, columns], torch.full_like(want, torch.nan) if failed else want)
        assert not out[src, 64:192].any() and not out[src, last - 128 : last].any()


def test_an_unpack_writes_rows_of_three_ranks() -> None:
    """What rank 2 has sent goes behind 2^31, twice as far as rank 1's, whose place fits 32 bits."""
    num_rows, length = (1 << 10) + 1, 1 << 20
    ranks = large_ranks(3, 3 * length * 2)
    spans = shapes.all_gather_matmul((num_rows, length), ((length, 1),), 0, 3).rounds(length)[-1]
    signalled(ranks[0], EPOCH, FINGERPRINT)
    sent = slot_of(ranks[0], EPOCH, DTYPE)[: 3 * length].view(3, length)
    sent[:, -1024:] = integers(3, 1024)
    out = sparse(3 * num_rows * length, DTYPE).view(3, num_rows, length)
    with only_programs(lambda num_tiles: [i * num_tiles // 3 + of for i in range(3) for of in (0, num_tiles // 3 - 1)]):
        launch_now.unpack(out.view(-1, length), spans, ranks[0], FINGERPRINT)
    same(out[:, -1], sent)
    assert not out[:, -2].any() and not out[:, 0].any()


RUN = 96  # elements; a tile of a copy has 8 such runs
NUM_RUNS = MOST // RUN


def test_a_pack_reads_short_runs_where_they_lie() -> None:
    """Each row has a run for each rank. Those of round 5 begin behind 2^33 elements."""
    ranks, x = ranks_with(), sparse(5 * NUM_RUNS * 2 * RUN, DTYPE).view(-1, 2, RUN)
    last = (NUM_RUNS - 1) // 8 * 8
    x[-NUM_RUNS:][:8], x[-NUM_RUNS + last :] = integers(8, 2, RUN), integers(NUM_RUNS - last, 2, RUN) + 1
    exchange = shapes.all_to_all_matmul((5 * NUM_RUNS, 2 * RUN), (RUN, 1), 0, 1, 2)
    with only_programs(first_and_last):
        launch_now.pack(x.view(-1, 2 * RUN), exchange.rounds(NUM_RUNS * RUN)[-1], ranks[1], FINGERPRINT)
    for dst in range(2):
        chunk = slot_of(ranks[dst], EPOCH, DTYPE)[NUM_RUNS * RUN : 2 * NUM_RUNS * RUN].view(-1, RUN)
        same(chunk[:8], x[-NUM_RUNS:, dst][:8])
        same(chunk[last:], x[-NUM_RUNS + last :, dst])


@pytest.mark.parametrize("failed", [False, True])
def test_a_result_that_may_be_wrong_is_poisoned_to_its_end(failed: bool) -> None:
    """The first and the last block of one program run."""
    from fusedcomm.kernels.triton import handshake

    def first_and_last_block(start: int, end: Tensor, step: int) -> list[int]:
        return [start, (int(end) - 1) // step * step] if int(end) else []

    ranks, out = ranks_with(failed), sparse((1 << 32) + 5, DTYPE)
    with mock.patch.object(handshake, "range", first_and_last_block, create=True):
        launch_now.finish(out, ranks[0], FINGERPRINT, end_round=True)
    for part in (out[:1024], out[1 << 32 :]):
        assert bool(part.isnan().all()) == failed
    assert not out[1024:2048].any() and not out[(1 << 32) - 1024 : 1 << 32].any()


def test_an_overflow_is_seen() -> None:
    """Negative control: the offsets of one row's push, which wrap behind its mask."""
    x, w, ranks = integers(1, 5), sparse(5 * 2 * MOST, DTYPE).view(5, 2 * MOST), ranks_with()
    (spans,) = shapes.matmul_all_to_all(x.shape, w.shape, None, 0, 1, 2).rounds(MOST)
    with only_programs(of_both_halves), pytest.raises(Exception, match="overflow"):
        launch_now.push(x, w, None, spans, ranks[1], FINGERPRINT)


# Indices beyond 32 bits: strides near 2^31 and 2^32, and results of more elements.
INNER, OUTER, FEW_ROWS = 5, 7, 6
REACH = [2**31 - 64, 2**31 + 64, 2**32 + 64]  # index of w's last row or column


def far_apart(values: Tensor, reach: int, transposed: bool) -> Tensor:
    """``values`` with its rows, or transposed its columns, so far apart that the last begins at ``reach``."""
    long, short = values.shape if not transposed else values.shape[::-1]
    step = -(-reach // (long - 1))
    strides = (1, step) if transposed else (step, 1)
    w = sparse((long - 1) * step + short).as_strided(values.shape, strides)
    return w.copy_(values)


def batches_apart(values: Tensor, reach: int) -> Tensor:
    """Three of ``values`` with the matrices so far apart that the last begins at ``reach``."""
    w = sparse(reach + 2 * INNER * OUTER).as_strided(values.shape, (reach // 2, OUTER, 1))
    return w.copy_(values)


LAYOUTS: dict[str, tuple[Callable[[Tensor, int], Tensor], tuple[int, ...]]] = {  # of w, and its batches
    "rows apart": (partial(far_apart, transposed=False), ()),
    "columns apart": (partial(far_apart, transposed=True), ()),
    "batches apart": (batches_apart, (3,)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reach", REACH)
@pytest.mark.parametrize("gathers", [False, True])
def test_w_is_read_where_it_lies(gathers: bool, reach: int, layout: str) -> None:
    place, batches = LAYOUTS[layout]
    x, values = integers(*batches, FEW_ROWS, INNER).float(), integers(*batches, INNER, OUTER).float()
    push = shapes.matmul_all_to_all(x.shape, values.shape, None, 0, 1, 1)
    exchange = shapes.all_gather_matmul(x.shape, (values.shape,), len(batches), 1) if gathers else push
    (rank,), (spans,) = virtual_ranks(1, exchange.chunk_numel * 4), exchange.rounds(1 << 62)
    out = torch.full((*batches, FEW_ROWS, OUTER), torch.nan)
    if gathers:
        launch_now.pack(x, spans, rank, FINGERPRINT)
        launch_now.gather_matmul(out, place(values, reach), None, spans, rank, FINGERPRINT, end_round=True)
    else:
        launch_now.push(x, place(values, reach), None, spans, rank, FINGERPRINT)
        launch_now.unpack(out, spans, rank, FINGERPRINT)
    torch.testing.assert_close(out, x @ values, rtol=0, atol=0)
