"""Symmetric memory of a group on a device, and the protocol that makes its two slots enough (docs/protocol.md).

    push    a rank writes data into its part of the peer's slot, then signals: flag = (epoch, fingerprint), release
    wait    it acquires the flag until its epoch is reached, within a bound, and then compares the fingerprint
    read    all its reads of epoch e come before its last signal of epoch e + 1

Epoch e uses slot e % 2. A rank writes epoch e + 2 only when it has every peer's signal of e + 1, which each peer sends
after its reads of e. So nobody overwrites unread data, without credits, resets or a barrier.
"""

import functools
import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fusedcomm import env
from fusedcomm.kernels.native_part import loaded
from fusedcomm.memory import canaries, stream_writes, topology
from fusedcomm.memory.beside_kernels import beside_kernels
from fusedcomm.memory.call_memory import CallMemory
from fusedcomm.memory.captures import is_capturing, is_for_capture
from fusedcomm.memory.departures import KILLED, Departures
from fusedcomm.memory.errors import RESET_FIRST, PeerError
from fusedcomm.memory.outside_modes import outside_modes
from fusedcomm.memory.patience import Patience
from fusedcomm.memory.segment import (
    ABANDONED,
    BROKEN_BY_PEER,
    ENDED,
    FINGERPRINT,
    FINGERPRINT_BITS,
    LAST_WORDS_BYTES,
    MISMATCHED,
    MOST_SLOT_BYTES,
    OVERRUN,
    TIMED_OUT,
    ErrorRecord,
    HeaderLayout,
)
from fusedcomm.plan.builder import Device, Memory
from fusedcomm.plan.geometry.exchange import LEAST_COPIED
from fusedcomm.plan.geometry.rank_order import peers_of, sources_of

LOOK_S = 1.0  # how often a rank that waits looks whether its peers' processes are there


@functools.cache
def _streams(device: torch.device, lane: int, captured: bool) -> list[torch.cuda.Stream]:
    """A lane's calls run in one order, so that all its workspaces share them. torch has 32 and then gives the same
    again: drawn for each workspace, they would soon be other libraries' too, as FSDP's. A call of another thread,
    beside a capture, must not fall into the graph.
    """
    return [torch.cuda.Stream(device, priority=-1) for _ in range(2)]


