"""The protocol as a state machine: what each rank does next, and what every slot, flag and broken word holds.

Checks, by the names that violations begin with:

    deadlock                          somebody waits for what never comes, and no time-out is allowed
    read before the matching write    without faults, and after a reset
    overwrite of unread data          the same
    rows placed before the counts     always
    error without a fault             the same
    wrong data without an error       always: a round that a rank takes for good holds words of another round
    error before the end              if ranks end and nothing else is wrong: a round that they had completed

tests/protocol/mirrors.py lists the code that this mirrors. The order of memory is not modelled: each step is seen by
all ranks at once (tests/kernels/test_compile_only.py checks releases and acquires).
"""

from collections.abc import Callable

from tests.protocol.explorer import Violation
from tests.protocol.scenario import RESET, Scenario, Step, compile_script
from tests.protocol.state import DEAD, RAISED, RUNNING, Moves, Rank, Stamp, State, put, received, sent, with_word


class ProtocolModel:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.rules, self.size = scenario, scenario.rules, scenario.group_size
        self.programs = [compile_script(scenario, rank) for rank in range(self.size)]
        self.num_segments = 1 + max(script.count(RESET) for script in scenario.scripts)
        self.do: dict[str, Callable[[State, int, Rank, Step], Moves]] = {
            "enter": self._enter,
            "write": self._write,
            "signal": self._signal,
            "wait": self._wait,
            "read": self._read,
            "show": self._write,
            "fetch": self._read,
            "finish": self._finish,
            "arrive": self._arrive,
            "depart": self._depart,
        }
        # The receive step that reads what src wrote: data are unread until it is done.
        self.reads = [
            {(s.other, s.segment, s.epoch): i for i, s in enumerate(each.receives) if s.what in ("read", "fetch")}
            for each in self.programs
        ]
        self.fetches = any(step.what == "fetch" for each in self.programs for step in each.receives)

    def initial(self) -> State:
        empty: tuple[Stamp, ...] = ((),) * (self.num_segments * self.size * self.rules.num_slots * self.size)
        broken = (0,) * (self.num_segments * self.size * self.size)
        return State((Rank(),) * self.size, empty, empty, broken)

    def finished(self, state: State) -> bool:
        return all(rank.status != RUNNING or self._done(r, rank) for r, rank in enumerate(state.ranks))

    def moves(self, state: State) -> tuple[list[tuple[str, State]], list[tuple[str, State]]]:
        # This is a reduction. An ``enter`` that can find nothing touches no word that others see. It commutes with all
        # their steps, nothing undoes it and no check looks at it, so the other orders reach the same states. So it goes
        # first.
        for r in range(self.size):
            if (step := self._free_enter(r, state.ranks[r])) is not None:
                return [(_label(r, step), sent(state, r))], []
        own: list[tuple[str, State]] = []
        faults: list[tuple[str, State]] = []
        for r, rank in enumerate(state.ranks):
            if rank.status != RUNNING or self._done(r, rank):
                continue
            own.extend(self._own_moves(state, r, rank))
            if r in self.scenario.dies:
                faults.append((f"rank {r} dies", put(state, r, rank._replace(status=DEAD))))
            if r in self.scenario.leaves and (step := self._inside(r, rank)) is not None:
                left = rank._replace(leaving=True, error=True, breaking=1, gave_up=(step.segment, step.epoch))
                faults.append((f"rank {r} leaves round {step.epoch}", put(state, r, left)))
            if r in self.scenario.ends and (step := self._between(r, rank)) is not None:
                ended = rank._replace(leaving=True, ended=True, breaking=1, gave_up=(step.segment, step.epoch))
                faults.append((f"rank {r} ends before round {step.epoch}", put(state, r, ended)))
        return own, faults

    # what a rank does next

    def _own_moves(self, state: State, r: int, rank: Rank) -> Moves:
        if not self.rules.drains and rank.error and rank.arrived < self.num_segments - 1:
            yield f"rank {r}: arrive, its device still at work", self._arrived(state, r, rank)
        # A host does one thing at a time; a device sends on one stream while it waits and fails on the other.
        steps = [] if rank.breaking and not self.scenario.device else [self._next_send(r, rank)]
        if rank.breaking:
            yield self._tell(state, r, rank)
        else:
            steps.append(self._next_receive(r, rank))
        for step in steps:
            if step is not None:
                for how, after in self.do[step.what](state, r, rank, step):
                    yield _label(r, step) + how, after

    def _next_send(self, r: int, rank: Rank) -> Step | None:
        sends = self.programs[r].sends
        if rank.sent == len(sends) or sends[rank.sent].after > rank.received or rank.leaving:
            return None
        return sends[rank.sent]

    def _next_receive(self, r: int, rank: Rank) -> Step | None:
        receives = self.programs[r].receives
        if rank.received == len(receives) or receives[rank.received].after > rank.sent:
            return None
        return receives[rank.received]

    def _done(self, r: int, rank: Rank) -> bool:
        sends, receives = self.programs[r]
        return rank.sent == len(sends) and rank.received == len(receives) and not rank.breaking

    def _free_enter(self, r: int, rank: Rank) -> Step | None:
        step = self._next_send(r, rank) if rank.status == RUNNING and not rank.error else None
        free = (self.scenario.device and r not in self.scenario.ends) or not self.scenario.faulty
        return step if step is not None and step.what == "enter" and free else None

    def _between(self, r: int, rank: Rank) -> Step | None:
        step = self._next_send(r, rank)
        return step if step is not None and step.what == "enter" and not rank.error and not rank.breaking else None

    def _inside(self, r: int, rank: Rank) -> Step | None:
        """A step of the call of the first segment, for a rank that is in it and may still leave."""
        step = self._next_receive(r, rank) or self._next_send(r, rank)
        if step is None or step.what in ("enter", "arrive", "depart") or step.segment > 0 or rank.error:
            return None
        return step

    # calls

    def _enter(self, state: State, r: int, rank: Rank, step: Step) -> Moves:
        """On a device an error is raised if the host looks now, but not if the call was queued before it failed."""
        if not self.scenario.device and self._given_up(state, r, step):
            yield ", finds it broken", self._fail(state, r, rank, step)
            return
        if rank.error:
            yield ", raises", self._raised(state, r, rank)
        yield "", sent(state, r)

    def _write(self, state: State, r: int, rank: Rank, step: Step) -> Moves:
        peers = [peer for peer in range(self.size) if peer != r]
        if step.counts and any(rank.received <= self.reads[r][src, step.segment, step.counts] for src in peers):
            raise Violation(f"rows placed before the counts: {_label(r, step)}")
        cell = self._cell(step, step.other, step.slot, r)
        segment, failed = rank.gave_up
        if rank.error and self.rules.gives_up_earlier and segment == step.segment and 1 < failed < step.epoch:
            for dst in peers if self.fetches and self.rules.tells_readers else [step.other]:
                broken = with_word(state.broken, self._broken(segment, dst, r), failed)
                if broken != state.broken:
                    yield ", gives up on the round before", state._replace(broken=broken)
                    return
        for src in range(self.size) if self._strict(state, step) else ():
            stamp = state.data[self._cell(step, step.other, step.slot, src)]
            if stamp[:2] != (step.segment, step.epoch) and self._unread(state, step.other, src, stamp):
                raise Violation(f"overwrite of unread data: {_label(r, step)} over round {stamp[1]}")
        yield "", sent(state, r)._replace(data=with_word(state.data, cell, (step.segment, step.epoch, step.op)))

    def _unread(self, state: State, owner: int, src: int, stamp: Stamp) -> bool:
        """The owner's own rows are for its peers."""
        readers = [owner] if src != owner else [rank for rank in range(self.size) if rank != owner]
        return bool(stamp) and any(
            state.ranks[rank].received <= self.reads[rank][src, stamp[0], stamp[1]] for rank in readers
        )

    def _signal(self, state: State, r: int, rank: Rank, step: Step) -> Moves:
        cell = self._cell(step, step.other, step.epoch % self.rules.num_slots, r)
        yield "", sent(state, r)._replace(flags=with_word(state.flags, cell, (step.epoch, step.op)))

    def _wait(self, state: State, r: int, rank: Rank, step: Step) -> Moves:
        flag = state.flags[self._cell(step, r, step.epoch % self.rules.num_slots, step.other)]
        same = flag == (step.epoch, step.op)
        reached = same if self.rules.waits_for == "equal" else flag >= (step.epoch,)
        good = same or (reached and not self.rules.compares_fingerprints)
        dead = state.ranks[step.other].status == DEAD and self.rules.finds_dead and not self.scenario.device
        if dead and not reached and not state.ranks[step.other].ended:
            for dst in range(self.size):
                word = self._broken(step.segment, dst, step.other)
                state = state._replace(broken=with_word(state.broken, word, step.epoch + 1))
        if reached or rank.failed or self._given_up(state, r, step):
            yield "", received(state, r) if good else self._wait_failed(state, r, rank, step)
        elif self.scenario.timeouts and not self._strict(state, step):
            after = state
            if self.scenario.device:  # its programs tell each other by their rank's own word
                after = state._replace(broken=with_word(state.broken, self._broken(step.segment, r, r), 1))
            yield ", time-out", self._wait_failed(after, r, rank, step)

    def _wait_failed(self, state: State, r: int, rank: Rank, step: Step) -> State:
        """A device goes on to the end of its round; a host gives up at once."""
        if not self.scenario.device:
            return self._fail(state, r, rank, step)
        return put(state, r, rank._replace(received=rank.received + 1, failed=True))

    def _read(self, state: State, r: int, rank: Rank, step: Step) -> Moves:
        owner = step.other if step.what == "fetch" else r
        stamp = state.data[self._cell(step, owner, step.slot, step.other)]
        latest = max(state.data[self._cell(step, owner, step.slot, src)] for src in range(self.size))
        if latest[:2] > (step.segment, step.epoch):  # rows lie anywhere in a slot, and chunks have any size
            stamp = latest
        matching = (step.segment, step.epoch, step.op)
        if stamp != matching and self._strict(state, step):
            late = "overwrite of unread data" if stamp > matching else "read before the matching write"
            raise Violation(f"{late}: {_label(r, step)} finds {stamp or 'nothing'}")
        yield "", received(state, r, wrong=rank.wrong or stamp != matching)

    def _finish(self, state: State, r: int, rank: Rank, step: Step) -> Moves:
        broken = self.rules.checks_broken_after_reads and self._given_up(state, r, step)
        if rank.failed or broken:
            if not rank.error or not self.scenario.device:
                yield ", fails", self._fail(state, r, rank._replace(failed=True), step)
                return
            yield ", poisons", received(state, r, failed=False, wrong=False)
        elif rank.wrong:
            raise Violation(f"wrong data without an error: {_label(r, step)}")
        else:
            yield "", received(state, r)

    # failures

    def _fail(self, state: State, r: int, rank: Rank, step: Step) -> State:
        if self._strict(state, step):
            raise Violation(f"error without a fault: {_label(r, step)}")
        place = step.segment, step.epoch
        if self.scenario.only_ends and not any(each.ended and each.gave_up <= place for each in state.ranks):
            raise Violation(f"error before the end: {_label(r, step)}")
        failed = rank._replace(error=True, breaking=1, gave_up=(step.segment, step.epoch))
        return put(state, r, failed)

    def _tell(self, state: State, r: int, rank: Rank) -> tuple[str, State]:
        """Write the broken word of one rank's header."""
        dst = rank.breaking - 1
        segment, epoch = rank.gave_up
        if self.rules.tells_peers if dst != r else not rank.ended:
            named = epoch if self.rules.ends_behind_its_rounds or not rank.ended else epoch - 1
            state = state._replace(broken=with_word(state.broken, self._broken(segment, dst, r), named + 1))
        told = rank._replace(breaking=(rank.breaking + 1) % (self.size + 1))
        after = put(state, r, told)
        if not told.breaking and rank.ended:
            after = put(state, r, told._replace(status=DEAD))
        elif not told.breaking and (rank.leaving or not self.scenario.device):
            after = self._raised(after, r, told)
        return f"rank {r}: breaks the header of {dst}, round {epoch}", after

    def _raised(self, state: State, r: int, rank: Rank) -> State:
        sends, receives = self.programs[r]
        resets = [i for i, step in enumerate(receives) if step.what == "arrive" and i >= rank.received]
        done = (receives[resets[0]].after, resets[0]) if resets else (len(sends), len(receives))
        left = rank._replace(sent=done[0], received=done[1], failed=False, wrong=False, leaving=False)
        return put(state, r, left)

    def _given_up(self, state: State, r: int, step: Step) -> bool:
        """Whether a peer has given up on the round. Who failed in a later one has completed this one."""
        first = self._broken(step.segment, r, 0)
        return any(0 < word <= step.epoch + 1 for word in state.broken[first : first + self.size])

    def _strict(self, state: State, step: Step) -> bool:
        """Whether nothing can go wrong: no fault is allowed, or all ranks have come through a reset."""
        return not self.scenario.faulty or (step.segment > 0 and all(rank.status == RUNNING for rank in state.ranks))

    # resets

    def _arrive(self, state: State, r: int, rank: Rank, step: Step) -> Moves:
        after = self._arrived(state, r, rank) if rank.arrived == step.segment else state
        yield "", received(after, r)

    def _arrived(self, state: State, r: int, rank: Rank) -> State:
        if self.rules.clears_before_agreement:
            state = self._cleared(state, r, rank.arrived)
        return put(state, r, rank._replace(arrived=rank.arrived + 1))

    def _depart(self, state: State, r: int, rank: Rank, step: Step) -> Moves:
        if all(other.arrived > step.segment for other in state.ranks):
            if not self.rules.clears_before_agreement:
                state = self._cleared(state, r, step.segment)
            yield "", received(state, r, error=False)
        elif self.scenario.timeouts:
            yield ", time-out", put(state, r, rank._replace(status=RAISED))

    def _cleared(self, state: State, r: int, old_segment: int) -> State:
        """The state with the header of r's next segment cleared."""
        segment = old_segment + 1 if self.rules.new_segment else 0
        num_flags = self.rules.num_slots * self.size
        first, words = (segment * self.size + r) * num_flags, (segment * self.size + r) * self.size
        return state._replace(
            flags=state.flags[:first] + ((),) * num_flags + state.flags[first + num_flags :],
            broken=state.broken[:words] + (0,) * self.size + state.broken[words + self.size :],
        )

    # words

    def _cell(self, step: Step, owner: int, slot: int, src: int) -> int:
        segment = step.segment if self.rules.new_segment else 0
        return ((segment * self.size + owner) * self.rules.num_slots + slot % self.rules.num_slots) * self.size + src

    def _broken(self, segment: int, owner: int, src: int) -> int:
        segment = segment if self.rules.new_segment else 0
        return (segment * self.size + owner) * self.size + src


def _label(r: int, step: Step) -> str:
    other = f" {step.other}" if step.other != r else ""
    return f"rank {r}: {step.what}{other}, {'reset ' if step.segment else ''}round {step.epoch}"
