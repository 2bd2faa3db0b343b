"""Placements on a 1-D mesh: what a style declares, and what a tensor has."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement


def annotated(x: Tensor, mesh: DeviceMesh, layouts: Sequence[Placement]) -> DTensor:
    """x as a DTensor: a plain tensor is taken to be laid out as declared."""
    return x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, layouts, run_check=False)


def normalized(layouts: Sequence[Placement], ndim: int) -> tuple[Placement, ...]:
    """With dims that count from the start, as those of a DTensor do."""
    return tuple(Shard(each.dim % ndim) if type(each) is Shard else each for each in layouts)


def token_dim(placement: Placement, ndim: int) -> int | None:
    """The dim along which ``placement`` shards a tensor of ``ndim`` dims, if it is none of the features."""
    if type(placement) is not Shard or not -ndim <= placement.dim < ndim or placement.dim % ndim == ndim - 1:
        return None
    return placement.dim % ndim


def why_not_sharded(linear: nn.Linear, mesh: DeviceMesh, dim: int) -> str | None:
    """Why ``linear.weight`` does not lie in equal shards along ``dim`` on the 1-D ``mesh``, or None."""
    weight = linear.weight
    if not isinstance(weight, DTensor):
        return "its weight is no DTensor"
    if weight.device_mesh != mesh or mesh.ndim != 1:
        return f"its weight lies on {weight.device_mesh}"
    if weight.placements != (Shard(dim),):
        return f"its weight is placed as {weight.placements}"
    return why_uneven(("out_features", "in_features")[dim], weight.shape[dim], mesh)


def why_uneven(name: str, size: int, mesh: DeviceMesh) -> str | None:
    return f"{name} must be divisible by {mesh.size()}, got {size}" if size % mesh.size() else None


def shards(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """This rank's parts of the weight and of the bias, which are DTensors."""
    weight, bias = linear.weight, linear.bias
    assert isinstance(weight, DTensor) and (bias is None or isinstance(bias, DTensor))
    return weight.to_local(), None if bias is None else bias.to_local()
