"""Finds places in PTX where data could be overtaken by the flag that announces them.

This follows every path through a kernel with a few facts about what has happened on it. All of these must hold:

    data stores -> bar.sync -> counter (acq_rel.gpu) -> bar.sync -> flag (release.sys)    a push
    poll (acquire.sys) -> bar.red, bar.sync -> data loads, cp.async too                   reads
    cp.async -> wait_group -> bar.sync -> fence.proxy.async -> wgmma or tcgen05.mma       chunks to tensor cores
    poll (acquire.sys) -> bar.red -> fence.proxy.async of global memory -> TMA load       chunks by TMA
    TMA load -> mbarrier wait -> wgmma                                                    any box to tensor cores
    griddepcontrol.wait -> any access to global memory                                    launched early, from sm_90 on

TMA loads of three dims read chunks, those of two this rank's operands. Stores of the async proxy (TMA) must be
complete, not only read, before the barrier. Scalar 64-bit accesses are header words, all other global accesses data.
"""

import heapq
import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

_LABEL = re.compile(r"^([\w$]+):(?!:)")
_OPERATION = re.compile(r"^(@!?%?\w+\s+)?([\w.:]+)\s*(.*)$")
_BARRIERS = ("bar.sync", "bar.red", "barrier.sync", "barrier.cta.sync")
_WORD = re.compile(r"\.[bus]64$")
_STRENGTH = {"weak", "relaxed", "acquire", "release", "acq_rel", "volatile", "mmio", "cta", "cluster", "gpu", "sys"}
_STRONG_ENOUGH = {  # how words that ranks or programs share may be accessed
    "exch": ({"release", "sys"}, {"acq_rel", "sys"}),  # a flag
    "add": ({"acquire", "sys"}, {"acq_rel", "gpu"}),  # a poll, a counter
    "or": ({"acquire", "sys"},),  # who has given up
    "cas": ({"acq_rel", "gpu"},),  # the record of this device
    "ld": ({"acquire", "sys"},),
    "st": ({"release", "sys"},),
}


class Rule(StrEnum):
    """What a place in a kernel must keep."""

    STRENGTH = "a shared word is accessed with too weak an order or too small a scope"
    BARRIER = "stores before it are not complete in all threads"
    COUNT = "data stores before it are not counted"
    READ = "data are read before the wait and its barrier"
    LANDED = "copies to shared memory are not waited for, with a barrier, on this turn of the loop"
    PROXY = "chunks are loaded by TMA without fence.proxy.async of global memory behind the wait and its barrier"
    FENCE = "copies to shared memory are read by the async proxy without fence.proxy.async"
    EARLY = "memory is accessed before the stream's earlier kernels have ended"
    MBARRIER = "TMA loads are not waited for on this turn of the loop"


@dataclass(frozen=True)
class Instruction:
    line: int
    predicated: bool
    op: str
    operands: str


@dataclass(frozen=True)
class PathFacts:
    """What has happened on a path, seen from one thread."""

    alone: bool = False  # the stream's earlier kernels have ended
    unbarred: bool = False  # global stores since the last barrier
    uncounted: bool = False  # data stores since the last counter
    unwaited: bool = False  # TMA stores since the last cp.async.bulk.wait_group 0
    polled: bool = False  # a poll since the last barrier, and no pause since
    acquired: bool = False  # a poll, then a barrier
    proxied: bool = False  # and then a fence of the async proxy for global memory
    copied: bool = False  # cp.async
    waited: bool = False  # cp.async.wait_group since the last barrier
    landed: bool = False  # cp.async.wait_group, then a barrier, on this turn of the loop
    unfenced: bool = False  # cp.async since the last fence of the async proxy
    loaded: bool = False  # TMA loads
    arrived: bool = False  # a wait for an mbarrier on this turn of the loop


