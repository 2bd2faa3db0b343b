"""One op for the layers of a module that take the same x, and right values for whoever else reads it."""

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.tensor.parallel as torch_parallel
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import fusedcomm.parallel as our_parallel
from tests.helpers.on_ranks import on_ranks
from tests.helpers.prepared_attention import (
    CLOSE,
    GATHER,
    GATHERED,
    REDUCE,
    REDUCED,
    SCATTER,
    Attention,
    D,
    alike,
    assert_close,
    attention,
    by_wire,
    each_once,
    inputs,
    step,
)
from tests.helpers.spies import Dispatched


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


def flattened(m: Attention, x: Tensor) -> Tensor:
    """As mixtures of experts do it; k sees x as it is."""
    rows = x.flatten(0, 1)
    return torch.cat([m.q(rows), m.k(x).flatten(0, 1), m.v(rows.view(2, -1, D)).flatten(0, 1)], -1)


FORWARDS = each_once, one_twice, another_x, only_two, one_without_gradient, also_read, read_first, crossed, flattened


@on_ranks(2)
@pytest.mark.parametrize("use", FORWARDS, ids=lambda use: use.__name__)
def test_a_module(rank: int, use: Callable[..., Tensor]) -> None:
    """Values are those of torch's styles, and x is gathered once, whoever reads it."""
    count = 2 if use is crossed else 1
    stock, ours = (attention(styles, use, inputs=count) for styles in (torch_parallel, our_parallel))
    for _ in range(2):
        wants, _, plain = step(stock, inputs(rank, count), stock)
        assert plain == [GATHERED] * count + [REDUCED] * count, plain
        found, ops, plain = step(ours, inputs(rank, count), ours)
        assert_close(found, wants)
        assert (ops, plain) == ([GATHER] * count + [SCATTER] * count, [])


