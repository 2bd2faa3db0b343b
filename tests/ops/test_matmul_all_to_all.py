"""matmul_all_to_all: every way to name a group, and bad input. The rest is in the tests of all ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedcomm
from tests.helpers.groups import bad_ids, check_bad_input, check_values, empty_is_nan
from tests.helpers.on_ranks import on_ranks
from tests.helpers.problems import PROBLEMS, Problem, expected, integers
from tests.helpers.tiers import thorough_but

OP = "matmul_all_to_all"
BY_NAME = {problem.name: problem for problem in PROBLEMS}


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


@pytest.mark.parametrize("kind", thorough_but(["None", "mesh-dim"], ["None", "group", "name", "mesh", "mesh-dim"]))
def test_in_a_compiled_graph(ranks: Any, kind: str) -> None:
    ranks(2).run(eager_and_compiled, kind, "aot_eager", False)


@pytest.mark.parametrize("dynamic", thorough_but([False], [False, True]))
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
    ({"gather_dim": 2}, r"gather_dim must be in \[-2, 1\], got 2"),
    ({"scatter_dim": -3}, r"scatter_dim must be in \[-2, 1\], got -3"),
    ({"scatter_dim": -2}, "gather_dim and scatter_dim must differ, got 0 and -2"),
    ({"out_shape": [4]}, "out_shape must be sizes whose product is N=6"),
    ({"out_shape": [-1, -6]}, "out_shape must be sizes whose product is N=6"),
    ({"bias": (1, 6)}, r"bias must have shape \[N\] = \[6\], got \[1, 6\]"),
    ({"bias": (8,)}, r"bias must have shape \[N\] = \[6\]"),
]


@pytest.mark.parametrize("change, message", BAD, ids=bad_ids(BAD))
def test_bad_input_is_a_value_error_on_every_device(ranks: Any, change: dict[str, Any], message: str) -> None:
    ranks(2).run(check_bad_input, OP, GOOD | change, message)
    ranks(2).run(check_values, BY_NAME["ragged"], torch.float32, "chunked", 1)  # nothing was sent, nothing is lost


@on_ranks(2)
def test_bad_types_and_groups(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    x, w = torch.ones(4, 8), torch.ones(8, 6)
    for args, message in [
        ((x.int(), w.int()), "x must be float32, float16, bfloat16 or float64"),
        ((x, w.bfloat16()), "w must have x's dtype torch.float32, got torch.bfloat16"),
        ((x, w.to("meta")), "w must be on x's device cpu, got meta"),
    ]:
        with pytest.raises(ValueError, match=message):
            fusedcomm.matmul_all_to_all(*args, 0, 1)
    with pytest.raises(ValueError, match="group_size must be the size of group"):
        torch.ops.fusedcomm.matmul_all_to_all(x, w, None, None, 0, 1, *[None] * 5, 3, dist.group.WORLD.group_name)
    with pytest.raises(ValueError, match="algorithm must be one of"):
        fusedcomm.force_algorithm("quick")
    group = dist.new_group()
    name = group.group_name
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="got a destroyed one"):
        fusedcomm.matmul_all_to_all(x, w, 0, 1, group)
    with pytest.raises(ValueError, match="group_size must be at least 1, got 0"):
        torch.ops.fusedcomm.matmul_all_to_all(x, w, None, None, 0, 1, *[None] * 5, 0, dist.group.WORLD.group_name)
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


def call_in(group: Any, problem: Problem, rank: int, group_size: int) -> torch.Tensor:
    x, w, bias = integers(problem, rank, group_size)
    columns = problem.sizes(group_size)[2]
    return fusedcomm.matmul_all_to_all(
        x, w, problem.gather_dim, problem.scatter_dim, group, bias=bias, out_shape=columns
    )


@on_ranks(4)
def test_groups(rank: int) -> None:
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


@on_ranks()
@pytest.mark.parametrize("dims", [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)], ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
def test_long_runs(rank: int, world_size: int, dims: tuple[int, int]) -> None:
    """Runs of 130 rows: the own chunk is computed where it belongs in the result, from this rank's rows."""
    size, (gather_dim, scatter_dim) = world_size, dims
    shape = [2 * size, 130, 5] if scatter_dim == 0 else [2, 130 * size, 5]
    generators = [torch.Generator().manual_seed(r) for r in range(size)]
    xs = [torch.randint(-2, 3, shape, generator=g).float() for g in generators]
    w = torch.randint(-2, 3, (5, 2 * size), generator=torch.Generator().manual_seed(99)).float()
    want = torch.cat([(x @ w).chunk(size, scatter_dim)[rank] for x in xs], gather_dim)
    with fusedcomm.force_algorithm("chunked", strict=True), empty_is_nan():
        out = fusedcomm.matmul_all_to_all(xs[rank], w, gather_dim, scatter_dim)
    torch.testing.assert_close(out, want, rtol=0, atol=0)


@on_ranks(2)
def test_gradients_without_columns(rank: int) -> None:
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 0, requires_grad=True)
    out = fusedcomm.matmul_all_to_all(x, w, 1, 0, out_shape=[4, 0])
    out.sum().backward()
    assert x.grad.shape == x.shape and not x.grad.any() and w.grad.shape == w.shape
