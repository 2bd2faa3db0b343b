"""Stand-ins for the collectives that `pipelined` begins: NCCL keeps their tensors until they are waited for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import Tensor

from fusedcomm.run import group_collectives
from tests.helpers.schedule.kernel_effects import Group
from tests.helpers.schedule.streams import Event, Streams

NUM_PIECES = 4
Begin = Callable[[str, str, Tensor, Tensor], Event]  # name, group name, what is sent, what is received


@dataclass(frozen=True)
class PretendedGroup:
    """What an algorithm asks a ProcessGroup."""

    group: Group
    global_rank: int

    @property
    def group_name(self) -> str:
        return self.group.name

    def rank(self) -> int:
        return self.group.ranks.index(self.global_rank)

    def size(self) -> int:
        return len(self.group.ranks)


@contextmanager
def in_place_of_torchs(begin: Begin, streams: Streams, groups: Mapping[str, PretendedGroup]) -> Iterator[None]:
    """The stream that waits is the current one; the host goes on."""
    gathered: dict[int, list[Event]] = defaultdict(list)  # by the address of what is received

    def all_to_all(received: Tensor, sent: Tensor, group: PretendedGroup, async_op: bool) -> Any:
        ended = begin("all_to_all_single", group.group_name, sent, received)
        return mock.Mock(wait=lambda: streams.current.wait_event(ended))

    def all_gather(sent: Tensor, group_size: int, group_name: str, out: Tensor) -> None:
        gathered[out.data_ptr()].append(begin("all_gather_into_tensor", group_name, sent, out))

    def wait_tensor(out: Tensor) -> None:
        streams.current.wait_event(gathered[out.data_ptr()].pop(0))

    functions = mock.Mock(all_gather_into_tensor_out=all_gather, wait_tensor=wait_tensor)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(group_collectives.dist, "all_to_all_single", all_to_all))
        stack.enter_context(mock.patch.object(group_collectives, "_c10d", functions))
        stack.enter_context(mock.patch.object(group_collectives, "find", groups.__getitem__))
        yield