def violations(ptx: str, reads_after_wait: bool = False) -> list[str]:
    """A line per instruction that a path reaches too early. ``reads_after_wait``: loads come after their flag."""
    instructions, labels = parse(ptx)
    found: set[tuple[int, str]] = set()
    seen: set[tuple[int, PathFacts]] = set()
    arch = re.search(r"\.target sm_(\d+)", ptx)
    work = [(0, PathFacts(alone=arch is not None and int(arch.group(1)) < 90))]
    while work:
        at, facts = work.pop()
        if (at, facts) in seen or at == len(instructions):
            continue
        seen.add((at, facts))
        instruction = instructions[at]
        facts, rule = _step(instruction, facts, reads_after_wait)
        if rule is not None:
            found.add((instruction.line, f"line {instruction.line}: {instruction.op}: {rule}"))
        if instruction.op.startswith("bra"):
            # Names are unique, except those that inline assembly repeats in scopes of its own.
            label = instruction.operands.strip()
            target = min(labels[label], key=lambda each: abs(each - at))
            jumped = replace(facts, arrived=True) if label == "skipWait" else facts  # what would read is skipped too
            work.append((target, _next_turn(jumped, instructions[target:at])))
        if instruction.predicated or not instruction.op.startswith(("bra", "ret")):
            work.append((at + 1, facts))
    return [text for _, text in sorted(found)]


def _step(instruction: Instruction, facts: PathFacts, reads_after_wait: bool) -> tuple[PathFacts, Rule | None]:
    op = instruction.op
    if not _is_strong_enough(op):
        return facts, Rule.STRENGTH
    if op == "griddepcontrol.wait":
        return replace(facts, alone=True), None
    if not facts.alone and ("global" in op or op.startswith("cp.async")):
        return facts, Rule.EARLY
    if op.startswith(_BARRIERS):
        return _behind_barrier(facts), None
    if op.startswith(("ld", "atom")) and "acquire" in op and ".or" not in op:
        return replace(facts, polled=True, acquired=False, proxied=False), None
    if op.startswith("nanosleep"):
        return replace(facts, polled=False, acquired=False), None
    if reads_after_wait and (rule := _read(op, facts)):
        return facts, rule
    if op.startswith(("atom", "st")) and ("release" in op or "acq_rel" in op):
        return _released(op, facts)
    if op.startswith("st.") and "global" in op:
        return replace(facts, unbarred=True, uncounted=facts.uncounted or not _WORD.search(op)), None
    if op.startswith(("wgmma.mma_async", "tcgen05.mma", "mma.sync")):
        return facts, _multiplied(op, facts)
    return _moved(instruction, facts), None


def _is_strong_enough(op: str) -> bool:
    first, *parts = op.split(".")
    strength = _STRENGTH.intersection(parts)
    if first in ("atom", "red"):
        kinds = _STRONG_ENOUGH.keys() & set(parts)
        return any(strength in _STRONG_ENOUGH[kind] for kind in kinds)
    return first not in ("ld", "st") or not strength or strength in _STRONG_ENOUGH[first]


def _read(op: str, facts: PathFacts) -> Rule | None:
    """What is missing before an op that reads peers' chunks: by ordinary loads, or cp.async or TMA to shared memory."""
    by_tma = op.startswith("cp.async.bulk.tensor.3d.shared")
    by_load = op.startswith("ld.") and "global" in op and not _WORD.search(op)
    if not (by_tma or by_load or op.startswith(("cp.async.ca", "cp.async.cg"))):
        return None
    if not facts.acquired:
        return Rule.READ
    return Rule.PROXY if by_tma and not facts.proxied else None


def _behind_barrier(facts: PathFacts) -> PathFacts:
    acquired, landed = facts.acquired or facts.polled, facts.landed or facts.waited
    return replace(facts, unbarred=facts.unwaited, polled=False, acquired=acquired, waited=False, landed=landed)


def _released(op: str, facts: PathFacts) -> tuple[PathFacts, Rule | None]:
    rule = Rule.BARRIER if facts.unbarred else None
    if "acq_rel" in op and ".cas" in op:  # it decides or claims, and counts nothing
        return facts, rule
    if "acq_rel" in op:
        return replace(facts, uncounted=False), rule
    return facts, Rule.COUNT if facts.uncounted else rule


