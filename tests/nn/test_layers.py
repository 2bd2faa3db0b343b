"""The layers of fusedcomm.nn: what they equal, their gradients, what they refuse."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fusedcomm
from fusedcomm.nn import (
    ColumnParallelLinear,
    RowParallelLinear,
    UlyssesOut,
    UlyssesQKV,
    sum_replicated_gradients,
    unshard_tokens,
)
from tests.helpers.nn_layers import BY_NAME, HIDDEN, LAYERS, Layer, Nested, X, local, whole
from tests.helpers.on_ranks import on_ranks
from tests.helpers.spies import Dispatched

# float32 has 1.2e-7; sums of some tens of terms of about 1 run in another order
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def part(t: Tensor, dim: int | None, rank: int, size: int) -> Tensor:
    return t if dim is None else t.chunk(size, dim)[rank]


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
    sums_bias = bias and layer.name == "row-sequence"  # the bias of all rows, of which a rank has some
    assert spy.names("c10d") + spy.names("_c10d_functional") == ["all_reduce"] * (size > 1 and sums_bias)
    for out, want in zip(outs, wants, strict=True):
        torch.testing.assert_close(out, part(want, layer.y_dim, rank, size), **CLOSE)
    torch.testing.assert_close(mine.grad, part(x.grad, layer.x_dim, rank, size), **CLOSE)

    assert module.partial_gradients == tuple(n for n in layer.partial if bias or n != "bias")
    for name in module.partial_gradients if size > 1 else ():  # the control of the comparison below
        assert not torch.allclose(module.get_parameter(name).grad, linear.get_parameter(name).grad, **CLOSE)
    sum_replicated_gradients(module)
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"][: 1 + bias]
    for name, parameter in module.named_parameters():
        check_placement(layer, name, parameter)
        check_placement(layer, name, parameter.grad)
        torch.testing.assert_close(whole(parameter.grad), linear.get_parameter(name).grad, **CLOSE)


def check_placement(layer: Layer, name: str, t: Tensor) -> None:
    """The Ulysses layers hold plain tensors, the tensor-parallel ones DTensors on the group's mesh."""
    assert isinstance(t, DTensor) == (layer.kind in (ColumnParallelLinear, RowParallelLinear))
    if isinstance(t, DTensor):
        dim = layer.shard_dims.get(name)
        assert t.placements == ((Replicate(),) if dim is None else (Shard(dim),))
        assert t.device_mesh == DeviceMesh.from_group(dist.group.WORLD, "cpu")


@on_ranks(2)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_values_and_gradients(rank: int, layer: Layer) -> None:
    check_layer(rank, layer, bias=True)
    check_layer(rank, layer, bias=False)


@on_ranks()
@pytest.mark.parametrize("world_size", [1, 4])
def test_other_world_sizes(rank: int, world_size: int) -> None:
    for name in ("qkv", "out", "column-sequence", "column"):
        check_layer(rank, BY_NAME[name], bias=True)


@on_ranks(1)
def test_one_head_on_one_rank(rank: int) -> None:
    linear, x = nn.Linear(5, 7), torch.randn(2, 3, 1, 5)
    module = UlyssesOut.from_linear(linear, num_heads=1)
    torch.testing.assert_close(module(x), linear(x.flatten(-2)), **CLOSE)


