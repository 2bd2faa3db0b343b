"""torch's scaled matmuls beside collectives become the scaled ops: on unchanged programs, and on ranks that differ."""

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

import fusedcomm.compile
from fusedcomm.compile.graph.sequence import Sequence
from fusedcomm.compile.graph.split_cat import argument_of
from fusedcomm.compile.reports import CompileReport
from fusedcomm.memory.consent import OTHER, Answer
from tests.helpers.block_checks import interpreted
from tests.helpers.graphs import collectives_of, recorded_graphs, rewritten, targets
from tests.helpers.merge_world import fake_world
from tests.helpers.on_ranks import on_ranks
from tests.helpers.program_parts import all_gather, reduce_scatter, world

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
B, T, K, N = 2, 4, 16, 8  # T tokens per rank
Program = Callable[..., Any]
mm = torch._scaled_mm


def gathered(t: Tensor, dim: int = 0) -> Tensor:
    """As DTensor and torch's float8 training send float8."""
    rows = all_gather(t.view(torch.uint8), 0, world())
    if dim == 0:
        return rows.view(t.dtype)
    return torch.cat([each.view(torch.uint8) for each in rows.chunk(2)], dim).view(t.dtype)


def gathered_float8(t: Tensor, dim: int = 0) -> Tensor:
    """Traced as it is; gloo can send the bytes alone."""
    return all_gather(t, dim, world()) if isinstance(t, torch._subclasses.FakeTensor) else gathered(t, dim)


def exchanged(t: Tensor) -> Tensor:
    dtype = t.dtype if t.dtype not in (E4M3, E5M2) or isinstance(t, torch._subclasses.FakeTensor) else torch.uint8
    return funcol.wait_tensor(funcol.all_to_all_single(t.view(dtype), None, None, world())).view(t.dtype)


def flat_mm(x: Tensor, w: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype = BF16, **options: Any) -> Tensor:
    return mm(x.flatten(0, -2), w, a, b, out_dtype=dtype, **options).view(*x.shape[:-1], -1)


def of_gathered(dim: int, gather: Callable[..., Tensor] = gathered, **options: Any) -> Program:
    return lambda x, w, a, b: flat_mm(gather(x, dim), w, a, b, **options)


def scattered(dim: int, reduce_op: str = "sum", **options: Any) -> Program:
    return lambda x, w, a, b: reduce_scatter(flat_mm(x, w, a, b, **options), reduce_op, dim, world())


