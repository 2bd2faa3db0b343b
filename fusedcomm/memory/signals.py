"""Rounds without data on a GPU, as launches of small kernels. The first one imports Triton.

``workspace``: a Workspace, or a stand-in with its rank, group_size, segments and segment_layout.
"""

from typing import Any

_BLOCK = 1024  # elements a block of finish_kernel's poison; here it has no tensor


def signal(workspace: Any, fingerprint: int) -> None:
    """Signal all ranks that this one has come to the next round."""
    from fusedcomm.kernels.triton.handshake import signal_kernel

    rank, size = workspace.rank, workspace.group_size
    last = fingerprint, rank, workspace.segment_layout
    signal_kernel[(1,)](workspace.segments, (rank + 1) % size, size, *last, num_warps=1)


def wait(workspace: Any, fingerprint: int) -> None:
    """Wait for all ranks' signals, and end the round."""
    from fusedcomm.kernels.triton.handshake import finish_kernel

    last = fingerprint, workspace.rank, workspace.segment_layout, _BLOCK, True
    finish_kernel[(1,)](None, 0, workspace.segments, *last, num_warps=1)
