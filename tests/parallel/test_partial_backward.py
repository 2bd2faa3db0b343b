"""Backwards for some gradients alone, as of pipelines that run those of the input and of the weights apart."""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from fusedcomm.nn import ExpertParallel
from fusedcomm.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from tests.helpers.on_ranks import on_ranks
from tests.helpers.prepared_attention import GATHER, REDUCE, SCATTER, D
from tests.helpers.spies import Dispatched

TOKENS = Shard(1)


def network(layout: str) -> nn.Sequential:
    torch.manual_seed(0)
    module, mesh = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D)), init_device_mesh("cpu", (2,))
    if layout == "prepared":
        prepare = PrepareModuleInput(input_layouts=TOKENS, desired_input_layouts=Replicate())
        parallelize_module(module, mesh, prepare)
    colwise = ColwiseParallel(input_layouts=TOKENS) if layout == "sharded" else ColwiseParallel()
    rowwise = RowwiseParallel() if layout == "replicated" else RowwiseParallel(output_layouts=TOKENS)
    parallelize_module(module, mesh, {"0": colwise, "2": rowwise})
    return module


def step(layout: str, rank: int, module: nn.Module) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, 4, D, generator=torch.Generator().manual_seed(1))
    x = (x if layout == "replicated" else x.chunk(2, 1)[rank]).clone().requires_grad_()
    return x, module(x)


def counts(spy: Dispatched) -> tuple[list[str], int]:
    return spy.names("fusedcomm"), spy.matmuls()


@on_ranks(2)
@pytest.mark.parametrize("layout", ["sharded", "prepared", "replicated"])
def test_input_and_weights_apart(rank: int, layout: str) -> None:
    """Both halves together run the ops of a whole backward."""
    module = network(layout)
    x, y = step(layout, rank, module)
    y.sum().backward()
    wants = [x.grad, *(p.grad.to_local() for p in module.parameters())]  # type: ignore[union-attr]
    module.zero_grad()

    x, y = step(layout, rank, module)
    with Dispatched() as of_input:
        _, groups = stage_backward_input([y], [torch.ones_like(y)], [x], iter(module.parameters()))
    with Dispatched() as of_weights:
        stage_backward_weight(iter(module.parameters()), groups)
    found = [x.grad, *(p.grad.to_local() for p in module.parameters())]  # type: ignore[union-attr]
    torch.testing.assert_close(found, wants)
    assert counts(of_input) == (([REDUCE], 1) if layout == "replicated" else ([GATHER, SCATTER], 0))
    assert counts(of_weights) == (([], 2) if layout == "replicated" else (["all_gather"], 2))


@on_ranks(2)
@pytest.mark.parametrize("layout", ["sharded", "prepared", "replicated"])
def test_weights_alone(rank: int, layout: str) -> None:
    """The gradient of the input is neither multiplied nor sent."""
    module = network(layout)
    _, y = step(layout, rank, module)
    with Dispatched() as spy:
        torch.autograd.grad(y.sum(), [module[0].weight, module[2].weight])
    assert counts(spy) == (([], 3) if layout == "replicated" else ([GATHER], 2))


@on_ranks(2)
def test_experts(rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    layer = ExpertParallel(D, 2 * D, 4, max_tokens=6)
    x = torch.randn(6, D, generator=generator, requires_grad=True)
    y = layer(x, torch.randint(4, (6, 2), generator=generator), torch.rand(6, 2, generator=generator)).sum()
    weights = [layer.w1, layer.w2, layer.w3]
    wants = torch.autograd.grad(y, [x, *weights], retain_graph=True)
    with Dispatched() as of_input:
        (grad_x,) = torch.autograd.grad(y, [x], retain_graph=True)
    with Dispatched() as of_weights:
        found = torch.autograd.grad(y, weights)
    torch.testing.assert_close((grad_x, *found), wants)
    names, sends = Counter(of_input.names("fusedcomm")), Counter(of_weights.names("fusedcomm"))
    assert names == {"moe_send": 1, "moe_grouped_matmul": 3, "moe_combine": 1}
    assert sends == {"moe_send": 1, "moe_grouped_matmul": 1, "moe_grouped_outer": 3}
