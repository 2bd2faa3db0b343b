"""The process groups of a mesh, of each dim and of all dims together, made before any graph is compiled.

A graph may be compiled on one rank only, while the others find it in their cache, so no group can be made then.
Everything here but the names of the groups is equal on all ranks of the mesh, so passes decide alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class MeshGroup:
    """This rank's group of one or several dims of a mesh."""

    name: str
    dims: tuple[int, ...]  # ascending


@dataclass(frozen=True)
class FlattenedMesh:
    """``sizes`` of the mesh's dims, and a group for each subset of the dims of several ranks."""

    sizes: tuple[int, ...]
    groups: tuple[MeshGroup, ...]

    def named(self, group_name: str) -> MeshGroup | None:
        return next((group for group in self.groups if group.name == group_name), None)

    def of(self, dims: Iterable[int]) -> MeshGroup:
        wanted = tuple(sorted(dims))
        return next(group for group in self.groups if group.dims == wanted)


def flatten(meshes: DeviceMesh | Sequence[DeviceMesh]) -> tuple[FlattenedMesh, ...]:
    """Make the groups that are missing. To be called on all ranks, for the same meshes in the same order.

    Raises ValueError for no mesh, a mesh without this rank, or one whose ranks do not ascend.
    """
    from torch.distributed.device_mesh import DeviceMesh

    given: Sequence[Any] = [meshes] if isinstance(meshes, DeviceMesh) else meshes
    if not isinstance(given, Sequence) or not all(isinstance(mesh, DeviceMesh) for mesh in given):
        raise ValueError(f"merge must be a DeviceMesh or a sequence of them, got {meshes!r}")
    for mesh in given:
        if mesh.get_coordinate() is None:
            raise ValueError(f"merge must name meshes that contain this rank, {dist.get_rank()}, got {mesh}")
        ranks = mesh.mesh.flatten().tolist()
        if ranks != sorted(ranks):  # a rank's place in each group would be another than its coordinates'
            raise ValueError(f"meshes in merge must have their ranks in ascending order, got {mesh}")
    return tuple(map(_flatten, given))


def _flatten(mesh: DeviceMesh) -> FlattenedMesh:
    from fusedcomm.redistribution.mesh_groups import flattened

    several = [d for d, size in enumerate(mesh.mesh.shape) if size > 1]
    groups = []
    for num_dims in range(1, len(several) + 1):
        for dims in combinations(several, num_dims):
            pg = mesh.get_group(dims[0]) if num_dims == 1 else flattened(mesh, dims).pg
            groups.append(MeshGroup(pg.group_name, dims))
    return FlattenedMesh(tuple(mesh.mesh.shape), tuple(groups))
