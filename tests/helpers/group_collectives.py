"""The collectives that `pipelined` begins, seen from outside, and moved as early or as late as a backend may."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch import Tensor

from fusedcomm.plan.chunk_matmul import GatheredMatmul, PushedMatmul
from fusedcomm.plan.cost import in_pieces as cost_in_pieces
from fusedcomm.run import pieces

AS_IT_IS, EARLY, LATE = "as-it-is", "early", "late"


@dataclass
class Begun:
    """What this rank has done in one call, in order, and what it has given to collectives."""

    events: list[str] = field(default_factory=list)  # "begin", "wait", "matmul"
    bytes_to_a_peer: list[int] = field(default_factory=list)  # by collective
    sent_bytes: int = 0  # to all peers
    group_size: int = 0
    sums: int = 0  # collectives in which the backend adds


@contextmanager
def moved(when: str) -> Iterator[Begun]:
    """Every collective moves its elements in its begin, or in its wait, or when the backend does."""
    begun = Begun()
    exchange, scatter, gather, wait_tensor = (
        pieces.dist.all_to_all_single,
        pieces.dist.reduce_scatter_tensor,
        pieces._c10d.all_gather_into_tensor_out,
        pieces._c10d.wait_tensor,
    )
    waits: dict[int, list[Callable[[], object]]] = defaultdict(list)

    def begin(start: Callable[[], Callable[[], object]]) -> Callable[[], object]:
        begun.events.append("begin")
        wait = start() if when != LATE else lambda: start()()
        if when == EARLY:
            wait()

        def ended() -> None:
            begun.events.append("wait")
            if when != EARLY:
                wait()

        return ended

    def all_to_all(received: Tensor, sent: Tensor, group: Any, async_op: bool) -> Any:
        assert async_op and received.shape == sent.shape and sent.is_contiguous() and received.is_contiguous()
        begun.group_size = group.size()
        _count(begun, sent.nbytes // group.size(), group.size())
        return mock.Mock(wait=begin(lambda: exchange(received, sent, group=group, async_op=True).wait))

    def reduce_scatter(received: Tensor, sent: Tensor, group: Any, async_op: bool) -> Any:
        assert async_op and received.numel() * group.size() == sent.numel() and sent.is_contiguous()
        begun.sums += 1
        _count(begun, received.nbytes, group.size())
        return mock.Mock(wait=begin(lambda: scatter(received, sent, group=group, async_op=True).wait))

    def all_gather(sent: Tensor, group_size: int, group_name: str, out: Tensor) -> Tensor:
        assert out.numel() == group_size * sent.numel() and sent.is_contiguous() and out.is_contiguous()
        _count(begun, sent.nbytes, group_size)

        def start() -> Callable[[], object]:
            gather(sent, group_size, group_name, out=out)
            return lambda: wait_tensor(out)

        waits[out.data_ptr()].append(begin(start))
        return out

    functions = mock.Mock(all_gather_into_tensor_out=all_gather, wait_tensor=lambda out: waits[out.data_ptr()].pop(0)())
    with (
        mock.patch.object(pieces.dist, "all_to_all_single", all_to_all),
        mock.patch.object(pieces.dist, "reduce_scatter_tensor", reduce_scatter),
        mock.patch.object(pieces, "_c10d", functions),
        _logged(PushedMatmul, "_multiply", begun),
        _logged(GatheredMatmul, "chunk", begun),
        _logged(GatheredMatmul, "round", begun),
    ):
        yield begun


def _count(begun: Begun, to_a_peer: int, group_size: int) -> None:
    begun.bytes_to_a_peer.append(to_a_peer)
    begun.sent_bytes += (group_size - 1) * to_a_peer


def _logged(cls: type, name: str, begun: Begun) -> Any:
    method = getattr(cls, name)

    def logged(self: Any, *args: Any) -> Any:
        begun.events.append("matmul")
        return method(self, *args)

    return mock.patch.object(cls, name, logged)


def in_pieces(num_pieces: int) -> Any:
    """Calls that are forced to `pipelined` are cut into so many pieces, if rows are as many."""
    return mock.patch.object(cost_in_pieces, "fastest", lambda *call: (num_pieces, 0.0))


@contextmanager
def one_buffer() -> Iterator[None]:
    """What all pieces send and receive lies in one place: a defect."""
    with mock.patch.object(pieces.itertools, "cycle", lambda turns: [turns[0]] * 1000):
        yield