class Workspace(CallMemory):
    """One segment per rank, mapped by all ranks, and this rank's place in the protocol.

    ``segments`` are uint8 tensors over every rank's segment, in symmetric memory or in one process.
    """

    least_copied = LEAST_COPIED  # bytes of a run of a `fused` gather that copy engines send

    @outside_modes()
    def __init__(
        self, rank: int, segments: list[Tensor], group_name: str, owner: Any = None, guard_bytes: int = 0
    ) -> None:
        super().__init__(rank, len(segments), group_name, segments[rank].device)
        self.buffers = segments
        self.layout = HeaderLayout(self.group_size, guard_bytes=guard_bytes)
        self.slot_bytes = self.layout.slot_bytes(segments[rank].numel())
        self.usable_bytes = self.slot_bytes - guard_bytes
        self.addresses = [segment.data_ptr() for segment in segments]
        self.segments = torch.tensor(self.addresses, dtype=torch.int64, device=self.device)
        self.record = ErrorRecord(self.group_size, self.device)
        self.timeout_s = env.timeout_s()
        self.segment_layout = self.layout.for_kernels
        self.num_sms = topology.num_sms(self.device)
        self.shares_gpu = False
        self.lane = 0  # waiting kernels with the same device and lane run in one order
        self.counters = array("q", [0])  # the epoch, which prepared calls count too
        self.waiting: tuple[int, float] | None = None  # the rank that the host waits for, and since when
        self.captured = False
        self.left = False  # whether the peers have been told that this rank leaves
        self.call_number = 0
        self.departures: Departures | None = None
        self.error: PeerError | None = None
        self.kernels: dict[int, tuple[Any, Any]] = {}  # of `fusedcomm.run.python_executor`
        self.schedules: dict[Any, Any] = {}  # of `fusedcomm.run.routed_rows`
        self.ops: dict[int, str] = {}  # by fingerprint, which is all that kernels report of a failed call
        self.pid = os.getpid()
        self._owner = owner  # keeps the mapping alive

    @property
    def segment(self) -> Tensor:
        return self.buffers[self.rank]

    @property
    def epoch(self) -> int:
        """The number of rounds that this rank has completed."""
        return self.counters[0]

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.counters[0] = epoch

    @staticmethod
    def num_bytes(group_size: int, slot_bytes: int, guard_bytes: int = 0) -> int:
        return HeaderLayout(group_size, guard_bytes=guard_bytes).segment_bytes(slot_bytes)

    @staticmethod
    def initialise(segment: Tensor, group_size: int, guard_bytes: int = 0) -> None:
        """Clear the header. This comes before the rendezvous, after which peers may signal into the header."""
        layout = HeaderLayout(group_size, guard_bytes=guard_bytes)
        segment[: layout.header_bytes].zero_()
        if guard_bytes:
            canaries.paint(segment, layout)

    def for_plans(self) -> tuple[Any, ...]:
        """native.Segments and the epoch's address, for prepared calls; they count its rounds too."""
        offsets = self.layout.flags, self.layout.broken, self.layout.epoch, self.layout.header_bytes
        segments = loaded().Segments(self.rank, self.buffers, offsets, self.slot_bytes)
        return segments, self.counters.buffer_info()[0]

    def arm(self) -> None:
        """Tell this rank's kernels their bound and where to report."""
        words = self.segment[: self.layout.broken].view(torch.int64)
        words[self.layout.timeout // 8] = int(self.timeout_s * 1e9)
        words[self.layout.record // 8] = self.record.words.data_ptr()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # calls may come on another one

    def share_gpu(self, num_ranks: int) -> None:
        """Leave room for the other ranks' kernels on this GPU: each waits for the others' sends, so all run at once."""
        self.num_sms = max(1, self.num_sms // num_ranks)
        self.shares_gpu = num_ranks > 1

    def check_rank(self, rank: int) -> None:
        """Check a rank before memory is addressed by it: -1 would be another rank's, others outside all segments."""
        assert 0 <= rank < self.group_size, f"rank must be in [0, {self.group_size}), got {rank}"

    def memory_facts(self) -> Memory:
        limit = min(self.usable_bytes, MOST_SLOT_BYTES) // self.group_size
        return Memory(self.rank, self.group_size, self.usable_bytes, self.slot_bytes, limit, self.segment_layout)

    def device_facts(self) -> Device:
        is_gpu, architecture = self.device.type == "cuda", topology.architecture(self.device)
        is_proof = self.least_copied == 0  # which is in no capture
        return Device(
            is_gpu=is_gpu,
            architecture=architecture,
            triton=topology.triton_version() if architecture else (),
            num_sms=self.num_sms,
            shares_gpu=self.shares_gpu,
            writes_by_stream=is_gpu and stream_writes.available(self.device),
            launches_early=topology.launches_early(self.device),
            allow_tf32=topology.tf32_allowed(),
            for_capture=self.captured or (not is_proof and is_for_capture(self.device)),
            least_copied=self.least_copied,
        )

    @property
    def streams(self) -> list[torch.cuda.Stream]:
        """SENDS and READS of `fusedcomm.plan.schedule.Stream`, before others, as peers wait for them; none on a CPU."""
        return [] if self.device.type == "cpu" else _streams(self.device, self.lane, is_capturing(self.device))

    def slot_start(self, epoch: int) -> int:
        return self.layout.slot(epoch, self.slot_bytes)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        out = super().empty(shape, dtype)
        if self.device.type == "cpu":
            loaded().prefer_huge_pages(out.data_ptr(), out.nbytes)
        return out

    def end_round(self, op: str, fingerprint: int) -> None:
        """Count a round that this rank has completed, or launched; on a CPU look whether a peer has given up by it."""
        self.epoch += 1
        if self.device.type == "cpu":
            self._epoch_word().fill_(self.epoch)
            self.check_peers(op, fingerprint, self.epoch)

    def check(self, op: str) -> None:
        """Raise the error of a wait of this rank, on the host or in a kernel, or the damage to its guard bytes."""
        if self.error is None and self.record.filled:
            failed = self.ops.get(self.record.fingerprint, op)
            breakers = self.breakers(self.record.epoch)
            last_words = {src: self._last_words(src) for src, kind in breakers.items() if kind == ENDED}
            self.error = self.record.error(failed, self.group_name, self.timeout_s, breakers, last_words)
        found = (self.segment, self.layout, self.slot_bytes, self.rank)
        if self.error is None and self.layout.guard_bytes > 0 and (damage := canaries.damage(*found)):
            self._give_up(OVERRUN, self.epoch)
            text = f"{op} on group {self.group_name!r}: {damage}. {RESET_FIRST}"
            self.error = PeerError(text, peers=[], op=op, epoch=self.epoch)
        if self.error is not None:
            raise self.error.again()

    @outside_modes()
    def forget_error(self) -> None:
        self.error = None
        self.record.words.zero_()
        with beside_kernels(self.device):
            self.buffers[self.rank][self.layout.claim : self.layout.claim + 8].zero_()

    def enter(self, op: str, fingerprint: int) -> None:
        """Raise if a peer has given up on the workspace: it is then dead for all. Comes before each call."""
        if os.getpid() != self.pid:
            raise RuntimeError(f"{op}: this process was forked from rank {self.rank} and is no rank of the group")
        self.ops[fingerprint] = op
        self.check_peers(op, fingerprint, self.epoch + 1)

    def check_peers(self, op: str, fingerprint: int, epoch: int) -> None:
        """Raise peers' errors by round ``epoch``. A peer that failed in a later round has completed this one."""
        self.check(op)
        if self.device.type == "cpu" and self.breakers(epoch):
            self.fail(op, epoch, fingerprint, waited=False)

    def breakers(self, epoch: int) -> dict[int, int]:
        """{rank that gave up on this workspace by round ``epoch``: cause}. Costs a copy on CUDA."""
        return {src: word & 0xFF for src, word in enumerate(self._broken()) if word and word >> 8 <= epoch}

    def _broken(self) -> list[int]:
        start = self.layout.broken
        words: list[int] = self.segment[start : start + 8 * self.group_size].view(torch.int64).tolist()
        return words

    @contextmanager
    def guarded(self, op: str) -> Iterator[None]:
        """A context around signals and waits.

        A round that is left half way, by Ctrl-C or for lack of memory, cannot be repeated, because the peers have seen
        its signals. So the workspace is broken for all, as after a time-out.
        """
        try:
            yield
        except PeerError:
            raise
        except BaseException as error:
            if is_capturing(self.device):  # no round has run; all ranks leave it to the graphs, captured or not
                self.captured = True
            else:
                self.abandon(op, error)
            raise

    def abandon(self, op: str, error: BaseException) -> None:
        """Break the workspace for all, as this rank leaves a call half way."""
        epoch = self.epoch + 1
        self.record.mark_dead()
        self._give_up(ABANDONED, epoch)
        text = f"{op} on group {self.group_name!r}, rank {self.rank}, round {epoch}: left by {type(error).__name__}"
        self.error = PeerError(f"{text}. {RESET_FIRST}", peers=[self.rank], op=op, epoch=epoch)

    @outside_modes()
    def _give_up(self, kind: int, epoch: int) -> None:
        """Tell all ranks, without the native part: workspaces on GPUs need none."""
        for buffer in self.buffers:
            self._break(buffer, kind, epoch)

    def _break(self, buffer: Tensor, kind: int, epoch: int) -> None:
        address = self.layout.broken + 8 * self.rank
        buffer[address : address + 8].view(torch.int64).fill_(kind | epoch << 8)

    @outside_modes()  # the garbage collector may call this while torch.compile traces
    def leave(self, last_words: str) -> None:
        """Tell the peers that this rank comes no more. Earlier rounds stay good: all their data are sent.

        Nothing is told where the host does not know which round is the last, nor after a failure. A daemon thread of
        this process may still be in a call, and would take a word in the own header for a peer's.
        """
        epoch = self.epoch + 1
        with beside_kernels(self.device):
            if self.left or self.captured or self.rank in self.breakers(epoch):
                return
            self.left = True
            for peer in peers_of(self.rank, self.group_size)[:-1]:
                self._tell_departure(peer, self.rank, last_words, epoch)

    def _tell_departure(self, dst_rank: int, src_rank: int, text: str, epoch: int) -> None:
        """Write into the header of dst_rank that src_rank has left before round ``epoch``, the last words first."""
        words = torch.tensor(list(text.encode(errors="replace")[:LAST_WORDS_BYTES]), dtype=torch.uint8, device="cpu")
        start = self.layout.last_words(src_rank)
        self.buffers[dst_rank][start : start + words.numel()].copy_(words)
        if self.device.type == "cpu":
            self._signal_broken(dst_rank, src_rank, ENDED, epoch)
        else:
            self._break(self.buffers[dst_rank], ENDED, epoch)

    def _forward(self, src_rank: int) -> None:
        """Tell the other peers what src_rank has told this rank."""
        word, last_words = self._broken()[src_rank], self._last_words(src_rank)
        for dst in range(self.group_size):
            if dst not in (self.rank, src_rank):
                if word & 0xFF == ENDED:
                    self._tell_departure(dst, src_rank, last_words, word >> 8)
                else:
                    self._signal_broken(dst, src_rank, word & 0xFF, word >> 8)

    def _signal_broken(self, dst_rank: int, src_rank: int, kind: int, epoch: int) -> None:
        """Set the word of src_rank (release): an acquire of it sees all earlier writes."""
        loaded().signal(self.addresses[dst_rank] + self.layout.broken + 8 * src_rank, kind | epoch << 8)

    def _last_words(self, src_rank: int) -> str:
        start = self.layout.last_words(src_rank)
        text = bytes(self.segment[start : start + LAST_WORDS_BYTES].tolist())
        return text.rstrip(b"\0").decode(errors="replace")

    def launched(self, captured: bool) -> None:
        """Count a round, launched or captured into a graph. Kernels count the epoch when they run."""
        self.captured |= captured
        self.epoch += not captured

    def epoch_on_device(self) -> int:
        """The rounds that have ended, also while later ones wait on the GPU."""
        with beside_kernels(self.device):
            return int(self._epoch_word())

    def _epoch_word(self) -> Tensor:
        return self.segment[: self.layout.epoch + 8].view(torch.int64)[self.layout.epoch // 8]

    def handshake(self, op: str, fingerprint: int) -> None:
        """A round without data: returns when every rank has come to the same point with the same fingerprint."""
        self.enter(op, fingerprint)
        with self.guarded(op):
            for dst_rank in peers_of(self.rank, self.group_size):
                self.signal(dst_rank, self.epoch + 1, fingerprint)
            for src_rank in sources_of(self.rank, self.group_size):
                self.wait(src_rank, self.epoch + 1, op, fingerprint)
            self.epoch += 1
            self._epoch_word().fill_(self.epoch)

    def signal(self, dst_rank: int, epoch: int, fingerprint: int) -> None:
        """Set the flag (release): an acquire of it sees all of this rank's earlier writes."""
        loaded().signal(*self.flag(dst_rank, epoch, fingerprint))

    def flag(self, dst_rank: int, epoch: int, fingerprint: int) -> tuple[int, int]:
        """(address of this rank's flag at dst_rank, its value in round ``epoch``)."""
        self.check_rank(dst_rank)
        return self.addresses[dst_rank] + self.layout.flag(epoch, self.rank), epoch << FINGERPRINT_BITS | fingerprint

    def wait(self, src_rank: int, epoch: int, op: str, fingerprint: int) -> None:
        """Acquire the flag that src_rank sets by ``signal`` in the same round."""
        self.check_rank(src_rank)
        base = self.addresses[self.rank]
        address, broken = base + self.layout.flag(epoch, src_rank), base + self.layout.broken
        patience = Patience()
        self.waiting = src_rank, patience.began
        while True:
            left_s = self.timeout_s - patience.seconds
            flag = loaded().wait(address, epoch, broken, self.group_size, min(left_s, LOOK_S))
            if flag >> FINGERPRINT_BITS >= epoch or left_s <= LOOK_S or self._must_stop(epoch):
                break
            if patience.is_over:
                patience.tell(self._missing(epoch), f"{op}, call {self.call_number} of group {self.group_name!r}")
        self.waiting = None
        if flag != epoch << FINGERPRINT_BITS | fingerprint:
            self.fail(op, epoch, fingerprint)

    def _missing(self, epoch: int) -> list[int]:
        base = self.addresses[self.rank]
        flags = [loaded().load(base + self.layout.flag(epoch, src)) for src in range(self.group_size)]
        return [s for s, flag in enumerate(flags) if s != self.rank and flag >> FINGERPRINT_BITS < epoch]

    def _must_stop(self, epoch: int) -> bool:
        """Whether a rank has given up by this round. This rank writes the word of a peer whose process is gone."""
        if not self.breakers(epoch) and self.departures is not None:
            gone = {src for src in range(self.group_size) if self.departures.is_gone(src)}
            for src in gone.intersection(self._missing(epoch)):
                self._tell_departure(self.rank, src, KILLED, epoch)
        return bool(self.breakers(epoch))

    @outside_modes()
    def fail(self, op: str, epoch: int, fingerprint: int, waited: bool = True) -> None:
        """Find the cause, break every rank's workspace, keep the error and raise it.

        ``waited`` is False before any wait; then no peer counts as missing.

        A mismatch comes first, because the peer that found it too has broken this workspace already. A peer that has
        left a round, or has ended, will not signal again: the error must name that as the cause, not its silence. Its
        word goes to all before the own one: a rank that sees only that would take this rank for the cause.
        """
        base = self.addresses[self.rank]
        flags = [loaded().load(base + self.layout.flag(epoch, src)) for src in range(self.group_size)]
        others = [src for src in range(self.group_size) if src != self.rank]
        epochs = [flag >> FINGERPRINT_BITS for flag in flags]
        mismatched = [s for s in others if epochs[s] == epoch and flags[s] & FINGERPRINT != fingerprint]
        missing = [s for s in others if waited and epochs[s] < epoch]
        breakers = self.breakers(epoch)
        left = [s for s in others if breakers.get(s) in (ABANDONED, ENDED)]
        if mismatched:
            kind, bad = MISMATCHED, mismatched
        elif left:
            kind, bad = BROKEN_BY_PEER, left
        elif missing:
            kind, bad = TIMED_OUT, missing
        else:
            kind, bad = BROKEN_BY_PEER, [s for s in others if s in breakers]
        self.record.fill(kind, epoch, self.rank, fingerprint, flags, bad)
        for src in left:
            self._forward(src)
        for dst in range(self.group_size):
            self._signal_broken(dst, self.rank, kind, epoch)
        self.check(op)
