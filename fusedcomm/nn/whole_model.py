"""The whole state dict of a parallel model, and the sum of partial gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fusedcomm.memory.group import Group, find, resolve, store
from fusedcomm.memory.vote import agree
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
            votes[group_name] = _vote(parameters, [names.get(each, "") for each in parameters], find(group_name), wrong)
        except (TypeError, ValueError) as error:
            wrong = error  # which the ranks of the other groups must hear
    if wrong is not None:
        raise wrong
    for group_name, parameters in groups.items():
        _sum_gradients(parameters, votes[group_name], find(group_name))


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


class _Fact(NamedTuple):
    """A parameter and its gradient on one rank."""

    name: str
    shape: tuple[int, ...]
    kind: tuple[str, str] | None  # the gradient's dtype and type of device; None without a gradient
    sparse: tuple[int, int] | None  # sparse dims and entries of a gradient that is not dense

    @staticmethod
    def of(post: list[Any]) -> _Fact:
        name, shape, kind, sparse = post
        return _Fact(name, tuple(shape), kind and tuple(kind), sparse and tuple(sparse))


def _vote(
    parameters: Sequence[nn.Parameter], names: Sequence[str], pg: ProcessGroup, wrong: Exception | None
) -> list[list[_Fact]]:
    """Every rank's gradients, by rank. Raises on all ranks where these do not belong together or a rank is ``wrong``:
    its own error on that, ValueError on the others.
    """
    mine: list[_Fact] = []
    try:
        mine = [_fact(name, each, _gradient(each)) for name, each in zip(names, parameters, strict=True)]
    except (AttributeError, TypeError) as error:
        wrong = wrong or TypeError(f"also must name parameters: {error}")
    what = "sum_replicated_gradients"
    post = {"gradients": mine, "error": "" if wrong is None else str(wrong)[:512]}
    posts = agree(store(pg, what), pg.rank(), pg.size(), post, what=what)
    if wrong is not None:
        raise wrong
    for rank, each in enumerate(posts):
        if each["error"]:
            raise ValueError(f"{each['error']} (rank {rank} of the group)")
    ranks = [[_Fact.of(fact) for fact in each["gradients"]] for each in posts]
    _check_same(ranks)
    return ranks


def _sum_gradients(parameters: Sequence[nn.Parameter], ranks: list[list[_Fact]], pg: ProcessGroup) -> None:
    """Give each parameter the sum of its gradients, and none where no rank has one. ``ranks``: by `_vote`."""
    summed = []
    for parameter, facts in zip(parameters, zip(*ranks, strict=True), strict=True):
        grad = _gradient(parameter)
        with_one = [fact for fact in facts if fact.kind is not None]
        if not with_one:
            continue
        dtype = getattr(torch, with_one[0].kind[0])
        sparse_dims = {fact.sparse and fact.sparse[0] for fact in with_one}
        if len(sparse_dims) == 1 and None not in sparse_dims:
            if grad is None:
                grad = parameter.new_zeros(parameter.shape, dtype=dtype).to_sparse(*sparse_dims).coalesce()
            entries = [fact.sparse[1] if fact.sparse else 0 for fact in facts]
            parameter.grad = _sum_of_sparse(grad, entries, pg)
            continue
        if grad is None or grad.layout != torch.strided:
            parameter.grad = torch.zeros_like(parameter, dtype=dtype) if grad is None else grad.to_dense()
            grad = _local(parameter.grad)
        part = grad.resolve_conj().resolve_neg().contiguous()
        summed.append((grad, part, dist.all_reduce(part, group=pg, async_op=True)))
    for grad, part, work in summed:
        if work is not None:
            work.wait()
        if part is not grad:
            grad.copy_(part)


def _local(t: Tensor) -> Tensor:
    t = t.detach()
    return t.to_local() if isinstance(t, DTensor) else t


def _gradient(parameter: nn.Parameter) -> Tensor | None:
    if parameter.grad is None:
        return None
    grad = _local(parameter.grad)
    return grad.coalesce() if grad.layout == torch.sparse_coo else grad


def _fact(name: str, parameter: nn.Parameter, grad: Tensor | None) -> _Fact:
    kind = None if grad is None else (str(grad.dtype).removeprefix("torch."), grad.device.type)
    sparse = (grad.sparse_dim(), grad._nnz()) if grad is not None and grad.layout == torch.sparse_coo else None
    return _Fact(name, tuple(_local(parameter).shape), kind, sparse)


def _check_same(ranks: Sequence[Sequence[_Fact]]) -> None:
    listed = [[(fact.name, fact.shape) for fact in facts] for facts in ranks]
    for rank, found in enumerate(listed):
        if found != listed[0]:
            ours, theirs = ([each for each in a if each not in b] for a, b in ((listed[0], found), (found, listed[0])))
            raise ValueError(
                "all ranks must name the same parameters with partial gradients, in one order, got "
                f"{len(listed[0])} on rank 0, {ours[:3]} among them, and {len(found)} on rank {rank}, {theirs[:3]}"
            )
    for facts in zip(*ranks, strict=True):
        kinds = {fact.kind: rank for rank, fact in enumerate(facts) if fact.kind is not None}
        if len(kinds) > 1:
            name = facts[0].name or "a parameter"
            raise ValueError(f"the gradients of {name} must be alike on all ranks, got {kinds}")


def _sum_of_sparse(grad: Tensor, entries: Sequence[int], pg: ProcessGroup) -> Tensor:
    """The sum of sparse tensors, which all ranks make of all ranks' entries, so that it is the same everywhere."""

    def gathered(t: Tensor) -> Tensor:
        padded = t.new_zeros(max(entries), *t.shape[1:])
        padded[: len(t)] = t
        parts = [torch.empty_like(padded) for _ in entries]
        dist.all_gather(parts, padded, group=pg)
        return torch.cat([part[:size] for part, size in zip(parts, entries, strict=True)])

    indices, values = gathered(grad.indices().mT.contiguous()), gathered(grad.values())
    entries_of = indices.mT, values, grad.shape
    return torch.sparse_coo_tensor(*entries_of, device=grad.device, check_invariants=False).coalesce()
