"""The table of docs/layers.md: by what a rank divides its loss where gradients are averaged, and where they are summed.

Each row runs once on a mesh of 2 x 2 ranks beside one process: loss and gradients must be equal, and those of the loss
without the row's factor must not.
"""

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module

from fusedcomm.nn import UlyssesOut, full_state_dict, sum_replicated_gradients
from fusedcomm.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from tests.helpers.on_ranks import on_ranks

BATCH, TOKENS, HIDDEN, INNER = 4, 8, 6, 12
# float32 has 1.2e-7; sums of some tens of terms run in another order, of gradients of about 0.1
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up: Any = nn.Linear(HIDDEN, INNER)
        self.down: Any = nn.Linear(INNER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def plain_mlp() -> MLP:
    torch.manual_seed(0)
    return MLP()


def data() -> Tensor:
    return torch.randn(BATCH, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))


def mesh_of_pairs() -> DeviceMesh:
    """Two pairs of four ranks: each pair holds one model."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))


def parallel_mlp(plain: MLP, mesh: DeviceMesh, sequence_dim: int | None) -> MLP:
    model = copy.deepcopy(plain)
    tokens = Replicate() if sequence_dim is None else Shard(sequence_dim)
    plan = {"up": ColwiseParallel(input_layouts=tokens), "down": RowwiseParallel(output_layouts=tokens)}
    parallelize_module(model, mesh, plan)
    return model


def distribute_norm(model: MLP, mesh: DeviceMesh, sequence_dim: int | None) -> MLP:
    if sequence_dim is not None:
        style = SequenceParallel(sequence_dim=sequence_dim, use_local_output=True)
        parallelize_module(model, mesh, {"norm": style})
        return model
    distribute_module(
        model.norm,
        mesh,
        input_fn=lambda module, inputs, mesh: DTensor.from_local(inputs[0], mesh, [Replicate()]),
        output_fn=lambda module, output, mesh: output.to_local(),
    )
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        grad = parameter.grad
        found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad  # a norm's is Partial
    return found


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
    model = parallel_mlp(plain, mesh["model"], sequence_dim)
    if not row.by_hand:
        distribute_norm(model, mesh["model"], sequence_dim)
    if row.averaged:
        fully_shard(model, mesh=mesh["data"])
    mine, mask = (part(t, row, mesh.get_coordinate()) for t in (x, mask))
    assert grads_are_right(model, plain, row, mesh, mine, mask, 1)
    assert not grads_are_right(model, plain, row, mesh, mine, mask, AXIS)


@on_ranks(4)
def test_sum_replicated_gradients_under_fsdp2(rank: int) -> None:
    """FSDP2 averages over one dim of the mesh, this sums over the other; over the same ranks it is refused."""
    mesh = mesh_of_pairs()
    torch.manual_seed(1)
    plain = nn.Linear(12, 5)  # FSDP2 cuts 5 rows into 3 and 2
    x = torch.randn(4, 8, 4, 3, generator=torch.Generator().manual_seed(2))  # [batch, tokens, heads, head_dim]
    plain(x.flatten(-2)).square().mean().backward()
    layer = UlyssesOut.from_linear(plain, num_heads=4, group=(mesh, "model"))
    over_the_same, model = (nn.Sequential(OrderedDict(out=each)) for each in (copy.deepcopy(layer), layer))
    fully_shard(model, mesh=mesh["data"])
    mine = x.chunk(2, 0)[rank // 2].chunk(2, 2)[rank % 2]
    (model(mine).square().mean() / 2).backward()
    sum_replicated_gradients(model)
    torch.testing.assert_close(gradients(model.out), gradients(plain), **CLOSE)
    whole = full_state_dict(model)
    assert torch.equal(whole["out.weight"], plain.weight)

    fully_shard(over_the_same, mesh=mesh["model"])
    over_the_same(mine).square().mean().backward()
    expected = r"the gradient of out.weight must not have been reduced over the group, .* its ranks \[\d, \d\]$"
    with pytest.raises(ValueError, match=expected):
        sum_replicated_gradients(over_the_same)