@on_ranks(2)
def test_who_shares(rank: int) -> None:
    """Layers that no rank has called with x in the first call are left out of the others."""
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
    assert spy.names("fusedcomm") == [GATHER]  # k is not expected, and takes what was gathered
    assert columns() == [D, D // 2]


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
            learns = use is leaves and layout == Shard(1)
            assert module.k.passed_over == (frozenset({0}) if learns else None)
        assert [each() for each in kept] == [None, None]
    finally:
        gc.enable()


@on_ranks(2)
def test_a_module_whose_results_are_prepared_too(rank: int) -> None:
    mesh, modules = init_device_mesh("cpu", (2,)), []
    for styles in (torch_parallel, our_parallel):
        prepare = styles.PrepareModuleInputOutput(
            input_layouts=(Shard(1),),
            desired_input_layouts=(Replicate(),),
            output_layouts=(Shard(-1),),
            desired_output_layouts=(Shard(1),),
        )
        modules.append(torch_parallel.parallelize_module(attention(styles, each_once, None), mesh, prepare))
    stock, ours = modules
    wants, *_ = step(stock, inputs(rank), stock)
    found, ops, _ = step(ours, inputs(rank), ours)
    assert_close(found, wants)
    assert ops == [GATHER, SCATTER]


@on_ranks(2)
@pytest.mark.parametrize("held", [False, True])
def test_x_that_all_ranks_hold(rank: int, held: bool) -> None:
    """The layers share the sum of its gradient. An x that comes as a DTensor has users that do without."""
    stock, ours = (attention(styles, each_once, Replicate()) for styles in (torch_parallel, our_parallel))
    mesh = init_device_mesh("cpu", (2,))

    def given(x: Tensor) -> Tensor:
        return DTensor.from_local(x, mesh, [Replicate()]) if held else x

    wants, *_ = step(lambda x: stock(given(x)), inputs(rank, sharded=False), stock)
    found, names, _ = step(lambda x: ours(given(x)), inputs(rank, sharded=False), ours)
    assert_close(found, wants)
    assert names == ([] if held else [REDUCE])


@on_ranks(2)
def test_under_a_checkpoint_autocast_and_in_copies(rank: int) -> None:
    stock, ours = (attention(styles, each_once) for styles in (torch_parallel, our_parallel))
    wants, *_ = step(lambda x: checkpoint(stock, x, use_reentrant=False), inputs(rank), stock)
    found, names, _ = step(lambda x: checkpoint(ours, x, use_reentrant=False), inputs(rank), ours)
    assert_close(found, wants)
    assert names == [GATHER, GATHER, SCATTER]
    twin = copy.deepcopy(ours)
    with torch.no_grad():
        twin.q.weight.mul_(2)
    found, names, _ = step(ours, inputs(rank), ours)
    assert_close(found, wants)
    found, names, _ = step(twin, inputs(rank), twin)
    assert names == [GATHER, SCATTER] and not torch.equal(found[0], wants[0])
    with torch.autocast("cpu", torch.bfloat16):
        wants, *_ = step(stock, inputs(rank), stock)
        found, *_ = step(ours, inputs(rank), ours)
    assert found[0].dtype == torch.bfloat16
    for each, want in zip(found, wants, strict=True):
        torch.testing.assert_close(each, want, rtol=2e-2, atol=2e-2)


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


def viewed_without_gradient(m: Attention, x: Tensor) -> Tensor:
    with torch.no_grad():
        rows = x.flatten(0, 1)
    return torch.cat([m.q(rows).view(2, -1, D), m.k(x), m.v(x)], -1)


def changed_in_place(m: Attention, x: Tensor) -> Tensor:
    x.mul_(2)
    return each_once(m, x)


def part_in_a_checkpoint(m: Attention, x: Tensor) -> Tensor:
    return torch.cat([checkpoint(m.q, x, use_reentrant=False), m.k(x), m.v(x)], -1)


def the_last_in_a_checkpoint(m: Attention, x: Tensor) -> Tensor:
    return torch.cat([m.q(x), m.k(x), checkpoint(m.v, x, use_reentrant=False)], -1)


def all_in_a_checkpoint(m: Attention, x: Tensor) -> Tensor:
    return checkpoint(lambda x: each_once(m, x), x, use_reentrant=False)


@on_ranks(2)
@pytest.mark.parametrize("layout", [Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize(
    "use",
    [
        again_with_gradient,
        a_weight_is_written,
        part_in_a_checkpoint,
        the_last_in_a_checkpoint,
        all_in_a_checkpoint,
        viewed_without_gradient,
        changed_in_place,
    ],
    ids=lambda use: use.__name__,
)
def test_what_comes_between_the_layers(rank: int, use: Callable[..., Tensor], layout: Any) -> None:
    """What was made ahead for a layer is no result once its call would give another."""
    stock, ours = (attention(styles, use, layout) for styles in (torch_parallel, our_parallel))
    for _ in range(2):
        wants, *_ = step(stock, inputs(rank, sharded=layout == Shard(1)), stock)
        found, *_ = step(ours, inputs(rank, sharded=layout == Shard(1)), ours)
        assert_close(found, wants)


@on_ranks(2)
@pytest.mark.parametrize("layout", [Shard(1), Replicate()], ids=str)
def test_an_x_that_the_module_writes(rank: int, layout: Any) -> None:
    stock, ours = (attention(styles, x_is_written, layout) for styles in (torch_parallel, our_parallel))
    with torch.no_grad():
        want, found = (module(*inputs(rank, sharded=layout == Shard(1))) for module in (stock, ours))
    torch.testing.assert_close(found, want, **CLOSE)


@on_ranks(2)
@pytest.mark.parametrize("layout", [Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("inner_is_prepared", [False, True])
def test_layers_of_modules_below(rank: int, layout: Any, inner_is_prepared: bool) -> None:
    """They share as those right below the module do, if none in between prepares its own x."""
    mesh, modules = init_device_mesh("cpu", (2,)), []
    for styles in (torch_parallel, our_parallel):
        inner = attention(styles, each_once, layout) if inner_is_prepared else attention(styles, each_once, None)
        prepare = styles.PrepareModuleInput(input_layouts=layout, desired_input_layouts=Replicate())
        modules.append(torch_parallel.parallelize_module(nn.Sequential(inner), mesh, prepare))
    for call in (nn.Module.__call__, functools.partial(checkpoint, use_reentrant=False)):
        steps = [
            step(functools.partial(call, module), inputs(rank, sharded=layout == Shard(1)), module)
            for module in modules
        ]
        assert_close(steps[1][0], steps[0][0])
        ran = our_parallel.explain_layers(modules[1])["0.q"]
        if not inner_is_prepared:
            assert ("shared by 3 layers" if layout == Shard(1) else "shared, as all ranks hold x") in ran


@on_ranks(2)
def test_in_inference_mode(rank: int) -> None:
    """Views come undecomposed there; one of them is made before anybody reads x."""
    stock, ours = (attention(styles, each_once) for styles in (torch_parallel, our_parallel))
    with torch.inference_mode(), Dispatched() as spy:
        want, found = (module(*map(torch.detach, inputs(rank))) for module in (stock, ours))
    torch.testing.assert_close(found, want, **CLOSE)
    assert spy.names("fusedcomm") == [GATHER]


@on_ranks(2)
def test_under_compiled_autograd(rank: int) -> None:
    xs = inputs(rank) + inputs(rank)
    for styles, x in zip((torch_parallel, our_parallel), xs, strict=True):
        module = attention(styles, each_once)
        with compiled_autograd._enable(torch.compile(backend="aot_eager")):
            module(x).square().sum().backward()
    torch.testing.assert_close(*(x.grad for x in xs), **CLOSE)


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
    """Their weights come one by one, so torch's path runs, with one gather of x and one sum of its gradient."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    modules = []
    for styles in (torch_parallel, our_parallel):
        module = attention(styles, each_once, mesh=mesh["tp"])
        for layer in (module.q, module.k, module.v):
            fully_shard(layer, mesh=mesh["dp"])
        modules.append(module)
    if training:
        (wants, *_), (found, names, _) = (step(module, inputs(rank), module) for module in modules)
    else:
        with torch.no_grad(), Dispatched() as spy:
            wants, found = ([module(*inputs(rank))] for module in modules)
        names = by_wire(spy)
    assert_close(found, wants)
    assert names == [SCATTER] * training
