"""Before a graph with moved exchanges first runs, its group's ranks compare what takes part in the moves.

A moved exchange brings the tensors of peers to ops that stand for the peers' own. The result is the program's if these
are the same ops with the same numbers on all ranks, which is known only when all have compiled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore

from fusedcomm.errors import PeerMismatchError
from fusedcomm.ops.library import lib, register_fake
from fusedcomm.runtime import dumps, flight_recorder, group
from fusedcomm.runtime.group_member import Member
from fusedcomm.runtime.members import member
from fusedcomm.runtime.vote import agree

OP = "same_moves"
_WHAT = "the ops that exchanges were moved over"

lib.define(f"{OP}(str digest, SymInt[] sizes, str device_type, int group_size, str group_name) -> Tensor")


@torch.library.impl(lib, OP, "CompositeExplicitAutograd")
def same_moves(digest: str, sizes: Sequence[int], device_type: str, group_size: int, group_name: str) -> Tensor:
    """An empty tensor, once all ranks have the same digest and sizes. Their first call is a bounded collective."""
    pg = group.check_size(group_size, group_name)
    nothing = torch.empty(0, device=device_type)
    if group_size > 1 and dist.get_backend(pg) != "fake":
        ours = member(group_name, nothing.device)
        with ours.lock:
            moves: tuple[str | int, ...] = (digest, *sizes)
            if moves not in ours.same_moves:
                _compare(moves, ours)
                ours.same_moves.add(moves)
    return nothing


@register_fake(OP)
def _(digest: str, sizes: Sequence[int], device_type: str, group_size: int, group_name: str) -> Tensor:
    return torch.empty(0, device=device_type)


def _compare(moves: tuple[str | int, ...], ours: Member) -> None:
    with dumps.on_failure(), flight_recorder.Record(OP, ours.group_name, ours.device) as record:
        record.state, record.ranks, record.resets = flight_recorder.CHECKING, ours.ranks, ours.resets
        store = PrefixStore("moves", ours.store)
        found = agree(store, ours.rank, ours.group_size, {"moves": moves}, what=_WHAT, departures=ours.departures)
        others = [rank for rank, each in enumerate(found) if tuple(each["moves"]) != moves]
        if others:
            raise PeerMismatchError(
                f"exchanges were moved over ops, numbers in them, or sizes that differ on ranks {others} of group "
                f"{ours.group_name!r}: fusedcomm.compile.enable(commute=False) leaves exchanges where they are",
                peers=others,
                op=OP,
                epoch=0,
                differs=_WHAT,
            )
