"""The public functions `redistribute` and `redistribute_plan`."""

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
    """Redistribute a DTensor by the fewest, largest collectives. It equals::

        return dtensor.redistribute(device_mesh, placements, async_op=async_op,
                                    forward_dtype=forward_dtype, backward_dtype=backward_dtype)

    Values, shapes and placements equal torch's; it is differentiable any number of times and can be compiled. Where
    torch communicates one mesh dim at a time, this joins mesh dims, also for uneven shards, in any order: mostly one
    collective, and never more than torch. Reductions over several mesh dims give replicas that are equal bit by bit.

    The first call on a mesh, and the first that joins certain mesh dims, is a collective of all its ranks, as it makes
    process groups. A rank that is not in the mesh gets its empty part back.

    Args:
        dtensor: a DTensor of any shape and dtype, evenly sharded or not.
        device_mesh: the mesh of the dtensor, and the default.
        placements: a list with one per dim of the mesh: Replicate(), Shard(dim), or the Partial that is there already;
            it must be given.
        async_op: whether the call returns without waiting for the last collective where its result needs no
            rearranging; the first use of the result waits.
        forward_dtype: the dtype of the payload and of the result; None: the dtensor's.
        backward_dtype: the dtype of the gradients' payload; None: the dtensor's.

    Returns:
        A DTensor on the same mesh, with these placements. Its local tensor has memory of its own, and is contiguous
        where a plan of fusedcomm made it.

    Unsupported cases are left to torch and logged once with the reason: other placements, sizes unknown when a graph is
    compiled, ranks not ascending along a mesh dim that shards.

    Raises:
        TypeError: no DTensor, no list of placements, or no dtype.
        IndexError: too few or too many placements, or a dim out of range.
        RuntimeError: no placements, a Partial that is not there, an average of integers.
        NotImplementedError: another mesh.
        ValueError: reduce ops that no order makes exact together; on this rank alone: a local tensor that has not the
            shape of its part.
        PeerTimeoutError: a rank of the mesh did not come to a first call within ``FUSEDCOMM_TIMEOUT_S``.

    Example, on each of 2 ranks::

        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard

        x = DTensor.from_local(torch.ones(4, 6), init_device_mesh("cpu", (2,)), [Shard(0)])  # [8, 6] in all
        y = fusedcomm.redistribute(x, placements=[Shard(1)])
        assert y.to_local().shape == (8, 3)
    """
    from fusedcomm.redistribution.dtensor import check_dtype, check_mesh, version

    check_mesh(dtensor, device_mesh)
    check_dtype("forward_dtype", forward_dtype)
    check_dtype("backward_dtype", backward_dtype)
    names = encode(placements, dtensor.placements)
    graphs_version = version(dtensor.device_mesh) if torch.compiler.is_compiling() else ""
    options = (bool(async_op), forward_dtype, backward_dtype)
    found = torch.ops.fusedcomm.redistribute(dtensor, names, *options, graphs_version)
    return cast("DTensor", found)


def redistribute_plan(
    dtensor: DTensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    forward_dtype: torch.dtype | None = None,
) -> RedistributionPlan:
    """Return the plan of `redistribute` for these arguments, without sending the tensor.

    The plan is the same on all ranks. The first call on a mesh is a collective of its ranks.

    Args:
        dtensor: as in `redistribute`.
        device_mesh: as in `redistribute`.
        placements: as in `redistribute`.
        forward_dtype: as in `redistribute`; bytes depend on it.

    Raises:
        ValueError: `redistribute` leaves this case to torch; and the errors of `redistribute`.
        PeerTimeoutError: a rank of the mesh did not come to the first call within ``FUSEDCOMM_TIMEOUT_S``.
    """
    from fusedcomm.redistribution.dtensor import check_dtype, check_mesh, plan_of

    check_mesh(dtensor, device_mesh)
    check_dtype("forward_dtype", forward_dtype)
    return plan_of(dtensor, encode(placements, dtensor.placements), forward_dtype)
