"""The region of a move: the ops between an exchange and the matmuls before it, or behind it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import Node

from fusedcomm.compile.commute.mover import REARRANGES, Mover
from fusedcomm.compile.commute.places import REDUCTIONS, Place, is_elementwise, is_tensor, rule, shape, tensors
from fusedcomm.compile.graph.effects import has_effects, is_write
from fusedcomm.compile.graph.layout import CannotFuse, quotient, refuse
from fusedcomm.compile.graph.matmuls import MATMULS, name_of
from fusedcomm.compile.graph.sequence import is_fill
from fusedcomm.compile.graph.views import WAIT, is_cast, source

aten = torch.ops.aten
EARLIER, LATER = "earlier", "later"


@dataclass
class Exchange:
    """An all_to_all of the graph. It swaps the blocks of dim 0 of ``sent``, which are ``place``."""

    start: Node
    sent: Node
    received: Node
    place: Place
    passed: list[str] = field(default_factory=list)  # names of the ops that it may move before
    obstacle: str = ""  # between it and matmuls before it

    @staticmethod
    def of(start: Node, wait: Node, group_size: int) -> Exchange:
        sent: Node = start.args[0]  # type: ignore[assignment]
        inner = quotient(shape(sent)[0], group_size)
        assert inner is not None  # the splits are even
        while len(wait.users) == 1 and next(iter(wait.users)).target is WAIT:
            wait = next(iter(wait.users))
        refuse(not wait.users, "nothing reads its result")
        return Exchange(start, sent, wait, Place(-len(shape(sent)), inner))


def origins(exchange: Exchange, group_size: int) -> dict[Node, Place]:
    """The matmuls that the operand is computed from block by block; notes the ops on the way in ``passed``."""
    seeds: dict[Node, Place] = {}
    stack, seen = [(exchange.sent, exchange.place)], set()
    while stack:
        node, place = stack.pop()
        if (node, place) in seen or node.op != "call_function" or is_fill(node):
            continue
        seen.add((node, place))
        if node.target in MATMULS:
            if seeds.setdefault(node, place) != place:
                raise CannotFuse("a matmul's result is exchanged along two dims")
            continue
        try:
            backs = [(each, rule(node, each).back(place, group_size, node)) for each in tensors(node)]
        except CannotFuse as reason:  # a tensor like any other: it is exchanged itself
            exchange.obstacle = exchange.obstacle or str(reason)
            continue
        if node.target not in REARRANGES and name_of(node) not in exchange.passed:
            exchange.passed.insert(0, name_of(node))
        stack += [(each, back) for each, back in backs if back is not None]
    return seeds


def infer(mover: Mover) -> None:
    """Note the place of the blocks in each node computed from blocks. A node that mixes blocks ends a region."""
    for node in mover.graph.nodes:
        is_computed = node.op == "call_function" and node not in mover.places and is_tensor(node)
        if is_computed and any(each in mover.places for each in tensors(node)):
            try:
                mover.places[node] = _place(mover, node)
            except CannotFuse:
                continue


def _place(mover: Mover, node: Node) -> Place | None:
    refuse(node.target in MATMULS or is_write(node) or has_effects(node), f"{name_of(node)} stands between")
    if mover.is_sum_over_blocks(node):
        return None
    operands, found = tensors(node), []
    for each in operands:
        own = mover.places.get(each)
        if own is not None:
            found.append(rule(node, each).forward(own, mover.group_size, node))
    if not found:
        for each in operands:
            rule(node, each)
        refuse(not (node.target in REARRANGES | REDUCTIONS or is_elementwise(node)), f"{name_of(node)} stands between")
        return None
    refuse(len(set(found)) > 1, f"{name_of(node)} joins different blocks")
    for each in operands:
        if each not in mover.places or mover.places[each] is None:
            rule(node, each).back(found[0], mover.group_size, node)
    return found[0]


class Behind:
    """Nodes computed from exchanges that move later, and the ones needed in the program's layout."""

    def __init__(self, mover: Mover, received: dict[Node, int]) -> None:
        """``received``: result of an exchange -> its bit."""
        self.mover, self.received = mover, received
        self.nodes: dict[Node, int] = {}  # in the graph's order, with the bits of the exchanges it is computed from
        for node in mover.graph.nodes:
            bits = received.get(node, 0)
            if not bits and node in mover.places:
                for each in node.all_input_nodes:
                    bits |= self.nodes.get(each, 0)
            if bits:
                self.nodes[node] = bits
        self._leave_out_what_has_no_blocks()
        self.locals: dict[Node, bool] = {}  # to be made local; whether for a matmul
        for node in self.nodes:
            if any(user.target in MATMULS for user in node.users):
                self.locals[self._root(node)] = True
        self._add_other_locals()

    def passed(self, bit: int) -> list[str]:
        """Names of the ops over which the exchange of this bit moves."""
        names: dict[str, None] = {}
        for node, bits in self.nodes.items():
            if bits & bit and not (node in self.received or node in self.at_hand or node.target in REARRANGES):
                names[name_of(node)] = None
        return list(names)

    def _leave_out_what_has_no_blocks(self) -> None:
        """Sums over blocks are local again at once, unless a node with blocks is computed from them."""
        for node in reversed(list(self.nodes)):
            has_no_blocks = self.mover.places[node] is None and not self.mover.is_sum_over_blocks(node)
            if has_no_blocks and not any(user in self.nodes for user in node.users):
                del self.nodes[node]

    def _root(self, node: Node) -> Node:
        """The first of the views that lead to node: one exchange there serves all of them."""
        while node not in self.received and not is_cast(node) and (operand := source(node)) in self.nodes:
            node = operand  # type: ignore[assignment]
        return node

    def _add_other_locals(self) -> None:
        """Add nodes read in the program's layout that cannot be computed from local ones."""
        self.at_hand: set[Node] = set()
        for node in self.nodes:
            inputs = [each for each in node.all_input_nodes if each in self.nodes]
            if node in self.locals or (inputs and node not in self.received and self.at_hand.issuperset(inputs)):
                self.at_hand.add(node)
            elif any(user not in self.nodes for user in node.users):
                root = self._root(node)
                self.locals.setdefault(root, False)
                self.at_hand |= {root, node}
