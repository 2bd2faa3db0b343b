"""Sums over the ranks with a residual and an RMSNorm behind: values, gradients, graphs, errors, given memory."""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import fusedcomm
from fusedcomm.plan.geometry import norm
from tests.helpers.groups import empty_is_nan, fresh_group, member_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.prepared import CALLS, IN_PYTHON, python_calls, started_group
from tests.helpers.spies import Dispatched, pushed

SHAPES = [(4, 8), (5, 7), (2, 3, 16), (33, 97), (1, 1), (0, 8), (4, 0)]  # of the sum
K, EPS = 6, 1e-5
SCATTERS = "matmul_reduce_scatter_norm"
OPS = {"one_shot": ["matmul_all_reduce_norm", "all_reduce_norm"]}
OPS["two_shot"] = [*OPS["one_shot"], SCATTERS]
ALGORITHMS = ["unfused", "chunked", "pipelined"]


def way(name: str) -> AbstractContextManager[object]:
    """How payloads of any size go."""
    return mock.patch.object(norm, "goes_at_once", lambda *args: name == "one_shot")


def integers(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def part(t: Tensor, rank: int, num_ranks: int) -> Tensor:
    """A rank's rows, cut along the last dim but one."""
    parts = t.chunk(num_ranks, -2)
    return parts[rank] if rank < len(parts) else t.narrow(-2, 0, 0)


class Case:
    """The inputs of all ranks, in float64, with exact sums. ``wide``: weights are float32, and none of 16 bits."""

    def __init__(
        self, shape: tuple[int, ...], num_ranks: int, has_bias: bool = True, has_weight: bool = True, wide: bool = False
    ) -> None:
        n = shape[-1]
        self.xs = [integers(r, *shape[:-1], K) for r in range(num_ranks)]
        self.ws = [integers(10 + r, K, n) for r in range(num_ranks)]
        self.residual = integers(20, *shape)
        self.bias = integers(21, n) if has_bias else None
        self.weight = (integers(22, n).abs() + (1 + 2**-9 + 2**-12 if wide else 1)) if has_weight else None
        self.wide = wide

    def expected(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        terms = sum((x @ w for x, w in zip(self.xs, self.ws, strict=True)), torch.zeros(()))
        out = (terms + self.residual + (0 if self.bias is None else self.bias)).to(dtype)
        return F.rms_norm(out.double(), out.shape[-1:], self.weight, EPS), out

    def inputs(self, rank: int, dtype: torch.dtype, op: str) -> list[Any]:
        """x, w, residual, weight, bias."""
        residual = part(self.residual, rank, len(self.xs)) if op == SCATTERS else self.residual
        given = self.xs[rank], self.ws[rank], residual, self.weight, self.bias
        wide = torch.float32 if self.wide else dtype
        return [None if t is None else t.to(wide if t is self.weight else dtype, copy=True) for t in given]

    def call(self, rank: int, dtype: torch.dtype, op: str, group: Any = None) -> Any:
        return call(op, *self.inputs(rank, dtype, op), group=group)


def call(op: str, x: Tensor, w: Tensor, residual: Tensor, weight: Any, bias: Any, **given: Any) -> Any:
    tensors = (x, w) if op.startswith("matmul") else (x @ w,)
    where = (x.ndim - 2,) if op == SCATTERS else ()
    with torch.autocast("cpu", torch.bfloat16, enabled="out" in given):  # which memory of results excludes
        return getattr(fusedcomm, op)(*tensors, residual, weight, *where, bias=bias, **{"eps": EPS, **given})


def check(got: tuple[Tensor, Tensor], case: Case, dtype: torch.dtype, op: str) -> None:
    (normed, out), (want, sums) = got, case.expected(dtype)
    if op == SCATTERS:
        want, sums = (part(t, dist.get_rank(), len(case.xs)) for t in (want, sums))
    assert torch.equal(out, sums) and normed.is_contiguous() and out.is_contiguous()
    rtol = {torch.float32: 0, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype] + 1e-6  # rounded once
    torch.testing.assert_close(normed.double(), want, rtol=rtol, atol=0)
    if op == SCATTERS:
        return
    ours = torch.stack([normed, out]).view(torch.uint8).int()
    everyones = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, ours)
    assert all(torch.equal(each, ours) for each in everyones), "ranks must have the same bits"


@on_ranks()
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_values(rank: int, world_size: int, algorithm: str) -> None:
    for name in ("one_shot", "two_shot")[algorithm == "pipelined" :]:
        with way(name), fusedcomm.force_algorithm(algorithm, strict=True), empty_is_nan():
            for i, shape in enumerate(SHAPES):
                for dtype in (torch.float32, torch.bfloat16, torch.float16):
                    wide = i % 2 == 1 and dtype != torch.float32
                    case = Case(shape, world_size, has_bias=i % 2 == 0, has_weight=i % 3 != 1, wide=wide)
                    for op in OPS[name]:
                        check(case.call(rank, dtype, op), case, dtype, op)


@on_ranks(2)
@pytest.mark.parametrize("name", ["one_shot", "two_shot"])
def test_values_by_kernels(rank: int, name: str) -> None:
    """In Triton's interpreter, where a block has 64 columns."""
    shapes = {(5, 7): torch.float16, (6, 97): torch.bfloat16, (0, 8): torch.float32}  # none, and whole rows of a rank
    with way(name), fusedcomm.force_algorithm("fused", strict=True), empty_is_nan():
        for shape, dtype in shapes.items():
            case = Case(shape, 2, has_bias=shape[0] == 6, has_weight=shape[0] == 5, wide=shape[0] == 5)
            op = "matmul_all_reduce_norm" if shape[0] == 6 else "all_reduce_norm"
            check(case.call(rank, dtype, op), case, dtype, op)
        for rows, n in ((2, 97), (34, 7)) if name == "two_shot" else ():  # few have a matmul of their own
            case = Case((4, rows, n), 2)
            with fresh_group(WORKSPACE_BYTES="4096") as group:
                check(case.call(rank, torch.bfloat16, SCATTERS, group), case, torch.bfloat16, SCATTERS)
                (plan,) = member_of(group).plans.values()
            assert (plan.num_rounds > 1, "Multiply" in plan.schedule.counts()) == (True, rows == 2)


@on_ranks(2)
def test_values_in_several_rounds(rank: int) -> None:
    case = Case((67, 64), 2)
    for name in ("one_shot", "two_shot"):
        forced = fusedcomm.force_algorithm("chunked", strict=True)
        with way(name), fresh_group(WORKSPACE_BYTES="8192") as group, forced:
            for op in OPS[name]:
                check(case.call(rank, torch.float32, op, group), case, torch.float32, op)
    case = Case((3, 1500), 2)  # a row, and with it the bias, takes several rounds
    for algorithm in ("chunked", "fused"):
        forced = fusedcomm.force_algorithm(algorithm, strict=True)
        with way("two_shot"), fresh_group(WORKSPACE_BYTES="8192") as group, forced:
            check(case.call(rank, torch.float32, "all_reduce_norm", group), case, torch.float32, "all_reduce_norm")


@on_ranks(2)
def test_batches_and_strides(rank: int) -> None:
    xs = [integers(r, 3, 4, K, dtype=torch.float32) for r in range(2)]
    ws = [integers(9 + r, 3, K, 8, dtype=torch.float32) for r in range(2)]
    residual = integers(5, 8, 4, 3, dtype=torch.float32).permute(2, 1, 0)
    weight = torch.arange(16.0)[::2]
    for name in ("one_shot", "two_shot"):
        with way(name), fusedcomm.force_algorithm("chunked", strict=True):
            normed, out = fusedcomm.matmul_all_reduce_norm(xs[rank], ws[rank], residual, weight, eps=EPS)
            _, of_no_k = fusedcomm.matmul_all_reduce_norm(torch.ones(2, 0), torch.ones(0, 8), weight.expand(2, 8), None)
        assert torch.equal(of_no_k, weight.expand(2, 8))
        want = xs[0] @ ws[0] + xs[1] @ ws[1] + residual
        assert torch.equal(out, want)
        torch.testing.assert_close(normed, F.rms_norm(want, (8,), weight, EPS))
    for algorithm in ALGORITHMS:
        mine, rows = (t.split([3, 1], 1)[rank] for t in (residual, want))
        with fusedcomm.force_algorithm(algorithm, strict=True):
            normed, out = call(SCATTERS, xs[rank], ws[rank], mine, weight, None, scatter_splits=[3, 1])
        assert torch.equal(out, rows) and out.is_contiguous()
        torch.testing.assert_close(normed, F.rms_norm(rows, (8,), weight, EPS))


@on_ranks(2)
@pytest.mark.parametrize("in_place", [None, False, True])
@pytest.mark.parametrize("name", ["one_shot", "two_shot"])
def test_no_python_runs_from_the_third_call_on(rank: int, name: str, in_place: bool | None) -> None:
    """``in_place``: results go to memory of the caller, residual_out to the residual; None: to memory of the op."""
    case = Case((5, 32), 2)
    with way(name), started_group("chunked") as group:
        for op in OPS[name]:
            with python_calls() as calls:
                for i in range(CALLS):
                    given, outs = case.inputs(rank, torch.float32, op), {}
                    if in_place is not None:
                        nan = torch.full_like(given[2], float("nan"))
                        outs = {"out": nan, "residual_out": given[2] if in_place else nan.clone()}
                    versions = [each._version for each in outs.values()]
                    with torch.inference_mode(i % 2 == 1):
                        got = call(op, *given, group=group, **outs)
                    assert all(each is to for each, to in zip(got, outs.values(), strict=False))
                    assert all(out._version == before + 1 for out, before in zip(outs.values(), versions, strict=True))
                    check(got, case, torch.float32, op)
            assert len(calls) == IN_PYTHON, calls
        if in_place is not None:  # straight into it
            plans = [plan for plan in member_of(group).plans.values() if plan.op.endswith("_norm")]
            results = [plan.schedule.results for plan in plans]
            assert len(plans) == len(OPS[name]) and not any(results), results


@on_ranks(2)
@pytest.mark.parametrize("algorithm", ALGORITHMS[:2])
def test_gradients(rank: int, algorithm: str) -> None:
    weights = [torch.arange(1.0, 49.0).view(2, 3, 8), torch.arange(48.0, 0.0, -1).view(2, 3, 8)]
    for has_bias, has_weight in ((True, True), (False, False)):
        case = Case((2, 3, 8), 2, has_bias, has_weight)
        leaves = [case.xs[rank], case.ws[rank], case.residual, case.weight, case.bias]
        leaves = [t.requires_grad_() for t in leaves if t is not None]
        want = torch.autograd.grad(case.expected(), leaves, [t.double() for t in weights])
        for op in OPS["two_shot"]:
            given = [t if t is None else t.detach().requires_grad_() for t in case.inputs(rank, torch.float32, op)]
            of_results, wanted = weights, [*want]
            if op == SCATTERS:
                of_results, wanted[2] = [part(t, rank, 2) for t in weights], part(want[2], rank, 2)
            with fusedcomm.force_algorithm(algorithm, strict=True):
                got = torch.autograd.grad(call(op, *given), [t for t in given if t is not None], of_results)
            for of_rows in got[3:] if op == SCATTERS else ():  # of the weight and the bias: this rank's part
                dist.all_reduce(of_rows)
            torch.testing.assert_close([t.double() for t in got], wanted, rtol=1e-4, atol=1e-4)


@on_ranks(2)
def test_second_derivatives(rank: int) -> None:
    """Of a group of one rank: finite differences. What ranks add up is as in `matmul_all_reduce`."""
    alone = [dist.new_group([each]) for each in range(2)][rank]
    shapes = (3, 4), (4, 5), (3, 5), (5,), (5,)
    x, w, residual, weight, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)

    for op in ("matmul_all_reduce_norm", SCATTERS):
        torch.autograd.gradgradcheck(partial(call, op, group=alone), (x, w, residual, weight, bias))


