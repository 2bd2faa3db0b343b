"""The fastest steps from one sharding to another: a search over collectives over any mesh dims.

In an intermediate state each mesh dim shards as before, as after, or not at all. Mesh dims that hold partial sums may
also, for a while, shard one tensor dim innermost. If mesh dims that shard as before and others that shard as after cut
the same tensor dim, the latter cut inside. An edge is a step. So the search finds by itself that it may reduce before
the data grow, put a reduce_scatter and an all_gather in place of an all_reduce, or move over several mesh dims at once.

Every plan is compared with `steps_by_dim`, which takes one mesh dim at a time and is a candidate itself. Another
candidate counts only if it has no more collectives and sends no more bytes. So no plan is worse in either, or slower.

The search reads nothing about this rank, so all ranks find the same plan.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from fusedcomm.redistribution.by_dim import steps_by_dim
from fusedcomm.redistribution.sharding import Sharding, intersection, numel
from fusedcomm.redistribution.step_time import MeshLinks
from fusedcomm.redistribution.steps import SLICE, Step, merged_op, step

_ROUNDING = 1 + 1e-9  # sums of the same numbers in different orders differ by less
_MOST_STEPS = 350  # looked at in one search, about 10 ms on 3 mesh dims; the best plan found by then counts
DONE = -1.0


@dataclass(frozen=True)
class PlanCost:
    seconds: float  # of the busiest rank
    num_collectives: int
    bytes: float  # sent per rank, on average

    def __add__(self, other: PlanCost) -> PlanCost:
        num_collectives = self.num_collectives + other.num_collectives
        return PlanCost(self.seconds + other.seconds, num_collectives, self.bytes + other.bytes)

    @staticmethod
    def of(step: Step, itemsize: int, links: MeshLinks) -> PlanCost:
        if step.kind == SLICE:
            return FREE
        mean, busiest = step.traffic
        return PlanCost(links.seconds(step.sends_as, busiest * itemsize, step.mesh_dims), 1, mean * itemsize)


FREE = PlanCost(0.0, 0, 0.0)


@dataclass(frozen=True)
class RedistributionPlan:
    """The steps of a `redistribute`, returned by `redistribute_plan`.

    ``str()`` has a line per step, their sum, and for comparison the sum of one mesh dim at a time. Times come from the
    cost model (`fusedcomm/plan/cost/links.py`), not from a measurement.

    Attributes:
        steps: the steps in turn; each has a ``kind`` ("slice", "all_gather", "all_to_all", "all_reduce" or
            "reduce_scatter") and ``mesh_dims``, the dims of the mesh that it communicates over.
        by_dim: the steps of one mesh dim at a time.
        before: the sharding of the tensor on the mesh; its str() are the placements.
        after: the sharding afterwards.
        itemsize: bytes of an element.
        links: the links of the mesh's groups, and their assumed rates.
        cost: the sum of the steps' costs.
        num_collectives: the number of steps that communicate.
        bytes: bytes that a rank sends, on average.
        seconds: estimated time of the busiest rank.
    """

    before: Sharding
    after: Sharding
    itemsize: int
    links: MeshLinks
    steps: tuple[Step, ...]
    by_dim: tuple[Step, ...]

    @cached_property
    def cost(self) -> PlanCost:
        return _total(self.steps, self.itemsize, self.links)

    @property
    def num_collectives(self) -> int:
        return self.cost.num_collectives

    @property
    def bytes(self) -> float:
        """Bytes that a rank sends, on average."""
        return self.cost.bytes

    @property
    def seconds(self) -> float:
        """Estimated time of the busiest rank."""
        return self.cost.seconds

    def __str__(self) -> str:
        """A line per step, their sum, and the sum of one mesh dim at a time."""
        lines = [
            _line(str(i), each.kind, PlanCost.of(each, self.itemsize, self.links), each)
            for i, each in enumerate(self.steps)
        ]
        head = f"{'step':<5s}{'kind':24s}{'mesh dims':>12s}{'bytes':>14s}{'us':>10s}"
        by_dim = _line("", "one mesh dim at a time", _total(self.by_dim, self.itemsize, self.links))
        return "\n".join([head, *lines, _line("", "all", self.cost), by_dim])


def _line(number: str, kind: str, cost: PlanCost, step: Step | None = None) -> str:
    what = f"   {step.before} -> {step.after}" if step else f"   collectives: {cost.num_collectives}"
    group = ", ".join(map(str, step.mesh_dims)) if step else ""
    return f"{number:<5s}{kind:24s}{group:>12s}{cost.bytes:14,.0f}{cost.seconds * 1e6:10.1f}{what}"


def _total(steps: Sequence[Step], itemsize: int, links: MeshLinks) -> PlanCost:
    return sum((PlanCost.of(each, itemsize, links) for each in steps), FREE)


@lru_cache(maxsize=4096)
def plan(before: Sharding, after: Sharding, itemsize: int, links: MeshLinks) -> RedistributionPlan:
    """The fastest plan for one tensor on one mesh. Raises ValueError where ``after`` has no exact plan."""
    _check(before, after)
    if before == after:
        return RedistributionPlan(before, after, itemsize, links, (), ())
    by_dim = tuple(_fastest_way(each, itemsize, links) for each in steps_by_dim(before, after))
    steps = _Search(before, after, itemsize, links, by_dim).fastest()
    return RedistributionPlan(before, after, itemsize, links, steps, by_dim)


def _fastest_way(step: Step, itemsize: int, links: MeshLinks) -> Step:
    if len(step.ways) == 1:
        return step
    costs = {each: PlanCost.of(each, itemsize, links) for each in step.ways}
    return min(costs, key=lambda each: (costs[each].seconds, costs[each].bytes))


def _check(before: Sharding, after: Sharding) -> None:
    assert (before.shape, before.mesh_shape) == (after.shape, after.mesh_shape)
    if before == after:
        return
    pairs = list(zip(before.partial, after.partial, strict=True))
    assert all(wanted is None or op == wanted for op, wanted in pairs), f"{before} -> {after}"
    ops = {i: op for i, op in enumerate(before.partial) if op is not None}
    if ops and merged_op(list(ops.values())) is None:
        got = ", ".join(f"{before.placement(i)} on mesh dim {i}" for i in ops)
        raise ValueError(f"partials of one tensor must be of one reduce op, or of sum and avg, got {got}")


@dataclass(frozen=True)
class _Path:
    cost: PlanCost
    steps: tuple[Step, ...]

    def to(self, step: Step, cost: PlanCost) -> _Path:
        return _Path(self.cost + cost, (*self.steps, step))

    @property
    def key(self) -> tuple[float, int, float, int]:
        return self.cost.seconds, self.cost.num_collectives, self.cost.bytes, len(self.steps)


class _Search:
    """A best-first search (A*).

    `_finish` tries all single last collectives at once, so a state in the heap needs at least two more. A state is
    pruned by its lower bound: the latency of these collectives, and the bytes of `_least_traffic`.
    """

    def __init__(
        self, before: Sharding, after: Sharding, itemsize: int, links: MeshLinks, by_dim: tuple[Step, ...]
    ) -> None:
        self.before, self.after, self.itemsize, self.links = before, after, itemsize, links
        self.latency, self.per_byte = links.least
        self.bound = _total(by_dim, itemsize, links)
        self.best = _Path(self.bound, by_dim)
        self.wires: dict[Sharding, float] = {}
        self.num_steps = 0

    def fastest(self) -> tuple[Step, ...]:
        start = _Path(FREE, ())
        self._finish(start, self.before)
        if not self._can_improve(start, self.before, 1):
            return self.best.steps
        states = _states(self.before, self.after)
        seen: dict[Sharding, list[PlanCost]] = {}
        count = itertools.count()
        heap = [(0.0, next(count), start, self.before)]
        while heap and self.num_steps < _MOST_STEPS:
            _, _, path, state = heapq.heappop(heap)
            earlier, cost = seen.setdefault(state, []), path.cost  # all earlier ones are at least as fast
            if not self._can_improve(path, state, 2) or any(
                other.num_collectives <= cost.num_collectives and other.bytes <= cost.bytes for other in earlier
            ):
                continue
            earlier.append(cost)
            for new in states:
                for found in self._extended(path, state, new):
                    self._finish(found, new)
                    if self._can_improve(found, new, 2):
                        heapq.heappush(heap, (found.cost.seconds + self._wire(new), next(count), found, new))
        return self.best.steps

    def _finish(self, path: _Path, state: Sharding) -> None:
        """Try the one collective that leads to ``after``; after an all_reduce a slice may remain to be done."""
        chain = [step(state, self.after)]
        self.num_steps += 1
        if chain[0] is None:
            reduced = replace(state, partial=self.after.partial)
            if not _slices(reduced, self.after):
                return
            chain = [step(state, reduced), step(reduced, self.after)]
        for ways in itertools.product(*(each.ways for each in chain if each is not None)):
            done = path
            for each in ways:
                done = done.to(each, PlanCost.of(each, self.itemsize, self.links))
            if self._is_allowed(done.cost) and done.key < self.best.key:
                self.best = done

    def _extended(self, path: _Path, state: Sharding, new: Sharding) -> Iterator[_Path]:
        """``path`` with the step to ``new``, in each of its ways, if that can lead to anything better."""
        if new == state or not self._can_improve(path, new, 2):
            return
        found = step(state, new)
        self.num_steps += 1
        if found is None or found.kind == SLICE:  # a later step slices before it sends
            return
        for each in found.ways:
            extended = path.to(each, PlanCost.of(each, self.itemsize, self.links))
            if self._can_improve(extended, new, 1):
                yield extended

    def _can_improve(self, path: _Path, state: Sharding, num_more: int) -> bool:
        """Whether ``path`` may beat the best, with at least ``num_more`` collectives from ``state``, or a slice."""
        if (wire := self._wire(state)) == DONE:
            return num_more == 1 and path.cost.seconds < self.best.cost.seconds and self._is_allowed(path.cost)
        seconds = path.cost.seconds + num_more * self.latency + wire
        return seconds < self.best.cost.seconds and self._is_allowed(path.cost, num_more)

    def _is_allowed(self, cost: PlanCost, num_more: int = 0) -> bool:
        bound = self.bound
        return cost.num_collectives + num_more <= bound.num_collectives and cost.bytes <= bound.bytes * _ROUNDING

    def _wire(self, state: Sharding) -> float:
        """Lower bound of the seconds on the wire from ``state`` on; DONE if nothing must be sent."""
        found = self.wires.get(state)
        if found is None:
            traffic = _least_traffic(state, self.after) * self.itemsize
            found = self.wires[state] = DONE if _slices(state, self.after) else traffic * self.per_byte
        return found


def _least_traffic(before: Sharding, after: Sharding) -> float:
    """Lower bound of the elements that the busiest rank sends or receives, for any steps.

    Without a reduction: the elements that a rank needs and does not hold. Summing `parts` values on one rank takes
    `parts - 1` transfers, and each further rank that needs the sum takes one more. A rank also sends all elements that
    it holds and does not keep.
    """
    sizes = before.mesh_shape
    last = tuple(size - 1 for size in sizes)
    boxes = [(before.box(each), after.box(each)) for each in ((0,) * len(sizes), last)]
    kept = [numel(shared) if (shared := intersection(*both)) else 0 for both in boxes]
    if before.partial == after.partial:
        return max(numel(needed) - own for (_, needed), own in zip(boxes, kept, strict=True))
    parts = owners = ranks = 1
    copied = False
    for size, op, op_after, dim, dim_after in zip(
        sizes, before.partial, after.partial, before.tensor_dims, after.tensor_dims, strict=True
    ):
        if op_after is not None:
            continue  # each index of a mesh dim that stays partial is like a tensor by itself
        ranks *= size
        parts *= size if op is not None else 1
        owners *= size if dim_after is None else 1
        copied |= op is None and dim is None and size > 1
    mean = math.prod(before.shape) * (parts + owners - 2) / ranks
    return mean if copied else max(mean, *(numel(held) - own for (held, _), own in zip(boxes, kept, strict=True)))


def _slices(state: Sharding, after: Sharding) -> bool:
    """Whether each rank already holds all its elements of ``after``."""
    pairs = zip(state.cuts, after.cuts, strict=True)
    return state.partial == after.partial and all(b[: len(a)] == a for a, b in pairs)


_BEFORE, _AFTER, _WHOLE, _MEANWHILE = range(4)


def _states(before: Sharding, after: Sharding) -> list[Sharding]:
    """The states between ``before`` and ``after``, both excluded."""
    found: dict[Sharding, None] = {}
    for choice in itertools.product(*_choices(before, after, False)):
        found.setdefault(_state(before, after, choice, None))
    reduced = [i for i, op in enumerate(before.partial) if op != after.partial[i]]
    if reduced:
        for choice in itertools.product(*_choices(before, after, True)):
            if _MEANWHILE in choice:
                for dim in range(len(before.shape)):
                    found.setdefault(_state(before, after, choice, dim))
    return [state for state in found if state not in (before, after)]


def _choices(before: Sharding, after: Sharding, meanwhile: bool) -> Iterator[tuple[int, ...]]:
    for i, op in enumerate(before.partial):
        dim, dim_after = before.tensor_dims[i], after.tensor_dims[i]
        if op == after.partial[i] and dim == dim_after and (dim is None or before.cuts[dim] == after.cuts[dim]):
            yield (_BEFORE,)
            continue
        whole = (_WHOLE,) if op is not None and dim_after is not None else ()
        reduces = (_MEANWHILE,) if meanwhile and op != after.partial[i] else ()
        yield (_BEFORE, _AFTER, *whole, *reduces)


def _state(before: Sharding, after: Sharding, choice: tuple[int, ...], dim: int | None) -> Sharding:
    cuts = [
        tuple(i for i in was if choice[i] == _BEFORE) + tuple(i for i in will if choice[i] == _AFTER)
        for was, will in zip(before.cuts, after.cuts, strict=True)
    ]
    if dim is not None:
        cuts[dim] += tuple(i for i, chosen in enumerate(choice) if chosen == _MEANWHILE)
    partial = tuple(
        op if chosen == _BEFORE else after_op
        for op, after_op, chosen in zip(before.partial, after.partial, choice, strict=True)
    )
    return Sharding(before.shape, before.mesh_shape, tuple(cuts), partial)
