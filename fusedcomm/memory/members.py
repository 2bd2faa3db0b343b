"""The Members of this process, by process group and device, and the collectives of a group about them.

Groups are held weakly.
"""

import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fusedcomm.memory import dumps, flight_recorder, topology
from fusedcomm.memory import group as groups
from fusedcomm.memory.departures import announce, farewell, leaving_by
from fusedcomm.memory.errors import PeerError
from fusedcomm.memory.group import Group
from fusedcomm.memory.group_member import Member, check_same_call, on_device, refuse_capture
from fusedcomm.memory.outside_modes import outside_modes
from fusedcomm.memory.vote import agree


class _Group:
    """The Members of one process group, by device."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.resets = 0  # a Member that a reset has dropped is made again with it
        self.members: dict[torch.device, Member] = {}
        self.errors: dict[torch.device, PeerError] = {}  # why votes failed, until the next reset


_groups: weakref.WeakKeyDictionary[ProcessGroup, _Group] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def member(group_name: str, device: torch.device, record: flight_recorder.Record | None = None) -> Member:
    """This rank's Member; the first call per group and device is a collective (the topology vote).

    ``record``: of the call that needs it.
    """
    pg = groups.find(group_name)
    device = _indexed(device)
    group = _group(pg)
    groups.refuse_forked("fusedcomm", pg.rank())
    with group.lock:
        if device not in group.members:
            refuse_capture(device, "the first op on a group")
            if device in group.errors:
                raise group.errors[device].again()
            if record is not None:
                record.resets = group.resets
            try:
                group.members[device] = _voted(pg, device, group.resets)
            except PeerError as failed:
                group.errors[device] = failed.until_reset()
                raise group.errors[device].again() from failed
        return group.members[device]


@outside_modes()
def _voted(pg: ProcessGroup, device: torch.device, resets: int) -> Member:
    with on_device(device):  # a kernel is launched there
        voted, departures = topology.probe(pg, device)
    store = groups.store(pg, f"workspace/{device.type}")
    ranks = tuple(dist.get_process_group_ranks(pg))
    made = Member(pg.rank(), pg.size(), pg.group_name, device, store, voted, ranks, departures, resets=resets)
    made.prepare_calls()
    return made


def _group(pg: ProcessGroup) -> _Group:
    with _lock:
        if pg not in _groups:
            _groups[pg] = _Group()
            weakref.finalize(pg, _destroyed, _groups[pg]).atexit = False  # at the end `exits` does it
        return _groups[pg]


def _destroyed(group: _Group) -> None:
    """Tell the peers why this rank will not come again. A GPU tells nothing: a collector must not wait for its work."""
    if groups.is_forked():
        return
    for each in group.members.values():
        if each.prepared is not None:
            each.prepared.withdraw()
    error = leaving_by()
    left = [(each, farewell(error, "its group was destroyed", each.num_calls)) for each in group.members.values()]
    for each, last_words in left:
        if each.workspace is not None and each.device.type == "cpu":
            each.workspace.leave(last_words)
    if error is not None:  # otherwise the job just ends, maybe the store first, and torch would warn
        announce([(each.departures, last_words) for each, last_words in left])


def members(pg: ProcessGroup) -> list[Member]:
    return list(_groups[pg].members.values()) if pg in _groups else []


def all_members() -> list[Member]:
    """The Members of every group alive in this process."""
    return [each for group in list(_groups.values()) for each in group.members.values()]


def known_member(group_name: str, device: torch.device) -> Member | None:
    """The Member, if the group has come together; this is no collective."""
    try:
        pg = groups.find(group_name)
    except ValueError:  # the group was destroyed
        return None
    return next((each for each in members(pg) if each.device == _indexed(device)), None)


def reset(group: Group = None) -> None:
    """Make a group usable again after a `PeerError`, with a new workspace on each device.

    It is a collective: every rank of the group calls it, also one that saw no error.

    Args:
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.

    Raises:
        ValueError: group is not an initialised group that contains this rank.
        PeerTimeoutError: a rank did not come within ``FUSEDCOMM_TIMEOUT_S``; the call can be made again.
        PeerMismatchError: a rank called `close` instead.

    Example, on each of 2 ranks::

        try:
            y = fusedcomm.matmul_all_reduce(torch.ones(4, 8), torch.ones(8, 6))
        except fusedcomm.PeerError as error:
            print(error.peers)
            fusedcomm.reset()
    """
    with _all_members("fusedcomm.reset", group) as found:
        for each, num_bytes in found:
            each.reset(num_bytes)


def close(group: Group = None) -> None:
    """Free the workspaces of a group, on all devices; the next op makes a new one.

    It is a collective: every rank of the group calls it. A CUDA graph that has captured an op on the group must not be
    replayed afterwards.

    Args:
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.

    Raises:
        ValueError: group is not an initialised group that contains this rank.
        PeerTimeoutError: a rank did not come within ``FUSEDCOMM_TIMEOUT_S``; the call can be made again.
        PeerMismatchError: a rank called `reset` instead.
    """
    with _all_members("fusedcomm.close", group) as found:
        for each, _ in found:
            each.close()


def synchronize(group: Group = None) -> None:
    """Wait for the ops on a group and raise the errors of their waits for peers.

    On CUDA it waits for the device, as kernels find errors after their call has returned. On CPU a call raises its
    errors itself. It is no collective: a rank may call it alone.

    Args:
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.

    Raises:
        ValueError: group is not an initialised group that contains this rank.
        PeerTimeoutError: a peer did not come to an op within ``FUSEDCOMM_TIMEOUT_S``.
        PeerMismatchError: a peer called another op, or one with other shapes, dtype or dims.
    """
    for each in members(groups.find(groups.resolve(group)[1])):
        if each.device.type == "cuda":
            torch.cuda.synchronize(each.device)
        with dumps.on_failure():
            each.check("fusedcomm.synchronize")


@contextmanager
def _all_members(op: str, group: Group) -> Iterator[list[tuple[Member, int]]]:
    """The Members that all ranks of the group have, each with the largest slot of any rank; calls are counted anew.

    This is a bounded collective. Every rank joins, even one without a Member. A Member that some rank lacks, as its
    vote never finished, is dropped and voted on again, and so is a Member without a workspace by its vote.
    """
    pg = groups.find(groups.resolve(group)[1])
    if pg.size() == 1 or dist.get_backend(pg) == "fake":
        yield []
        return
    known = _group(pg)
    with known.lock, dumps.on_failure(), ExitStack() as records:
        for each in known.members.values():
            record = records.enter_context(flight_recorder.Record(op, each.group_name, each.device))
            record.resets, record.ranks, record.state = known.resets + 1, each.ranks, flight_recorder.RUNNING
        slots = {device.type: each.slot_bytes for device, each in known.members.items()}
        own = {"op": op, "fingerprint": 0, "stage": "members", "slots": slots}
        departures = next((each.departures for each in known.members.values()), None)
        facts = agree(groups.store(pg, "members"), pg.rank(), pg.size(), own, what=op, departures=departures)
        check_same_call(facts, pg.rank(), op, pg.group_name)
        shared = set.intersection(*(set(fact["slots"]) for fact in facts))
        known.members = {
            device: each
            for device, each in known.members.items()
            if device.type in shared and each.topology.no_workspace is None
        }
        for each in known.members.values():
            each.outcomes.clear()  # a failure may have left ranks with different ones, and plans made by them
            each.plans.clear()
        known.errors.clear()
        devices = sorted(known.members, key=str)
        yield [(known.members[d], max(fact["slots"][d.type] for fact in facts)) for d in devices]
        known.resets += 1
        for each in known.members.values():
            with each.lock:
                each.num_calls, each.resets = 0, known.resets
                each.prepare_anew()


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
