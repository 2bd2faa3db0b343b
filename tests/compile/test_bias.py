"""A bias of every shape that broadcasts: it is fused, or left with a reason, and no pass fails."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from fusedcomm.compile.passes import FusedcommPass, Settings
from fusedcomm.compile.reports import CompileReport
from tests.helpers.graphs import aten_graph
from tests.helpers.on_ranks import on_ranks
from tests.helpers.program_parts import all_gather, reduce_scatter, world

T, K, N = 4, 8, 8
SHAPES: dict[str, tuple[tuple[int, ...], bool]] = {  # and whether the bias is the same in every row
    "one": ((1,), True),
    "columns": ((N,), True),
    "one-row": ((1, N), True),
    "one-by-one": ((1, 1), True),
    "scalar": ((), True),
    "rows": ((T, 1), False),
    "whole": ((T, N), False),
}


def exchange(y: Tensor) -> Tensor:
    r = dist.get_world_size()
    y = y.view(-1, r, N // r).transpose(0, 1).contiguous()
    return funcol.wait_tensor(funcol.all_to_all_single(y, [1] * r, [1] * r, world()))


PROGRAMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "added": lambda x, w, b: exchange(x @ w + b),
    "addmm": lambda x, w, b: exchange(torch.addmm(b, x, w)),
    "gather": lambda x, w, b: all_gather(x, 1, world()) @ w.repeat(dist.get_world_size(), 1) + b,
    "reduce-scatter": lambda x, w, b: reduce_scatter(x @ w + b / dist.get_world_size(), "sum", 0, world()),
    "reduce-scatter-of-columns": lambda x, w, b: reduce_scatter(x @ w + b, "sum", 1, world()),
    "all-reduce-of-addmm": lambda x, w, b: funcol.all_reduce(torch.addmm(b, x, w), "avg", world()),
    "all-reduce": lambda x, w, b: funcol.all_reduce(x @ w + b / dist.get_world_size(), "sum", world()),
}


@on_ranks(2)
@pytest.mark.parametrize("kind", PROGRAMS)
def test_graphs_and_values(rank: int, kind: str) -> None:
    program = PROGRAMS[kind]
    generator = torch.Generator().manual_seed(7)
    for name, (shape, same_in_rows) in SHAPES.items():
        sizes = (T, K), (K, N), shape
        x, w, bias = (torch.randint(-3, 4, size, generator=generator).float() for size in sizes)
        bias *= 2 * (rank + 1) if "reduce" in kind else 1  # each rank's own is added before the sum
        args, report = [x * (rank + 1), w, bias], CompileReport()
        gm = aten_graph(program, args)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="fusedcomm")  # a pass that fails says so
            FusedcommPass(Settings(), report)(gm.graph)
        gm.recompile()
        assert torch.equal(gm(*args), program(*args)), name
        (line,) = report.collectives
        assert (line.status == "fused") == (same_in_rows or kind == "gather"), line  # else it adds behind the op
