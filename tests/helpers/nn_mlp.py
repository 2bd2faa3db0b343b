"""An MLP behind a norm, plain and with the tensor-parallel layers of fusedcomm.nn, as tests of what surrounds them
run it: the data, and the whole gradients of one process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from fusedcomm.nn import ColumnParallelLinear, RowParallelLinear
from tests.helpers.nn_layers import whole

BATCH, TOKENS, HIDDEN, INNER = 4, 8, 6, 12
# float32 has 1.2e-7; sums of some tens of terms run in another order, of gradients of about 0.1
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up: Any = nn.Linear(HIDDEN, INNER)
        self.down: Any = nn.Linear(INNER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def plain_mlp(seed: int = 0) -> MLP:
    torch.manual_seed(seed)
    return MLP()


def data() -> Tensor:
    return torch.randn(BATCH, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))


def mesh_of_pairs() -> DeviceMesh:
    """Two pairs of four ranks: each pair holds one model."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))


def parallel_mlp(plain: MLP, group: Any, sequence_dim: int | None) -> MLP:
    """The norm stays plain."""
    model = copy.deepcopy(plain)
    model.up = ColumnParallelLinear.from_linear(model.up, sequence_dim=sequence_dim, group=group)
    model.down = RowParallelLinear.from_linear(model.down, sequence_dim=sequence_dim, group=group)
    return model


def distribute_norm(model: MLP, mesh: DeviceMesh, sequence_dim: int | None) -> MLP:
    """As docs/layers.md tells users to."""
    if sequence_dim is not None:
        style = SequenceParallel(sequence_dim=sequence_dim, use_local_output=True)
        parallelize_module(model, mesh, {"norm": style})
        return model
    distribute_module(
        model.norm,
        mesh,
        input_fn=lambda module, inputs, mesh: DTensor.from_local(inputs[0], mesh, [Replicate()]),
        output_fn=lambda module, output, mesh: output.to_local(),
    )
    return model


def mean_square(y: Tensor) -> Tensor:
    return y.square().mean()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        grad = parameter.grad
        found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad  # a norm's is Partial
    return found


def check_gradients(model: nn.Module, plain: nn.Module) -> None:
    wants = gradients(plain)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, wants[name], **CLOSE, msg=lambda m, name=name: f"{name}: {m}")


def check_parameters(model: nn.Module, plain: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        want = plain.get_parameter(name)
        torch.testing.assert_close(whole(parameter), want, **CLOSE, msg=lambda m, name=name: f"{name}: {m}")


def step(model: nn.Module, x: Tensor, loss_of: Callable[[Tensor], Tensor] = mean_square) -> Tensor:
    loss = loss_of(model(x))
    loss.backward()
    return loss.detach()
