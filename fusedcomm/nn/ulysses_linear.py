"""The base of the Ulysses layers: the replicated parameters of an nn.Linear, and their way in and out."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from fusedcomm.memory.group import Group, resolve
from fusedcomm.ops.call_check import same_collective
from fusedcomm.parallel import plain_modules

_MAKERS = (BasePruningMethod, SpectralNorm, WeightNorm)  # forward pre-hooks that make a weight of other parameters


class UlyssesLinear(nn.Module):
    """An ``nn.Linear(in_features, out_features)`` beside an exchange. Every rank holds its whole parameters.

    Parameters have nn.Linear's names, shapes and initial values, if every rank has the same seed. Copies and pickles
    know the group by name and size; where there is no such group, ``forward`` raises ValueError.

    Attributes:
        in_features: the size of the whole input's last dim.
        out_features: the size of the whole result's last dim.
        weight: [out_features, in_features].
        bias: [out_features], or None.
        group_size: R.
        group_name: the name of the group.
    """

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
        self._take(nn.Linear(in_features, out_features, bias, device, dtype))

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as nn.Linear does. Every rank must have the same seed.

        Raises TypeError if the weight or the bias is made of other parameters, as by weight_norm.
        """
        if made := [name for name in plain_modules.PARAMETERS if name not in self._parameters]:
            raise TypeError(f"{made[0]} of a {type(self).__name__} must be a parameter to be drawn, not made of others")
        nn.Linear.reset_parameters(self)  # type: ignore[arg-type]

    def to_linear(self) -> nn.Linear:
        """Return a plain nn.Linear with a copy of the whole weight and bias, as parametrizations and pruning make them.

        It is a collective where FSDP2 shards a parameter.

        Raises TypeError if the layer has more, that nn.Linear would not have: hooks, submodules, a forward of its own.
        """
        if (why := self._why_not_linear()) is not None:
            raise TypeError(f"a {type(self).__name__} must compute what a plain nn.Linear does, got one of which {why}")
        for hook in self._forward_pre_hooks.values():
            if isinstance(hook, _MAKERS):
                hook(self, ())  # the weight that it made in the last forward may be older than its factors
        weight, bias = self.weight, self.bias
        linear = nn.Linear(self.in_features, self.out_features, bias is not None, "meta", weight.dtype)
        for name, value in (("weight", weight), ("bias", bias)):
            if value is not None:
                trained = any(each.requires_grad for of, each in self.named_parameters() if name in of)
                setattr(linear, name, nn.Parameter(whole(value).clone(), trained))
        return linear.train(self.training)

    def _why_not_linear(self) -> str | None:
        base = next(cls for cls in type(self).__mro__ if cls.__module__.startswith("fusedcomm."))
        if why := plain_modules.why_not_called_as(self, base):
            return why
        pre_hooks = [hook for hook in self._forward_pre_hooks.values() if not isinstance(hook, _MAKERS)]
        others = (self._forward_hooks, self._backward_hooks, self._backward_pre_hooks)
        hooks = [*pre_hooks, *(hook for each in others for hook in each.values())]
        if plain_modules.has_users(hooks) or plain_modules.has_parameter_hooks(self):
            return "it, or a parameter of it, has hooks"
        held = {*self._modules} - {"parametrizations"}
        if len(pre_hooks) == len(self._forward_pre_hooks):  # otherwise some of these are factors of the weight
            held |= {*self._parameters, *self._buffers} - {*plain_modules.PARAMETERS}
        return f"it has {', '.join(sorted(held))}" if held else None

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, group_size={self.group_size}"

    def _take(self, linear: nn.Linear) -> None:
        """Make the parameters copies of ``linear``'s; the mode and requires_grad are kept."""
        for name in plain_modules.PARAMETERS:
            given = getattr(linear, name)
            copied = None if given is None else given.detach().clone(memory_format=torch.contiguous_format)
            parameter = None if copied is None else nn.Parameter(copied, given.requires_grad)
            self.register_parameter(name, parameter)
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


def as_linear(linear: nn.Module) -> nn.Linear:
    """Raises TypeError for a layer that computes, or keeps, more than copies of its weight and bias would."""
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"linear must be an nn.Linear, got {type(linear).__name__}")
    if (why := plain_modules.why_not_plain(linear)) is not None:
        raise TypeError(f"linear must be a plain nn.Linear, got a {type(linear).__name__} of which {why}")
    return linear
