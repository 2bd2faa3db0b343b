"""Whether Triton can compile and launch a kernel here: a rank signals itself, in memory of its own.

That an import succeeds says little: Triton builds a part of its launcher with the machine's C compiler when it is first
used, and needs Python's headers for that, a folder for its cache, and a driver that takes its code.
"""

import subprocess
from pathlib import Path

import torch
from torch import Tensor

from fusedcomm.memory import signals
from fusedcomm.memory.segment import FINGERPRINT_BITS, HeaderLayout

_FINGERPRINT = 0x70BE
_MOST_LETTERS = 200


class _OwnSegment:
    """The segment of a group of one rank, without slots."""

    rank, group_size = 0, 1

    def __init__(self, device: torch.device) -> None:
        self.layout = HeaderLayout(self.group_size)
        self.segment_layout = self.layout.for_kernels
        self.segment = torch.zeros(self.layout.header_bytes, dtype=torch.uint8, device=device)
        self.segments: Tensor = torch.tensor([self.segment.data_ptr()], dtype=torch.int64, device=device)

    def flag(self, epoch: int) -> int:
        """The word that this rank has signalled; it waits for the kernel."""
        start = self.layout.flag(epoch, self.rank)
        return int(self.segment[start : start + 8].view(torch.int64))


def cannot_launch(device: torch.device) -> str | None:
    """Why Triton cannot run a kernel on ``device``, or None if one has just run."""
    try:
        own = _OwnSegment(device)
        signals.signal(own, _FINGERPRINT)
        flag = own.flag(1)
    except subprocess.CalledProcessError as error:  # its message is on stderr
        compiler = Path(str(error.cmd[0])).name
        return f"Triton cannot build its launcher: {compiler} ended with {error.returncode}; it needs Python.h"
    except Exception as error:  # no compiler, no folder for the cache, an old driver: the ranks run unfused together
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"Triton cannot run a kernel ({text[:_MOST_LETTERS]})"
    if flag != 1 << FINGERPRINT_BITS | _FINGERPRINT:
        return f"Triton cannot run a kernel (a signal of {_FINGERPRINT:#x} was {flag:#x})"
    return None
