"""FSDP2, HSDP and DDP over the styles: a small Llama equals one process that has the whole batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as torch_parallel
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fusedcomm.parallel
from tests.helpers.on_ranks import on_ranks
from tests.helpers.small_llama import (
    CLOSE,
    Llama,
    batch_of,
    by_ops,
    check,
    llama,
    loss_of,
    meshes,
    parallelize,
    plain,
    shard,
    train,
)
from tests.helpers.tiers import nightly_but, thorough_but


def whole_blocks(model: Llama, mesh: DeviceMesh) -> dict[str, Any]:
    shard(model, mesh)
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


FULLY_SHARDED: dict[str, Callable[[Llama, DeviceMesh], dict[str, Any]]] = {
    f.__name__: f for f in (whole_blocks, halves_of_blocks, microbatches, checkpointed)
}


@on_ranks(4)
@pytest.mark.parametrize("name", thorough_but(["whole_blocks"], FULLY_SHARDED))
def test_fully_shard(rank: int, name: str) -> None:
    with meshes(2, 2) as (data, tensor):
        model = parallelize(llama(), tensor)
        run = train(model, data=data, **FULLY_SHARDED[name](model, data))
        check(run)
        assert by_ops(model)


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


@on_ranks()
@pytest.mark.thorough
@pytest.mark.parametrize(("world_size", "sizes"), nightly_but([(4, (2, 1, 2))], [(4, (2, 1, 2)), (8, (2, 2, 2))]))
def test_hybrid_shard(rank: int, world_size: int, sizes: tuple[int, int, int]) -> None:
    with meshes(*sizes) as (data, tensor):
        model = shard(parallelize(llama(), tensor), data)
        run = train(model, data=data._flatten())
        check(run)
        assert by_ops(model)


@on_ranks(4)
@pytest.mark.thorough
def test_ddp(rank: int) -> None:
    """torch's way to run DDP over tensor parallelism: parameters are plain between calls, and DTensors within."""
    wants, pieces = llama(), 2  # the first microbatch adds nothing up
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
