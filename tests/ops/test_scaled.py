"""Scaled matmuls: values of every recipe, dtype pair and layout against float64, graphs, errors, what is sent."""

import itertools
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

import fusedcomm
from fusedcomm.memory.group_member import Member
from fusedcomm.ops import proof
from fusedcomm.ops.table import SCALED
from fusedcomm.ops.whole_group import PROGRAMS
from fusedcomm.run import scaled_matmul
from tests.helpers.groups import empty_is_nan, fresh_group, member_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.prepared import IN_PYTHON, python_calls
from tests.helpers.tiers import nightly_but
from tests.ops.test_proof import proving, wrong_on_one_rank

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PAIRS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]
OUT_DTYPES = [torch.bfloat16, torch.float16, torch.float32]
RECIPES = ["TensorWise", "RowWise", "BlockWise"]
OPS = [spec.name for spec in SCALED]
DIMS: dict[str, list[tuple[int, ...]]] = {  # of x [batch, rows, K], or of the product [batch, rows, N]
    "scaled_matmul_all_to_all": [(1, 2), (0, 1), (2, 1)],
    "scaled_all_to_all_matmul": [(2, 1), (1, 2), (0, 1)],
    "scaled_all_gather_matmul": [(1,), (0,), (2,)],
    "scaled_matmul_reduce_scatter": [(1,), (2,)],
    "scaled_matmul_all_reduce": [()],
}
GATHERS = OPS[1:3]
ALGORITHMS = ["unfused", "chunked", "pipelined", "fused"]


class Operand(NamedTuple):
    values: Tensor
    scale: Tensor
    of_each: Tensor  # the scale of each value

    @property
    def exact(self) -> Tensor:
        return self.values * self.of_each


def integers(seed: int, *shape: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).double()


