"""The collectives that `pipelined` begins, seen from outside, and moved as early or as late as a backend may."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from unittest import mock

from torch import Tensor

from fusedcomm.memory.group import find
from fusedcomm.plan import pipelined
from fusedcomm.plan.cost import in_pieces as cost_in_pieces
from fusedcomm.run import python_executor
from tests.helpers.spies import drop_plans

AS_IT_IS, EARLY, LATE = "as-it-is", "early", "late"


@dataclass
class Begun:
    """What this rank has done in one call, in order, and what it has given to collectives."""

    events: list[str] = field(default_factory=list)  # "begin", "wait", "matmul"
    bytes_to_a_peer: list[int] = field(default_factory=list)  # by collective
    sent_bytes: int = 0  # to all peers
    sums: int = 0  # collectives in which the backend adds


@contextmanager
def moved(when: str) -> Iterator[Begun]:
    """Every collective moves its elements in its begin, or in its wait, or when the backend does."""
    begun = Begun()
    begin, multiply = python_executor.begin, python_executor.multiply

    def counted(kind: str, group_name: str, received: Tensor, sent: Tensor) -> Callable[[], object]:
        size, numels = find(group_name).size(), (received.numel(), sent.numel())
        assert numels[0] * {"reduce_scatter": size, "all_gather": 1 / size}.get(kind, 1) == numels[1]
        assert sent.is_contiguous() and received.is_contiguous()
        begun.events.append("begin")
        begun.sums += kind == "reduce_scatter"
        begun.bytes_to_a_peer.append(sent.nbytes // (1 if kind == "all_gather" else size))
        begun.sent_bytes += (size - 1) * begun.bytes_to_a_peer[-1]
        start = partial(begin, kind, group_name, received, sent)
        wait = start() if when != LATE else lambda: start()()
        if when == EARLY:
            wait()

        def ended() -> None:
            begun.events.append("wait")
            if when != EARLY:
                wait()

        return ended

    def logged(*args: Any, **options: Any) -> None:
        begun.events.append("matmul")
        multiply(*args, **options)

    with mock.patch.object(python_executor, "begin", counted), mock.patch.object(python_executor, "multiply", logged):
        yield begun


@contextmanager
def in_pieces(num_pieces: int) -> Iterator[None]:
    """Calls that are forced to `pipelined` are cut into so many pieces, if rows are as many."""
    drop_plans()
    with mock.patch.object(cost_in_pieces, "fastest", lambda *call: (num_pieces, 0.0)):
        yield
    drop_plans()


def one_buffer() -> Any:
    """All pieces send from and receive in one place: a defect."""
    return mock.patch.object(pipelined, "Buffers", cache(pipelined.Buffers))
