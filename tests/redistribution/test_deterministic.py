"""Replicas are equal bit by bit: all holders of an element after a reduction over several mesh dims hold the same."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import fusedcomm
from fusedcomm.launch.ranks import RankPool
from tests.helpers.groups import left_as_found

Ranks = Callable[[int], RankPool]
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
AVG = Partial("avg")

PROVOKING = [[0, 1, 2], [5, 4, 3]]  # the sums of the first row are made from one end, of the second from the other
ORDINARY = [[0, 1, 2], [3, 4, 5]]
CUBE = np.arange(8).reshape(2, 2, 2).tolist()
MIXED = [[[0, 1], [6, 7]], [[4, 5], [2, 3]]]  # ranks ascend from other coordinates for each index of the second dim

CASES = [  # nested ranks, before, after, shape
    (PROVOKING, [P, P], [R, R], (1000,)),
    (PROVOKING, [AVG, AVG], [R, R], (1000,)),
    (ORDINARY, [P, P], [R, S0], (1001, 2)),
    (ORDINARY, [P, AVG], [S1, S0], (37, 23)),
    (CUBE, [P, R, P], [R, R, R], (1001,)),
    (CUBE, [AVG, P, P], [R, S0, R], (1001, 2)),
    (CUBE, [P, P, S1], [R, R, S0], (101, 7)),
    (MIXED, [P, R, P], [R, R, R], (1001,)),
]


def reduced(
    rank: int, nested: Any, before: list[Placement], after: list[Placement], shape: tuple[int, ...], use: str
) -> Tensor | None:
    """This rank's part, or None outside the mesh. What a rank adds depends on where the mesh dims are partial."""
    with left_as_found():
        mesh = DeviceMesh("cpu", nested)
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            return None
        parts = [0 if placement == R else c for placement, c in zip(before, coordinate, strict=True)]
        seed = np.ravel_multi_index(parts, mesh.shape).item()
        local = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        for i, placement in enumerate(before):
            if isinstance(placement, Shard):
                local = local.chunk(mesh.size(i), placement.dim)[coordinate[i]].contiguous()
        stride = torch.empty(shape, device="meta").stride()
        x = DTensor.from_local(local, mesh, before, run_check=False, shape=torch.Size(shape), stride=stride)
        call = fusedcomm.redistribute if use == "fusedcomm" else DTensor.redistribute
        outs = [call(x, placements=after).to_local() for _ in range(2)]
        assert torch.equal(*(out.view(torch.int32) for out in outs)), "another result the second time"
        return outs[0]


def num_different(nested: Any, after: list[Placement], outs: list[Tensor | None]) -> int:
    """Elements that holders, which differ in mesh dims that do not shard, have otherwise than the first one."""
    holders: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
    for coordinate in np.ndindex(*np.array(nested).shape):
        place = tuple(c if isinstance(p, Shard) else -1 for p, c in zip(after, coordinate, strict=True))
        holders[place].append(outs[np.array(nested)[coordinate]])
    differ = 0
    for replicas in holders.values():
        found = torch.stack(replicas).view(torch.int32)
        differ += int((found != found[0]).any(0).sum())
    return differ


@pytest.mark.parametrize(("nested", "before", "after", "shape"), CASES)
def test_all_holders_of_an_element_have_the_same_bits(
    ranks: Ranks, nested: Any, before: list[Placement], after: list[Placement], shape: tuple[int, ...]
) -> None:
    outs, theirs = (ranks(8).run(reduced, nested, before, after, shape, use) for use in ("fusedcomm", "torch"))
    assert num_different(nested, after, outs) == 0
    torch.testing.assert_close(outs, theirs)  # the same sums, but for the rounding


def test_replicas_of_torch_differ(ranks: Ranks) -> None:
    """torch goes one mesh dim at a time: each row sums its three parts in another order."""
    nested, before, after, shape = CASES[0]
    outs = ranks(8).run(reduced, nested, before, after, shape, "torch")
    assert num_different(nested, after, outs) > 50
