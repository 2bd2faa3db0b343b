"""torchtitan's Llama by torchtitan's plan, written anew: what `tests/models` runs where torchtitan is installed."""

from __future__ import annotations

import functools
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch.distributed.tensor.parallel as torch_parallel
from torch.distributed.device_mesh import init_device_mesh

import fusedcomm.parallel
from tests.helpers.on_ranks import on_ranks
from tests.helpers.small_llama import Run, agree, batch_of, difference, loss_of, train
from tests.helpers.spies import Dispatched
from tests.helpers.titan_llama import apply_tp, titan_llama

CLOSE = 1e-6  # relative; float32 has 1.2e-7
GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"


@functools.cache
def plain() -> Run:
    return train(titan_llama())


@on_ranks(2)
@pytest.mark.parametrize("with_loss_parallel", [False, True])
def test_training(rank: int, with_loss_parallel: bool) -> None:
    """Losses, norms, gradients and weights are those of one process; of 20 exchanges 18 are in ops."""
    mesh, plain_collectives = init_device_mesh("cpu", (2,)), []

    def around(*args: Any) -> AbstractContextManager[None]:
        return torch_parallel.loss_parallel() if with_loss_parallel else nullcontext()

    for styles in (torch_parallel, fusedcomm.parallel):
        model = apply_tp(titan_llama(), mesh, with_loss_parallel, styles)
        run = train(model, before_piece=around)
        assert difference(run, plain()) <= CLOSE
        agree(run)
        with around(), Dispatched() as spy:
            loss_of(model, batch_of(0)).backward()
        plain_collectives.append(Counter(spy.names("_c10d_functional")))
    assert Counter(spy.names("fusedcomm")) == {GATHER: 9, SCATTER: 9}
    before, left = plain_collectives
    assert before - left == {"all_gather_into_tensor": 9, "reduce_scatter_tensor": 9}
    assert left["all_gather_into_tensor"] == (1 if with_loss_parallel else 2) and left["reduce_scatter_tensor"] == 1
    ran = Counter(fusedcomm.parallel.explain_layers(model).values())
    assert ran == {f"{GATHER}, shared by 3 layers": 6, f"{GATHER}, shared by 2 layers": 4, SCATTER: 4, GATHER: 1}
