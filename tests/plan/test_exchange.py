"""Geometry alone, in one process: every rank's chunks are computed, laid into slots and unpacked; no communication."""

import itertools
import math
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor

from fusedcomm.kernels.triton.bundles import Span
from fusedcomm.plan.builder import Builder
from fusedcomm.plan.chunk_matmul import PushedMatmul
from fusedcomm.plan.geometry import norm, shapes
from fusedcomm.plan.geometry.cut import Splits
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.plan.geometry.spans import Range, RoundSpans, block_shape, span
from fusedcomm.plan.routing import Routing, counts_of, pack
from tests.helpers.op_problems import ALL_PROBLEMS
from tests.helpers.problems import Problem, integers
from tests.helpers.virtual_ranks import run_now


def test_span_of_every_small_tensor() -> None:
    """For all shapes up to 3 dims of 1 to 4, and every split, the formula agrees with indexing."""
    for ndim in (1, 2, 3):
        for sizes in itertools.product((1, 2, 4), repeat=ndim):
            for dim in [d for d in range(ndim) if sizes[d] % 2 == 0]:
                index = torch.arange(math.prod(sizes)).view(sizes)
                box = [Range(0, size) for size in block_shape(sizes, dim, 2)]
                s = span(sizes, dim, sizes[dim] // 2, box)
                for peer in range(2):
                    want = index.chunk(2, dim)[peer].flatten()
                    got = [
                        s.start + peer * s.peer_stride + i // s.inner * s.outer_stride + i % s.inner
                        for i in range(s.size)
                    ]
                    assert got == want.tolist()
                    assert s.view(index.view(-1), 0, peer).flatten().tolist() == want.tolist()


def test_many_rows_of_a_norm_are_not_cut() -> None:
    for k, w in ((4096, None), (8, (8, 4096))):
        assert [norm.two_shot((rows, k), w, 0.0, 4).split_dim for rows in (512, 256, 64)] == [0, 1, 0]
    assert shapes.matmul_all_reduce((512, 8), (8, 4096), "sum", 4).split_dim == 1  # its cut is that of many


def test_long_interleaved_runs_are_multiplied_in_place() -> None:
    """Runs of at least 128 rows or columns take the branch without gathering. Both branches give the same."""
    for shape, out_shape, gather_dim, scatter_dim in [((2, 512, 8), (4,), 0, 1), ((3, 8), (3, 512), 0, 2)]:
        x, w = (torch.randint(-4, 5, shape).float(), torch.randint(-4, 5, (8, math.prod(out_shape))).float())
        exchange = shapes.matmul_all_to_all(x.shape, w.shape, out_shape, gather_dim, scatter_dim, 2)
        y = (x @ w).view(*shape[:-1], *out_shape)
        for spans in exchange.rounds(exchange.chunk_numel):
            for dst_rank in range(2):
                chunk = torch.full((exchange.chunk_numel,), float("nan"))
                run_now(partial(multiply, exchange, spans, dst_rank), x, w, chunk)
                torch.testing.assert_close(chunk.view(exchange.block), y.chunk(2, scatter_dim)[dst_rank])


def multiply(exchange: Exchange, spans: RoundSpans, dst_rank: int, s: Builder, *tensors: torch.Tensor) -> None:
    x, w, chunk = tensors
    PushedMatmul(s, x, w, None, exchange)(spans, dst_rank, chunk)


def indices(span: Span, peer: int) -> list[int]:
    return [span.first(peer) + i // span.inner * span.outer_stride + i % span.inner for i in range(span.size)]


@pytest.mark.parametrize("problem", ALL_PROBLEMS, ids=str)
def test_chunks_cover_every_element_exactly_once(problem: Problem) -> None:
    """All rounds and peers together cover the matmul's tensor, what is sent and what arrives."""
    for group_size, divisor in ((1, 3), (2, 1), (2, 7), (3, 3), (4, 1), (4, 3)):
        exchange = problem.exchange(*integers(problem, 0, group_size)[:2], group_size)
        max_chunk_numel = max(exchange.row_numel, exchange.chunk_numel // divisor, 1)
        matmul: list[tuple[int, ...]] = []
        packed: list[int] = []
        unpacked: list[int] = []
        for spans in exchange.rounds(max_chunk_numel):
            assert spans.chunk_numel <= max_chunk_numel
            assert spans.batches.size * spans.rows.size * spans.columns.size == spans.chunk_numel == spans.pack.size
            for peer in range(group_size):
                parts = [indices(part, peer) for part in (spans.batches, spans.rows, spans.columns)]
                matmul += itertools.product(*parts)
                if peer == 0 or exchange.packed[1] is not None:  # else every peer is sent the same
                    packed += indices(spans.pack, peer)
                if peer == 0 or exchange.unpacked[1] is not None:  # else what arrives is added up, in one place
                    unpacked += indices(spans.unpack, peer)
        sizes = [exchange.num_batches, exchange.num_rows, math.prod(exchange.shape[exchange.num_lead :])]
        assert sorted(matmul) == list(itertools.product(*map(range, sizes)))
        assert sorted(packed) == list(range(math.prod(exchange.packed[0])))
        assert sorted(unpacked) == list(range(math.prod(exchange.unpacked[0])))


@pytest.mark.parametrize("parts", [(2, 1), (2, 0), (1, 1), (3, 1, 0), (2, 3)], ids=str)
def test_ranks_find_one_k_where_they_say_that_they_tell(parts: tuple[int, ...]) -> None:
    """For all dims, sizes and Ks: ranks of all parts find the same dims of K, or all say that they may not."""
    size, starts, found = len(parts), tuple(itertools.accumulate(parts[:-1], initial=0)), set[bool]()
    shapes_of_one = itertools.product((1, 2, 3), repeat=4)
    for whole, dims, num_lead in itertools.product(shapes_of_one, itertools.permutations(range(4), 2), (1, 2, 3)):
        seen = set()
        for rank, part in enumerate(parts):
            x, exchanged = [*whole], [*whole]
            x[dims[1]], exchanged[dims[1]], exchanged[dims[0]] = sum(parts), part, size * x[dims[0]]
            splits = Splits(scatter_starts=starts, scatter_lengths=parts, rank=rank)
            exchange = shapes.all_to_all_matmul(x, (math.prod(exchanged[num_lead:]), 5), *dims, size, splits)
            seen.add((exchange.tells_k, exchange.tells_k and exchange.num_lead))
        assert len(seen) == 1, (whole, dims, num_lead, seen)
        found.add(seen.pop()[0])
    assert found == {True} | ({False} if min(parts) < 2 and max(parts) > 1 else set())


def test_many_rounds_are_not_kept() -> None:
    """Exchanges outlive their calls, and thousands of rounds have megabytes of Spans."""
    x, w = torch.empty(600, 4, device="meta"), torch.empty(4, 2, device="meta")
    exchange = Problem("rounds", tuple(x.shape), 2, 0, 1).exchange(x, w, 2)
    few, many = exchange.row_numel * 3, exchange.row_numel
    assert len(exchange.rounds(few)) == 200 and exchange.rounds(few) is exchange.rounds(few)
    assert len(exchange.rounds(many)) == 600 and exchange.rounds(many) is not exchange.rounds(many)


# A routing is made on its device: nothing comes from the host or goes there.
def test_nothing_waits_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A meta tensor has no values: whoever asks for one gets an error, as the control does."""
    monkeypatch.setattr(Tensor, "new_tensor", mock.Mock(side_effect=AssertionError))  # a copy of the host's numbers
    ids = torch.empty(24, dtype=torch.int64, device="meta")
    packed = pack(ids, 2, counts_of(ids, 4).repeat(2, 1), 1, 16, 4)
    with pytest.raises(NotImplementedError):
        Routing(packed, 1, 2, 24).runs(0, 1)
