"""Moves exchanges over the ops that act on each of their blocks alone, until they stand beside matmuls.

They move in the graph that holds forward and backward, so that both are fused later.
"""

import copy
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from fusedcomm.compile.commute import cut_matmuls, digests, small
from fusedcomm.compile.commute.digests import MOVED
from fusedcomm.compile.commute.mover import NORMED, PURPOSES, SMALL, Mover
from fusedcomm.compile.commute.prepare import prepared, replace_nodes
from fusedcomm.compile.commute.region import EARLIER, LATER, Behind, Exchange, infer, origins
from fusedcomm.compile.fuse import wire
from fusedcomm.compile.fuse.fuser import products_beside
from fusedcomm.compile.fuse.time_saved import seconds_left
from fusedcomm.compile.graph import collectives, sequence
from fusedcomm.compile.graph.attempt import attempt
from fusedcomm.compile.graph.effects import sort, writes_before_end
from fusedcomm.compile.graph.layout import CannotFuse
from fusedcomm.compile.graph.rewrite import Rewriter, held_outputs, stand_for
from fusedcomm.compile.graph.sequence import Digest
from fusedcomm.compile.graph.strides import settle
from fusedcomm.compile.graph.views import WAIT, value
from fusedcomm.memory.consent import YES
from fusedcomm.plan.cost.model import DEFAULTS

NOTE = "fusedcomm_moves"  # in the metadata of an exchange: the ops it moved over, or why it did not
REFUSED = "fusedcomm_refused"  # in the metadata of a collective: peers have not agreed to moves in its graph
ORIGIN = "fusedcomm_origin"  # in the metadata of a new collective: bits of the exchanges that need it
CARRIES = "it carries"
_MAX_ROUNDS = 8


def commute(graph: Graph, fuse: Sequence[str]) -> None:
    """Move exchanges of the graph where ops of ``fuse`` can then take their place, if all ranks do it alike."""
    kinds = {collectives.kind_of(node) for node in graph.nodes}
    if kinds.isdisjoint(("all_to_all", "all_gather")):
        return
    before = sequence.Sequence(graph, "joint")
    reasons: dict[str, str] = {}
    why_not: list[str] = []
    found = attempt("commute", _find, graph, fuse, before, reasons, reasons=why_not)
    if found is None:
        before.pass_by()
    else:
        moved, digest, group_name = found
        answer = before.ask(digest, group_name)
        if answer.kind == YES:
            replace_nodes(graph, moved, {node.name for node in graph.nodes})
        else:
            why_not = [f"commute: {answer}"]
            for node in filter(collectives.kind_of, graph.nodes):
                node.meta[REFUSED] = True
    for start in collectives.find(graph, "all_to_all"):
        if start.name in reasons and (why_not or reasons[start.name]):
            start.meta[NOTE] = "; ".join(why_not) or f"commute: {reasons[start.name]}"


def _find(
    graph: Graph, fuse: Sequence[str], before: sequence.Sequence, reasons: dict[str, str]
) -> tuple[Graph, Digest, str] | None:
    """Returns (copy with moved exchanges, digest, group that must agree), or None if none moves."""
    if writes_before_end(graph):
        return None
    base, moved = prepared(graph), None
    names = map(collectives.group_name_of, collectives.find(base, "all_to_all"))
    for group_name in dict.fromkeys(filter(None, names)):
        rounds = _Rounds(moved or base, group_name, fuse)
        moved = rounds.run() or moved
        reasons |= rounds.reasons
    if moved is None:
        return None
    small.join(moved)
    _recompute_normed(moved)
    settle(moved)
    digest = before.digest(moved, lambda node: MOVED in node.meta, lambda node: node.meta.get(ORIGIN))
    group_name = before.voter({node.meta[MOVED] for node in moved.nodes if MOVED in node.meta})
    digests.note(moved, digest, group_name)
    changed = before.changed(moved)
    wire.agreed((node for node in sequence.communicating(moved) if node.name in changed), digest.text)
    return moved, digest, group_name


def _recompute_normed(graph: Graph) -> None:
    """Let the backward compute ``x / rms(x)`` again from x, as it does where no norm has moved.

    The partitioner would save both: where a collective stands between two readers of x, as the sum of the norm does
    now, it does not compute the later one again.
    """
    backward = small.depends_on_gradients(graph)
    for node in graph.nodes:
        if NORMED in node.meta and any(
            user in backward for each in (node, *node.all_input_nodes) for user in each.users
        ):
            node.meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)


