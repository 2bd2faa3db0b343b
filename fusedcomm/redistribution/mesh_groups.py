"""Process groups of several mesh dims at once, and `MeshFacts`, agreed between the ranks of a mesh.

Both are made at first use, by a bounded vote on the store of WORLD, and live as long as WORLD. The choice of a group
depends only on earlier calls of all its ranks, never on when Python frees a mesh: that differs by rank.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import ProcessGroup

from fusedcomm import env
from fusedcomm.memory import group
from fusedcomm.memory.outside_modes import outside_modes
from fusedcomm.memory.vote import agree
from fusedcomm.ops import call_check
from fusedcomm.plan.cost import tuned
from fusedcomm.plan.cost.model import DEFAULTS, Constants

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

log = logging.getLogger("fusedcomm")


@dataclass(frozen=True)
class FlatGroup:
    group_name: str
    order: tuple[int, ...]  # for each rank of pg, its row-major index over the mesh dims
    pg: ProcessGroup


@dataclass(frozen=True)
class MeshFacts:
    """Facts about a mesh, equal on all its ranks."""

    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]  # global ranks, in row-major order of the mesh
    hosts: tuple[int, ...]  # the host of each of them, numbered from 0
    constants: Constants  # the tuned ones, if all ranks have the same, else the default ones
    check: bool = False  # FUSEDCOMM_CHECK of any rank

    def __hash__(self) -> int:  # looked up often
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.mesh_shape, self.ranks, self.hosts, self.constants))


def check(mesh: DeviceMesh) -> MeshFacts:
    """The facts of a mesh. The first call is a collective of its ranks, unless its groups are fake and have no peers.

    Raises ValueError where this rank is not in the mesh, the mesh's groups were destroyed, or ranks have different
    meshes; PeerTimeoutError with the global ranks that did not come within FUSEDCOMM_TIMEOUT_S.
    """
    known = _known(mesh)
    if known.facts is None:
        with outside_modes():
            known.facts = _mesh_facts(known)
    return known.facts


def flattened(mesh: DeviceMesh, mesh_dims: tuple[int, ...], *, reduces: bool = False) -> FlatGroup:
    """The group of the ranks that differ from this one only in ``mesh_dims``, which ascend.

    An existing group is taken if it has these ranks and the mesh's backend. The group of a single mesh dim is taken
    too, unless it ``reduces`` and the groups of other ranks would add in another order and so round otherwise. Where
    there is none, the first call makes a group, and is a collective of its ranks. Raises as `check` does, and
    RuntimeError on all ranks if one cannot make it.
    """
    known = _known(mesh)
    found = known.flat.get((mesh_dims, reduces))
    if found is None or found.pg not in c10d._world.pg_map:
        with outside_modes():
            found = known.flat[mesh_dims, reduces] = _flat_group(mesh, known, mesh_dims, reduces)
    return found


# state


@dataclass
class _Mesh:
    """A mesh as this rank sees it."""

    device_type: str
    ranks: np.ndarray  # global, in the mesh's shape
    coordinate: tuple[int, ...]
    groups: tuple[ProcessGroup, ...]  # per mesh dim
    facts: MeshFacts | None = None
    flat: dict[tuple[tuple[int, ...], bool], FlatGroup] = field(default_factory=dict)

    @property
    def is_fake(self) -> bool:
        return _backend(self.groups[0], self.device_type) == "fake"


class _World:
    """Caches that live as long as one WORLD group."""

    def __init__(self) -> None:
        self.facts: dict[Any, MeshFacts] = {}
        self.groups: weakref.WeakValueDictionary[Any, ProcessGroup] = weakref.WeakValueDictionary()
        self.locks: defaultdict[Any, threading.RLock] = defaultdict(threading.RLock)  # by purpose and ranks of a vote


_meshes: dict[int, _Mesh] = {}  # by id, while the mesh lives, because equal meshes can have different groups
_worlds: weakref.WeakKeyDictionary[ProcessGroup, _World] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_attempts: dict[tuple[int, ...], int] = {}  # by ranks; a store may outlive WORLD, so no name is used on it twice


def _known(mesh: DeviceMesh) -> _Mesh:
    groups = _own_groups(mesh)
    known = _meshes.get(id(mesh))
    if known is None or known.groups != groups:
        if known is None:
            weakref.finalize(mesh, _meshes.pop, id(mesh), None).atexit = False
        with outside_modes():
            known = _meshes[id(mesh)] = _read(mesh, groups)
    return known


def _own_groups(mesh: DeviceMesh) -> tuple[ProcessGroup, ...]:
    if mesh.get_coordinate() is None:
        raise ValueError(f"device_mesh must contain this rank, {dist.get_rank()}, got {_describe(mesh)}")
    try:
        groups = tuple(mesh.get_group(i) for i in range(mesh.ndim))
    except (RuntimeError, ValueError, LookupError):
        groups = ()
    if len(groups) < mesh.ndim or not all(pg in c10d._world.pg_map for pg in groups):
        raise _destroyed(mesh)
    return groups


def _read(mesh: DeviceMesh, groups: tuple[ProcessGroup, ...]) -> _Mesh:
    ranks = np.array(mesh.mesh.tolist())
    (coordinate,) = np.argwhere(ranks == group.process_group(None).rank()).tolist()
    known = _Mesh(mesh.device_type, ranks, tuple(coordinate), groups)
    for i, pg in enumerate(groups):
        if sorted(_members(known, (i,))) != sorted(dist.get_process_group_ranks(pg)):
            raise _destroyed(mesh)  # another group has its name by now
    return known


def _world() -> _World:
    with _lock:
        return _worlds.setdefault(group.process_group(None), _World())


def _lock_of(world: _World, purpose: str, ranks: tuple[int, ...]) -> threading.RLock:
    with _lock:
        return world.locks[purpose, ranks]


def _members(known: _Mesh, mesh_dims: tuple[int, ...]) -> list[int]:
    """The global ranks that differ from this one only in mesh_dims, in row-major order."""
    index = tuple(slice(None) if i in mesh_dims else c for i, c in enumerate(known.coordinate))
    return cast("list[int]", known.ranks[index].reshape(-1).tolist())


def _destroyed(mesh: DeviceMesh) -> ValueError:
    return ValueError(f"device_mesh must have its process groups, got {_describe(mesh)}, whose groups were destroyed")


def _describe(mesh: DeviceMesh) -> str:
    with outside_modes():
        ranks: Any = getattr(mesh, "_rank_map", None)  # mesh.mesh can be read on its own ranks only
        if mesh.get_coordinate() is not None:
            ranks = mesh.mesh
        ranks = tuple(mesh.shape) if ranks is None else ranks.tolist()
    return f"DeviceMesh({mesh.device_type!r}, {ranks})"


# votes


def _mesh_facts(known: _Mesh) -> MeshFacts:
    world, ranks = _world(), tuple(known.ranks.reshape(-1).tolist())
    key = (known.device_type, known.ranks.shape, ranks, known.is_fake)
    with _lock_of(world, "mesh", tuple(sorted(ranks))):
        if key not in world.facts:
            world.facts[key] = _vote_on_mesh(known, ranks)
        return world.facts[key]


def _vote_on_mesh(known: _Mesh, ranks: tuple[int, ...]) -> MeshFacts:
    shape, device_type, voters = known.ranks.shape, known.device_type, tuple(sorted(ranks))
    if known.is_fake:
        return MeshFacts(shape, ranks, (0,) * len(ranks), DEFAULTS[device_type])
    constants = tuned.read(tuned.key(torch.device(device_type), len(ranks)))
    posted: dict[str, Any] = {"device_type": device_type, "mesh_shape": list(shape), "ranks": list(ranks)}
    posted |= {"host": env.host_id(), "constants": constants.digest if constants else None, "check": env.check()}
    facts = _vote("mesh", posted, voters, "fusedcomm mesh vote")
    _check_same(facts, voters, ("device_type", "mesh_shape", "ranks"))
    if len({fact["host"] for fact in facts}) > 1:  # measured on one host
        constants = None
    elif len({fact["constants"] for fact in facts}) > 1:
        constants = None
        if group.process_group(None).rank() == voters[0]:
            log.warning("tuned numbers are not used on ranks %s: run `fusedcomm tune` where they share a cache", voters)
    names, numbers = [facts[voters.index(rank)]["host"] for rank in ranks], dict[str, int]()
    hosts = tuple(numbers.setdefault(name, len(numbers)) for name in names)
    return MeshFacts(shape, ranks, hosts, constants or DEFAULTS[device_type], any(fact["check"] for fact in facts))


@contextmanager
def same_call(op: str, t: DTensor, **arguments: Any) -> Iterator[None]:
    """With FUSEDCOMM_CHECK, `call_check.same_arguments` of the ranks of t's mesh, else nothing.

    Code that is traced is not checked.
    """
    mesh, local = t.device_mesh, t._local_tensor
    if mesh.get_coordinate() is None or call_check.is_traced(local) or not check(mesh).check:
        yield
        return
    ranks = sorted(check(mesh).ranks)

    def vote(call: dict[str, Any]) -> list[dict[str, Any]]:
        return [fact["call"] for fact in _vote("call", {"call": call}, ranks, op)]

    own = {"shape": list(t.shape), "dtype": str(t.dtype), "placements": [str(each) for each in t.placements]}
    rank = ranks.index(group.process_group(None).rank())
    with call_check.same_arguments(op, _describe(mesh), rank, vote, own | arguments, names=ranks):
        yield


def _vote(purpose: str, facts: dict[str, Any], ranks: Sequence[int], what: str) -> list[dict[str, Any]]:
    """The facts of all ``ranks``: global, ascending."""
    world = group.process_group(None)
    store = group.store(world, f"redistribution/{purpose}/{_digest(ranks)}")
    return agree(store, ranks.index(world.rank()), len(ranks), facts, what=what, names=ranks)


def _check_same(facts: list[dict[str, Any]], ranks: Sequence[int], names: Sequence[str]) -> None:
    for name in names:
        for rank, fact in zip(ranks, facts, strict=True):
            if fact[name] != facts[0][name]:
                raise ValueError(
                    f"{name} must be the same on all ranks of a device_mesh, got {facts[0][name]} on rank {ranks[0]} "
                    f"and {fact[name]} on rank {rank}"
                )


def _digest(ranks: Sequence[int]) -> str:
    return hashlib.sha256("_".join(map(str, ranks)).encode()).hexdigest()[:16]


# groups


def _flat_group(mesh: DeviceMesh, known: _Mesh, mesh_dims: tuple[int, ...], reduces: bool) -> FlatGroup:
    assert mesh_dims and list(mesh_dims) == sorted(set(mesh_dims))
    members = _members(known, mesh_dims)
    ranks = tuple(members if reduces and _orders_differ(known, mesh_dims) else sorted(members))
    own = len(mesh_dims) == 1 and list(ranks) == sorted(ranks)
    pg = known.groups[mesh_dims[0]] if own else _group_of(mesh, known, mesh_dims, ranks)
    index = {rank: i for i, rank in enumerate(members)}
    return FlatGroup(pg.group_name, tuple(index[rank] for rank in dist.get_process_group_ranks(pg)), pg)


def _orders_differ(known: _Mesh, mesh_dims: tuple[int, ...]) -> bool:
    """Whether ascending ranks have different coordinates in different groups of these mesh dims."""
    last = range(known.ranks.ndim - len(mesh_dims), known.ranks.ndim)
    groups = np.moveaxis(known.ranks, mesh_dims, last).reshape(-1, len(_members(known, mesh_dims)))
    orders = groups.argsort(axis=1)
    return bool((orders != orders[0]).any())


def _group_of(mesh: DeviceMesh, known: _Mesh, mesh_dims: tuple[int, ...], ranks: tuple[int, ...]) -> ProcessGroup:
    backend, world = _backend(known.groups[mesh_dims[0]], known.device_type), _world()
    with _lock_of(world, "group", tuple(sorted(ranks))):
        pg = world.groups.get((ranks, backend))
        if pg is None or pg not in c10d._world.pg_map:
            pg = _existing(mesh, known, ranks, backend) or _make(known, mesh_dims, ranks, backend)
            world.groups[ranks, backend] = pg
        return pg


def _existing(mesh: DeviceMesh, known: _Mesh, ranks: tuple[int, ...], backend: str) -> ProcessGroup | None:
    """A group of these ranks, if there is one: the user's flattened groups first, then WORLD, then single mesh dims."""
    root: Any = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    flat_meshes = getattr(root, "_flatten_mapping", {}).values()
    candidates = [pg for flat in flat_meshes if (pg := _only_group(flat))] + [group.process_group(None), *known.groups]
    for pg in candidates:
        if pg not in c10d._world.pg_map or _backend(pg, known.device_type) != backend:
            continue
        found = dist.get_process_group_ranks(pg)
        if ranks in (tuple(found), tuple(sorted(found))):
            return pg
    return None


