"""A planned call: its algorithm and why, and its schedule, once its memory is there."""

import zlib
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from fusedcomm import env
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.plan.schedule import Schedule

CALL, GRAPH = "call", "graph"  # what an op stands for: see `wire_facts`
_PLAN_BYTES = 4 << 10  # of a plan without a schedule, and of the key that finds it
STEP_BYTES = 2 << 10  # of a schedule; as much again of one that is loaded natively, with the views that it keeps


@dataclass(repr=False)
class Plan:
    """How a call will run, as `explain` returns it. It is equal on all ranks. Its text, in a REPL too, is one line.

    Attributes:
        op: the name of the op.
        algorithm: "unfused", "chunked", "fused" or "pipelined".
        reason: a rule that excludes the others, an override, or the estimated times and the source of their numbers.
        slot_bytes: bytes of a workspace slot that one round of the call needs; 0 where it needs no workspace.
        num_rounds: rounds of the call, each small enough for a slot, or hidden behind the matmul of another: the
            pieces of a pipelined call; 0 where it runs unfused.
        sent_bytes: bytes that each rank sends to the others in a pipelined call; 0 in others.
        has_workspace: whether the algorithm needs symmetric memory: chunked or fused.
        backend_sums: whether the backend adds, in its own order and precision.
        fingerprint: 24 bits that calls of equal wires share; 0 where nothing compares them.
        exchange: the shapes and spans of the payload.
        schedule: the steps of a call that has run, None of one that has not, or runs unfused. It is this rank's own.
        made_for: the facts of memory and device that the schedule was made for.
        num_bytes: bytes that the plan takes, an estimate.
    """

    op: str
    algorithm: str
    reason: str
    slot_bytes: int = 0  # for one round
    num_rounds: int = 0
    sent_bytes: int = 0
    backend_sums: bool = False
    fingerprint: int = 0
    exchange: Exchange | None = field(default=None, compare=False)
    schedule: Schedule | None = field(default=None, compare=False)
    made_for: Hashable = field(default=None, compare=False)

    @property
    def has_workspace(self) -> bool:
        return self.algorithm in env.WITH_WORKSPACE

    @property
    def num_bytes(self) -> int:
        return _PLAN_BYTES + (0 if self.schedule is None else len(self.schedule.steps) * STEP_BYTES)

    def __repr__(self) -> str:
        rounds = f", {self.num_rounds} rounds" if self.num_rounds > 1 else ""
        if self.algorithm == "pipelined":
            rounds = f", {self.num_rounds} pieces, {self.sent_bytes / (1 << 20):.3g} MiB sent"
        return f"{self.op}: {self.algorithm}{rounds} ({self.reason})"


def fingerprint_of(*facts: Any) -> int:
    """24 bits, never 0, equal on ranks whose calls have one wire."""
    return zlib.crc32(repr(facts).encode()) & 0xFFFFFF or 1


def wire_facts(wire: str, exchange: Exchange, num_rounds: int) -> tuple[Any, ...]:
    """The facts that ranks must share. None of them is the matmul's.

    `CALL`: payloads, as their calls have them. `GRAPH`: chunks alone, where ops stand for one collective of a program,
    and each has the dims of what stands beside it. Other texts have the digest of what all ranks changed together.
    """
    return (wire, *(exchange.payload if wire == CALL else graph_facts(exchange, num_rounds)), num_rounds)


def graph_facts(exchange: Exchange, num_rounds: int) -> tuple[Any, ...]:
    return exchange.chunk_facts(with_dims=num_rounds > 1)
