"""Tensor parallelism: each rank holds a block of the features between a column-parallel and a row-parallel layer::

    y = row(act(column(x)))

With ``sequence_dim`` (sequence parallelism) x and y are a rank's block of the tokens, [batch, tokens / R, features],
and the model's loss is the sum over ranks; without it x, y and the loss are the same on all ranks. x and y are plain
tensors. Parameters are DTensors, as those of `fusedcomm.parallel`, so that FSDP2, checkpoints, clipping and optimizers
see the whole layer.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from fusedcomm.nn.parallel_linear import ParallelLinear, as_linear, cut
from fusedcomm.nn.token_splits import Tokens, gathered, scattered
from fusedcomm.ops.all_gather_matmul import all_gather_matmul
from fusedcomm.ops.arguments import check_int
from fusedcomm.ops.matmul_all_reduce import matmul_all_reduce
from fusedcomm.ops.matmul_reduce_scatter import matmul_reduce_scatter
from fusedcomm.parallel.layouts import bias_of_part, shards
from fusedcomm.parallel.linear_of_replicated import linears_of_replicated
from fusedcomm.parallel.meshes import mesh_of
from fusedcomm.parallel.unwritten import unwritten
from fusedcomm.runtime.group import Group


class _TensorParallelLinear(ParallelLinear):
    """What the two layers have in common."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        sequence_dim: int | None = None,
        group: Group = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, group, device, dtype)
        if sequence_dim is not None:
            check_int("sequence_dim", sequence_dim)
        self.sequence_dim = sequence_dim

    def _check_dims(self, x: Tensor, tokens: Tokens) -> None:
        dim = self.sequence_dim
        if dim is None and tokens is not None:
            raise ValueError(f"tokens must be None without sequence_dim, got {tokens}")
        if dim is not None and (dim == -1 or not -x.ndim <= dim < x.ndim - 1):
            raise ValueError(f"sequence_dim must be a dim of x, and not its last, got {dim} and {x.ndim} dims")

    def _held(self, name: str, whole: Tensor, group: Group) -> Tensor:
        placement = Shard(self.shard_dims[name]) if name in self.shard_dims else Replicate()
        return cut(whole, mesh_of(group, whole.device), [placement])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, sequence_dim={self.sequence_dim}"


class ColumnParallelLinear(_TensorParallelLinear):
    """Replace an nn.Linear by R that each make a block of its output features. With and without ``sequence_dim`` it
    equals::

        return F.linear(all_gather(x, sequence_dim), weight, bias)  # one all_gather_matmul
        return F.linear(x, weight, bias)                            # its backward all-reduces the gradient of x

    Args:
        in_features: as in nn.Linear.
        out_features: as in nn.Linear; R must divide it.
        bias: whether there is one.
        sequence_dim: the dim of x along which its tokens are sharded, never the last one; negative ones count from the
            end. None: all ranks pass the same x.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        device: that of the parameters, as in nn.Linear; a given DeviceMesh has its own.
        dtype: that of the parameters, as in nn.Linear; the ops take float32, float16, bfloat16 and, unfused, float64.

    Attributes:
        weight: a DTensor [out_features, in_features], placed as Shard(0); its gradient is complete.
        bias: a DTensor [out_features], placed as Shard(0), or None; its gradient is complete.
        save_gathered: True; set to False, the backward gathers x again and nothing that the forward received is kept.

    Raises:
        ValueError: R does not divide out_features, or group is no initialised group that contains this rank.

    Example, on each of 2 ranks::

        layer = fusedcomm.nn.ColumnParallelLinear(8, 6, sequence_dim=1)
        assert layer.weight.shape == (6, 8) and layer.weight.to_local().shape == (3, 8)
        assert layer(torch.ones(2, 4, 8)).shape == (2, 8, 3)  # [batch, tokens / R, 8] -> [batch, tokens, 6 / R]
    """

    shard_dims: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0}
    save_gathered: bool = True

    @classmethod
    def from_linear(
        cls, linear: nn.Module, *, sequence_dim: int | None = None, group: Group = None
    ) -> ColumnParallelLinear:
        """Make the layer with a copy of this rank's shards of an nn.Linear's parameters.

        Args:
            linear: the nn.Linear, whose parameters must be alike on all ranks.
            sequence_dim: as in the constructor.
            group: as in the constructor.

        Raises:
            TypeError: linear is no plain nn.Linear: it has hooks, a forward of its own, or more than weight and bias.
            ValueError: R does not divide its out_features.
        """
        return _from_linear(cls, linear, sequence_dim, group)

    def forward(self, x: Tensor, tokens: Tokens = None) -> Tensor:
        """Return [batch, tokens, out_features / R] for x [batch, tokens / R, in_features].

        Without ``sequence_dim`` return [..., out_features / R] for x [..., in_features].

        Args:
            x: this rank's tokens, or all of them.
            tokens: with ``sequence_dim`` how many there are on all ranks, or how many each has, as `UlyssesQKV` takes
                them. None: all have as many.

        Raises ValueError for an x of another shape, and the errors of `all_gather_matmul`.
        """
        self._check_features(x, sharded=False)
        self._check_dims(x, tokens)
        group = self._group()
        weight, bias = shards(self)
        if self.sequence_dim is not None:
            keep, given = self.save_gathered, gathered(tokens, x.shape[self.sequence_dim], self.group_size, group)
            y = all_gather_matmul(x, weight.mT, self.sequence_dim, group, bias=bias, save_gathered=keep, **given)
        else:
            y = linears_of_replicated("nn.ColumnParallelLinear", x, [weight], [bias], group)[0]
        return unwritten(y, x, self.weight)


