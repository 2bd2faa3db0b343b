"""The 1-D mesh on which a layer's parameters lie, for each way to name its group."""

from __future__ import annotations

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from fusedcomm.runtime.group import Group, find, resolve


def mesh_of(group: Group, device: torch.device) -> DeviceMesh:
    """The DeviceMesh that is given, or its dim that is; for another group a mesh of tensors like those on ``device``.

    Meshes of one group are equal. Only a given mesh knows of its other dims, as FSDP2 over one of them must.

    Raises ValueError for a mesh whose ranks do not ascend along the dim: the ranks of a group do, and DTensors are cut
    in the order of the mesh, but gathered in that of the group.
    """
    _, group_name = resolve(group)
    mesh, *dims = group if isinstance(group, tuple) else (group,)
    if isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names
        dim = 0 if not dims else dims[0] if isinstance(dims[0], int) else (names or ()).index(dims[0])
        ranks = np.array(mesh.mesh.tolist())
        if (np.diff(ranks, axis=dim) < 0).any():
            raise ValueError(f"the ranks of a DeviceMesh must ascend along the dim that is given, got {ranks.tolist()}")
        if mesh.ndim == 1:
            return mesh
        if names is not None:
            return mesh[names[dim]]
    return DeviceMesh.from_group(find(group_name), _device_type(group_name, device))


def _device_type(group_name: str, device: torch.device) -> str:
    """``device``'s; from the meta device parameters go to the accelerator, if the group communicates there."""
    if device.type != "meta":
        return device.type
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    types = [each.type for each in find(group_name)._device_types]
    return accelerator.type if accelerator is not None and accelerator.type in types else "cpu"
