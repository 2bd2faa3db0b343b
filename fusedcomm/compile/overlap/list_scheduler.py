"""A better order of a program: starts early, waits late, what does not depend on a collective beside it.

List scheduling along the order as it is, with the simulator's clock. At each step:

1. A collective whose result is needed soon is started, as soon as its operand can be had: so early that, one after the
   other on their link, all end in time; and never so early that memory exceeds the budget.
2. The first node that can run does. A wait can run when its collective has ended, so what depends on it is left aside
   meanwhile, and what comes later runs; but nothing that takes much longer than what is left to wait for.
3. If nothing can, or memory has no room for anything but the next node of the old order, that one runs: it waits.

Whatever was left aside can be made up for at any time, which leads back to the memory of the old order; only what was
started or computed early cannot, so this is checked against all of the old order that it passes.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

import numpy as np

from fusedcomm.compile.overlap.program import Program
from fusedcomm.compile.overlap.simulator import Clock

_AHEAD = 400  # nodes of the old order by which one may run early beside a wait
_LONGER = 1.5  # times what is left to wait for: what runs meanwhile may take
_TRIED = 4  # starts on a link that are due but that memory has no room for
_PROLOGUE = 64  # nodes that may run early with a start
_ROUNDING = 1e-9  # ms
_MARGIN = 1.0  # of its own time, by which a collective starts earlier than it must


def reorder(program: Program, base: Sequence[int], budget: int) -> list[int]:
    """Indices in their new order; ``base`` is a valid one. ``budget``: bytes that the peak should not exceed."""
    return _ListScheduler(program, base, budget).order()


class _ListScheduler:
    """Everything here goes by the position in the old order."""

    def __init__(self, program: Program, base: Sequence[int], budget: int) -> None:
        self.base, self.budget = list(base), budget
        position = {i: p for p, i in enumerate(self.base)}
        self.costs = [program.costs[i] for i in self.base]
        self.before = [[position[j] for j in program.before[i]] for i in self.base]
        self.after = [[position[j] for j in program.after[i]] for i in self.base]
        self.waits_for = [[position[j] for j in program.waits_for[i]] for i in self.base]
        self.starts = [position[i] for i in program.starts]
        self.memory, self.live = program.memory, program.memory.track()
        self.profile = self._profile()
        self.clock, self.computed_ms = Clock(), 0.0
        self.result: list[int] = []
        self.done = [False] * len(self.base)
        self.first = 0  # not done yet
        self.reached = 0  # nodes before it have run, or are aside
        self.aside: dict[int, int] = {}  # bytes that a node will allocate
        self.aside_bytes = 0
        self.missing = [len(each) for each in self.before]
        self.ready = [p for p, count in enumerate(self.missing) if count == 0]
        self.waiting: set[int] = set()  # waits whose collectives have started and not ended
        self.needed: list[tuple[int, int]] = []  # a heap: when what they bring is needed, and they, or what is none now
        light = light_nodes(program)
        self.light = [light[i] for i in self.base]
        self.need = needs(program, base)
        self.prologues = {s: self._prologue(s) for s in self.starts}
        self.lacking: dict[int, int] = {}  # start that is due: inputs that it cannot compute early itself
        self.lacked_by: dict[int, list[int]] = {}
        self.to_start = self._start_times()
        self.due: dict[str, deque[int]] = {}  # per link; one of the first is next, once memory has room for it

    def order(self) -> list[int]:
        while self.first < len(self.base):
            self._start_what_is_due()
            self._run(self._next())
        return [self.base[p] for p in self.result]

    def _next(self) -> int:
        """The position of the node to run."""
        for start in self.clock.newly_ended():
            for wait in self.waiting.intersection(self.after[start]):
                if all(map(self.clock.ended, self.waits_for[wait])):
                    self.waiting.remove(wait)
                    heapq.heappush(self.ready, wait)
        while self.ready and self.done[self.ready[0]]:
            heapq.heappop(self.ready)
        while self.needed and self.needed[0][1] not in self.waiting:
            heapq.heappop(self.needed)
        if not self.ready:
            return self.needed[0][1]
        p = self.ready[0]
        if p == self.first:
            return heapq.heappop(self.ready)
        need, wait = self.needed[0]  # what is left aside is behind a wait
        if need > p:
            return heapq.heappop(self.ready) if self._fits(p) else self.first
        if self._may_run_early(p, wait):
            return heapq.heappop(self.ready)
        return wait if self.live.live < self.budget else self.first

    def _may_run_early(self, p: int, wait: int) -> bool:
        """Whether node p may run beside a collective though it comes after what needs that one."""
        left = max(self.clock.left(start) for start in self.waits_for[wait])
        if p - wait > _AHEAD or self.costs[p].compute_ms > _LONGER * left:
            return False
        return self.live.live + self.memory.made(self.base[p]) <= self.budget and self._allocates_early([p])

    def _fits(self, p: int) -> bool:
        """Whether memory has room for what node p allocates, and then for all that is left aside before it."""
        while self.reached < p:
            if not self.done[self.reached]:
                self.aside[self.reached] = self.memory.made(self.base[self.reached])
                self.aside_bytes += self.aside[self.reached]
            self.reached += 1
        return self.live.live + self.memory.made(self.base[p]) + self.aside_bytes <= self.budget

    def _run(self, p: int) -> None:
        i, cost = self.base[p], self.costs[p]
        self.waiting.discard(p)
        self.result.append(p)
        self.done[p] = True
        self.aside_bytes -= self.aside.pop(p, 0)
        self.live.run(i)
        if cost.transfer is not None:
            self.clock.start(p, cost.transfer)
        begin = self.clock.now
        self.clock.compute(cost.compute_ms)
        self.computed_ms += cost.compute_ms
        if cost.fused_ms is not None:
            self.clock.wait(p)
            self.clock.compute(max(0.0, begin + cost.fused_ms - self.clock.now))
        for start in self.waits_for[p]:
            self.clock.wait(start)
        for q in self.after[p]:
            self.missing[q] -= 1
            if self.missing[q] == 0:
                if self.waits_for[q] and not all(map(self.clock.ended, self.waits_for[q])):
                    self.waiting.add(q)
                    heapq.heappush(self.needed, (self.need[q], q))
                else:
                    heapq.heappush(self.ready, q)
        for start in self.lacked_by.pop(p, ()):
            self.lacking[start] -= 1
            if self.lacking[start] == 0:
                self._is_due(start)
        while self.first < len(self.done) and self.done[self.first]:
            self.first += 1

    # starts

    def _start_what_is_due(self) -> None:
        next_ms = self.costs[self.first].compute_ms  # a start that is due meanwhile is due now
        while self.to_start and self.to_start[0][0] < self.computed_ms + max(next_ms, _ROUNDING):
            start = heapq.heappop(self.to_start)[1]
            inputs = {q for p in [*self.prologues[start], start] for q in self.before[p]} - {*self.prologues[start]}
            inputs = {q for q in inputs if not self.done[q]}
            for q in inputs:
                self.lacked_by.setdefault(q, []).append(start)
            self.lacking[start] = len(inputs)
            if not inputs:
                self._is_due(start)
        for queue in list(self.due.values()):
            at = 0
            while at < min(len(queue), _TRIED):
                nodes = [p for p in [*self.prologues[queue[at]], queue[at]] if not self.done[p]]
                if nodes and not self._allocates_early(nodes):
                    at += 1
                    continue
                del queue[at]
                for p in nodes:
                    self._run(p)

    def _is_due(self, start: int) -> None:
        transfer = self.costs[start].transfer
        assert transfer is not None
        self.due.setdefault(transfer.link, deque()).append(start)

    def _allocates_early(self, nodes: Sequence[int]) -> bool:
        """If memory has room for the results of nodes all the way to where they were, it is taken."""
        held = max(0, self.live.live - int(self.profile[self.first])) if self.first < len(self.profile) else 0
        added = [(p, self.memory.made(self.base[p])) for p in nodes]
        total = sum(size for _, size in added)
        last = max(nodes) + 1
        if total and self.profile[self.first : last].max(initial=0) + held + total > self.budget:
            return False
        for p, size in added:
            self.profile[self.first : p] += size
        return True

    def _start_times(self) -> list[tuple[float, int]]:
        """A heap of (compute that must have been done, start): the latest in time, less a margin.

        From the last to the first: a collective ends before it is needed and before the next one on its link begins.
        One that is needed late only, as a sum of gradients is, has its turn where it was.
        """
        clock = np.cumsum([0.0, *(cost.compute_ms for cost in self.costs)])
        late = [0.0] * len(self.base)  # by when the node must have ended for the next that computes to be in time
        jobs = []
        for p in reversed(range(len(self.base))):
            late[p] = min(
                (late[q] - self.costs[q].ms if self.light[q] else clock[q] for q in self.after[p]), default=clock[-1]
            )
        for start in self.starts:
            transfer = self.costs[start].transfer
            assert transfer is not None
            jobs.append((min(late[start], clock[start] + 2 * transfer.ms), start, transfer))
        begins: dict[str, float] = {}
        earliest: dict[str, float] = {}
        times = []
        for deadline, start, transfer in sorted(jobs, key=lambda job: job[:2], reverse=True):
            link = transfer.link
            begins[link] = min(deadline, begins.get(link, deadline)) - transfer.ms
            earliest[link] = min(begins[link] - _MARGIN * transfer.ms, earliest.get(link, deadline))
            times.append((earliest[link], start))
        heapq.heapify(times)
        return times

    # what is known beforehand

    def _profile(self) -> np.ndarray:
        live = self.memory.track()
        return np.array([live.run(i) for i in self.base], dtype=np.int64)

    def _prologue(self, start: int) -> list[int]:
        """What takes little time and must run before start does, in order; not what takes more."""
        found: set[int] = set()
        stack, left_ms = [start], 0.5 * self.costs[start].transfer.ms  # type: ignore[union-attr]
        while stack:
            for p in self.before[stack.pop()]:
                cost = self.costs[p]
                if p in found or cost.transfer is not None or self.waits_for[p] or cost.compute_ms > left_ms:
                    continue
                if len(found) == _PROLOGUE:
                    return sorted(found)
                left_ms -= cost.compute_ms
                found.add(p)
                stack.append(p)
        return sorted(found)


def needs(program: Program, base: Sequence[int]) -> list[int]:
    """By position in ``base``: the first that computes with the result, through what takes next to no time."""
    position = {i: p for p, i in enumerate(base)}
    light = light_nodes(program)
    need = [len(base)] * len(base)
    for p in reversed(range(len(base))):
        for j in program.after[base[p]]:
            need[p] = min(need[p], need[position[j]] if light[j] else position[j])
    return need


def light_nodes(program: Program) -> list[bool]:
    """By index: takes next to no time of the compute stream."""
    transfers = [program.costs[start].transfer for start in program.starts]
    limit_ms = 0.1 * sum(t.ms for t in transfers if t is not None) / max(1, len(transfers))
    return [cost.compute_ms <= limit_ms and cost.fused_ms is None for cost in program.costs]


def defer(
    program: Program, base: Sequence[int], order: Sequence[int], exposed_ms: dict[int, float], budget: int
) -> list[int]:
    """Returns ``base`` with compute that is needed only later moved from before an exposed start to behind it.

    ``exposed_ms``: by index of the start, as ``order``, what `reorder` makes of base, leaves it. As much as hides the
    collective, of what is nearest before it in order; and none for whose operands memory has no room until then.
    """
    position, placed = {i: p for p, i in enumerate(base)}, {i: p for p, i in enumerate(order)}
    need, light, memory = needs(program, base), light_nodes(program), program.memory
    live = memory.track()
    used = np.array([live.run(i) for i in base], dtype=np.int64)
    last = {storage: p for p, i in enumerate(base) for storage in memory.touches[i]}  # use of a storage
    to = list(range(len(base)))  # position behind which each node goes
    for first, left in sorted((placed[i], ms) for i, ms in exposed_ms.items()):
        start = position[order[first]]
        waited = min(
            (position[j] for j in program.after[order[first]] if order[first] in program.waits_for[j]), default=0
        )
        for i in reversed(order[max(0, first - _AHEAD) : first]):
            p = position[i]
            if left <= 0:
                break
            if light[i] or p > start or need[p] <= waited or to[p] != p or program.costs[i].transfer:
                continue
            kept = [s for s in memory.touches[i] if last[s] < start and live.uses[s] == 0]
            more = used[p : start + 1].copy()
            for s in kept:
                more[last[s] - p + 1 :] += memory.bytes[s]
            if more.max() > budget:
                continue
            used[p : start + 1] = more
            last.update(dict.fromkeys(kept, start))
            to[p] = start
            left -= program.costs[i].compute_ms
    key: list[tuple[int, bool, int]] = []
    for p, i in enumerate(base):
        key.append(max([(to[p], to[p] != p, p), *((*key[position[j]][:2], p) for j in program.before[i])]))
    return [base[p] for p in sorted(range(len(base)), key=key.__getitem__)]
