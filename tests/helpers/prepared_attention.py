"""A module with three layers that take the same x, under the styles of either package, and a step of it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.tensor.parallel as torch_parallel
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.helpers.spies import Dispatched

D, BATCH, TOKENS = 8, 2, 4
TOKEN_SHARDS = Shard(1)
CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # float32; sums of tens of terms of about 1 run in another order
GATHERED, REDUCED = "all_gather_into_tensor", "reduce_scatter_tensor"  # by plain collectives
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


def attention(
    styles: Any, use: Callable[..., Tensor], layout: Any = TOKEN_SHARDS, inputs: int = 1, mesh: Any = None
) -> Attention:
    """``layout``: None where x comes prepared."""
    torch.manual_seed(0)
    mesh = mesh or init_device_mesh("cpu", (2,))
    module = Attention(use)
    if layout is not None:
        layouts, desired = (layout,) * inputs, (Replicate(),) * inputs
        prepare = styles.PrepareModuleInput(input_layouts=layouts, desired_input_layouts=desired)
        torch_parallel.parallelize_module(module, mesh, prepare)
    torch_parallel.parallelize_module(module, mesh, {name: styles.ColwiseParallel() for name in "qkv"})
    return module


def inputs(rank: int, count: int = 1, sharded: bool = True) -> list[Tensor]:
    xs = torch.randn(count, BATCH, TOKENS, D, generator=torch.Generator().manual_seed(1))
    return [(x.chunk(2, 1)[rank] if sharded else x).clone().requires_grad_() for x in xs]


def step(call: Callable[..., Tensor], xs: list[Tensor], module: nn.Module) -> tuple[list[Any], list[str], list[str]]:
    """The result and the gradients of xs and of the parameters, the ops by their wires, and torch's collectives."""
    module.zero_grad()
    with Dispatched() as spy:
        y = call(*xs)
        y.backward(torch.arange(1.0, 1.0 + y.numel()).view(y.shape).sin())
    grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in module.parameters()]
    return [y.detach(), *(x.grad for x in xs), *grads], by_wire(spy), spy.names("_c10d_functional")


def by_wire(spy: Dispatched) -> list[str]:
    """The names of ops. A sum that is ready is sent as its product would be."""
    return [{"reduce_scatter": SCATTER, "all_reduce": REDUCE}.get(name, name) for name in spy.names("fusedcomm")]


def assert_close(found: list[Any], wants: list[Any]) -> None:
    for each, want in zip(found, wants, strict=True):
        assert (each is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(each, want, **CLOSE)
