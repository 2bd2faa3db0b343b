"""The main loops of a kernel in PTX: the innermost loops that multiply."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from tests.helpers.ptx_order import Instruction, parse

_MULTIPLIES = ("wgmma.mma_async", "tcgen05.mma", "mma.sync", "fma.rn.f32")
_BARRIERS = ("bar.sync", "barrier.sync", "barrier.cta.sync")

Graph = dict[int, list[int]]  # an instruction's index, and what may follow it


@dataclass(frozen=True)
class MainLoop:
    """One loop. ``stores``: it runs through tiles as well, and stores them. ``barriers``: the fewest of one turn."""

    stores: bool
    barriers: int


def main_loops(ptx: str) -> list[MainLoop]:
    instructions, graph = _flow(ptx)
    found = []
    for header, loop in _innermost(graph, {at for at, each in enumerate(instructions) if _is(each, _MULTIPLIES)}):
        stores = any(_is(instructions[at], ("st.global",)) for at in loop)
        found.append(MainLoop(stores, _fewest_barriers(instructions, loop, header)))
    return found


def _is(instruction: Instruction, ops: tuple[str, ...]) -> bool:
    return instruction.op.startswith(ops)


def _flow(ptx: str) -> tuple[list[Instruction], Graph]:
    instructions, labels = parse(ptx)
    graph: Graph = {}
    for at, each in enumerate(instructions):
        graph[at] = [at + 1] if each.predicated or not _is(each, ("bra", "ret")) else []
        if _is(each, ("bra",)):
            graph[at].append(min(labels[each.operands.strip()], key=lambda target: abs(target - at)))
        graph[at] = [target for target in graph[at] if target < len(instructions)]
    return instructions, graph


def _innermost(graph: Graph, wanted: set[int]) -> Iterator[tuple[int, Graph]]:
    """The header and the body of each loop with one of ``wanted`` in it, but not in a loop inside it."""
    for body in _components(graph):
        if len(body) < 2 or not body & wanted:
            continue
        header = min({then for at in graph.keys() - body for then in graph[at] if then in body}, default=min(body))
        loop = {at: [then for then in graph[at] if then in body] for at in body}
        inner = list(_innermost({at: [then for then in loop[at] if then != header] for at in body}, wanted))
        yield from inner or [(header, loop)]


def _components(graph: Graph) -> list[set[int]]:
    """Strongly connected components: reachable from one another."""
    order: list[int] = []
    for left in _depth_first(graph, list(graph)):
        order.extend(left)
    reverse: Graph = {at: [] for at in graph}
    for at, following in graph.items():
        for then in following:
            reverse[then].append(at)
    return [set(each) for each in _depth_first(reverse, order[::-1])]


def _depth_first(graph: Graph, starts: list[int]) -> Iterator[list[int]]:
    """For each start that none before it reaches: what it reaches, in the order in which the search leaves it."""
    seen: set[int] = set()
    for start in starts:
        if start in seen:
            continue
        seen.add(start)
        left: list[int] = []
        path = [(start, iter(graph[start]))]
        while path:
            at, following = path[-1]
            then = next((each for each in following if each not in seen), None)
            if then is None:
                left.append(at)
                path.pop()
            else:
                seen.add(then)
                path.append((then, iter(graph[then])))
        yield left


def _fewest_barriers(instructions: list[Instruction], loop: Graph, header: int) -> int:
    """On the path of one turn that passes the fewest."""
    work, done = [(0, header)], set()
    while work:
        passed, at = heapq.heappop(work)
        passed += _is(instructions[at], _BARRIERS)
        for then in loop[at]:
            if then == header:
                return passed
            if then not in done:
                done.add(then)
                heapq.heappush(work, (passed, then))
    raise AssertionError("a loop comes back to its header")
