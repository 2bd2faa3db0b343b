"""matmul_all_to_all over real processes: values of every algorithm, the op's contract, gradients, bad input."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedcomm
from fusedcomm import reference
from tests.problems import PROBLEMS, Problem, expected, integers

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BY_NAME = {problem.name: problem for problem in PROBLEMS}
CALLS = 6  # back to back with fresh data: both slots are used again, and again


def call(problem: Problem, rank: int, group_size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    x, w, bias = integers(problem, rank, group_size, dtype, seed)
    out_shape = problem.sizes(group_size)[2]
    return fusedcomm.matmul_all_to_all(x, w, problem.gather_dim, problem.scatter_dim, bias=bias, out_shape=out_shape)


@contextmanager
def empty_is_nan() -> Iterator[None]:
    """torch fills what ``empty`` returns with NaN: an element that an op leaves out shows."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check_values(rank: int, problem: Problem, dtype: torch.dtype, algorithm: str | None, calls: int) -> None:
    group_size = dist.get_world_size()
    wants = [expected(problem, group_size, dtype, seed)[rank] for seed in range(calls)]
    with fusedcomm.force_algorithm(algorithm, strict=True), empty_is_nan():
        outs = [call(problem, rank, group_size, dtype, seed) for seed in range(calls)]
    for out, want in zip(outs, wants, strict=True):
        assert out.is_contiguous()
        torch.testing.assert_close(out, want, rtol=0, atol=0)