@on_ranks(2)
def test_in_graphs(rank: int) -> None:
    case = Case((4, 8), 2)
    givens = [case.inputs(rank, torch.float32, op) for op in OPS["two_shot"]]

    def program(outs: list[dict[str, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """``outs``: of each op; where there is a residual_out, it is the residual too."""
        found = []
        for op, given, out in zip(OPS["two_shot"], givens, outs, strict=True):
            residual = out.get("residual_out", given[2])
            found.append(call(op, given[0], given[1], residual, *given[3:], **out))
        return found

    def memory() -> list[dict[str, Tensor]]:
        return [{"out": torch.full_like(each[2], torch.nan), "residual_out": each[2].clone()} for each in givens]

    with Dispatched() as dispatched:
        want = program([{}] * 3)
    got, outs, outs_in_graph = torch.compile(program, fullgraph=True)([{}] * 3), memory(), memory()
    program(outs)
    written = torch.compile(program, fullgraph=True, backend="aot_eager")(outs_in_graph)
    as_pairs = [tuple(each.values()) for each in outs], [tuple(each.values()) for each in outs_in_graph]
    for found in (got, written, *as_pairs):
        torch.testing.assert_close(found, want, rtol=0, atol=0)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    checks += ["test_aot_dispatch_dynamic"] if hasattr(torch.Tag, "out") else []
    for op, out in zip(OPS["two_shot"], memory(), strict=True):
        args, packet = tuple(dispatched.arguments(f"fusedcomm::{op}")), getattr(torch.ops.fusedcomm, op)
        torch.library.opcheck(packet.default, args)
        torch.library.opcheck(packet.out, args, out, test_utils=checks)
        with torch.autocast("cpu", torch.bfloat16):
            assert packet(*args)[0].dtype == torch.bfloat16


@on_ranks(2)
@pytest.mark.parametrize("other", ["the plain op", "eps"])
def test_peers_that_call_something_else_are_told(rank: int, other: str) -> None:
    y = torch.ones(8, 8)
    with started_group("chunked", TIMEOUT_S="5") as group, way("two_shot"), pytest.raises(fusedcomm.PeerMismatchError):
        if rank == 0 or other == "eps":
            fusedcomm.all_reduce_norm(y, y, None, group, eps=rank)
        else:
            fusedcomm.all_reduce(y, group)


@on_ranks(2)
@pytest.mark.parametrize("algorithm", ALGORITHMS[1:])
def test_a_scattered_norm_is_on_the_wire_a_reduce_scatter(rank: int, algorithm: str) -> None:
    case = Case((6, 8), 2, has_weight=False)
    x, w, residual, _, bias = given = case.inputs(rank, torch.float32, SCATTERS)
    with started_group(algorithm, TIMEOUT_S="5") as group:
        if rank == 0:
            out = fusedcomm.matmul_reduce_scatter(x, w, 0, group, bias=bias) + residual
            check((F.rms_norm(out, (8,), None, EPS), out), case, torch.float32, SCATTERS)
        else:
            check(call(SCATTERS, *given, group=group), case, torch.float32, SCATTERS)
        assert fusedcomm.explain(SCATTERS, x, w, residual, None, 0, group, bias=bias).algorithm == algorithm
    with fresh_group(CHECK="1") as group, pytest.raises(fusedcomm.PeerMismatchError, match=r"got eps 0\.0 on rank 0"):
        call(SCATTERS, *given, group=group, eps=rank)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"residual": torch.ones(3, 8)}, ValueError, r"residual must have the shape of the sum, \[4, 8\], got \[3, 8\]"),
    ({"residual": torch.ones(4, 8).double()}, ValueError, "residual must have x's dtype"),
    ({"norm_weight": torch.ones(4)}, ValueError, r"norm_weight must have shape \[N\] = \[8\], got \[4\]"),
    ({"bias": torch.ones(4)}, ValueError, r"bias must have shape \[N\] = \[8\], got \[4\]"),
    ({"eps": -1.0}, ValueError, "eps must be at least 0, got -1.0"),
    ({"residual": None}, TypeError, "residual must be a tensor, got None"),
    ({"norm_weight": 1.0}, TypeError, "norm_weight must be a tensor, got 1.0"),
    ({"eps": "small"}, TypeError, "eps must be a float, got 'small'"),
]