def erase_copies(graph: Graph, of_backward: bool) -> None:
    """Erase unread collectives that are duplicates of collectives in the other graph, forward or backward.

    A wait is never dead code, so AOTAutograd's partitioner also puts a collective of the forward into the backward if
    its operand and the values computed from its result are saved, and a moved one into both. An unread collective of
    the program itself stays in its own graph, as peers may read theirs; so do recomputed ones.
    """
    rewriter = Rewriter(graph)
    for wait in graph.find_nodes(op="call_function", target=WAIT):
        start = wait
        while start.target is WAIT:
            start = start.args[0]
        if not wait.users and (MOVED in start.meta or (of_backward and _is_of_forward(start))):
            rewriter.erase_unused(wait)


def _is_of_forward(node: Node) -> bool:
    recomputed = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    return node.meta.get("partitioner_tag") == "is_forward" and node.meta.get("recompute") not in recomputed


def note_of(start: Node) -> str:
    if SMALL in start.meta:
        return f"{CARRIES} {start.meta[SMALL]} of moved ops"
    note: str = start.meta.get(NOTE, "")
    return note


class _Rounds:
    """Tries to move all exchanges of a group; exchanges without a gain stay where they are in the next round."""

    def __init__(self, graph: Graph, group_name: str, fuse: Sequence[str]) -> None:
        self.graph, self.group_name = graph, group_name
        self.group_size = collectives.size_of_group(group_name)
        self.reasons: dict[str, str] = {}  # why exchanges stay where they are, by name
        self.fuse = fuse

    def run(self) -> Graph | None:
        ways = self._first_ways()
        for _ in range(_MAX_ROUNDS):
            if not ways:
                return None
            moved = _Moved(copy.deepcopy(self.graph), self, ways)
            if not moved.losing:
                return moved.graph
            ways = _otherwise(ways, moved.losing)
        return None

    def _first_ways(self) -> dict[int, str]:
        """Number of an exchange not beside a matmul -> its way, if all matmuls may be cut."""
        with held_outputs(self.graph):
            found = [i for i, each in self.exchanges(self.graph).items() if not products_beside(each.start, self.fuse)]
        graph = copy.deepcopy(self.graph)
        with held_outputs(graph):
            exchanges = self.cut(graph, found, found)
            return {i: self._first_way(exchanges[i]) for i in found}

    def _first_way(self, exchange: Exchange) -> str:
        """Earlier if matmuls make the operand block by block, over ops between, or directly once cut; else later."""
        try:
            found = origins(exchange, self.group_size)
            way = EARLIER if found and (exchange.passed or products_beside(exchange.start, self.fuse)) else LATER
        except CannotFuse:
            way = LATER
        self.reasons[exchange.start.name] = exchange.obstacle
        return way

    def cut(self, graph: Graph, earlier: Iterable[int], later: Iterable[int]) -> dict[int, Exchange]:
        """Cut the matmuls that are in the way of these; returns all exchanges."""
        exchanges = self.exchanges(graph)
        cut_matmuls.cut(graph, *({exchanges[i].start for i in each} for each in (earlier, later)))
        return self.exchanges(graph)

    def exchanges(self, graph: Graph) -> dict[int, Exchange]:
        found = {}
        starts = [each for each in collectives.find(graph, "all_to_all") if each.args[3] == self.group_name]
        for i, start in enumerate(starts):
            try:
                found[i] = Exchange.of(start, collectives.read(start).wait, self.group_size)
            except CannotFuse:
                continue
        return found


