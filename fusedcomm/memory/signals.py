"""Rounds without data on a GPU, as launches of small kernels. The first one imports Triton."""

from typing import Protocol

from torch import Tensor

from fusedcomm.kernels.triton.bundles import SegmentLayout

_BLOCK = 1024  # elements a block of finish_kernel's poison; here it has no tensor


class Segments(Protocol):
    """The part of workspace.Workspace that these kernels need. ``segments`` [R]: addresses, on the device."""

    rank: int
    group_size: int
    segments: Tensor
    segment_layout: SegmentLayout


def signal(workspace: Segments, fingerprint: int) -> None:
    """Signal all ranks that this one has come to the next round."""
    from fusedcomm.kernels.triton.handshake import signal_kernel

    rank, size = workspace.rank, workspace.group_size
    last = fingerprint, rank, workspace.segment_layout
    signal_kernel[(1,)](workspace.segments, (rank + 1) % size, size, *last, num_warps=1)


def wait(workspace: Segments, fingerprint: int) -> None:
    """Wait for all ranks' signals, and end the round."""
    from fusedcomm.kernels.triton.handshake import finish_kernel

    last = fingerprint, workspace.rank, workspace.segment_layout, _BLOCK, True
    finish_kernel[(1,)](None, 0, workspace.segments, *last, num_warps=1)