BAD_ROWS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"scatter_dim": -1}, ValueError, "scatter_dim must not be the last dim, as each rank norms whole rows, got -1"),
    ({"scatter_dim": 2}, ValueError, r"scatter_dim must be in \[-2, 1\], got 2"),
    ({"residual": torch.ones(4, 8)}, ValueError, r"residual must have the shape of the sum, \[2, 8\], got \[4, 8\]"),
    ({"scatter_splits": [1, 1]}, ValueError, "scatter_splits"),
]


@on_ranks(2)
def test_bad_input_is_an_error_before_anything_is_sent(rank: int) -> None:
    w, whole, rows = torch.ones(3, 8), {"residual": torch.ones(4, 8)}, {"residual": torch.ones(2, 8), "scatter_dim": 0}
    multiplied = {"x": torch.ones(4, 3), "w": w, "norm_weight": None}
    cases = [("matmul_all_reduce_norm", each, multiplied | whole) for each in BAD]
    cases += [("all_reduce_norm", each, {"x": torch.ones(4, 8), "norm_weight": None, **whole}) for each in BAD]
    cases += [(SCATTERS, each, multiplied | rows) for each in [*BAD_ROWS, *BAD[1:]]]
    for op, (change, error, text), given in cases:
        with pushed() as sent, pytest.raises(error, match=text):
            getattr(fusedcomm, op)(**given | change)
        assert not sent.chunks


