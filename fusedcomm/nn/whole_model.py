"""What a model with parallel layers needs beside them: the whole state dict, and the sum of partial gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn

from fusedcomm.nn.parallel_linear import ParallelLinear, saving_whole
from fusedcomm.runtime.group import Group, find, resolve


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return ``model.state_dict()``, with the whole parameter in place of each shard, as the plain model has them.

    It is a collective, layer after layer: every rank calls it, with the same layers in the same order. What was not
    gathered is the model's own memory, as in ``state_dict()``.

    Args:
        model: any module with layers of `fusedcomm.nn`.

    Returns:
        The same dict on every rank, on the parameters' device.

    Example, on each of 2 ranks::

        model = torch.nn.Sequential(fusedcomm.nn.ColumnParallelLinear(8, 6), fusedcomm.nn.RowParallelLinear(6, 8))
        assert fusedcomm.nn.full_state_dict(model)["0.weight"].shape == (6, 8)
    """
    with saving_whole():
        return model.state_dict()


def sum_replicated_gradients(model: nn.Module, *, also: Iterable[nn.Parameter] = (), group: Group = None) -> None:
    """Add up, over each layer's group, the gradients that are only this rank's part. Call it once after the backward.

    A replicated parameter that acts on a rank's tokens alone has a gradient of these tokens alone. In this package:

        layer                                       partial             complete on every rank
        UlyssesQKV, UlyssesOut                      weight, bias
        ColumnParallelLinear                                            weight, bias (shards)
        RowParallelLinear with sequence_dim         bias                weight (shard)
        RowParallelLinear without sequence_dim                          weight (shard), bias

    A model's other parameters need it too where they act on a rank's tokens alone, for instance those of the norms
    between these layers under sequence parallelism: name them in ``also``. It is not needed where a wrapper reduces
    gradients over the same ranks already, as DistributedDataParallel does; its average is 1 / R of this sum. That
    wrapper must not have the layers that hold shards: it copies rank 0's parameters to all ranks.

    It is a collective per parameter, in the order of model.parameters(), then of ``also``. Parameters without a
    gradient are left out; they must be the same on all ranks. With gradient accumulation, call it after the last
    backward.

    Args:
        model: any module with layers of `fusedcomm.nn`.
        also: other parameters, whose gradients are summed over ``group``.
        group: that of ``also``: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for
            WORLD.

    Raises:
        ValueError: a parameter in ``also`` belongs to a layer for which its gradient is complete.

    Example, on each of 2 ranks::

        layer = fusedcomm.nn.UlyssesOut(num_heads=4, head_dim=2, out_features=8)
        layer(torch.ones(2, 6, 2, 2)).sum().backward()
        fusedcomm.nn.sum_replicated_gradients(layer)
        assert (layer.bias.grad == 12).all()  # 2 x 6 tokens, half of them on each rank
    """
    works = []
    for parameter, group_name in _partial(model, list(also), group).items():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.contiguous()
            works.append(dist.all_reduce(parameter.grad, group=find(group_name), async_op=True))
    for work in works:
        if work is not None:
            work.wait()


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
    return partial | {parameter: group_name for parameter in also if parameter not in partial}
