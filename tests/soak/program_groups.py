"""The process groups of a program in one rank: they are made, made anew, and gone at the end."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import ProcessGroup

from fusedcomm.memory import members
from fusedcomm.memory.workspace import Workspace
from fusedcomm.tools.selftest_checks import settings
from tests.soak.random_program import MESH_DIMS, SoakGroup


class SoakGroups:
    """The groups of a program. All ranks of WORLD make and destroy them in the same order; only members hold them."""

    def __init__(self, rank: int, groups: Sequence[SoakGroup], device: torch.device, timeout: timedelta) -> None:
        self.rank, self.device, self.timeout = rank, device, timeout
        self.before = set(c10d._world.pg_map)
        self.made: dict[int, ProcessGroup] = {}
        self.meshes: dict[int, Any] = {}  # 1-D, or (mesh, dim)
        self._mesh: Any = None
        for group in groups:
            if group.kind == "new_group":
                self._make(group)
            else:
                self._find(group)

    def _make(self, group: SoakGroup) -> None:
        made = dist.new_group(list(group.ranks), timeout=self.timeout)
        if self.rank not in group.ranks:
            return
        self.made[group.number] = made
        if group.workspace_bytes and len(group.ranks) > 1:
            with settings(WORKSPACE_BYTES=str(group.workspace_bytes)):  # the vote keeps it
                members.member(made.group_name, self.device)

    def _find(self, group: SoakGroup) -> None:
        """WORLD, or a group that a mesh has made."""
        from torch.distributed.device_mesh import init_device_mesh

        assert dist.group.WORLD is not None
        size = dist.get_world_size()
        if group.kind == "world":
            self.made[group.number] = dist.group.WORLD
            if group.form == "mesh":
                self.meshes[group.number] = init_device_mesh(self.device.type, (size,))
            return
        if self._mesh is None:
            self._mesh = init_device_mesh(self.device.type, (2, size // 2), mesh_dim_names=MESH_DIMS)
        if self.rank in group.ranks:
            self.made[group.number] = self._mesh.get_group(group.kind)
            self.meshes[group.number] = (self._mesh, group.kind)

    def handle(self, group: SoakGroup) -> Any:
        made = self.made[group.number]
        forms = {"group": made, "name": made.group_name, "mesh": self.meshes.get(group.number), "none": None}
        return forms[group.form]

    def workspace(self, group: SoakGroup) -> Workspace | None:
        every = members.members(self.made[group.number])
        return next((each.workspace for each in every if each.device == self.device), None)

    def remake(self, group: SoakGroup) -> None:
        if self.rank in group.ranks:
            made = self.made.pop(group.number)
            dist.barrier(made)  # a peer may still be sending
            dist.destroy_process_group(made)
        self._make(group)

    def destroy(self) -> None:
        for made in [each for each in c10d._world.pg_map if each not in self.before]:
            dist.destroy_process_group(made)
