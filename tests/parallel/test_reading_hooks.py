"""Hooks and other watchers that one rank alone has: values, what they see and what runs are as without them."""

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as torch_parallel
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn.modules import module as every
from torch.nn.utils import parametrize

import fusedcomm.parallel as our_parallel
from fusedcomm import close, force_algorithm
from tests.helpers.on_ranks import on_ranks
from tests.helpers.prepared_attention import (
    CLOSE,
    GATHER,
    REDUCE,
    SCATTER,
    Attention,
    alike,
    assert_close,
    attention,
    each_once,
    inputs,
    step,
)
from tests.helpers.tiers import nightly_but

Hook = Callable[..., None]
Add = Callable[[Attention, Hook], Any]


def of_gradients(m: Attention, hook: Hook, *add: Callable[[Tensor], Any]) -> Any:
    """A hook on the x that layers get, or on views of it."""

    def use(m: Attention, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        for each in add:
            each(rows if each is add[-1] and len(add) > 1 else x)
        return torch.cat([m.q(x), m.k(rows).view(*x.shape[:-1], -1), m.v(x)], -1)

    m.use = use
    return nullcontext()


# name -> where a hook is added
HOOKS: dict[str, Add] = {
    "forward": lambda m, hook: m.register_forward_hook(hook),
    "pre": lambda m, hook: m.register_forward_pre_hook(hook),
    "forward-of-a-layer": lambda m, hook: m.v.register_forward_hook(hook),
    "pre-of-a-layer": lambda m, hook: m.q.register_forward_pre_hook(hook),
    "forward-of-all": lambda m, hook: every.register_module_forward_hook(hook),
    "pre-of-all": lambda m, hook: every.register_module_forward_pre_hook(hook),
    "backward": lambda m, hook: m.register_full_backward_hook(hook),
    "backward-of-a-layer": lambda m, hook: m.k.register_full_backward_hook(hook),
    "backward-pre-of-a-layer": lambda m, hook: m.k.register_full_backward_pre_hook(hook),
    "backward-of-all": lambda m, hook: every.register_module_full_backward_hook(hook),
    "gradient-of-x": lambda m, hook: of_gradients(m, hook, lambda x: x.register_hook(lambda g: hook(m, [g]))),
    "gradient-of-a-view": lambda m, hook: of_gradients(
        m, hook, lambda x: None, lambda x: x.register_hook(lambda g: hook(m, [g]))
    ),
    "gradient-of-a-weight": lambda m, hook: m.k.weight.register_post_accumulate_grad_hook(lambda p: hook(m, [p.grad])),
}


@on_ranks(2)
@pytest.mark.parametrize("kept", [False, True], ids=["read", "kept"])
@pytest.mark.parametrize("layout", [Shard(1), Replicate()], ids=str)
def test_one_rank_watches(rank: int, layout: Any, kept: bool) -> None:
    """``kept``: what the hook is given is read after an optimizer has changed the weights."""
    for name, add in HOOKS.items():
        results, seen = [], []
        for styles in (torch_parallel, our_parallel):
            module = attention(styles, each_once, layout)
            given: list[Any] = []

            def watch(module: nn.Module, args: Any, *more: Any, given: list[Any] = given) -> None:
                given.append(args[0] if kept else alike(args[0]).detach().norm())

            with ExitStack() as stack:
                if "gradient-of" in name and "weight" not in name and rank > 0:
                    add(module, lambda *args: None)  # the same program, whose hook does nothing
                elif rank == 0:
                    stack.enter_context(add(module, watch))
                results.append(step(module, inputs(rank, sharded=layout == Shard(1)), module))
            if kept:
                torch.optim.SGD(module.parameters(), lr=1.0).step()
                given = [alike(each).detach().norm() for each in given]
            seen.append(given)
        assert_close(results[1][0], results[0][0])
        assert results[1][1:] == (([GATHER, SCATTER] if layout == Shard(1) else [REDUCE]), []), name
        assert bool(seen[0]) == (rank == 0), name
        torch.testing.assert_close(seen[1], seen[0], **CLOSE)


@on_ranks(2)
@pytest.mark.parametrize("layout", [Shard(1), Replicate()], ids=str)
def test_the_gradient_is_kept(rank: int, layout: Any) -> None:
    """On all ranks: torch adds up what it keeps."""
    kept: list[Tensor] = []

    def use(m: Attention, x: Tensor) -> Tensor:
        x.retain_grad()
        kept.append(x)
        return each_once(m, x)

    for styles in (torch_parallel, our_parallel):
        module = attention(styles, use, layout)
        _, *ran = step(module, inputs(rank, sharded=layout == Shard(1)), module)
    assert ran[0] == ([GATHER, SCATTER] if layout == Shard(1) else [REDUCE])
    want, found = (alike(x.grad) for x in kept)
    torch.testing.assert_close(found, want, **CLOSE)


def read_by_rank_0(m: Attention, x: Tensor) -> Tensor:
    y = each_once(m, x)
    if dist.get_rank() == 0:
        assert alike(x).norm() > 0
    return y


def unused(m: Attention, x: Tensor) -> Tensor:
    return torch.zeros(3, requires_grad=True)


def two_on_rank_0(m: Attention, x: Tensor) -> Tensor:
    """v is called with x on rank 1 alone."""
    return torch.cat([m.q(x), m.k(x), m.v(x if dist.get_rank() else x.detach())], -1)


@on_ranks(2)
@pytest.mark.parametrize("mode", ["training", "no_grad", "frozen", "unused", "autocast", "two"])
def test_one_rank_reads_x(rank: int, mode: str) -> None:
    """Also where the op saves nothing, where layers take another dtype, and where no layer takes x."""
    module = attention(our_parallel, {"unused": unused, "two": two_on_rank_0}.get(mode, read_by_rank_0))
    norms: list[Tensor] = []
    if rank == 0:
        module.register_forward_hook(lambda m, args, y: norms.append(alike(args[0]).norm()))
    module.requires_grad_(mode != "frozen")
    around = {"no_grad": torch.no_grad, "autocast": functools.partial(torch.autocast, "cpu", torch.bfloat16)}
    for _ in range(3):
        with around.get(mode, nullcontext)():
            module(*inputs(rank))
    assert len(norms) == (0 if rank else 3)
    if mode not in ("unused", "two"):
        cast = "F.linear, as autocast makes torch.bfloat16 of x, which is gathered as torch.float32"
        assert module.k.ran == (cast if mode == "autocast" else f"{GATHER}, shared by 3 layers")


def written(grad: Any) -> None:
    grad.to_local().mul_(2)


@on_ranks(2)
@pytest.mark.parametrize("of", ["module", "layer", "layer-pre", "x", "written"])
def test_gradients_that_a_hook_changes(rank: int, of: str) -> None:
    """On all ranks: of the module, of what one layer adds to it, of x; also in place."""
    results = []
    for styles in (torch_parallel, our_parallel):

        def change(module: nn.Module, *grads_of: Any) -> Any:
            return tuple(3 * grad for grad in grads_of[0])

        def use(m: Attention, x: Tensor) -> Tensor:
            if of == "x":
                x.register_hook(lambda grad: 10 * grad)
            if of == "written":
                x.register_hook(written)
            return each_once(m, x)

        module = attention(styles, use)
        hooked = module if of == "module" else module.k
        if of in ("module", "layer", "layer-pre"):
            (hooked.register_full_backward_pre_hook if of == "layer-pre" else hooked.register_full_backward_hook)(
                change
            )
        results.append([step(module, inputs(rank), module) for _ in range(2)][-1])
    assert_close(results[1][0], results[0][0])
    assert results[1][1:] == ([GATHER, SCATTER], [])


def hooked(m: Attention, x: Tensor, hook: Callable[[Tensor], Any]) -> Tensor:
    x.register_hook(hook)
    return each_once(m, x)


def pre_hooked(m: Attention, x: Tensor) -> Tensor:
    with m.k.register_forward_pre_hook(lambda module, args: args[0].clone()):
        return each_once(m, x)


def tripled(module: nn.Module, grads: Any, _: Any) -> Any:
    return (3 * grads[0],)


def backward_hooked(m: Attention, x: Tensor) -> Tensor:
    with m.k.register_full_backward_hook(tripled):
        return each_once(m, x)


# what one rank may do with x, or its gradient: its sum over ranks is of the same shape
CHANGES: dict[str, Callable[[Attention, Any], Tensor]] = {
    "a copy": pre_hooked,
    "another gradient of a layer": backward_hooked,
    "another gradient": lambda m, x: hooked(m, x, lambda grad: 3 * grad),
    "a written gradient": lambda m, x: hooked(m, x, written),
    "a layer twice": lambda m, x: each_once(m, x) + 0 * m.q(x).sum(),
    "a layer less": lambda m, x: torch.cat([m.q(x), m.k(x.detach()), m.v(x)], -1),
    "no layer": lambda m, x: each_once(m, x.detach()) + x.to_local(grad_placements=(Partial(),)).repeat(1, 1, 2),
}


ALGORITHMS = ["chunked", "unfused", "pipelined", "fused", "checked"]


@contextmanager
def voted_anew(**env: str) -> Iterator[None]:
    """The world's group under these settings: DTensors take its equals for it."""
    try:
        with mock.patch.dict(os.environ, {f"FUSEDCOMM_{name}": value for name, value in env.items()}):
            close(dist.group.WORLD)
            yield
    finally:
        close(dist.group.WORLD)


@on_ranks(2)
@pytest.mark.parametrize("algorithm", nightly_but(["chunked", "checked"], ALGORITHMS))
def test_one_rank_changes_the_gradient(rank: int, algorithm: str) -> None:
    """It sends its own sum as the others send their products."""
    with voted_anew(CHECK=str(int(algorithm == "checked"))), force_algorithm(algorithm.removeprefix("checked") or None):
        for change, layout in itertools.product(CHANGES.values(), (Shard(1), Replicate())):
            stock, ours = (attention(s, each_once if rank else change, layout) for s in (torch_parallel, our_parallel))
            want, *_ = step(stock, inputs(rank, sharded=layout == Shard(1)), stock)
            for _ in range(3 if algorithm == "chunked" else 1):  # the third is prepared
                found, *ran = step(ours, inputs(rank, sharded=layout == Shard(1)), ours)
                assert_close(found, want)
                assert ran == [[GATHER, SCATTER] if layout == Shard(1) else [REDUCE], []]


@on_ranks(2)
def test_one_rank_asks_for_a_second_derivative(rank: int) -> None:
    """It alone, and then all."""
    results = []
    for styles in (torch_parallel, our_parallel):
        module, (x,) = attention(styles, each_once), inputs(rank)
        grads = [torch.autograd.grad(module(x).sin().sum(), x, create_graph=asks)[0] for asks in (rank == 0, True)]
        grads[1].square().sum().backward()
        results.append([*grads, x.grad, *(alike(p.grad) for p in module.parameters())])
    assert_close(results[1], results[0])


class OneView(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.view_as(weight)


# where an optimizer steps in the backward
STEPS: dict[str, Callable[[Any, Callable[..., Any]], Any]] = {
    "hooks of parameters": lambda m, write: [p.register_post_accumulate_grad_hook(write) for p in m.parameters()],
    "hooks of nodes": lambda m, write: [
        p.view_as(p).grad_fn.next_functions[0][0].register_hook(lambda *_, p=p: write(p)) for p in m.parameters()
    ],
    "another weight's": lambda m, write: m.q.bias.register_post_accumulate_grad_hook(lambda _: write(m.q.weight)),
    "a module's": lambda m, write: m.k.register_full_backward_hook(lambda *_: write(m.k.weight)),
    "hooks of what a weight is a view of": lambda m, write: [
        parametrize.register_parametrization(m.k, "weight", OneView()),
        m.k.parametrizations.weight.original.register_post_accumulate_grad_hook(write),
    ],
}


@on_ranks(2)
@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.parametrize("layout", [Shard(1), Replicate()], ids=str)
def test_an_optimizer_in_the_backward(rank: int, layout: Any, by_data: bool) -> None:
    """It writes a weight as soon as that has its gradient: x's is that of the weight before."""

    def write(p: Tensor) -> None:
        with torch.no_grad():
            (p.data if by_data else p).mul_(0.5)

    for add in STEPS.values():
        results = []
        for styles in (torch_parallel, our_parallel):
            module = attention(styles, each_once, layout)
            nodes = add(module, write)  # a node lives as long as its hook's handle
            results.append(step(module, inputs(rank, sharded=layout == Shard(1)), module)[0])
            del nodes
        assert_close(results[1], results[0])
