"""What composes with the styles: losses, norms, gradients and weights of a small Llama equal those of one process."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as stock
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fusedcomm
from tests.helpers.on_ranks import on_ranks
from tests.helpers.process_groups import left_as_found
from tests.helpers.small_llama import Block, Llama, Run, difference, llama, loss_of, batch_of, parallelize, plain, train
from tests.helpers.thorough import thorough_but

CLOSE = 1e-6  # relative; float32 has 1.2e-7, and stock styles are 6e-7 away


def check(got: Run, want: Run, tolerance: float = CLOSE) -> None:
    assert difference(got, want) <= tolerance
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (got.norms, got.losses))
    assert all(each == everyone[0] for each in everyone), "ranks differ"


def all_by_ops(model: nn.Module) -> bool:
    ran = fusedcomm.parallel.explain(model).values()
    return len(ran) == 15 and not any(why.startswith(("torch's own", "not called")) for why in ran)


# --- tensor parallel alone: what is done to the model, or passed to `train` ---


def _around(function: Callable[..., Tensor]) -> Callable[[Llama], dict[str, Any]]:
    def change(model: Llama) -> dict[str, Any]:
        model.around = function
        return {}

    return change


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op.namespace == "fusedcomm" or op is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _wrapped(kinds: tuple[type[nn.Module], ...]) -> Callable[[Llama], dict[str, Any]]:
    def change(model: Llama) -> dict[str, Any]:
        apply_activation_checkpointing(model, checkpoint_wrapper, lambda module: isinstance(module, kinds))
        return {}

    return change


_selective = functools.partial(create_selective_checkpoint_contexts, _policy)
_non_reentrant = functools.partial(checkpoint, use_reentrant=False)

TENSOR_PARALLEL: dict[str, Callable[[Llama], dict[str, Any]]] = {
    "alone": lambda model: {},
    "microbatches": lambda model: {"pieces": 2},
    "checkpoint": _around(_non_reentrant),
    "checkpoint-no-early-stop": _around(functools.partial(_non_reentrant, early_stop=False)),
    "checkpoint-reentrant": _around(functools.partial(checkpoint, use_reentrant=True)),
    "checkpoint-selective": _around(functools.partial(_non_reentrant, context_fn=_selective)),
    "checkpoint-wrapper": _wrapped((Block,)),
}


@on_ranks(2)
@pytest.mark.parametrize("name", thorough_but(["alone", "checkpoint"], TENSOR_PARALLEL))
def test_tensor_parallel(rank: int, name: str) -> None:
    with left_as_found():
        model = parallelize(llama(), init_device_mesh("cpu", (2,)))
        check(train(model, **TENSOR_PARALLEL[name](model)), plain())
        assert all_by_ops(model)
