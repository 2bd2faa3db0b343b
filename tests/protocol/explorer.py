"""All states that a model can reach, breadth first, so that the trace to a violation is a shortest one."""

import gc
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

S = TypeVar("S", bound=Hashable)


class Violation(Exception):
    """A named check that a step of the model has failed."""


class Model(Protocol[S]):
    def initial(self) -> S: ...

    def moves(self, state: S) -> tuple[Iterable[tuple[str, S]], Iterable[tuple[str, S]]]:
        """(what the ranks do by themselves, faults), each with its label. Raises Violation."""

    def finished(self, state: S) -> bool:
        """Whether nobody has anything left to do."""


@dataclass(frozen=True)
class Outcome:
    """``violation``: the name of the first check that failed and what it saw, after ``trace``; None if none did."""

    states: int
    violation: str | None
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        steps = "".join(f"\n    {i + 1:3} {label}" for i, label in enumerate(self.trace))
        return f"{self.states} states, {self.violation or 'no violation'}{steps}"


def explore(model: Model[S], max_states: int = 2_000_000) -> Outcome:
    """All states. Every step takes its rank forward: there are no cycles, and a rank that can move comes to an end."""
    was_enabled = gc.isenabled()
    gc.disable()  # states refer to no state: looking for cycles among them takes a third of the time
    try:
        return _explore(model, max_states)
    finally:
        if was_enabled:
            gc.enable()


def _explore(model: Model[S], max_states: int) -> Outcome:
    first = model.initial()
    came_from: dict[S, tuple[S, str] | None] = {first: None}
    pending, has_ended = deque([first]), False
    while pending:
        state = pending.popleft()
        try:
            own, faults = model.moves(state)
            own = list(own)
            # A fault need not come, so it must not be what ends a wait.
            if not own and not model.finished(state):
                raise Violation("deadlock: every rank waits")
            has_ended |= not own
        except Violation as violation:
            return Outcome(len(came_from), str(violation), _trace(came_from, state))
        for label, after in (*own, *faults):
            if after not in came_from:
                came_from[after] = (state, label)
                pending.append(after)
        if len(came_from) > max_states:
            raise RuntimeError(f"the model must have at most {max_states} states: take fewer rounds or ranks")
    assert has_ended, "a step must lead to another state"
    return Outcome(len(came_from), None)


def _trace(came_from: dict[S, tuple[S, str] | None], state: S) -> tuple[str, ...]:
    labels = []
    while (step := came_from[state]) is not None:
        state, label = step
        labels.append(label)
    return tuple(reversed(labels))
