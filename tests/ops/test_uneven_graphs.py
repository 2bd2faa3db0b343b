"""Parts of different sizes in compiled graphs: fakes, one graph for many lengths, and caches that ranks share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import fusedcomm
from fusedcomm.geometry.cut import chunk_parts
from fusedcomm.launch.ranks import RankPool
from tests.helpers.on_ranks import on_ranks
from tests.helpers.uneven import Uneven

HEADS = 5
OPS: dict[str, tuple[Uneven, dict[str, Any]]] = {
    "matmul_all_to_all": (Uneven("matmul_all_to_all", (7, 5), gather_dim=0, scatter_dim=1), {"out_shape": None}),
    "all_to_all_matmul": (Uneven("all_to_all_matmul", (8, 5), gather_dim=1, scatter_dim=0), {"asked": True}),
    "all_gather_matmul": (Uneven("all_gather_matmul", (7, 4), gather_dim=0), {"asked": True}),
    "matmul_reduce_scatter": (Uneven("matmul_reduce_scatter", (7, 4), scatter_dim=0), {"reduce_op": "sum"}),
}


def into(x: Tensor, w: Tensor, total: int) -> Tensor:
    return fusedcomm.matmul_all_to_all(x.sin(), w, 1, -2, out_shape=[HEADS, 3], gather_size=total).cos()


def out_of(x: Tensor, w: Tensor, total: int) -> Tensor:
    return fusedcomm.all_to_all_matmul(x.sin(), w, -2, 1, gather_size=HEADS).cos()


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("program", [into, out_of], ids=["into-attention", "out-of-attention"])
def test_two_graphs_are_enough_for_every_remainder(world_size: int, program: Any) -> None:
    with RankPool(world_size) as pool:  # ranks compile unlike one another here, and Inductor numbers graphs
        pool.run(check_graphs, world_size, program)


def check_graphs(rank: int, world_size: int, program: Any) -> None:
    """Forward and backward, through Inductor and its caches, in which other ranks have graphs of other shapes."""
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(program, dynamic=True, fullgraph=True, backend=counter)
    heads = chunk_parts(HEADS, world_size).sizes[rank]
    for total in range(17 * world_size, 19 * world_size):  # sizes that are equal would be one symbol
        tokens = chunk_parts(total, world_size).sizes[rank]
        x = torch.randn(11, tokens, 13) if program is into else torch.randn(11, total, heads, 3)
        w = torch.randn(13, HEADS * 3) if program is into else torch.randn(HEADS * 3, 13)
        leaves = [x.requires_grad_(), w.requires_grad_()]
        found, wanted = compiled(x, w, total), program(x, w, total)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        grad = torch.randn_like(wanted)
        gradients = [torch.autograd.grad(each, leaves, grad) for each in (found, wanted)]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    # The lengths that R divides say no rank out of attention; into it Inductor asks if a part is as long as the others.
    assert counter.frame_count <= 2


def dispatched(op: str, rank: int, world_size: int) -> tuple[Any, ...]:
    """The arguments of torch.ops.fusedcomm.<op>, with splits said as lists."""
    case, options = OPS[op]
    x, w, bias = case.inputs(world_size)[rank]
    lists = op == "all_gather_matmul"
    dims = [dim for dim in (case.gather_dim, case.scatter_dim) if dim is not None]
    first = [options["out_shape"]] if "out_shape" in options else []
    first += [options["reduce_op"]] if "reduce_op" in options else []
    asked = [options["asked"]] if "asked" in options else []
    said = [case.gathered(world_size), None] if case.gather_dim is not None else []
    if case.scatter_dim is not None:
        starts, lengths = zip(*case.intervals(world_size), strict=True)
        said += [list(starts), list(lengths)]
    tensors = (x, [w], [bias]) if lists else (x, w, bias)
    for t in (x, w):
        t.requires_grad_()
    return *tensors, *first, *dims, *asked, *said, rank, world_size, dist.group.WORLD.group_name  # type: ignore[union-attr]


@on_ranks(3)
@pytest.mark.parametrize("op", OPS)
def test_opcheck(rank: int, op: str) -> None:
    """The same graphs hold for all sizes here, as none is 0 or 1 and no two are one symbol."""
    torch.library.opcheck(getattr(torch.ops.fusedcomm, op).default, dispatched(op, rank, 3))


@on_ranks(2)
@pytest.mark.parametrize("op", ["matmul_all_to_all", "matmul_reduce_scatter"])
def test_out(rank: int, op: str) -> None:
    args = dispatched(op, rank, 2)
    with torch.no_grad():
        wanted = getattr(torch.ops.fusedcomm, op)(*args)
        out = torch.full_like(wanted, float("nan"))
        getattr(torch.ops.fusedcomm, op).out(*args, out=out)
    torch.testing.assert_close(out, wanted, rtol=0, atol=0)


@on_ranks(2)
def test_a_rank_that_is_not_this_one_is_refused(rank: int) -> None:
    *args, _, size, name = dispatched("matmul_all_to_all", rank, 2)
    for wrong in (None, 2, -1):
        with pytest.raises(ValueError, match=r"rank must be in \[0, 1\] where parts may differ in size, got"):
            torch.ops.fusedcomm.matmul_all_to_all(*args, wrong, size, name)
    *others, _, size, name = dispatched("matmul_all_to_all", 1 - rank, 2)
    with pytest.raises(ValueError, match=f"rank must be this process' rank in the group, {rank}, got {1 - rank}"):
        torch.ops.fusedcomm.matmul_all_to_all(*others, 1 - rank, size, name)
