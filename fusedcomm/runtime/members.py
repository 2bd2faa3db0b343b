"""What is kept per process group and device: the topology vote and the workspace. Groups are held weakly.

Everything that makes or frees memory here is explicit, collective and bounded; nothing collective runs in a destructor.
"""

from __future__ import annotations

import re
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent import futures
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store
from torch.distributed import _symmetric_memory as symm_mem

from fusedcomm import env
from fusedcomm.errors import PeerError, PeerMismatchError, PeerTimeoutError
from fusedcomm.runtime import dumps, flight_recorder, on_thread, proof_file, signals, topology
from fusedcomm.runtime import group as groups
from fusedcomm.runtime.canaries import GUARD_BYTES
from fusedcomm.runtime.captures import WARM_UP, LoadedCalls, is_capturing, is_for_capture
from fusedcomm.runtime.departures import Departures, announce, farewell, leaving_by
from fusedcomm.runtime.group import Group
from fusedcomm.runtime.launch_order import ordered
from fusedcomm.runtime.segment import FINGERPRINT, slot_bytes_within
from fusedcomm.runtime.topology import Topology
from fusedcomm.runtime.vote import agree
from fusedcomm.runtime.workspace import LOOK_S, Workspace

_MIN_SLOT_BYTES = 1 << 20


class WorkspaceUnavailable(Exception):
    """Raised on every rank of the group if one of them could not make its workspace."""


