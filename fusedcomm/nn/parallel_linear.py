"""What the layers share: the parameters of an nn.Linear, whole or this rank's shards, and their way in and out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fusedcomm import reference
from fusedcomm.ops.arguments import check_tensor
from fusedcomm.runtime.group import Group, find, resolve

_saves_whole: ContextVar[bool] = ContextVar("saves_whole", default=False)


@contextmanager
def saving_whole() -> Iterator[None]:
    """Inside, state_dict() gathers shards, so it is a collective."""
    token = _saves_whole.set(True)
    try:
        yield
    finally:
        _saves_whole.reset(token)


class ParallelLinear(nn.Module):
    """The base of the layers: an ``nn.Linear(in_features, out_features)`` whose parameters a group holds.

    A parameter is replicated, or sharded along one dim: rank r holds block r of R. Its name is nn.Linear's, and so are
    the initial values of the whole, if every rank has the same seed.

    * ``state_dict()`` holds what this rank has and never communicates. Save it per rank: its keys are the same on all
      ranks, its values are not. `fusedcomm.nn.full_state_dict` gives the whole.
    * ``load_state_dict`` takes that, or a plain nn.Linear's state dict, of which it takes this rank's shards.
    * Copies and pickles know the group by name and size; where there is no such group, ``forward`` raises ValueError.

    Args:
        in_features: the size of the whole input's last dim.
        out_features: the size of the whole result's last dim.
        bias: whether there is one.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        device: that of the parameters, as in nn.Linear.
        dtype: that of the parameters, as in nn.Linear; the ops take float32, float16, bfloat16 and, unfused, float64.

    Attributes:
        in_features: the size of the whole input's last dim.
        out_features: the size of the whole result's last dim.
        weight: this rank's part of [out_features, in_features].
        bias: this rank's part of [out_features], or None.
        shard_dims: by the name of a parameter, the dim along which it is sharded; what is not named is replicated.
        partial_gradients: the names of the replicated parameters whose gradient after a backward is this rank's part,
            not yet the sum over ranks; `sum_replicated_gradients` adds them up.
        group_size: R.
        group_name: the name of the group.
    """

    shard_dims: ClassVar[dict[str, int]] = {}  # parameter -> the dim along which it is sharded

    in_features: int
    out_features: int
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        group: Group,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.group_size, self.group_name = resolve(group)
        sharded = self.shard_dims.get("weight")
        if sharded is not None:
            self._check_divisible(("out_features", "in_features")[sharded], self._whole_shape("weight")[sharded])
        self._take(nn.Linear(in_features, out_features, bias, device, dtype))

    @property
    def partial_gradients(self) -> tuple[str, ...]:
        """The replicated parameters whose gradient after a backward is this rank's part, not yet the sum over ranks."""
        return ()

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as nn.Linear does, and keep this rank's part.

        It does not communicate, so every rank must have the same seed.
        """
        like = {"device": self.weight.device, "dtype": self.weight.dtype}
        whole = nn.Linear(self.in_features, self.out_features, self.bias is not None, **like)
        with torch.no_grad():
            for name, parameter in self.named_parameters(recurse=False):
                parameter.copy_(self._shard(name, getattr(whole, name)))

    def to_linear(self) -> nn.Linear:
        """Return a plain nn.Linear with a copy of the whole parameters.

        It is a collective where a parameter is sharded: every rank of the group calls it.
        """
        like = {"device": "meta", "dtype": self.weight.dtype}
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, **like)
        for name, parameter in self.named_parameters(recurse=False):
            setattr(linear, name, nn.Parameter(self._whole(name).clone(), parameter.requires_grad))
        return linear.train(self.training)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, group_size={self.group_size}"

    def _take(self, linear: nn.Linear) -> None:
        """Make the parameters this rank's part of ``linear``'s, on its device; the mode and requires_grad are kept."""
        for name in ("weight", "bias"):
            whole = getattr(linear, name)
            part = None if whole is None else nn.Parameter(self._shard(name, whole.detach()), whole.requires_grad)
            self.register_parameter(name, part)
        self.train(linear.training)

    def _group(self) -> str:
        """The name to call ops with. An unpickled module may find another group under it."""
        group_size, group_name = resolve(self.group_name)
        if group_size != self.group_size:
            raise ValueError(
                f"group {group_name!r} must have the size it had when this module was made, {self.group_size}, "
                f"got {group_size}"
            )
        return group_name

    def _check_divisible(self, name: str, size: int) -> None:
        if size % self.group_size:
            raise ValueError(f"{name} must be divisible by group_size={self.group_size}, got {size}")

    def _check_features(self, x: Tensor, *, sharded: bool) -> None:
        """``sharded``: whether x has this rank's block of in_features, not all of them."""
        check_tensor("x", x)
        size = self.in_features // self.group_size if sharded else self.in_features
        if x.ndim < 2 or x.shape[-1] != size:
            name = f"in_features / R = {self.in_features} / {self.group_size}" if sharded else "in_features"
            raise ValueError(f"x must be [..., {name} = {size}] with at least 2 dims, got shape {tuple(x.shape)}")

    def _whole_shape(self, name: str) -> list[int]:
        return [self.out_features, self.in_features] if name == "weight" else [self.out_features]

    def _shard(self, name: str, whole: Tensor) -> Tensor:
        """A copy of this rank's part."""
        if name in self.shard_dims:
            whole = whole.chunk(self.group_size, self.shard_dims[name])[find(self._group()).rank()]
        return whole.clone(memory_format=torch.contiguous_format)

    def _whole(self, name: str) -> Tensor:
        """The whole parameter; a collective where it is sharded."""
        shard = getattr(self, name).detach()
        if name not in self.shard_dims:
            return shard
        return reference.all_gather(shard, self.shard_dims[name], self.group_size, self._group())

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
        if _saves_whole.get():
            for name, _ in self.named_parameters(recurse=False):
                destination[prefix + name] = self._whole(name)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Entries of a whole parameter's shape are cut; others are load_state_dict's own matter."""
        shards = {}
        for name in self.shard_dims:
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and list(value.shape) == self._whole_shape(name):
                shards[prefix + name] = self._shard(name, value)
        super()._load_from_state_dict({**state_dict, **shards}, prefix, *args)


def as_linear(linear: nn.Module) -> nn.Linear:
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"linear must be an nn.Linear, got {type(linear).__name__}")
    return linear
