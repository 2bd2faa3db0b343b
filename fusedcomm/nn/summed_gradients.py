"""The sum over ranks of gradients that some of them may lack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fusedcomm.memory import group
from fusedcomm.memory.vote import agree


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


def vote(
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
    posts = agree(group.store(pg, what), pg.rank(), pg.size(), post, what=what)
    if wrong is not None:
        raise wrong
    for rank, each in enumerate(posts):
        if each["error"]:
            raise ValueError(f"{each['error']} (rank {rank} of the group)")
    ranks = [[_Fact.of(fact) for fact in each["gradients"]] for each in posts]
    _check_same(ranks)
    return ranks


def sum_gradients(parameters: Sequence[nn.Parameter], ranks: list[list[_Fact]], pg: ProcessGroup) -> None:
    """Give each parameter the sum of its gradients, and none where no rank has one. ``ranks``: the result of `vote`."""
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