@pytest.mark.parametrize("algorithm", ["unfused", "chunked", "fused"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_values(ranks: Any, problem: Problem, world_size: int, algorithm: str) -> None:
    """Exact integers; every problem of the table, fp32."""
    ranks(world_size).run(check_values, problem, torch.float32, algorithm, CALLS if algorithm == "chunked" else 2)


@pytest.mark.parametrize("algorithm", ["unfused", "chunked", "fused"])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("name", ["heads", "packed-qkv", "batched-w-heads", "ragged", "transposed-w", "zero-rows"])
def test_half_precision_values(ranks: Any, name: str, dtype: torch.dtype, algorithm: str) -> None:
    ranks(2).run(check_values, BY_NAME[name], dtype, algorithm, 2)


@pytest.mark.parametrize("world_size", [1, 8])
def test_world_sizes(ranks: Any, world_size: int) -> None:
    """One rank has nothing to exchange; eight share two cores."""
    ranks(world_size).run(check_values, BY_NAME["packed-qkv"], torch.float32, None, CALLS)


def check_rounding(rank: int, dtype: torch.dtype, algorithm: str) -> None:
    """Against float64: at most twice the error that the reference has in the same dtype."""
    size = dist.get_world_size()
    generators = [torch.Generator().manual_seed(r) for r in range(size)]
    xs = [torch.randn(64, 300, generator=g).to(dtype) for g in generators]
    ws = [torch.randn(300, 96, generator=g).to(dtype) for g in generators]
    bs = [torch.randn(96, generator=g).to(dtype) for g in generators]
    exact = [x.double() @ w.double() + b.double() for x, w, b in zip(xs, ws, bs, strict=True)]
    want = torch.cat([y.chunk(size, 1)[rank] for y in exact])
    error_of_reference = (
        (
            reference.matmul_all_to_all(xs[rank], ws[rank], bs[rank], None, 0, 1, size, dist.group.WORLD.group_name)
            - want
        )
        .abs()
        .max()
    )
    with fusedcomm.force_algorithm(algorithm, strict=True):
        outs = [fusedcomm.matmul_all_to_all(xs[rank], ws[rank], 0, 1, bias=bs[rank]) for _ in range(3)]
    assert (outs[0] - want).abs().max() <= 2 * error_of_reference + 1e-12
    assert all(torch.equal(outs[0], out) for out in outs[1:])  # bit-equal from run to run


@pytest.mark.parametrize("algorithm", ["chunked", "fused"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding(ranks: Any, dtype: torch.dtype, algorithm: str) -> None:
    ranks(2).run(check_rounding, dtype, algorithm)


def non_contiguous(t: torch.Tensor) -> torch.Tensor:
    """Same values, every stride doubled."""
    wide = torch.full([2 * size for size in t.shape], float("nan"), dtype=t.dtype)
    view = wide[tuple(slice(None, None, 2) for _ in t.shape)]
    view.copy_(t)
    return view


def check_non_contiguous(rank: int, problem: Problem, algorithm: str) -> None:
    size = dist.get_world_size()
    x, w, bias = integers(problem, rank, size)
    columns = problem.sizes(size)[2]
    for t in (x, x.mT.contiguous().mT):
        with fusedcomm.force_algorithm(algorithm, strict=True):
            out = fusedcomm.matmul_all_to_all(
                non_contiguous(t),
                non_contiguous(w),
                problem.gather_dim,
                problem.scatter_dim,
                bias=None if bias is None else non_contiguous(bias),
                out_shape=columns,
            )
        torch.testing.assert_close(out, expected(problem, size)[rank], rtol=0, atol=0)


@pytest.mark.parametrize("algorithm", ["unfused", "chunked", "fused"])
@pytest.mark.parametrize("name", ["heads", "packed-qkv", "batched-w-rows-scattered", "batch-columns-to-rows"])
def test_non_contiguous_inputs(ranks: Any, name: str, algorithm: str) -> None:
    ranks(2).run(check_non_contiguous, BY_NAME[name], algorithm)


def check_opcheck(rank: int, problem: Problem, dtype: torch.dtype, strided: bool) -> None:
    size, name = dist.get_world_size(), dist.group.WORLD.group_name
    inputs = [None if t is None else t.clone() for t in integers(problem, rank, size, dtype)]
    if strided:
        inputs = [None if t is None else non_contiguous(t) for t in inputs]
    x, w, bias = [None if t is None else t.requires_grad_() for t in inputs]
    args = (x, w, bias, problem.sizes(size)[2], problem.gather_dim, problem.scatter_dim, size, name)
    torch.library.opcheck(torch.ops.fusedcomm.matmul_all_to_all.default, args)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_opcheck(ranks: Any, problem: Problem, dtype: torch.dtype) -> None:
    ranks(2).run(check_opcheck, problem, dtype, strided=dtype != torch.float16)


def check_gradients(rank: int, problem: Problem, algorithm: str | None, frozen: str) -> None:
    """Equal to those of autograd through the whole group's program, written without communication in float64."""
    size = dist.get_world_size()
    columns = problem.sizes(size)[2]
    leaves = [
        [t.double().requires_grad_() if t is not None else None for t in integers(problem, r, size)]
        for r in range(size)
    ]
    blocks = []
    for x, w, bias in leaves:
        y = x @ w if bias is None else x @ w + bias
        y = y if columns is None else y.unflatten(-1, columns)
        blocks.append(y.chunk(size, problem.scatter_dim))
    outs = [torch.cat([b[dst] for b in blocks], problem.gather_dim) for dst in range(size)]
    weights = [torch.arange(out.numel()).view(out.shape) % 5 - 2 + dst for dst, out in enumerate(outs)]
    sum((out * weight).sum() for out, weight in zip(outs, weights, strict=True)).backward()

    mine = dict(zip("xwb", integers(problem, rank, size), strict=True))
    for name, t in mine.items():
        if t is not None and name not in frozen:
            t.requires_grad_()
    with fusedcomm.force_algorithm(algorithm):
        out = fusedcomm.matmul_all_to_all(
            mine["x"],
            mine["w"],
            problem.gather_dim,
            problem.scatter_dim,
            bias=mine["b"],
            out_shape=columns,
        )
    (out * weights[rank]).sum().backward()
    for (name, t), leaf in zip(mine.items(), leaves[rank], strict=True):
        if t is None or name in frozen:
            assert t is None or t.grad is None
        else:
            torch.testing.assert_close(t.grad.double(), leaf.grad, rtol=0, atol=0)


@pytest.mark.parametrize("name", [p.name for p in PROBLEMS])
def test_gradients(ranks: Any, name: str) -> None:
    ranks(2).run(check_gradients, BY_NAME[name], None, "")


@pytest.mark.parametrize("frozen", ["x", "w", "wb"])
@pytest.mark.parametrize("algorithm", ["unfused", "fused"])
def test_gradients_with_frozen_inputs(ranks: Any, algorithm: str, frozen: str) -> None:
    ranks(3).run(check_gradients, BY_NAME["packed-qkv"], algorithm, frozen)


def eager_and_compiled(rank: int, kind: str, backend: str, dynamic: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    world = dist.group.WORLD
    group = {"None": None, "group": world, "name": world.group_name, "mesh": mesh, "mesh-dim": (mesh, 0)}[kind]

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return fusedcomm.matmul_all_to_all(x.relu(), w, 1, -2, group, out_shape=[2 * size, 3]).sigmoid()

    torch._dynamo.reset()
    compiled = torch.compile(program, fullgraph=True, backend=backend, dynamic=dynamic)
    for tokens in (4, 6, 7):
        x = torch.randn(2, tokens, 8, requires_grad=True)
        w = torch.randn(8, 6 * size, requires_grad=True)
        answers = []
        for run in (program, compiled):
            out = run(x, w)
            answers.append((out.detach(), *torch.autograd.grad(out.sum(), (x, w))))
        torch.testing.assert_close(answers[0], answers[1])
        assert [t.stride() for t in answers[0]] == [t.stride() for t in answers[1]]


@pytest.mark.parametrize("kind", ["None", "group", "name", "mesh", "mesh-dim"])
def test_in_a_compiled_graph(ranks: Any, kind: str) -> None:
    ranks(2).run(eager_and_compiled, kind, "aot_eager", False)


@pytest.mark.parametrize("dynamic", [False, True])
def test_in_a_graph_of_inductor(ranks: Any, dynamic: bool) -> None:
    ranks(2).run(eager_and_compiled, "group", "inductor", dynamic)


GOOD: dict[str, Any] = {
    "x": (4, 8),
    "w": (8, 6),
    "gather_dim": 0,
    "scatter_dim": 1,
    "bias": None,
    "out_shape": None,
}
BAD = [
    ({"x": (8,)}, "x must have at least 2 dims"),
    ({"w": (8,)}, "w must be 2-D"),
    ({"w": (2, 8, 6)}, "w must be 2-D"),
    ({"w": (9, 6)}, "x and w must agree on K, got 8 and 9"),
    ({"x": (3, 4, 8), "w": (2, 8, 6)}, "batch dims of w must equal those of x"),
    ({"w": (8, 7)}, "scatter_dim size must be divisible by group_size=2, got 7"),
    ({"gather_dim": 2}, r"gather_dim must be in \[-2, 1\], got 2"),
    ({"scatter_dim": -3}, r"scatter_dim must be in \[-2, 1\], got -3"),
    ({"scatter_dim": -2}, "gather_dim and scatter_dim must differ, got 0 and -2"),
    ({"out_shape": [4]}, "out_shape must be sizes whose product is N=6"),
    ({"out_shape": [-1, -6]}, "out_shape must be sizes whose product is N=6"),
    ({"bias": (1, 6)}, r"bias must have shape \[N\] = \[6\], got \[1, 6\]"),
    ({"bias": (8,)}, r"bias must have shape \[N\] = \[6\]"),
]


def check_bad_input(rank: int, change: dict[str, Any], message: str) -> None:
    call = GOOD | change
    tensors = {name: None if call[name] is None else torch.ones(call[name]) for name in ("x", "w", "bias")}
    for device in ("cpu", "meta"):
        x, w, bias = (None if t is None else t.to(device) for t in tensors.values())
        with pytest.raises(ValueError, match=message):
            fusedcomm.matmul_all_to_all(
                x,
                w,
                call["gather_dim"],
                call["scatter_dim"],
                bias=bias,
                out_shape=call["out_shape"],
            )


@pytest.mark.parametrize("change, message", BAD, ids=[m.split(",")[0] for _, m in BAD])
def test_bad_input_is_a_value_error_on_every_device(ranks: Any, change: dict[str, Any], message: str) -> None:
    ranks(2).run(check_bad_input, change, message)
    ranks(2).run(check_values, BY_NAME["ragged"], torch.float32, "chunked", 1)  # nothing was sent, nothing is lost


def check_bad_types(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    x, w = torch.ones(4, 8), torch.ones(8, 6)
    for args, message in [
        ((x.int(), w.int()), "x must be float32, float16 or bfloat16"),
        ((x, w.bfloat16()), "w must have x's dtype torch.float32, got torch.bfloat16"),
        ((x, w.to("meta")), "w must be on x's device cpu, got meta"),
    ]:
        with pytest.raises(ValueError, match=message):
            fusedcomm.matmul_all_to_all(*args, 0, 1)
    with pytest.raises(ValueError, match="group_size must be the size of group"):
        torch.ops.fusedcomm.matmul_all_to_all(x, w, None, None, 0, 1, 3, dist.group.WORLD.group_name)
    with pytest.raises(ValueError, match="algorithm must be one of"):
        fusedcomm.force_algorithm("quick")
    group = dist.new_group()
    name = group.group_name
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="got a destroyed one"):
        fusedcomm.matmul_all_to_all(x, w, 0, 1, group)
    with pytest.raises(ValueError, match="group_size must be at least 1, got 0"):
        torch.ops.fusedcomm.matmul_all_to_all(x, w, None, None, 0, 1, 0, dist.group.WORLD.group_name)
    mesh = init_device_mesh("cpu", (2,))
    for bad in ((mesh, 7), (mesh, "zz"), (dist.group.WORLD, 0), (mesh, 0, 0), 3):
        with pytest.raises(ValueError, match=r"mesh_dim must be one of|group must be a ProcessGroup, DeviceMesh"):
            fusedcomm.matmul_all_to_all(x, w, 0, 1, bad)
    first = dist.new_group([0])
    if rank == 1:
        with pytest.raises(ValueError, match="group must contain this rank"):
            fusedcomm.matmul_all_to_all(x, w, 0, 1, first)
    with pytest.raises(ValueError, match="must be an initialised process group"):
        fusedcomm.matmul_all_to_all(x, w, 0, 1, name)


def test_bad_types_and_groups(ranks: Any) -> None:
    ranks(2).run(check_bad_types)


def check_groups(rank: int) -> None:
    """Every way to name a group, overlapping sub-groups, and a group made anew under its old name."""
    from torch.distributed.device_mesh import init_device_mesh

    problem = BY_NAME["heads"]
    x, w, _ = integers(problem, rank, 4)
    columns = problem.sizes(4)[2]
    mesh = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for group in (
        None,
        dist.group.WORLD,
        dist.group.WORLD.group_name,
        mesh,
        (square["a", "b"]._flatten(), 0),
    ):
        out = fusedcomm.matmul_all_to_all(x, w, 1, -2, group, out_shape=columns)
        torch.testing.assert_close(out, expected(problem, 4)[rank], rtol=0, atol=0)
    with pytest.raises(ValueError, match="must be 1-D"):
        fusedcomm.matmul_all_to_all(x, w, 1, -2, square, out_shape=columns)
    for _ in range(2):
        groups = [dist.new_group(members) for members in ([0, 1], [1, 2, 3], [0, 3])]
        for members, group in zip(([0, 1], [1, 2, 3], [0, 3]), groups, strict=True):
            if rank in members:
                size = len(members)
                out = call_in(group, problem, members.index(rank), size)
                torch.testing.assert_close(out, expected(problem, size)[members.index(rank)], rtol=0, atol=0)
        dist.barrier()
        for group, members in zip(groups, ([0, 1], [1, 2, 3], [0, 3]), strict=True):
            if rank in members:
                dist.destroy_process_group(group)


def call_in(group: Any, problem: Problem, rank: int, group_size: int) -> torch.Tensor:
    x, w, bias = integers(problem, rank, group_size)
    columns = problem.sizes(group_size)[2]
    return fusedcomm.matmul_all_to_all(
        x, w, problem.gather_dim, problem.scatter_dim, group, bias=bias, out_shape=columns
    )


def test_groups(ranks: Any) -> None:
    ranks(4).run(check_groups)


def check_autocast(rank: int) -> None:
    x, w, bias = torch.randn(4, 8, requires_grad=True), torch.randn(8, 6, requires_grad=True), torch.randn(6)
    for algorithm in ("unfused", "chunked", "fused"):
        for left in (x, x.bfloat16().detach()):  # the second: what an earlier layer under autocast gives
            with fusedcomm.force_algorithm(algorithm, strict=True), torch.autocast("cpu", torch.bfloat16):
                out = fusedcomm.matmul_all_to_all(left, w, 0, 1, bias=bias)
            want = fusedcomm.matmul_all_to_all(left.bfloat16(), w.bfloat16(), 0, 1, bias=bias.bfloat16())
            assert out.dtype == torch.bfloat16
            torch.testing.assert_close(out, want)
            (grad,) = torch.autograd.grad(out.sum(), w)
            assert grad.dtype == torch.float32


def test_autocast(ranks: Any) -> None:
    ranks(2).run(check_autocast)
