"""Models under the styles in torch.compile, whole and by block, beside one process that compiles nothing."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed.tensor.parallel as torch_parallel
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fusedcomm.compile
import fusedcomm.parallel
from tests.helpers.on_ranks import on_ranks
from tests.helpers.small_llama import Llama, agree, difference, llama, meshes, parallelize, plain, shard, train

CLOSE = 1e-6  # relative; float32 has 1.2e-7, and torch's own styles are 6e-7 away


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
        assert difference(run, plain()) <= CLOSE
        agree(run)
        fused = [each for each in report.collectives if each.status == "fused"] if enabled else []
        assert len(fused) >= (8 if enabled else 0)  # 4 gathers and their backwards: the other ops are in the graph


@on_ranks(2)
@pytest.mark.nightly
@pytest.mark.parametrize("enabled", [False, True])
def test_blocks(rank: int, enabled: bool) -> None:
    with compiling(enabled):
        model = parallelize(llama(), init_device_mesh("cpu", (2,)))
        compile_blocks(model)
        run = train(model)
        assert difference(run, plain()) <= CLOSE
        agree(run)


@on_ranks(4)
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["torch", "ours"])
def test_whole_model_under_fully_shard_fails_with_torchs_styles_too(rank: int, name: str) -> None:
    """FSDP2's hooks break the graph; blocks are what can be compiled."""
    with meshes(2, 2) as (data, tensor), compiling(enabled=False):
        styles = {"torch": torch_parallel, "ours": fusedcomm.parallel}[name]
        model = shard(parallelize(llama(), tensor, styles), data)
        with pytest.raises(BackendCompilerFailed, match="Mixing fake modes NYI"):
            train(model, called=torch.compile(model, backend="aot_eager"), data=data)


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
        assert difference(run, plain()) <= CLOSE
        agree(run)
