"""Where a dtype ends: NaN, infinities, zeros of both signs, subnormals, the largest numbers.

What algorithms have in common there is in docs/ops.md. Each row of x has one number of interest in it, times 1: every
element of a matmul's result is that number, so all that differs is how it is moved and added.
"""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import fusedcomm
from fusedcomm.run.add_in_order import add_in_order
from tests.helpers.groups import ALGORITHMS, DTYPES, empty_is_nan
from tests.helpers.on_ranks import on_ranks
from tests.helpers.tiers import nightly_but

ROWS, COLUMNS = 96, 12
NAN, INF = math.nan, math.inf


def specials(dtype: torch.dtype) -> Tensor:
    info = torch.finfo(dtype)
    limits = [info.max, -info.max, info.max / 2]
    if (
        dtype != torch.bfloat16
    ):  # the CPU's bfloat16 matmul takes subnormals as 0, and Triton's interpreter misreads them
        limits += [info.tiny, -info.tiny, info.tiny / 4, -info.tiny / 4, info.smallest_normal]
    return torch.tensor([NAN, INF, -INF, -0.0, 0.0, 1, -1, 1 / 3, 3, *limits], dtype=torch.float64).to(dtype)


def column(rank: int, dtype: torch.dtype, values: Tensor | None = None) -> Tensor:
    """[ROWS, 1]"""
    values = specials(dtype) if values is None else values
    generator = torch.Generator().manual_seed(rank)
    return values[torch.randint(len(values), (ROWS, 1), generator=generator)]


def operands(numbers: Tensor, num_k: int) -> tuple[Tensor, Tensor]:
    """x and w with ``x @ w == numbers.expand(-1, COLUMNS)``, where K is ``num_k``."""
    x = torch.cat([numbers, torch.zeros(ROWS, num_k - 1, dtype=numbers.dtype)], 1)
    return x, torch.ones(num_k, COLUMNS, dtype=numbers.dtype)


