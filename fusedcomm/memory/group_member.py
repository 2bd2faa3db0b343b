"""One rank's part in a process group, on one device: the topology vote and the workspace.

Everything that makes or frees memory here is explicit, collective and bounded; nothing collective runs in a destructor.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from array import array
from collections.abc import Hashable, Iterator
from concurrent import futures
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch.distributed import Store
from torch.distributed import _symmetric_memory as symm_mem

from fusedcomm import env
from fusedcomm.kernels import native_part
from fusedcomm.kernels.native_part import native
from fusedcomm.memory import flight_recorder, gpu_rendezvous, segment, signals
from fusedcomm.memory.call_memory import CallMemory
from fusedcomm.memory.canaries import GUARD_BYTES
from fusedcomm.memory.captures import WARM_UP, LoadedCalls, is_capturing, is_for_capture
from fusedcomm.memory.departures import Departures
from fusedcomm.memory.errors import PeerError, PeerMismatchError, PeerTimeoutError
from fusedcomm.memory.launch_order import ordered
from fusedcomm.memory.outside_modes import outside_modes
from fusedcomm.memory.patience import on_thread
from fusedcomm.memory.segment import FINGERPRINT, slot_bytes_within
from fusedcomm.memory.topology import Topology
from fusedcomm.memory.vote import agree
from fusedcomm.memory.workspace import LOOK_S, Workspace
from fusedcomm.plan.planner import Plan

log = logging.getLogger("fusedcomm")
_MIN_SLOT_BYTES = 1 << 20

gpus: set[torch.device] = set()  # that have had workspaces, of groups that are gone too


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
    counters: array[int] = field(default_factory=lambda: array("q", [0]))  # num_calls, which prepared calls count too
    resets: int = 0  # the group's; counts closes too
    workspace: Workspace | None = None
    unavailable: str | None = None  # why no workspace could be made, until the next reset; equal on all ranks
    cannot_map: bool = False  # whether that is not for lack of memory
    error: PeerError | None = None  # why the ranks did not come together to make one, until the next reset
    private_name: str | None = None  # of the group in the next rendezvous on GPUs; None: its own
    retired: list[Workspace] = field(default_factory=list)  # CUDA graphs replay on them until close()
    for_graphs: Workspace | None = None  # shared by later captures too
    loaded: LoadedCalls = field(default_factory=LoadedCalls)  # calls that have run fused: a capture loads no kernels
    outcomes: dict[str, str] = field(default_factory=dict)  # by name of proof: empty, or a rank's failure
    lock: AbstractContextManager[Any] = field(
        default_factory=lambda: native.CallLock() if native else threading.RLock()
    )
    plans: dict[Hashable, Plan] = field(default_factory=dict)  # by kind of call
    prepared: Any = None  # native.PreparedCalls: the natively loaded plans
    generation: int = 0  # of plans
    plan_bytes: int = 0  # of all plans, here and there

    @property
    def num_calls(self) -> int:
        """The number of calls since the last reset or close."""
        return self.counters[0]

    @num_calls.setter
    def num_calls(self, num_calls: int) -> None:
        self.counters[0] = num_calls

    @property
    def no_workspace(self) -> str | None:
        """Why chunked and fused cannot run in this group, or None."""
        return self.topology.no_workspace or self.unavailable

    @property
    def for_capture(self) -> bool:
        """Whether a call must run as in the capture of a CUDA graph."""
        return is_for_capture(self.device)

    @cached_property
    def memory(self) -> CallMemory:
        """For calls without a workspace."""
        return CallMemory(self.rank, self.group_size, self.group_name, self.device)

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
        """A Member with a guarded workspace of its own. Its failure spoils nothing here."""
        size = Workspace.num_bytes(self.group_size, slot_bytes, GUARD_BYTES)
        small = replace(self.topology, workspace_bytes=size, check=True)
        facts = (self.rank, self.group_size, self.group_name, self.device, self.store)
        return Member(*facts, small, self.ranks, self.departures)

    def count(self, record: flight_recorder.Record, algorithm: str | None = None) -> None:
        self.num_calls += 1
        record.number, record.resets = self.num_calls, self.resets
        record.ranks, record.algorithm = self.ranks, algorithm

    def workspace_for(self, num_bytes: int, op: str, fingerprint: int) -> Workspace:
        """The workspace, made or grown if a slot of ``num_bytes`` does not fit; that is a collective.

        The host, which counts the rounds of chunked calls, cannot count replays. So calls that are not captured leave a
        captured workspace to the graphs and make a new one: fused ones too, as peers may run theirs chunked.
        """
        self.enter(op, fingerprint)
        graphs = self.for_graphs if is_for_capture(self.device) else None
        if graphs is not None and num_bytes <= graphs.usable_bytes:
            graphs.call_number = self.num_calls
            return graphs
        if self.workspace is None:
            refuse_capture(self.device, op)
            return self._make(num_bytes, op, fingerprint)
        leaves = self.workspace.captured and not is_for_capture(self.device)
        if leaves or num_bytes > self.workspace.usable_bytes:
            refuse_capture(self.device, op)
            self._come_together(self.workspace, op, ~fingerprint & FINGERPRINT)
            if leaves:
                self.for_graphs = self.workspace
            self._free()
            return self._make(num_bytes, op, fingerprint)
        if is_capturing(self.device) and not self.workspace.captured:
            self._forget_prepared()  # replays will move the epoch that they count on the host
        return self.workspace

    def enter(self, op: str, fingerprint: int) -> None:
        """Raise the failure of an earlier call, if any. Comes before each call."""
        for each in self.retired:
            each.check(op)
        if self.error is not None:
            raise self.error.again()
        if self.workspace is not None:
            self.workspace.call_number = self.num_calls
            self.workspace.enter(op, fingerprint)

    def left(self, op: str, by: BaseException) -> None:
        """Let later calls raise: the next one would not come to the place where the peers wait."""
        text = f"{op} on group {self.group_name!r}, rank {self.rank}: left by {type(by).__name__}"
        self.error = PeerError(text, peers=[self.rank], op=op, epoch=0).until_reset()
        self.prepare_anew()  # prepared calls do not look at the error

    @contextmanager
    def in_order(self, op: str, sends_nan: bool = False) -> Iterator[None]:
        """A call by the group's collectives. If a rank leaves it, by want of memory or Ctrl-C, its later ones raise, as
        they would meet those of this call. ``sends_nan``: unless `Execution.send_nan` has run the rest.
        """
        if self.error is not None and not self.memory.in_order:
            raise self.error.again()
        try:
            yield
        except BaseException as left:
            alone = isinstance(left, (MemoryError, torch.OutOfMemoryError, KeyboardInterrupt))  # others come alike
            if not self.memory.in_order or (alone and not sends_nan):
                self.memory.in_order = False
                self.left(op, left)
            raise

    def check(self, op: str) -> None:
        for each in (*self.retired, *([self.workspace] if self.workspace else [])):
            each.check(op)

    @outside_modes()
    def reset(self, num_bytes: int) -> None:
        """``num_bytes``: the size of a slot, the same on all ranks."""
        with self.lock, on_device(self.device):
            self._free()
            self.for_graphs = None  # it may be broken
            for each in self.retired:
                each.forget_error()
            self.unavailable = self.error = None
            self.memory.in_order = True
            with suppress(WorkspaceUnavailable):  # the next plan gives the reason
                self._make(num_bytes, "fusedcomm.reset", 0)

    @outside_modes()
    def close(self) -> None:
        with self.lock, on_device(self.device):
            self._free()
            self.loaded.clear()
            self.error = self.for_graphs = None
            self.retired.clear()

    @outside_modes()
    def _come_together(self, workspace: Workspace, op: str, fingerprint: int) -> None:
        """Before growth, find out a rank that is in another call, so that nobody waits for it in vain."""
        if self.device.type == "cpu":
            workspace.handshake(op, fingerprint)
            return
        with ordered(workspace), workspace.guarded(op):
            signals.signal(workspace, fingerprint)
            signals.wait(workspace, fingerprint)
        torch.cuda.synchronize(self.device)
        workspace.check(op)

    @outside_modes()
    def _make(self, num_bytes: int, op: str, fingerprint: int) -> Workspace:
        slot_bytes = max(num_bytes, min(_MIN_SLOT_BYTES, self.max_slot_bytes))
        power = 1 << (slot_bytes.bit_length() - 1)
        sizes = power, power + max(128, power // 8), 2 * power  # few, so few growths; rows may have notes behind them
        slot_bytes = min(next(each for each in sizes if each >= slot_bytes), self.max_slot_bytes)
        size = Workspace.num_bytes(self.group_size, slot_bytes, self.guard_bytes)
        try:
            made = self._share(size, op, fingerprint)
            if not isinstance(made, str):
                self.workspace = made
                if self.device.type == "cuda":
                    gpus.add(self.device)
                self.prepare_anew()
                return made
        except PeerError as failed:
            self.error = failed.until_reset()
            raise self.error.again() from failed  # a copy, as a raised exception keeps all its callers' tensors alive
        except BaseException as left:  # by Ctrl-C
            self.left(op, left)
            raise
        self.unavailable = made
        self.prepare_anew()
        raise WorkspaceUnavailable(made)

    def _share(self, size: int, op: str, fingerprint: int) -> Workspace | str:
        """A workspace with segments of ``size`` bytes, or why there is none; equal on all ranks."""
        if self.device.type == "cuda":  # a rank's former segment stays until all have unmapped it
            self._agree(op, fingerprint, "", "freed")
        segment, error = self._allocate(size)
        if (reason := self._agree(op, fingerprint, error, "allocated")) is not None:
            return reason
        assert segment is not None
        made = self._map(segment, op)
        reason = self._agree(op, fingerprint, made if isinstance(made, str) else "", "mapped")
        self.cannot_map = reason is not None
        return reason or made

    def prepare_calls(self) -> None:
        """From now on keep plans of calls. With FUSEDCOMM_CHECK there are none: Python compares each call."""
        if native is None and self.device.type == "cuda":
            log.warning("calls run in Python, hundreds of microseconds each: native part: %s", native_part.error)
        if native is None or self.topology.check:
            return
        if segment.NUM_SLOTS == native.NUM_SLOTS:
            self.prepared = native.PreparedCalls(self.group_name, self.device, self.lock, self.counters)

    def stay_in_python(self, reason: str) -> None:
        """Keep no plans any more, until the group is made anew."""
        log.warning("calls run in Python, hundreds of microseconds each, as the native part fails: %s", reason)
        if self.prepared is not None:
            self.prepared.withdraw()
            self.prepared = None

    def prepare_anew(self) -> None:
        """Drop the plans of earlier calls: they are for another workspace or other decisions, or too large."""
        self.plans.clear()
        self.plan_bytes = 0
        self.generation += 1
        self._forget_prepared()

    def _forget_prepared(self) -> None:
        if self.prepared is None:
            return
        with self.lock:  # a thread may be in a call
            if self.workspace is None:
                self.prepared.clear(self.resets)
            else:  # each call looks whether a replay has failed, too
                records = [each.record.words for each in (self.workspace, *self.retired)]
                self.prepared.begin(self.resets, *self.workspace.for_plans(), records)

    def keep(self, kind: Hashable, plan: Plan, generation: int) -> None:
        """Keep the plan of a finished call, unless lack of memory forced another plan, or all were dropped since."""
        with self.lock:
            if kind not in self.plans and plan.reason != self.unavailable and generation == self.generation:
                self.plans[kind] = plan
                self.count_plan(plan.num_bytes)

    def count_plan(self, num_bytes: int) -> None:
        """Count a new plan. If the total is too large, all are dropped, and later calls are planned anew."""
        self.plan_bytes += num_bytes
        if self.plan_bytes > self.topology.plan_bytes:
            self.prepare_anew()

    def _allocate(self, size: int) -> tuple[torch.Tensor | None, str]:
        """This rank's segment, or why there is none, which the others must hear before they wait in a rendezvous."""
        with suppress(RuntimeError):
            return self._segment(size), ""
        try:
            torch.cuda.empty_cache()  # of memory that tensors have had, and symmetric memory cannot take
            return self._segment(size), ""
        except RuntimeError as error:
            return None, f"cannot allocate a workspace of {size} bytes: {error}"

    def _segment(self, size: int) -> torch.Tensor:
        allocate = symm_mem._SymmetricMemory.empty_strided_p2p
        segment = allocate((size,), (1,), torch.uint8, self.device, self.group_name)
        Workspace.initialise(segment, self.group_size, self.guard_bytes)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return segment

    def _map(self, segment: torch.Tensor, op: str) -> Workspace | str:
        """A workspace on all ranks' segments, or why there is none."""
        handle, error = self._rendezvous(segment, op)
        if error:
            return error
        try:
            segments = [handle.get_buffer(r, segment.shape, torch.uint8) for r in range(self.group_size)]
            workspace = Workspace(self.rank, segments, self.group_name, (segment, handle), self.guard_bytes)
            workspace.departures, workspace.call_number = self.departures, self.num_calls
            workspace.share_gpu(self.topology.ranks_per_gpu)
            workspace.arm()
        except RuntimeError as failed:
            return f"cannot use the workspace that it has mapped: {failed}"
        return workspace

    def _rendezvous(self, segment: torch.Tensor, op: str) -> tuple[Any, str]:
        """The handle to peers' segments, or why there is none."""
        if self.device.type == "cuda" and (error := self._blocked(segment)):
            return None, f"cannot map its peers' memory: {error}"
        try:
            return symm_mem._SymmetricMemory.rendezvous(segment, self.private_name or self.group_name), ""
        except torch.distributed.DistStoreError as late:
            message = f"{op} on group {self.group_name!r}, rank {self.rank}: {late}"
            named = re.search(r"\branks? ([\d, ]+) did not ", str(late))  # by kernels/cpu/rendezvous.h
            peers = [int(rank) for rank in named[1].split(", ")] if named else []
            raise PeerTimeoutError(message, peers=peers, op=op, epoch=0) from late
        except RuntimeError as error:
            return None, f"cannot map its peers' memory: {error}"

    @gpu_rendezvous.without_multicast()
    def _blocked(self, segment: torch.Tensor) -> str:
        """Why torch's rendezvous on GPUs has not ended, or "". torch finds its result again by the segment.

        It waits for the peers' memory in ``recvmsg`` without a bound, so that a rank that dies or fails in it would
        block the others for good. As an op it leaves the GIL to this thread; by its binding it does not. It gets half
        of the time-out: a rank that has failed still waits in the vote that follows.
        """
        bound = env.timeout_s() / 2
        deadline = time.monotonic() + bound
        rendezvous, private_name = torch.ops.symm_mem._rendezvous, self.private_name

        def meet() -> None:
            with gpu_rendezvous.registered(private_name, self.store, self.rank, self.group_size):
                rendezvous(segment, private_name or self.group_name)

        gpu_rendezvous.counter.begun += 1
        result = on_thread(meet, "fusedcomm-rendezvous")
        while not result.done():
            left = deadline - time.monotonic()
            if left <= 0:
                return f"torch's rendezvous has not ended within {bound:g} s"
            if self.departures is not None and any(map(self.departures.is_gone, range(self.group_size))):
                return "the process of a peer is gone"
            futures.wait([result], min(left, LOOK_S))
        gpu_rendezvous.counter.ended += result.exception() is None
        return str(result.exception() or "")

    def _agree(self, op: str, fingerprint: int, error: str, stage: str) -> str | None:
        """Check that all ranks are at this stage of this call. Return the first failed rank's error, or None."""
        count = gpu_rendezvous.counter.fact()
        facts = {"op": op, "fingerprint": fingerprint, "stage": stage, "rendezvous": count, "error": error}
        calls = agree(self.store, self.rank, self.group_size, facts, what=op, departures=self.departures)
        check_same_call(calls, self.rank, op, self.group_name)
        if self.device.type == "cuda":
            self.private_name = gpu_rendezvous.private_name([call["rendezvous"] for call in calls])
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
        self.prepare_anew()


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make ``device`` the current one inside: of kernels, streams and allocations."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def check_same_call(facts: list[dict[str, object]], rank: int, op: str, group_name: str) -> None:
    def call(fact: dict[str, object]) -> tuple[object, ...]:
        return fact["fingerprint"] or fact["op"], fact["stage"]  # ops of one wire may have other names

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


def refuse_capture(device: torch.device, op: str) -> None:
    if is_capturing(device):
        raise RuntimeError(f"{op}: memory for this call cannot be made while a CUDA graph is captured; {WARM_UP}")
