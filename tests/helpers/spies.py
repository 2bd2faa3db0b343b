"""What a program dispatches, sends and keeps, seen from outside the ops."""

import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusedcomm.memory import members
from fusedcomm.parallel.gradient_when_read import WhenRead
from fusedcomm.plan.schedule import Base, Signal
from fusedcomm.run import python_executor

MATMULS = ("mm", "addmm", "bmm", "baddbmm")
OUTER = {DTensor, WhenRead}
SEND_NOTHING = ("wait_tensor", "_wrap_tensor_autograd")


class Dispatched(TorchDispatchMode):
    """Every op that is called inside, by name; what the ops of fusedcomm call themselves is below it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if OUTER.intersection(types):  # its own dispatch comes first, then what that calls comes here
            return NotImplemented
        self.calls.append((func.name().partition(".")[0], args))
        return func(*args, **(kwargs or {}))

    def names(self, namespace: str) -> list[str]:
        """The names, without waits and the like."""
        names = [name.split("::") for name, _ in self.calls]
        return [name for space, name in names if space == namespace and name not in SEND_NOTHING]

    def arguments(self, name: str) -> tuple[Any, ...]:
        (args,) = [args for called, args in self.calls if called == name]
        return args

    def matmuls(self) -> int:
        return sum(name in MATMULS for name in self.names("aten"))

    def collective_bytes(self, group_size: int) -> float:
        """Bytes that this rank sends to others in plain collectives, if each sends as little as it can."""
        sent = 0.0
        for name, args in self.calls:
            if not name.startswith("_c10d_functional::") or name.endswith(SEND_NOTHING):
                continue
            share = {
                "all_to_all_single": (group_size - 1) / group_size,
                "all_gather_into_tensor": group_size - 1,
                "reduce_scatter_tensor": (group_size - 1) / group_size,
                "all_reduce": 2 * (group_size - 1) / group_size,
            }[name.split("::")[1].removesuffix("_out")]
            sent += args[0].nbytes * share
        return sent


@dataclass
class Pushed:
    """Chunks that `chunked` has written to peers: (dst_rank, bytes)."""

    chunks: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.chunks)


SENTINEL = 0xA7  # in every byte: what no test sends


@contextmanager
def pushed() -> Iterator[Pushed]:
    """Slots are filled with a sentinel before they are written: what differs at the signal was sent."""
    seen, step = Pushed(), python_executor.Execution.step
    written: dict[int, list[Tensor]] = defaultdict(list)  # by dst_rank, in this round

    def spying(self: python_executor.Execution, work: Any, stream: Any) -> None:
        to = getattr(work, "out", None) or getattr(work, "to", None)
        if to is not None and to.base == Base.SLOT and to.number != self.workspace.rank:
            written[to.number].append(self.tensor(to))
            written[to.number][-1].view(torch.uint8).fill_(SENTINEL)
        if isinstance(work, Signal):
            parts = [t.reshape(-1) for t in written.pop(work.dst_rank, [])]
            unsent = sum(
                int((t.view(torch.uint8).view(-1, t.itemsize) == SENTINEL).all(1).sum()) * t.itemsize for t in parts
            )
            seen.chunks.append((work.dst_rank, sum(t.nbytes for t in parts) - unsent))
        step(self, work, stream)

    with mock.patch.object(python_executor.Execution, "step", spying):
        drop_plans()
        yield seen
    drop_plans()


def drop_plans() -> None:
    """Let the next calls of all groups run in Python."""
    for each in members.all_members():
        each.prepare_anew()


@contextmanager
def saved_for_backward() -> Iterator[list[Tensor]]:
    saved: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        yield saved


@contextmanager
def logged(level: int = logging.NOTSET) -> Iterator[list[str]]:
    messages, handler = list[str](), logging.Handler(level)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fusedcomm").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("fusedcomm").removeHandler(handler)


@contextmanager
def first_arguments(owner: Any, name: str) -> Iterator[list[Any]]:
    found, run = list[Any](), getattr(owner, name)

    def spied(first: Any, *args: Any, **options: Any) -> Any:
        found.append(first)
        return run(first, *args, **options)

    with mock.patch.object(owner, name, spied):
        yield found