def operand(seed: int, recipe: str, lead: tuple[int, ...], rows: int, k: int, rows_block: int) -> Operand:
    """[*lead, rows, k], and scales that are powers of two; ``rows_block``: rows of a block."""
    shape = [*lead, rows, 1]
    if recipe == "TensorWise":
        shape = [] if seed % 2 else [1]
    elif recipe == "BlockWise":
        shape = [*lead, -(-rows // rows_block), -(-k // 128)]
    values, scale = integers(seed, *lead, rows, k), 2.0 ** integers(seed + 1, *shape).float()
    of_each = scale
    if recipe == "BlockWise":
        of_each = scale.repeat_interleave(rows_block, -2).repeat_interleave(128, -1)[..., :rows, :k]
    return Operand(values, scale, of_each)


class Case:
    """A call of all ranks."""

    def __init__(self, op: str, recipe: str, size: int, dims: tuple[int, ...]) -> None:
        self.op, self.size, self.dims = op, size, dims
        gathers_k, cuts_k = (op in GATHERS and dims[i : i + 1] == (2,) for i in (0, 1))
        ragged_k, n = (16 * size, 16 * size) if recipe == "TensorWise" else (7 * size, 5 * size)
        if recipe == "BlockWise":
            ragged_k, n = 150, 128 * size if 2 in dims and op not in GATHERS else 150
        k = 128 * (size if cuts_k else 1) if recipe == "BlockWise" and (gathers_k or cuts_k) else ragged_k
        whole_k = k * size if gathers_k else k // size if cuts_k else k
        self.xs = [operand(20 * r, recipe, (2 * size,), 3 * size, k, 1) for r in range(size)]
        self.ws = [operand(20 * r + 11, recipe, (), n, whole_k, 128) for r in range(size)]  # transposed
        self.bias = integers(99, n)

    def expected(self, rank: int, dtype: torch.dtype) -> Tensor:
        """Rank r's result, by one process."""
        xs, ws = [each.exact for each in self.xs], [each.exact.mT for each in self.ws]
        if self.op in GATHERS:
            parts = [x.chunk(self.size, self.dims[1])[rank] for x in xs] if len(self.dims) > 1 else xs
            return (torch.cat(parts, self.dims[0]) @ ws[rank] + self.bias).to(dtype)
        ys = [x @ w for x, w in zip(xs, ws, strict=True)]
        if self.op == OPS[0]:
            sent = [(y + self.bias).chunk(self.size, self.dims[1])[rank] for y in ys]
            return torch.cat(sent, self.dims[0]).to(dtype)
        total = sum((y.to(dtype).double() for y in ys), torch.zeros(()))
        if not self.dims:
            return (total + self.bias).to(dtype)
        bias = self.bias.chunk(self.size)[rank] if self.dims == (2,) else self.bias
        return (total.chunk(self.size, self.dims[0])[rank] + bias).to(dtype)

    def call(self, rank: int, pair: tuple[torch.dtype, torch.dtype], dtype: torch.dtype, k_first: bool) -> Tensor:
        """``k_first``: whether K of w is contiguous."""
        x, w = self.xs[rank], self.ws[rank]
        x8, w8 = x.values.to(pair[0]), w.values.to(pair[1]).mT
        scale_w = w.scale.mT if w.scale.ndim > 1 else w.scale
        bias = self.bias
        if self.op == "scaled_matmul_reduce_scatter" and self.dims == (2,):
            bias = bias.chunk(self.size)[rank]
        op = getattr(fusedcomm, self.op)
        w8 = w8 if k_first else w8.contiguous()
        made: Tensor = op(x8, w8, x.scale, scale_w, *self.dims, bias=bias.to(dtype), out_dtype=dtype)
        return made


@on_ranks()
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("algorithm", ["unfused", "chunked", "pipelined"])
@pytest.mark.parametrize("op", OPS)
def test_values(rank: int, world_size: int, algorithm: str, op: str) -> None:
    check_values(rank, world_size, algorithm, op, RECIPES)


@on_ranks(2)
@pytest.mark.parametrize(
    ("op", "recipe"), nightly_but([(op, "RowWise") for op in OPS], itertools.product(OPS, RECIPES))
)
def test_values_by_kernels(rank: int, op: str, recipe: str) -> None:
    check_values(rank, 2, "fused", op, [recipe])


@on_ranks(2)
@pytest.mark.nightly
@pytest.mark.parametrize("op", OPS)
def test_values_by_torch(rank: int, op: str) -> None:
    """As on GPUs: torch multiplies float8 itself, in Python and natively."""
    with mock.patch.object(scaled_matmul, "has_float8", lambda device: True):
        check_values(rank, 2, "chunked", op, ["TensorWise"])


def test_scales_are_float32_whatever_the_default_dtype() -> None:
    """torch multiplies float8 by no others: here its product for float16, and in problems of proofs."""
    x, out = torch.ones(2, 16).to(torch.float8_e4m3fn), torch.empty(2, 16, dtype=torch.float16)
    scales = torch.full((2, 1), 2.0), torch.full((1, 16), 0.5)
    torch.set_default_dtype(torch.bfloat16)
    try:
        made = scaled_matmul._by_torch(out, x, x[:1].expand(16, 16).contiguous().mT, *scales, None, False, False)
        problems: Any = [
            proof.problem_of(PROGRAMS["matmul_all_to_all"], proof.SIZES[-1], 2, form)
            for form in ("_scaled", "_tensor_wise")
        ]
    finally:
        torch.set_default_dtype(torch.float32)
    assert made.equal(torch.full((2, 16), 16.0))
    assert {scale.dtype for each in problems for scales in each.scales for scale in scales} == {torch.float32}


def check_values(rank: int, world_size: int, algorithm: str, op: str, recipes: list[str]) -> None:
    with fusedcomm.force_algorithm(algorithm, strict=True), empty_is_nan():
        for i, recipe in enumerate(recipes):
            for j, dims in enumerate(DIMS[op]):
                case, dtype = Case(op, recipe, world_size, dims), OUT_DTYPES[j % 3]
                want = case.expected(rank, dtype)
                # backends add in the payload's dtype, and the bias once more
                rtol, atol = (3 * torch.finfo(dtype).eps, 4) if algorithm == "unfused" and "reduce" in op else (0, 0)
                for num in range(4 if algorithm == "chunked" else 1):
                    with python_calls() as calls:
                        got = case.call(rank, PAIRS[(i + j) % 3], dtype, j % 2 == 0)
                    assert got.dtype == dtype and not (calls and num > IN_PYTHON)
                    torch.testing.assert_close(got, want, rtol=rtol, atol=atol, msg=f"{recipe}, {dims}")


@on_ranks(2)
@pytest.mark.parametrize("algorithm", nightly_but(["unfused", "chunked", "pipelined"], ALGORITHMS))
@pytest.mark.parametrize("op", GATHERS)
def test_x_alone(rank: int, algorithm: str, op: str) -> None:
    """Scales of the gathered x, which the caller has, are not sent; float8 travels as in the plain ops."""
    group = fusedcomm.memory.group.resolve(None)
    with fusedcomm.force_algorithm(algorithm, strict=True), empty_is_nan():
        for recipe, dims in itertools.product(RECIPES, DIMS[op]):
            case = Case(op, recipe, 2, dims)
            w, parts = case.ws[rank], [x.values for x in case.xs]
            if len(dims) > 1:
                parts = [x.chunk(2, dims[1])[rank] for x in parts]
            gathered = torch.cat(parts, dims[0])
            batch, rows, k = gathered.shape
            scales = operand(77, recipe, (batch,), rows, k, 1)
            want = (gathered * scales.of_each) @ w.exact.mT
            lists = len(dims) == 1
            w8, scale_w = w.values.to(E5M2).mT, w.scale.mT if w.scale.ndim > 1 else w.scale
            tensors = [[each] if lists else each for each in (w8, None, scale_w)]
            where = (dims[0], True, None, None) if lists else (*dims, True, None, None, None, None)
            x8 = case.xs[rank].values.to(E4M3)
            y, got = getattr(torch.ops.fusedcomm, op)(
                x8, *tensors[:2], scales.scale, tensors[2], torch.float32, False, False, *where, None, *group
            )
            assert got.dtype == E4M3 and torch.equal(got.double(), gathered)
            torch.testing.assert_close(y[0] if lists else y, want.float(), rtol=0, atol=0)
            plain = fusedcomm.all_gather(x8, *dims) if lists else fusedcomm.all_to_all(x8, *dims)
            assert torch.equal(plain.double(), gathered)


@on_ranks(2)
@pytest.mark.parametrize("algorithm", ["unfused", "chunked"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_uneven(rank: int, algorithm: str, recipe: str) -> None:
    """Parts of rows, K and N of several sizes, one of them ragged, one empty."""
    with fusedcomm.force_algorithm(algorithm, strict=True), empty_is_nan():
        for rows in ([1, 3], [0, 2]):
            xs = [operand(r, recipe, (), rows[r], 150, 1) for r in (0, 1)]
            w = operand(31 + rank, recipe, (), 9, 150, 128)
            gathered = torch.cat([x.exact for x in xs])
            got = scaled("all_gather_matmul", xs[rank], w, 0, gather_splits=rows)
            check(got, gathered @ w.exact.mT)

            ys = [operand(r, recipe, (), sum(rows), 6, 1) for r in (0, 1)]
            ws = [operand(31 + r, recipe, (), 9, 6, 128) for r in (0, 1)]
            total = sum(y.exact @ each.exact.mT for y, each in zip(ys, ws, strict=True))
            got = scaled("matmul_reduce_scatter", ys[rank], ws[rank], 0, scatter_splits=rows)
            check(got, total.split(rows)[rank])  # type: ignore[union-attr]

        sizes = [128, 22]
        xs = [operand(r, recipe, (), 4, sizes[r], 1) for r in (0, 1)]
        w = operand(31 + rank, recipe, (), 5, 150, 128)
        check(
            scaled("all_gather_matmul", xs[rank], w, 1, gather_splits=sizes),
            torch.cat([x.exact for x in xs], 1) @ w.exact.mT,
        )
        check(
            scaled("all_to_all_matmul", xs[rank], w, 1, 0, gather_splits=sizes, scatter_splits=[3, 1]),
            torch.cat([x.exact.split([3, 1])[rank] for x in xs], 1) @ w.exact.mT,
        )
        xs = [operand(r, recipe, (), 2 + r, 150, 1) for r in (0, 1)]
        w = operand(31 + rank, recipe, (), 5, sizes[rank], 128)
        check(
            scaled("all_to_all_matmul", xs[rank], w, 0, 1, gather_splits=[2, 3], scatter_splits=sizes),
            torch.cat([x.exact.split(sizes, 1)[rank] for x in xs]) @ w.exact.mT,
        )
        ws = [operand(31 + r, recipe, (), 150, 150, 128) for r in (0, 1)]
        sent = [(x.exact @ each.exact.mT).split(sizes, 1)[rank] for x, each in zip(xs, ws, strict=True)]
        got = scaled("matmul_all_to_all", xs[rank], ws[rank], 0, 1, gather_splits=[2, 3], scatter_splits=sizes)
        check(got, torch.cat(sent))


def scaled(op: str, x: Operand, w: Operand, *dims: int, **options: Any) -> Tensor:
    scale_w = w.scale.mT if w.scale.ndim > 1 else w.scale
    tensors = x.values.to(E4M3), w.values.to(E5M2).mT, x.scale, scale_w
    made: Tensor = getattr(fusedcomm, f"scaled_{op}")(*tensors, *dims, out_dtype=torch.float32, **options)
    return made


def check(got: Tensor, want: Tensor) -> None:
    assert torch.equal(got, want.float()), (got - want).abs().max()


@on_ranks(2)
def test_layouts(rank: int) -> None:
    """Batches of w, heads, a list of w, strided operands, a result of the caller's; each as the plain op has it."""
    for recipe in RECIPES:
        xs = [operand(r, recipe, (3,), 4, 130, 1) for r in (0, 1)]
        ws = [operand(31 + r, recipe, (3,), 6, 130, 128) for r in (0, 1)]
        total = sum(x.exact @ w.exact.mT for x, w in zip(xs, ws, strict=True))
        check(scaled("matmul_all_reduce", xs[rank], ws[rank]), total)  # type: ignore[arg-type]
        gathered = torch.cat([x.exact for x in xs], 1)
        check(scaled("all_gather_matmul", xs[rank], ws[0], 1), gathered @ ws[0].exact.mT)

        flat = [operand(31 + r, recipe, (), 512, 130, 128) for r in (0, 1)]
        y = [(x.exact @ w.exact.mT).view(3, 4, 2, 256).chunk(2, 2)[rank] for x, w in zip(xs, flat, strict=True)]
        check(scaled("matmul_all_to_all", xs[rank], flat[rank], 1, 2, out_shape=[2, 256]), torch.cat(y, 1))

        x8, scale_w = xs[rank].values.to(E4M3), [w.scale.mT if w.scale.ndim > 1 else w.scale for w in flat]
        strided = x8.mT.contiguous().mT, [w.values.to(E4M3).mT for w in flat], xs[rank].scale
        outs = fusedcomm.scaled_all_gather_matmul(*strided, scale_w, 1, out_dtype=torch.float32)
        for got, w in zip(outs, flat, strict=True):
            check(got, gathered @ w.exact.mT)

        heads = [operand(r, recipe, (2, 4), 1, 256, 1) for r in (0, 1)]  # [batch, tokens, heads / R, head_dim]
        scale = heads[rank].scale.flatten(2) if recipe != "TensorWise" else heads[rank].scale
        w = operand(31 + rank, recipe, (), 6, 512, 128)
        x8, scale_w8 = heads[rank].values.to(E4M3), w.scale.mT if w.scale.ndim > 1 else w.scale
        got = fusedcomm.scaled_all_to_all_matmul(
            x8, w.values.to(E4M3).mT, scale, scale_w8, 2, 1, out_dtype=torch.float32
        )
        check(got, torch.cat([x.exact.chunk(2, 1)[rank] for x in heads], 2).flatten(2) @ w.exact.mT)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a plain x": ({"x": torch.zeros(4, 256)}, "x must be float8_e4m3fn or float8_e5m2"),
    "two of e5m2": ({"x": torch.zeros(4, 256).to(E5M2), "w": torch.zeros(256, 8).to(E5M2)}, "must not both be"),
    "a float8 result": ({"out_dtype": E4M3}, "result_scale"),
    "a wide result": ({"out_dtype": torch.float64}, "out_dtype must be"),
    "MX": ({"scale_x": torch.zeros(4, 8, dtype=torch.float8_e8m0fnu)}, "MX"),
    "NVFP4": ({"scale_x": torch.zeros(4, 16, dtype=E4M3)}, "NVFP4"),
    "scales of rows beside one": ({"scale_x": torch.ones(4, 1)}, "scales must be of shapes"),
    "a cut inside a block": ({"scale_x": torch.ones(4, 2), "scale_w": torch.ones(2, 1)}, "multiples of 128"),
    "a bias of another dtype": ({"bias": torch.zeros(8)}, "bias must have out_dtype"),
}


@on_ranks(2)
def test_bad_input(rank: int) -> None:
    """All ranks raise before anything is sent, and can go on."""
    good = {"x": torch.zeros(4, 256).to(E4M3), "w": torch.zeros(256, 8).to(E4M3)}
    good |= {"scale_x": torch.ones(()), "scale_w": torch.ones(())}
    for name, (changed, text) in BAD.items():
        with pytest.raises(ValueError, match=text):
            fusedcomm.scaled_matmul_all_to_all(**{**good, **changed}, gather_dim=0, scatter_dim=1)
            pytest.fail(name)
    with pytest.raises(RuntimeError, match="has no gradients"):
        fusedcomm.scaled_matmul_all_reduce(
            *good.values(), bias=torch.zeros(8, dtype=torch.bfloat16, requires_grad=True)
        )
    blocks = {"scale_x": torch.ones(4, 2), "scale_w": torch.ones(1, 1), "w": torch.zeros(128, 8).to(E4M3)}
    narrow = {**good, **blocks, "x": torch.zeros(4, 200).to(E4M3)}
    with pytest.raises(ValueError, match="K must be cut at multiples of 128"):
        fusedcomm.scaled_all_to_all_matmul(**{**narrow, "w": torch.zeros(100, 8).to(E4M3)}, gather_dim=0, scatter_dim=1)
    assert fusedcomm.scaled_matmul_all_reduce(*good.values()).eq(0).all()


@on_ranks(2)
def test_recipes_that_differ(rank: int) -> None:
    """Payloads of one size that mean other scales are told apart, by flags and by FUSEDCOMM_CHECK."""
    x, w = torch.zeros(4, 256).to(E4M3), torch.zeros(256, 8).to(E4M3)
    scales = [(torch.ones(4, 1), torch.ones(1, 8)), (torch.ones(4, 2), torch.ones(2, 1))][rank]
    with fresh_group(CHECK="1") as group, pytest.raises(fusedcomm.PeerMismatchError, match="block"):
        fusedcomm.scaled_all_gather_matmul(x, w, *scales, 0, group)
    with fresh_group() as group, pytest.raises(fusedcomm.PeerMismatchError), fusedcomm.force_algorithm("chunked"):
        fusedcomm.scaled_all_gather_matmul(x, w, *scales, 0, group)


@on_ranks(2)
@pytest.mark.parametrize("algorithm", ["unfused", "chunked", "pipelined"])
def test_empty(rank: int, algorithm: str) -> None:
    """No rows on any rank, and no K on one, whose rows then are scales alone."""
    with fusedcomm.force_algorithm(algorithm, strict=algorithm != "pipelined"), empty_is_nan():
        for recipe in RECIPES:
            w = operand(31 + rank, recipe, (), 5, 128, 128)
            check(scaled("all_gather_matmul", operand(rank, recipe, (), 0, 128, 1), w, 0), torch.zeros(0, 5))
            xs = [operand(r, recipe, (), 4, (128, 0)[r], 1) for r in (0, 1)]
            got = scaled("all_gather_matmul", xs[rank], w, 1, gather_splits=[128, 0])
            check(got, torch.cat([x.exact for x in xs], 1) @ w.exact.mT)


@on_ranks(2)
def test_values_of_another_dtype(rank: int) -> None:
    """e4m3 and e5m2 are bytes alike: ranks that differ are told apart."""
    x, w, one = torch.ones(2, 16).to(PAIRS[1][rank]), torch.ones(16, 4).to(E4M3), torch.ones(())
    with fresh_group() as group, pytest.raises(fusedcomm.PeerMismatchError), fusedcomm.force_algorithm("chunked"):
        fusedcomm.scaled_all_gather_matmul(x, w, one, one, 0, group)


@on_ranks(2)
@pytest.mark.parametrize("algorithm", ["unfused", "chunked", "pipelined"])
def test_x_alone_with_k_of_several_dims(rank: int, algorithm: str) -> None:
    xs = [integers(r, 8, 2, 16) for r in (0, 1)]
    w, one, group = integers(9, 64, 6), torch.ones(()), fusedcomm.memory.group.resolve(None)
    with fusedcomm.force_algorithm(algorithm, strict=True), empty_is_nan():
        y, _ = torch.ops.fusedcomm.scaled_all_to_all_matmul(
            xs[rank].to(E4M3), w.to(E4M3), None, one, one, torch.float32, False, False, 1, 0, False, *[None] * 5, *group
        )
    check(y, torch.cat([x.chunk(2)[rank] for x in xs], 1).flatten(1) @ w)


@on_ranks(2)
def test_graphs(rank: int) -> None:
    """In compiled programs, with rows of any number; opcheck."""

    def program(x: Tensor, w: Tensor, scale_x: Tensor, scale_w: Tensor) -> Any:
        y = fusedcomm.scaled_all_gather_matmul(x, w, scale_x, scale_w, 0)
        z = fusedcomm.scaled_matmul_reduce_scatter(x, w, scale_x, scale_w, 0)
        return y + 1, z, fusedcomm.scaled_matmul_all_to_all(x, w, scale_x, scale_w, 0, 1)

    compiled = torch.compile(program, dynamic=True, fullgraph=True)
    w, scale_w = fusedcomm.quantize(torch.randn(6, 40), "RowWise")
    for rows in (4, 8):
        x, scale_x = fusedcomm.quantize(torch.randn(rows, 40), "RowWise")
        for got, want in zip(
            compiled(x, w.mT, scale_x, scale_w.mT), program(x, w.mT, scale_x, scale_w.mT), strict=True
        ):
            torch.testing.assert_close(got, want, rtol=0, atol=0)
    group = fusedcomm.memory.group.resolve(None)
    where = (torch.bfloat16, True, "sum", 0, None, None, None, *group)
    args = (x, w.mT, None, scale_x, scale_w.mT, *where)
    tests = ("test_faketensor", "test_aot_dispatch_dynamic")  # test_schema compares by a sum that float8 has not
    torch.library.opcheck(torch.ops.fusedcomm.scaled_matmul_reduce_scatter.default, args, test_utils=tests)
    of_gather = (torch.bfloat16, False, True, 0, True, None, None, None, *group)
    lists = (x, [w.mT], [None], scale_x, [scale_w.mT], *of_gather)
    torch.library.opcheck(torch.ops.fusedcomm.scaled_all_gather_matmul.default, lists, test_utils=tests)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scaling_type", ["TensorWise", "RowWise", "BlockWise1x128", "BlockWise128x128"])
def test_quantize(scaling_type: str, dtype: torch.dtype) -> None:
    """The largest of each block is the dtype's largest, others are within half of a step, and zeros stay."""
    t = torch.randn(2, 150, 300, dtype=torch.float64)
    t[0, 3], t[1, :, 256:] = 0, 0
    values, scales = fusedcomm.quantize(t, scaling_type, dtype)
    rows, k = {"RowWise": (1, 300), "BlockWise1x128": (1, 128), "BlockWise128x128": (128, 128)}.get(
        scaling_type, (1, 1)
    )
    of_each = scales
    if scaling_type != "TensorWise":
        of_each = scales.repeat_interleave(rows, -2).repeat_interleave(k, -1)[..., :150, :300]
    back = values.double() * of_each
    step = torch.finfo(dtype).eps / 2 * (1 + 1e-6)
    assert (
        (back - t).abs() <= t.abs() * step + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps * of_each
    ).all()
    assert values.abs().float().max() == torch.finfo(dtype).max and (back[t == 0] == 0).all()
    assert fusedcomm.quantize(t[:, :0], scaling_type, dtype)[0].shape == (2, 0, 300)
    assert fusedcomm.quantize(t * 0 + 1e-44, scaling_type, dtype)[0].float().isfinite().all()


@on_ranks(2)
def test_proved_before_use(rank: int, tmp_path: Path) -> None:
    """As GPUs prove them: exact problems of each kind, packed rows and x alone; what is planted is found."""
    sent = {op: [torch.uint8, E4M3] if op in GATHERS else [torch.bfloat16] for op in OPS}
    with proving(tmp_path) as (group, _):
        ours = started(group)
        for op, dtypes in sent.items():
            for dtype, uneven in itertools.product(dtypes, (False, True)):
                if not uneven or op != "scaled_matmul_all_reduce":
                    proof.prove(op, "chunked", dtype, ours, uneven)
        proof.prove("all_gather", "chunked", torch.uint8, ours, False)
        assert len(ours.outcomes) >= 10 and set(ours.outcomes.values()) == {""}, ours.outcomes
    with proving(tmp_path, wrong_on_one_rank) as (group, _):
        ours = started(group)
        proof.prove("scaled_all_gather_matmul", "chunked", torch.uint8, ours, False)
        assert all("wrong values" in outcome for outcome in ours.outcomes.values()), ours.outcomes


def started(group: Any) -> Member:
    with fusedcomm.force_algorithm("unfused"):
        fusedcomm.all_gather(torch.zeros(2), 0, group)
    return member_of(group)
