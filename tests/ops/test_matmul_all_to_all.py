"""matmul_all_to_all: every way to name a group. The rest is in the tests of all ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedcomm
from tests.helpers.on_ranks import on_ranks
from tests.helpers.op_problems import NAMED
from tests.helpers.problems import Problem, expected, integers


@on_ranks(2)
def test_bad_groups(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    x, w = torch.ones(4, 8), torch.ones(8, 6)
    with pytest.raises(ValueError, match="algorithm must be one of"):
        fusedcomm.force_algorithm("quick")
    group = dist.new_group()
    name = group.group_name
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="got a destroyed one"):
        fusedcomm.matmul_all_to_all(x, w, 0, 1, group)
    with pytest.raises(ValueError, match="must be an initialised process group"):
        fusedcomm.matmul_all_to_all(x, w, 0, 1, name)
    mesh = init_device_mesh("cpu", (2,))
    for bad in ((mesh, 7), (mesh, "zz"), (dist.group.WORLD, 0), (mesh, 0, 0), 3):
        with pytest.raises(ValueError, match=r"mesh_dim must be one of|group must be a ProcessGroup, DeviceMesh"):
            fusedcomm.matmul_all_to_all(x, w, 0, 1, bad)
    first = dist.new_group([0])
    if rank == 1:
        with pytest.raises(ValueError, match="group must contain this rank"):
            fusedcomm.matmul_all_to_all(x, w, 0, 1, first)


@on_ranks(2)
def test_groups_in_a_compiled_graph(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh, world = init_device_mesh("cpu", (2,)), dist.group.WORLD
    for group in (None, world, world.group_name, mesh, (mesh, 0)):

        def program(x: torch.Tensor, w: torch.Tensor, group: Any = group) -> torch.Tensor:
            return fusedcomm.matmul_all_to_all(x.relu(), w, 1, -2, group, out_shape=[4, 3]).sigmoid()

        torch._dynamo.reset()
        x, w = torch.randn(2, 4, 8), torch.randn(8, 12)
        compiled = torch.compile(program, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x, w), program(x, w))


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

    problem = NAMED["heads"]
    x, w, _ = integers(problem, rank, 4)
    columns = problem.sizes(4)[2]
    mesh = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for group in (None, dist.group.WORLD, dist.group.WORLD.group_name, mesh, (square["a", "b"]._flatten(), 0)):
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


@on_ranks(2)
def test_gradients_without_columns(rank: int) -> None:
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 0, requires_grad=True)
    out = fusedcomm.matmul_all_to_all(x, w, 1, 0, out_shape=[4, 0])
    out.sum().backward()
    assert x.grad.shape == x.shape and not x.grad.any() and w.grad.shape == w.shape
