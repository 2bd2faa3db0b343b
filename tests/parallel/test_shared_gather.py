"""One op for the layers of a module that take the same x, and right values for whoever else reads it."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.tensor.parallel as torch_parallel
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import fusedcomm.parallel as our_parallel
from tests.helpers.on_ranks import on_ranks
from tests.helpers.spies import Dispatched

D, BATCH, TOKENS = 8, 2, 4
TOKEN_SHARDS = Shard(1)
CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # float32; sums of tens of terms of about 1 run in another order
GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"


class Attention(nn.Module):
    """``use(self, x)`` is its forward; three layers of different widths, one with a bias."""

    def __init__(self, use: Callable[..., Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(D, 2 * D), nn.Linear(D, D, bias=False), nn.Linear(D, D)
        self.use = use

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.use(self, *args, **kwargs)


def alike(x: Tensor) -> Tensor:
    """x as a tensor with the whole of x in it."""
    return x.to_local() if isinstance(x, DTensor) else x


def each_once(m: Attention, x: Tensor) -> Tensor:
    return torch.cat([m.q(x), m.k(x), m.v(x)], -1)


def one_twice(m: Attention, x: Tensor) -> Tensor:
    return torch.cat([m.q(x), m.k(x), m.q(x), m.v(x)], -1)


def another_x(m: Attention, x: Tensor) -> Tensor:
    return torch.cat([m.q(x), m.k(2 * x), m.v(x)], -1)


def only_two(m: Attention, x: Tensor) -> Tensor:
    return torch.cat([m.q(x), m.v(x)], -1)


def one_without_gradient(m: Attention, x: Tensor) -> Tensor:
    with torch.no_grad():
        q = m.q(x)
    return torch.cat([q, m.k(x), m.v(x)], -1)


def also_read(m: Attention, x: Tensor) -> Tensor:
    assert not isinstance(x, DTensor) or x.placements == (Replicate(),)
    return torch.cat([m.q(x), m.k(x), m.v(x), alike(x).mean(1, keepdim=True).expand(x.shape)], -1)


def read_first(m: Attention, x: Tensor) -> Tensor:
    return torch.cat([alike(x + x), m.q(x), m.k(x), m.v(x)], -1)


def crossed(m: Attention, x: Tensor, memory: Tensor) -> Tensor:
    return torch.cat([m.q(x), m.k(memory), m.v(memory)], -1)


# The ops of the first call's forward and backward, and of the second's.
FORWARDS = {
    each_once: ([GATHER, SCATTER], [GATHER, SCATTER]),
    one_twice: ([GATHER, GATHER, SCATTER, SCATTER], [GATHER, GATHER, SCATTER, SCATTER]),
    another_x: ([GATHER, SCATTER], [GATHER, SCATTER]),
    only_two: ([GATHER, SCATTER], [GATHER, SCATTER]),
    one_without_gradient: ([GATHER, GATHER, SCATTER], [GATHER, GATHER, SCATTER]),
    also_read: ([GATHER, SCATTER], [GATHER, SCATTER]),
    read_first: ([], []),
    crossed: ([GATHER, GATHER, SCATTER, SCATTER], [GATHER, GATHER, SCATTER, SCATTER]),
}


def attention(
    styles: Any, use: Callable[..., Tensor], layout: Any = TOKEN_SHARDS, inputs: int = 1, mesh: Any = None
) -> Attention:
    torch.manual_seed(0)
    mesh = mesh or init_device_mesh("cpu", (2,))
    module = Attention(use)
    prepare = styles.PrepareModuleInput(input_layouts=(layout,) * inputs, desired_input_layouts=(Replicate(),) * inputs)
    torch_parallel.parallelize_module(module, mesh, prepare)
    torch_parallel.parallelize_module(module, mesh, {name: styles.ColwiseParallel() for name in "qkv"})
    return module


def inputs(rank: int, count: int = 1, sharded: bool = True) -> list[Tensor]:
    xs = torch.randn(count, BATCH, TOKENS, D, generator=torch.Generator().manual_seed(1))
    return [(x.chunk(2, 1)[rank] if sharded else x).clone().requires_grad_() for x in xs]


def step(call: Callable[..., Tensor], xs: list[Tensor], module: nn.Module) -> tuple[list[Any], list[str]]:
    """The result and the gradients of xs and of the parameters, and the ops."""
    module.zero_grad()
    with Dispatched() as spy:
        y = call(*xs)
        y.backward(torch.arange(1.0, 1.0 + y.numel()).view(y.shape).sin())
    grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in module.parameters()]
    return [y.detach(), *(x.grad for x in xs), *grads], spy.names("fusedcomm")


def assert_close(found: list[Any], wants: list[Any]) -> None:
    for each, want in zip(found, wants, strict=True):
        assert (each is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(each, want, **CLOSE)


@on_ranks(2)
@pytest.mark.parametrize("use", FORWARDS, ids=lambda use: use.__name__)
def test_a_module(rank: int, use: Callable[..., Tensor]) -> None:
    """Values are those of torch's styles. A layer that was not called with x takes no part from the second call on."""
    count = 2 if use is crossed else 1
    stock, ours = (attention(styles, use, inputs=count) for styles in (torch_parallel, our_parallel))
    for ops in FORWARDS[use]:
        wants, _ = step(stock, inputs(rank, count), stock)
        found, names = step(ours, inputs(rank, count), ours)
        assert_close(found, wants)
        assert names == ops