class _Moved:
    """One attempt: a copy of the graph with the exchanges in ``ways`` moved."""

    def __init__(self, graph: Graph, rounds: _Rounds, ways: dict[int, str]) -> None:
        self.graph, self.rounds, self.ways = graph, rounds, ways
        self.failed = 0  # bits of exchanges, as everywhere below
        self.roots: list[tuple[Node, int]] = []  # (replacement, bits of the exchanges behind it)
        with held_outputs(graph):
            exchanges = rounds.cut(graph, *([i for i in ways if ways[i] == way] for way in (EARLIER, LATER)))
            self.sent = {1 << i: exchanges[i] for i in ways}
            device = value(exchanges[next(iter(ways))].sent).device
            self.mover = Mover(graph, rounds.group_name, rounds.group_size, device)
            self.before = {bit: seconds_left(collectives.read(each.start), []) for bit, each in self.sent.items()}
            self._move()
            self.losing = self.failed or self._without_gain()

    def _move(self) -> None:
        mover = self.mover
        earlier = {bit: each for bit, each in self.sent.items() if self.ways[bit.bit_length() - 1] == EARLIER}
        later = {bit: each for bit, each in self.sent.items() if bit not in earlier}
        for each in later.values():
            mover.places[each.received], mover.given[each.received] = each.place, each.sent
        for bit, each in earlier.items():
            self._attempt(bit, self._seed, each)
        infer(mover)
        self.behind = behind = Behind(mover, {each.received: bit for bit, each in later.items()})
        new = {}
        for bit, each in earlier.items():
            new[each.received] = self._attempt(bit, mover.exchanged, each.sent, each.place), bit
        for node, feeds_matmul in behind.locals.items():
            bits = behind.nodes[node]
            new[node] = self._attempt(bits, mover.local, node, feeds_matmul), bits
        if self.failed:
            return
        for old, (node, bits) in new.items():
            self.roots.append((node, bits))
            stand_for(old, node)
            old.replace_all_uses_with(node, delete_user_cb=lambda user: user not in mover.created)
        for node in [*new, *reversed(behind.nodes), *reversed(list(mover.created))]:
            mover.rewriter.erase_unused(node)
        sort(self.graph)

    def _attempt(self, bits: int, act: Callable[..., Any], *args: Any) -> Any:
        try:
            return act(*args)
        except CannotFuse as reason:
            self.failed |= bits
            self.rounds.reasons |= {each.start.name: str(reason) for bit, each in self.sent.items() if bit & bits}

    def _seed(self, exchange: Exchange) -> None:
        for node, place in origins(exchange, self.rounds.group_size).items():
            if self.mover.seeds.setdefault(node, place) != place:
                raise CannotFuse("a matmul's result is exchanged along two dims")
            self.mover.places[node] = place

    def _without_gain(self) -> int:
        """Bits of the exchanges that cost no less after the move, summed over those that move together."""
        owners = self._owners()
        parts: list[int] = []  # bits that share an exchange, directly or not
        for bits in [*self.sent, *owners.values()]:
            shared = [part for part in parts if part & bits]
            parts = [part for part in parts if not part & bits] + [functools.reduce(operator.or_, shared, bits)]
        for start, bits in owners.items():
            passed = dict.fromkeys(name for bit in self.sent if bit & bits for name in self._passed(bit))
            start.meta[ORIGIN] = bits
            start.meta[NOTE] = f"moved over {', '.join(passed)}" if passed else ""
        self.together = {
            start: len(starts)
            for purpose in PURPOSES
            for starts in small.alike(self.graph, purpose)
            for start in starts
        }
        losing = 0
        for part in parts:
            before = sum(self.before[bit] for bit in self.sent if bit & part)
            after = sum(self._seconds(start) for start, bits in owners.items() if bits & part)
            if after >= before:
                losing |= part
                for each in (each for bit, each in self.sent.items() if bit & part):
                    if not self.rounds.reasons[each.start.name]:
                        self.rounds.reasons[each.start.name] = "a move would cost what it saves"
        return losing

    def _passed(self, bit: int) -> list[str]:
        return self.behind.passed(bit) or self.sent[bit].passed

    def _owners(self) -> dict[Node, int]:
        """New collective -> bits of the exchanges that need it."""
        owners: dict[Node, int] = {}
        given = {each.sent: bit for bit, each in self.sent.items() if each.received in self.mover.given}
        for root, bits in self.roots:
            stack, seen, starts = [root], {root}, []
            while stack:
                node = stack.pop()
                bits |= given.get(node, 0)
                if node in self.mover.created:
                    if collectives.kind_of(node):
                        starts.append(node)
                    stack += [each for each in node.all_input_nodes if each not in seen]
                    seen.update(node.all_input_nodes)
            for start in starts:
                owners[start] = owners.get(start, 0) | bits
        return owners

    def _seconds(self, start: Node) -> float:
        if SMALL not in start.meta:
            return seconds_left(collectives.read(start), products_beside(start, self.rounds.fuse))
        return seconds_left(collectives.read(start), []) - _latency(start) * (1 - 1 / self.together[start])


def _latency(start: Node) -> float:
    device_type = value(start).device.type
    return DEFAULTS.get(device_type, DEFAULTS["cuda"]).backend_latency[collectives.STARTS[start.target]]  # type: ignore[index]


def _otherwise(ways: dict[int, str], losing: int) -> dict[int, str]:
    """Other ways for the exchanges that lose: first later for all that moved earlier, then not at all."""
    lost = {i: way for i, way in ways.items() if losing >> i & 1}
    retry = [i for i, way in lost.items() if way == EARLIER]
    if retry:
        return ways | dict.fromkeys(retry, LATER)
    return {i: way for i, way in ways.items() if i not in lost}
