"""What the layers share: the parameters of an nn.Linear, whole or this rank's shards, and their way in and out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from fusedcomm.ops.arguments import check_tensor
from fusedcomm.ops.call_check import same_collective
from fusedcomm.parallel.plain_modules import (
    PARAMETERS,
    has_parameter_hooks,
    has_users,
    why_not_called_as,
    why_not_plain,
    why_on_any_rank,
)
from fusedcomm.runtime.group import Group, find, resolve

_MAKERS = (BasePruningMethod, SpectralNorm, WeightNorm)  # forward pre-hooks that make a weight of other parameters


class ParallelLinear(nn.Module):
    """The base of the layers: an ``nn.Linear(in_features, out_features)`` whose parameters a group holds.

    Parameters have nn.Linear's names and shapes, and its initial values, if every rank has the same seed. Those of the
    tensor-parallel layers are DTensors on a 1-D mesh of the group: rank r holds block r of R along a sharded dim. Those
    of the Ulysses layers are plain tensors.

    * ``state_dict()`` holds the parameters as they are and never communicates. `torch.distributed.checkpoint` saves and
      loads it, on any number of ranks. `fusedcomm.nn.full_state_dict` gives plain tensors.
    * ``load_state_dict`` takes it, or a plain nn.Linear's state dict, of which it takes this rank's shards, or plain
      tensors of the shards' shapes.
    * Copies and pickles know the group by name and size; where there is no such group, ``forward`` raises ValueError.

    Args:
        in_features: the size of the whole input's last dim.
        out_features: the size of the whole result's last dim.
        bias: whether there is one.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        device: that of the parameters, as in nn.Linear; DTensors on a given DeviceMesh are where that is.
        dtype: that of the parameters, as in nn.Linear; the ops take float32, float16, bfloat16 and, unfused, float64.

    Attributes:
        in_features: the size of the whole input's last dim.
        out_features: the size of the whole result's last dim.
        weight: [out_features, in_features].
        bias: [out_features], or None.
        shard_dims: by the name of a parameter, the dim along which it is sharded; what is not named is replicated.
        partial_gradients: the names of the parameters whose gradient after a backward is this rank's part,
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
        self._take(nn.Linear(in_features, out_features, bias, device, dtype), group)

    @property
    def partial_gradients(self) -> tuple[str, ...]:
        """The parameters whose gradient after a backward is this rank's part, not yet the sum over ranks."""
        return ()

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as nn.Linear does, and keep this rank's part.

        It does not communicate, so every rank must have the same seed.

        Raises TypeError if the weight or the bias is made of other parameters, as by weight_norm.
        """
        if made := [name for name in PARAMETERS if name not in self._parameters]:
            raise TypeError(f"{made[0]} of a {type(self).__name__} must be a parameter to be drawn, not made of others")
        like = {"device": self.weight.device, "dtype": self.weight.dtype}
        drawn = nn.Linear(self.in_features, self.out_features, self.bias is not None, **like)
        with torch.no_grad():
            for name in PARAMETERS:
                if (parameter := self._parameters[name]) is not None:
                    parameter.copy_(_laid_out_as(parameter, getattr(drawn, name)))

    def to_linear(self) -> nn.Linear:
        """Return a plain nn.Linear with a copy of the whole weight and bias, as parametrizations and pruning make them.

        It is a collective where a parameter is sharded: every rank of the group calls it.

        Raises TypeError if the layer has more, that nn.Linear would not have: hooks, submodules, a forward of its own.
        """
        why, group = self._why_not_linear(), self._group()
        if self.shard_dims:  # the others would wait for this rank's shards
            why = why_on_any_rank(why, find(group))
        if why is not None:
            raise TypeError(f"a {type(self).__name__} must compute what a plain nn.Linear does, got one of which {why}")
        for hook in self._forward_pre_hooks.values():
            if isinstance(hook, _MAKERS):
                hook(self, ())  # the weight that it made in the last forward may be older than what it is made of
        weight, bias = self.weight, self.bias
        linear = nn.Linear(self.in_features, self.out_features, bias is not None, "meta", weight.dtype)
        for name, value in (("weight", weight), ("bias", bias)):
            if value is not None:
                trained = any(each.requires_grad for of, each in self.named_parameters() if name in of)
                setattr(linear, name, nn.Parameter(whole(value).clone(), trained))
        return linear.train(self.training)

    def _why_not_linear(self) -> str | None:
        base = next(cls for cls in type(self).__mro__ if cls.__module__.startswith("fusedcomm."))
        if why := why_not_called_as(self, base):
            return why
        pre_hooks = [hook for hook in self._forward_pre_hooks.values() if not isinstance(hook, _MAKERS)]
        hooks = [*pre_hooks, *self._forward_hooks.values(), *self._backward_hooks.values()]
        if has_users([*hooks, *self._backward_pre_hooks.values()]) or has_parameter_hooks(self):
            return "it, or a parameter of it, has hooks"
        held = {*self._modules} - {"parametrizations"}
        if len(pre_hooks) == len(self._forward_pre_hooks):  # otherwise some of these are what the weight is made of
            held |= {*self._parameters, *self._buffers} - {*PARAMETERS}
        return f"it has {', '.join(sorted(held))}" if held else None

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, group_size={self.group_size}"

    def _take(self, linear: nn.Linear, group: Group) -> None:
        """Make the parameters copies of this rank's part of ``linear``'s; the mode and requires_grad are kept."""
        for name in ("weight", "bias"):
            given = getattr(linear, name)
            held = None if given is None else nn.Parameter(self._held(name, given.detach(), group), given.requires_grad)
            self.register_parameter(name, held)
        self.train(linear.training)

    def _held(self, name: str, whole: Tensor, group: Group) -> Tensor:
        """A copy of what ``self.name`` has of the whole."""
        return whole.clone(memory_format=torch.contiguous_format)

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

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Plain tensors for DTensors are laid out as these; what has another shape is load_state_dict's own matter."""
        laid_out = {}
        for name, parameter in self.named_parameters(recurse=False):
            value = state_dict.get(prefix + name)
            if isinstance(parameter, DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor):
                laid_out[prefix + name] = _laid_out_as(parameter, value.detach())
        super()._load_from_state_dict({**state_dict, **laid_out}, prefix, *args)


