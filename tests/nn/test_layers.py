"""The layers of fusedcomm.nn: values, gradients, errors."""

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fusedcomm
from fusedcomm.nn import UlyssesOut, UlyssesQKV, sum_replicated_gradients, unshard_tokens
from tests.helpers.nn_layers import BY_NAME, LAYERS, Layer
from tests.helpers.on_ranks import on_ranks
from tests.helpers.spies import Dispatched

# float32 has 1.2e-7; sums of some tens of terms of about 1 run in another order
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def part(t: Tensor, dim: int, rank: int, size: int) -> Tensor:
    return t.chunk(size, dim)[rank]


def tensors_of(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else list(out)


def run_plain(layer: Layer, bias: bool) -> tuple[Tensor, list[Tensor], nn.Linear, list[Tensor]]:
    """x with its gradient, the results, the layer with its gradients, the weights of the loss."""
    linear = layer.plain(bias)
    x = torch.randn(layer.x_shape, generator=torch.Generator().manual_seed(2), requires_grad=True)
    outs = layer.program(linear, x)
    weights = [torch.randn(o.shape, generator=torch.Generator().manual_seed(i)) for i, o in enumerate(outs)]
    sum((o * w).sum() for o, w in zip(outs, weights, strict=True)).backward()
    return x, outs, linear, weights


def check_layer(rank: int, layer: Layer, bias: bool) -> None:
    size = dist.get_world_size()
    x, wants, linear, weights = run_plain(layer, bias)
    module = layer.kind.from_linear(linear, **layer.options())
    mine = part(x.detach(), layer.x_dim, rank, size).clone().requires_grad_()
    with fusedcomm.force_algorithm("chunked", strict=True), Dispatched() as spy:
        outs = tensors_of(module(mine))
        loss = sum((o * part(w, layer.y_dim, rank, size)).sum() for o, w in zip(outs, weights, strict=True))
        loss.backward()
    assert tuple(spy.names("fusedcomm")) == layer.ops
    assert not spy.names("c10d") + spy.names("_c10d_functional")
    for out, want in zip(outs, wants, strict=True):
        torch.testing.assert_close(out, part(want, layer.y_dim, rank, size), **CLOSE)
    torch.testing.assert_close(mine.grad, part(x.grad, layer.x_dim, rank, size), **CLOSE)

    names = ("weight", "bias")[: 1 + bias]
    assert names == tuple(name for name, _ in module.named_parameters())
    for name in names if size > 1 else ():  # the control of the comparison below
        assert not torch.allclose(module.get_parameter(name).grad, linear.get_parameter(name).grad, **CLOSE)
    sum_replicated_gradients(module)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, linear.get_parameter(name).grad, **CLOSE)


@on_ranks(2)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_values_and_gradients(rank: int, layer: Layer) -> None:
    check_layer(rank, layer, bias=True)
    check_layer(rank, layer, bias=False)


@on_ranks()
@pytest.mark.parametrize("world_size", [1, 4])
def test_other_world_sizes(rank: int, world_size: int) -> None:
    for name in ("qkv", "out"):
        check_layer(rank, BY_NAME[name], bias=True)


@on_ranks(1)
def test_one_head_on_one_rank(rank: int) -> None:
    linear, x = nn.Linear(5, 7), torch.randn(2, 3, 1, 5)
    module = UlyssesOut.from_linear(linear, num_heads=1)
    torch.testing.assert_close(module(x), linear(x.flatten(-2)), **CLOSE)


