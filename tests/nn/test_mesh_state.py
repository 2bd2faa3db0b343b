"""What clips, optimizes, shards and saves DTensors sees whole layers of fusedcomm.nn, as on one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from fusedcomm.nn import ColumnParallelLinear, RowParallelLinear, UlyssesOut, full_state_dict, sum_replicated_gradients
from fusedcomm.parallel.meshes import mesh_of
from tests.helpers.nn_mlp import (
    CLOSE,
    HIDDEN,
    MLP,
    check_gradients,
    check_parameters,
    data,
    distribute_norm,
    mean_square,
    mesh_of_pairs,
    parallel_mlp,
    plain_mlp,
    step,
)
from tests.helpers.on_ranks import on_ranks
from tests.helpers.small_llama import TAKES_PARTIAL_SUMS, lay_out_gradients

MAX_NORM = 1e-2  # far below the gradients' norm


def clipped(model: nn.Module, foreach: bool | None) -> torch.Tensor:
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, foreach=foreach)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@on_ranks(2)
@pytest.mark.parametrize("sequence_dim", [1, None])
def test_clipping_and_optimizers(rank: int, sequence_dim: int | None) -> None:
    """The norm, the clipped gradients and the weights after a step are those of one process, on every rank."""
    mesh, x = init_device_mesh("cpu", (2,)), data()
    mine = x if sequence_dim is None else x.chunk(2, sequence_dim)[rank]
    for options in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        plain = plain_mlp()
        model = distribute_norm(parallel_mlp(plain, mesh, sequence_dim), mesh, sequence_dim)
        step(plain, x)
        step(model, mine, lambda y: y.square().mean() / (2 if sequence_dim else 1))
        check_gradients(model, plain)
        if not TAKES_PARTIAL_SUMS or options.get("foreach") is None:
            lay_out_gradients(model)
        norms = [clipped(each, options.get("foreach")) for each in (model, plain)]
        torch.testing.assert_close(*norms, **CLOSE)
        assert norms[0] > 10 * MAX_NORM
        check_gradients(model, plain)
        for each in (model, plain):
            torch.optim.AdamW(each.parameters(), lr=0.1, **options).step()
        check_parameters(model, plain)


@on_ranks(2)
def test_a_norm_that_stays_plain(rank: int) -> None:
    """torch refuses to clip plain parameters with DTensors, and to step them in one go; docs/layers.md says so."""
    model = parallel_mlp(plain_mlp(), None, None)
    step(model, data())
    mixed = pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor")
    with mixed:
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    for options in ({"foreach": True}, {"fused": True}):
        with mixed:
            torch.optim.AdamW(model.parameters(), **options).step()
    torch.optim.AdamW(model.parameters()).step()


@on_ranks(4)
@pytest.mark.parametrize("sequence_dim", [1, None])
def test_fsdp2_over_the_other_dim(rank: int, sequence_dim: int | None) -> None:
    mesh, x = mesh_of_pairs(), data()
    plain = plain_mlp()
    model = distribute_norm(parallel_mlp(plain, (mesh, "model"), sequence_dim), mesh["model"], sequence_dim)
    model = copy.deepcopy(model)  # with meshes that are copies, too
    fully_shard(model, mesh=mesh["data"])
    assert model.up.weight.device_mesh.ndim == 2
    mine = x.chunk(2, 0)[rank // 2]
    mine = mine if sequence_dim is None else mine.chunk(2, sequence_dim)[rank % 2]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1, foreach=True) for each in (model, plain)]
    for _ in range(2):
        step(plain, x)
        step(model, mine, lambda y: y.square().mean() / (2 if sequence_dim else 1))
        torch.testing.assert_close(clipped(model, None), clipped(plain, None), **CLOSE)
        check_gradients(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in full_state_dict(model).items():
        torch.testing.assert_close(value, plain.get_parameter(name).detach(), **CLOSE)
    check_ways_in_and_out(model)


def check_ways_in_and_out(model: MLP) -> None:
    """to_linear, reset_parameters and load_state_dict of layers whose shards FSDP2 has cut once more."""
    for layer, linear in ((model.up, nn.Linear(HIDDEN, 12)), (model.down, nn.Linear(12, HIDDEN))):
        layer.load_state_dict(linear.state_dict())
        back = layer.to_linear()
        assert torch.equal(back.weight, linear.weight) and torch.equal(back.bias, linear.bias)
        torch.manual_seed(7)
        layer.reset_parameters()
        torch.manual_seed(7)
        linear.reset_parameters()
        assert torch.equal(layer.to_linear().weight, linear.weight)


def save(rank: int, folder: Path) -> None:
    plain, model = plain_mlp(), parallel_mlp(plain_mlp(), None, None)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (plain, model)]
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        step(each, data())
        optimizer.step()
    check_parameters(model, plain)
    state, moments = get_state_dict(model, optimizers[1])
    dcp.save({"model": state, "optimizer": moments}, checkpoint_id=folder)


def load(rank: int, folder: Path) -> None:
    """Load into a model of other values; the next step is that of one process that was not interrupted."""
    plain, model = plain_mlp(), parallel_mlp(plain_mlp(seed=5), None, None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    step(plain, data())
    plain_optimizer.step()
    plain_optimizer.zero_grad()
    state, moments = get_state_dict(model, optimizer)
    dcp.load({"model": state, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=moments)
    check_parameters(model, plain)
    torch.testing.assert_close(step(model, data()), step(plain, data()), **CLOSE)
    optimizer.step()
    plain_optimizer.step()
    check_parameters(model, plain)


def test_distributed_checkpoint(ranks: Any, tmp_path: Path) -> None:
    """It is saved on 2 ranks and loaded on 1 and 4."""
    ranks(2).run(save, tmp_path)
    for world_size in (1, 4):
        ranks(world_size).run(load, tmp_path)


class Attention(nn.Module):
    """What of Ulysses attention has parameters, with heads that are x itself."""

    def __init__(self, out: nn.Module) -> None:
        super().__init__()
        self.out = out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x)


@on_ranks(4)
def test_sum_replicated_gradients_under_fsdp2(rank: int) -> None:
    """FSDP2 averages over one dim of the mesh, this sums over the other; over the same ranks it is refused."""
    mesh = mesh_of_pairs()
    torch.manual_seed(1)
    plain = nn.Linear(12, 5)  # FSDP2 cuts 5 rows into 3 and 2
    x = torch.randn(4, 8, 4, 3, generator=torch.Generator().manual_seed(2))  # [batch, tokens, heads, head_dim]
    mean_square(plain(x.flatten(-2))).backward()
    layer = UlyssesOut.from_linear(plain, num_heads=4, group=(mesh, "model"))
    over_the_same = Attention(copy.deepcopy(layer))
    model = Attention(layer)
    fully_shard(model, mesh=mesh["data"])
    mine = x.chunk(2, 0)[rank // 2].chunk(2, 2)[rank % 2]
    step(model, mine, lambda y: y.square().mean() / 2)
    sum_replicated_gradients(model)
    check_gradients(model.out, plain)
    whole = full_state_dict(model)
    assert torch.equal(whole["out.weight"], plain.weight)

    fully_shard(over_the_same, mesh=mesh["model"])
    step(over_the_same, mine)
    expected = r"the gradient of out.weight must not have been reduced over the group, .* its ranks \[\d, \d\]$"
    with pytest.raises(ValueError, match=expected):
        sum_replicated_gradients(over_the_same)


@on_ranks(4)
def test_a_mesh_for_each_way_to_name_a_group(rank: int) -> None:
    mesh, cpu = mesh_of_pairs(), torch.device("cpu")
    pair = mesh["model"]
    assert mesh_of(pair, cpu) is pair
    assert mesh_of((pair, 0), cpu) is pair
    assert mesh_of((mesh, "model"), cpu) == mesh_of((mesh, 1), cpu) == pair
    assert mesh_of((mesh, "model"), cpu)._get_root_mesh() is mesh
    for group in (pair.get_group(), pair.get_group().group_name, None):
        of_group = mesh_of(group, cpu)
        assert of_group == mesh_of(group, torch.device("meta"))
        assert of_group.get_group() is (dist.group.WORLD if group is None else pair.get_group())
    unnamed = DeviceMesh("cpu", [[0, 1], [2, 3]])
    assert mesh_of((unnamed, 1), cpu).get_group() is unnamed.get_group(1)


@on_ranks(4)
def test_ranks_of_a_mesh_that_do_not_ascend(rank: int) -> None:
    """They are refused where they cut parameters: their group gathers the blocks in another order."""
    torch.manual_seed(1)
    linear, crossed = nn.Linear(8, 8), DeviceMesh("cpu", [[0, 3], [2, 1]], mesh_dim_names=("down", "across"))
    for group in (DeviceMesh("cpu", [3, 1, 0, 2]), (crossed, 1), (crossed, "across"), (crossed, "down")):
        for kind in (ColumnParallelLinear, RowParallelLinear):
            with pytest.raises(ValueError, match=r"ranks of a DeviceMesh must ascend .*, got \[\[?[03]"):
                kind.from_linear(linear, group=group)
        layer = UlyssesOut.from_linear(linear, 4, group=group)  # cuts nothing
        assert torch.equal(full_state_dict(layer)["weight"], linear.weight)
    apart = DeviceMesh("cpu", [[0, 2], [1, 3]])
    column = ColumnParallelLinear.from_linear(linear, group=(apart, 1))
    assert torch.equal(full_state_dict(column)["weight"], linear.weight)


@on_ranks(2)
def test_checkpoints_of_torch_s_styles(rank: int) -> None:
    """Keys, shapes and placements are those that torch's styles give an nn.Linear."""
    import torch.distributed.tensor.parallel as torch_parallel

    mesh = init_device_mesh("cpu", (2,))
    plain = plain_mlp()
    model = parallel_mlp(plain, mesh, None)
    styles = {"up": torch_parallel.ColwiseParallel(), "down": torch_parallel.RowwiseParallel()}
    theirs = torch_parallel.parallelize_module(plain, mesh, styles).state_dict()
    ours = model.state_dict()
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert type(ours[name]) is type(value)
        if isinstance(value, DTensor):
            assert (ours[name].placements, ours[name].device_mesh) == (value.placements, value.device_mesh)
            assert torch.equal(ours[name].to_local(), value.to_local())
    model.load_state_dict(theirs)
    assert isinstance(model.up, ColumnParallelLinear) and isinstance(model.down, RowParallelLinear)
    placements = {name: value.placements[0] for name, value in model.state_dict().items() if isinstance(value, DTensor)}
    assert placements == {
        "up.weight": Shard(0),
        "up.bias": Shard(0),
        "down.weight": Shard(1),
        "down.bias": Replicate(),
    }
