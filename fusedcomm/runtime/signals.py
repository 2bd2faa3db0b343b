"""Signals and waits as launches of small kernels: for data that are copied or computed elsewhere, and for rounds
without data.

The first of them that is used imports Triton.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from fusedcomm.kernels.triton.bundles import SegmentLayout
from fusedcomm.runtime.launches import Launch, of_kind

_POISON_BLOCK = 1024  # elements that one program makes NaN at a time


class Segments(Protocol):
    """The part of workspace.Workspace that kernels need.

    ``segments`` [R] are addresses, on the device; ``segment`` has the bytes of this rank's.
    """

    rank: int
    group_size: int
    segments: Tensor
    slot_bytes: int
    segment_layout: SegmentLayout

    @property
    def segment(self) -> Tensor: ...

    def num_programs(self, kind: str) -> int: ...


def begin_push(workspace: Segments) -> None:
    """Call this before a round's first copy to a peer on this stream. Kernels that push do the same themselves."""
    from fusedcomm.kernels.triton.handshake import begin_push_kernel

    _launch("begin push", begin_push_kernel, workspace)


def signal(workspace: Segments, dst_rank: int | None, fingerprint: int) -> None:
    """Signal one rank, or all ranks from rank + 1 on, that what the stream wrote before is there."""
    from fusedcomm.kernels.triton.handshake import signal_kernel

    group_size = workspace.group_size
    first = (workspace.rank + 1) % group_size if dst_rank is None else dst_rank
    assert 0 <= first < group_size, f"dst_rank must be in [0, {group_size}), got {dst_rank}"
    _launch("signal", signal_kernel, workspace, first, group_size if dst_rank is None else 1, fingerprint)


def wait_source(src_rank: int, workspace: Segments, fingerprint: int) -> None:
    """Wait for one rank's signal, so that the stream may read its chunk. ``finish`` must follow the reads."""
    from fusedcomm.kernels.triton.handshake import wait_source_kernel

    assert 0 <= src_rank < workspace.group_size, f"src_rank must be in [0, {workspace.group_size}), got {src_rank}"
    _launch("wait source", wait_source_kernel, workspace, src_rank, fingerprint)


def _launch(name: str, kernel: Any, workspace: Segments, *facts: int) -> None:
    """Launch one program, which takes no tensors but the segments."""
    arguments = (workspace.segments, *facts, *_ranks(workspace))

    def plan() -> Launch:
        return Launch(kernel, (1,), lambda: arguments, num_warps=1)

    launch = of_kind(workspace, plan, name, *facts)
    assert launch is not None
    launch()


def wait(workspace: Segments, fingerprint: int) -> None:
    """Wait for all ranks' signals and end a round in which nothing is to be read."""
    _finish(None, workspace, fingerprint, end_round=True)


def finish(out: Tensor, workspace: Segments, fingerprint: int, *, end_round: bool) -> None:
    """Make ``out`` NaN if a wait has failed or the slot was given up. Call this on the stream of a round's reads."""
    assert out.is_contiguous()
    _finish(out, workspace, fingerprint, end_round)


def _finish(out: Tensor | None, workspace: Segments, fingerprint: int, end_round: bool) -> None:
    from fusedcomm.kernels.triton.handshake import finish_kernel

    num, segments, ranks = 0 if out is None else out.numel(), workspace.segments, _ranks(workspace)

    def plan() -> Launch:
        last = segments, fingerprint, *ranks, _POISON_BLOCK, end_round
        return Launch(finish_kernel, (1,), lambda out: (out, num, *last), num_warps=1)

    launch = of_kind(workspace, plan, "finish", fingerprint, end_round, tensors=(out,))
    assert launch is not None
    launch(out)


def _ranks(workspace: Segments) -> tuple[int, SegmentLayout]:
    return workspace.rank, workspace.segment_layout
