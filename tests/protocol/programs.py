"""The inside of a rank on a device: kernels of several programs that share a counter, the arrivals and the epoch.

There are two ranks without faults. A kernel that sends stores a part per program into each chunk. The program that
completes a chunk, by the counter, signals it; or the one that completes the last chunk signals all. A kernel that
receives waits for every source, the own one too; the last program that arrives counts the epoch. What a gather sends
may come beside its matmul. Where rows are gathered, the matmul leaves its own chunk out, and waits for the own signal
last.

This mirrors kernels/triton/primitives.py, copy.py and fusedcomm/plan/fused.py (tests/protocol/mirrored.py).
"""

from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from tests.protocol.explorer import Violation
from tests.protocol.state import with_word


@dataclass(frozen=True)
class ProgramRules:
    num_programs: tuple[int, int] = (2, 1)  # programs of each kernel, by rank: more of both would be too many states
    last_signals: bool = True  # the last program, not the first that has stored
    clears_counter: bool = True
    waits_for_own: bool = True
    last_counts_epoch: bool = True  # the last program, not the first that arrives
    joins: bool = True  # the pack ends before the next round


class Kernel(NamedTuple):
    steps: tuple[str, ...]
    epoch: int  # the round that its programs must find in the header
    after: tuple[int, ...]  # kernels of this rank that come before it


class State(NamedTuple):
    """By rank; ``counts`` by dst_rank too, ``flags`` and ``parts`` by owner, slot and source. Words are epochs."""

    steps: tuple[tuple[tuple[int, ...], ...], ...]  # [rank][kernel][program]: steps done
    epochs: tuple[int, ...]
    arrivals: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]
    flags: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]


# "count" also clears the counter, and a program that does not complete the chunk skips the signals behind it
SEND = ("epoch", *(f"{what} {step}" for step in range(2) for what in ("store", "count", "signal")))
SEND_AT_ONCE = ("epoch", "store 0", "store 1", "count 0", "signal 1", "signal 0")  # as seen last first
RECEIVE = ("epoch", *(f"{what} {step}" for step in range(2) for what in ("wait", "read")), "arrive", "count epoch")
RECEIVE_OTHERS = ("epoch", "wait 1", "read 1", "wait 0", "arrive", "count epoch")