@dataclass
class Member:
    """This rank's part in a group, on one device."""

    rank: int
    group_size: int
    group_name: str
    device: torch.device
    store: Store
    topology: Topology
    ranks: tuple[int, ...] = ()  # the group's ranks in WORLD
    departures: Departures | None = None
    num_calls: int = 0  # since the last reset or close
    resets: int = 0  # the group's; counts closes too
    workspace: Workspace | None = None
    unavailable: str | None = None  # why no workspace could be made, until the next reset; equal on all ranks
    error: PeerError | None = None  # why the ranks did not come together to make one, until the next reset
    retired: list[Workspace] = field(default_factory=list)  # CUDA graphs replay on them until close()
    for_graphs: Workspace | None = None  # the one of them that later captures use too
    loaded: LoadedCalls = field(default_factory=LoadedCalls)  # calls that have run fused: a capture loads no kernels
    outcomes: proof_file.Outcomes = field(default_factory=dict)  # what proofs have found; equal on all ranks
    passing: set[str] = field(default_factory=set)  # outcomes that may be others after a reset
    same_moves: set[tuple[str | int, ...]] = field(default_factory=set)  # digests, and sizes, that all ranks have met
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def no_workspace(self) -> str | None:
        """Why chunked and fused cannot run in this group, or None."""
        return self.topology.no_workspace or self.unavailable

    @property
    def slot_bytes(self) -> int:
        return 0 if self.workspace is None else self.workspace.usable_bytes

    @property
    def guard_bytes(self) -> int:
        return GUARD_BYTES if self.topology.check else 0

    @cached_property
    def max_slot_bytes(self) -> int:
        return slot_bytes_within(self.topology.workspace_bytes, self.group_size, self.guard_bytes)

    def for_proof(self, slot_bytes: int) -> Member:
        """A Member with a guarded workspace of its own, whose failure spoils nothing of this one."""
        size = Workspace.num_bytes(self.group_size, slot_bytes, GUARD_BYTES)
        small = replace(self.topology, workspace_bytes=size, check=True)
        facts = (self.rank, self.group_size, self.group_name, self.device, self.store)
        return Member(*facts, small, self.ranks, self.departures)

    def lasting_outcomes(self) -> proof_file.Outcomes:
        """Those that a reset leaves as they are."""
        return {name: wrong for name, wrong in self.outcomes.items() if name not in self.passing}

    def count(self, record: flight_recorder.Record, algorithm: str | None = None) -> None:
        self.num_calls += 1
        record.number, record.resets, record.ranks, record.algorithm = (
            self.num_calls,
            self.resets,
            self.ranks,
            algorithm,
        )

    def workspace_for(self, num_bytes: int, op: str, fingerprint: int, *, by_host: bool = False) -> Workspace:
        """The workspace, made or grown if a slot of ``num_bytes`` does not fit; that is a collective.

        ``by_host``: whether the host counts the call's rounds. It cannot count those of replays, so such a call leaves
        a workspace that was captured to the graphs, and a new one is made.
        """
        self.enter(op, fingerprint)
        graphs = self.for_graphs if is_for_capture(self.device) else None
        if graphs is not None and num_bytes <= graphs.usable_bytes:
            graphs.call_number = self.num_calls
            return graphs
        if self.workspace is None:
            _refuse_capture(self.device, op)
            return self._make(num_bytes, op, fingerprint)
        leaves = by_host and self.workspace.captured
        if leaves or num_bytes > self.workspace.usable_bytes:
            _refuse_capture(self.device, op)
            self._come_together(self.workspace, op, ~fingerprint & FINGERPRINT)
            if leaves:
                self.for_graphs = self.workspace
            self._free()
            return self._make(num_bytes, op, fingerprint)
        return self.workspace

    def enter(self, op: str, fingerprint: int) -> None:
        """Raise what has failed in an earlier call; to be called before each call."""
        for each in self.retired:
            each.check(op)
        if self.error is not None:
            raise self.error.again()
        if self.workspace is not None:
            self.workspace.call_number = self.num_calls
            self.workspace.enter(op, fingerprint)

    def check(self, op: str) -> None:
        for each in (*self.retired, *([self.workspace] if self.workspace else [])):
            each.check(op)

    def reset(self, num_bytes: int) -> None:
        """``num_bytes``: the size of a slot, the same on all ranks."""
        with self.lock, on_device(self.device):
            self._free()
            self.for_graphs = None  # it may be broken
            for each in self.retired:
                each.forget_error()
            self.unavailable = self.error = None
            with suppress(WorkspaceUnavailable):  # the next plan gives the reason
                self._make(num_bytes, "fusedcomm.reset", 0)

    def close(self) -> None:
        with self.lock, on_device(self.device):
            self._free()
            self.error = self.for_graphs = None
            self.retired.clear()

    def _come_together(self, workspace: Workspace, op: str, fingerprint: int) -> None:
        """Before growth, find out a rank that is in another call, so that nobody waits for it in vain."""
        if self.device.type == "cpu":
            workspace.handshake(op, fingerprint)
            return
        with ordered(workspace), workspace.guarded(op):
            signals.signal(workspace, None, fingerprint)
            signals.wait(workspace, fingerprint)
        torch.cuda.synchronize(self.device)
        workspace.check(op)

    def _make(self, num_bytes: int, op: str, fingerprint: int) -> Workspace:
        slot_bytes = max(num_bytes, min(_MIN_SLOT_BYTES, self.max_slot_bytes))
        slot_bytes = min(1 << (slot_bytes - 1).bit_length(), self.max_slot_bytes)  # few sizes, so few growths
        size = Workspace.num_bytes(self.group_size, slot_bytes, self.guard_bytes)
        try:
            segment, error = self._allocate(size)
            reason = self._agree(op, fingerprint, error, "allocated")
            if reason is None:
                assert segment is not None
                handle, error = self._rendezvous(segment, op)
                reason = self._agree(op, fingerprint, error, "mapped")
            if reason is None:
                segments = [handle.get_buffer(r, (size,), torch.uint8) for r in range(self.group_size)]
                self.workspace = Workspace(self.rank, segments, self.group_name, (segment, handle), self.guard_bytes)
                self.workspace.departures = self.departures
                self.workspace.share_gpu(self.topology.ranks_per_gpu)
                self.workspace.call_number = self.num_calls
                self.workspace.arm()
                return self.workspace
        except PeerError as failed:
            self.error = failed.until_reset()
            raise self.error.again() from failed  # a copy, as a raised exception keeps all its callers' tensors alive
        except BaseException as left:  # by Ctrl-C: the peers wait in a place to which the next call does not come
            text = f"{op} on group {self.group_name!r}, rank {self.rank}: left by {type(left).__name__}"
            self.error = PeerError(text, peers=[self.rank], op=op, epoch=0).until_reset()
            raise
        self.unavailable = reason
        raise WorkspaceUnavailable(reason)

    def _allocate(self, size: int) -> tuple[torch.Tensor | None, str]:
        """This rank's segment, or why there is none, which the others must hear before they wait in a rendezvous."""
        allocate = symm_mem._SymmetricMemory.empty_strided_p2p
        try:
            segment = allocate((size,), (1,), torch.uint8, self.device, self.group_name)
            Workspace.initialise(segment, self.group_size, self.guard_bytes)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            return None, f"cannot allocate a workspace of {size} bytes: {error}"
        return segment, ""

    def _rendezvous(self, segment: torch.Tensor, op: str) -> tuple[Any, str]:
        """The handle through which peers' segments are reached, or why they cannot be."""
        if self.device.type == "cuda" and (error := self._blocked(segment)):
            return None, f"cannot map its peers' memory: {error}"
        try:
            return symm_mem._SymmetricMemory.rendezvous(segment, self.group_name), ""
        except torch.distributed.DistStoreError as late:
            message = f"{op} on group {self.group_name!r}, rank {self.rank}: {late}"
            raise PeerTimeoutError(message, peers=_who_did_not_come(str(late)), op=op, epoch=0) from late
        except RuntimeError as error:
            return None, f"cannot map its peers' memory: {error}"

    def _blocked(self, segment: torch.Tensor) -> str:
        """Why torch's rendezvous on GPUs has not ended, or nothing. What it has made, torch finds again by the segment.

        It waits for the peers' memory in ``recvmsg`` without a bound, so that a rank that dies or fails in it would
        block the others for good. As an op it leaves the GIL to this thread; by its binding it does not. It gets half
        of the time-out: a rank that has failed still waits in the vote that follows.
        """
        bound = env.timeout_s() / 2
        deadline = time.monotonic() + bound
        rendezvous = torch.ops.symm_mem._rendezvous
        result = on_thread.start(lambda: rendezvous(segment, self.group_name), "fusedcomm-rendezvous")
        while not result.done():
            left = deadline - time.monotonic()
            if left <= 0:
                return f"torch's rendezvous has not ended within {bound:g} s"
            if self.departures is not None and any(map(self.departures.is_gone, range(self.group_size))):
                return "the process of a peer is gone"
            futures.wait([result], min(left, LOOK_S))
        return str(result.exception() or "")

    def _agree(self, op: str, fingerprint: int, error: str, stage: str) -> str | None:
        """Check that all ranks are at this stage of this call. Return what the first rank that failed says, or None."""
        facts = {"op": op, "fingerprint": fingerprint, "stage": stage, "error": error}
        calls = agree(self.store, self.rank, self.group_size, facts, what=op, departures=self.departures)
        _check_same_call(calls, self.rank, op, self.group_name)
        return next((f"rank {rank} {call['error']}" for rank, call in enumerate(calls) if call["error"]), None)

    def _free(self) -> None:
        if self.workspace is None:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.workspace.captured:
            self.workspace.forget_error()  # it was raised already; a replay that fails again fills the record again
            self.retired.append(self.workspace)
        self.workspace = None


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
            _refuse_capture(device, "the first op on a group")
            if device in group.errors:
                raise group.errors[device].again()
            if record is not None:
                record.resets = group.resets
            try:
                voted, departures = topology.probe(pg, device)
            except PeerError as failed:
                group.errors[device] = failed.until_reset()
                raise group.errors[device].again() from failed
            store = groups.store(pg, f"workspace/{device.type}")
            ranks = tuple(dist.get_process_group_ranks(pg))
            group.members[device] = Member(
                pg.rank(), pg.size(), group_name, device, store, voted, ranks, departures, resets=group.resets
            )
            group.members[device].outcomes.update(voted.outcomes)
        return group.members[device]


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
    error = leaving_by()
    left = [(each, farewell(error, "its group was destroyed", each.num_calls)) for each in group.members.values()]
    for each, last_words in left:
        if each.workspace is not None and each.device.type == "cpu":
            each.workspace.leave(last_words)
    if error is not None:  # otherwise the job just ends, maybe with the store first, of which torch would warn
        announce([(each.departures, last_words) for each, last_words in left])


