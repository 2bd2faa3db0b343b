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
    """``dtensor.redistribute(device_mesh, placements, ...)``, with the fewest and largest collectives.

    The result has the values, shape and placements of torch's. The call can be differentiated any number of times, and
    compiled. Where torch communicates one mesh dim at a time, this takes as many at once as it can, in any order and
    for uneven shards too: mostly one collective, and never more than torch. Reductions over several mesh dims give
    replicas that are equal bit by bit. `redistribute_plan` shows what is done.

    The first call on a mesh, and the first that takes certain mesh dims at once, is a collective of all its ranks,
    because it makes process groups. A rank that is not in the mesh gets its empty part back.

    Args:
        device_mesh: the mesh of the dtensor, which is the default.
        placements: one per mesh dim: Replicate(), Shard(dim), or the Partial that the dtensor has there.
        async_op: do not wait for the last collective where its result needs no rearranging; what uses it waits.
        forward_dtype: the dtype that is sent, and that of the result; the dtensor's by default.
        backward_dtype: the dtype in which gradients are sent; the dtensor's by default.

    Raises:
        ValueError: for another mesh, too few or too many placements, a dim out of range, a Partial that the dtensor
            does not have, reduce ops that no order makes exact together, or an average of integers. On this rank alone
            it is raised for a local tensor that does not have the shape of its part.
        PeerTimeoutError: a rank of the mesh did not come to a first call within ``FUSEDCOMM_TIMEOUT_S``.

    torch redistributes what only torch can, and a warning says so once with the reason: other placements, sizes that
    are unknown when a graph is compiled, and ranks that do not ascend along a mesh dim that shards.
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
    """The plan that `redistribute` follows for these arguments: its steps, with groups, bytes and estimated times.

    The plan is the same on all ranks, and ``print`` shows it. Nothing is sent, but the first call on a mesh is a
    collective. Raises ValueError as `redistribute` does, and for what `redistribute` leaves to torch.
    """
    from fusedcomm.redistribution.dtensor import check_mesh, plan_of

    check_mesh(dtensor, device_mesh)
    return plan_of(dtensor, encode(placements, dtensor.placements), forward_dtype)
