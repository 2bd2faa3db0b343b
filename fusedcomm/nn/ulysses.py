"""Ulysses sequence parallelism: outside attention a rank holds a block of the tokens, inside it a block of the heads::

    q, k, v = qkv(x)                # [batch, tokens / R, hidden] -> three of [batch, tokens, heads / R, head_dim]
    y = out(attention(q, k, v))     # [batch, tokens, heads / R, head_dim] -> [batch, tokens / R, hidden]

R need not divide tokens, as `fusedcomm.nn.shard_tokens` cuts them, nor heads. Blocks of q's heads are balanced: their
sizes differ by at most 1, where torch.chunk would leave ranks without any. With grouped queries num_heads /
num_kv_heads heads of q, a group, read one head of k and v; several ranks may get the same head of k and v.
Both layers replicate their parameters. A rank's gradients of them come from its own tokens alone:
`fusedcomm.nn.sum_replicated_gradients` adds them up after the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusedcomm.memory.group import Group, rank_of
from fusedcomm.nn.tokens import Tokens, gathered, scattered
from fusedcomm.nn.ulysses_linear import UlyssesLinear, as_linear
from fusedcomm.ops.all_to_all_matmul import all_to_all_matmul
from fusedcomm.ops.arguments import check_tensor
from fusedcomm.ops.matmul_all_to_all import matmul_all_to_all


class UlyssesQKV(UlyssesLinear):
    """Replace the nn.Linear that makes q, k and v, packed as ``[q | k | v]``, and the view into heads. It equals::

        y = F.linear(x, weight, bias)                         # [batch, tokens / R, (num_heads + 2 * num_kv_heads) * D]
        q, k, v = y.split([num_heads * D, num_kv_heads * D, num_kv_heads * D], -1)            # D = head_dim
        return [exchange(t.unflatten(-1, (-1, D)), gather_dim=1, scatter_dim=-2) for t in (q, k, v)]

    in one `matmul_all_to_all`, or in two where num_kv_heads differs from num_heads: q, and k with v.

    A rank has num_heads / R heads of q, rounded up on the first num_heads % R ranks and down on the others, and the
    heads of k and v that these read, whether or not other ranks read them too. Head i of a rank's n of q reads head
    i // (n / m) of its m of k and v, as ``scaled_dot_product_attention(enable_gqa=True)`` has it. Where readers are
    uneven (20 heads and 4 on 8 ranks: of the second rank's 3 two read one head, and one the next), heads of k and v
    are repeated after the exchange, one for each of q.

    Args:
        in_features: the size of x's last dim.
        num_heads: how many heads q has. If there are fewer than ranks, the last ranks have none.
        head_dim: the features of a head.
        num_kv_heads: how many heads k and v each have; num_heads must be a multiple of it. None: as many as q has.
        bias: whether there is one.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        device: of the parameters, as in nn.Linear.
        dtype: of the parameters, as in nn.Linear; the ops take float32, float16, bfloat16 and, unfused, float64.

    Attributes:
        weight: the replicated [(num_heads + 2 * num_kv_heads) * head_dim, in_features]; its gradient is of this rank's
            tokens.
        bias: the replicated [(num_heads + 2 * num_kv_heads) * head_dim], or None; its gradient likewise.
        head_splits: how many heads of q each rank has.

    Raises:
        ValueError: a number of heads is less than 1 or not divisible as said here, or group is no initialised group
            that contains this rank.

    Example, on each of 2 ranks::

        layer = fusedcomm.nn.UlyssesQKV(8, num_heads=4, head_dim=2, num_kv_heads=2)
        q, k, v = layer(torch.ones(2, 3, 8))  # [batch, tokens / R, 8]
        assert q.shape == (2, 6, 2, 2) and k.shape == v.shape == (2, 6, 1, 2)  # [batch, tokens, heads / R, head_dim]
    """

    head_splits: list[int]

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        bias: bool = True,
        *,
        group: Group = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check_heads(num_heads, num_kv_heads)
        super().__init__(in_features, (num_heads + 2 * num_kv_heads) * head_dim, bias, group, device, dtype)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.head_splits = head_splits(num_heads, self.group_size)

    @classmethod
    def from_linear(
        cls, linear: nn.Module, num_heads: int, num_kv_heads: int | None = None, *, group: Group = None
    ) -> UlyssesQKV:
        """Make the layer with a copy of an nn.Linear's parameters.

        Args:
            linear: the nn.Linear; its parameters must be alike on all ranks.
            num_heads: as in the constructor.
            num_kv_heads: as in the constructor; head_dim follows from linear's out_features.
            group: as in the constructor.

        Raises:
            TypeError: linear is no plain nn.Linear: it has hooks, a forward of its own, or more than weight and bias.
            ValueError: its out_features is no multiple of num_heads + 2 * num_kv_heads.
        """
        linear = as_linear(linear)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check_heads(num_heads, num_kv_heads)
        count = num_heads + 2 * num_kv_heads
        head_dim = _head_dim("out_features", linear.out_features, count, "num_heads + 2 * num_kv_heads")
        bias, dtype = linear.bias is not None, linear.weight.dtype
        heads = num_heads, head_dim, num_kv_heads
        module = cls(linear.in_features, *heads, bias, group=group, device="meta", dtype=dtype)
        module._take(linear)
        return module

    def forward(self, x: Tensor, tokens: Tokens = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, each [batch, tokens, heads / R, head_dim], for x [batch, tokens / R, in_features].

        All three are views of one tensor if num_kv_heads is num_heads, else k and v are views of one, and q is a tensor
        of its own. There may be any number of batch dims.

        Args:
            x: this rank's tokens.
            tokens: their number on all ranks, cut as by torch.chunk and `shard_tokens`; or a sequence with the number
                on each rank. None: equal on all ranks.

        Raises the errors of `matmul_all_to_all`.
        """
        check_tensor("x", x)
        if x.ndim < 2 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"x must be [..., in_features = {self.in_features}] with at least 2 dims, got shape {tuple(x.shape)}"
            )
        group = self._group()
        given = gathered(tokens, x.shape[-2], self.group_size, group)
        if self.num_kv_heads == self.num_heads:
            columns = [3, self.num_heads, self.head_dim]
            given |= _scattered_heads(self.num_heads, self.head_splits)
            qkv = matmul_all_to_all(x, self.weight.mT, -4, -2, group, bias=self.bias, out_shape=columns, **given)
            q, k, v = qkv.unbind(-3)
            return q, k, v
        sizes = [self.num_heads * self.head_dim, 2 * self.num_kv_heads * self.head_dim]
        w_q, w_kv = self.weight.split(sizes)
        bias_q, bias_kv = (None, None) if self.bias is None else self.bias.split(sizes)
        columns = [self.num_heads, self.head_dim]
        heads = _scattered_heads(self.num_heads, self.head_splits)
        q = matmul_all_to_all(x, w_q.mT, -3, -2, group, bias=bias_q, out_shape=columns, **given, **heads)
        columns = [2, self.num_kv_heads, self.head_dim]
        heads = {}
        if self.num_kv_heads % self.group_size:
            heads["scatter_ranges"] = kv_ranges(self.num_heads, self.num_kv_heads, self.group_size)
        kv = matmul_all_to_all(x, w_kv.mT, -4, -2, group, bias=bias_kv, out_shape=columns, **given, **heads)
        k, v = self._repeated(kv, rank_of(group)).unbind(-3)
        return q, k, v

    def _repeated(self, kv: Tensor, rank: int) -> Tensor:
        """Repeat kv's heads [..., heads, head_dim], one for each of q's, unless all are read by equally many of q's.

        The backward adds up a rank's repeats in float32 and rounds the sum to x's dtype for the exchange.
        """
        counts = repeats(self.num_heads, self.num_kv_heads, self.group_size, rank)
        if counts is None:
            return kv
        heads = zip(kv.split(1, -2), counts, strict=True)
        return torch.cat([head.expand(*kv.shape[:-2], count, self.head_dim) for head, count in heads], -2)

    def extra_repr(self) -> str:
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        return f"{super().extra_repr()}, {heads}"


