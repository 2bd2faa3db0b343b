"""The table of docs/layers.md: by what a rank divides its loss where gradients are averaged, and where they are summed.

Each row runs once on a mesh of 2 x 2 ranks beside one process: loss and gradients must be equal, and those of the loss
without the row's factor must not.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fusedcomm.nn import sum_replicated_gradients
from tests.helpers.nn_mlp import (
    CLOSE,
    MLP,
    check_gradients,
    data,
    distribute_norm,
    gradients,
    mesh_of_pairs,
    parallel_mlp,
    plain_mlp,
)
from tests.helpers.on_ranks import on_ranks

AXIS = 2  # ranks in each dim of the mesh


@dataclass(frozen=True)
class Row:
    name: str
    averaged: bool  # the batch is sharded over the mesh's first dim, by FSDP2
    summed: bool  # the tokens are sharded over its second dim
    masked: bool = False  # the loss is a mean over some tokens, in numbers that differ by rank
    by_hand: bool = False  # the norm stays plain, and sum_replicated_gradients adds up its gradient

    def __str__(self) -> str:
        return self.name


ROWS = [
    Row("averaged", averaged=True, summed=False),
    Row("summed", averaged=False, summed=True),
    Row("summed-by-hand", averaged=False, summed=True, by_hand=True),
    Row("averaged-and-summed", averaged=True, summed=True),
    Row("masked", averaged=True, summed=True, masked=True),
    Row("masked-and-whole", averaged=True, summed=False, masked=True),
]


def part(t: Tensor, row: Row, coordinate: list[int]) -> Tensor:
    """With ``masked`` the ranks of the first dim have 3 sequences and 1, too."""
    if row.averaged:
        t = t.split([3, 1])[coordinate[0]] if row.masked else t.chunk(AXIS)[coordinate[0]]
    return t.chunk(AXIS, 1)[coordinate[1]] if row.summed else t


def loss_of(y: Tensor, mask: Tensor, row: Row, count: Tensor) -> Tensor:
    """A rank's loss, as the table has it. ``count``: of the tokens that count, on all ranks."""
    per_token = y.square().mean(-1)
    if row.masked:
        return (per_token * mask).sum() * (AXIS if row.averaged else 1) / count
    return per_token.mean() / (AXIS if row.summed else 1)


def counted(mask: Tensor, row: Row) -> Tensor:
    """The number of tokens on all ranks: each rank counts its own, and those that hold the same count them once."""
    count = mask.sum().clone()
    dist.all_reduce(count)
    return count / ((1 if row.averaged else AXIS) * (1 if row.summed else AXIS))


def grads_are_right(model: MLP, plain: MLP, row: Row, mesh: DeviceMesh, x: Tensor, mask: Tensor, by: float) -> bool:
    model.zero_grad()
    (loss_of(model(x), mask, row, counted(mask, row)) * by).backward()
    if row.by_hand:
        sum_replicated_gradients(model, also=model.norm.parameters(), group=mesh["model"])
    wants = gradients(plain)
    return all(torch.allclose(grad, wants[name], **CLOSE) for name, grad in gradients(model).items())


@on_ranks(4)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_row(rank: int, row: Row) -> None:
    mesh, x, plain = mesh_of_pairs(), data(), plain_mlp()
    mask = (torch.rand(x.shape[:2], generator=torch.Generator().manual_seed(3)) < 0.6).float()
    mask = mask if row.masked else torch.ones_like(mask)
    ((plain(x).square().mean(-1) * mask).sum() / mask.sum()).backward()
    sequence_dim = 1 if row.summed else None
    model = parallel_mlp(plain, (mesh, "model"), sequence_dim)
    if not row.by_hand:
        distribute_norm(model, mesh["model"], sequence_dim)
    if row.averaged:
        fully_shard(model, mesh=mesh["data"])
    mine, mask = (part(t, row, mesh.get_coordinate()) for t in (x, mask))
    assert grads_are_right(model, plain, row, mesh, mine, mask, 1)
    assert not grads_are_right(model, plain, row, mesh, mine, mask, AXIS)


@on_ranks(2)
def test_distributed_data_parallel_averages(rank: int) -> None:
    plain = plain_mlp()
    model = DistributedDataParallel(plain_mlp())
    plain(data()).square().mean().backward()
    model(data().chunk(2)[rank]).square().mean().backward()
    check_gradients(model.module, plain)
