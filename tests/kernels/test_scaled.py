"""Float8 operands with scales in the push and gather kernels, in Triton's interpreter, against float64."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fusedcomm.bench import launch_now
from fusedcomm.plan import chunked, fused, launches, scaled_programs, tiles
from fusedcomm.plan.builder import Builder, layout_of
from fusedcomm.plan.geometry import packed_gathers, shapes
from fusedcomm.plan.scaled_programs import OfPayload
from fusedcomm.plan.scaling import Payload, Scaled
from fusedcomm.plan.schedule import Launch, Multiply
from fusedcomm.plan.tiles import TileConfig
from tests.helpers.tiers import nightly_but
from tests.helpers.virtual_ranks import FINGERPRINT, assert_results, by_tma, guarded, virtual_ranks

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PAIRS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]
RECIPES = ["tensor", "rows", "blocks"]


class Operands(NamedTuple):
    """x [M, K] and w [K, N] of one rank, K contiguous, and their products with their scales."""

    x: Tensor
    w: Tensor
    scale_x: Tensor
    scale_w: Tensor
    exact_x: Tensor
    exact_w: Tensor


def integers(seed: int, *shape: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).double()


def operands(seed: int, recipe: str, m: int, k: int, n: int, pair: tuple[torch.dtype, torch.dtype]) -> Operands:
    """Small integers, and scales that are powers of two: every sum is exact."""
    blocks = -(-k // 128), -(-n // 128)
    of_x, of_w = {"tensor": ((1, 1), (1, 1)), "rows": ((m, 1), (1, n)), "blocks": ((m, blocks[0]), blocks)}[recipe]
    x, w = integers(seed, m, k), integers(seed + 1, n, k).mT
    scale_x, scale_w = 2 ** integers(seed + 2, *of_x), 2 ** integers(seed + 3, *of_w)
    each_x, each_w = scale_x, scale_w
    if recipe == "blocks":
        each_x = scale_x.repeat_interleave(128, 1)[:, :k]
        each_w = scale_w.repeat_interleave(128, 0)[:k].repeat_interleave(128, 1)[:, :n]
    return Operands(x.to(pair[0]), w.to(pair[1]), scale_x.float(), scale_w.float(), x * each_x, w * each_w)


def push(recipe: str, size: int, m: int, k: int, n: int, out: torch.dtype, pair: tuple[torch.dtype, ...]) -> None:
    exchange = shapes.matmul_all_to_all((m, k), (k, n), None, 0, 1, size)
    (spans,) = exchange.rounds(1 << 40)
    ranks = virtual_ranks(size, size * exchange.chunk_numel * out.itemsize)
    inputs = [operands(10 * r, recipe, m, k, n, pair) for r in range(size)]
    bias = integers(99, n)

    def program(s: Builder, x: Tensor, w: Tensor, scale_x: Tensor, scale_w: Tensor, bias: Tensor) -> None:
        launches.push(s, Scaled(x, scale_x, out), Scaled(w, scale_w, out, fast=recipe != "tensor"), bias, spans)

    for rank, each in zip(ranks, inputs, strict=True):
        launch_now.prepared(program, rank, FINGERPRINT, *each[:4], bias.to(out))()
    wanted = [each.exact_x @ each.exact_w + bias for each in inputs]
    for rank in ranks:
        got = guarded(exchange.out_shape, out)
        launch_now.unpack(got[0], spans, rank, FINGERPRINT)
        assert_results([got], [torch.cat([y.chunk(size, 1)[rank.rank] for y in wanted]).to(out)])
        rank.assert_idle(1)


def gather(
    recipe: str, size: int, m: int, k: int, n: int, out: torch.dtype, pair: tuple[torch.dtype, ...], dim: int = 0
) -> None:
    """``k``: of one rank's x, which is packed with its scales; each rank's w is another."""
    whole_k, block = k * (size if dim else 1), 128 if recipe == "blocks" else 0
    exchange = packed_gathers.all_gather_matmul((m, k), [(whole_k, n)], dim, size, block=block)
    (spans,) = exchange.rounds(1 << 40)
    ranks = virtual_ranks(size, size * exchange.chunk_numel)
    payload = Payload(pair[0], (k,) * (size if dim else 1), block)
    inputs = [operands(10 * r, recipe, m, k, n, pair) for r in range(size)]
    weights = [operands(10 * r + 5, recipe, m, whole_k, n, pair) for r in range(size)]
    bias = integers(99, n)

    def program(s: Builder, got: Tensor, w: Tensor, scale_w: Tensor, bias: Tensor) -> None:
        launches.gather_matmul(
            s, got, OfPayload(w, scale_w, out, payload, fast=recipe != "tensor"), bias, spans, end_round=True
        )

    for rank, each in zip(ranks, inputs, strict=True):
        rows = torch.full(exchange.packed[0], 0xFF, dtype=torch.uint8)
        for to, source in payload.packed(rows, each.x, each.scale_x, (k,)):
            to.copy_(source)
        launch_now.pack(rows, spans, rank, FINGERPRINT)
    gathered = torch.cat([each.exact_x for each in inputs], dim)
    for rank, each in zip(ranks, weights, strict=True):
        got = guarded(exchange.out_shape, out)
        launch_now.prepared(program, rank, FINGERPRINT, got[0], each.w, each.scale_w, bias.to(out))()
        assert_results([got], [(gathered @ each.exact_w + bias).to(out)])
        rank.assert_idle(1)


SIZES = {"push": (19, 144, 256), "gather": (19, 144, 150), "gather K": (19, 128, 150)}
CALLS = {"push": push, "gather": gather, "gather K": lambda *args: gather(*args, dim=1)}
ALL = [(kind, recipe) for kind in CALLS for recipe in RECIPES]
OFTEN = [("push", "rows"), ("push", "blocks"), ("gather", "tensor"), ("gather", "blocks"), ("gather K", "rows")]


@pytest.mark.parametrize(("kind", "recipe"), nightly_but(OFTEN, ALL))
def test_by_tensor_descriptor(kind: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    described = by_tma(monkeypatch, "describe_w", TileConfig(32, 64, 32, 2, 4, 1, True))
    i = ALL.index((kind, recipe))
    CALLS[kind](recipe, 2, *SIZES[kind], (torch.bfloat16, torch.float32)[i % 2], PAIRS[i % 3])
    assert len(described) == 2


@pytest.mark.parametrize(("kind", "recipe"), nightly_but([("gather K", "rows")], ALL))
def test_by_pointer(kind: str, recipe: str) -> None:
    """K and N of odd sizes."""
    m, k, n, size = *SIZES[kind], 4 if recipe == "tensor" else 3
    if recipe == "blocks":  # which no rank's part cuts
        sizes = m, k - (5 if kind == "gather" else 0), 384 if kind == "push" else n - 1
    else:
        sizes = m, k - 77, 41 * size
    CALLS[kind](recipe, size, *sizes, torch.float16, PAIRS[RECIPES.index(recipe)])


@pytest.mark.parametrize(("k", "launched"), [(128, True), (96, False)])
def test_a_block_of_k_comes_from_one_source(k: int, launched: bool) -> None:
    """x alone, with the scales of the caller, may be cut inside a block: `chunked` takes it."""
    exchange = shapes.all_gather_matmul((8, k), [(2 * k, 16)], 1, 2)
    rank = virtual_ranks(2, 2 * exchange.chunk_numel)[0]
    given = operands(0, "blocks", 8, 2 * k, 16, PAIRS[0])
    tensors = given.x[:, :k].contiguous(), *given[1:4]
    s = Builder(rank.memory_facts(), rank.device_facts(), [layout_of(t) for t in tensors])
    x, w, scale_x, scale_w = s.inputs
    fused.gather_matmul(s, exchange, x, [OfPayload(w, scale_w, torch.bfloat16, None, scale_x)], [None], False)
    works = [step.work for step in s.finish().steps]
    assert any(isinstance(work, Launch) and "gather_matmul" in work.kernel for work in works) == launched


@pytest.mark.parametrize("kind", ["push", "gather"])
def test_a_tile_has_one_scale_of_columns(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """K is one block, and sm_90's best tile for sums of few bits is two blocks wide."""
    monkeypatch.setattr("tests.helpers.virtual_ranks.ARCHITECTURE", 90)
    CALLS[kind]("blocks", 2, 384, 128, 512, torch.bfloat16, PAIRS[0])