class RowParallelLinear(_TensorParallelLinear):
    """Replace an nn.Linear by R that each take a block of its input features. With and without ``sequence_dim`` it
    equals::

        return reduce_scatter(x @ weight.mT, "sum", sequence_dim) + bias  # one matmul_reduce_scatter
        return all_reduce(x @ weight.mT, "sum") + bias                    # one matmul_all_reduce

    Args:
        in_features: as in nn.Linear; R must divide it.
        out_features: as in nn.Linear.
        bias: whether there is one.
        sequence_dim: the dim of the result along which its tokens are sharded, never the last one; negative ones count
            from the end. None: all ranks get the whole result.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        device: that of the parameters, as in nn.Linear; a given DeviceMesh has its own.
        dtype: that of the parameters, as in nn.Linear; the ops take float32, float16, bfloat16 and, unfused, float64.

    Attributes:
        weight: a DTensor [out_features, in_features], placed as Shard(1); its gradient is complete.
        bias: a DTensor [out_features], placed as Replicate(), or None; its gradient is complete.

    Raises:
        ValueError: R does not divide in_features, or group is no initialised group that contains this rank.

    Example, on each of 2 ranks::

        layer = fusedcomm.nn.RowParallelLinear(6, 8, sequence_dim=1)
        assert layer.weight.shape == (8, 6) and layer.weight.to_local().shape == (8, 3)
        assert layer(torch.ones(2, 4, 3)).shape == (2, 2, 8)  # [batch, tokens, 6 / R] -> [batch, tokens / R, 8]
    """

    shard_dims: ClassVar[dict[str, int]] = {"weight": 1}

    @classmethod
    def from_linear(
        cls, linear: nn.Module, *, sequence_dim: int | None = None, group: Group = None
    ) -> RowParallelLinear:
        """Make the layer with a copy of this rank's shard of an nn.Linear's weight, and of its bias.

        Args:
            linear: the nn.Linear, whose parameters must be alike on all ranks.
            sequence_dim: as in the constructor.
            group: as in the constructor.

        Raises:
            TypeError: linear is no plain nn.Linear: it has hooks, a forward of its own, or more than weight and bias.
            ValueError: R does not divide its in_features.
        """
        return _from_linear(cls, linear, sequence_dim, group)

    def forward(self, x: Tensor, tokens: Tokens = None) -> Tensor:
        """Return [batch, tokens / R, out_features] for x [batch, tokens, in_features / R].

        Without ``sequence_dim`` return [..., out_features] for x [..., in_features / R].

        Args:
            x: all tokens.
            tokens: with ``sequence_dim`` how many there are, or how many each rank gets, as `UlyssesOut` takes them.
                None: all get as many.

        Raises ValueError for an x of another shape or a number of tokens that R does not divide, and the errors of
        `matmul_reduce_scatter` or `matmul_all_reduce`.
        """
        self._check_features(x, sharded=True)
        self._check_dims(x, tokens)
        group = self._group()
        weight, bias = shards(self)
        if self.sequence_dim is not None:
            size = x.shape[self.sequence_dim]
            if tokens is None:
                self._check_divisible("x's size at sequence_dim", size)
            given = scattered(tokens, size, self.group_size)
            y = matmul_reduce_scatter(x, weight.mT, self.sequence_dim, group, bias=bias_of_part(self.bias), **given)
        else:
            y = matmul_all_reduce(x, weight.mT, group, bias=bias)
        return unwritten(y, x, self.weight)


def _from_linear(cls: Any, linear: nn.Module, sequence_dim: int | None, group: Group) -> Any:
    linear = as_linear(linear)
    sizes = (linear.in_features, linear.out_features, linear.bias is not None)
    module = cls(*sizes, sequence_dim=sequence_dim, group=group, device="meta", dtype=linear.weight.dtype)
    module._take(linear, group)
    return module