@on_ranks(2)
def test_who_shares(rank: int) -> None:
    """What is not called with x is left out of the next call, and is back after it was called."""
    module = attention(our_parallel, only_two)
    layers = {"q": module.q, "k": module.k, "v": module.v}

    def columns() -> list[int]:
        with Dispatched() as spy:
            module(*inputs(rank))
        return [w.shape[-1] for w in spy.arguments("fusedcomm::all_gather_matmul")[1]]

    assert columns() == [D, D // 2, D // 2]
    assert columns() == [D, D // 2]
    assert {name: layer.passed_over for name, layer in layers.items()} == {
        "q": frozenset(),
        "k": frozenset({0}),
        "v": frozenset(),
    }
    assert layers["q"].ran == "all_gather_matmul, shared by 2 layers"
    module.use = each_once
    with Dispatched() as spy:
        module(*inputs(rank))
    assert spy.names("fusedcomm") == [GATHER, GATHER]  # k is not expected
    assert columns() == [D, D // 2, D // 2]


@on_ranks(2)
@pytest.mark.parametrize("layout", [Shard(1), Replicate()], ids=str)
def test_nothing_is_kept(rank: int, layout: Any) -> None:
    """After the module has returned, or raised, its x and unclaimed results are gone without the garbage collector."""
    kept: list[Any] = []

    def stops(m: Attention, x: Tensor) -> Tensor:
        kept.append(weakref.ref(x))
        m.q(x)
        raise RuntimeError("planted")

    def leaves(m: Attention, x: Tensor) -> Tensor:
        kept.append(weakref.ref(x))
        return m.q(x)

    gc.disable()
    try:
        for use in (stops, leaves):
            module = attention(our_parallel, use, layout)
            try:
                module(*inputs(rank, sharded=layout == Shard(1)))
            except RuntimeError as error:
                assert str(error) == "planted"
            assert module.k.passed_over == (frozenset() if use is stops else frozenset({0}))
        assert [each() for each in kept] == [None, None]
    finally:
        gc.enable()


@on_ranks(2)
@pytest.mark.parametrize("held", [False, True])
def test_x_that_all_ranks_hold(rank: int, held: bool) -> None:
    """The layers share the sum of its gradient. An x that comes as a DTensor has users that do without."""
    stock, ours = (attention(styles, each_once, Replicate()) for styles in (torch_parallel, our_parallel))
    mesh = init_device_mesh("cpu", (2,))

    def given(x: Tensor) -> Tensor:
        return DTensor.from_local(x, mesh, [Replicate()]) if held else x

    wants, _ = step(lambda x: stock(given(x)), inputs(rank, sharded=False), stock)
    found, names = step(lambda x: ours(given(x)), inputs(rank, sharded=False), ours)
    assert_close(found, wants)
    assert names == ([] if held else [REDUCE])


@on_ranks(2)
def test_under_a_checkpoint_autocast_and_in_copies(rank: int) -> None:
    stock, ours = (attention(styles, each_once) for styles in (torch_parallel, our_parallel))
    wants, _ = step(lambda x: checkpoint(stock, x, use_reentrant=False), inputs(rank), stock)
    found, names = step(lambda x: checkpoint(ours, x, use_reentrant=False), inputs(rank), ours)
    assert_close(found, wants)
    assert names == [GATHER, GATHER, SCATTER]
    twin = copy.deepcopy(ours)
    with torch.no_grad():
        twin.q.weight.mul_(2)
    found, names = step(ours, inputs(rank), ours)
    assert_close(found, wants)
    found, names = step(twin, inputs(rank), twin)
    assert names == [GATHER, SCATTER] and not torch.equal(found[0], wants[0])
    with torch.autocast("cpu", torch.bfloat16):
        wants, _ = step(stock, inputs(rank), stock)
        found, _ = step(ours, inputs(rank), ours)
    assert found[0].dtype == torch.bfloat16
    for each, want in zip(found, wants, strict=True):
        torch.testing.assert_close(each, want, rtol=2e-2, atol=2e-2)


def pair(m: Attention, x: Tensor) -> Tensor:
    return torch.cat([m.q(x), m.k(x)], -1)


def again_with_gradient(m: Attention, x: Tensor) -> Tensor:
    with torch.no_grad():
        q = m.q(x)
    return torch.cat([q, m.q(x), m.k(x), m.v(x)], -1)


def a_weight_is_written(m: Attention, x: Tensor) -> Tensor:
    with torch.no_grad():
        q = m.q(x)
        m.k.weight.mul_(2)
    return torch.cat([q, m.k(x), m.v(x)], -1)


def x_is_written(m: Attention, x: Tensor) -> Tensor:
    q, x = m.q(x), x.mul_(2)
    return torch.cat([q, m.k(x), m.v(x)], -1)


def a_gradient_is_scaled(m: Attention, x: Tensor) -> Tensor:
    x.register_hook(lambda grad: 10 * grad)
    return each_once(m, x)


def part_in_a_checkpoint(m: Attention, x: Tensor) -> Tensor:
    return torch.cat([checkpoint(m.q, x, use_reentrant=False), m.k(x), m.v(x)], -1)


def all_in_a_checkpoint(m: Attention, x: Tensor) -> Tensor:
    return checkpoint(lambda x: each_once(m, x), x, use_reentrant=False)


@on_ranks(2)
@pytest.mark.parametrize("layout", [Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize(
    "use",
    [again_with_gradient, a_weight_is_written, a_gradient_is_scaled, part_in_a_checkpoint, all_in_a_checkpoint],
    ids=lambda use: use.__name__,
)
def test_what_comes_between_the_layers(rank: int, use: Callable[..., Tensor], layout: Any) -> None:
    """What was made ahead for a layer is no result once its call would give another."""
    stock, ours = (attention(styles, use, layout) for styles in (torch_parallel, our_parallel))
    for _ in range(2):
        wants, _ = step(stock, inputs(rank, sharded=layout == Shard(1)), stock)
        found, _ = step(ours, inputs(rank, sharded=layout == Shard(1)), ours)
        assert_close(found, wants)


@on_ranks(2)
@pytest.mark.parametrize("layout", [Shard(1), Replicate()], ids=str)
def test_an_x_that_the_module_writes(rank: int, layout: Any) -> None:
    stock, ours = (attention(styles, x_is_written, layout) for styles in (torch_parallel, our_parallel))
    with torch.no_grad():
        want, found = (module(*inputs(rank, sharded=layout == Shard(1))) for module in (stock, ours))
    torch.testing.assert_close(found, want, **CLOSE)


@on_ranks(2)
def test_in_inference_mode(rank: int) -> None:
    """Views come undecomposed there; one of them is made before anybody reads x."""
    stock, ours = (attention(styles, each_once) for styles in (torch_parallel, our_parallel))
    with torch.inference_mode(), Dispatched() as spy:
        want, found = (module(*map(torch.detach, inputs(rank))) for module in (stock, ours))
    torch.testing.assert_close(found, want, **CLOSE)
    assert spy.names("fusedcomm") == [GATHER]


@on_ranks(2)
def test_a_hook_that_makes_a_weight(rank: int) -> None:
    """torch.nn.utils.prune has such hooks: before each call of the layer its weight is another tensor."""
    results = []
    for styles in (torch_parallel, our_parallel):
        module = attention(styles, pair)
        prune.identity(module.k, "weight")
        optimizer, losses = torch.optim.SGD(module.parameters(), 0.1, foreach=False), []
        for _ in range(3):
            y = module(*inputs(rank))
            y.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(y.sum().item())
        results.append(torch.tensor(losses))
    torch.testing.assert_close(results[1], results[0], **CLOSE)


@on_ranks(2)
def test_modes_that_differ(rank: int) -> None:
    """A result made under autocast is no result for a layer that is called without it."""

    def mixed(m: Attention, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            q = m.q(x)
        assert q.dtype == torch.bfloat16
        return torch.cat([q.float(), m.k(x), m.v(x)], -1)

    module, exact = attention(our_parallel, mixed), attention(torch_parallel, each_once)
    y, want = module(*inputs(rank)), exact(*inputs(rank))
    torch.testing.assert_close(y[..., D:], want[..., D:], **CLOSE)
    torch.testing.assert_close(y[..., :D], want[..., :D], rtol=2e-2, atol=2e-2)


@on_ranks(2)
@pytest.mark.parametrize("training", [False, True])
def test_layers_that_fsdp_wraps_by_themselves(rank: int, training: bool) -> None:
    """Their weights come one by one, so torch's path runs, with one gather of x."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    modules = []
    for styles in (torch_parallel, our_parallel):
        module = attention(styles, each_once, mesh=mesh["tp"])
        for layer in (module.q, module.k, module.v):
            fully_shard(layer, mesh=mesh["dp"])
        modules.append(module)
    if training:
        (wants, _), (found, names) = (step(module, inputs(rank), module) for module in modules)
    else:
        with torch.no_grad(), Dispatched() as spy:
            wants, found = ([module(*inputs(rank))] for module in modules)
        names = spy.names("fusedcomm")
    assert_close(found, wants)
    assert not names
