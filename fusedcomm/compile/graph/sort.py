"""Puts every node of a graph behind its inputs, after a rewrite."""

import heapq
from itertools import pairwise

from torch.fx import Graph

from fusedcomm.compile.graph.effects import has_effects


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
