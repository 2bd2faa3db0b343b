"""The whole state dict of a parallel model, and the sum of partial gradients."""

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fusedcomm.memory.group import Group, find, resolve
from fusedcomm.nn.summed_gradients import sum_gradients, vote
from fusedcomm.nn.ulysses_linear import UlyssesLinear, whole
from fusedcomm.parallel.plain_modules import PARAMETERS


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return ``model.state_dict()``, with the whole plain tensor in place of each DTensor, as the plain model has them.

    It is a collective, DTensor after DTensor: every rank calls it, with the same model. Other values alias the model's
    memory, as in ``state_dict()``.

    Args:
        model: any module, with layers of `fusedcomm.nn`, of torch's or this package's tensor parallel styles, of FSDP2.

    Returns:
        The same dict on every rank, on the parameters' device.

    Example, on each of 2 ranks::

        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        model = torch.nn.Sequential(torch.nn.Linear(8, 6))
        fusedcomm.parallel.parallelize_module(model, mesh, {"0": fusedcomm.parallel.ColwiseParallel()})
        assert fusedcomm.nn.full_state_dict(model)["0.weight"].shape == (6, 8)
    """
    state = model.state_dict()
    for name, value in state.items():
        if isinstance(value, DTensor):
            state[name] = whole(value)
    return state


def sum_replicated_gradients(model: nn.Module, *, also: Iterable[nn.Parameter] = (), group: Group = None) -> None:
    """Add up, over each layer's group, the gradients that are only this rank's part. Call it once after the backward.

    A replicated parameter that acts on a rank's tokens alone, as in `UlyssesQKV` and `UlyssesOut`, has a gradient of
    these tokens alone. Name a model's other plain parameters with such gradients, for instance of norms, in ``also``.
    DTensors, as the styles of `fusedcomm.parallel` make them, do not need it, nor do gradients that a wrapper reduces
    over the same ranks already, as DistributedDataParallel and FSDP2 do; their average is 1 / R of this sum. Under
    FSDP2 over other ranks it adds up this rank's shards of the gradients.

    Every parameter below such a layer counts as its own, also the parameters of parametrizations, pruning and adapters.

    It is a collective per parameter, in the order of model.parameters(), then of ``also``, after a small one that
    exchanges which gradients the ranks have. A missing gradient counts as zeros, and its rank gets the sum; where
    no rank has one it stays None. Sparse gradients stay sparse if all existing ones are sparse. With gradient
    accumulation, call it after the last backward.

    Args:
        model: any module with layers of `fusedcomm.nn`.
        also: other parameters to sum over ``group``: the same on all ranks, in one order.
        group: the group of ``also``: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None
            for WORLD.

    Raises:
        ValueError: on every rank, if on one a parameter is a DTensor on a mesh with other ranks of the group: its
            gradient is reduced already; or if ranks name other parameters, or their gradients have other dtypes.
        TypeError: on such a rank, and ValueError on the others, if the weight of a layer is made of parameters outside
            of it, or ``also`` names something else.

    Example, on each of 2 ranks::

        layer = fusedcomm.nn.UlyssesOut(num_heads=4, head_dim=2, out_features=8)
        layer(torch.ones(2, 6, 2, 2)).sum().backward()
        fusedcomm.nn.sum_replicated_gradients(layer)
        assert (layer.bias.grad == 12).all()  # 2 x 6 tokens, half of them on each rank
    """
    also, wrong = list(also), None
    names = {each: name.replace("_orig_mod.", "") for name, each in model.named_parameters()}  # one rank may compile
    groups: dict[str, list[nn.Parameter]] = {name: [] for name in _groups(model, also, group)}
    try:
        for parameter, group_name in _partial(model, also, group).items():
            _check_not_reduced(names.get(parameter, "a parameter in also"), parameter, group_name)
            groups[group_name].append(parameter)
    except (TypeError, ValueError) as error:
        wrong = error
    votes = {}
    for group_name, parameters in groups.items():
        try:
            votes[group_name] = vote(parameters, [names.get(each, "") for each in parameters], find(group_name), wrong)
        except (TypeError, ValueError) as error:
            wrong = error  # which the ranks of the other groups must hear
    if wrong is not None:
        raise wrong
    for group_name, parameters in groups.items():
        sum_gradients(parameters, votes[group_name], find(group_name))


def _groups(model: nn.Module, also: list[nn.Parameter], group: Group) -> list[str]:
    """The groups to sum over, in the same order on all ranks."""
    layers = [each for each in model.modules() if isinstance(each, UlyssesLinear)]
    return [*(each._group() for each in layers), *([resolve(group)[1]] if also else [])]


def _partial(model: nn.Module, also: list[nn.Parameter], group: Group) -> dict[nn.Parameter, str]:
    """Each parameter once, with its group's name."""
    partial: dict[nn.Parameter, str] = {}
    for path, module in model.named_modules():  # a layer inside another one comes after it
        if isinstance(module, UlyssesLinear):
            partial |= dict.fromkeys(module.parameters(), module._group())
            _check_made_of(path, module, [*partial, *also])
    group_name = resolve(group)[1] if also else ""
    return partial | {parameter: group_name for parameter in also if parameter not in partial}


def _check_made_of(path: str, layer: UlyssesLinear, known: list[nn.Parameter]) -> None:
    """A weight that is no parameter, as pruning, FSDP1 and users set one, must be made of ``known`` ones."""
    for name in PARAMETERS:
        value = vars(layer).get(name)
        if isinstance(value, Tensor) and {*map(id, _leaves(value))} - {*map(id, known)}:
            raise TypeError(
                f"{path}.{name} must be made of parameters of its {type(layer).__name__}, or of ones named in also"
            )


def _leaves(t: Tensor) -> list[Tensor]:
    """The tensors that get a gradient through t."""
    if t.grad_fn is None:
        return [t] if t.requires_grad else []
    seen: dict[Any, None] = {t.grad_fn: None}
    nodes = [t.grad_fn]
    for node in nodes:  # it grows
        found = [each for each, _ in node.next_functions if each is not None and each not in seen]
        seen.update(dict.fromkeys(found))
        nodes += dict.fromkeys(found)
    return [node.variable for node in nodes if hasattr(node, "variable")]


def _check_not_reduced(name: str, parameter: nn.Parameter, group_name: str) -> None:
    if not isinstance(parameter, DTensor):
        return
    ranks = {*dist.get_process_group_ranks(find(group_name))} & {*parameter.device_mesh.mesh.flatten().tolist()}
    if len(ranks) > 1:
        raise ValueError(
            f"the gradient of {name} must not have been reduced over the group, got a DTensor on a mesh with its ranks "
            f"{sorted(ranks)}"
        )