def assert_same(got: Tensor, want: Tensor) -> None:
    """Equal values, NaN where there is NaN. The sign of a zero is the matmul's own affair."""
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@on_ranks(3)
@pytest.mark.parametrize("algorithm", nightly_but(["unfused", "chunked", "pipelined"], ALGORITHMS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_moved_stays_as_it_is(rank: int, dtype: torch.dtype, algorithm: str) -> None:
    size = dist.get_world_size()
    columns = [column(r, dtype) for r in range(size)]
    block = ROWS // size
    with fusedcomm.force_algorithm(algorithm, strict=True), empty_is_nan():
        for num_k in (1, 6):  # an odd K is padded by some CPUs, with what lies behind it times 0
            x, w = operands(columns[rank], num_k)
            gathered = torch.cat(columns)
            assert_same(fusedcomm.all_gather_matmul(x, w, 0), gathered.expand(-1, COLUMNS))
            rows = fusedcomm.matmul_all_to_all(x, w, 1, 0)
            mine = [each[rank * block : (rank + 1) * block] for each in columns]
            assert_same(rows, torch.cat([each.expand(-1, COLUMNS) for each in mine], 1))
            cut = fusedcomm.all_to_all_matmul(columns[rank].expand(-1, size), w[:1], 0, 1)
            assert_same(cut, gathered.expand(-1, COLUMNS))


def sum_in_order(parts: list[Tensor], reduce_op: str, bias: Tensor | None) -> Tensor:
    """In float32, in rank order, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    total = total / len(parts) if reduce_op == "avg" else total
    return (total if bias is None else total + bias.float()).to(parts[0].dtype)


@on_ranks(3)
@pytest.mark.parametrize("algorithm", nightly_but(["chunked", "pipelined"], ALGORITHMS[1:]))
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_in_float32_and_rank_order(rank: int, dtype: torch.dtype, algorithm: str) -> None:
    size = dist.get_world_size()
    columns = [column(r, dtype) for r in range(size)]
    x, w = operands(columns[rank], 1)
    bias = specials(dtype)[torch.arange(COLUMNS) % len(specials(dtype))]
    with fusedcomm.force_algorithm(algorithm, strict=True), empty_is_nan():
        for reduce_op in ("sum", "avg"):
            for each in (None, bias):
                want = sum_in_order([c.expand(-1, COLUMNS) for c in columns], reduce_op, each)
                assert_same(fusedcomm.matmul_all_reduce(x, w, reduce_op=reduce_op, bias=each), want)
                got = fusedcomm.matmul_reduce_scatter(x, w, 0, reduce_op=reduce_op, bias=each)
                assert_same(got, want.chunk(size)[rank])


def assert_near_sum(got: Tensor, parts: list[Tensor], reduce_op: str) -> None:
    """What is true of a sum in any order and with roundings between, as far as none of them overflows."""
    dtype, divisor = got.dtype, len(parts) if reduce_op == "avg" else 1
    doubles = torch.stack([part.double() for part in parts]) / divisor
    want, info = doubles.sum(0), torch.finfo(dtype)
    assert got[want.isnan()].isnan().all()
    assert torch.equal(got[want.isinf()].double(), want[want.isinf()])
    safe = doubles.abs().sum(0) <= info.max
    assert safe.any()
    bound = len(parts) * (info.eps * doubles.abs().sum(0) + info.smallest_normal * info.eps)
    assert ((got.double() - want).abs() <= bound)[safe].all()


@on_ranks(3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_the_backend_are_sums(rank: int, dtype: torch.dtype) -> None:
    """`unfused`, and DTensors, whose collectives the backend adds up, too."""
    size = dist.get_world_size()
    columns = [column(r, dtype) for r in range(size)]
    x, w = operands(columns[rank], 1)
    parts = [c.expand(-1, COLUMNS) for c in columns]
    mesh = dist.init_device_mesh("cpu", (size,))
    for reduce_op in ("sum", "avg"):
        with fusedcomm.force_algorithm("unfused"):
            assert_near_sum(fusedcomm.matmul_all_reduce(x, w, reduce_op=reduce_op), parts, reduce_op)
        partial = DTensor.from_local(x @ w, mesh, [Partial(reduce_op)], run_check=False)
        assert_near_sum(fusedcomm.redistribute(partial, mesh, [Replicate()]).to_local(), parts, reduce_op)
        shards = fusedcomm.redistribute(partial[:-1], mesh, [Shard(0)])  # uneven: ranks add them up themselves
        assert_near_sum(shards.full_tensor(), [part[:-1] for part in parts], reduce_op)


@on_ranks(3)
@pytest.mark.parametrize("algorithm", nightly_but(["unfused", "chunked", "pipelined"], ALGORITHMS))
def test_an_average_of_numbers_is_a_number(rank: int, algorithm: str) -> None:
    """Their sum need not be one: it would be infinite in float16. The parts of `unfused` are rounded, some upwards."""
    dtype = torch.float16
    largest = torch.finfo(dtype).max * (1 - 2 * torch.finfo(dtype).eps)
    values = torch.tensor([largest, largest / 2, largest / 3], dtype=dtype)
    size = dist.get_world_size()
    columns = [column(r, dtype, values) for r in range(size)]
    x, w = operands(columns[rank], 1)
    want = torch.stack([c.double() for c in columns]).mean(0).expand(-1, COLUMNS)
    with fusedcomm.force_algorithm(algorithm, strict=True):
        assert fusedcomm.matmul_all_reduce(x, w).isinf().any()  # so it would be seen
        got = fusedcomm.matmul_all_reduce(x, w, reduce_op="avg")
        rows = fusedcomm.matmul_reduce_scatter(x, w, 0, reduce_op="avg")
    torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=0)
    torch.testing.assert_close(rows.double(), want.chunk(size)[rank], rtol=2e-3, atol=0)


def test_a_sum_of_negative_zeros_is_one() -> None:
    for num_parts in (1, 2, 3, 5):
        for options in ({"scale": 1}, {"scale": 0.5}, {"scale": 1, "bias": torch.tensor([-0.0])}):
            out = torch.full((4,), NAN)
            add_in_order(out, [torch.full((4,), -0.0)] * num_parts, **{"bias": None, **options})  # type: ignore[arg-type]
            assert torch.equal(out.view(torch.int32), torch.full((4,), -0.0).view(torch.int32))
