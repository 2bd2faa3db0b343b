"""Collectives merged in Inductor's graphs of DTensor's redistributions, forward and backward, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedcomm.compile
from tests.helpers.block_checks import interpreted
from tests.helpers.graphs import collectives_of, recorded_graphs, targets
from tests.helpers.merge_world import A2A, AG, AR, RS
from tests.helpers.on_ranks import on_ranks

REDISTRIBUTIONS = [  # on 2 x 2 ranks: from, to, and the collectives of the forward and the backward
    ("P P", "R R", [AR], []),
    ("S0 S0", "R R", [AG], []),
    ("P P", "S1 S0", [RS], [AG]),
    ("S0 S0", "S1 S1", [AG], [AG]),  # on CPU: which mesh dim a part is of cannot be told
    ("R S1", "S0 R", [AG], [AG]),  # on half of the ranks the part looks as if it were their own in the gather
    ("P R", "R S0", [AR], [AG]),
]


def redistributed(x: Tensor, mesh: Any, before: str, after: str) -> Tensor:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    named = {"P": Partial(), "avg": Partial("avg"), "R": Replicate(), "S0": Shard(0), "S1": Shard(1)}
    placed = [[named[each] for each in placements.split()] for placements in (before, after)]
    return DTensor.from_local(x, mesh, placed[0]).redistribute(mesh, placed[1]).to_local()


@pytest.mark.thorough
@on_ranks(4)
def test_dtensors(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2))

    def program(*xs: Tensor) -> list[Tensor]:
        results = [redistributed(x, mesh, *each[:2]) for x, each in zip(xs, REDISTRIBUTIONS, strict=False)]
        return [*results, redistributed(xs[-2] @ xs[-1], mesh, "P P", "S0 S0")]

    def run(program: Callable[..., list[Tensor]]) -> list[Tensor]:
        outs = program(*args)
        grads = torch.autograd.grad(outs, args, [torch.arange(out.numel()).view(out.shape) % 5.0 for out in outs])
        return [*(out.detach() for out in outs), *grads]

    generator = torch.Generator().manual_seed(rank)
    shapes = [(4, 8)] * len(REDISTRIBUTIONS) + [(8, 6), (6, 4)]
    args = [torch.randint(-2, 3, shape, generator=generator).float().requires_grad_() for shape in shapes]
    want = run(program)
    with recorded_graphs() as graphs, fusedcomm.compile.enabled(merge=mesh) as report:
        got = run(torch.compile(program, fullgraph=True, backend=interpreted))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    names = {AG: "all_gather_into_tensor", RS: "reduce_scatter_tensor", A2A: "all_to_all_single", AR: AR}
    for graph, at, fused in zip(graphs, (2, 3), ("matmul_reduce_scatter", "all_gather_matmul"), strict=True):
        ops = targets(graph, "fusedcomm")  # of collectives that are not merged too
        ops.remove(fused)
        wanted = sorted(names[kind] for each in REDISTRIBUTIONS for kind in each[at])
        assert sorted([*collectives_of(graph), *(names[kind] for kind in ops)]) == wanted, report
    left = [line for line in report.collectives if line.node.startswith("all_reduce") and line.status == "plain"]
    assert any("of which mesh dim part" in line.reason for line in left)
