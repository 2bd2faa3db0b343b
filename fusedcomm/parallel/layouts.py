"""Placements on a 1-D mesh, as declared by a style and as found on a tensor."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from fusedcomm.parallel.unwritten import shard_of


def annotated(x: Tensor, mesh: DeviceMesh, layouts: Sequence[Placement]) -> DTensor:
    """x as a DTensor: a plain tensor is taken to be laid out as declared."""
    return x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, layouts, run_check=False)


def from_part(part: Tensor, mesh: DeviceMesh, placement: Placement, shape: Sequence[int]) -> DTensor:
    """The contiguous DTensor of ``shape`` with ``part`` as this rank's local tensor."""
    whole: dict[str, Any] = {}
    if isinstance(placement, Shard) and shape[placement.dim] % mesh.size():
        whole = {"shape": torch.Size(shape), "stride": torch.empty(shape, device="meta").stride()}
    return DTensor.from_local(part, mesh, (placement,), run_check=False, **whole)


def normalized(layouts: Sequence[Placement], ndim: int) -> tuple[Placement, ...]:
    """Layouts with nonnegative dims, as in a DTensor."""
    return tuple(Shard(each.dim % ndim) if type(each) is Shard else each for each in layouts)


def token_dim(placement: Placement, ndim: int) -> int | None:
    """The dim along which ``placement`` shards a tensor of ``ndim`` dims, if it is none of the features."""
    if type(placement) is not Shard or not -ndim <= placement.dim < ndim or placement.dim % ndim == ndim - 1:
        return None
    return placement.dim % ndim


def mesh_of_weight(linear: nn.Linear) -> DeviceMesh:
    weight = linear.weight
    if not isinstance(weight, DTensor):
        raise TypeError(f"weight must be the DTensor that the style has made, got a {type(weight).__name__}")
    return weight.device_mesh


def why_not_sharded(linear: nn.Linear, mesh: DeviceMesh, dim: int) -> str | None:
    """Why ``linear.weight`` does not lie in equal shards along ``dim`` on the 1-D ``mesh``, or None."""
    weight = linear.weight
    if not isinstance(weight, DTensor):
        return "its weight is no DTensor"
    if weight.device_mesh != mesh or mesh.ndim != 1:
        return f"its weight lies on {weight.device_mesh}"
    if weight.placements != (Shard(dim),):
        return f"its weight is placed as {weight.placements}"
    if weight.shape[dim] % mesh.size():
        return f"{('out_features', 'in_features')[dim]} must be divisible by {mesh.size()}, got {weight.shape[dim]}"
    return None


def why_no_rows(x: Tensor) -> str | None:
    """Why x is no tensor that the ops take, or None."""
    if x.ndim < 2:
        return f"x has {x.ndim} dims"
    return None if x.is_floating_point() else f"x has dtype {x.dtype}"


def why_elsewhere(x: Tensor, mesh: DeviceMesh) -> str | None:
    """Why x does not lie on the ranks of ``mesh``, as a plain tensor does, or None."""
    return f"x lies on {x.device_mesh}" if isinstance(x, DTensor) and x.device_mesh != mesh else None


def gather_size_of(x: DTensor, gather_dim: int) -> int | None:
    """The ops' gather_size for a DTensor, cut as by torch.chunk; None if its shards are even."""
    size = x.shape[gather_dim]
    return size if size % x.device_mesh.size() else None


def shards(linear: Any) -> tuple[Tensor, Tensor | None]:
    """This rank's parts of the weight and of the bias; `torch.func.functional_call` may have put a plain one there."""
    weight, bias = (shard_of(t) if isinstance(t, DTensor) else t for t in (linear.weight, linear.bias))
    return weight, bias


def bias_of_part(bias: Tensor | None) -> Tensor | None:
    """A replicated bias for a part of the rows: its gradient is the sum over ranks, which `redistribute` makes in the
    backward. Without it the gradient would stay Partial. In inference mode torch 2.11 cannot run it."""
    if not isinstance(bias, DTensor):
        return bias
    if not torch.is_grad_enabled():
        return bias.to_local()
    bias = bias.redistribute(placements=bias.placements)
    return bias.to_local(grad_placements=(Partial(),) * len(bias.placements))
