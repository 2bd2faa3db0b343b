"""Guard bytes around slots, with FUSEDCOMM_CHECK=1. They reveal a write past one.

    [header | guard | slot 0 | guard | slot 1 | guard]          a segment

Every rank checks the guards of its own segment: on CPU before a call and after each of its rounds, on GPUs before a
call and in `synchronize`. A write past a chunk but inside the slot is not seen.
"""

from functools import cache

import torch
from torch import Tensor

from fusedcomm.memory.outside_modes import outside_modes
from fusedcomm.memory.segment import HeaderLayout

GUARD_BYTES = 4096  # size of one guard
SHOWN_BYTES = 8


def paint(segment: Tensor, layout: HeaderLayout) -> None:
    """Write the guards. This comes before the rendezvous, when nobody else can write there."""
    pattern = _pattern(layout.guard_bytes).to(segment.device)
    for start in layout.guards(layout.slot_bytes(segment.numel())):
        segment[start : start + layout.guard_bytes] = pattern


@outside_modes()
def damage(segment: Tensor, layout: HeaderLayout, slot_bytes: int, rank: int) -> str | None:
    """Describe writes to the guards of ``rank``'s segment; None if there are none.

    On a GPU it waits for the current stream.
    """
    if segment.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    starts = layout.guards(slot_bytes)
    found = torch.stack([segment[start : start + layout.guard_bytes] for start in starts]).cpu()
    wrong = found != _pattern(layout.guard_bytes)
    if not wrong.any():
        return None
    texts = [_place(i, len(starts) - 1, found[i], wrong[i]) for i in range(len(starts)) if wrong[i].any()]
    return f"guard bytes of rank {rank}'s segment must stay as they are, but {'; '.join(texts)}"


def _place(i: int, num_slots: int, found: Tensor, wrong: Tensor) -> str:
    """The changed bytes of guard i, counted from the nearer slot, their probable target."""
    offsets = wrong.nonzero().flatten()
    first, last = int(offsets[0]), int(offsets[-1])
    shown = bytes(found[first : min(last + 1, first + SHOWN_BYTES)].tolist()).hex(" ")
    if i == 0 or (i < num_slots and len(found) - 1 - last < first):
        where = f"{len(found) - first} bytes before slot {i}"
    else:
        where = f"{first} bytes behind slot {i - 1}"
    return f"{len(offsets)} bytes from {where} on are now {shown}"


@cache
@outside_modes()
def _pattern(num_bytes: int) -> Tensor:
    """A guard: no byte is 0 or equals its neighbour."""
    return (torch.arange(num_bytes, device="cpu") * 37 % 251 + 1).to(torch.uint8)