def cut(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A copy of this rank's part. Nothing is communicated."""
    part = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    copied = part.clone(memory_format=torch.contiguous_format)
    assert isinstance(copied, DTensor)
    return copied


def whole(t: Tensor) -> Tensor:
    """The whole of a DTensor, by a collective, or the plain tensor itself."""
    t = t.detach()
    if not isinstance(t, DTensor):
        return t
    facts = {"shape": list(t.shape), "placements": str(t.placements)}
    for pg in [] if t.device_mesh.get_coordinate() is None else t.device_mesh.get_all_groups():
        with same_collective("full_tensor", pg.group_name, t.to_local(), **facts):
            pass
    return t.full_tensor()


def _laid_out_as(parameter: Tensor, value: Tensor) -> Tensor:
    """A plain ``value`` as its part of ``parameter``, if it has the shape of that or of this rank's part of that."""
    if not isinstance(parameter, DTensor):
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    if value.shape == parameter.shape:
        return cut(value, mesh, placements)
    if value.shape == parameter.to_local().shape:
        return DTensor.from_local(
            value, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
    return value


def as_linear(linear: nn.Module) -> nn.Linear:
    """Raises TypeError for a layer that computes, or keeps, more than copies of its weight and bias would."""
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"linear must be an nn.Linear, got {type(linear).__name__}")
    if (why := why_not_plain(linear)) is not None:
        raise TypeError(f"linear must be a plain nn.Linear, got a {type(linear).__name__} of which {why}")
    return linear
