"""The parts of a state of the model."""

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

W = TypeVar("W")

RUNNING, DEAD, RAISED = 0, 1, 2  # RAISED: a reset has raised an error
Stamp = tuple[int, ...]  # words: data (segment, epoch, op), a flag (epoch, op), or () in new memory


class Rank(NamedTuple):
    sent: int = 0  # steps of its send program that are done
    received: int = 0
    failed: bool = False  # whether a wait of this round has failed
    wrong: bool = False  # whether what it has read in this round is wrong
    error: bool = False  # whether a failure is on record, which the next check on the host raises
    breaking: int = 0  # 1 + the rank to tell next that this one has given up; 0 if none
    gave_up: tuple[int, int] = (0, 0)  # the (segment, epoch) that it has given up in
    leaving: bool = False  # whether an exception makes it leave its call
    ended: bool = False  # whether its program ends, or has ended
    arrived: int = 0  # resets that its host has come to
    status: int = RUNNING


class State(NamedTuple):
    """The words of all segments, by ``ProtocolModel._cell`` and ``_broken``. ``broken`` holds epoch + 1, or 0."""

    ranks: tuple[Rank, ...]
    data: tuple[Stamp, ...]
    flags: tuple[Stamp, ...]
    broken: tuple[int, ...]


Moves = Iterator[tuple[str, State]]


def put(state: State, r: int, rank: Rank) -> State:
    return state._replace(ranks=(*state.ranks[:r], rank, *state.ranks[r + 1 :]))


def sent(state: State, r: int) -> State:
    return put(state, r, state.ranks[r]._replace(sent=state.ranks[r].sent + 1))


def received(state: State, r: int, **changed: bool) -> State:
    rank = state.ranks[r]
    return put(state, r, rank._replace(received=rank.received + 1, **changed))


def with_word(words: tuple[W, ...], at: int, value: W) -> tuple[W, ...]:
    return (*words[:at], value, *words[at + 1 :])