class UlyssesOut(UlyssesLinear):
    """Replace the nn.Linear behind attention, and the view that joins the heads. It equals::

        heads = exchange(x, gather_dim=-2, scatter_dim=1)  # [batch, tokens / R, num_heads, head_dim]
        return F.linear(heads.flatten(-2), weight, bias)

    in one `all_to_all_matmul`.

    Args:
        num_heads: the number of heads of the attention; a rank has the heads that `UlyssesQKV` returns.
        head_dim: the features of a head.
        out_features: the size of the result's last dim.
        bias: whether there is one.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        device: of the parameters, as in nn.Linear.
        dtype: of the parameters, as in nn.Linear; the ops take float32, float16, bfloat16 and, unfused, float64.

    Attributes:
        weight: the replicated [out_features, num_heads * head_dim]; its gradient is of this rank's tokens.
        bias: the replicated [out_features], or None; its gradient likewise.
        save_exchanged: True; set to False, the backward exchanges x again and nothing that the forward received is
            kept.
        head_splits: how many heads each rank has.

    Raises:
        ValueError: num_heads is less than 1, or group is no initialised group that contains this rank.

    Example, on each of 2 ranks::

        layer = fusedcomm.nn.UlyssesOut(num_heads=4, head_dim=2, out_features=8)
        y = layer(torch.ones(2, 6, 2, 2))  # [batch, tokens, heads / R, head_dim]
        assert y.shape == (2, 3, 8)  # [batch, tokens / R, out_features]
    """

    save_exchanged: bool = True
    head_splits: list[int]

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_heads(num_heads, num_heads)
        super().__init__(num_heads * head_dim, out_features, bias, group, device, dtype)
        self.num_heads, self.head_dim = num_heads, head_dim
        self.head_splits = head_splits(num_heads, self.group_size)

    @classmethod
    def from_linear(cls, linear: nn.Module, num_heads: int, *, group: Group = None) -> UlyssesOut:
        """Make the layer with a copy of an nn.Linear's parameters.

        Args:
            linear: the nn.Linear; its parameters must be alike on all ranks.
            num_heads: as in the constructor; head_dim follows from linear's in_features.
            group: as in the constructor.

        Raises:
            TypeError: linear is no plain nn.Linear: it has hooks, a forward of its own, or more than weight and bias.
            ValueError: its in_features is no multiple of num_heads.
        """
        linear = as_linear(linear)
        _check_heads(num_heads, num_heads)
        head_dim = _head_dim("in_features", linear.in_features, num_heads, "num_heads")
        bias, dtype = linear.bias is not None, linear.weight.dtype
        module = cls(num_heads, head_dim, linear.out_features, bias, group=group, device="meta", dtype=dtype)
        module._take(linear)
        return module

    def forward(self, x: Tensor, tokens: Tokens = None) -> Tensor:
        """Return [batch, tokens / R, out_features] for x [batch, tokens, heads / R, head_dim].

        There may be any number of batch dims.

        Args:
            x: this rank's heads of all tokens.
            tokens: a sequence with the number of each rank; None, or their total: cut as by torch.chunk.

        Raises ValueError for an x of another shape, and the errors of `all_to_all_matmul`.
        """
        check_tensor("x", x)
        group = self._group()
        columns = [self.head_splits[rank_of(group)], self.head_dim]
        if x.ndim < 3 or list(x.shape[-2:]) != columns:
            raise ValueError(
                f"x must end in [tokens, num_heads / R = {self.num_heads} / {self.group_size} = {columns[0]}, "
                f"head_dim = {self.head_dim}], got shape {tuple(x.shape)}"
            )
        w, keep = self.weight.mT, self.save_exchanged
        given = scattered(tokens, x.shape[-3], self.group_size)
        if self.num_heads % self.group_size:
            given["gather_splits"] = self.head_splits
        y = all_to_all_matmul(x, w, -2, -3, group, bias=self.bias, save_exchanged=keep, **given)
        return y.flatten(-3, -2) if y.ndim == x.ndim else y  # a single head makes up K alone: the op took it for rows

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_heads={self.num_heads}, head_dim={self.head_dim}"


