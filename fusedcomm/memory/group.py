"""Process groups: from users' arguments to the (size, name) of ops, and key spaces of their stores."""

import ctypes
import hashlib
import os
import reprlib
from typing import Any, cast

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import ProcessGroup, Store
from torch.distributed.device_mesh import DeviceMesh

Group = Any  # ProcessGroup | DeviceMesh (1-D) | (DeviceMesh, mesh_dim) | str | None


_forked = False  # from a process that had groups: these, and their connections, are the parent's


def _note_fork() -> None:
    """Keep the parent's groups for good: their destructors would wait for threads that a child lacks."""
    global _forked
    _forked = dist.is_initialized()
    for pg in c10d._world.pg_map if _forked else ():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pg))


os.register_at_fork(after_in_child=_note_fork)


def is_forked() -> bool:
    return _forked


def refuse_forked(op: str, rank: int) -> None:
    """Raises RuntimeError in a forked child, which would use the connections of its parent."""
    if _forked:
        raise RuntimeError(f"{op}: this process was forked from rank {rank} and is no rank of the group")


def resolve(group: Group) -> tuple[int, str]:
    """(group_size, group_name) of a ProcessGroup, 1-D DeviceMesh, (DeviceMesh, mesh_dim), name, or None for WORLD."""
    if isinstance(group, str):
        return _size_of(group), group
    pg = process_group(group)
    return pg.size(), pg.group_name


def find(group_name: str) -> ProcessGroup:
    """The live ProcessGroup of that name."""
    try:
        return c10d._resolve_process_group(cast(c10d.GroupName, group_name))
    except (RuntimeError, ValueError, KeyError):
        raise ValueError(f"group must be an initialised process group, got name {group_name!r}") from None


def rank_of(group_name: str) -> int:
    """This process' rank in the group."""
    return find(group_name).rank()


rank_of._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result does


def _size_of(group_name: str) -> int:
    try:
        return c10d._get_group_size_by_name(cast(c10d.GroupName, group_name))  # torch.compile knows this one
    except (RuntimeError, ValueError, KeyError):
        raise ValueError(f"group must be an initialised process group, got name {group_name!r}") from None


def check_size(group_size: int, group_name: str) -> ProcessGroup:
    pg = find(group_name)
    if pg.size() != group_size:
        raise ValueError(f"group_size must be the size of group {group_name!r}, {pg.size()}, got {group_size}")
    return pg


def store(pg: ProcessGroup, purpose: str) -> Store:
    """A key space of the group's store that no other group and no other purpose shares."""
    # groups made with local synchronisation can share a name and a store, but not the ranks
    ranks = hashlib.sha256(repr(dist.get_process_group_ranks(pg)).encode()).hexdigest()[:16]
    return dist.PrefixStore(f"fusedcomm/{ranks}/{purpose}", c10d._get_process_group_store(pg))


def process_group(group: Group) -> ProcessGroup:
    if group is None:
        world = dist.group.WORLD
        if world is None:
            raise ValueError(
                "group=None means WORLD, which must be initialised: call torch.distributed.init_process_group"
            )
        return world
    if isinstance(group, ProcessGroup):
        if group not in c10d._world.pg_map:
            raise ValueError("group must be an initialised process group that contains this rank, got a destroyed one")
        return group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group must contain this rank: new_group gave this rank no part in it")
    mesh, *dims = group if isinstance(group, tuple) else (group,)
    if not isinstance(mesh, DeviceMesh) or len(dims) > 1:
        got = reprlib.repr(group)  # it may be a tensor: group comes after the op's tensors
        raise ValueError(f"group must be a ProcessGroup, DeviceMesh, (DeviceMesh, mesh_dim), name or None, got {got}")
    if not dims and mesh.ndim != 1:
        raise ValueError(f"a DeviceMesh must be 1-D, or given as (mesh, mesh_dim), got {mesh.ndim} dims")
    return _mesh_group(mesh, *dims)


def _mesh_group(mesh: Any, *dims: int | str) -> ProcessGroup:
    if dims:
        names = mesh.mesh_dim_names or ()
        if dims[0] not in names and dims[0] not in range(mesh.ndim):
            raise ValueError(f"mesh_dim must be one of {names} or in [0, {mesh.ndim - 1}], got {dims[0]!r}")
    try:
        return mesh.get_group(*dims)
    except RuntimeError as error:
        raise ValueError(
            f"group must be an initialised process group, got a DeviceMesh without one ({error})"
        ) from None
