"""FSDP2, HSDP and DDP over the styles: a small Llama equals one process that has the whole batch."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as torch_parallel
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fusedcomm.parallel
from tests.helpers.on_ranks import on_ranks
from tests.helpers.small_llama import (
    Block,
    Llama,
    agree,
    batch_of,
    by_ops,
    difference,
    llama,
    loss_of,
    meshes,
    parallelize,
    plain,
    shard,
    train,
    whole,
)
from tests.helpers.tiers import nightly_but, thorough_but

CLOSE = 1e-6  # relative; float32 has 1.2e-7, and torch's own styles are 6e-7 away


def whole_blocks(model: Llama, mesh: DeviceMesh) -> dict[str, Any]:
    shard(model, mesh)
    return {}


def kept_after_the_forward(model: Llama, mesh: DeviceMesh) -> dict[str, Any]:
    shard(model, mesh, reshard_after_forward=False)
    return {}


def halves_of_blocks(model: Llama, mesh: DeviceMesh) -> dict[str, Any]:
    for block in model.layers:
        fully_shard(block.attention, mesh=mesh)
        fully_shard(block.feed_forward, mesh=mesh)
    shard(model, mesh)
    return {}


def microbatches(model: Llama, mesh: DeviceMesh) -> dict[str, Any]:
    shard(model, mesh)

    @contextmanager
    def synchronized(last: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(last)  # type: ignore[operator]
        yield

    return {"pieces": 2, "before_piece": synchronized}


def checkpointed(model: Llama, mesh: DeviceMesh) -> dict[str, Any]:
    model.around = functools.partial(checkpoint, use_reentrant=False)
    shard(model, mesh)
    return {}


def checkpoint_wrapped(model: Llama, mesh: DeviceMesh) -> dict[str, Any]:
    apply_activation_checkpointing(model, checkpoint_wrapper, lambda module: isinstance(module, Block))
    shard(model, mesh)
    return {}


FULLY_SHARDED: dict[str, Callable[[Llama, DeviceMesh], dict[str, Any]]] = {
    f.__name__: f
    for f in (
        whole_blocks,
        kept_after_the_forward,
        halves_of_blocks,
        microbatches,
        checkpointed,
        checkpoint_wrapped,
    )
}


@on_ranks(4)
@pytest.mark.parametrize("name", thorough_but(["whole_blocks"], FULLY_SHARDED))
def test_fully_shard(rank: int, name: str) -> None:
    with meshes(2, 2) as (data, tensor):
        model = parallelize(llama(), tensor)
        run = train(model, data=data, **FULLY_SHARDED[name](model, data))
        assert difference(run, plain()) <= CLOSE
        agree(run)
        assert by_ops(model)


@on_ranks(4)
@pytest.mark.thorough
def test_fully_shard_of_single_linears(rank: int) -> None:
    """FSDP2 gives each of them an x of its own, so those that would share a gather take torch's path."""
    with meshes(2, 2) as (data, tensor):
        model = parallelize(llama(), tensor)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                fully_shard(module, mesh=data)
        run = train(shard(model, data), data=data)
        assert difference(run, plain()) <= CLOSE
        agree(run)
        ran = fusedcomm.parallel.explain_layers(model)
        why_stock = "torch's own: x is another tensor than its module was given"
        stock = {name for name, why in ran.items() if why == why_stock}
        assert {name.rpartition(".")[2] for name in stock} == {"wq", "wk", "wv", "w1", "w3"}
        assert {why for name, why in ran.items() if name not in stock} == {"matmul_reduce_scatter", "all_gather_matmul"}


OPTIMIZERS = {
    "adamw-foreach": functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, foreach=True),
    "adamw-fused": functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, fused=True),
}


@on_ranks(4)
@pytest.mark.thorough
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(rank: int, name: str) -> None:
    make = OPTIMIZERS[name]
    with meshes(2, 2) as (data, tensor):
        model = shard(parallelize(llama(), tensor), data)
        assert difference(train(model, data=data, optimizer=make(model.parameters())), plain(make)) <= CLOSE