@on_ranks(4)
def test_groups(rank: int) -> None:
    """Tensor parallelism in pairs of four ranks, with each way to name a group. The pairs do not mix."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    layer = BY_NAME["row-sequence"]
    linear = layer.plain()
    for group in ((mesh, "model"), mesh["model"], mesh.get_group("model"), mesh.get_group("model").group_name):
        module = layer.kind.from_linear(linear, sequence_dim=1, group=group)
        x = torch.randn(X, generator=torch.Generator().manual_seed(rank // 2))
        out = module(x.chunk(2, -1)[rank % 2])
        torch.testing.assert_close(out, linear(x).chunk(2, 1)[rank % 2], **CLOSE)
        (out * (rank + 1)).sum().backward()
        both = sum(r + 1 for r in range(rank // 2 * 2, rank // 2 * 2 + 2))  # the ranks of this pair, with their factors
        torch.testing.assert_close(whole(module.bias.grad), torch.full((7,), float(X[0] * X[1] // 2 * both)), **CLOSE)
        assert (module.weight.device_mesh == mesh["model"]) == (not isinstance(group, (dist.ProcessGroup, str)))
        assert module.weight.device_mesh.get_group() is mesh.get_group("model")
    scale = nn.Parameter(torch.ones(()))
    scale.grad = torch.full((), float(rank))
    sum_replicated_gradients(nn.ModuleList([module, module]), also=[scale, scale], group=mesh["data"])
    assert scale.grad == (rank + (rank + 2) % 4)


@on_ranks(2)
def test_sum_replicated_gradients(rank: int) -> None:
    model = Nested().parallel()
    with pytest.raises(ValueError, match=r"also must name parameters with partial gradients, got mlp.0.weight"):
        sum_replicated_gradients(model, also=model.mlp.parameters())
    assert model.mlp[2].partial_gradients == ()
    grad = torch.arange(model.qkv.weight.numel()).view_as(model.qkv.weight).float()
    model.qkv.weight.grad = grad.clone() if rank == 0 else grad.mT.contiguous().mT  # the same values in another order
    model.qkv.bias.grad = None
    sum_replicated_gradients(model)
    assert torch.equal(model.qkv.weight.grad, 2 * grad)
    assert model.qkv.bias.grad is None
    sum_replicated_gradients(nn.Linear(2, 2))


@on_ranks(2)
def test_memory_saving(rank: int) -> None:
    """save_gathered and save_exchanged give the same gradients from less memory."""
    for name, switch in (("column-sequence", "save_gathered"), ("out", "save_exchanged")):
        layer = BY_NAME[name]
        saved: list[list[int]] = []
        grads = []
        for keep in (True, False):
            module = layer.kind.from_linear(layer.plain(), **layer.options())
            setattr(module, switch, keep)
            x = torch.randn(layer.x_shape, generator=torch.Generator().manual_seed(5))
            x = x.chunk(2, layer.x_dim)[rank].clone().requires_grad_()
            saved.append([])
            pack = saved[-1].append
            hooks = torch.autograd.graph.saved_tensors_hooks
            with hooks(lambda t, pack=pack: (pack(t.untyped_storage().data_ptr()), t)[1], lambda t: t):
                out = module(x)
            out.square().sum().backward()
            assert (x.untyped_storage().data_ptr() in saved[-1]) == (not keep)
            grads.append(local(module.weight.grad))
        torch.testing.assert_close(*grads, **CLOSE)


def check_second_derivatives_of_a_replicated_input(module: ColumnParallelLinear, x: Tensor, rank: int) -> None:
    """Check d/d(x, weight) of sum(grad x ** 2) + sum(grad weight ** 2) against those of the layer of one process."""
    weight, bias = (whole(t.detach()) for t in (module.weight, module.bias))
    weight.requires_grad_()
    answers = []
    for out, leaf in ((module(x), module.weight), (torch.nn.functional.linear(x, weight, bias), weight)):
        grads = torch.autograd.grad(out.square().sum(), (x, leaf), create_graph=True)
        grad_x, grad_w = torch.autograd.grad(torch.stack([local(g).square().sum() for g in grads]).sum(), (x, leaf))
        answers.append([grad_x, whole(grad_w)])
    torch.testing.assert_close(*answers, **CLOSE)


@on_ranks(2)
def test_column_parallel_of_a_replicated_input(rank: int) -> None:
    """ColumnParallelLinear without sequence_dim: a frozen x costs no communication, and second derivatives are
    those of the whole layer.
    """
    module = ColumnParallelLinear(HIDDEN, 8)
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(6))
    if rank == 0:  # alone: nothing may wait for the other rank
        module(x).sum().backward()
    dist.barrier()
    x.requires_grad_()
    check_second_derivatives_of_a_replicated_input(module, x, rank)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert x.grad.dtype == module.weight.grad.dtype == torch.float32


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "autocast"), [("qkv-gqa", False), ("out", False), ("row", False), ("column-sequence", True)]
)
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
        answers.append([*(o.detach() for o in outs), *map(local, grads)])
    torch.testing.assert_close(*answers)


LINEAR = nn.Linear(12, 12)
BAD = [
    (lambda: UlyssesQKV(12, 6, 4, 4), "num_heads must be a multiple of num_kv_heads=4, got 6"),
    (lambda: UlyssesQKV(12, 4, 4, 0), "num_kv_heads must be at least 1, got 0"),
    (lambda: ColumnParallelLinear(4, 5), "out_features must be divisible by group_size=2, got 5"),
    (lambda: RowParallelLinear(4, 4, group="nobody"), "group must be an initialised process group"),
    (
        lambda: UlyssesQKV.from_linear(LINEAR, 6),
        r"out_features must be a multiple of num_heads \+ 2 \* num_kv_heads = 18, got 12",
    ),
    (lambda: UlyssesQKV(12, 4, 3)(torch.ones(2, 4, 11)), r"x must be \[..., in_features = 12\] .*got shape \(2, 4, 11"),
    (
        lambda: UlyssesOut(4, 3, 5)(torch.ones(2, 4, 3, 2)),
        r"x must end in \[tokens, num_heads / R = 4 / 2 = 2, head_dim = 3\], got shape \(2, 4, 3, 2\)",
    ),
    (
        lambda: RowParallelLinear(4, 6, sequence_dim=0)(torch.ones(3, 2)),
        "x's size at sequence_dim must be divisible by group_size=2, got 3",
    ),
    (lambda: UlyssesOut(4, 3, 5)(torch.ones(2, 3, 2, 3), 4), "x must have all tokens, as tokens=4 says, got 3"),
    (
        lambda: UlyssesQKV(12, 4, 3)(torch.ones(2, 4, 12), 5),
        r"x must have what tokens=5 gives rank \d, [32] tokens, got 4",
    ),
    (lambda: ColumnParallelLinear(4, 6)(torch.ones(2, 4), 2), "tokens must be None without sequence_dim, got 2"),
    (
        lambda: UlyssesQKV(12, 4, 3)(torch.ones(2, 4, 12), [4, 4, 4]),
        "tokens must have one entry per rank, 2, got 3",
    ),
    (
        lambda: unshard_tokens(torch.ones(2, 4), 5),
        r"batch must have what tokens=5 gives rank \d, \d tokens",
    ),
    (lambda: ColumnParallelLinear(4, 6)(torch.ones(4)), r"in_features = 4\] with at least 2 dims, got shape \(4,\)"),
    (
        lambda: RowParallelLinear(4, 6)(torch.ones(2, 4)),  # x is not sharded
        r"x must be \[..., in_features / R = 4 / 2 = 2\] with at least 2 dims, got shape \(2, 4\)",
    ),
    (
        lambda: RowParallelLinear(4, 6, bias=False, sequence_dim=2)(torch.ones(1, 2, 2)),
        "sequence_dim must be a dim of x, and not its last, got 2 and 3 dims",
    ),
]


@on_ranks(2)
def test_errors(rank: int) -> None:
    for call, message in BAD:
        with pytest.raises(ValueError, match=message):
            call()


@on_ranks(2)
def test_types_of_arguments(rank: int) -> None:
    for layer in (UlyssesOut, RowParallelLinear):
        with pytest.raises(TypeError, match=r"linear must be an nn.Linear, got Bilinear"):
            layer.from_linear(nn.Bilinear(2, 2, 2), *([4] if layer is UlyssesOut else []))
    x = torch.ones(2, 4, 2, 3)
    sharded = DTensor.from_local(x, init_device_mesh("cpu", (2,)), [Shard(1)])
    layers = UlyssesQKV(3, 4, 3), UlyssesOut(4, 3, 5), ColumnParallelLinear(3, 6), RowParallelLinear(6, 3)
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
    for value in ("0", 0.0):
        with pytest.raises(TypeError, match="sequence_dim must be an int, got"):
            ColumnParallelLinear(4, 4, sequence_dim=value)
    assert layers[0](x, np.int64(4))[0].shape == layers[0](x, np.array([2, 2]))[0].shape


@on_ranks(2)
@pytest.mark.parametrize("sequence_dim", [None, 1])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_functional_call_works_and_transforms_are_refused(rank: int, kind: Any, sequence_dim: int | None) -> None:
    module = kind(HIDDEN, HIDDEN, sequence_dim=sequence_dim)
    x = torch.ones(2, 4, module.weight.to_local().shape[1])
    doubled = {name: 2 * p.detach() for name, p in module.named_parameters()}
    for params in (doubled, {name: p.to_local() for name, p in doubled.items()}):
        called = torch.func.functional_call(module, params, (x,))
        torch.testing.assert_close(called, 2 * module(x), **CLOSE)

    def total(params: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(module, params, (x,)).sum()

    with pytest.raises(RuntimeError, match=r"fusedcomm.* does not work inside vmap or torch\.func transforms"):
        torch.func.grad(total)(doubled)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=r"fusedcomm.* has no forward-mode derivatives"):
        module(forward_ad.make_dual(x, x))
