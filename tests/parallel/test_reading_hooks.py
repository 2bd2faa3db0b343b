"""Hooks that read what a module is given, on one rank too: values and what they see are as with torch's styles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as torch_parallel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import fusedcomm.parallel as our_parallel
from tests.helpers.on_ranks import on_ranks
from tests.helpers.prepared_attention import (
    CLOSE,
    GATHER,
    GATHERED,
    REDUCED,
    SCATTER,
    Attention,
    alike,
    assert_close,
    attention,
    each_once,
    inputs,
    step,
)

Hook = Callable[..., None]
Ran = tuple[list[str], list[str]]  # ops, and plain collectives
FUSED: Ran = ([GATHER, SCATTER], [])
STOCK: Ran = ([], [GATHERED, REDUCED])


@contextmanager
def removed_after(*handles: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# Where a hook is added that one rank reads x in, and what then runs.
HOOKS: dict[str, tuple[Callable[[Attention, Hook], Any], Ran]] = {
    "forward": (lambda m, hook: m.register_forward_hook(hook), FUSED),
    "pre": (lambda m, hook: m.register_forward_pre_hook(hook), STOCK),
    "forward-of-a-layer": (lambda m, hook: m.v.register_forward_hook(hook), FUSED),
    "pre-of-a-layer": (lambda m, hook: m.q.register_forward_pre_hook(hook), STOCK),
    "forward-of-all": (lambda m, hook: register_module_forward_hook(hook), FUSED),
    "pre-of-all": (lambda m, hook: register_module_forward_pre_hook(hook), STOCK),
}


@on_ranks(2)
@pytest.mark.parametrize("name", HOOKS)
def test_one_rank_logs_x(rank: int, name: str) -> None:
    add, ran = HOOKS[name]
    results, seen = [], []
    for styles in (torch_parallel, our_parallel):
        module = attention(styles, each_once)
        norms: list[Tensor] = []

        def log(module: nn.Module, args: Any, *result: Any, norms: list[Tensor] = norms) -> None:
            if dist.get_rank() == 0:
                norms.append(alike(args[0]).detach().norm())

        with removed_after(add(module, log)):
            results.append(step(module, inputs(rank), module))
        seen.append(norms)
    assert_close(results[1][0], results[0][0])
    assert results[1][1:] == ran
    torch.testing.assert_close(seen[1], seen[0], **CLOSE)
    assert len(seen[0]) == (0 if rank else {"pre-of-all": 4, "forward-of-all": 4}.get(name, 1))


def read_by_rank_0(m: Attention, x: Tensor) -> Tensor:
    y = each_once(m, x)
    if dist.get_rank() == 0:
        assert alike(x).norm() > 0
    return y


def unused(m: Attention, x: Tensor) -> Tensor:
    return torch.zeros(3, requires_grad=True)


@on_ranks(2)
@pytest.mark.parametrize("mode", ["training", "no_grad", "frozen", "unused", "autocast"])
def test_one_rank_reads_x(rank: int, mode: str) -> None:
    """Also where the op saves nothing, where it gathers another dtype, and where no layer has gathered x."""
    module = attention(our_parallel, unused if mode == "unused" else read_by_rank_0)
    norms: list[Tensor] = []
    if mode in ("unused", "autocast"):
        module.use = unused if mode == "unused" else each_once
        module.register_forward_hook(lambda m, args, y: norms.append(alike(args[0]).norm()) if rank == 0 else None)
    module.requires_grad_(mode != "frozen")
    around = {"no_grad": torch.no_grad, "autocast": functools.partial(torch.autocast, "cpu", torch.bfloat16)}
    for _ in range(2):
        with around.get(mode, nullcontext)():
            module(*inputs(rank))
    assert len(norms) == (2 if rank == 0 and mode in ("unused", "autocast") else 0)
    why = "torch's own: a forward hook may read x, which the layers take in autocast's dtype"
    if mode != "unused":
        assert module.k.ran == (why if mode == "autocast" else f"{GATHER}, shared by 3 layers")


@on_ranks(2)
@pytest.mark.parametrize("of", ["module", "layer", "layer-pre"])
def test_gradients_that_a_hook_reads(rank: int, of: str) -> None:
    """A full backward hook sees, and may change, the gradient of x: of the module, or what one layer adds to it."""
    results, seen = [], []
    for styles in (torch_parallel, our_parallel):
        module = attention(styles, each_once)
        grads: list[Tensor] = []

        def change(module: nn.Module, *grads_of: Any, grads: list[Any] = grads) -> Any:
            grads.append(grads_of[0][0].detach())
            return tuple(3 * grad for grad in grads_of[0])

        hooked = module if of == "module" else module.k
        (hooked.register_full_backward_pre_hook if of == "layer-pre" else hooked.register_full_backward_hook)(change)
        results.append([step(module, inputs(rank), module) for _ in range(2)][-1])
        seen.append([each.full_tensor() if isinstance(each, DTensor) else each for each in grads])
    assert_close(results[1][0], results[0][0])
    torch.testing.assert_close(seen[1], seen[0], **CLOSE)
    assert results[1][1:] == STOCK
    why = "torch's own: {}a backward hook reads the gradient of x"
    assert module.q.ran == why.format("" if of == "module" else "it shares x with a layer for which ")
    assert module.k.ran == why.format("")
