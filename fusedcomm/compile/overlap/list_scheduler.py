"""Finds a better order of a program: collectives start early, are waited for late, and have other compute beside them.

If no node can run, or memory has room for the next node of the old order only, that one runs, and waits: nodes left
aside can run at any time, which leads back to the memory of the old order. Early starts and early results cannot be
taken back, so their memory is checked against all of the old order that they pass.
"""

import heapq
from collections import deque
from collections.abc import Sequence

import numpy as np

from fusedcomm.compile.overlap.program import Program
from fusedcomm.compile.overlap.simulator import Clock

_AHEAD = 400  # how many nodes of the old order a node may pass to run beside a wait
_LONGER = 1.5  # a node beside a wait may take this many times the rest of the wait
_TRIED = 4  # how many due starts of a link are tried while memory has no room for the first
_PROLOGUE = 64  # the most nodes that may run early with a start
_ROUNDING = 1e-9  # ms
_MARGIN = 1.0  # how much earlier than it must a collective starts, in units of its own time


def reorder(program: Program, base: Sequence[int], budget: int) -> list[int]:
    """Indices in their new order. ``base`` is a valid order; ``budget``: bytes that the peak should not exceed."""
    return _ListScheduler(program, base, budget).order()


class _ListScheduler:
    """Finds the order; all nodes are given by their positions in the old one."""

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
        self.first = 0  # the first node that is not done
        self.reached = 0  # all nodes before it have run, or are aside
        self.aside: dict[int, int] = {}  # bytes that a node left aside will allocate
        self.aside_bytes = 0
        self.missing = [len(each) for each in self.before]
        self.ready = [p for p, count in enumerate(self.missing) if count == 0]
        self.waiting: set[int] = set()  # waits whose collectives have started and not ended
        self.needed: list[tuple[int, int]] = []  # heap of (position of the first use, wait); some no longer wait
        light = light_nodes(program)
        self.light = [light[i] for i in self.base]
        self.need = needs(program, base)
        self.prologues = {s: self._prologue(s) for s in self.starts}
        self.lacking: dict[int, int] = {}  # how many inputs, not in its prologue, a start still lacks
        self.lacked_by: dict[int, list[int]] = {}
        self.to_start = self._start_times()
        self.due: dict[str, deque[int]] = {}  # starts per link; one of the first is next, once memory has room for it
        self.full_at: dict[int, int] = {}  # node without room, by the end of the nodes to be passed

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
        need, wait = self.needed[0]  # only nodes behind a wait are left aside
        if need > p:
            return heapq.heappop(self.ready) if self._fits(p) else self.first
        if self._may_run_early(p, wait):
            return heapq.heappop(self.ready)
        return wait if self.live.live < self.budget else self.first

    def _may_run_early(self, p: int, wait: int) -> bool:
        """Whether node p may run beside a collective, before earlier users of the collective's result."""
        left = max(self.clock.left(start) for start in self.waits_for[wait])
        if p - wait > _AHEAD or self.costs[p].compute_ms > _LONGER * left:
            return False
        return self.live.live + self.memory.made(self.base[p]) <= self.budget and self._allocates_early([p])

    def _fits(self, p: int) -> bool:
        """Whether memory has room for the results of node p, and then of all nodes left aside before it."""
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
        """Take memory for the results of nodes, up to where the nodes were, if there is room; returns whether."""
        held = max(0, self.live.live - int(self.profile[self.first])) if self.first < len(self.profile) else 0
        added = [(p, self.memory.made(self.base[p])) for p in nodes]
        total = sum(size for _, size in added)
        if total and self._is_full(max(nodes) + 1, held + total):
            return False
        for p, size in added:
            self.profile[self.first : p] += size
        return True

    def _is_full(self, end: int, more: int) -> bool:
        """Whether memory has no room for ``more`` at some node from the first that is not done to the one before end.

        Due starts are tried at each step until there is room, and can pass most of the program. So the node without
        room is checked first the next time: its memory never falls.
        """
        at = self.full_at.get(end, -1)
        if at < self.first or self.profile[at] + more <= self.budget:
            backward = self.profile[self.first : end][::-1]
            at = self.full_at[end] = end - 1 - int(backward.argmax())  # the last of the fullest, to be passed last
        return bool(self.profile[at] + more > self.budget)

    def _start_times(self) -> list[tuple[float, int]]:
        """A heap of (compute that must have been done, start): the latest that is in time, less a margin.

        Made from the last to the first: a collective ends before it is needed, and before the next one on its link
        begins. One that is needed much later, as a sum of gradients, stays near its old position.
        """
        clock = np.cumsum([0.0, *(cost.compute_ms for cost in self.costs)])
        late = [0.0] * len(self.base)  # when the node must have ended, so that the next that computes is in time
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

    # precomputed

    def _profile(self) -> np.ndarray:
        live = self.memory.track()
        return np.array([live.run(i) for i in self.base], dtype=np.int64)

    def _prologue(self, start: int) -> list[int]:
        """The nodes that must run before start does and take little time, in order."""
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
    """By position in ``base``: the first node that computes with the result, past nodes that take next to no time."""
    position = {i: p for p, i in enumerate(base)}
    light = light_nodes(program)
    need = [len(base)] * len(base)
    for p in reversed(range(len(base))):
        for j in program.after[base[p]]:
            need[p] = min(need[p], need[position[j]] if light[j] else position[j])
    return need


def light_nodes(program: Program) -> list[bool]:
    """By index: whether the node takes next to no time of the compute stream."""
    transfers = [program.costs[start].transfer for start in program.starts]
    limit_ms = 0.1 * sum(t.ms for t in transfers if t is not None) / max(1, len(transfers))
    return [cost.compute_ms <= limit_ms and cost.fused_ms is None for cost in program.costs]


def defer(
    program: Program, base: Sequence[int], order: Sequence[int], exposed_ms: dict[int, float], budget: int
) -> list[int]:
    """Returns ``base`` with compute that is needed only later moved from before an exposed start to behind it.

    ``order``: the result of `reorder` for ``base``. ``exposed_ms``: index of a start -> its exposed time in ``order``.
    As much compute moves as hides the collective, the nearest before it in ``order`` first; a node stays if memory has
    no room for its operands until then.
    """
    position, placed = {i: p for p, i in enumerate(base)}, {i: p for p, i in enumerate(order)}
    need, light, memory = needs(program, base), light_nodes(program), program.memory
    live = memory.track()
    used = np.array([live.run(i) for i in base], dtype=np.int64)
    last = {storage: p for p, i in enumerate(base) for storage in memory.touches[i]}  # last use of a storage
    to = list(range(len(base)))  # the position behind which each node goes
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
