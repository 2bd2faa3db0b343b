"""Layers that are more than a weight and a bias: what conversions refuse, and what they and the sums serve."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.spectral_norm import spectral_norm as old_spectral_norm
from torch.nn.utils.weight_norm import WeightNorm

from fusedcomm.nn import UlyssesOut, UlyssesQKV, sum_replicated_gradients
from tests.helpers.on_ranks import on_ranks

HEADS, DIM, TOKENS = 4, 3, 8
CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # float32; sums of some tens of terms, and quotients of them


class Adapted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Twice(Tensor):
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs)
        return 2 * result if function is nn.functional.linear else result


class Doubled(nn.Module):
    def forward(self, t: Tensor) -> Tensor:
        return 2 * t


class Adapter(UlyssesOut):
    def add(self) -> Adapter:
        self.down, self.scale = nn.Linear(DIM, 2, bias=False), nn.Parameter(torch.rand(DIM))
        return self

    def forward(self, x: Tensor, tokens: Any = None) -> Tensor:
        return super().forward(x * self.scale + self.down(x).sum(-1, keepdim=True), tokens)


def on_instance(linear: nn.Module) -> None:
    inner = linear.forward
    linear.forward = lambda *args: inner(*args)


MAKERS: dict[str, Callable[[Any], Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "parametrized bias": lambda layer: parametrize.register_parametrization(layer, "bias", Doubled()),
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "pruned bias": lambda layer: prune.l1_unstructured(layer, "bias", 0.5),
    "old weight_norm": lambda layer: (WeightNorm.apply(layer, "weight", 0), layer)[1],
    "old spectral_norm": old_spectral_norm,
}
MORE: dict[str, Callable[[Any], Any]] = {
    "forward hook": lambda layer: layer.register_forward_hook(lambda *args: args[-1] * 2),
    "forward pre-hook": lambda layer: layer.register_forward_pre_hook(lambda module, args: args),
    "backward hook": lambda layer: layer.register_full_backward_hook(lambda *args: None),
    "hook of a parameter": lambda layer: layer.weight.register_hook(lambda grad: grad * 0),
    "post-accumulate hook": lambda layer: layer.bias.register_post_accumulate_grad_hook(lambda p: None),
    "instance": on_instance,
    "call": lambda layer: setattr(layer, "_call_impl", layer._call_impl),
    "child": lambda layer: layer.register_module("adapter", nn.Linear(2, 2)),
    "buffer": lambda layer: layer.register_buffer("scale", torch.ones(1)),
}


@on_ranks(2)
def test_from_linear_of_more_than_a_linear(rank: int) -> None:
    linears = {"subclass": Adapted(12, 12), "shape": nn.Linear(12, 12), "tensor": nn.Linear(12, 12)}
    linears["shape"].weight = nn.Parameter(torch.ones(12, 6))
    linears["tensor"].weight = nn.Parameter(torch.ones(12, 12).as_subclass(Twice))
    for name, change in (MAKERS | MORE).items():
        linears[name] = nn.Linear(12, 12)
        change(linears[name])
    for name, linear in linears.items():
        for kind, heads in ((UlyssesOut, [HEADS]), (UlyssesQKV, [2, 1])):
            with pytest.raises(TypeError, match=rf"linear must be a plain nn.Linear, got a {type(linear).__name__} of"):
                kind.from_linear(linear, *heads)
                pytest.fail(name)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TypeError, match=r"Linear.forward is patched"):
        patch.setattr(nn.Linear, "forward", Adapted.forward)
        UlyssesOut.from_linear(nn.Linear(12, 12), HEADS)
    linear = nn.MultiheadAttention(12, 4).out_proj  # a subclass that differs in nothing
    assert torch.equal(UlyssesOut.from_linear(linear, HEADS).weight, linear.weight)


def plain_and_layer(change: Callable[[Any], Any]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    linear = nn.Linear(HEADS * DIM, 5)
    changed = []
    for each in (copy.deepcopy(linear), UlyssesOut.from_linear(linear, HEADS)):
        torch.manual_seed(1)  # spectral_norm and pruning draw
        changed.append(change(each))
    return changed[0], changed[1]


@on_ranks(2)
@pytest.mark.parametrize("name", MAKERS)
def test_a_weight_made_of_parameters(rank: int, name: str) -> None:
    """Gradients and to_linear are those of the plain layer on one process, changed in the same way."""
    plain, layer = plain_and_layer(MAKERS[name])
    x = torch.randn(2, TOKENS, HEADS * DIM, generator=torch.Generator().manual_seed(2))
    mine = x.unflatten(-1, (HEADS, DIM)).chunk(2, -2)[rank]
    y = plain(x)
    y.square().sum().backward()
    layer(mine).square().sum().backward()
    parts = [p.grad.clone() for p in layer.parameters()]
    sum_replicated_gradients(nn.Sequential(layer))
    for (of, want), p, part in zip(plain.named_parameters(), layer.parameters(), parts, strict=True):
        torch.testing.assert_close(p.grad, want.grad, **CLOSE, msg=of)
        assert not torch.allclose(part, want.grad, **CLOSE)  # the control
    with torch.no_grad():
        for each in (plain, layer):
            each.eval()
            [p.mul_(1.5) for p in each.parameters()]  # what pruning has made in the last forward is old now
        torch.testing.assert_close(layer.to_linear()(x), plain(x), **CLOSE)
        assert layer.to_linear().weight.requires_grad
    with pytest.raises(TypeError, match=r"(weight|bias) of a .* must be a parameter to be drawn"):
        layer.reset_parameters()


@on_ranks(2)
def test_to_linear_of_more_than_a_linear(rank: int) -> None:
    for name, change in MORE.items():
        layer = UlyssesOut(HEADS, DIM, 5)
        change(layer)
        with pytest.raises(TypeError, match=r"a UlyssesOut must compute what a plain nn.Linear does"):
            layer.to_linear()
            pytest.fail(name)
    with pytest.raises(TypeError, match="Adapter has a forward of its own"):
        Adapter(HEADS, DIM, 5).to_linear()


@on_ranks(2)
def test_parameters_elsewhere(rank: int) -> None:
    """An adapter's gradients inside a layer are summed; a weight made of others' is refused, unless they are named."""
    torch.manual_seed(0)
    layer = Adapter(HEADS, DIM, 5).add()
    layer(torch.randn(2, TOKENS, HEADS, DIM).chunk(2, -2)[rank]).sum().backward()
    parts = {name: p.grad.clone() for name, p in layer.named_parameters()}
    assert parts.keys() == {"weight", "bias", "scale", "down.weight"}
    sum_replicated_gradients(layer)
    for name, p in layer.named_parameters():
        dist.all_reduce(parts[name])
        torch.testing.assert_close(p.grad, parts[name])

    made: Any = UlyssesOut(HEADS, DIM, 5)
    weight = nn.Parameter(made.weight.detach())
    del made.weight
    made.weight = 2 * weight
    with pytest.raises(TypeError, match=r"0.weight must be made of parameters of its UlyssesOut"):
        sum_replicated_gradients(nn.Sequential(made))
    sum_replicated_gradients(made, also=[weight])


def check_sums(rank: int, grads: list[list[Tensor | None]]) -> None:
    parameters = [nn.Parameter(torch.zeros(3 + i % 2, 2)) for i in range(len(grads))]
    for parameter, given in zip(parameters, grads, strict=True):
        parameter.grad = None if given[rank] is None else given[rank].clone()
    with torch.device("meta"):
        sum_replicated_gradients(nn.Module(), also=parameters)
    for parameter, given in zip(parameters, grads, strict=True):
        there = [each for each in given if each is not None]
        assert (parameter.grad is None) == (not there)
        if there:
            assert parameter.grad.is_sparse == all(each.is_sparse for each in there)
            assert torch.equal(parameter.grad.to_dense(), sum(each.to_dense() for each in there))


@on_ranks(2)
def test_gradients_that_some_ranks_lack(rank: int) -> None:
    one, two = torch.ones(3, 2), torch.full((4, 2), 2.0)
    rows = torch.sparse_coo_tensor([[0, 0]], one[:2], (3, 2))  # not coalesced
    check_sums(rank, [[one, None], [two, two], [None, None], [None, two]])
    check_sums(rank, [[rows, None], [two.to_sparse(1), two.to_sparse(1)], [one, rows], [None, None]])
    layer = UlyssesOut(HEADS, DIM, 5)
    layer.weight.grad = torch.ones_like(layer.weight) if rank else None
    sum_replicated_gradients(layer)
    assert layer.weight.grad.eq(1).all() and layer.bias.grad is None
    layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    layers[rank](torch.ones(2)).sum().backward()
    bad = {
        r"name the same .*'0.weight', \(2, 2\)\), .* on rank 1, \[\('1.weight'": layers[rank].parameters(),
        r"got 1 on rank 0, .*2 on rank 1": list(layers[0].parameters())[: 1 + rank],
    }
    for message, also in bad.items():
        with pytest.raises(ValueError, match=message):
            sum_replicated_gradients(layers, also=also)
    reduced = nn.Parameter(distribute_tensor(one, init_device_mesh("cpu", (2,))))
    wrong: list[tuple[Any, type[Exception], str]] = [
        (reduced, ValueError, "a parameter in also must not have been reduced over the group"),
        ("weight", TypeError, "also must name parameters"),
    ]
    for one_of, error, message in wrong:  # on rank 1
        with pytest.raises(
            error if rank else ValueError, match=message + ("" if rank else r".* \(rank 1 of the group")
        ):
            sum_replicated_gradients(layer, also=[one_of if rank else nn.Parameter(one)])
    double = nn.Parameter(torch.ones(2, dtype=(torch.float32, torch.float64)[rank]))
    double.grad = torch.ones_like(double)
    with pytest.raises(ValueError, match=r"a parameter must be alike on all ranks, got .*float32.*float64"):
        sum_replicated_gradients(layers, also=[double])
