"""FSDP2, HSDP and DDP over the styles: a small Llama equals one process that has the whole batch."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as torch_parallel
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fusedcomm
import fusedcomm.parallel
from fusedcomm.memory.group import resolve
from fusedcomm.parallel.float8_linear import GATHER, HELD, REDUCE, SCATTER, Casts, Move, scaled_linear
from tests.helpers import small_llama as small
from tests.helpers.groups import empty_is_nan
from tests.helpers.on_ranks import on_ranks
from tests.helpers.tiers import nightly_but


def whole_blocks(model: small.Llama, mesh: DeviceMesh) -> dict[str, Any]:
    small.shard(model, mesh)
    return {}


def halves_of_blocks(model: small.Llama, mesh: DeviceMesh) -> dict[str, Any]:
    for block in model.layers:
        fully_shard(block.attention, mesh=mesh)
        fully_shard(block.feed_forward, mesh=mesh)
    small.shard(model, mesh)
    return {}


def microbatches(model: small.Llama, mesh: DeviceMesh) -> dict[str, Any]:
    small.shard(model, mesh)

    @contextmanager
    def synchronized(last: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(last)  # type: ignore[operator]
        yield

    return {"pieces": 2, "before_piece": synchronized}


def checkpointed(model: small.Llama, mesh: DeviceMesh) -> dict[str, Any]:
    model.around = functools.partial(checkpoint, use_reentrant=False)
    small.shard(model, mesh)
    return {}


FULLY_SHARDED: dict[str, Callable[[small.Llama, DeviceMesh], dict[str, Any]]] = {
    f.__name__: f for f in (whole_blocks, halves_of_blocks, microbatches, checkpointed)
}


@on_ranks(4)
@pytest.mark.parametrize("name", FULLY_SHARDED)
def test_fully_shard(rank: int, name: str) -> None:
    with small.meshes(2, 2) as (data, tensor):
        model = small.parallelize(small.llama(), tensor)
        run = small.train(model, data=data, **FULLY_SHARDED[name](model, data))
        small.check(run)
        assert small.by_ops(model)


@on_ranks(4)
@pytest.mark.thorough
def test_mixed_precision(rank: int) -> None:
    """Losses are at most twice as far from float32's as under torch's own styles, or a rounding of bfloat16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    errors = []
    with small.meshes(2, 2) as (data, tensor):
        for styles in (torch_parallel, fusedcomm.parallel):
            model = small.shard(small.parallelize(small.llama(), tensor, styles), data, mp_policy=policy)
            losses = small.train(model, data=data).losses
            errors.append(max(abs(one - want) for one, want in zip(losses, small.plain().losses, strict=True)))
        assert small.by_ops(model)
    assert 0 < errors[1] <= max(2 * errors[0], 2**-9 * small.plain().losses[0])


@on_ranks()
@pytest.mark.thorough
@pytest.mark.parametrize(("world_size", "sizes"), nightly_but([(4, (2, 1, 2))], [(4, (2, 1, 2)), (8, (2, 2, 2))]))
def test_hybrid_shard(rank: int, world_size: int, sizes: tuple[int, int, int]) -> None:
    with small.meshes(*sizes) as (data, tensor):
        model = small.shard(small.parallelize(small.llama(), tensor), data)
        run = small.train(model, data=data._flatten())
        small.check(run)
        assert small.by_ops(model)


@on_ranks(4)
@pytest.mark.thorough
def test_ddp(rank: int) -> None:
    """torch's way to run DDP over tensor parallelism: parameters are plain between calls, and DTensors within."""
    wants, pieces = small.llama(), 2  # the first microbatch adds nothing up
    optimizer = torch.optim.SGD(wants.parameters(), lr=0.5)
    with small.meshes(2, 2) as (data, tensor):
        model = small.parallelize(small.llama(), tensor)
        _pre_dp_module_transform(model)
        replicas = DistributedDataParallel(model, process_group=data.get_group())
        our_optimizer = torch.optim.SGD(replicas.parameters(), lr=0.5)
        for step in range(3):
            want = small.loss_of(wants, small.batch_of(step))
            want.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = torch.zeros(())
            microbatches = small.batch_of(step).chunk(2)[data.get_local_rank()].chunk(pieces)
            for i, piece in enumerate(microbatches):
                with nullcontext() if i == pieces - 1 else replicas.no_sync():
                    loss = small.loss_of(replicas, piece) / pieces
                    loss.backward()
                total += loss.detach() / 2
            our_optimizer.step()
            our_optimizer.zero_grad()
            dist.all_reduce(total, group=data.get_group())
            torch.testing.assert_close(total, want.detach(), rtol=small.CLOSE, atol=0)
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        assert small.by_ops(model)


# A linear layer in float8, forward and backward, against one process.
K, N, TOKENS = 24, 48, 7
CASTS = Casts(torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2, False, (True, False, False))
DIMS = {GATHER: (1, 0, 2), SCATTER: (2, 1, 1), REDUCE: (2, 1, None), HELD: (None, 0, 2)}  # sharded, of x, weight and y


def random(seed: int, *shape: int) -> Tensor:
    """The last element is by far the largest, on the last rank alone; 448 and 57344 are powers of two times it."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    made.view(-1)[-1] = 7
    return made


def exact(t: Tensor, dtype: torch.dtype) -> Tensor:
    values, scale = fusedcomm.quantize(t, "TensorWise", dtype)
    return values.double() * scale


@on_ranks(3)
@pytest.mark.parametrize("op", DIMS)
def test_a_layer(rank: int, op: str) -> None:
    """Result and gradients are products of the operands cast as wholes; parts of tokens differ in size, and a second
    derivative is an error."""

    def part(t: Tensor, dim: int | None) -> Tensor:
        return t if dim is None else t.chunk(3, dim)[rank]

    whole_x, whole_weight, whole_grad = random(1, 2, TOKENS, K), random(2, N, K), random(3, 2, TOKENS, N)
    x8, weight8 = exact(whole_x, CASTS.x), exact(whole_weight, CASTS.weight)
    grad8 = exact(whole_grad, CASTS.grad)
    of_x, of_weight, of_y = DIMS[op]
    wants = [
        part(x8 @ weight8.mT, of_y),
        part(grad8 @ weight8, of_x),
        part(grad8.flatten(0, 1).mT @ x8.flatten(0, 1), of_weight),
    ]
    for frozen in (None, "x", "weight"):
        x = part(whole_x, of_x).clone().requires_grad_(frozen != "x")
        weight = part(whole_weight, of_weight).clone().requires_grad_(frozen != "weight")
        with empty_is_nan():
            y = scaled_linear(x, weight, Move(op, 1, TOKENS, *resolve(None)), CASTS)
            y.backward(part(whole_grad, of_y))
        for found, want in zip((y.detach(), x.grad, weight.grad), wants, strict=True):
            if found is not None:
                torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)
        assert (x.grad is None, weight.grad is None) == (frozen == "x", frozen == "weight")
    x.requires_grad_()
    y = scaled_linear(x, weight.detach(), Move(op, 1, TOKENS, *resolve(None)), CASTS)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
