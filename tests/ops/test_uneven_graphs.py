"""Parts of different sizes in compiled graphs: fakes, one graph for many lengths, and caches that ranks share."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils import _pytree as pytree

import fusedcomm
from fusedcomm.plan.geometry.cut import chunk_parts
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


def gathered(x: Tensor, w: Tensor, total: int) -> Tensor:
    return fusedcomm.all_gather_matmul(x.sin(), w, 1, gather_size=total).cos()


def reduced(x: Tensor, w: Tensor, total: int) -> Tensor:
    return fusedcomm.matmul_reduce_scatter(x.sin(), w, 1).cos()


def inputs(program: Any, total: int, rank: int, world_size: int) -> list[Tensor]:
    tokens, heads = (chunk_parts(each, world_size).sizes[rank] for each in (total, HEADS))
    into_w, out_of_w = (13, HEADS * 3), (HEADS * 3, 13)
    shapes = {
        into: ((11, tokens, 13), into_w),
        out_of: ((11, total, heads, 3), out_of_w),
        gathered: ((11, tokens, 13), into_w),
        reduced: ((11, total, 13), into_w),
    }
    return [torch.randn(shape).requires_grad_() for shape in shapes[program]]


@on_ranks(2)
@pytest.mark.parametrize("program", [into, out_of, gathered, reduced])
def test_two_graphs_are_enough_for_every_remainder(rank: int, program: Any) -> None:
    """From 4 tokens on each rank has several; lengths of 0 and 1 have graphs of their own."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(program, dynamic=True, fullgraph=True, backend=counter)
    for total in (*range(34, 38), *((0, 1, 2, 3, *range(34, 38)) if program is into else ())):
        leaves = x, w = inputs(program, total, rank, 2)
        found, wanted = compiled(x, w, total), program(x, w, total)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        grads = (torch.autograd.grad(each.sum(), leaves) for each in (found, wanted))
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
    assert counter.frame_count <= 2 + 4 * (program is into)


def dispatched(op: str, rank: int, world_size: int, said_by: str = "ranges") -> tuple[Any, ...]:
    """The arguments of torch.ops.fusedcomm.<op>. Its parts are said by their sizes and "ranges" or "lengths", or by the
    "size" of what is gathered alone, and what is scattered by nothing.
    """
    case, options = OPS[op]
    x, w, bias = case.inputs(world_size)[rank]
    lists = op == "all_gather_matmul"
    dims = [dim for dim in (case.gather_dim, case.scatter_dim) if dim is not None]
    first = [options["out_shape"]] if "out_shape" in options else []
    first += [options["reduce_op"]] if "reduce_op" in options else []
    asked = [options["asked"]] if "asked" in options else []
    said: list[Any] = []
    if case.gather_dim is not None:
        total = case.shape[case.gather_dim]
        said += [None, total] if said_by == "size" else [case.gathered(world_size), None]
    if case.scatter_dim is not None:
        starts, lengths = (list(each) for each in zip(*case.intervals(world_size), strict=True))
        said += [starts if said_by == "ranges" else None, None if said_by == "size" else lengths]
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
@pytest.mark.parametrize("op", OPS)
def test_autocast(rank: int, op: str) -> None:
    """Tensors are cast, and parts stay what they are."""
    call = getattr(torch.ops.fusedcomm, op)
    for said_by in ("ranges", "lengths", "size"):
        args = dispatched(op, rank, 2, said_by)
        cast = pytree.tree_map_only(Tensor, lambda t: t.detach().bfloat16(), args)
        with torch.autocast("cpu", torch.bfloat16):
            found = pytree.tree_leaves(call(*args))
        assert all(t.dtype == torch.bfloat16 for t in found)
        torch.testing.assert_close(found, pytree.tree_leaves(call(*cast)), rtol=0, atol=0)


@on_ranks(2)
@pytest.mark.parametrize("op", ["matmul_all_to_all", "matmul_reduce_scatter"])  # the others have no `.out`
def test_out(rank: int, op: str) -> None:
    for said_by in ("ranges", "lengths", "size"):
        args = dispatched(op, rank, 2, said_by)
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