def members(pg: ProcessGroup) -> list[Member]:
    return list(_groups[pg].members.values()) if pg in _groups else []


def all_members() -> list[Member]:
    """Those of all groups of this process that are left."""
    return [each for group in list(_groups.values()) for each in group.members.values()]


def known_member(group_name: str, device: torch.device) -> Member | None:
    """The Member, if the group has come together; this is no collective."""
    try:
        pg = groups.find(group_name)
    except ValueError:  # the group was destroyed
        return None
    return next((each for each in members(pg) if each.device == _indexed(device)), None)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels, streams and allocations inside are those of ``device``, whatever the caller's current one is."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


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
    """Wait for the ops on a group and raise what their waits for peers have found.

    On CUDA it waits for the device, whose kernels find errors after the call that started them has returned. On CPU a
    call raises its errors itself. It is no collective: a rank may call it alone.

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
    vote never finished, is dropped and voted on again, and so is one whose vote found that it can have no workspace.
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
        outcomes = {device.type: each.lasting_outcomes() for device, each in known.members.items()}
        own = {"op": op, "fingerprint": 0, "stage": "members", "slots": slots, "outcomes": outcomes}
        departures = next((each.departures for each in known.members.values()), None)
        facts = agree(groups.store(pg, "members"), pg.rank(), pg.size(), own, what=op, departures=departures)
        _check_same_call(facts, pg.rank(), op, pg.group_name)
        shared = set.intersection(*(set(fact["slots"]) for fact in facts))
        known.members = {
            device: each
            for device, each in known.members.items()
            if device.type in shared and each.topology.no_workspace is None
        }
        for device, each in known.members.items():  # a failure may have left ranks with other ones
            each.outcomes = proof_file.of_all([fact["outcomes"][device.type] for fact in facts])
            each.passing.clear()
            each.same_moves.clear()
        known.errors.clear()
        devices = sorted(known.members, key=str)
        yield [(known.members[d], max(fact["slots"][d.type] for fact in facts)) for d in devices]
        known.resets += 1
        for each in known.members.values():
            each.num_calls, each.resets = 0, known.resets


def _who_did_not_come(text: str) -> list[int]:
    """The ranks that an error of kernels/cpu/rendezvous.h names."""
    found = re.search(r"\branks? ([\d, ]+) did not ", text)
    return [int(rank) for rank in found[1].split(", ")] if found else []


def _check_same_call(facts: list[dict[str, object]], rank: int, op: str, group_name: str) -> None:
    def call(fact: dict[str, object]) -> tuple[object, ...]:
        return fact["op"], fact["fingerprint"], fact["stage"]

    others = [r for r, fact in enumerate(facts) if call(fact) != call(facts[rank])]
    if others:
        calls = ", ".join(f"{r}: {fact['op']}" for r, fact in enumerate(facts))
        same_op = all(fact["op"] == op for fact in facts)
        raise PeerMismatchError(
            f"{op} on group {group_name!r}, rank {rank}: ranks {others} called another op, or this one with other "
            f"shapes, dtype or dims (ops by rank: {calls})",
            peers=others,
            op=op,
            epoch=0,
            differs=None if same_op else "the op",
        )


def _refuse_capture(device: torch.device, op: str) -> None:
    if is_capturing(device):
        raise RuntimeError(f"{op}: memory for this call cannot be made while a CUDA graph is captured; {WARM_UP}")


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
