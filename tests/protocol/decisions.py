"""The decisions of a push's programs: one sender of two programs, and a receiver that posts a result in each round.

The receiver's results lie in two blocks by turns. It reads each once more, as the user does, when the next one has
come; only then may the block be posted again. Each program of the sender looks at the post, decides, stores its part of
the chunk and counts it; the one that completes the chunk marks it, clears the decision and signals. Every step may fall
between any two of the other side, so a post may come before, between or behind the looks of the two programs.

This mirrors kernels/triton/in_place.py, rounds.py and handshake.py (tests/protocol/mirrored.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tests.protocol.explorer import Violation
from tests.protocol.state import with_word

NUM_PROGRAMS, NUM_ROUNDS = 2, 4
POSTED, UNDECIDED, SLOT, RESULT = -1, 0, 1, 2  # a decision for the result is RESULT plus the block


@dataclass(frozen=True)
class DecisionRules:
    """Every default is what the code does."""

    decides_once: bool = True  # the first program decides for all, not each for itself
    exact_epoch: bool = True  # a post of another round is not used
    looks_first: bool = True  # a program decides before its first store, not behind it
    clears: bool = True  # the decision is gone when the chunk is complete
    counts: bool = True  # the program that completes the chunk signals, not the first
    marks_first: bool = True  # the mark comes before the signal
    marks_epoch: bool = True  # a mark is of one round, not for good
    stamps_last: bool = True  # the place of a post comes before its stamp
    in_stream_order: bool = True  # a block is posted again behind the last read of what was there


class State(NamedTuple):
    """``programs``: steps done. ``seen``: what each has decided in this round. Parts and words are epochs, by block or
    slot, and program.
    """

    programs: tuple[int, ...]
    receiver: int
    seen: tuple[int, ...]
    post: tuple[int, int]  # block, stamp
    decision: int
    counted: int
    mark: tuple[int, int]  # by slot
    flag: int
    answer: int  # the receiver's signal
    blocks: tuple[tuple[int, ...], ...]
    slots: tuple[tuple[int, ...], ...]


class DecisionModel:
    def __init__(self, rules: DecisionRules) -> None:
        self.rules = rules
        looks = ("look", "find", "decide")
        order = (*looks, "store") if rules.looks_first else ("store", *looks)
        end = ("mark", "signal") if rules.marks_first else ("signal", "mark")
        self.steps = [(name, e) for e in _rounds() for name in ("begin", *order, "count", *end)]
        self.received = self._receiver()

    def _receiver(self) -> list[tuple[str, int]]:
        """The user reads result e - 1 when e has come, or, out of order, result e - 2."""
        behind = 1 if self.rules.in_stream_order else 2
        post = ("place", "stamp") if self.rules.stamps_last else ("stamp", "place")
        return [(name, e) for e in _rounds() for name in (*post, "answer", "wait", "read", f"use {behind}")]

    def initial(self) -> State:
        parts = ((0,) * NUM_PROGRAMS,) * 2
        return State((0,) * NUM_PROGRAMS, 0, (0,) * NUM_PROGRAMS, (0, 0), UNDECIDED, 0, (0, 0), 0, 0, parts, parts)

    def finished(self, state: State) -> bool:
        return state.receiver == len(self.received) and all(done == len(self.steps) for done in state.programs)

    def moves(self, state: State) -> tuple[list[tuple[str, State]], list[tuple[str, State]]]:
        found = []
        for p, done in enumerate(state.programs):
            if done < len(self.steps):
                name, epoch = self.steps[done]
                after = getattr(self, "_" + name)(state, p, epoch)
                if after is not None:
                    num = after.programs[p] if after.programs[p] != done else done + 1
                    found.append((f"program {p}, round {epoch}: {name}", _at(after, p, num)))
        if state.receiver < len(self.received):
            name, epoch = self.received[state.receiver]
            what, _, behind = name.partition(" ")
            after = self._use(state, epoch - int(behind)) if behind else getattr(self, "_" + what)(state, epoch)
            if after is not None:
                found.append((f"receiver, round {epoch}: {name}", after._replace(receiver=state.receiver + 1)))
        return found, []

    # ---- the sender

    def _begin(self, state: State, p: int, epoch: int) -> State | None:
        """A push begins when the sender's last one has ended, and the receiver has signalled in that round."""
        before = (epoch - 1) * (len(self.steps) // NUM_ROUNDS)
        if state.answer < epoch - 1 or any(done < before for done in state.programs):
            return None
        return state._replace(seen=with_word(state.seen, p, UNDECIDED))

    def _look(self, state: State, p: int, epoch: int) -> State:
        stamp = state.post[1]
        is_posted = stamp == epoch if self.rules.exact_epoch else stamp > 0
        return state._replace(seen=with_word(state.seen, p, POSTED if is_posted else SLOT))

    def _find(self, state: State, p: int, epoch: int) -> State:
        own = RESULT + state.post[0] if state.seen[p] == POSTED else SLOT
        return state._replace(seen=with_word(state.seen, p, own))

    def _decide(self, state: State, p: int, epoch: int) -> State:
        decided = state.decision or state.seen[p]
        seen = decided if self.rules.decides_once else state.seen[p]
        return state._replace(decision=decided, seen=with_word(state.seen, p, seen))

    def _store(self, state: State, p: int, epoch: int) -> State:
        """Without a decision of its own yet, a program would go by what it has seen: the slot."""
        if state.seen[p] >= RESULT:
            return state._replace(blocks=_stored(state.blocks, state.seen[p] - RESULT, p, epoch))
        return state._replace(slots=_stored(state.slots, epoch % 2, p, epoch))

    def _count(self, state: State, p: int, epoch: int) -> State:
        completes = state.counted + 1 == (NUM_PROGRAMS if self.rules.counts else 1)
        after = state._replace(counted=(state.counted + 1) % NUM_PROGRAMS)
        return after if completes else _at(after, p, state.programs[p] + 3)  # no mark and no signal

    def _mark(self, state: State, p: int, epoch: int) -> State:
        decision = UNDECIDED if self.rules.clears else state.decision
        mark = with_word(state.mark, epoch % 2, epoch) if state.seen[p] >= RESULT else state.mark
        return state._replace(decision=decision, mark=mark)

    def _signal(self, state: State, p: int, epoch: int) -> State:
        return state._replace(flag=epoch)

    # ---- the receiver

    def _place(self, state: State, epoch: int) -> State:
        return state._replace(post=(epoch % 2, state.post[1]))

    def _stamp(self, state: State, epoch: int) -> State:
        return state._replace(post=(state.post[0], epoch))

    def _answer(self, state: State, epoch: int) -> State:
        return state._replace(answer=epoch)

    def _wait(self, state: State, epoch: int) -> State | None:
        return state if state.flag >= epoch else None

    def _read(self, state: State, epoch: int) -> State:
        """Copy out of the slot, unless the chunk is in place."""
        mark = state.mark[epoch % 2]
        if mark == epoch if self.rules.marks_epoch else mark > 0:
            parts = state.blocks[epoch % 2]
            if any(part != epoch for part in parts):
                raise Violation(f"wrong data in place: {parts} in round {epoch}")
            return state
        parts = state.slots[epoch % 2]
        if any(part != epoch for part in parts):
            raise Violation(f"wrong data in the slot: {parts} in round {epoch}")
        return state._replace(blocks=with_word(state.blocks, epoch % 2, parts))

    def _use(self, state: State, epoch: int) -> State:
        if epoch > 0 and any(part != epoch for part in state.blocks[epoch % 2]):
            raise Violation(f"a finished result is written: {state.blocks[epoch % 2]} where round {epoch} was")
        return state


def _rounds() -> range:
    return range(1, NUM_ROUNDS + 1)


def _at(state: State, p: int, num: int) -> State:
    return state._replace(programs=with_word(state.programs, p, num))


def _stored(cells: tuple[tuple[int, ...], ...], cell: int, p: int, epoch: int) -> tuple[tuple[int, ...], ...]:
    return with_word(cells, cell, with_word(cells[cell], p, epoch))
