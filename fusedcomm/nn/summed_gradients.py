"""The sum over ranks of gradients that some of them may lack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fusedcomm.runtime import group
from fusedcomm.runtime.vote import agree


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


def sum_gradients(parameters: Sequence[nn.Parameter], names: Sequence[str], pg: ProcessGroup) -> None:
    """Give each parameter the sum of its gradients, and none where no rank has one.

    The ranks first exchange what they have, and raise ValueError on all of them where that does not belong together.
    """
    grads = [_gradient(parameter) for parameter in parameters]
    mine = [_fact(*each) for each in zip(names, parameters, grads, strict=True)]
    what = "sum_replicated_gradients"
    posts = agree(group.store(pg, what), pg.rank(), pg.size(), {"gradients": mine}, what=what)
    ranks = [[_Fact.of(each) for each in post["gradients"]] for post in posts]
    _check_same(ranks)
    summed = []
    for parameter, grad, facts in zip(parameters, grads, zip(*ranks, strict=True), strict=True):
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