def test_older_gpus_are_refused_with_a_reason() -> None:
    assert "sm_90 or sm_100" in str(tiles.refuses_scaled(80))
    assert [tiles.refuses_scaled(each) for each in (0, 90, 100)] == [None] * 3


def test_a_failed_gather_is_nan() -> None:
    """Zeros of rank 0 are there, those of rank 1 never come."""
    exchange = packed_gathers.all_gather_matmul((4, 32), [(32, 16)], 0, 2)
    (spans,) = exchange.rounds(1 << 40)
    rank = virtual_ranks(2, 2 * exchange.chunk_numel, timeout_s=0.2)[0]
    launch_now.pack(torch.zeros(exchange.packed[0], dtype=torch.uint8), spans, rank, FINGERPRINT)

    def program(s: Builder, got: Tensor, w: Tensor, scale_w: Tensor) -> None:
        weight = OfPayload(w, scale_w, got.dtype, Payload(E4M3, (32,), 0))
        launches.gather_matmul(s, got, weight, None, spans, end_round=True)

    got, w = torch.zeros(exchange.out_shape), torch.zeros(16, 32).to(E4M3).mT
    launch_now.prepared(program, rank, FINGERPRINT, got, w, torch.ones(1, 16))()
    assert got.isnan().all()
    rank.assert_idle(1, failed=True)


@pytest.mark.parametrize("fast", [False, True])
def test_chunks_are_multiplied_as_fast_as_the_call_allows(fast: bool) -> None:
    exchange = shapes.matmul_all_to_all((8, 16), (16, 32), None, 0, 1, 2)
    rank, given = virtual_ranks(2, 4 * exchange.chunk_numel)[0], operands(0, "rows", 8, 16, 32, PAIRS[0])
    s = Builder(rank.memory_facts(), rank.device_facts(), [layout_of(t) for t in given[:4]])
    x, w, *scales = s.inputs
    scaled_programs.push(chunked.push_matmul, s, exchange, x, w, scales, None, out_dtype=torch.bfloat16, fast=fast)
    multiplied = [step.work for step in s.finish().steps if isinstance(step.work, Multiply)]
    assert multiplied and all(work.fast == fast for work in multiplied)
