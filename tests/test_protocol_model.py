"""Every interleaving of a small model of the protocol: nothing unread is overwritten, nobody waits for ever.

A rank's program is a list of steps; a state is where each rank stands and what every slot and flag holds. Each planted
bug must be caught, or the model would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist

import fusedcomm
from fusedcomm.workspace import NUM_SLOTS, Round, peers_of, sources_of
from tests.problems import PROBLEMS, integers

Step = tuple[str, int, int]  # (what, the other rank, epoch)
Program = Callable[[int, int, int], list[Step]]


def protocol(rank: int, group_size: int, num_rounds: int) -> list[Step]:
    """DESIGN section 5: push and signal every peer, then wait for and read every source."""
    steps: list[Step] = []
    for epoch in range(1, num_rounds + 1):
        for dst in peers_of(rank, group_size):
            steps += [("write", dst, epoch), ("signal", dst, epoch)]
        for src in sources_of(rank, group_size):
            steps += [("wait", src, epoch), ("read", src, epoch)]
    return steps


def signal_before_write(rank: int, group_size: int, num_rounds: int) -> list[Step]:
    steps = protocol(rank, group_size, num_rounds)
    for i in range(len(steps) - 1):
        if steps[i][0] == "write":
            steps[i], steps[i + 1] = steps[i + 1], steps[i]
    return steps


def read_after_the_next_signals(rank: int, group_size: int, num_rounds: int) -> list[Step]:
    """A copy-out on a side stream that nobody joined."""
    steps = protocol(rank, group_size, num_rounds)
    reads = [step for step in steps if step[0] == "read" and step[2] < num_rounds]
    kept = [step for step in steps if step not in reads]
    for read in reads:
        last_signal = max(i for i, step in enumerate(kept) if step[0] == "signal" and step[2] == read[2] + 1)
        kept.insert(last_signal + 1, read)
    return kept


def no_wait(rank: int, group_size: int, num_rounds: int) -> list[Step]:
    return [step for step in protocol(rank, group_size, num_rounds) if step[0] != "wait" or step[1] != 0]


def empty_chunks_not_signalled(rank: int, group_size: int, num_rounds: int) -> list[Step]:
    return [s for s in protocol(rank, group_size, num_rounds) if not (rank == 0 and s[0] == "signal" and s[2] == 2)]


@dataclass(frozen=True)
class Outcome:
    states: int
    failure: str | None


def explore(program: Program, group_size: int, num_rounds: int, num_slots: int) -> Outcome:
    """All reachable states; the first failure found, if any."""
    programs = [program(rank, group_size, num_rounds) for rank in range(group_size)]
    empty = (0,) * (group_size * num_slots * group_size)
    first = ((0,) * group_size, empty, empty)
    seen, pending = {first}, [first]
    while pending:
        positions, data, flags = pending.pop()
        stuck = True
        for rank, position in enumerate(positions):
            if position == len(programs[rank]):
                continue
            what, other, epoch = programs[rank][position]
            owner, src = (other, rank) if what in ("write", "signal") else (rank, other)
            cell = (owner * num_slots + epoch % num_slots) * group_size + src
            if what == "wait" and flags[cell] < epoch:
                continue
            if what == "read" and data[cell] != epoch:
                return Outcome(len(seen), f"rank {rank} read round {data[cell]} instead of {epoch}")
            stuck = False
            state = (
                (*positions[:rank], position + 1, *positions[rank + 1 :]),
                (*data[:cell], epoch, *data[cell + 1 :]) if what == "write" else data,
                (*flags[:cell], epoch, *flags[cell + 1 :]) if what == "signal" else flags,
            )
            if state not in seen:
                seen.add(state)
                pending.append(state)
        if stuck and any(p < len(programs[r]) for r, p in enumerate(positions)):
            return Outcome(len(seen), "every rank waits")
    return Outcome(len(seen), None)


def recorded_steps(rank: int, num_calls: int) -> list[Step]:
    """What `chunked` does, call by call, with its peers."""
    steps: list[Step] = []

    def recording(name: str, what: str) -> Callable[..., Any]:
        method = getattr(Round, name)

        def record(self: Round, other: int) -> Any:
            if other != rank:  # the own chunk needs no flag
                steps.append((what, other, self.epoch))
            return method(self, other)

        return record

    problem = next(p for p in PROBLEMS if p.name == "rows-gathered")
    x, w, _ = integers(problem, rank, dist.get_world_size())
    fusedcomm.close()
    with pytest.MonkeyPatch.context() as patch, fusedcomm.force_algorithm("chunked", strict=True):
        for name, what in (("part", "write"), ("signal", "signal"), ("wait", "wait"), ("received", "read")):
            patch.setattr(Round, name, recording(name, what))
        for _ in range(num_calls):
            fusedcomm.matmul_all_to_all(x, w, problem.gather_dim, problem.scatter_dim)
    return steps


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_model_is_what_the_code_does(ranks: Any, world_size: int) -> None:
    for rank, steps in enumerate(ranks(world_size).run(recorded_steps, 3)):
        assert steps == [step for step in protocol(rank, world_size, 3) if step[1] != rank]


@pytest.mark.parametrize("group_size, num_rounds", [(1, 4), (2, 6), (3, 4)])
def test_no_interleaving_overwrites_or_blocks(group_size: int, num_rounds: int) -> None:
    outcome = explore(protocol, group_size, num_rounds, NUM_SLOTS)
    assert outcome.failure is None
    print(f"R={group_size}, {num_rounds} rounds: {outcome.states} states")


@pytest.mark.parametrize(
    "program, num_slots, failure",
    [
        (protocol, 1, "read round"),
        (signal_before_write, 2, "read round"),
        (read_after_the_next_signals, 2, "read round"),
        (no_wait, 2, "read round"),
        (empty_chunks_not_signalled, 2, "every rank waits"),
    ],
)
def test_each_planted_bug_is_caught(program: Program, num_slots: int, failure: str) -> None:
    outcome = explore(program, 2, 4, num_slots)
    assert outcome.failure is not None
    assert failure in outcome.failure