def reshaped(dim: int) -> Program:
    """Scales are reshaped with x, and inverted behind."""

    def program(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        rows = a.reshape(-1, a.shape[-1]).reciprocal()
        y = mm(x.reshape(-1, K), w, rows, b.reciprocal(), out_dtype=torch.float32)
        return reduce_scatter(y.view(*x.shape[:-1], N), "sum", dim, world())

    return program


def sharded(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return mm(gathered(x), w, all_gather(a, 0, world()), b, out_dtype=BF16)


def sharded_at_1(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    scales = all_gather(a, 1, world()).flatten(0, 1)
    return mm(gathered(x, 1).flatten(0, 1), w, scales, b, out_dtype=BF16)


def in_another_order(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Rows of x are by rank, and of their scales by token: these do not travel with them."""
    rows, scales = gathered(x), all_gather(a, 0, world()).view(2, T).t().reshape(-1, 1)
    return mm(rows, w, scales, b, out_dtype=BF16)


def scales_first(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """They are read twice, so that they stay."""
    scales = all_gather(a, 0, world())
    return mm(gathered(x), w, scales, b, out_dtype=BF16), scales.sum()


def read_as_bytes(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    rows = all_gather(x.view(torch.uint8), 0, world())
    y = mm(rows.view(x.dtype), w, a, b, out_dtype=BF16)
    return y, rows.long().sum(), rows.view(x.dtype).float() + 1


def several(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    rows, bias = gathered(x), torch.arange(N, dtype=torch.float32)
    return [mm(rows, w, a, b * i, bias if i == 2 else None, None, torch.float32) for i in (1, 2)]


def with_recipes(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    rows = ScalingType.RowWise
    return scaled_mm(gathered_float8(x), w, a, rows, b, rows, output_dtype=torch.float16, use_fast_accum=True)


def reduced(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    bias = torch.arange(N, dtype=torch.float32)
    return funcol.all_reduce(flat_mm(x, w, a, b, torch.float32, bias=bias), "sum", world())


def sent_behind(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    y = flat_mm(x, w, a, b).unflatten(-1, (2, -1)).movedim(-2, 0).contiguous()
    return exchanged(y).movedim(0, 1).flatten(1, 2)


def k_sent_before(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return mm(exchanged(x).unflatten(0, (2, -1)).movedim(0, 1).flatten(1), w, a, b, out_dtype=BF16)


X2, X3 = (T, K), (B, T, K)
AG, RS = "scaled_all_gather_matmul", "scaled_matmul_reduce_scatter"
# shape of x, K of w, and rows of row-wise scales, or None; the first eight are torch's
PROGRAMS: dict[str, tuple[Program, str, tuple[int, ...], int, tuple[int, ...] | None]] = {
    "bytes gathered": (of_gathered(0), AG, X2, K, None),
    "bytes gathered, batches": (of_gathered(0), AG, X3, K, None),
    "bytes gathered at 1": (of_gathered(1), AG, X3, K, None),
    "scattered": (scattered(0), RS, X2, K, None),
    "scattered batches": (scattered(0), RS, X3, K, None),
    "scattered at 1": (scattered(1), RS, X3, K, None),
    "reshaped": (reshaped(0), RS, X3, K, (B, T, 1)),
    "reshaped, scattered at 1": (reshaped(1), RS, X3, K, (B, T, 1)),
    "last dim gathered": (of_gathered(-1), AG, X2, 2 * K, (T, 1)),
    "last dim scattered": (scattered(-1, "avg"), RS, X2, K, (T, 1)),
    "float8 gathered at 1": (of_gathered(1, gathered_float8, use_fast_accum=True), AG, X3, K, (2 * B * T, 1)),
    "sharded": (sharded, AG, X2, K, (T, 1)),
    "sharded at 1": (sharded_at_1, AG, X3, K, (B, T, 1)),
    "in another order": (in_another_order, f"all_gather {AG}", X2, K, (T, 1)),
    "scales first": (scales_first, f"all_gather {AG}", X2, K, (T, 1)),
    "read as bytes": (read_as_bytes, AG, X2, K, (2 * T, 1)),
    "several": (several, AG, X2, K, (2 * T, 1)),
    "recipes": (with_recipes, AG, X2, K, (2 * T, 1)),
    "reduced": (reduced, "scaled_matmul_all_reduce", X3, K, (B * T, 1)),
    "sent behind": (sent_behind, "scaled_matmul_all_to_all", X2, K, (T, 1)),
    "sent before": (lambda x, w, a, b: flat_mm(exchanged(x), w, a, b), "scaled_all_to_all_matmul", X3, K, (B * T, 1)),
    "K sent before": (k_sent_before, "scaled_all_to_all_matmul", X2, 2 * K, (T // 2, 1)),
}

OF_OWN_ROWS = {"last dim scattered", "sharded", "sharded at 1", "in another order", "scales first", "reduced"}


def arguments(name: str, rank: int, pair: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3)) -> list[Tensor]:
    """Small integers, and scales that are powers of two."""
    _, _, x, k, rows = PROGRAMS[name]
    generator = torch.Generator().manual_seed(rank)
    x8, w8 = (torch.randint(-2, 3, shape, generator=generator).float() for shape in (x, (N, k)))
    shapes = ((), ()) if rows is None else (rows, (1, N))
    scales = [2.0 ** torch.randint(-1, 2, shape, generator=generator) for shape in shapes]
    if rows is not None and name not in OF_OWN_ROWS:
        dist.broadcast(scales[0], 0)  # of all ranks' rows
    return [x8.to(pair[0]), w8.to(pair[1]).mT, *scales]


def passed(program: Program, args: list[Tensor]) -> tuple[Any, list[str], CompileReport]:
    gm, report = rewritten(program, args)
    assert not collectives_of(gm.graph), report
    return gm(*args), targets(gm.graph, "fusedcomm"), report


@on_ranks(2)
def test_values(rank: int) -> None:
    for (name, (program, ops, *_)), pair in zip(
        PROGRAMS.items(), itertools.cycle([(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]), strict=False
    ):
        args = arguments(name, rank, pair if name != "recipes" else (E4M3, E4M3))  # torch's own are not mixed
        got, found, report = passed(program, args)
        assert " ".join(found) == ops, f"{name}: {report}"
        assert all(line.status == "fused" or line.op == "all_gather" for line in report.collectives), name
        torch.testing.assert_close(got, program(*args), rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


def mixed(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    rows = gathered(x)
    return [mm(rows, w, a, b, out_dtype=BF16, use_fast_accum=fast) for fast in (True, False)]


@on_ranks(2)
def test_fast_sums_are_allowed_where_all_matmuls_allow_them(rank: int) -> None:
    for program in (of_gathered(0, use_fast_accum=True), scattered(0, use_fast_accum=True), mixed):
        gm, _ = rewritten(program, arguments("bytes gathered", rank))
        allowed = [argument_of(node, "use_fast_accum") for node in gm.graph.nodes if "fusedcomm" in str(node.target)]
        assert allowed == [program is not mixed]


def without_matmuls(me: int) -> Program:
    """On rank ``me`` nothing that could be fused stands beside the collectives."""

    def product(rows: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
        if dist.get_rank() == me:
            return rows.float().sin() @ w.float() * scales
        return mm(rows, w, scales, b, out_dtype=torch.float32)

    def program(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        scales = all_gather(a, 0, world())
        rows = [(gathered(x), scales), (gathered_float8(x), scales * 2), (exchanged(x), a)]
        ys = [product(x, w, a * i, b) for i in (1, 2)]
        sums = reduce_scatter(ys[0], "sum", 0, world()), funcol.all_reduce(ys[1], "sum", world())
        return [*sums, *(product(each, w, scale, b) for each, scale in rows)]

    return program


@on_ranks(2)
def test_a_rank_without_the_matmuls(rank: int) -> None:
    for me in (2, 0):
        program, args = without_matmuls(me), arguments("sharded", rank, (E5M2, E4M3))
        got, found, report = passed(program, args)
        torch.testing.assert_close(got, program(*args))
        kinds = ["all_gather", "all_gather", "all_gather", "all_to_all", "reduce_scatter", "all_reduce"]
        fused = ["all_gather", AG, AG, "scaled_all_to_all_matmul", RS, "scaled_matmul_all_reduce"]
        assert found == (kinds if rank == me else fused), report
        assert all(line.reason for line in report.collectives if line.status != "fused")


@on_ranks(2)
def test_scales_travel_with_their_rows_by_consent_alone(rank: int) -> None:
    """Rank 1 reads the gathered scales once more."""

    def program(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Any:
        rows, scales = gathered(x), all_gather(a, 0, world())
        return mm(rows, w, scales, b, out_dtype=BF16), scales.sum() if rank else None

    args = arguments("sharded", rank)
    got, found, report = passed(program, args)
    torch.testing.assert_close(got, program(*args), rtol=0, atol=0)
    assert found == ["all_gather", "all_gather"], report
    assert "its matmul waits for a later collective, and not all ranks agreed to it" in report.collectives[0].reason


@on_ranks(2)
def test_compiled(rank: int) -> None:
    """Any number of tokens; w is quantised in the graph."""

    def program(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        w8, one = w.to(E4M3).t(), b.view(-1)[:1]
        y = mm(gathered_float8(x), w8, all_gather(a, 0, world()), b, out_dtype=BF16)
        return y, funcol.all_reduce(mm(x, w8, one, one, out_dtype=BF16), "sum", world())

    x, w, a, b = arguments("sharded", rank)
    with torch.no_grad(), recorded_graphs() as graphs, fusedcomm.compile.enabled() as report:
        compiled = torch.compile(program, fullgraph=True)
        for n in (1, 2):
            args = x.repeat(n, 1), w.mT.float(), a.repeat(n, 1), b
            for each in args[::2]:
                torch._dynamo.mark_dynamic(each, 0)
            torch.testing.assert_close(compiled(*args), program(*args), rtol=0, atol=0)
    assert [targets(each, "fusedcomm") for each in graphs] == [[AG, "scaled_matmul_all_reduce"]], report


class Float8Linear(torch.autograd.Function):
    """As torchao's: float8 in both directions, with the sequence sharded outside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        w8, one = w.to(E4M3), torch.ones((), device=x.device)
        ctx.save_for_backward(w8, one)
        return mm(gathered_float8(x.to(E4M3)), w8.t(), one, one, out_dtype=torch.float32, use_fast_accum=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        w8, one = ctx.saved_tensors
        of_rows = mm(grad.to(E5M2), w8.t().contiguous().t(), one, one, out_dtype=torch.float32)
        return reduce_scatter(of_rows, "sum", 0, world()), None


@on_ranks(2)
def test_trained(rank: int) -> None:
    x, w, *_ = (each.float() for each in arguments("sharded", rank))
    x, w = x.requires_grad_(), w.mT.contiguous()

    def results(f: Callable[..., Tensor]) -> list[Tensor]:
        y = f(x, w)
        return [y, *torch.autograd.grad((y * (rank + 1)).sum(), x)]

    with recorded_graphs() as graphs, fusedcomm.compile.enabled() as report:
        got = results(torch.compile(Float8Linear.apply, fullgraph=True, backend=interpreted))
    assert [targets(each, "fusedcomm") for each in graphs] == [[AG], [RS]], report
    torch.testing.assert_close(got, results(Float8Linear.apply), rtol=0, atol=0)


def full(one: Tensor, *shape: int) -> Tensor:
    return one.expand(shape).clone()


def reduced_by(x: Tensor, w: Tensor, one: Tensor, **options: Any) -> Tensor:
    return funcol.all_reduce(mm(x, w, one, one, **({"out_dtype": BF16} | options)), "sum", world())


def block_wise(x: Tensor, w: Tensor, one: Tensor) -> Tensor:
    scales = full(one, 1, 2 * T).t(), full(one, 4, 1)
    recipes = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    return scaled_mm(all_gather(x, 0, world()), w, scales[0], recipes[0], scales[1], recipes[1])


def swizzled(x: Tensor, w: Tensor, one: Tensor) -> Tensor:
    rows, by_4 = ScalingType.RowWise, SwizzleType.SWIZZLE_32_4_4
    return scaled_mm(all_gather(x, 0, world()), w, full(one, 2 * T, 1), rows, full(one, 1, 128), rows, by_4, by_4)


NEAR_MISSES: dict[str, tuple[Program, str]] = {
    "float8 result": (
        lambda x, w, one: reduced_by(x, w, one, out_dtype=E4M3).float(),
        "the matmul's dtype is torch.float8_e4m3fn of torch.float8_e4m3fn and",
    ),
    "scale_result": (lambda x, w, one: reduced_by(x, w, one, scale_result=one), "of the operands alone"),
    "bias of float32": (lambda x, w, one: reduced_by(x, w, one, bias=full(one, 128)), "the bias has another dtype"),
    "block-wise": (block_wise, "the scales must be TensorWise or RowWise"),
    "swizzled": (swizzled, "the scales must be TensorWise or RowWise, in float32, not swizzled"),
    "two matmuls": (
        lambda x, w, one: funcol.all_reduce(
            mm(x, w, one, one, out_dtype=BF16) + mm(x, w, one, one * 2, out_dtype=BF16), "sum", world()
        ),
        "the sum of matmuls with other shapes, dtypes, biases",
    ),
    "cast behind": (
        lambda x, w, one: mm(all_gather(x.to(torch.int8), 0, world()).to(E4M3), w, one, one, out_dtype=BF16),
        "torch.float8_e4m3fn would be sent in place of torch.int8, and not all ranks agreed to it",
    ),
    "bytes of another kind": (
        lambda x, w, one: mm(all_gather(x.view(torch.int8), 0, world()).view(E4M3), w, one, one, out_dtype=BF16),
        "torch.float8_e4m3fn would be sent in place of torch.int8, and not all ranks agreed to it",
    ),
    "cast bytes": (
        lambda x, w, one: mm(all_gather(x.to(torch.uint8), 0, world()).to(E4M3), w, one, one, out_dtype=BF16),
        "torch.float8_e4m3fn would be sent in place of torch.uint8, and not all ranks agreed to it",
    ),
    "right operand": (
        lambda x, w, one: mm(x, gathered(w.mT).mT, one, one, out_dtype=BF16),
        "what arrives is the right operand of the matmul",
    ),
    "scales alone": (
        lambda x, w, one: mm(x, w, all_gather(full(one, T // 2, 1), 0, world()), full(one, 1, 128), out_dtype=BF16),
        "or a scale",
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name: str) -> None:
    program, reason = NEAR_MISSES[name]
    with fake_world([0, 1]), mock.patch.object(Sequence, "ask", return_value=Answer(OTHER, (1,), (1,))):
        args = [torch.ones(T, 128).to(E4M3), torch.ones(128, 128).to(E4M3).mT, torch.ones(())]
        _, report = rewritten(program, args)
    assert all(line.status != "fused" for line in report.collectives) and reason in report.collectives[0].reason, report
