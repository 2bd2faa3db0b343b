"""What a model with parallel layers needs beside them: the whole state dict, and the sum of partial gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fusedcomm.nn.parallel_linear import ParallelLinear, whole
from fusedcomm.runtime.group import Group, find, resolve


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return ``model.state_dict()``, with the whole plain tensor in place of each DTensor, as the plain model has them.

    It is a collective, DTensor after DTensor: every rank calls it, with the same model. What was not gathered is the
    model's own memory, as in ``state_dict()``.

    Args:
        model: any module, with layers of `fusedcomm.nn`, of torch's or this package's tensor parallel styles, of FSDP2.

    Returns:
        The same dict on every rank, on the parameters' device.

    Example, on each of 2 ranks::

        model = torch.nn.Sequential(fusedcomm.nn.ColumnParallelLinear(8, 6), fusedcomm.nn.RowParallelLinear(6, 8))
        assert fusedcomm.nn.full_state_dict(model)["0.weight"].shape == (6, 8)
    """
    for module in model.modules():
        if isinstance(module, ParallelLinear):
            module._group()  # its error says more than that of a gather
    state = model.state_dict()
    for name, value in state.items():
        if isinstance(value, DTensor):
            state[name] = whole(value)
    return state


def sum_replicated_gradients(model: nn.Module, *, also: Iterable[nn.Parameter] = (), group: Group = None) -> None:
    """Add up, over each layer's group, the gradients that are only this rank's part. Call it once after the backward.

    A replicated parameter that acts on a rank's tokens alone has a gradient of these tokens alone. In this package:

        layer                                       partial             complete on every rank
        UlyssesQKV, UlyssesOut                      weight, bias
        ColumnParallelLinear, RowParallelLinear                         weight, bias (DTensors)

    A model's other plain parameters need it too where they act on a rank's tokens alone, for instance those of the
    norms between these layers under sequence parallelism: name them in ``also``. Those of `SequenceParallel` do not:
    they are DTensors. Nor is it needed where a wrapper reduces gradients over the same ranks already, as
    DistributedDataParallel and FSDP2 do; their average is 1 / R of this sum. Under FSDP2 over other ranks it adds up
    this rank's shards of the gradients.

    It is a collective per parameter, in the order of model.parameters(), then of ``also``. Parameters without a
    gradient are left out; they must be the same on all ranks. With gradient accumulation, call it after the last
    backward.

    Args:
        model: any module with layers of `fusedcomm.nn`.
        also: other parameters, whose gradients are summed over ``group``.
        group: that of ``also``: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for
            WORLD.

    Raises:
        ValueError: a parameter in ``also`` belongs to a layer for which its gradient is complete, or a parameter is a
            DTensor on a mesh with other ranks of the group, which has reduced its gradient over them.

    Example, on each of 2 ranks::

        layer = fusedcomm.nn.UlyssesOut(num_heads=4, head_dim=2, out_features=8)
        layer(torch.ones(2, 6, 2, 2)).sum().backward()
        fusedcomm.nn.sum_replicated_gradients(layer)
        assert (layer.bias.grad == 12).all()  # 2 x 6 tokens, half of them on each rank
    """
    summed = []
    for parameter, group_name in _partial(model, list(also), group).items():
        if parameter.grad is not None:
            grad = _local(parameter.grad)
            part = grad.contiguous()
            summed.append((grad, part, dist.all_reduce(part, group=find(group_name), async_op=True)))
    for grad, part, work in summed:
        if work is not None:
            work.wait()
        if part is not grad:
            grad.copy_(part)


def _local(grad: Tensor) -> Tensor:
    grad = grad.detach()
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _partial(model: nn.Module, also: list[nn.Parameter], group: Group) -> dict[nn.Parameter, str]:
    """Each parameter once, with its group's name."""
    partial: dict[nn.Parameter, str] = {}
    complete: dict[nn.Parameter, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, ParallelLinear):
            for name, parameter in module.named_parameters(recurse=False):
                if name in module.partial_gradients:
                    partial[parameter] = module._group()
                else:
                    complete[parameter] = f"{path}.{name}".lstrip(".")
    for parameter in also:
        if parameter in complete:
            raise ValueError(f"also must name parameters with partial gradients, got {complete[parameter]}")
    group_name = resolve(group)[1] if also else ""
    partial |= {parameter: group_name for parameter in also if parameter not in partial}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, group_name in partial.items():
        _check_not_reduced(names.get(parameter, "a parameter in also"), parameter, group_name)
    return partial


def _check_not_reduced(name: str, parameter: nn.Parameter, group_name: str) -> None:
    if not isinstance(parameter, DTensor):
        return
    ranks = {*dist.get_process_group_ranks(find(group_name))} & {*parameter.device_mesh.mesh.flatten().tolist()}
    if len(ranks) > 1:
        raise ValueError(
            f"the gradient of {name} must not have been reduced over the group, got a DTensor on a mesh with its ranks "
            f"{sorted(ranks)}"
        )