@on_ranks(2)
def test_memory_that_results_cannot_have(rank: int) -> None:
    wide, x, residual = torch.ones(9, 8), torch.ones(4, 8), torch.ones(4, 8)
    leaf = torch.ones(4, 8, requires_grad=True)
    bad: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"out": torch.ones(4, 7)}, ValueError, r"out must have shape \[4, 8\], got \[4, 7\]"),
        ({"residual_out": torch.ones(4, 8).double()}, ValueError, "residual_out must have x's dtype"),
        ({"residual_out": torch.ones(8, 4).mT}, ValueError, "residual_out must be contiguous"),
        ({"out": residual}, ValueError, "out must not overlap residual"),
        ({"out": x}, ValueError, "out must not overlap x"),
        ({"residual": wide[:4], "residual_out": wide[3:7]}, ValueError, "residual_out must not overlap residual"),
        ({"out": wide[:4], "residual_out": wide[3:7]}, ValueError, "out must not overlap residual_out"),
        ({"norm_weight": wide[4], "residual_out": wide[3:7]}, ValueError, "residual_out must not overlap norm_weight"),
        ({"residual_out": 1}, TypeError, "residual_out must be a tensor, got 1"),
        ({"residual": leaf, "out": torch.ones(4, 8)}, RuntimeError, "no tensor may require grad"),
        ({"out": leaf}, RuntimeError, "no tensor may require grad"),
    ]
    for change, error, text in bad:
        given: dict[str, Any] = {"residual": residual, "norm_weight": None, **change}
        with pushed() as sent, pytest.raises(error, match=text):
            fusedcomm.all_reduce_norm(x, **given)
        assert not sent.chunks
    out, total = fusedcomm.all_reduce_norm(x, residual, None, residual_out=wide[:4])  # the other is made
    assert (total == 3).all() and (wide[:4] == 3).all() and (wide[4:] == 1).all() and out.shape == (4, 8)
    assert "Norm" in str(fusedcomm.explain("all_reduce_norm", x, residual, None).schedule)
    with torch.no_grad():
        fusedcomm.all_reduce_norm(x, leaf, None, out=out, residual_out=leaf)
    assert (leaf == 3).all()
