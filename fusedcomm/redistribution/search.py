"""The fastest steps from one sharding to another: one collective, or two, or one mesh dim at a time.

Two collectives meet in a state in which each mesh dim shards as before, as after, or not at all. Mesh dims that hold
partial sums may also shard one tensor dim innermost there. If mesh dims that shard as before and others that shard as
after cut the same tensor dim, the latter cut inside. So plans may reduce before the data grow, put a reduce_scatter and
an all_gather in place of an all_reduce, or move over several mesh dims at once.

Every plan is compared with `steps_by_dim`, which takes one mesh dim at a time and is a candidate itself. Another
candidate counts only if it has no more collectives and sends no more bytes. So no plan is worse in either, or slower.

Nothing here depends on this rank, so all ranks find the same plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from fusedcomm.redistribution.by_dim import steps_by_dim
from fusedcomm.redistribution.sharding import Sharding
from fusedcomm.redistribution.step_time import MeshLinks
from fusedcomm.redistribution.steps import SLICE, Step, merged_op, step

_MOST_STATES = 1000  # with repetitions: all on meshes of three dims
_ROUNDING = 1 + 1e-9  # sums of the same numbers in different orders differ by less


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
    steps = _fastest(before, after, itemsize, links, by_dim)
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


def _fastest(
    before: Sharding, after: Sharding, itemsize: int, links: MeshLinks, by_dim: tuple[Step, ...]
) -> tuple[Step, ...]:
    """The fastest of ``by_dim``, one collective, and two by way of a state, with no more collectives and bytes."""
    bound = _total(by_dim, itemsize, links)
    best, best_key = by_dim, _key(bound, by_dim)

    def consider(first: tuple[Step, ...], last: tuple[Step, ...]) -> None:
        nonlocal best, best_key
        for ways in itertools.product(*(each.ways for each in last)) if last else ():
            cost = _total(steps := (*first, *ways), itemsize, links)
            is_allowed = cost.num_collectives <= bound.num_collectives and cost.bytes <= bound.bytes * _ROUNDING
            if is_allowed and (key := _key(cost, steps)) < best_key:
                best, best_key = steps, key

    consider((), _last(before, after))
    for state in _states(before, after) if bound.num_collectives > 1 else ():
        first = step(before, state)
        for way in first.ways if first is not None and first.kind != SLICE else ():  # a later step slices itself
            if PlanCost.of(way, itemsize, links).seconds + links.least_latency < best_key[0]:
                consider((way,), _last(state, after))
    return best


def _key(cost: PlanCost, steps: Sequence[Step]) -> tuple[float, int, float, int]:
    return cost.seconds, cost.num_collectives, cost.bytes, len(steps)


def _last(state: Sharding, after: Sharding) -> tuple[Step, ...]:
    """The collective that leads to ``after``, if one does; after an all_reduce a slice may remain to be done."""
    reduced = replace(state, partial=after.partial)
    chain = [step(state, after)]
    if chain[0] is None and _slices(reduced, after):
        chain = [step(state, reduced), step(reduced, after)]
    return tuple(each for each in chain if each is not None)


def _slices(state: Sharding, after: Sharding) -> bool:
    """Whether each rank already holds all its elements of ``after``."""
    pairs = zip(state.cuts, after.cuts, strict=True)
    return state.partial == after.partial and all(b[: len(a)] == a for a, b in pairs)


_BEFORE, _AFTER, _WHOLE, _MEANWHILE = range(4)


def _states(before: Sharding, after: Sharding) -> list[Sharding]:
    """The states between ``before`` and ``after``, from which something must be sent."""
    reduces = before.partial != after.partial
    found = (
        _state(before, after, choice, dim)
        for dim in (None, *range(len(before.shape) * reduces))
        for choice in itertools.product(*_choices(before, after, dim is not None))
    )
    some = dict.fromkeys(itertools.islice(found, _MOST_STATES))
    return [state for state in some if state != before and not _slices(state, after)]


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