def _only_group(flat: DeviceMesh) -> ProcessGroup | None:
    try:
        return flat.get_group()
    except (RuntimeError, ValueError, LookupError):  # the group was destroyed, or does not have this rank
        return None


def _make(known: _Mesh, mesh_dims: tuple[int, ...], ranks: tuple[int, ...], backend: str) -> ProcessGroup:
    """A group of these ranks, in this order. A collective of them; it ends even if one of them dies."""
    if known.device_type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a process group cannot be made while a CUDA graph is captured: redistribute once before it")
    like, attempt = known.groups[mesh_dims[0]], _attempts.get(ranks, 0)
    if backend == "fake":
        _attempts[ranks] = attempt + 1
        return _new_group(_name(ranks, attempt), ranks, backend, known.device_type, like)
    posted = {
        "mesh_shape": list(known.ranks.shape),
        "ranks": known.ranks.reshape(-1).tolist(),
        "mesh_dims": list(mesh_dims),
        "members": list(ranks),
        "backend": backend,
        "attempt": attempt,
    }
    facts = _vote("group", posted, sorted(ranks), "fusedcomm group vote")
    _check_same(facts, sorted(ranks), ("mesh_shape", "ranks", "mesh_dims", "members", "backend"))
    attempt = max(fact["attempt"] for fact in facts)
    _attempts[ranks] = attempt + 1
    return _make_together(_name(ranks, attempt), ranks, backend, known.device_type, like)


