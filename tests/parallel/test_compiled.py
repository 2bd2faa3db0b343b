"""Models under the styles in torch.compile, whole and by block, beside one process that compiles nothing."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import fusedcomm.compile
import fusedcomm.parallel
from tests.helpers.on_ranks import on_ranks
from tests.helpers.small_llama import Llama, check, llama, meshes, parallelize, shard, train
from tests.helpers.tiers import nightly_but


@contextmanager
def compiling(enabled: bool) -> Iterator[Any]:
    torch._dynamo.reset()
    try:
        with fusedcomm.compile.enabled() if enabled else nullcontext() as report:
            yield report
    finally:
        torch._dynamo.reset()


def given_no_view(block: nn.Module, x: Tensor) -> Tensor:
    """What DTensor.to_local gives to a compiled module gets no gradient, or a wrong one: torch 2.13, stock styles too.
    Here it is what the embedding returns."""
    return block(x + 0)  # type: ignore[no-any-return]


def compile_blocks(model: Llama) -> None:
    model.around = given_no_view
    for block in model.layers:
        block.compile(fullgraph=True)


@on_ranks(2)
@pytest.mark.thorough
@pytest.mark.parametrize("enabled", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_whole_model(rank: int, enabled: bool) -> None:
    with compiling(enabled) as report:
        model = parallelize(llama(), init_device_mesh("cpu", (2,)))
        run = train(model, called=torch.compile(model, fullgraph=True))
        check(run)
        fused = [each for each in report.collectives if each.status == "fused"] if enabled else []
        assert len(fused) >= (8 if enabled else 0)  # 4 gathers and their backwards: the other ops are in the graph


@on_ranks(4)
@pytest.mark.nightly
@pytest.mark.parametrize("checkpointed", [False, True])
def test_blocks_under_fully_shard(rank: int, checkpointed: bool) -> None:
    with meshes(2, 2) as (data, tensor), compiling(enabled=not checkpointed):
        model = parallelize(llama(), tensor)
        compile_blocks(model)
        if checkpointed:
            model.around = functools.partial(checkpoint, given_no_view, use_reentrant=False)
        run = train(shard(model, data), data=data)
        check(run)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.o = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.q(x) * self.k(x))  # type: ignore[no-any-return]


def of_styles(layout: Any) -> nn.Module:
    p, model = fusedcomm.parallel, Shared()
    prepare = p.PrepareModuleInput(input_layouts=layout, desired_input_layouts=Replicate())
    column, row = p.ColwiseParallel(), p.RowwiseParallel(output_layouts=layout)
    plan = {"": prepare, "q": column, "k": column, "o": row}
    return p.parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


def alone(layout: Any) -> nn.Module:
    p, model = fusedcomm.parallel, Shared()
    column = p.ColwiseParallel(input_layouts=layout)
    plan = {"q": column, "k": column, "o": p.RowwiseParallel(output_layouts=layout)}
    return p.parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


MODES = {"grad": nullcontext, "x-without": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@on_ranks(2)
@pytest.mark.parametrize(
    ("mode", "autocast", "frozen"),
    nightly_but(
        [("no_grad", False, False), ("inference", False, False)], itertools.product(MODES, (False, True), (False, True))
    ),
)
def test_each_mode(rank: int, mode: str, autocast: bool, frozen: bool) -> None:
    """Whole graphs, and the numbers of the plain module."""
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    for make, layout in itertools.product((of_styles, alone), (Replicate(), Shard(1))):
        grads = []
        for model, compiled in ((Shared(), False), (make(layout), True)):
            mine = x.chunk(2, 1)[rank] if compiled and layout == Shard(1) else x
            mine = mine.clone().requires_grad_(mode == "grad")
            model.requires_grad_(not frozen)
            with compiling(enabled=False), MODES[mode](), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                y = (torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model)(mine)
            if y.requires_grad:
                y.float().sum().backward()
            whole = lambda t: t.full_tensor() if isinstance(t, DTensor) else t  # noqa: E731
            cut = (lambda t: t.chunk(2, 1)[rank]) if layout == Shard(1) and not compiled else (lambda t: t)
            grad = mine.grad if mine.grad is None else cut(mine.grad)
            grads.append([cut(y.detach()).float(), grad, *(whole(p.grad) for p in model.parameters())])
        for found, want in zip(grads[1], grads[0], strict=True):
            assert (found is None) == (want is None), (make, layout)
            if want is not None:
                close = {"rtol": 5e-2, "atol": 1e-1} if autocast else {"rtol": 1e-4, "atol": 1e-5}
                torch.testing.assert_close(found, want, **close)
