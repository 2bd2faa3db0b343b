"""`redistribute` and `redistribute_plan`: what users call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch

from fusedcomm.redistribution.placements import encode

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

    from fusedcomm.redistribution.search import RedistributionPlan


def redistribute(
    dtensor: DTensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    async_op: bool = False,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> DTensor:
    """``dtensor.redistribute(device_mesh, placements, ...)``, by the fewest, largest collectives.

    Equal values, shapes and placements, differentiable any number of times, and can be compiled. Where torch
    communicates a mesh dim at a time, this takes at once what it can, also of uneven shards, in any order: mostly one
    collective, and never more than torch. Reductions over several mesh dims give replicas that are equal bit by bit.
    See `redistribute_plan` for what it does.

    The first call on a mesh, and the first that takes certain mesh dims at once, is a collective of all its ranks: it
    makes process groups. A rank that is not in the mesh gets its empty part back.

    Args:
        device_mesh: that of the dtensor, which is the default.
        placements: one per dim of the mesh: Replicate(), Shard(dim), or the Partial that is there already.
        async_op: do not wait for the last collective where its result needs no rearranging; what uses it waits.
        forward_dtype: the dtype that is sent, and that of the result. By default the dtensor's.
        backward_dtype: the dtype in which gradients are sent. By default the dtensor's.

    Raises:
        ValueError: another mesh, too few or too many placements, a dim out of range, a Partial that is not there,
            reduce ops that no order makes exact together, an average of integers; and of this rank alone: a local
            tensor that has not the shape of its part.
        PeerTimeoutError: a rank of the mesh did not come to a first call within ``FUSEDCOMM_TIMEOUT_S``.

    What only torch knows is torch's to do, logged once with the reason: other placements, sizes unknown when a graph is
    compiled, ranks not ascending along a mesh dim that shards.
    """
    from fusedcomm.redistribution.dtensor import check_mesh, version

    check_mesh(dtensor, device_mesh)
    names = encode(placements, dtensor.placements)
    graphs_version = version(dtensor.device_mesh) if torch.compiler.is_compiling() else ""
    found = torch.ops.fusedcomm.redistribute(dtensor, names, async_op, forward_dtype, backward_dtype, graphs_version)
    return cast("DTensor", found)


def redistribute_plan(
    dtensor: DTensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    forward_dtype: torch.dtype | None = None,
) -> RedistributionPlan:
    """What `redistribute` does with these arguments, which see: steps with groups, bytes and estimated times.

    The same on all ranks; sends nothing, but the first call on a mesh is a collective. ``print`` it.

    Raises ValueError as `redistribute` does, and for what that leaves to torch.
    """
    from fusedcomm.redistribution.dtensor import check_mesh, plan_of

    check_mesh(dtensor, device_mesh)
    return plan_of(dtensor, encode(placements, dtensor.placements), forward_dtype)
