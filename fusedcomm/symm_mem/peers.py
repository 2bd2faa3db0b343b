"""Shared by the kernels: the memory of all ranks behind a tensor, bounded barriers, a workspace, and calls that ranks
compare in symmetric memory before the first signal of one.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed import ProcessGroup

from fusedcomm import env
from fusedcomm.memory import group as groups
from fusedcomm.memory.outside_modes import outside_modes
from fusedcomm.ops.call_check import same_arguments
from fusedcomm.run.add_in_order import add_in_order

_PAGE = 4096  # bytes of a call as JSON
_meetings: WeakKeyDictionary[ProcessGroup, _Meeting] = WeakKeyDictionary()
_workspaces: WeakKeyDictionary[ProcessGroup, Tensor] = WeakKeyDictionary()
_failed: dict[int, Any] = {}  # handles by the address of their signals; kept, so that no other gets that address


def timeout_ms() -> int:
    return max(1, int(env.timeout_s() * 1e3))  # 0 would be no bound


class _Meeting:
    """Two pages of each rank, used by turns, and a flag for memory that a rank has given up.

    A rank rewrites a page behind the barrier of the next call: all peers have read it by then.
    """

    @outside_modes()
    def __init__(self, group_name: str) -> None:
        cpu, size = torch.device("cpu"), 2 * _PAGE + 8
        self._segment = _SymmetricMemory.empty_strided_p2p((size,), [1], torch.uint8, cpu, group_name).zero_()
        self._handle = _SymmetricMemory.rendezvous(self._segment, group_name)
        self._calls = 0

    @property
    def is_broken(self) -> bool:
        return ctypes.string_at(self._segment.data_ptr() + 2 * _PAGE, 1) != b"\0"

    def exchange(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's ``call``, by rank."""
        start = self._calls % 2 * _PAGE
        text = json.dumps(call).encode().ljust(_PAGE)
        assert len(text) == _PAGE, f"a call of {len(text)} bytes"
        ctypes.memmove(self._segment.data_ptr() + start, text, _PAGE)
        try:
            self._handle.barrier(timeout_ms=timeout_ms())
        except BaseException:
            for address in self._handle.buffer_ptrs:
                ctypes.memset(address + 2 * _PAGE, 1, 1)
            raise
        self._calls += 1
        return [json.loads(ctypes.string_at(address + start, _PAGE)) for address in self._handle.buffer_ptrs]


@contextmanager
def same_call(op: str, group_name: str, **arguments: Any) -> Iterator[None]:
    """Barrier: all ranks enter with equal arguments, or all raise. Local checks run inside the block.

    Raises ValueError if a rank did in its block, and PeerMismatchError if arguments differ; nothing is sent then.
    """
    pg, facts = groups.find(group_name), {key: _facts(value) for key, value in arguments.items()}
    groups.refuse_forked(f"torch.ops.symm_mem.{op}", pg.rank())

    def vote(call: dict[str, Any]) -> list[dict[str, Any]]:
        return [call] if pg.size() == 1 else _exchange(op, pg, call)

    with same_arguments(f"torch.ops.symm_mem.{op}", group_name, pg.rank(), vote, facts):
        yield


def _exchange(op: str, pg: ProcessGroup, call: dict[str, Any]) -> list[dict[str, Any]]:
    meeting = _meetings.get(pg)
    if meeting is None or meeting.is_broken:
        meeting = _meetings[pg] = _Meeting(pg.group_name)
    try:
        return meeting.exchange(call)
    except RuntimeError as error:
        raise RuntimeError(f"torch.ops.symm_mem.{op}: {error}") from None


def _facts(value: Any) -> Any:
    """The JSON form of a value; a tensor's offset is compared in symmetric memory alone."""
    if isinstance(value, Tensor):
        place = [value.storage_offset() * value.itemsize] if is_symmetric(value) else []
        return [str(value.dtype).removeprefix("torch."), list(value.shape), *place]
    return value


def is_symmetric(t: Tensor) -> bool:
    return bool(_SymmetricMemory.is_symm_mem_tensor(t)) if hasattr(_SymmetricMemory, "is_symm_mem_tensor") else True


@outside_modes()
def workspace(group_name: str, min_size: int) -> Any:
    """The handle of the group's uint8 workspace in CPU memory. Making or growing it is a collective."""
    pg = groups.find(group_name)
    groups.refuse_forked("symmetric memory", pg.rank())
    if pg not in _workspaces or _workspaces[pg].numel() < min_size:
        cpu = torch.device("cpu")
        _workspaces[pg] = _SymmetricMemory.empty_strided_p2p((min_size,), [1], torch.uint8, cpu, group_name)
    return _SymmetricMemory.rendezvous(_workspaces[pg], group_name)


class Peers:
    """One tensor per rank, at the same offset of every rank's segment.

    The barriers use channel 0 of the segment's signal pad, as torch's kernels do on CUDA.
    """

    @outside_modes()
    def __init__(self, op: str, handle: Any, offset_bytes: int, like: Tensor) -> None:
        self.op = op
        self.handle = handle
        self.rank: int = handle.rank
        if self._signals in _failed:  # the ranks may have left that call at different barriers
            raise RuntimeError(f"torch.ops.symm_mem.{op}: a wait here has failed; allocate it again on all ranks")
        offset = offset_bytes // like.itemsize if like.numel() else 0  # nothing has no address
        ranks = range(handle.world_size)
        self.tensors: list[Tensor] = [handle.get_buffer(r, like.shape, like.dtype, offset) for r in ranks]

    @classmethod
    def of(cls, op: str, name: str, t: Tensor, group_name: str) -> Peers:
        """The peers of a tensor in symmetric memory."""
        handle = _SymmetricMemory.rendezvous(t, group_name)
        if handle is None:
            raise ValueError(
                f"torch.ops.symm_mem.{op}: {name} must be made by torch.distributed._symmetric_memory.empty, "
                "got another tensor"
            )
        return cls(op, handle, t.data_ptr() - handle.buffer_ptrs[handle.rank], t)

    @classmethod
    def with_copy(cls, op: str, t: Tensor, group_name: str) -> Peers:
        """The peers of a copy of ``t`` in the group's workspace."""
        peers = cls(op, workspace(group_name, t.nbytes), 0, t)
        peers.tensors[peers.rank].copy_(t)
        return peers

    def barrier(self) -> None:
        try:
            self.handle.barrier(timeout_ms=timeout_ms())
        except RuntimeError as error:
            _failed[self._signals] = self.handle
            others = "all ranks made this call: one has stopped in it, or its tensor lies in another allocation"
            raise RuntimeError(f"torch.ops.symm_mem.{self.op}: {error}; {others}") from None

    @property
    def _signals(self) -> int:
        return int(self.handle.signal_pad_ptrs[self.rank])

    def part(self, dim: int) -> list[Tensor]:
        """The part of every rank's tensor that this rank reduces."""
        return [t.tensor_split(len(self.tensors), dim)[self.rank] for t in self.tensors]


def total(parts: list[Tensor], divisor: int = 1) -> Tensor:
    """The sum in rank order, in float32 and rounded once. ``divisor`` is 1, or the number of parts for the average."""
    out = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    add_in_order(out.view(-1), [part.reshape(-1) for part in parts], None, 1 / divisor)
    return out
