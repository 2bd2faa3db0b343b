"""Tokens cut between ranks as torch.chunk cuts them, and joined again: inputs, labels, positions, results; and the
``tokens`` argument of a layer, translated into split arguments of the ops.

`UlyssesQKV` takes such blocks, and is told the number of tokens. The last ranks may have none.
"""

import math
from collections.abc import Callable, Collection, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fusedcomm.memory.group import Group, rank_of, resolve
from fusedcomm.ops.arguments import check_tensor
from fusedcomm.ops.call_check import same_collective
from fusedcomm.plan.geometry.cut import Splits, chunk_parts, cut_of
from fusedcomm.run.reference import MOVED, all_gather, bytes_of
from fusedcomm.run.unfused import pads

Tokens = int | Sequence[int] | None


def shard_tokens(batch: Any, dim: Any = 1, group: Group = None) -> Any:
    """Return this rank's block of the tokens of each tensor. It equals ``t.chunk(R, dim)[rank]``, if that exists.

    Ranks behind the last chunk get blocks without tokens. Nothing is communicated.

    Args:
        batch: a tensor, or dicts, lists and tuples of tensors, alike on all ranks: inputs, labels, positions. Other
            leaves pass through.
        dim: the dim of tokens, negative ones counting from the end; or a dict, list or tuple shaped like batch, with a
            dim for each part, and None for parts that pass through, such as cu_seqlens of packed sequences.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.

    Returns:
        The structure of batch, with views in place of tensors.

    Raises:
        ValueError: ``dim`` is not shaped as batch is, or group is no initialised group that contains this rank.
        IndexError: a tensor has no such dim.

    Example, on each of 2 ranks::

        batch = {"ids": torch.arange(5), "cu_seqlens": torch.tensor([0, 2, 5])}  # two sequences
        mine = fusedcomm.nn.shard_tokens(batch, {"ids": 0, "cu_seqlens": None})
        assert mine["ids"].tolist() == [[0, 1, 2], [3, 4]][torch.distributed.get_rank()]
        assert mine["cu_seqlens"] is batch["cu_seqlens"]
    """
    group_size, group_name = resolve(group)
    rank = rank_of(group_name)

    def block(t: Tensor, dim: int) -> Tensor:
        parts = chunk_parts(t.shape[dim], group_size)
        return t.narrow(dim, parts.starts[rank], parts.sizes[rank])

    return _map(block, batch, dim)


def unshard_tokens(batch: Any, tokens: int | Sequence[int], dim: Any = 1, group: Group = None) -> Any:
    """Return all ranks' tokens of each tensor, in rank order, on every rank: the inverse of `shard_tokens`.

    The backward narrows this rank's own gradient to its block and communicates nothing. That is correct if all ranks
    compute the same from the result, as a loss that is not divided by R. For a loss split over ranks, shard the labels
    instead.

    Args:
        batch: a tensor, or dicts, lists and tuples of tensors. Other leaves pass through.
        tokens: how many there are on all ranks, or a sequence of how many each has.
        dim: as in `shard_tokens`.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.

    It is a collective per tensor.

    Raises:
        ValueError: a tensor has not as many tokens as tokens say, or the errors of `shard_tokens`.

    Example, on each of 2 ranks::

        x = torch.arange(5.0).unsqueeze(0)
        whole = fusedcomm.nn.unshard_tokens(fusedcomm.nn.shard_tokens(x), tokens=5)
        assert torch.equal(whole, x)
    """
    group_size, group_name = resolve(group)

    def joined(t: Tensor, dim: int) -> Tensor:
        check_tensor("a tensor of batch", t)
        sizes = [size for i, size in enumerate(t.shape) if i not in (dim, dim + t.ndim)]
        with same_collective("unshard_tokens", group_name, t, tokens=tokens, dim=dim, other_sizes=sizes):
            size = t.size(dim)  # raises IndexError
            parts = gathered(tokens, size, group_size, group_name, "a tensor of batch")
            given = Splits(**parts, rank=rank_of(group_name))
        return _Unsharded.apply(t, dim % t.ndim, given, group_size, group_name)  # type: ignore[no-any-return]

    return _map(joined, batch, dim)


def _map(make: Callable[[Tensor, int], Tensor], batch: Any, dim: Any) -> Any:
    def made(dim: int | None, part: Any) -> Any:
        return part if dim is None else pytree.tree_map_only(Tensor, lambda t: make(t, dim), part)

    return pytree.tree_map(made, dim, batch)


class _Unsharded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, dim: int, given: Splits, group_size: int, group_name: str) -> Tensor:
        sent = t if t.dtype in MOVED else bytes_of(t)
        cut = cut_of(given, sent.shape[dim], None, group_size)
        outer = math.prod([size for i, size in enumerate(sent.shape) if i != dim % sent.ndim])  # which Dynamo traces
        whole = all_gather(sent, dim, group_size, group_name, cut, pads("all_gather", cut, outer, sent))
        whole = whole if sent is t else whole.contiguous().view(t.dtype).squeeze(-1)
        if group_size == 1:  # else autograd takes t for its own view
            whole = whole.clone(memory_format=torch.contiguous_format)
        assert given.rank is not None
        starts = None if cut is None or cut.gathered is None else cut.gathered.starts  # None: equal blocks
        ctx.block = dim, given.rank * t.shape[dim] if starts is None else starts[given.rank], t.shape[dim]
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.narrow(*ctx.block), None, None, None, None


def gathered(tokens: Tokens, size: int, group_size: int, group_name: str, name: str = "x") -> dict[str, Any]:
    """The split arguments of an op that gathers tokens; this rank's tensor has ``size`` tokens."""
    given = _checked(tokens, group_size)
    if given is None:
        return {}
    is_count = not isinstance(given, list)
    if not torch.compiler.is_compiling():  # the op checks it, too, with names of its own
        rank = rank_of(group_name)
        expected = (chunk_parts(given, group_size).sizes if is_count else given)[rank]  # type: ignore[arg-type]
        if size != expected:
            raise ValueError(f"{name} must have what tokens={given} gives rank {rank}, {expected} tokens, got {size}")
    return {"gather_size" if is_count else "gather_splits": given}


def scattered(tokens: Tokens, size: int, group_size: int) -> dict[str, Any]:
    """The arguments of an op that scatters ``size`` tokens, by default as torch.chunk does."""
    given = _checked(tokens, group_size)
    if given is None:
        return {}
    if (sum(given) if isinstance(given, list) else given) != size:
        raise ValueError(f"x must have all tokens, as tokens={given} says, got {size}")
    return {"scatter_splits": given} if isinstance(given, list) else {}


def _checked(tokens: Any, group_size: int) -> Any:
    """None, an int, or a list of an int for each rank."""
    if tokens is None or isinstance(tokens, int | torch.SymInt):
        return tokens
    if isinstance(tokens, Integral):  # NumPy's
        return int(tokens)
    wrong = not isinstance(tokens, Collection) or isinstance(tokens, str | torch.Tensor)
    if wrong or not all(isinstance(each, int | torch.SymInt | Integral) for each in tokens):
        raise TypeError(f"tokens must be an int, one for each rank, or None, got {type(tokens).__name__}")
    if len(tokens) != group_size:
        raise ValueError(f"tokens must have one entry per rank, {group_size}, got {len(tokens)}")
    return [each if isinstance(each, torch.SymInt) else int(each) for each in tokens]
