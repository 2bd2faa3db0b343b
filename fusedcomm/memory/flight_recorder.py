"""The last calls of this rank: arguments, progress and outcome. `dumps` writes them down."""

from __future__ import annotations

import copy
import time
from collections import deque
from types import TracebackType
from typing import Any

import torch

from fusedcomm.kernels.native_part import native
from fusedcomm.memory.errors import text_of
from fusedcomm.memory.workspace import Workspace
from fusedcomm.plan.geometry.exchange import Exchange

NUM_CALLS = 256
VOTING, CHECKING, RUNNING = "voting", "checking", "running"  # collective states of a call, in this order
DONE, FAILED = "done", "failed"  # a call on a GPU is done once its kernels are launched

_ring: deque[Record] = deque(maxlen=NUM_CALLS)


class Record:
    """A context around one call: of an op, or of `fusedcomm.reset` or `close`, which have no ``exchange``.

    Every call is recorded, as that only sets some attributes. A Record holds no tensors, and a workspace only while the
    call runs.
    """

    # These are defaults, and an instance sets only its changes. Calls are counted per group and device since the last
    # reset or close. These are number 0, and so is a first call that still votes.
    number = 0
    resets = 0
    ranks: tuple[int, ...] = ()  # the group's ranks in WORLD
    algorithm: str | None = None
    state = VOTING
    workspace: Workspace | None = None
    rounds: tuple[int, int] | None = None  # rounds completed before and after the call
    error: str | None = None
    peers: tuple[int, ...] = ()  # ranks of the group that the error names
    ended: float | None = None

    def __init__(
        self,
        op: str,
        group_name: str,
        device: torch.device,
        exchange: Exchange | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.op, self.group_name, self.device, self.exchange, self.dtype = op, group_name, device, exchange, dtype
        self.started = time.monotonic()

    @property
    def arguments(self) -> dict[str, Any]:
        """The op's arguments, as JSON; dims count from the front."""
        if self.exchange is None:
            return {}
        found: dict[str, Any] = {}
        for name, value in self.exchange.arguments.items():
            if name in ("x", "w", "ws"):
                found["w shapes" if name == "ws" else f"{name} shape"] = _as_list(value)
            elif name.endswith("_dim"):
                found[name] = value % len(self.exchange.shape)
            elif name != "group_size":
                found[name] = _as_list(value)
        return found

    @property
    def dtype_name(self) -> str | None:
        return None if self.dtype is None else str(self.dtype).removeprefix("torch.")

    def kind(self) -> Record:
        """The fields that all calls of this kind share."""
        found = Record(self.op, self.group_name, self.device, self.exchange, self.dtype)
        found.ranks, found.algorithm, found.state = self.ranks, self.algorithm, RUNNING
        return found

    def __enter__(self) -> Record:
        _ring.append(self)
        return self

    def runs_on(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.rounds = workspace.epoch, workspace.epoch

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.ended = time.monotonic()
        if self.workspace is not None and self.rounds is not None:
            self.rounds = self.rounds[0], self.workspace.epoch
            self.workspace = None
        if error is None:
            self.state = DONE
            return
        self.state = FAILED
        self.error = text_of(error)
        self.peers = tuple(getattr(error, "peers", ()))


def last() -> list[Record]:
    """The records, oldest first."""
    return sorted([*_ring, *_prepared()], key=lambda record: record.started)[-NUM_CALLS:]


def forget() -> None:
    """Drop all records."""
    _ring.clear()
    if native is not None:
        native.forget_recorded_calls()


def _prepared() -> list[Record]:
    """Records of calls that ran without Python."""
    found = []
    for kind, workspace, number, resets, before, after, started, ended, error, peers in (
        [] if native is None else native.recorded_calls()
    ):
        record = copy.copy(kind)
        record.number, record.resets, record.started, record.ended = number, resets, started, ended
        record.workspace, record.peers, record.error = workspace, tuple(peers), error or None
        if record.algorithm != "unfused":
            record.rounds = before, after if workspace is None else workspace.epoch
        if ended is not None:
            record.state = FAILED if error else DONE
        found.append(record)
    return found


def _as_list(value: Any) -> Any:
    """Tuples as lists: compared with peers' arguments, which come as JSON."""
    return [*map(_as_list, value)] if isinstance(value, tuple | list) else value