def head_splits(num_heads: int, group_size: int) -> list[int]:
    """How many heads of q each rank has, the larger blocks first."""
    least, more = divmod(num_heads, group_size)
    return [least + (rank < more) for rank in range(group_size)]


def readers(num_heads: int, num_kv_heads: int, group_size: int) -> list[tuple[int, list[int]]]:
    """For each rank the first head of k and v that its heads of q read, and how many of them read it and the next."""
    found, start, group = [], 0, num_heads // num_kv_heads
    for size in head_splits(num_heads, group_size):
        end = start + size
        read = range(start // group, -(-end // group)) if size else range(0)
        found.append((read.start, [min(end, (head + 1) * group) - max(start, head * group) for head in read]))
        start = end
    return found


def kv_ranges(num_heads: int, num_kv_heads: int, group_size: int) -> list[tuple[int, int]]:
    """The (start, length) of the heads of k and v that each rank gets."""
    return [(start, len(counts)) for start, counts in readers(num_heads, num_kv_heads, group_size)]


def repeats(num_heads: int, num_kv_heads: int, group_size: int, rank: int) -> list[int] | None:
    """How often the rank needs each of its heads of k and v, so that each head of q has one of its own.

    None where all are read by as many: attention takes such groups as they are.
    """
    _, counts = readers(num_heads, num_kv_heads, group_size)[rank]
    return counts if len({*counts}) > 1 else None


def _check_heads(num_heads: int, num_kv_heads: int) -> None:
    for name, count in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads must be a multiple of num_kv_heads={num_kv_heads}, got {num_heads}")


def _head_dim(name: str, size: int, count: int, what: str) -> int:
    if size % count:
        raise ValueError(f"{name} must be a multiple of {what} = {count}, got {size}")
    return size // count


def _scattered_heads(num_heads: int, splits: Sequence[int]) -> dict[str, Any]:
    return {} if num_heads % len(splits) == 0 else {"scatter_splits": splits}