class ProgramModel:
    def __init__(self, rounds: tuple[str, ...], rules: ProgramRules) -> None:
        """``rounds``: "push", "gather" or "gather rows", or one of them "at once"."""
        self.rules, self.kernels = rules, [*_kernels(rounds, rules)]

    def initial(self) -> State:
        programs = tuple(((0,) * num,) * len(self.kernels) for num in self.rules.num_programs)
        parts = tuple((0,) * self.rules.num_programs[cell % 2] for cell in range(8))
        return State(programs, (0, 0), (0, 0), ((0, 0), (0, 0)), (0,) * 8, parts)

    def finished(self, state: State) -> bool:
        return all(self._over(state, r, k) for r in range(2) for k in range(len(self.kernels)))

    def moves(self, state: State) -> tuple[list[tuple[str, State]], list[tuple[str, State]]]:
        moves = []
        for r in range(2):
            for k, kernel in enumerate(self.kernels):
                if all(self._over(state, r, before) for before in kernel.after):
                    for p in range(self.rules.num_programs[r]):
                        if state.steps[r][k][p] < len(kernel.steps):
                            moves += self._step(state, r, k, p)
        return moves, []

    def _over(self, state: State, r: int, k: int) -> bool:
        return all(done == len(self.kernels[k].steps) for done in state.steps[r][k])

    def _step(self, state: State, r: int, k: int, p: int) -> list[tuple[str, State]]:
        what, _, step = self.kernels[k].steps[state.steps[r][k][p]].partition(" ")
        label = f"rank {r}: program {p}, round {self.kernels[k].epoch}: {what} {step}"
        after = getattr(self, "_" + what)(state, r, k, p, step)
        return [] if after is None else [(label, after)]

    def _epoch(self, state: State, r: int, k: int, p: int, step: str) -> State:
        found = state.epochs[r] + 1
        if found != self.kernels[k].epoch:
            raise Violation(f"wrong epoch: rank {r}, program {p} finds {found} in round {self.kernels[k].epoch}")
        return _done(state, r, k, p)

    def _store(self, state: State, r: int, k: int, p: int, step: str) -> State:
        cell = self._cell((r + int(step)) % 2, k, r)
        parts = with_word(state.parts[cell], p, self.kernels[k].epoch)
        return _done(state, r, k, p)._replace(parts=with_word(state.parts, cell, parts))

    def _count(self, state: State, r: int, k: int, p: int, step: str) -> State:
        """Count at the end, the epoch too: the last program that has arrived does it."""
        if step == "epoch":
            return _done(state, r, k, p)._replace(
                arrivals=with_word(state.arrivals, r, 0), epochs=with_word(state.epochs, r, self.kernels[k].epoch)
            )
        before = state.counts[r][int(step)]
        num = self.rules.num_programs[r] if self.rules.last_signals else 1
        completes = before + 1 == num
        counts = with_word(state.counts[r], int(step), 0 if completes and self.rules.clears_counter else before + 1)
        after = state._replace(counts=with_word(state.counts, r, counts))
        signals = takewhile(lambda name: name.startswith("signal"), self.kernels[k].steps[state.steps[r][k][p] + 1 :])
        return _done(after, r, k, p, 1 if completes else 1 + len([*signals]))

    def _signal(self, state: State, r: int, k: int, p: int, step: str) -> State:
        cell = self._cell((r + int(step)) % 2, k, r)
        return _done(state, r, k, p)._replace(flags=with_word(state.flags, cell, self.kernels[k].epoch))

    def _wait(self, state: State, r: int, k: int, p: int, step: str) -> State | None:
        src = (r + int(step)) % 2
        if state.flags[self._cell(r, k, src)] < self.kernels[k].epoch and (src != r or self.rules.waits_for_own):
            return None
        return _done(state, r, k, p)

    def _read(self, state: State, r: int, k: int, p: int, step: str) -> State:
        src = (r + int(step)) % 2
        parts = state.parts[self._cell(r, k, src)]
        if src != r and any(part != self.kernels[k].epoch for part in parts):
            raise Violation(f"wrong data: rank {r}, program {p} reads {parts} in round {self.kernels[k].epoch}")
        return _done(state, r, k, p)

    def _arrive(self, state: State, r: int, k: int, p: int, step: str) -> State:
        arrivals = state.arrivals[r] + 1
        last = arrivals == (self.rules.num_programs[r] if self.rules.last_counts_epoch else 1)
        return _done(state._replace(arrivals=with_word(state.arrivals, r, arrivals)), r, k, p, 1 if last else 2)

    def _cell(self, owner: int, k: int, src: int) -> int:
        return (owner * 2 + self.kernels[k].epoch % 2) * 2 + src


def _kernels(rounds: tuple[str, ...], rules: ProgramRules) -> list[Kernel]:
    kernels: list[Kernel] = []
    before: tuple[int, ...] = ()
    for i, kind in enumerate(rounds):
        send, receive = len(kernels), len(kernels) + 1
        is_push = kind.startswith("push")
        kernels.append(Kernel(SEND_AT_ONCE if "at once" in kind else SEND, i + 1, before))
        receives = RECEIVE_OTHERS if kind.startswith("gather rows") else RECEIVE
        kernels.append(Kernel(receives, i + 1, (send,) if is_push else before))
        before = (send, receive) if rules.joins else (receive,)
    return kernels


def _done(state: State, r: int, k: int, p: int, num_steps: int = 1) -> State:
    done = with_word(state.steps[r][k], p, state.steps[r][k][p] + num_steps)
    return state._replace(steps=with_word(state.steps, r, with_word(state.steps[r], k, done)))