@on_ranks(4)
def test_groups(rank: int) -> None:
    """Pairs of four ranks, with each way to name a group. The pairs do not mix."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    layer = BY_NAME["out"]
    linear = layer.plain()
    for group in ((mesh, "model"), mesh["model"], mesh.get_group("model"), mesh.get_group("model").group_name):
        module = layer.kind.from_linear(linear, **layer.options(), group=group)
        x = torch.randn(layer.x_shape, generator=torch.Generator().manual_seed(rank // 2))
        out = module(x.chunk(2, layer.x_dim)[rank % 2])
        (want,) = layer.program(linear, x)
        torch.testing.assert_close(out, want.chunk(2, layer.y_dim)[rank % 2], **CLOSE)
        (out * (rank + 1)).sum().backward()
        sum_replicated_gradients(module)
        both = sum(r + 1 for r in range(rank // 2 * 2, rank // 2 * 2 + 2))  # the ranks of this pair, with their factors
        torch.testing.assert_close(module.bias.grad, torch.full_like(module.bias, want[..., 0].numel() / 2 * both))
    scale = nn.Parameter(torch.ones(()))
    scale.grad = torch.full((), float(rank))
    sum_replicated_gradients(nn.Linear(2, 2), also=[scale, scale], group=mesh["data"])
    assert scale.grad == (rank + (rank + 2) % 4)


@on_ranks(2)
def test_sum_replicated_gradients(rank: int) -> None:
    layer = BY_NAME["qkv"].kind.from_linear(BY_NAME["qkv"].plain(), **BY_NAME["qkv"].options())
    grad = torch.arange(layer.weight.numel()).view_as(layer.weight).float()
    layer.weight.grad = grad.clone() if rank == 0 else grad.mT.contiguous().mT  # the same values in another order
    sum_replicated_gradients(nn.Sequential(layer, nn.Linear(2, 2)))
    assert torch.equal(layer.weight.grad, 2 * grad)
    assert layer.bias.grad is None
    sum_replicated_gradients(nn.Linear(2, 2))


@on_ranks(2)
@pytest.mark.parametrize(("name", "autocast"), [("qkv-gqa", False), ("out", False), ("out", True)])
def test_compiled(rank: int, name: str, autocast: bool) -> None:
    layer, size = BY_NAME[name], dist.get_world_size()
    module = layer.kind.from_linear(layer.plain(), **layer.options())
    x = torch.randn(layer.x_shape, generator=torch.Generator().manual_seed(7))
    x = part(x, layer.x_dim, rank, size).clone().requires_grad_()
    torch._dynamo.reset()
    answers = []
    for run in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            outs = tensors_of(run(x))
        grads = torch.autograd.grad(sum(o.square().sum() for o in outs), (x, module.weight, module.bias))
        answers.append([*(o.detach() for o in outs), *grads])
    torch.testing.assert_close(*answers)


LINEAR = nn.Linear(12, 12)
BAD = [
    (lambda: UlyssesQKV(12, 6, 4, 4), "num_heads must be a multiple of num_kv_heads=4, got 6"),
    (lambda: UlyssesQKV(12, 4, 4, 0), "num_kv_heads must be at least 1, got 0"),
    (lambda: UlyssesOut(4, 3, 5, group="nobody"), "group must be an initialised process group"),
    (
        lambda: UlyssesQKV.from_linear(LINEAR, 6),
        r"out_features must be a multiple of num_heads \+ 2 \* num_kv_heads = 18, got 12",
    ),
    (lambda: UlyssesQKV(12, 4, 3)(torch.ones(2, 4, 11)), r"x must be \[..., in_features = 12\] .*got shape \(2, 4, 11"),
    (
        lambda: UlyssesOut(4, 3, 5)(torch.ones(2, 4, 3, 2)),
        r"x must end in \[tokens, num_heads / R = 4 / 2 = 2, head_dim = 3\], got shape \(2, 4, 3, 2\)",
    ),
    (lambda: UlyssesOut(4, 3, 5)(torch.ones(2, 3, 2, 3), 4), "x must have all tokens, as tokens=4 says, got 3"),
    (
        lambda: UlyssesQKV(12, 4, 3)(torch.ones(2, 4, 12), 5),
        r"x must have what tokens=5 gives rank \d, [32] tokens, got 4",
    ),
    (lambda: UlyssesQKV(12, 4, 3)(torch.ones(2, 4, 12), [4, 4, 4]), "tokens must have one entry per rank, 2, got 3"),
    (lambda: unshard_tokens(torch.ones(2, 4), 5), r"batch must have what tokens=5 gives rank \d, \d tokens"),
    (lambda: UlyssesQKV(4, 2, 3)(torch.ones(4)), r"in_features = 4\] with at least 2 dims, got shape \(4,\)"),
]


@on_ranks(2)
def test_errors(rank: int) -> None:
    for call, message in BAD:
        with pytest.raises(ValueError, match=message):
            call()


@on_ranks(2)
def test_types_of_arguments(rank: int) -> None:
    with pytest.raises(TypeError, match=r"linear must be an nn.Linear, got Bilinear"):
        UlyssesOut.from_linear(nn.Bilinear(2, 2, 2), 4)
    x = torch.ones(2, 4, 2, 3)
    sharded = DTensor.from_local(x, init_device_mesh("cpu", (2,)), [Shard(1)])
    layers = UlyssesQKV(3, 4, 3), UlyssesOut(4, 3, 5)
    for each in layers:
        assert all(isinstance(t, Tensor) for t in tensors_of(each(x)))
        with pytest.raises(TypeError, match=r"x must be a plain tensor, got a DTensor: pass its .to_local\(\), or"):
            each(sharded)
        with pytest.raises(TypeError, match="x must be a tensor, got ndarray"):
            each(x.numpy())
    for tokens, name in ((8.0, "float"), ("8", "str"), (torch.tensor(8), "Tensor"), ([4, 4.0], "list")):
        for call in (layers[0], layers[1]):
            with pytest.raises(TypeError, match=f"tokens must be an int, one for each rank, or None, got {name}"):
                call(x, tokens)
    assert layers[0](x, np.int64(4))[0].shape == layers[0](x, np.array([2, 2]))[0].shape


@on_ranks(2)
def test_functional_call(rank: int) -> None:
    module, x = UlyssesOut(4, 3, 5), torch.ones(2, 4, 2, 3)
    doubled = {name: 2 * p.detach() for name, p in module.named_parameters()}
    torch.testing.assert_close(torch.func.functional_call(module, doubled, (x,)), 2 * module(x), **CLOSE)
