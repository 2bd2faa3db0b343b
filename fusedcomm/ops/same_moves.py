"""Graphs that ranks changed together are compared again wherever no compilation did so: from a cache, or for new sizes.

Ranks have agreed to move the same collectives: ops now run on peers' tensors, valid only if all ranks run the same ops.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fusedcomm import env
from fusedcomm.memory import consent, dumps, flight_recorder, group
from fusedcomm.memory.consent import ABSENT, YES
from fusedcomm.memory.errors import PeerMismatchError, PeerTimeoutError
from fusedcomm.ops.library import lib

OP = "same_moves"
_WHAT = "the program whose collectives were moved, merged or reordered"

lib.define(f"{OP}(str digest, SymInt[] sizes, str device_type, int group_size, str group_name) -> Tensor")


@torch.library.impl(lib, OP, "CompositeExplicitAutograd")
def same_moves(digest: str, sizes: Sequence[int], device_type: str, group_size: int, group_name: str) -> Tensor:
    """An empty tensor, once all ranks have the same digest and sizes. Their first call is a bounded collective."""
    pg = group.check_size(group_size, group_name)
    ours = consent.of(pg)
    text = " ".join([digest, *map(str, sizes)])
    if ours is not None and text not in ours.agreed:
        _ask(text, torch.device(device_type), pg, ours)
    return torch.empty(0, device=device_type)


@torch.library.register_fake(f"fusedcomm::{OP}", lib=lib)
def _(digest: str, sizes: Sequence[int], device_type: str, group_size: int, group_name: str) -> Tensor:
    return torch.empty(0, device=device_type)


def _ask(text: str, device: torch.device, pg: dist.ProcessGroup, ours: consent.Consent) -> None:
    with dumps.on_failure(), flight_recorder.Record(OP, pg.group_name, device) as record:
        record.state, record.ranks = flight_recorder.CHECKING, tuple(dist.get_process_group_ranks(pg))
        answer = ours.ask(text, env.timeout_s())
        if answer.kind != YES:
            told = (
                f"{answer}, or one with other sizes, so this rank cannot run a graph of group {pg.group_name!r} in "
                "which collectives were moved, merged or reordered. If it came from a cache, "
                "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 compiles it again"
            )
            if answer.kind == ABSENT:
                raise PeerTimeoutError(told, peers=list(answer.peers), op=OP, epoch=0)
            raise PeerMismatchError(told, peers=list(answer.peers), op=OP, epoch=0, differs=_WHAT)
