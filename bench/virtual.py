"""R ranks in one process on one device, each with a stream of its own: for tests and benches that have one GPU."""

import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fusedcomm.memory.beside_kernels import beside_kernels
from fusedcomm.memory.segment import FINGERPRINT_BITS, NUM_SLOTS
from fusedcomm.memory.workspace import Workspace
from fusedcomm.ops.call_arguments import Arguments
from fusedcomm.ops.dispatch import kind_of
from fusedcomm.ops.table import OPS
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.plan.planner import Plan
from fusedcomm.run import calls


class VirtualGroup:
    """Workspaces of R virtual ranks over plain memory. The SMs are divided, so that all ranks' kernels are co-resident.

    On CUDA, the driver's work at a first use (load a kernel, make memory) can wait for running kernels. If one of them
    waits for a later launch, nobody goes on: ``load`` every call before its first ``run``. For the same reason no two
    ranks' streams may share a hardware queue: set CUDA_DEVICE_MAX_CONNECTIONS to 32 before CUDA starts.
    """

    def __init__(self, group_size: int, slot_bytes: int, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"
        if self.cuda and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        size = Workspace.num_bytes(group_size, slot_bytes)
        with self._on_device():
            segments = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(group_size)]
            self.workspaces = [Workspace(rank, segments, f"virtual {group_size}") for rank in range(group_size)]
            self.streams: list[torch.cuda.Stream | None] = [None] * group_size
            for rank, workspace in enumerate(self.workspaces):
                workspace.lane = rank  # ranks of one device must not be put into one order
                workspace.share_gpu(group_size)
                if self.cuda:
                    self.streams[rank] = _stream(self.device, rank)
                    self._warm_up(workspace)
        self._clear()

    def run(self, fn: Callable[..., Any], *args_by_rank: list[Any]) -> list[Any]:
        """``fn(workspace, *args of the rank)`` for every rank on its stream; the caller's stream waits for all."""
        with self._on_device():
            results = []
            for rank, workspace in enumerate(self.workspaces):
                stream = self.streams[rank]
                if stream is not None:
                    stream.wait_stream(torch.cuda.current_stream())
                with self.on_stream(rank):
                    results.append(fn(workspace, *(args[rank] for args in args_by_rank)))
            for stream in self.streams:
                if stream is not None:
                    torch.cuda.current_stream().wait_stream(stream)
        return results

    def load(self, fn: Callable[..., Any], fingerprint: int, *args: Any) -> None:
        """Run ``fn(workspace, *args)`` by one rank after the other; each finds all flags set.

        This loads every kernel as this group's size specialises it, and fills the ranks' memory pools. It leaves
        nothing in the workspaces. On CPUs a call must have one or two rounds.
        """
        self._clear()
        with self._on_device():
            for rank, workspace in enumerate(self.workspaces):
                for epoch in range(1, NUM_SLOTS + 1):
                    _set_flags(workspace, epoch, fingerprint)
                self._synchronize()
                with self.on_stream(rank):
                    fn(workspace, *args)
                if self.device.type != "meta":  # there nothing waits
                    answer_later_rounds(workspace, fingerprint)
                self.check("load")
        self._clear()

    def check(self, op: str) -> None:
        """Wait for the device and raise the error of any rank's wait."""
        self._synchronize()
        for workspace in self.workspaces:
            workspace.check(op)

    def on_stream(self, rank: int) -> AbstractContextManager[Any]:
        stream = self.streams[rank]
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def _on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.cuda else nullcontext()

    def _synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def _clear(self) -> None:
        """Make the workspaces as new: no flags, no data, epoch 0."""
        self._synchronize()
        with self._on_device():
            for workspace in self.workspaces:
                workspace.buffers[workspace.rank].zero_()
                workspace.arm()
                workspace.epoch = 0
        self._synchronize()

    def _warm_up(self, workspace: Workspace) -> None:
        """Give the rank's streams cuBLAS workspaces and memory as large as two slots."""
        for stream in (self.streams[workspace.rank], *workspace.streams):
            with torch.cuda.stream(stream):
                a = torch.ones(16, 16, dtype=torch.bfloat16, device=self.device)
                torch.mm(a, a)
                torch.addmm(a[0], a, a)  # cublasLt has a workspace of its own
                torch.empty(2 * workspace.slot_bytes, dtype=torch.uint8, device=self.device)
        self._synchronize()


@functools.cache
def _stream(device: torch.device, rank: int) -> torch.cuda.Stream:
    """A rank's main stream, the same in all groups, as `Workspace.streams` are.

    A rank's waits are launched before the next rank's sends, and hold up the work behind them in their hardware queue.
    Nobody can choose a stream's queue, but few streams need few: 3 for each rank, and the one of `beside_kernels`, are
    25 for 8 ranks, of 32.
    """
    return torch.cuda.Stream(device)


def answer_later_rounds(workspace: Workspace, fingerprint: int, patience_s: float = 60.0) -> None:
    """Set all flags of each round that the host has launched beyond the slots' first ones, when its slot is read."""
    end = time.monotonic() + patience_s
    for epoch in range(NUM_SLOTS + 1, workspace.epoch + 1):
        while workspace.epoch_on_device() < epoch - NUM_SLOTS:
            if time.monotonic() > end:
                raise RuntimeError(f"round {epoch - NUM_SLOTS} must end within {patience_s:g} s, but has not")
            time.sleep(1e-3)
        with beside_kernels(workspace.device):
            _set_flags(workspace, epoch, fingerprint)


def _set_flags(workspace: Workspace, epoch: int, fingerprint: int) -> None:
    start = workspace.layout.flag(epoch, 0)
    flags = workspace.buffers[workspace.rank][start : start + 8 * workspace.group_size]
    flags.view(torch.int64).fill_(epoch << FINGERPRINT_BITS | fingerprint)


_plans: WeakKeyDictionary[Workspace, dict[Any, Plan]] = WeakKeyDictionary()


def run_op(
    op: str, algorithm: str, exchange: Exchange, workspace: Workspace, args: Arguments, fingerprint: int
) -> list[Tensor]:
    """Run an op on a virtual rank as `fusedcomm.ops.dispatch` does on a real one, behind its votes and its plan."""
    spec, kept = OPS[op], _plans.setdefault(workspace, {})
    key = algorithm, kind_of(spec, args)
    if key not in kept:
        kept[key] = Plan(op, algorithm, "virtual", fingerprint=fingerprint, exchange=exchange)
    return calls.run(kept[key], workspace, spec.program, *spec.operands(args)).returned
