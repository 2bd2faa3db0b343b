"""Side effects of nodes, as writes to memory, random numbers, checks and prints; and the order that keeps them."""

import heapq
import operator
from collections.abc import Iterable
from itertools import pairwise

import torch
from torch._ops import HigherOrderOperator
from torch.fx import Graph, Node

from fusedcomm.compile.graph.collectives import POINT_TO_POINT, has_parts_of_other_sizes, kind_of


def is_builtin(node: Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__module__", "") in ("_operator", "math")


def has_effects(node: Node) -> bool:
    """Whether node does more than write memory. Random ops, checks, prints and inputs keep the program's order."""
    if node.op in ("get_attr", "output"):
        return False
    if node.op != "call_function":
        return True
    if isinstance(node.target, torch._ops.OpOverload):
        if kind_of(node) is not None or node.target._schema.name.startswith("_c10d_functional::wait"):
            return False
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            return True
        if node.target._schema.is_mutable:
            return False
        return node.is_impure()
    return not is_builtin(node)  # a higher-order op may draw random numbers inside


def has_messages(nodes: Iterable[Node]) -> bool:
    """Whether any node sends from point to point: the peer's graph is another, so no plan is common to all ranks."""
    return any(kind_of(node) in POINT_TO_POINT for node in nodes)


def differs_by_rank(nodes: Iterable[Node]) -> bool:
    """Whether peers have other graphs, so that a plan's inputs, sizes and nodes, differ by rank."""
    nodes = list(nodes)
    return has_messages(nodes) or any(map(has_parts_of_other_sizes, nodes))


def writes_before_end(graph: Graph) -> bool:
    """Whether any node but the last ones writes to memory; AOTAutograd leaves such writes at the end only."""
    wrote = False
    for node in graph.nodes:
        if is_write(node):
            wrote = True
        elif wrote and node.op != "output":
            return True
    return False


def is_write(node: Node) -> bool:
    if node.op in ("call_method", "call_module"):
        return True  # nothing tells whether it writes
    if node.op != "call_function":
        return False
    if isinstance(node.target, HigherOrderOperator):
        return node.target.name().endswith("mutation")
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable and node.target._schema.name != "_c10d_functional::wait_tensor"
    return node.target is operator.setitem


def sort(graph: Graph) -> None:
    """Put every node behind its inputs, and otherwise keep the order; nodes with effects keep theirs strictly.

    The graph may write to memory at its end only.
    """
    nodes = list(graph.nodes)
    index = {node: i for i, node in enumerate(nodes)}
    after: list[list[int]] = [[] for _ in nodes]
    missing = [0] * len(nodes)
    effects = [i for i, node in enumerate(nodes) if has_effects(node)]
    edges = [(index[each], i) for i, node in enumerate(nodes) for each in node.all_input_nodes]
    for before, behind in [*edges, *pairwise(effects)]:
        after[before].append(behind)
        missing[behind] += 1
    ready = [i for i, count in enumerate(missing) if count == 0]
    last = None
    while ready:
        node = nodes[heapq.heappop(ready)]
        if last is not None and last.next is not node:
            last.append(node)
        last = node
        for behind in after[index[node]]:
            missing[behind] -= 1
            if missing[behind] == 0:
                heapq.heappush(ready, behind)