@on_ranks(4)
@pytest.mark.thorough
def test_mixed_precision(rank: int) -> None:
    """Losses are at most twice as far from float32's as under torch's own styles, or a rounding of bfloat16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    errors = []
    with meshes(2, 2) as (data, tensor):
        for styles in (torch_parallel, fusedcomm.parallel):
            model = shard(parallelize(llama(), tensor, styles), data, mp_policy=policy)
            losses = train(model, data=data).losses
            errors.append(max(abs(one - want) for one, want in zip(losses, plain().losses, strict=True)))
        assert by_ops(model)
    assert 0 < errors[1] <= max(2 * errors[0], 2**-9 * plain().losses[0])


@on_ranks(4)
@pytest.mark.thorough
def test_autocast(rank: int) -> None:
    """Each gradient is at most twice as far from float32's as those of one process under autocast."""
    autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    with meshes(2, 2) as (data, tensor):
        model = shard(parallelize(llama(), tensor), data)
        ours = train(model, data=data, steps=range(1), around_forward=autocast)
        assert by_ops(model)
    one = train(llama(), steps=range(1), around_forward=autocast)
    for name, want in plain().gradients.items():
        error, error_of_one = ((run.gradients[name] - want).norm() for run in (ours, one))
        assert error <= 2 * error_of_one, name


@on_ranks(4)
@pytest.mark.thorough
def test_copies_and_averages(rank: int) -> None:
    """A deepcopy made before FSDP2 trains by itself; an average of what FSDP2 shards follows the weights."""
    with meshes(2, 2) as (data, tensor):
        model = parallelize(llama(), tensor)
        copied = shard(copy.deepcopy(model), data)
        assert difference(train(copied, data=data), plain()) <= CLOSE
        average = {name: p.detach().clone() for name, p in shard(model, data).named_parameters()}
        wants = {name: p.detach().clone() for name, p in llama().named_parameters()}
        one = llama()
        for step in range(2):
            train(model, data=data, steps=range(step, step + 1))
            train(one, steps=range(step, step + 1))
            for sums, trained in ((average, model), (wants, one)):
                torch._foreach_lerp_(list(sums.values()), [p.detach() for p in trained.parameters()], 0.5)
        for name, want in wants.items():
            assert (whole(average[name]) - want).norm() <= CLOSE * want.norm(), name


@on_ranks(4)
@pytest.mark.thorough
def test_meta_device(rank: int) -> None:
    """Parameters get memory when they are sharded over both meshes, and values from a whole state dict."""
    with meshes(2, 2) as (data, tensor):
        with torch.device("meta"):
            model = Llama()
        shard(parallelize(model, tensor), data)
        model.to_empty(device="cpu")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, llama().state_dict() if rank == 0 else {}, options=options)
        assert difference(train(model, data=data), plain()) <= CLOSE


HYBRID = [(4, (1, 2, 2)), (4, (2, 2, 1)), (4, (2, 1, 2)), (8, (2, 2, 2))]


@on_ranks()
@pytest.mark.thorough
@pytest.mark.parametrize(("world_size", "sizes"), nightly_but(HYBRID[-2:], HYBRID))
def test_hybrid_shard(rank: int, world_size: int, sizes: tuple[int, int, int]) -> None:
    with meshes(*sizes) as (data, tensor):
        model = shard(parallelize(llama(), tensor), data)
        run = train(model, data=data._flatten())
        assert difference(run, plain()) <= CLOSE
        agree(run)
        assert by_ops(model)


@on_ranks(4)
@pytest.mark.thorough
@pytest.mark.parametrize("pieces", [1, 2])
def test_ddp(rank: int, pieces: int) -> None:
    """torch's way to run DDP over tensor parallelism: parameters are plain between calls, and DTensors within."""
    wants = llama()
    optimizer = torch.optim.SGD(wants.parameters(), lr=0.5)
    with meshes(2, 2) as (data, tensor):
        model = parallelize(llama(), tensor)
        _pre_dp_module_transform(model)
        replicas = DistributedDataParallel(model, process_group=data.get_group())
        our_optimizer = torch.optim.SGD(replicas.parameters(), lr=0.5)
        for step in range(3):
            want = loss_of(wants, batch_of(step))
            want.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = torch.zeros(())
            microbatches = batch_of(step).chunk(2)[data.get_local_rank()].chunk(pieces)
            for i, piece in enumerate(microbatches):
                with nullcontext() if i == pieces - 1 else replicas.no_sync():
                    loss = loss_of(replicas, piece) / pieces
                    loss.backward()
                total += loss.detach() / 2
            our_optimizer.step()
            our_optimizer.zero_grad()
            dist.all_reduce(total, group=data.get_group())
            torch.testing.assert_close(total, want.detach(), rtol=CLOSE, atol=0)
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        assert by_ops(model)