def _make_together(
    name: str, ranks: tuple[int, ...], backend: str, device_type: str, like: ProcessGroup
) -> ProcessGroup:
    """Make the group on all of ``ranks``, or on none."""
    pg, error = None, ""
    try:
        pg = _new_group(name, ranks, backend, device_type, like)
    except Exception as failure:  # of any backend: the other ranks must hear of it
        error = f"{type(failure).__name__}: {failure}"
    try:
        outcomes = _vote("made", {"error": error}, sorted(ranks), "fusedcomm group vote")
        for rank, outcome in zip(sorted(ranks), outcomes, strict=True):
            if outcome["error"]:
                raise RuntimeError(f"rank {rank} cannot make a {backend} group of ranks {ranks}: {outcome['error']}")
        assert pg is not None
        return pg
    except BaseException:
        if pg is not None:
            dist.destroy_process_group(pg)
        raise


def _new_group(name: str, ranks: tuple[int, ...], backend: str, device_type: str, like: ProcessGroup) -> ProcessGroup:
    """A group with the timeout of ``like``.

    It is not made by new_group. That names a group of some ranks by the number of groups that a rank has, and ranks
    with different numbers would wait for each other under different names.
    """
    timeout = _timeout(like, device_type)
    bound = timedelta(seconds=env.timeout_s())
    connects = backend == "gloo"  # gloo connects when the group is made, other backends when it is used
    world = group.process_group(None)
    with _not_split(world):
        pg, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(world.rank()),
            list(ranks),
            c10d.Backend(backend),
            c10d._get_default_store(),
            cast("c10d.GroupName", name),
            timeout=bound if connects else timeout or c10d._get_default_timeout(c10d.Backend(backend)),
            group_desc="fusedcomm_redistribution",
        )
    c10d._world.pg_group_ranks[pg] = {rank: i for i, rank in enumerate(ranks)}
    if connects and timeout is not None:
        pg._get_backend(torch.device(device_type))._set_default_timeout(timeout)
    return pg


@contextmanager
def _not_split(world: ProcessGroup) -> Iterator[None]:
    """NCCL must not split the group from WORLD's, as it does if WORLD has a device: it would wait for ranks outside."""
    device = world.bound_device_id
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


def _name(ranks: tuple[int, ...], attempt: int) -> str:
    """Equal on all ranks and in every run: compiled graphs are cached by it."""
    return f"fusedcomm_{_digest(ranks)}_{attempt}"


def _backend(pg: ProcessGroup, device_type: str) -> str:
    backends = dict(pair.split(":") for pair in dist.get_backend_config(pg).split(","))
    if device_type not in backends:
        raise ValueError(f"groups of device_mesh must have a backend for {device_type}, got {backends}")
    return backends[device_type]


def _timeout(pg: ProcessGroup, device_type: str) -> timedelta | None:
    try:
        return pg._get_backend(torch.device(device_type)).options._timeout
    except (AttributeError, RuntimeError):
        return None