def _multiplied(op: str, facts: PathFacts) -> Rule | None:
    """What is missing before tensor cores read shared memory, on sm_80 through registers."""
    if facts.copied and not facts.landed:
        return Rule.LANDED
    if op.startswith("mma.sync"):
        return None
    if facts.unfenced:
        return Rule.FENCE
    return Rule.MBARRIER if facts.loaded and not facts.arrived else None


def _moved(instruction: Instruction, facts: PathFacts) -> PathFacts:
    """After an instruction of the asynchronous copies, or any other."""
    op = instruction.op
    if op.startswith(("cp.async.ca", "cp.async.cg")):
        return replace(facts, copied=True, unfenced=True)
    if op.startswith("cp.async.wait_"):
        return replace(facts, waited=True)
    if op == "fence.proxy.async.global":
        return replace(facts, proxied=facts.acquired)
    if op == "fence.proxy.async":
        return replace(facts, proxied=facts.acquired, unfenced=False)
    if op.startswith("fence.proxy.async.shared"):
        return replace(facts, unfenced=False)
    if op.startswith("cp.async.bulk.tensor"):
        if ".global.shared" in op:
            return replace(facts, unbarred=True, uncounted=True, unwaited=True)
        return replace(facts, loaded=True)
    if op == "cp.async.bulk.wait_group" and instruction.operands.strip() == "0":
        return replace(facts, unwaited=False)
    if op.startswith("mbarrier.try_wait"):
        return replace(facts, arrived=True)
    return facts


def _next_turn(facts: PathFacts, body: list[Instruction]) -> PathFacts:
    """A loop that copies must wait on each turn."""
    if any(each.op.startswith(("cp.async.ca", "cp.async.cg")) for each in body):
        facts = replace(facts, landed=False)
    if any(each.op.startswith("cp.async.bulk.tensor") for each in body):
        facts = replace(facts, arrived=False)
    return facts


def parse(ptx: str) -> tuple[list[Instruction], dict[str, list[int]]]:
    instructions: list[Instruction] = []
    labels: dict[str, list[int]] = {}
    body = ptx[ptx.index(".entry") :]
    first_line = ptx[: ptx.index(".entry")].count("\n") + 1
    for number, text in enumerate(body.splitlines(), first_line):
        for part in text.split("//")[0].split(";"):
            statement = part.strip().lstrip("{").strip()
            label = _LABEL.match(statement)
            if label:
                labels.setdefault(label.group(1), []).append(len(instructions))
                statement = statement[label.end() :].strip()
            operation = _OPERATION.match(statement)
            if operation and operation.group(2)[0].isalpha():
                predicate, op, operands = operation.groups()
                instructions.append(Instruction(number, bool(predicate), op, operands))
    return instructions, labels


_PRODUCT = re.compile(
    r"= arith\.muli (%[\w.#]+), (%[\w.#]+)(?: overflow<\w+>)? : (?:tensor<[\dx]*x)?i32>? loc\((#\w+)\)"
)
_CONSTANT = re.compile(r"(%[\w.]+) = arith\.constant ")
_PLACE = re.compile(r"^(#\w+) = loc\((.*)\)$", re.MULTILINE)
_FILE = re.compile(r'^"(.*)":(\d+):\d+$')


def narrow_products(ttir: str) -> list[str]:
    """``"file: line of source"`` of each, sorted. A product with a constant, as of a tile with its size, is none."""
    places, constants = dict(_PLACE.findall(ttir)), set(_CONSTANT.findall(ttir))
    found = [place for a, b, place in _PRODUCT.findall(ttir) if not {a, b} & constants]
    return sorted({_source(place, places) for place in found})


def _source(place: str, places: dict[str, str]) -> str:
    """The innermost line of a place: of a call it is the line of the callee, not of the caller."""
    text = places[place]
    if match := _FILE.match(text):
        file, line = match.groups()
        return f"{Path(file).name}: {linecache.getline(file, int(line)).strip()}"
    inner = re.search(r"#\w+", text)
    return _source(inner.group(), places) if inner else "unknown"


_MULTIPLIES = ("wgmma.mma_async", "tcgen05.mma", "mma.sync", "fma.rn.f32")

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
